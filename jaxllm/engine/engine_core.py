"""The loop: schedule a step, launch it, and take in the result of the one before. Token ids in, token ids out."""

import logging
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import jax
import numpy as np

from jaxllm.config import ResolvedConfig
from jaxllm.engine.compilations import Compilations
from jaxllm.engine.core_output import CoreOutput
from jaxllm.engine.core_request import CoreRequest
from jaxllm.engine.engine_info import EngineInfo
from jaxllm.engine.engine_stats import EngineStats
from jaxllm.engine.page_mover import Move
from jaxllm.engine.runner import Runner, StepHandle
from jaxllm.engine.step_command import StepCommand
from jaxllm.engine.token_reports import TokenReports
from jaxllm.errors import InvalidRequestError, OverloadedError
from jaxllm.scheduler import (
    PageMoves,
    Request,
    RequestRefusedError,
    RequestStatus,
    Scheduler,
    SchedulerBusyError,
)
from jaxllm.scheduler.buckets import Bucket, mixed_sizes, pick_bucket
from jaxllm.scheduler.sampled_tokens import SampledTokens
from jaxllm.scheduler.step_batch import StepBatch
from jaxllm.scheduler.step_plan import StepPlan

logger = logging.getLogger(__name__)

_PAGES_SLEEP_S = 1e-4  # while nothing runs before pages have come
_MAX_SLEEP_S = 1e-3  # in a merge window, for new requests may end it
_ENDS = {"abort": RequestStatus.FINISHED_ABORT, "stop": RequestStatus.FINISHED_STOP}


class _InFlight(NamedTuple):
    plan: StepPlan
    handle: StepHandle
    wants_logprobs: bool


class EngineCore:
    """Serves one model, in token ids. Not thread-safe: one thread adds requests and calls `step`."""

    def __init__(self, config: ResolvedConfig, runner: Runner, scheduler: Scheduler, info: EngineInfo):
        """`start_core` makes all of them from an `EngineConfig`. The runner has started."""
        self.config = config
        self.runner = runner
        self.scheduler = scheduler
        self.info = info
        self._buckets: Sequence[Bucket] = ()  # that there are programs for, as far as the scheduler knows
        self._seeds = random.Random(config.options.seed)
        self._reports = TokenReports(scheduler.config.max_num_seqs)
        self._in_flight: deque[_InFlight] = deque()
        self._current: StepPlan | None = None  # the plan whose step is being launched or taken in
        self._num_steps = self._num_output_tokens = self._num_padded_tokens = self._num_unsound = 0
        self._step_s = self._wait_s = 0.0
        self._compilations = Compilations()

    @property
    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests

    def add_request(self, request: CoreRequest) -> None:
        """Queues a request.

        Raises InvalidRequestError, or OverloadedError if there is no room now, and leaves everything as it was.
        """
        token_ids = request.prompt_token_ids
        try:
            queued = Request(
                request.request_id,
                token_ids,
                max_tokens=request.max_tokens or max(1, self.info.max_model_len - len(token_ids)),
                min_tokens=request.min_tokens,
                stop_token_ids=request.stop_token_ids,
                options=request.options,
                arrival_time=request.arrival_time,
                sampling=replace(
                    request.sampling,
                    seed=self._seeds.getrandbits(32) if request.seed is None else request.seed,
                    wants_logprobs=request.num_logprobs is not None,
                ),
            )
            self.scheduler.add_request(queued)
        except SchedulerBusyError as error:
            raise OverloadedError(str(error), error.retry_after_s) from error
        except RequestRefusedError as error:
            raise InvalidRequestError(str(error), param=error.param) from error
        self._reports.add(queued, streams=request.streams, num_logprobs=request.num_logprobs)

    def end_request(self, request_id: str, reason: Literal["abort", "stop"]) -> CoreOutput | None:
        """Ends a request in any state: its client left, or the text that it stops at was found. Its pages are free.

        Returns its tokens that were not reported yet and its end, which no `step` will report again; None if no
        unfinished request has this id.
        """
        request = self._reports.find(request_id)
        if request is None:
            return None
        self.scheduler.finish_request(request_id, _ENDS[reason])
        return self._reports.end(request)

    def abort_all(self) -> CoreOutput:
        """Ends every request, after a `step` that raised. Returns all that there still is to tell.

        Nothing that a step may have left half done is found in the prefix cache afterwards.
        """
        for request_id in self.scheduler.request_ids:
            self.scheduler.abort_request(request_id)
        self.scheduler.reset_prefix_cache()
        self._reports.end_all(self._reports.requests)
        return self._reports.take()

    def step(self) -> CoreOutput:
        """Launches the next step, and takes in the one before while it runs. Returns what is new.

        If it raises, `recover` or `abort_all` is to be called before the next step.
        """
        start, self._current = time.perf_counter(), None
        self._expire()
        plan, moves = self._schedule()
        self._launch(plan, moves)
        if len(self._in_flight) > (0 if plan is None else 1):
            self._take_in()
        elif plan is None:
            self._idle()
            return self._reports.take()
        self._step_s += time.perf_counter() - start
        return self._reports.take()

    # The parts of `step`, in order.

    def _expire(self) -> None:
        if expired := self.scheduler.expire():
            self._reports.end_all(expired)

    def _schedule(self) -> tuple[StepPlan | None, PageMoves]:
        """Tells the scheduler what copies and programs there are, and asks it for the next step."""
        for move in self.runner.finished_moves():
            self._take_in_move(move)
        if len(buckets := self.runner.ready_buckets) != len(self._buckets):
            self._buckets = buckets
            self.scheduler.set_step_sizes(mixed_sizes(buckets))
        plan = self.scheduler.schedule()
        return plan, self.scheduler.take_page_moves()

    def _launch(self, plan: StepPlan | None, moves: PageMoves) -> None:
        if plan is None:
            if command := StepCommand(moves):
                self.runner.launch(command)
            return
        self._current = plan
        self._reports.start(plan)
        bucket = pick_bucket(self._buckets, plan.num_tokens, plan.num_seqs, plan.max_q_len)
        batch = StepBatch.build(plan, self.scheduler.table, bucket)
        wants_logprobs = self._reports.num_with_logprobs > 0 and bool(batch.wants_logprobs.any())
        handle = self.runner.launch(StepCommand(moves, bucket, batch.buffer))
        assert handle is not None
        self._in_flight.append(_InFlight(plan, handle, wants_logprobs))
        self._num_padded_tokens += bucket.num_tokens - plan.num_tokens

    def _take_in(self) -> None:
        """Waits for the oldest step in flight, and tells the scheduler and the reports."""
        plan, handle, wants_logprobs = self._in_flight.popleft()
        self._current = plan
        start = time.perf_counter()
        sampled = handle.sampled(plan.num_seqs)
        self._wait_s += time.perf_counter() - start
        if not sampled.num_tokens.all():
            self._end_unsound(plan, sampled)
        rows_are_theirs = self.scheduler.table.last_release < plan.step_number
        output = self.scheduler.update(plan, sampled)
        logprobs = handle.logprobs() if wants_logprobs else None
        self._reports.append(plan, output, logprobs, rows_are_theirs=rows_are_theirs)
        self._num_steps += 1
        self._num_output_tokens += len(output.token_ids)

    def _idle(self) -> None:
        """Nothing runs: sleeps until something may."""
        wait_s = _PAGES_SLEEP_S if self.scheduler.is_waiting_for_pages else self.scheduler.wait_s
        time.sleep(min(wait_s, _MAX_SLEEP_S))

    def _end_unsound(self, plan: StepPlan, sampled: SampledTokens) -> None:
        """Ends the requests whose logits are NaN or infinite, with what may help."""
        if not (ended := self.scheduler.end_unsound(plan, sampled)):
            return
        if "float16" in (self.config.dtype, self.config.kv_cache_dtype):
            advice = "float16 ends at 65,504: set dtype and kv_cache_dtype to bfloat16 or float32"
        else:
            advice = "compare the model's files with their source, and try dtype float32"
        message = f"the logits of its next token are NaN or infinite; {advice}"
        for request in ended:
            logger.error("request %s: %s", request.request_id, message)
        self._num_unsound += len(ended)
        self._reports.end_all(ended, message)

    def _take_in_move(self, move: Move) -> None:
        """Tells the scheduler of a copy between device and host."""
        if move.error is not None:
            logger.warning("pages could not be %s: %s", move.kind, move.error)
        if move.ticket is None:
            self.scheduler.pages_saved(move.slots, is_sound=move.error is None)
        elif move.error is not None:
            self.scheduler.load_failed(move.ticket)
        else:
            self.scheduler.pages_loaded(move.ticket, move.num_pages, move.seconds)

    def recover(self, error: Exception) -> CoreOutput:
        """After a `step` that raised: ends the requests of that step, and of those launched after it, with an error.

        What they computed is found by nobody. The others go on. Raises the error if they cannot, because the caches
        are lost, or because it is not known whose step it was.
        """
        failed = self._current
        if failed is None or not self.runner.is_usable:
            raise error
        plans = [failed, *(plan for plan, _, _ in self._in_flight if plan.step_number > failed.step_number)]
        self._in_flight = deque(step for step in self._in_flight if step.plan.step_number < failed.step_number)
        rows = np.unique(np.concatenate([plan.rows for plan in plans]))
        requests = [request for request in self.scheduler.table.requests[rows].tolist() if request is not None]
        for request in requests:
            self.scheduler.finish_request(request.request_id, RequestStatus.FINISHED_ERROR)
        for plan in plans:
            self.scheduler.drop(plan)
        ended = [request for request in self._reports.requests if request.status.is_finished]
        message = f"the step that the request was in failed: {type(error).__name__}: {error}"
        self._reports.end_all(ended, message)
        return self._reports.take()

    def stats(self) -> EngineStats:
        """A snapshot, at a cost that does not depend on the load."""
        memory = jax.local_devices()[0].memory_stats() or {}
        return EngineStats(
            time=time.monotonic(),
            num_steps=self._num_steps,
            host_s=self._step_s - self._wait_s,
            device_wait_s=self._wait_s,
            num_compilations_after_start=self._compilations.number,
            num_output_tokens=self._num_output_tokens,
            num_unsound=self._num_unsound,
            num_padded_tokens=self._num_padded_tokens,
            memory_bytes=memory.get("bytes_in_use"),
            memory_limit_bytes=memory.get("bytes_limit"),
            scheduler=self.scheduler.stats(),
        )

    def reset_prefix_cache(self, *, force: bool = False) -> bool:
        """See `Scheduler.reset_prefix_cache`."""
        return self.scheduler.reset_prefix_cache(force=force)

    def profile(self, folder: str | None) -> None:
        """Starts a trace of JAX's profiler, to be written to `folder`; None ends it, and writes it.

        Raises InvalidRequestError if there is a trace already, or none.
        """
        try:
            if folder is None:
                jax.profiler.stop_trace()
            else:
                jax.profiler.start_trace(folder)
        except (RuntimeError, OSError) as error:
            raise InvalidRequestError(f"the profiler says: {error}") from error

    def shutdown(self) -> None:
        """Stops background work."""
        self.runner.shutdown()
        self._compilations.close()
