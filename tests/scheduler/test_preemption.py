"""Who gives way when pages run out, and who goes first when they come back."""

import pytest

from jaxllm.scheduler import Request, RequestOptions, RequestStatus


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_the_least_urgent_youngest_gives_way_and_comes_back_first(make_loop, expect_alone, num_ahead):
    loop = make_loop(num_ahead, num_pages=25, max_model_len=64, max_num_seqs=3)
    old = Request("old", [1] * 20, max_tokens=40)
    urgent = Request("urgent", [2] * 20, max_tokens=40, options=RequestOptions(priority=-1))
    young = Request("young", [3] * 20, max_tokens=40)
    later = Request("later", [4] * 4, max_tokens=4)
    loop.add(old, urgent, young)
    preempted = []
    while not later.status.is_finished:
        loop.step()
        for request in (old, urgent, young):
            if request.status is RequestStatus.PREEMPTED and request not in preempted:
                preempted.append(request)
        if preempted == [young] and "later" not in loop.streams and loop.scheduler.num_waiting == 1:
            loop.add(later)
        assert later.row is None or young.status is not RequestStatus.PREEMPTED, "later overtook young"
    loop.run()
    assert preempted[0] is young
    assert urgent not in preempted
    for request in (old, urgent, young, later):
        assert request.output_token_ids == expect_alone(request, loop.config)
    assert loop.scheduler.stats().num_recomputed_tokens >= 20


def test_waiting_requests_start_by_priority_then_arrival(make_loop):
    loop = make_loop(max_num_seqs=1)
    loop.add(
        Request("c", [1], max_tokens=1, options=RequestOptions(priority=1)),
        Request("b", [1], max_tokens=1, arrival_time=5.0),
        Request("a2", [1], max_tokens=1, arrival_time=3.0),
        Request("a3", [1], max_tokens=1, arrival_time=3.0),
        Request("first", [1], max_tokens=1, options=RequestOptions(priority=-1), arrival_time=9.0),
    )
    loop.run()
    assert list(loop.streams) == ["first", "a2", "a3", "b", "c"]


def test_an_urgent_prompt_takes_the_pages_of_less_urgent_rows(make_loop, expect_alone):
    """It is admitted with enough pages in sight, which decodes then use up while it is read in chunks."""
    loop = make_loop(num_pages=20, max_model_len=64, max_num_batched_tokens=8)
    slow = [
        Request(f"slow{index}", [index] * 4, max_tokens=30, options=RequestOptions(priority=1)) for index in range(3)
    ]
    loop.add(*slow)
    for _ in range(4):
        loop.step()
    urgent = Request("urgent", [9] * 50, max_tokens=10)
    loop.add(urgent)
    while not urgent.status.is_finished:
        loop.step()
        assert urgent.status is not RequestStatus.PREEMPTED
    loop.run()
    assert loop.scheduler.stats().num_preemptions > 0
    for request in [urgent, *slow]:
        assert request.output_token_ids == expect_alone(request, loop.config)


def test_a_less_urgent_prompt_waits_for_pages_and_takes_none(make_loop, expect_alone):
    loop = make_loop(num_pages=20, max_model_len=64, max_num_batched_tokens=8)
    urgent = [Request(f"urgent{index}", [index] * 4, max_tokens=20) for index in range(3)]
    loop.add(*urgent)
    for _ in range(4):
        loop.step()
    slow = Request("slow", [9] * 50, max_tokens=10, options=RequestOptions(priority=1))
    loop.add(slow)
    while not all(request.status.is_finished for request in urgent):
        loop.step()
        assert all(request.status is not RequestStatus.PREEMPTED for request in urgent)
    loop.run()
    for request in [slow, *urgent]:
        assert request.output_token_ids == expect_alone(request, loop.config)


@pytest.mark.parametrize(("num_pages", "starts"), [(1 + 6 + 3 + 1, False), (1 + 6 + 3 + 2, True)])
def test_a_request_starts_only_if_each_running_row_keeps_its_next_page(make_loop, num_pages, starts):
    loop = make_loop(num_pages=num_pages, max_model_len=32)
    loop.add(*(Request(f"running{index}", [index] * 10, max_tokens=9) for index in range(2)))
    loop.step()
    newcomer = Request("newcomer", [2] * 12, max_tokens=1)
    loop.add(newcomer)
    loop.schedule()
    assert (newcomer.status is not RequestStatus.WAITING) == starts
    loop.update()
    loop.run()


def test_half_read_prompts_never_wait_for_each_others_pages(make_loop):
    """Each needs 15 of 20 pages. Admitted together, both would hold half and neither could go on."""
    loop = make_loop(num_pages=21, max_model_len=64, max_num_batched_tokens=16)
    loop.add(*(Request(name, [1] * 60, max_tokens=2) for name in ("a", "b")))
    loop.run()
    assert loop.scheduler.stats().num_preemptions == 0
    assert list(loop.streams) == ["a", "b"]


def test_tokens_generated_before_a_preemption_are_kept(make_loop):
    loop = make_loop(num_pages=9, max_model_len=32)
    first, second = (Request(name, [7] * 10, max_tokens=22) for name in ("first", "second"))
    loop.add(first, second)
    while second.status is not RequestStatus.PREEMPTED:
        loop.step()
    kept = second.output_token_ids
    assert kept == loop.streams["second"]
    assert second.prompt_token_ids == [7] * 10
    loop.run()
    assert second.output_token_ids[: len(kept)] == kept
    assert second.output_token_ids == loop.streams["second"], "a token reported twice"
