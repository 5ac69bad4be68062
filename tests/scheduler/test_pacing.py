"""Requests wait for others no longer than they should, and prompts do not hold up who is writing."""

from collections import deque

import numpy as np
import pytest

from jaxllm.scheduler import Request, RequestStatus, SampledTokens, Scheduler, SchedulerConfigError, TenantConfig
from jaxllm.scheduler.pacing import Pacing


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


SIZES = (24, 48, 96, 128, 512)


class SmallModelOnCPU:
    """16 decodes beside which a long prompt is read, on a device that costs what a small model on a CPU does: 28 ms for
    decodes of 200 tokens, and 16 more for a chunk of four tokens that see 4,000. A step in a hundred takes a quarter
    longer."""

    def __init__(self, config):
        self.now = 0.0
        self.scheduler = Scheduler(config, lambda: self.now)
        self.rng = np.random.default_rng(0)
        self.in_flight, self.gaps, self.chunks = deque(), [], []
        self.num_requests = 0
        self.sizes = config.step_sizes

    def compiled(self, sizes):
        """There are programs for steps of these sizes, and no others."""
        self.sizes = sizes
        self.scheduler.set_step_sizes(sizes)

    def run(self, num_prompt_tokens, num_steps=None):
        """Seconds between the decodes' tokens while the prompt is read, or over `num_steps` without one (0 tokens); and
        the prompt's TTFT."""
        scheduler = self.scheduler
        for _ in range(16):
            self.add(200, 5000)
        while scheduler.stats().num_requests[RequestStatus.DECODING] < 16:
            self.step()
        self.gaps, self.chunks, arrival = [], [], self.now
        if num_prompt_tokens:
            self.add(num_prompt_tokens, 1)
            while scheduler.num_running + scheduler.num_waiting > 16:
                self.step()
        else:
            while len(self.gaps) < num_steps:
                self.step()
        seconds, gaps = self.now - arrival, self.gaps
        for request_id in scheduler.request_ids:
            scheduler.abort_request(request_id)
        scheduler.check_integrity()
        return np.array(gaps), seconds

    def add(self, num_prompt_tokens, max_tokens):
        tokens = self.rng.integers(1, 1 << 30, num_prompt_tokens).tolist()
        self.num_requests += 1
        name = str(self.num_requests)
        self.scheduler.add_request(Request(name, tokens, max_tokens=max_tokens, arrival_time=self.now))

    def step(self):
        self.in_flight.append(self.scheduler.schedule())
        if len(self.in_flight) > 1:
            plan = self.in_flight.popleft()
            size = (
                plan.num_tokens if plan.is_decode_only else min(size for size in self.sizes if size >= plan.num_tokens)
            )
            seconds = 0.014 + 2e-4 * size + 3e-6 * plan.num_decode_kv_tokens + 1e-6 * plan.num_chunk_pairs
            seconds *= 1.25 if self.rng.random() < 0.01 else self.rng.uniform(0.98, 1.02)
            self.now += seconds
            self.gaps.append(seconds)
            self.chunks += plan.num_scheduled_tokens[plan.num_decodes :].tolist()
            self.scheduler.update(plan, SampledTokens.one_each(np.zeros(plan.num_seqs, np.int32)))


@pytest.fixture
def make_device(make_config):
    sizes = {"max_num_seqs": 32, "max_num_batched_tokens": 512, "max_model_len": 6000}
    return lambda **targets: SmallModelOnCPU(
        make_config(**sizes, page_size=64, num_pages=3000, step_sizes=SIZES, **targets)
    )


def test_the_p99_of_decodes_stays_within_half_as_much_again_while_a_long_prompt_is_read(make_device):
    device = make_device()
    alone, _ = device.run(0, 200)
    free, free_ttft_s = device.run(4000)
    assert np.percentile(free, 99) > 8 * np.percentile(alone, 99)
    target_s = 1.25 * float(np.median(alone))
    device = make_device(tpot_target_ms=1e3 * target_s)
    for _ in range(2):  # At first, all that is known of prompts is how short ones were read.
        bound, ttft_s = device.run(4000)
        chunks = device.chunks.copy()
        alone, _ = device.run(0, len(bound))
        assert np.percentile(bound, 99) < 1.5 * np.percentile(alone, 99)
        assert np.median(bound[:100]) > 0.9 * target_s, "the slack is not used"
        assert min(chunks[:-1]) == 4
        assert np.mean(chunks[:20]) > 1.5 * np.mean(chunks[-20:]), "a chunk does not shrink with what it sees"
        assert ttft_s < 10 * free_ttft_s


def test_no_step_is_slow_while_programs_are_compiled_that_need_not_be(make_device):
    """Where each step with a prompt is padded to 512 tokens, few of them read it; from then on that there is a smaller
    program, none is slow."""
    device = make_device(tpot_target_ms=35.0)
    device.compiled((512,))
    gaps, _ = device.run(4000)
    assert len(gaps) < 200, "the padding is not used"  # in chunks of 4 tokens it would be 700 and more
    assert gaps.max() < 0.3, "a step is much slower than its padding makes it"
    for sizes in ((48, 512), (24, 48, 512), SIZES):
        device.compiled(sizes)
        gaps, _ = device.run(4000)
        alone, _ = device.run(0, len(gaps))
        assert np.percentile(gaps, 99) < 1.7 * np.percentile(alone, 99), sizes


def test_the_ttft_target_bounds_the_wait_that_the_tpot_target_causes(make_device):
    _, free_ttft_s = make_device().run(4000)
    device = make_device(tpot_target_ms=35.0, ttft_target_ms=15_000.0)
    _, ttft_s = device.run(4000)
    assert 15.0 < ttft_s < 15.0 + free_ttft_s


def test_one_that_reads_again_after_a_preemption_does_not_wait_for_its_first_token(make_config):
    pacing = Pacing(make_config(tpot_target_ms=20.0, ttft_target_ms=100.0))
    for _ in range(4):
        pacing._step_time.observe(10, 100, 1.0, has_prompts=True)
    request = Request("a", [1] * 90, max_tokens=9)
    assert pacing.most_prompt_tokens(20, 4, 100, request, 0, now=9.0) == 20
    request.append_tokens([5])
    assert pacing.most_prompt_tokens(20, 4, 100, request, 0, now=9.0) == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_wait_ms": -1.0}, "max_wait_ms is -1.0; it must be a number, 0 or more"),
        ({"min_batch": 4}, "min_batch is 4 and max_wait_ms is 0: no request waits for others"),
        ({"min_batch": 9, "max_wait_ms": 5.0}, "min_batch is 9 and max_num_seqs is 8"),
        ({"tpot_target_ms": 0.0}, "tpot_target_ms is 0.0; it must be a number above 0"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy is 'lifo'; it must be one of priority, fcfs, fair"),
        ({"prefix_window": 0}, "prefix_window is 0"),
        ({"max_wait_ms": float("inf"), "min_batch": 2}, "max_wait_ms is inf; it must be a number, 0 or more"),
        ({"ttft_target_ms": 9.0}, "ttft_target_ms is 9.0 without tpot_target_ms"),
        ({"prefix_window": 2, "enable_prefix_caching": False}, "prefix_window is 2 and enable_prefix_caching is False"),
        (
            {"tenants": {"a": TenantConfig(weight=2.0)}},
            "weight of the tenant 'a' is 2.0, and scheduling_policy",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(make_config, settings, message):
    with pytest.raises(SchedulerConfigError, match=message):
        make_config(**settings)
