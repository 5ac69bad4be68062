"""A request may end at any moment; its pages are free at once, and no other request notices."""

import pytest

from jaxllm.scheduler import Request, RequestStatus

# (name, steps to take first, whether a step of the request is then in flight)
MOMENTS = {
    "waiting for input": ("waiting_for_input", lambda loop: loop.step()),
    "waiting": ("waiting", lambda loop: None),
    "prefilling": ("prefilling", lambda loop: loop.step()),
    "prefilling in flight": ("prefilling", lambda loop: loop.schedule()),
    "decoding": ("decoding", lambda loop: [loop.step() for _ in range(6)]),
    "decoding in flight": ("decoding", lambda loop: [*(loop.step() for _ in range(6)), loop.schedule()]),
    "last token in flight": ("decoding", lambda loop: [loop.schedule() for _ in range(16)]),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("num_ahead", [0, 1])
def test_abort_frees_pages_at_once_and_disturbs_nobody(make_loop, expect_alone, moment, num_ahead):
    status, reach = MOMENTS[moment]
    loop = make_loop(num_ahead, max_num_batched_tokens=8)
    leaver = Request("leaver", [1] * 20, max_tokens=12, is_ready=status != "waiting_for_input")
    stayer = Request("stayer", [2] * 9, max_tokens=40)
    loop.add(leaver, stayer)
    reach(loop)
    assert leaver.status.value == status
    assert loop.scheduler.abort_request("leaver")
    loop.scheduler.check_integrity()
    assert leaver.status is RequestStatus.FINISHED_ABORT
    output = leaver.output_token_ids
    num_stayer_pages = 0 if stayer.row is None else int(loop.scheduler.table.num_pages[stayer.row])
    assert loop.scheduler.stats().num_used_pages == num_stayer_pages
    assert not loop.scheduler.abort_request("leaver"), "aborted twice"
    newcomer = Request("leaver", [3] * 7, max_tokens=30)
    loop.add(newcomer)
    loop.run()
    assert leaver.output_token_ids == output == expect_alone(leaver, loop.config)[: len(output)]
    assert stayer.output_token_ids == expect_alone(stayer, loop.config)
    assert newcomer.output_token_ids == expect_alone(newcomer, loop.config)


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_abort_of_a_preempted_request(make_loop, expect_alone, num_ahead):
    loop = make_loop(num_ahead, num_pages=9, max_model_len=32)
    first, second = (Request(name, [7] * 10, max_tokens=22) for name in ("first", "second"))
    loop.add(first, second)
    while second.status is not RequestStatus.PREEMPTED:
        loop.step()
    assert second.num_output_tokens > 0
    assert loop.scheduler.abort_request("second")
    loop.run()
    assert second.status is RequestStatus.FINISHED_ABORT
    assert first.output_token_ids == expect_alone(first, loop.config)


def test_a_finished_or_unknown_request_cannot_be_aborted(make_loop):
    loop = make_loop()
    request = Request("a", [1], max_tokens=1)
    loop.add(request)
    loop.run()
    assert not loop.scheduler.abort_request("a")
    assert not loop.scheduler.abort_request("b")
    assert request.status is RequestStatus.FINISHED_LENGTH


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_a_stop_string_ends_a_request_with_what_it_has(make_loop, num_ahead):
    loop = make_loop(num_ahead)
    request = Request("a", [1], max_tokens=30)
    loop.add(request)
    while request.num_output_tokens < 5:
        loop.step()
    assert loop.scheduler.finish_request("a", RequestStatus.FINISHED_STOP)
    loop.run()
    assert request.status is RequestStatus.FINISHED_STOP
    assert len(request.output_token_ids) == 5


def test_a_row_that_changed_hands_ignores_results_for_its_former_owner(make_loop, expect_alone):
    """The same row and the same pages, while two steps of the former owner are in flight."""
    loop = make_loop(3, max_num_seqs=1, num_pages=9, max_model_len=32)
    old, new = Request("old", [1, 2, 3], max_tokens=20), Request("new", [4, 5, 6], max_tokens=20)
    loop.add(old, new)
    loop.schedule()
    loop.schedule()
    assert (old.row, new.row) == (0, None)
    loop.scheduler.abort_request("old")
    loop.schedule()
    assert new.row == 0
    assert not loop.update().requests
    assert not loop.update().requests
    loop.run()
    assert old.output_token_ids == []
    assert new.output_token_ids == expect_alone(new, loop.config)
