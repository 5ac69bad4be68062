"""A request's status moves only along the arrows, and its tokens are one list wherever they live."""

import itertools

import numpy as np
import pytest

from jaxllm.scheduler import Request, RequestStatus

FINISHED = {status for status in RequestStatus if status.is_finished}


def test_no_status_leaves_finished_and_every_other_one_may_finish():
    assert {status.name for status in FINISHED} == {
        "FINISHED_STOP",
        "FINISHED_LENGTH",
        "FINISHED_ABORT",
        "FINISHED_TIMEOUT",
        "FINISHED_ERROR",
    }
    for old, new in itertools.product(RequestStatus, RequestStatus):
        if old in FINISHED:
            assert not old.may_become(new)
        elif new in FINISHED:
            assert old.may_become(new)


def test_only_waiting_and_preempted_requests_start_and_only_running_ones_are_preempted():
    def sources(new):
        return {old.value for old in RequestStatus if old.may_become(new)}

    assert sources(RequestStatus.PREFILLING) == {"waiting", "preempted"}
    assert sources(RequestStatus.DECODING) == {"prefilling"}
    assert sources(RequestStatus.WAITING_FOR_PAGES) == {"waiting", "preempted"}
    assert sources(RequestStatus.PREEMPTED) == {"prefilling", "decoding", "waiting_for_pages"}
    assert sources(RequestStatus.WAITING) == {"waiting_for_input", "waiting_for_pages"}
    assert sources(RequestStatus.WAITING_FOR_INPUT) == set()


def test_a_move_that_does_not_exist_is_our_own_mistake():
    request = Request("a", [1], max_tokens=1)
    with pytest.raises(AssertionError, match="cannot become preempted"):
        request.move_to(RequestStatus.PREEMPTED)


def test_a_request_is_prefilling_until_one_token_is_left(make_loop):
    loop = make_loop(max_num_batched_tokens=8)
    request = Request("a", [1] * 18, max_tokens=3)
    loop.add(request)
    statuses = [request.status.value]
    while not request.status.is_finished:
        loop.schedule()
        statuses.append(request.status.value)
        loop.update()
    statuses.append(request.status.value)
    assert statuses == ["waiting", *["prefilling"] * 2, *["decoding"] * 3, "finished_length"]


def test_a_request_keeps_its_own_copy_of_the_prompt():
    prompt = np.array([1, 2, 3], np.int32)
    request = Request("a", prompt, max_tokens=1)
    prompt[:] = 0
    assert request.prompt_token_ids == [1, 2, 3]
    request.prompt_token_ids.append(4)
    assert request.num_tokens == request.num_prompt_tokens == 3


def test_a_request_names_itself_for_logs(make_loop):
    loop = make_loop()
    request = Request("a", [1, 2], max_tokens=3)
    loop.add(request)
    loop.step()
    assert repr(request) == "Request('a', decoding, 2 prompt tokens, 1 output tokens)"
