"""What holds for any mix of requests, however far the host runs ahead of the device."""

import numpy as np
import pytest

from jaxllm.scheduler import Request, RequestOptions, RequestStatus, SamplingRow


def random_requests(rng, number, max_prompt, max_tokens, stop_token_ids=()):
    return [
        Request(
            f"r{index}",
            rng.integers(0, 61, rng.integers(1, max_prompt + 1)).tolist(),
            max_tokens=int(rng.integers(1, max_tokens + 1)),
            stop_token_ids=stop_token_ids,
            options=RequestOptions(priority=int(rng.integers(0, 3))),
            arrival_time=float(index // 7),
            sampling=SamplingRow(seed=int(rng.integers(0, 2**32))),
        )
        for index in range(number)
    ]


def run_with_arrivals(loop, rng, requests, num_per_step):
    """Adds the requests a few at a time while the loop runs."""
    pending = list(requests)
    while pending or loop.scheduler.has_unfinished_requests:
        for _ in range(int(rng.integers(0, num_per_step + 1))):
            if pending:
                loop.add(pending.pop(0))
        if loop.scheduler.has_unfinished_requests or loop.in_flight:
            loop.step()
    loop.run()


@pytest.mark.parametrize("num_ahead", [0, 1, 2])
def test_requests_short_of_pages_get_what_each_gets_alone(make_loop, make_config, expect_alone, num_ahead):
    rng = np.random.default_rng(num_ahead)
    requests = random_requests(rng, 200, max_prompt=28, max_tokens=100, stop_token_ids=(3,))
    sizes = {"max_num_seqs": 200, "max_num_batched_tokens": 1024}
    expected = [expect_alone(request, make_config(**sizes)) for request in requests]
    num_tokens = [request.num_prompt_tokens + len(output) for request, output in zip(requests, expected, strict=True)]
    num_pages = sum(-(-number // 4) for number in num_tokens)
    loop = make_loop(num_ahead, **sizes, num_pages=1 + int(0.4 * num_pages))
    loop.add(*requests)
    loop.run()
    for request, output in zip(requests, expected, strict=True):
        assert request.output_token_ids == output
        assert request.output_token_ids == loop.streams[request.request_id]
        stopped = request.output_token_ids[-1] in request.stop_token_ids
        assert request.status is (RequestStatus.FINISHED_STOP if stopped else RequestStatus.FINISHED_LENGTH)
    stats = loop.scheduler.stats()
    assert stats.num_preemptions > 0
    assert sum(stats.num_requests.values()) == 200


@pytest.mark.parametrize("num_ahead", [0, 1, 2])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (2, 3))])
def test_random_loads_and_aborts_lose_no_page_and_no_token(make_loop, expect_alone, num_ahead, seed):
    """Odd sizes, arrivals over time, a pool barely larger than one request, aborts at any moment."""
    rng = np.random.default_rng([seed, num_ahead])
    page_size = int(rng.integers(1, 9))
    max_num_seqs = int(rng.integers(1, 12))
    loop = make_loop(
        num_ahead,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + int(rng.integers(0, 40)),
        max_model_len=70,
        page_size=page_size,
        num_pages=1 + -(-70 // page_size) + int(rng.integers(0, 20)),
    )
    requests = random_requests(rng, 60, max_prompt=69, max_tokens=50, stop_token_ids=(1, 2, 3))
    aborted = set()
    schedule = loop.scheduler.schedule

    def schedule_and_abort():
        if rng.random() < 0.1:
            name = f"r{rng.integers(0, 60)}"
            if loop.scheduler.abort_request(name):
                aborted.add(name)
        return schedule()

    loop.scheduler.schedule = schedule_and_abort
    run_with_arrivals(loop, rng, requests, num_per_step=2)
    for request in requests:
        expected = expect_alone(request, loop.config)
        output = request.output_token_ids
        if request.request_id in aborted:
            assert request.status is RequestStatus.FINISHED_ABORT
            assert output == expected[: len(output)]
        else:
            assert output == expected
    assert aborted


def test_one_step_ahead_gives_the_tokens_of_lockstep(make_loop):
    streams = []
    for num_ahead in (0, 1, 2):
        loop = make_loop(num_ahead, num_pages=60)
        loop.add(*random_requests(np.random.default_rng(7), 30, max_prompt=60, max_tokens=30))
        loop.run()
        streams.append(dict(loop.streams))
    assert streams[0] == streams[1] == streams[2]


def test_the_same_requests_make_the_same_plans(make_loop):
    def plans():
        loop = make_loop(1, num_pages=60)
        requests = random_requests(np.random.default_rng(3), 40, max_prompt=60, max_tokens=30)
        run_with_arrivals(loop, np.random.default_rng(4), requests, num_per_step=3)
        return [(plan.rows.tolist(), plan.num_scheduled_tokens.tolist()) for plan in loop.plans]

    assert plans() == plans()


def test_running_ahead_costs_at_most_one_step_a_request_and_stop(make_loop, expect_alone):
    """A stop that is found one step late wastes that step and nothing else."""
    loop = make_loop(1)
    request = Request("a", [1, 2, 3], max_tokens=60, stop_token_ids=tuple(range(0, 61, 5)))
    loop.add(request)
    loop.run()
    expected = expect_alone(request, loop.config)
    assert request.output_token_ids == expected
    assert len(expected) < 60
    assert len(loop.plans) == len(expected) + 1


def test_a_length_is_known_in_advance_and_wastes_no_step(make_loop):
    loop = make_loop(2)
    loop.add(Request("a", [1, 2, 3], max_tokens=9))
    loop.run()
    assert len(loop.plans) == 9


def test_decodes_come_first_and_miss_no_step_while_a_long_prompt_is_read(make_loop):
    loop = make_loop(max_num_batched_tokens=16)
    decoding = [Request(f"d{index}", [index], max_tokens=40) for index in range(4)]
    loop.add(*decoding)
    loop.step()
    loop.add(Request("long", list(range(50)), max_tokens=5))
    for _ in range(6):
        before = [request.num_output_tokens for request in decoding]
        loop.step()
        assert [request.num_output_tokens - 1 for request in decoding] == before
    lengths = [plan.num_scheduled_tokens.tolist() for plan in loop.plans]
    assert lengths[1:6] == [[1, 1, 1, 1, 12]] * 4 + [[1, 1, 1, 1, 2]]
    assert lengths[6] == [1, 1, 1, 1, 1]
    loop.run()


def test_a_prompt_longer_than_the_budget_is_read_in_chunks_and_samples_once(make_loop, expect_alone):
    loop = make_loop(max_num_batched_tokens=32)
    request = Request("a", list(range(100)), max_tokens=1)
    loop.add(request)
    loop.run()
    assert [plan.num_scheduled_tokens.tolist() for plan in loop.plans] == [[32], [32], [32], [4]]
    assert [plan.samples.tolist() for plan in loop.plans] == [[False], [False], [False], [True]]
    assert request.output_token_ids == expect_alone(request, loop.config)


def test_rows_and_budget_bound_each_step(make_loop):
    """The loop checks both bounds in each step; here they are reached."""
    loop = make_loop(max_num_seqs=4, max_num_batched_tokens=10)
    loop.add(*(Request(f"r{index}", [index] * 6, max_tokens=8) for index in range(12)))
    loop.run()
    assert max(plan.num_seqs for plan in loop.plans) == 4
    assert max(plan.num_tokens for plan in loop.plans) == 10


@pytest.mark.parametrize("num_ahead", [0, 1])
@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "num_output_tokens"),
    [(1, 1, 1), (4, 1, 1), (31, 1, 1), (31, 100, 1), (16, 16, 16), (16, 17, 16), (1, 10**12, 31)],
)
def test_max_tokens_and_max_model_len_are_exact(
    make_loop, expect_alone, num_ahead, num_prompt_tokens, max_tokens, num_output_tokens
):
    loop = make_loop(num_ahead, max_model_len=32, num_pages=9)
    request = Request("a", [5] * num_prompt_tokens, max_tokens=max_tokens)
    loop.add(request)
    loop.run()
    assert request.status is RequestStatus.FINISHED_LENGTH
    assert len(request.output_token_ids) == num_output_tokens
    assert request.output_token_ids == expect_alone(request, loop.config)


def test_a_step_that_failed_leaves_nothing_behind(make_loop, expect_alone):
    loop = make_loop(1)
    failed = [Request(f"f{index}", [1, 2, index], max_tokens=20) for index in range(3)]
    loop.add(*failed)
    loop.step()
    loop.step()
    assert loop.in_flight
    loop.in_flight.clear()
    for request in failed:
        assert loop.scheduler.finish_request(request.request_id, RequestStatus.FINISHED_ERROR)
    request = Request("f0", [4, 5], max_tokens=20)
    loop.add(request)
    loop.run()
    assert {request.status for request in failed} == {RequestStatus.FINISHED_ERROR}
    assert request.output_token_ids == expect_alone(request, loop.config)


def test_plans_are_updated_once_and_in_order(make_loop):
    loop = make_loop(2)
    loop.add(Request("a", [1, 2, 3], max_tokens=20))
    first, second = loop.schedule(), loop.schedule()
    results = [wait() for _, wait in loop.in_flight]
    loop.scheduler.update(second, results[1])
    with pytest.raises(AssertionError, match="updated once"):
        loop.scheduler.update(first, results[0])


def test_schedule_without_work_is_none(make_loop):
    loop = make_loop(1)
    assert loop.scheduler.schedule() is None
    loop.add(Request("a", [1, 2, 3], max_tokens=1))
    assert loop.schedule() is not None
    assert loop.schedule() is None, "its only token is pending"
    assert [request.request_id for request in loop.update().finished] == ["a"]
    assert loop.scheduler.schedule() is None


def test_stats_count_each_request_and_page_once(make_loop):
    loop = make_loop(max_num_seqs=2, max_num_batched_tokens=8, num_pages=33)
    loop.add(Request("decoding", [1], max_tokens=9))
    loop.step()
    loop.add(*(Request(name, [1] * 20, max_tokens=9) for name in ("prefilling", "waiting", "gone")))
    loop.step()
    loop.scheduler.abort_request("gone")
    stats = loop.scheduler.stats()
    counts = {status.value: number for status, number in stats.num_requests.items() if number}
    assert counts == {"decoding": 1, "prefilling": 1, "waiting": 1, "finished_abort": 1}
    assert (stats.num_used_pages, stats.num_free_pages) == (1 + 2, 32 - 3)
    assert (loop.scheduler.num_running, loop.scheduler.num_waiting) == (2, 1)
