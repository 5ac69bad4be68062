"""What a scheduler must do that no other file here is about, one behaviour each."""

import numpy as np
import pytest

from jaxllm.scheduler import Request, RequestOptions, RequestRefusedError, RequestStatus, SchedulerBusyError


def test_a_full_queue_refuses_at_once_by_requests_and_by_tokens(make_loop):
    loop = make_loop(max_num_seqs=1, max_queued_requests=2, max_queued_tokens=30)
    loop.add(Request("a", [1] * 10, max_tokens=3), Request("b", [1] * 10, max_tokens=3))
    with pytest.raises(SchedulerBusyError, match="2 requests are queued; max_queued_requests is 2") as busy:
        loop.add(Request("c", [1], max_tokens=3))
    assert not isinstance(busy.value, RequestRefusedError), "it may be sent again"
    loop.step()
    with pytest.raises(SchedulerBusyError, match="has 21 tokens and 10 are queued; max_queued_tokens is 30"):
        loop.add(Request("c", [1] * 21, max_tokens=3))
    with pytest.raises(ValueError, match="more than the queue may hold"):
        loop.add(Request("c", [1] * 31, max_tokens=3))
    loop.add(Request("c", [1] * 20, max_tokens=3))
    loop.run()
    assert list(loop.streams) == ["a", "b", "c"]


def test_a_request_that_is_not_ready_counts_in_the_queue_and_keeps_its_place(make_loop):
    loop = make_loop(max_num_seqs=1, max_queued_requests=3)
    slow = Request("slow", [1] * 5, max_tokens=2, is_ready=False)
    loop.add(Request("first", [1], max_tokens=9), slow)
    loop.step()
    loop.add(Request("later", [1], max_tokens=1))
    assert loop.scheduler.num_waiting == 2
    assert loop.scheduler.stats().num_queued_tokens == 6
    assert not loop.scheduler.input_ready("later")
    assert loop.scheduler.input_ready("slow")
    assert slow.status is RequestStatus.WAITING
    assert not loop.scheduler.input_ready("slow")
    loop.run()
    assert list(loop.streams) == ["first", "slow", "later"]


@pytest.mark.parametrize("num_ahead", [1, 2, 3])
def test_output_that_arrives_for_a_preempted_request_is_still_appended(make_loop, expect_alone, num_ahead):
    loop = make_loop(num_ahead, num_pages=9, max_model_len=32)
    first, second = (Request(name, [index] * 10, max_tokens=22) for index, name in enumerate(("first", "second")))
    loop.add(first, second)
    while second.status is not RequestStatus.PREEMPTED:
        loop.schedule()
        if len(loop.in_flight) > num_ahead and second.status is not RequestStatus.PREEMPTED:
            loop.update()
    known, num_awaited = second.num_output_tokens, second.num_awaited_plans
    assert num_awaited > 0
    for number in range(num_awaited):
        while second.num_awaited_plans == num_awaited - number:
            loop.update()
        assert second.status is RequestStatus.PREEMPTED
        assert second.num_output_tokens == known + number + 1
    loop.run()
    for request in (first, second):
        assert request.output_token_ids == expect_alone(request, loop.config) == loop.streams[request.request_id]


def test_a_preempted_request_may_end_with_the_token_that_was_on_its_way(make_loop, expect_alone):
    loop = make_loop(1)
    request = Request("a", [1, 2, 3], max_tokens=4)
    loop.add(request)
    while request.num_output_tokens < 3:
        loop.step()
    if not loop.in_flight:
        loop.schedule()
    loop.scheduler.reset_prefix_cache(force=True)
    assert request.status is RequestStatus.PREEMPTED
    assert loop.update().finished == [request]
    loop.scheduler.check_integrity()
    assert request.output_token_ids == expect_alone(request, loop.config)
    loop.run()


def test_a_token_on_its_way_from_a_failed_step_is_not_waited_for(make_loop, expect_alone):
    loop = make_loop(2)
    request, other = Request("a", [1, 2, 3], max_tokens=9), Request("b", [4, 5], max_tokens=9)
    loop.add(request, other)
    loop.step()
    loop.step()
    loop.schedule()
    loop.scheduler.reset_prefix_cache(force=True)
    assert request.num_awaited_plans == 3
    failed = loop.in_flight.popleft()[0]
    assert failed.samples.all()
    loop.device._queue.popleft()
    for name in ("a", "b"):
        loop.scheduler.finish_request(name, RequestStatus.FINISHED_ERROR)
    again = Request("a", [1, 2, 3], max_tokens=9)
    loop.add(again)
    loop.run()
    assert again.output_token_ids == expect_alone(again, loop.config)


def test_who_was_preempted_does_not_wait_for_a_step_that_failed(make_loop, expect_alone):
    """Nothing else runs, so no later plan's result tells."""
    loop = make_loop(1, num_pages=9, max_model_len=32)
    first, second = (Request(name, [index] * 10, max_tokens=22) for index, name in enumerate(("first", "second")))
    loop.add(first, second)
    while second.status is not RequestStatus.PREEMPTED:
        loop.schedule()
        if len(loop.in_flight) > 1 and second.status is not RequestStatus.PREEMPTED:
            loop.update()
    assert second.num_awaited_plans > 0
    loop.scheduler.finish_request("first", RequestStatus.FINISHED_ERROR)
    while loop.in_flight:
        loop.scheduler.drop(loop.in_flight.popleft()[0])
    loop.run()
    assert second.output_token_ids == expect_alone(second, loop.config)


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_min_tokens_suppresses_stops(make_loop, expect_alone, num_ahead):
    loop = make_loop(num_ahead)
    stops = tuple(range(0, 61, 2))
    requests = [
        Request(f"r{least}", [5, 6], max_tokens=30, min_tokens=least, stop_token_ids=stops) for least in (0, 5, 30)
    ]
    loop.add(*requests)
    loop.run()
    for request in requests:
        assert request.output_token_ids == expect_alone(request, loop.config)
        assert request.num_output_tokens >= request.min_tokens
    assert requests[0].num_output_tokens < 5
    assert requests[2].num_output_tokens == 30


def test_requests_of_a_low_stop_bit_in_common_do_not_stop_each_other(make_loop, expect_alone):
    """Stop tokens are looked up by their low 16 bits."""
    loop = make_loop()
    requests = [
        Request("mine", [1], max_tokens=40, stop_token_ids=(3, 17)),
        Request("theirs", [2], max_tokens=40, stop_token_ids=tuple(65536 + token for token in range(61))),
    ]
    loop.add(*requests)
    loop.run()
    for request in requests:
        assert request.output_token_ids == expect_alone(request, loop.config)


@pytest.mark.parametrize("num_ahead", [0, 1, 2])
@pytest.mark.parametrize("num_chunk_tokens", [16, 1])
def test_a_partial_chunk_yields_no_token_and_the_last_exactly_one(make_loop, num_ahead, num_chunk_tokens):
    loop = make_loop(num_ahead, max_num_seqs=1, max_num_batched_tokens=num_chunk_tokens)
    request = Request("a", list(range(50)), max_tokens=1)
    loop.add(request)
    outputs = []
    while loop.scheduler.has_unfinished_requests:
        if loop.schedule() is None or len(loop.in_flight) > num_ahead:
            outputs.append(loop.update().token_ids.size)
    assert outputs == [0] * (-(-50 // num_chunk_tokens) - 1) + [1]
    assert not loop.in_flight


def test_nothing_runs_past_max_tokens_when_steps_ahead(make_loop):
    loop = make_loop(3, max_num_seqs=4)
    requests = [Request(f"r{index}", [index], max_tokens=index + 1) for index in range(4)]
    loop.add(*requests)
    loop.run()
    scheduled = np.zeros(4, int)
    for plan in loop.plans:
        scheduled[plan.rows] += plan.num_scheduled_tokens
    assert scheduled.sum() == sum(1 + request.max_tokens - 1 for request in requests)


def test_rows_held_by_waiting_ones_never_lock_the_scheduler(make_loop, expect_alone):
    """Prompts that each need nearly all pages, of all priorities, with drafts of none, far ahead of the device."""
    loop = make_loop(3, num_pages=17, max_model_len=64, max_num_batched_tokens=8)
    requests = [
        Request(f"r{index}", [index] * 55, max_tokens=6, options=RequestOptions(priority=-index % 3))
        for index in range(7)
    ]
    loop.add(*requests)
    loop.run()
    for request in requests:
        assert request.output_token_ids == expect_alone(request, loop.config)


def test_every_state_has_a_count_and_the_queue_an_age(make_loop):
    loop = make_loop(max_num_seqs=2, max_num_batched_tokens=8, num_pages=33)
    loop.add(Request("decoding", [1], max_tokens=9), Request("unready", [1], max_tokens=1, is_ready=False))
    loop.step()
    loop.add(*(Request(name, [2] * 20, max_tokens=9, arrival_time=3.0) for name in ("prefilling", "waiting")))
    loop.clock.now = 5.0
    loop.step()
    stats = loop.scheduler.stats()
    counts = {status.value: number for status, number in stats.num_requests.items() if number}
    assert counts == {"decoding": 1, "prefilling": 1, "waiting": 1, "waiting_for_input": 1}
    assert set(stats.num_requests) == set(RequestStatus)
    assert stats.queue_age_s == 2.0
    assert (stats.last_step.num_decode_tokens, stats.last_step.num_prefill_tokens) == (1, 7)
    assert stats.last_step.budget_use == 1.0
    assert stats.all_steps.num_budget_tokens == 16
    assert stats.all_steps.budget_use == 9 / 16
    assert stats.steps_by_size == (1, 0, 0, 1), "steps of 1 and 8 tokens"
    loop.scheduler.input_ready("unready")
    loop.run()
    total = loop.scheduler.stats().all_steps
    assert total.num_decode_tokens + total.num_prefill_tokens == sum(plan.num_tokens for plan in loop.plans)
