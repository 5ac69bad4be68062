import copy
import inspect
import pickle
from dataclasses import dataclass, replace

import pytest

from jaxllm.errors import ConfigError, InvalidRequestError
from jaxllm.options import checked_options


@checked_options(ConfigError)
@dataclass(frozen=True, kw_only=True)
class Options:
    """Two of them."""

    page_size: int
    num_pages: int = 2

    def __post_init__(self):
        assert self.page_size


def test_known_options_are_taken_and_the_class_looks_as_before():
    options = Options(page_size=3)
    assert options == Options(page_size=3, num_pages=2) == replace(Options(page_size=4), page_size=3)
    assert options == copy.deepcopy(options) == pickle.loads(pickle.dumps(options))
    assert list(inspect.signature(Options).parameters) == ["page_size", "num_pages"]
    assert Options.__doc__ == "Two of them."


def test_an_unknown_option_is_refused_with_the_closest_and_the_known_ones():
    expected = r"^Options has no option 'num_page'\. Did you mean num_pages\? The options are page_size, num_pages\.$"
    with pytest.raises(ConfigError, match=expected):
        Options(page_size=1, num_page=3)
    with pytest.raises(ConfigError, match=r"^Options has no option 'xyz'\. The options are"):
        Options(xyz=3)
    with pytest.raises(ConfigError, match="'pages'"):
        replace(Options(page_size=1), pages=3)


def test_the_error_is_the_one_asked_for():
    @checked_options(InvalidRequestError)
    @dataclass(kw_only=True)
    class Other:
        a: int = 0

    with pytest.raises(InvalidRequestError, match="Other has no option 'b'"):
        Other(b=1)


def test_a_missing_option_is_pythons_own_error():
    with pytest.raises(TypeError, match="page_size"):
        Options()
