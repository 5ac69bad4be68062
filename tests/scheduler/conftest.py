"""A device that stands in for a model, and the engine's loop around it."""

import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from jaxllm.scheduler import (
    PageMoves,
    Request,
    RequestStatus,
    SampledTokens,
    Scheduler,
    SchedulerConfig,
    StepBatch,
    StepOutput,
    StepPlan,
    declare_buckets,
    pick_bucket,
)
from jaxllm.scheduler.policy import ByPriority

VOCABULARY = 61
NOTHING = -7


Windows = tuple[int | None, ...]


def next_token(seen: Sequence[np.ndarray], seed: int) -> int:
    """The 'model': a hash of what the last token sees in each group of layers. One wrong, missing or misplaced token
    changes it."""
    for values in seen:
        seed = zlib.crc32(values.tobytes(), seed)
    return seed % VOCABULARY


def value(token: int, seen_before: np.ndarray, window: int | None) -> int:
    """What a group of layers keeps of a token. Where there is a window, it depends on what the token sees there, as
    keys and values do: so what a token in the middle of a chunk read wrongly is found too."""
    return token if window is None else zlib.crc32(seen_before.tobytes(), token) % 2**31


class FakeDevice:
    """Runs steps in order, from nothing but their buffers and its own state.

    It writes values into pages as a model writes keys and values, and computes each next token from what it reads
    back through the page tables, within the window of each group of layers. A step runs when its result is asked for,
    so a buffer that changes after its launch gives wrong tokens.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pages = np.full((config.num_pages, config.page_size), NOTHING, np.int32)
        self.host_pages = np.full((config.num_host_pages, config.page_size), NOTHING, np.int32)
        self.last_token = np.full(config.max_num_seqs + 1, NOTHING)
        self._queue: deque[Callable[[], None]] = deque()

    def launch(self, batch: StepBatch) -> Callable[[], SampledTokens]:
        """Returns what waits for the step."""
        result: list[SampledTokens] = []
        self._queue.append(lambda: result.append(self._run(batch)))

        def wait() -> SampledTokens:
            while not result:
                self._queue.popleft()()
            return result[0]

        return wait

    def read(self, pages: Sequence[int]) -> Callable[[], np.ndarray | None]:
        """Launches a copy of pages. Returns what waits for it, and gives None if it will not run."""
        result: list[np.ndarray] = []
        self._queue.append(lambda: result.append(self.pages[list(pages)].copy()))

        def wait() -> np.ndarray | None:
            while not result and self._queue:
                self._queue.popleft()()
            return result[0] if result else None

        return wait

    def write(self, pages: Sequence[int], content: np.ndarray) -> None:
        """Launches the writing of pages."""

        def run() -> None:
            self.pages[list(pages)] = content

        self._queue.append(run)

    def forget(self) -> None:
        """What was launched will not run."""
        self._queue.clear()

    def _run(self, batch: StepBatch) -> SampledTokens:
        step = batch.layout.views(batch.buffer)
        num_seqs, page_size = int(step["num_seqs"][0]), self.config.page_size
        written, read, tokens = set(), set(), {}
        for i in range(num_seqs):
            first, end = step["cu_q_lens"][i : i + 2]
            kv_len, row = step["kv_lens"][i], step["rows"][i]
            assert step["logits_rows"][i] == end - 1
            assert step["positions"][first:end].tolist() == list(range(kv_len - (end - first), kv_len))
            assert step["num_draft_tokens"][i] < end - first
            for t in range(first, end):
                from_device = step["from_device"][i] and t == end - 1
                token = self.last_token[row] if from_device else step["token_ids"][t]
                position = int(step["positions"][t])
                tokens[i, position] = token
                page, slot = divmod(position, page_size)
                for window, page_table_SP in zip(self.config.windows, step["page_table"], strict=True):
                    place = (int(page_table_SP[i, page]), slot)
                    assert place[0] != 0, "a token in the null page"
                    assert place not in written, "two tokens in one slot"
                    written.add(place)
                    before = np.zeros(0) if window is None else self._seen(page_table_SP[i], position, window - 1)
                    self.pages[place] = value(int(token), before, window)
            num_before = int(kv_len - (end - first))
            for window, page_table_SP in zip(self.config.windows, step["page_table"], strict=True):
                first_seen = 0 if window is None else max(0, num_before - window + 1)
                read |= set(page_table_SP[i, first_seen // page_size : num_before // page_size].tolist())
        assert not read & {page for page, _ in written}, "a page is read by one row and written by another in one step"
        num_drafts = step["num_draft_tokens"][:num_seqs]
        sampled = np.full((num_seqs, 1 + num_drafts.max()), NOTHING, np.int32)
        num_sampled = np.zeros(num_seqs, np.int32)
        for i in range(num_seqs):
            kv_len, seed = step["kv_lens"][i], int(step["seed"][i])
            for length in range(int(kv_len - num_drafts[i]), int(kv_len) + 1):
                groups = zip(self.config.windows, step["page_table"], strict=True)
                token = next_token([self._seen(table_SP[i], length, window) for window, table_SP in groups], seed)
                sampled[i, num_sampled[i]] = token
                num_sampled[i] += 1
                if length == kv_len or tokens[i, length] != token:
                    break
            self.last_token[step["rows"][i]] = token
        return SampledTokens(num_sampled, sampled)

    def _seen(self, page_table_P: np.ndarray, end: int, window: int | None) -> np.ndarray:
        """int32: the values of the last `window` positions before `end`."""
        start = 0 if window is None else max(0, end - window)
        if start == end:
            return np.zeros(0, np.int32)
        first_page, page_size = start // self.config.page_size, self.config.page_size
        pages = page_table_P[first_page : -(-end // page_size)]
        assert (pages != 0).all(), "a page that a token sees has been given back"
        return self.pages[pages].reshape(-1)[start - first_page * page_size : end - first_page * page_size]


class Copies:
    """Copies of pages between the fake device and its host, each finished when the test says so, in order."""

    CHUNK = 3

    def __init__(self, scheduler: Scheduler, device: FakeDevice) -> None:
        self._scheduler, self._device = scheduler, device
        self._jobs: deque[Callable[[bool], None]] = deque()
        self._loaded: deque[np.ndarray] = deque()  # chunks that have come or failed, to be written
        self._failed_slots: set[int] = set()

    def __len__(self) -> int:
        return len(self._jobs)

    def begin(self, moves: PageMoves) -> None:
        for _, pages in moves.writes:
            content = self._loaded.popleft()
            if pages:
                self._device.write(pages, content)
        for first in range(0, len(moves.saves), self.CHUNK):
            chunk = moves.saves[first : first + self.CHUNK]
            wait = self._device.read([page for page, _ in chunk])
            self._jobs.append(partial(self._save, wait, [slot for _, slot in chunk]))
        for ticket, slots in moves.loads:
            for first in range(0, len(slots), self.CHUNK):
                self._jobs.append(partial(self._load, ticket, slots[first : first + self.CHUNK]))

    def finish(self, *, fail: bool = False) -> None:
        """The oldest copy is done, or fails."""
        self._jobs.popleft()(fail)

    def _save(self, wait: Callable[[], np.ndarray | None], slots: list[int], fail: bool) -> None:
        self._failed_slots.difference_update(slots)
        content = None if fail else wait()
        if content is None:
            self._failed_slots.update(slots)
        self._device.host_pages[slots] = NOTHING if content is None else content
        self._scheduler.pages_saved(slots, is_sound=content is not None)

    def _load(self, ticket: int, slots: list[int], fail: bool) -> None:
        self._loaded.append(self._device.host_pages[slots].copy())
        if fail or self._failed_slots & set(slots):
            self._scheduler.load_failed(ticket)
        else:
            self._scheduler.pages_loaded(ticket, len(slots), 0.001)


class Clock:
    """Time as a test wants it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Loop:
    """The engine's loop, `num_ahead` steps ahead of the device. Checks what must hold in every step."""

    MAX_SCHEDULES = 20_000

    def __init__(self, config: SchedulerConfig, num_ahead: int = 0) -> None:
        self.config = config
        self.num_schedules = 0
        self.clock = Clock()
        self.scheduler = Scheduler(config, self.clock)
        self.device = FakeDevice(config)
        self.copies = Copies(self.scheduler, self.device)
        self.num_ahead = num_ahead
        self.buckets = declare_buckets(config.max_num_batched_tokens, config.max_num_seqs, 4)
        self.in_flight: deque[tuple[StepPlan, Callable[[], SampledTokens]]] = deque()
        self.plans: list[StepPlan] = []
        self.streams: dict[str, list[int]] = defaultdict(list)

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add_request(request)

    def schedule(self) -> StepPlan | None:
        """Schedules and launches one step."""
        scheduler = self.scheduler
        self.num_schedules += 1
        assert self.num_schedules < self.MAX_SCHEDULES, "it does not end"
        before = {request: request.status for request in scheduler.table.running_requests}
        plan = scheduler.schedule()
        self.copies.begin(scheduler.take_page_moves())
        scheduler.check_integrity()
        if self.config.scheduling_policy == "priority":
            rank = ByPriority().rank
            # One amid its prompt gives way to a more urgent prompt, whoever else runs.
            preempted = [
                request
                for request, status in before.items()
                if request.status is RequestStatus.PREEMPTED and status is RequestStatus.DECODING
            ]
            running = scheduler.table.running_requests
            if preempted and running:
                assert max(map(rank, running)) < min(map(rank, preempted)), "preempted the more urgent"
        if plan is None:
            return None
        self._check(plan)
        bucket = pick_bucket(self.buckets, plan.num_tokens, plan.num_seqs, plan.max_q_len)
        batch = StepBatch.build(plan, scheduler.table, bucket)
        self.in_flight.append((plan, self.device.launch(batch)))
        self.plans.append(plan)
        return plan

    def update(self) -> StepOutput:
        """Takes in the oldest result."""
        plan, wait = self.in_flight.popleft()
        output = self.scheduler.update(plan, wait())
        self.scheduler.check_integrity()
        for request, token_ids in output.tokens_by_request():
            self.streams[request.request_id] += token_ids
        assert all(request.status.is_finished for request in output.finished)
        return output

    def step(self) -> None:
        plan = self.schedule()
        if plan is None and not self.in_flight:
            self.clock.now += (wait_s := self.scheduler.wait_s)
            if self.scheduler.is_waiting_for_pages:
                self.copies.finish()
                return
            assert wait_s or not self.scheduler.has_unfinished_requests, "nothing runs and nothing is in flight"
        elif plan is None or len(self.in_flight) > self.num_ahead:
            self.update()

    def run(self) -> None:
        """Until all is finished and no step is in flight."""
        while self.scheduler.has_unfinished_requests:
            self.step()
        while self.in_flight:
            output = self.update()
            assert not output.requests
        while self.copies:
            self.copies.finish()
        self.scheduler.check_integrity()
        stats = self.scheduler.stats()
        assert stats.num_used_pages == 0
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0

    def _check(self, plan: StepPlan) -> None:
        assert len(set(plan.rows.tolist())) == plan.num_seqs <= self.config.max_num_seqs
        assert plan.num_tokens == plan.num_scheduled_tokens.sum() <= self.config.max_num_batched_tokens
        assert (plan.num_scheduled_tokens[: plan.num_decodes] == 1).all()
        assert (plan.num_scheduled_tokens[plan.num_decodes :] > 1).all()
        assert (plan.num_scheduled_tokens[plan.from_device] == 1).all()
        assert (plan.samples | ~plan.from_device).all()


def expected_output(request: Request, config: SchedulerConfig) -> list[int]:
    """What the request gets when it is alone in the world: no pages, no steps, no scheduler."""
    tokens: list[int] = []
    kept: list[list[int]] = [[] for _ in config.windows]

    def append(token: int) -> None:
        tokens.append(token)
        for window, values in zip(config.windows, kept, strict=True):
            before = np.array(values[max(0, len(values) - (window or 1) + 1) :], np.int32)
            values.append(value(token, before, window))

    for token in request.prompt_token_ids:
        append(token)
    max_total_tokens = min(len(tokens) + request.max_tokens, config.max_model_len)
    while len(tokens) < max_total_tokens:
        groups = zip(config.windows, kept, strict=True)
        seen = [np.array(values[-(window or len(values)) :], np.int32) for window, values in groups]
        append(next_token(seen, request.sampling.seed))
        if tokens[-1] in request.stop_token_ids and len(tokens) - request.num_prompt_tokens >= request.min_tokens:
            break
    return tokens[request.num_prompt_tokens :]


@pytest.fixture
def make_config() -> Callable[..., SchedulerConfig]:
    def make(**changes: Any) -> SchedulerConfig:
        sizes: dict[str, Any] = {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 32,
            "max_model_len": 128,
            "page_size": 4,
            "num_pages": 257,
        }
        return SchedulerConfig(**(sizes | changes))

    return make


@pytest.fixture
def make_loop(make_config: Callable[..., SchedulerConfig]) -> Callable[..., Loop]:
    def make(num_ahead: int = 0, **changes: Any) -> Loop:
        return Loop(make_config(**changes), num_ahead)

    return make


@pytest.fixture
def expect_alone() -> Callable[[Request, SchedulerConfig], list[int]]:
    return expected_output


@pytest.fixture
def loop_class() -> type[Loop]:
    return Loop
