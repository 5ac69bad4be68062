"""A request ends when its time is over, in whatever state it is."""

import pytest

from jaxllm.scheduler import Request, RequestOptions, RequestRefusedError, RequestStatus


def reach(loop, state):
    """Brings the request "late", which has a deadline at 1 s, into a state."""
    late = Request(
        "late",
        [1] * 20,
        max_tokens=45,
        options=RequestOptions(timeout_s=1.0),
        is_ready=state is not RequestStatus.WAITING_FOR_INPUT,
    )
    if state is RequestStatus.PREEMPTED:
        loop.add(Request("first", [2] * 10, max_tokens=60))
    if state is RequestStatus.WAITING_FOR_PAGES:
        for prompt in ([1] * 20, [2] * 60):
            loop.add(Request("first", prompt, max_tokens=10))
            loop.run()
    loop.add(late)
    while late.status is not state:
        assert not late.status.is_finished
        loop.step()
    return late


@pytest.mark.parametrize("num_ahead", [0, 1])
@pytest.mark.parametrize("state", [status for status in RequestStatus if not status.is_finished])
def test_deadlines_fire_in_every_state(make_loop, expect_alone, state, num_ahead):
    loop = make_loop(num_ahead, max_num_batched_tokens=8, num_pages=19, max_model_len=70, num_host_pages=32)
    late = reach(loop, state)
    loop.clock.now = 0.999
    assert loop.scheduler.expire() == []
    loop.clock.now = 1.0
    assert loop.scheduler.expire() == [late]
    loop.scheduler.check_integrity()
    assert late.status is RequestStatus.FINISHED_TIMEOUT
    output = late.output_token_ids
    assert output == expect_alone(late, loop.config)[: len(output)]
    assert loop.scheduler.expire() == []
    loop.run()
    assert loop.scheduler.stats().num_requests[RequestStatus.FINISHED_TIMEOUT] == 1


def test_a_queue_deadline_ends_only_who_has_not_started(make_loop):
    loop = make_loop(max_num_seqs=1)
    first, second, unready = (
        Request(
            name,
            [1, 2],
            max_tokens=9,
            options=RequestOptions(queue_timeout_s=1.0, timeout_s=50.0),
            is_ready=name != "unready",
        )
        for name in ("first", "second", "unready")
    )
    loop.add(first, second, unready)
    loop.step()
    loop.clock.now = 60.0
    assert loop.scheduler.expire() == [second, unready, first]


def test_a_deadline_of_one_who_has_left_does_not_end_its_namesake(make_loop):
    loop = make_loop()
    loop.add(Request("a", [1], max_tokens=5, options=RequestOptions(timeout_s=1.0)))
    loop.scheduler.abort_request("a")
    namesake = Request("a", [1], max_tokens=5)
    loop.add(namesake)
    loop.clock.now = 2.0
    assert loop.scheduler.expire() == []
    loop.run()
    assert namesake.status is RequestStatus.FINISHED_LENGTH


@pytest.mark.parametrize("timeout_s", [1e9, float("inf")])
def test_deadlines_of_those_who_have_left_are_forgotten(make_loop, timeout_s):
    loop, options = make_loop(), RequestOptions(timeout_s=timeout_s, queue_timeout_s=timeout_s)
    for _ in range(1000):
        loop.add(Request("a", [1], max_tokens=5, options=options))
        loop.scheduler.abort_request("a")
    assert len(loop.scheduler._deadlines) < 200


def test_a_time_that_is_no_number_is_refused():
    """It would come neither before nor after any other."""
    with pytest.raises(RequestRefusedError, match="request 'a': arrival_time is nan"):
        Request("a", [1], max_tokens=5, arrival_time=float("nan"))
