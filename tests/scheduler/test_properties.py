"""Thousands of random steps: whatever comes, each request gets what it gets alone, and nothing is lost."""

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxllm.scheduler import (
    Request,
    RequestOptions,
    RequestStatus,
    SamplingRow,
    SchedulerBusyError,
    SchedulerConfig,
    TenantConfig,
)
from jaxllm.scheduler.windows import num_request_pages

MAX_MODEL_LEN = 48
HEADS = [np.random.default_rng(seed).integers(0, 61, 40).tolist() for seed in range(3)]  # what prompts begin with


class SchedulerMachine(RuleBasedStateMachine):
    """The engine's loop under every pressure. `Loop` (conftest) checks each step and the integrity after it."""

    make_loop_class = None  # set by the test
    expected_output = None

    @initialize(
        policy=st.sampled_from(["priority", "fair"]),
        num_ahead=st.integers(0, 3),
        page_size=st.integers(1, 7),
        max_num_seqs=st.integers(1, 6),
        spare_tokens=st.integers(0, 20),
        spare_pages=st.integers(0, 12),
        enable_prefix_caching=st.booleans(),
        prefix_window=st.sampled_from([1, 1, 3]),
        window=st.sampled_from([(0.0, 1), (0.0, 1), (30.0, 2)]),
        tpot_target_ms=st.sampled_from([None, 3.0]),
        windows=st.sampled_from([(None,), (None,), (None, 9), (5, None, 5), (1, 14), (6,), (None, None)]),
        num_host_pages=st.sampled_from([0, 3, 40]),
        kv_return_by=st.sampled_from(["copy", "copy", "auto", "recompute"]),
        prefetch_window=st.integers(0, 3),
        max_loading_pages=st.integers(1, 20),
        max_saving_pages=st.integers(1, 20),
    )
    def start(self, policy, num_ahead, page_size, max_num_seqs, spare_tokens, spare_pages, windows, **settings):
        max_wait_ms, min_batch = settings.pop("window")
        if not settings["enable_prefix_caching"]:
            settings["prefix_window"] = 1
            settings["num_host_pages"] = 0
        max_num_batched_tokens = max_num_seqs + spare_tokens
        num_pages = num_request_pages(MAX_MODEL_LEN, windows, max_num_batched_tokens, page_size)
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            page_size=page_size,
            num_pages=1 + num_pages + spare_pages,
            windows=windows,
            scheduling_policy=policy,
            tenants={
                "limited": TenantConfig(max_running=1, max_queued=3),
                "heavy": TenantConfig(weight=2.0 if policy == "fair" else 1.0),
            },
            max_queued_requests=12,
            max_wait_ms=max_wait_ms,
            min_batch=min(min_batch, max_num_seqs) if max_wait_ms else 1,
            min_chunk_tokens=2,
            **settings,
        )
        self.loop = type(self).make_loop_class(config, num_ahead)
        self.requests = []
        self.has_failed = False

    @rule(
        head=st.integers(0, 2),
        num_head=st.integers(0, 40),
        tail=st.lists(st.integers(0, 60), min_size=1, max_size=6),
        max_tokens=st.integers(1, 40),
        min_tokens=st.integers(0, 5),
        stop_token_ids=st.sampled_from([(), (3, 9), tuple(range(20))]),
        priority=st.integers(0, 2),
        tenant=st.sampled_from(["", "limited", "heavy"]),
        salt=st.sampled_from(["", "", "salt"]),
        use_prefix_cache=st.sampled_from([True, True, True, False]),
        is_ready=st.sampled_from([True, True, True, False]),
        patience=st.sampled_from([None, None, None, 0.02, 0.2]),
    )
    def arrive(self, head, num_head, tail, max_tokens, min_tokens, priority, tenant, salt, patience, **kind):
        now = self.loop.clock.now
        prompt = [*HEADS[head][:num_head], *tail][: MAX_MODEL_LEN - 1]
        request = Request(
            f"r{len(self.requests)}",
            prompt,
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            options=RequestOptions(priority=priority, tenant=tenant, cache_salt=salt, timeout_s=patience),
            arrival_time=now,
            sampling=SamplingRow(seed=len(self.requests) % 4),
            **kind,
        )
        try:
            self.loop.add(request)
        except SchedulerBusyError:
            return
        self.requests.append(request)

    @rule(number=st.integers(1, 12))
    def step(self, number):
        for _ in range(number):
            plan = self.loop.schedule()
            self.loop.clock.now += 0.001
            if self.loop.in_flight and (plan is None or len(self.loop.in_flight) > self.loop.num_ahead):
                self.loop.update()

    @rule(which=st.integers(0, 10**6), status=st.sampled_from(["FINISHED_ABORT", "FINISHED_STOP"]))
    def leave(self, which, status):
        if self.requests:
            request = self.requests[which % len(self.requests)]
            was_finished = request.status.is_finished
            assert self.loop.scheduler.finish_request(request.request_id, RequestStatus[status]) != was_finished

    @rule(which=st.integers(0, 10**6))
    def become_ready(self, which):
        if self.requests:
            self.loop.scheduler.input_ready(self.requests[which % len(self.requests)].request_id)

    @rule()
    def expire(self):
        for request in self.loop.scheduler.expire():
            assert request.status is RequestStatus.FINISHED_TIMEOUT

    @rule(num_drafts=st.integers(1, 6), num_right=st.integers(0, 6))
    def draft(self, num_drafts, num_right):
        drafts = {}
        for request in self.requests:
            if not request.status.is_finished:
                right = self._alone(request)[request.num_output_tokens :][: min(num_drafts, num_right)]
                drafts[request.request_id] = [*right, *[0] * (num_drafts - len(right))]
        self.loop.scheduler.propose(drafts)

    @precondition(lambda self: self.loop.copies)
    @rule(number=st.integers(1, 6), fail=st.sampled_from([False, False, False, True]))
    def copy(self, number, fail):
        for _ in range(min(number, len(self.loop.copies))):
            self.loop.copies.finish(fail=fail)

    @rule(force=st.booleans())
    def reset(self, force):
        assert self.loop.scheduler.reset_prefix_cache(force=force) or not force

    @precondition(lambda self: self.loop.in_flight)
    @rule()
    def fail(self):
        """A step fails, and nothing that was launched runs; the engine ends all requests that have a row."""
        scheduler = self.loop.scheduler
        while self.loop.in_flight:
            scheduler.drop(self.loop.in_flight.popleft()[0])
        self.loop.device.forget()
        for request in scheduler.table.running_requests:
            scheduler.finish_request(request.request_id, RequestStatus.FINISHED_ERROR)
        assert scheduler.reset_prefix_cache()

    @invariant()
    def nothing_is_lost(self):
        if not hasattr(self, "loop"):
            return
        self.loop.scheduler.check_integrity()
        stats = self.loop.scheduler.stats()
        assert sum(stats.num_requests.values()) == len(self.requests)
        assert 0 <= stats.last_step.budget_use <= 1
        assert 0 <= stats.num_host_pages <= self.loop.config.num_host_pages
        for request in self.requests:
            alone, output = self._alone(request), request.output_token_ids
            assert output == alone[: len(output)]

    def teardown(self):
        if not hasattr(self, "loop"):
            return
        for request in self.requests:
            self.loop.scheduler.input_ready(request.request_id)
        self.loop.run()
        for request in self.requests:
            if request.status in (RequestStatus.FINISHED_LENGTH, RequestStatus.FINISHED_STOP):
                output = request.output_token_ids
                assert output[: len(self.loop.streams[request.request_id])] == self.loop.streams[request.request_id]
            if request.status is RequestStatus.FINISHED_LENGTH:
                assert request.output_token_ids == self._alone(request)

    def _alone(self, request):
        """What it gets when it is alone in the world."""
        if not hasattr(request, "alone"):
            request.alone = type(self).expected_output(request, self.loop.config)
        return request.alone


def test_every_request_gets_what_it_gets_alone_under_every_pressure(loop_class, expect_alone):
    class Machine(SchedulerMachine):
        make_loop_class = loop_class
        expected_output = staticmethod(expect_alone)

    case = Machine.TestCase()
    case.settings = settings(
        max_examples=100,
        stateful_step_count=50,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    case.runTest()
