"""Requests wait for others no longer than they should, and prompts do not hold up who is writing."""

import pytest

from jaxllm.scheduler import Request, RequestStatus, SchedulerConfigError, TenantConfig
from jaxllm.scheduler.pacing import Pacing
from jaxllm.scheduler.step_time import StepTimeModel


@pytest.mark.parametrize("min_batch", [2, 4, 100])
def test_the_merge_window_never_delays_beyond_its_bound(make_loop, min_batch):
    loop = make_loop(max_wait_ms=50.0, min_batch=min_batch, max_num_seqs=100, max_num_batched_tokens=200)
    requests = []
    for index in range(40):
        requests.append(Request(f"r{index}", [index] * 3, max_tokens=2, arrival_time=loop.clock.now))
        loop.add(requests[-1])
        loop.step()
        for request in requests:
            if request.status is RequestStatus.WAITING:
                assert loop.clock.now - request.arrival_time < 0.050 + 1e-9
                assert sum(other.status is RequestStatus.WAITING for other in requests) < min_batch
        loop.clock.now += 0.007
    loop.run()
    assert len(loop.plans) < 40 * 2


def test_without_a_window_each_starts_at_once_and_with_one_they_start_together(make_loop):
    loop = make_loop()
    for index in range(3):
        loop.add(Request(f"r{index}", [index], max_tokens=9, arrival_time=loop.clock.now))
        assert len(loop.scheduler.schedule().started) == 1
    loop = make_loop(max_wait_ms=50.0, min_batch=8)
    for index in range(3):
        loop.add(Request(f"r{index}", [index], max_tokens=9, arrival_time=loop.clock.now))
        loop.clock.now += 0.010
    assert loop.scheduler.schedule() is None
    assert loop.scheduler.wait_s == pytest.approx(0.020)
    loop.clock.now += loop.scheduler.wait_s
    assert len(loop.scheduler.schedule().started) == 3


def decode_beside_a_long_prompt(make_loop, seconds_of, num_ahead=1, **targets):
    """Times of the steps from the arrival of a long prompt on, and the loop."""
    loop = make_loop(num_ahead, max_num_batched_tokens=128, max_model_len=1000, num_pages=600, **targets)
    decoding = [Request(f"d{index}", [index], max_tokens=400) for index in range(4)]
    loop.add(*decoding)
    seconds = []

    def step():
        plan = loop.schedule()
        if len(loop.in_flight) > num_ahead or plan is None:
            done = loop.in_flight[0][0]
            seconds.append(seconds_of(done))
            loop.clock.now += seconds[-1]
            loop.update()

    for index in range(3):  # The model of the step's time learns from prompts of other lengths.
        loop.add(Request(f"warm{index}", [index + 9] * (20 + 30 * index), max_tokens=2, arrival_time=loop.clock.now))
        for _ in range(12):
            step()
    seconds.clear()
    long = Request("long", [3, 4] * 300, max_tokens=2, arrival_time=loop.clock.now)
    loop.add(long)
    while not long.status.is_finished:
        step()
    return loop, seconds


def seconds_of(plan):
    return 0.010 + 0.0005 * plan.num_tokens + 1e-6 * int(plan.num_computed_tokens.sum())


def test_chunks_shrink_to_the_tpot_target_and_use_its_slack(make_loop):
    _, free = decode_beside_a_long_prompt(make_loop, seconds_of)
    _, bound = decode_beside_a_long_prompt(make_loop, seconds_of, tpot_target_ms=30.0)
    assert max(free) > 0.070
    assert max(bound) < 0.031
    assert sorted(bound)[-5] > 0.027, "the slack is not used"


def test_a_step_beyond_the_target_still_reads_a_little(make_loop):
    loop, seconds = decode_beside_a_long_prompt(make_loop, seconds_of, tpot_target_ms=1.0, min_chunk_tokens=8)
    assert len(seconds) == pytest.approx(600 / 8, abs=4)
    loop.run()


def test_a_prompt_beyond_its_ttft_target_is_read_at_full_speed(make_loop):
    targets = {"tpot_target_ms": 20.0, "min_chunk_tokens": 8}
    _, patient = decode_beside_a_long_prompt(make_loop, seconds_of, **targets)
    _, hurried = decode_beside_a_long_prompt(make_loop, seconds_of, **targets, ttft_target_ms=100.0)
    assert sum(hurried) < 0.6 * sum(patient)
    assert sum(hurried) < 0.1 + 5 * 0.080 + 0.1


def test_one_that_reads_again_after_a_preemption_does_not_wait_for_its_first_token(make_config):
    pacing = Pacing(make_config(tpot_target_ms=20.0, ttft_target_ms=100.0))
    for _ in range(4):
        pacing._step_time.observe(10, 100, 1.0, is_padded=True)
    request = Request("a", [1] * 90, max_tokens=9)
    assert pacing.most_prompt_tokens(20, 4, 100, request, now=9.0) == 20
    request.append_tokens([5])
    assert pacing.most_prompt_tokens(20, 4, 100, request, now=9.0) == 16


def test_the_model_of_the_step_finds_costs_padding_and_all():
    model = StepTimeModel((64, 256))
    for num_tokens, num_kv in [(4, 100), (70, 900), (20, 400), (250, 3000), (60, 50), (4, 2000), (200, 100)] * 3:
        padded = model.padded(num_tokens)
        model.observe(num_tokens, num_kv, 0.002 + 1e-4 * padded + 1e-6 * num_kv, is_padded=True)
    assert model.predict(30, 1000) == pytest.approx(0.002 + 0.0064 + 0.001, rel=1e-3)
    assert model.most_tokens(0.010, 1000, at_most=512) == 64
    assert model.most_tokens(0.001, 1000, at_most=512) == 0
    assert model.most_tokens(1.0, 1000, at_most=200) == 200


def test_a_pause_of_the_host_is_not_taken_for_the_step():
    model = StepTimeModel()
    for index in range(60):
        model.observe(10 + index % 7, 100, 0.010, is_padded=True)
    model.observe(10, 100, 30.0, is_padded=True)
    assert model.predict(10, 100) < 0.012


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_wait_ms": -1.0}, "max_wait_ms is -1.0; it must be at least 0"),
        ({"min_batch": 4}, "min_batch is 4 and max_wait_ms is 0: no request waits for others"),
        ({"min_batch": 9, "max_wait_ms": 5.0}, "min_batch is 9 and max_num_seqs is 8"),
        ({"tpot_target_ms": 0.0}, "tpot_target_ms is 0.0; it must be above 0"),
        ({"policy": "lifo"}, "policy is 'lifo'; it must be one of priority, fcfs, fair"),
        ({"prefix_window": 0}, "prefix_window is 0"),
        ({"max_wait_ms": float("inf"), "min_batch": 2}, "max_wait_ms is inf; it must be finite"),
        ({"ttft_target_ms": 9.0}, "ttft_target_ms is 9.0 and tpot_target_ms is None: prompts are read at full speed"),
        ({"prefix_window": 2, "enable_prefix_caching": False}, "prefix_window is 2 and enable_prefix_caching is False"),
        ({"tenants": {"a": TenantConfig(weight=2.0)}}, "weight of tenant 'a' is 2.0, and the policy is 'priority'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make_config, settings, message):
    with pytest.raises(SchedulerConfigError, match=message):
        make_config(**settings)
