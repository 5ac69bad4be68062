"""A row may compute several tokens at once; what comes of it is what would have come one by one."""

import numpy as np
import pytest

from jaxllm.scheduler import Request, RequestStatus, StepBatch, pick_bucket


def propose(loop, expected, num_drafts, rng=None):
    """Drafts for all requests; right ones, or with `rng` wrong from some place on."""
    drafts = {}
    for request_id, output in expected.items():
        request = loop.scheduler._requests.get(request_id)
        if request is None:
            continue
        draft = output[request.num_output_tokens :][:num_drafts]
        if rng is not None and draft:
            draft[rng.integers(0, len(draft)) :] = [60] * 3
        drafts[request_id] = draft
    loop.scheduler.propose(drafts)


@pytest.mark.parametrize("num_ahead", [0, 1])
@pytest.mark.parametrize("is_right", [True, False])
def test_tokens_are_those_without_drafts(make_loop, expect_alone, num_ahead, is_right):
    loop = make_loop(num_ahead)
    requests = [Request(f"r{index}", [index] * 5, max_tokens=30, stop_token_ids=(11,)) for index in range(6)]
    expected = {request.request_id: expect_alone(request, loop.config) for request in requests}
    loop.add(*requests)
    rng = None if is_right else np.random.default_rng(0)
    while loop.scheduler.has_unfinished_requests:
        if len(loop.plans) % 3 == 2:  # Who is ahead has to wait for the last token before it can draft the next.
            while loop.in_flight:
                loop.update()
        propose(loop, expected, 3, rng)
        loop.step()
    loop.run()
    for request in requests:
        assert request.output_token_ids == expected[request.request_id] == loop.streams[request.request_id]
    stats = loop.scheduler.stats()
    assert stats.all_steps.num_draft_tokens > 0
    if is_right and num_ahead == 0:
        assert stats.num_accepted_tokens == stats.all_steps.num_draft_tokens
        assert len(loop.plans) < 0.5 * max(map(len, expected.values()))


def test_a_stop_inside_several_accepted_tokens_trims_the_rest(make_loop, expect_alone):
    loop = make_loop()
    endless = Request("a", [1, 2, 3], max_tokens=30)
    output = expect_alone(endless, loop.config)
    stop = next(token for index, token in enumerate(output) if index >= 5 and token not in output[:index])
    index = output.index(stop)
    request = Request("a", [1, 2, 3], max_tokens=30, stop_token_ids=(stop,))
    loop.add(request)
    while request.num_output_tokens < index - 1:
        loop.step()
    loop.scheduler.propose({"a": output[index - 1 : index + 3]})
    loop.step()
    assert request.status is RequestStatus.FINISHED_STOP
    assert request.output_token_ids == output[: index + 1] == loop.streams["a"]
    loop.run()


def test_drafts_never_run_past_max_tokens_budget_or_pages(make_loop, expect_alone):
    loop = make_loop(max_num_seqs=3, max_num_batched_tokens=8, num_pages=13, max_model_len=48)
    requests = [Request(f"r{index}", [index] * 4, max_tokens=11) for index in range(3)]
    expected = {request.request_id: expect_alone(request, loop.config) for request in requests}
    loop.add(*requests)
    while loop.scheduler.has_unfinished_requests:
        propose(loop, expected, 9)
        loop.step()
    loop.run()
    assert [request.output_token_ids for request in requests] == list(expected.values())
    assert max(plan.num_tokens for plan in loop.plans) == 8


@pytest.mark.parametrize("leave", ["abort", "preempt"])
def test_who_loses_its_row_while_its_drafts_are_verified(make_loop, expect_alone, leave):
    loop = make_loop(1)
    request = Request("a", [1, 2, 3], max_tokens=30)
    expected = expect_alone(request, loop.config)
    loop.add(request)
    while request.num_output_tokens < 4:
        loop.schedule()
        loop.update()
    loop.scheduler.propose({"a": expected[4:8]})
    plan = loop.schedule()
    assert plan.num_scheduled_tokens.tolist() == [5]
    assert loop.schedule() is None, "planned again before its drafts are verified"
    if leave == "abort":
        loop.scheduler.abort_request("a")
        assert not loop.update().requests
    else:
        loop.scheduler.reset_prefix_cache(force=True)
        assert loop.update().requests == [request]
        assert request.output_token_ids == expected[:9]
    loop.run()
    assert request.output_token_ids == expected[: request.num_output_tokens]


def test_drafts_for_who_cannot_take_them_are_dropped(make_loop):
    loop = make_loop(1, max_num_batched_tokens=8)
    loop.add(Request("prefilling", [1] * 20, max_tokens=5))
    loop.scheduler.propose({"prefilling": [1], "unknown": [2]})
    loop.step()
    loop.scheduler.propose({"prefilling": [1]})
    loop.run()
    assert loop.scheduler.stats().all_steps.num_draft_tokens == 0


def test_the_batch_tells_drafts_apart(make_loop):
    loop = make_loop()
    loop.add(*(Request(f"r{index}", [index + 1], max_tokens=9) for index in range(2)))
    loop.step()
    loop.scheduler.propose({"r1": [7, 8]})
    plan = loop.scheduler.schedule()
    bucket = pick_bucket(loop.buckets, plan.num_tokens, plan.num_seqs, plan.max_q_len)
    batch = StepBatch.build(plan, loop.scheduler.table, bucket)
    assert not bucket.is_decode_only
    assert batch.num_draft_tokens[:2].tolist() == plan.num_draft_tokens.tolist() == [0, 2]
    assert batch.token_ids[2:4].tolist() == [7, 8]
    assert batch.cu_q_lens[:3].tolist() == [0, 1, 4]
