import pytest

from jaxllm.scheduler import Request, RequestOptions, RequestRefusedError


@pytest.mark.parametrize(
    "option",
    [
        {"priority": 2**31},
        {"priority": -(2**31)},
        {"priority": 1.0},
        {"priority": True},
        {"tenant": None},
        {"cache_salt": b"salt"},
        *({name: value} for name in ("timeout_s", "queue_timeout_s") for value in (-1, float("nan"), "5", True)),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_its_name(option):
    (name,) = option
    with pytest.raises(RequestRefusedError, match=f"^{name} is ") as caught:
        RequestOptions(**option)
    assert caught.value.param == name


def test_times_count_from_the_arrival():
    request = Request("a", [1], max_tokens=1, options=RequestOptions(timeout_s=5, queue_timeout_s=0), arrival_time=2.0)
    assert (request.deadline, request.queue_deadline) == (7.0, 2.0)
    request = Request("a", [1], max_tokens=1, arrival_time=2.0)
    assert (request.deadline, request.queue_deadline) == (None, None)
