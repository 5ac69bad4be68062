"""Several continuations of one prompt are as many requests to the core."""

import pytest

from jaxllm import OverloadedError
from jaxllm.engine.core import add_choices
from jaxllm.engine.core_request import CoreRequest


class Core:
    """Has room for `room` requests."""

    def __init__(self, room=9):
        self.room, self.requests = room, {}

    def add_request(self, request):
        if len(self.requests) == self.room:
            raise OverloadedError("full")
        self.requests[request.request_id] = request

    def end_request(self, request_id, reason):
        assert reason == "abort"
        del self.requests[request_id]


@pytest.mark.parametrize(("seeds", "names"), [([7], ["a"]), ([7, None, 9], ["a#0", "a#1", "a#2"])])
def test_each_choice_has_a_name_and_a_seed_of_its_own(seeds, names):
    core, request = Core(), CoreRequest(request_id="a", prompt_token_ids=[1, 2])
    assert add_choices(core, request, seeds) == names
    assert list(core.requests) == names
    assert [request.seed for request in core.requests.values()] == seeds
    assert all(choice.prompt_token_ids is request.prompt_token_ids for choice in core.requests.values())
    other = Core()
    assert add_choices(other, request, seeds, key_of=lambda name: name + "~2") == [name + "~2" for name in names]
    assert list(other.requests) == [name + "~2" for name in names]


def test_all_choices_are_queued_or_none():
    core = Core(room=3)
    add_choices(core, CoreRequest(request_id="first", prompt_token_ids=[1]), [None])
    with pytest.raises(OverloadedError):
        add_choices(core, CoreRequest(request_id="a", prompt_token_ids=[1]), [None] * 3)
    assert list(core.requests) == ["first"]
