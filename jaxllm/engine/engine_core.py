"""The loop: schedule a step, launch it, and take in the result of the one before. Token ids in, token ids out."""

import logging
import random
import time
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from jaxllm.config import EngineConfig, ResolvedConfig, resolve
from jaxllm.engine.compilation_cache import use_compilation_cache
from jaxllm.engine.compilations import Compilations
from jaxllm.engine.core_output import CoreOutput
from jaxllm.engine.core_request import CoreRequest
from jaxllm.engine.engine_info import EngineInfo
from jaxllm.engine.engine_stats import EngineStats
from jaxllm.engine.page_mover import Move
from jaxllm.engine.runner import Runner, StepHandle
from jaxllm.engine.token_reports import TokenReports
from jaxllm.errors import ConfigError, InvalidRequestError, OverloadedError
from jaxllm.loading.checkpoint import Checkpoint
from jaxllm.loading.sources import open_checkpoint
from jaxllm.models.model import Model, model_max_len
from jaxllm.pallas_kernels.ragged_paged_attention.api import IMPLEMENTATIONS
from jaxllm.scheduler import (
    Request,
    RequestRefusedError,
    RequestStatus,
    Scheduler,
    SchedulerBusyError,
    SchedulerConfig,
    SchedulerStats,
)
from jaxllm.scheduler.buckets import Bucket, pick_bucket
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

    def __init__(self, config: EngineConfig, *, checkpoint: Checkpoint | None = None, progress: bool = False):
        """Reads the weights and compiles the first program, side by side.

        checkpoint: of the model, if it is open already.
        progress: shows a bar while the weights are read.
        """
        checkpoint = checkpoint or open_checkpoint(config.model, revision=config.revision)
        checkpoint.require_tokenizer()  # Those who bring the core its token ids need it, and all else takes long.
        platform = jax.default_backend()
        self.config = resolved = resolve(config, platform=platform, model_max_len=model_max_len(checkpoint.config))
        if config.attention_implementation not in (None, *IMPLEMENTATIONS):
            raise ConfigError(
                f"attention_implementation is {config.attention_implementation!r}; it must be one of "
                f"{', '.join(IMPLEMENTATIONS)}, or None for auto"
            )
        if config.attention_implementation in {"tpu", "gpu"} - {platform}:
            raise ConfigError(
                f"attention_implementation is {config.attention_implementation!r} and JAX runs on {platform}: leave "
                "it out for auto"
            )
        mesh = _make_mesh(config.tensor_parallel_size)
        model = Model.from_checkpoint(
            checkpoint, dtype=jnp.dtype(resolved.dtype), max_model_len=resolved.max_model_len, mesh=mesh
        )
        use_compilation_cache(resolved)
        with ThreadPoolExecutor(1, thread_name_prefix="jaxllm-load") as loader:
            weights = loader.submit(model.load, checkpoint, progress=progress)
            self.runner = Runner(model, resolved, mesh)
            self.runner.start(weights.result())

        self._buckets = self.runner.ready_buckets
        self.scheduler = Scheduler(_scheduler_config(resolved, self.runner))
        self.scheduler.set_step_sizes(_mixed_sizes(self._buckets))
        self.info = _info(config, resolved, checkpoint, self.runner, model, self.scheduler.config, mesh)
        self._seeds = random.Random(config.seed)
        self._reports = TokenReports(resolved.max_num_seqs)
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
        arrival, wait_s, queue_wait_s = request.arrival_time, request.timeout_s, request.queue_timeout_s
        try:
            queued = Request(
                request.request_id,
                token_ids,
                max_tokens=request.max_tokens or max(1, self.info.max_model_len - len(token_ids)),
                min_tokens=request.min_tokens,
                stop_token_ids=request.stop_token_ids,
                priority=request.priority,
                tenant=request.tenant,
                arrival_time=arrival,
                deadline=None if wait_s is None else arrival + wait_s,
                queue_deadline=None if queue_wait_s is None else arrival + queue_wait_s,
                cache_salt=request.cache_salt,
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
        if expired := self.scheduler.expire():
            self._reports.end_all(expired)
        for move in self.runner.finished_moves():
            self._take_in_move(move)
        if len(buckets := self.runner.ready_buckets) != len(self._buckets):
            self._buckets = buckets
            self.scheduler.set_step_sizes(_mixed_sizes(buckets))
        plan = self.scheduler.schedule()
        self.runner.move_pages(self.scheduler.take_page_moves())
        if plan is not None:
            self._launch(plan)
        if len(self._in_flight) > (0 if plan is None else 1):
            self._take_in()
        elif plan is None:
            wait_s = _PAGES_SLEEP_S if self.scheduler.is_waiting_for_pages else self.scheduler.wait_s
            time.sleep(min(wait_s, _MAX_SLEEP_S))
            return self._reports.take()
        self._step_s += time.perf_counter() - start
        return self._reports.take()

    def _launch(self, plan: StepPlan) -> None:
        self._current = plan
        self._reports.start(plan)
        bucket = pick_bucket(self._buckets, plan.num_tokens, plan.num_seqs, plan.max_q_len)
        batch = StepBatch.build(plan, self.scheduler.table, bucket)
        wants_logprobs = self._reports.num_with_logprobs > 0 and bool(batch.wants_logprobs.any())
        self._in_flight.append(_InFlight(plan, self.runner.launch(batch), wants_logprobs))
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
        """Tells the scheduler of a copy between device and host, and writes what has come where it says."""
        if move.error is not None:
            logger.warning("pages could not be %s: %s", move.kind, move.error)
        if move.ticket is None:
            self.scheduler.pages_saved(move.slots, is_sound=move.error is None)
        elif move.error is not None:
            self.scheduler.load_failed(move.ticket)
        elif pages := self.scheduler.pages_loaded(move.ticket, move.num_pages, move.seconds):
            self.runner.write_pages(move, pages)

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
        scheduler = self.scheduler.stats()
        plain = {field.name: _plain(getattr(scheduler, field.name)) for field in fields(SchedulerStats)}
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
            **plain,
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


def _plain(value: Any) -> Any:
    """A figure of the scheduler's in numbers, tuples of them, and mappings of names to them."""
    if isinstance(value, Mapping):
        return {status.value: number for status, number in value.items()}
    if isinstance(value, int | float | tuple):
        return value
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _info(
    config: EngineConfig,
    resolved: ResolvedConfig,
    checkpoint: Checkpoint,
    runner: Runner,
    model: Model,
    scheduler: SchedulerConfig,
    mesh: jax.sharding.Mesh,
) -> EngineInfo:
    device = mesh.devices.flat[0]
    return EngineInfo(
        model=config.model,
        revision=config.revision,
        max_model_len=scheduler.max_model_len,
        vocab_size=model.config.vocab_size,
        page_size=scheduler.page_size,
        num_pages=scheduler.num_pages,
        num_host_pages=runner.num_host_pages,
        page_bytes=runner.page_bytes,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        dtype=resolved.dtype,
        kv_cache_dtype=resolved.kv_cache_dtype,
        platform=device.platform,
        device=device.device_kind,
        eos_token_ids=_eos_token_ids(checkpoint),
        enable_prefix_caching=scheduler.enable_prefix_caching,
    )


def _scheduler_config(config: ResolvedConfig, runner: Runner) -> SchedulerConfig:
    return SchedulerConfig.of(
        config.options,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        page_size=config.page_size,
        num_pages=runner.num_pages,
        windows=runner.groups.windows,
        num_host_pages=runner.num_host_pages,
        step_sizes=tuple(_mixed_sizes(runner.buckets)),
    )


def _mixed_sizes(buckets: Iterable[Bucket]) -> list[int]:
    return [bucket.num_tokens for bucket in buckets if not bucket.is_decode_only]


def _make_mesh(tensor_parallel_size: int) -> jax.sharding.Mesh:
    devices = jax.devices()
    if tensor_parallel_size > len(devices):
        raise ConfigError(
            f"tensor_parallel_size is {tensor_parallel_size}; this machine has {len(devices)} "
            f"{devices[0].platform} devices. Lower it, or run on more devices."
        )
    return jax.make_mesh(
        (1, tensor_parallel_size),
        ("data", "model"),
        axis_types=(AxisType.Auto, AxisType.Auto),
        devices=devices[:tensor_parallel_size],
    )


def _eos_token_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """The end tokens that the model's configs name; its tokenizer, which is not here, may name another."""
    found: list[int] = []
    for config in (checkpoint.generation_config, checkpoint.config):
        ids = config.get("eos_token_id")
        found += ids if isinstance(ids, list) else [ids] if ids is not None else []
    return tuple(dict.fromkeys(found))
