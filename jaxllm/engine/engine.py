"""The loop: schedule a step, launch it, and take in the result of the one before."""

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from jaxllm.config import EngineConfig, ResolvedConfig, resolve
from jaxllm.engine.output_processor import OutputProcessor
from jaxllm.engine.runner import Runner, StepHandle
from jaxllm.errors import ConfigError, InvalidRequestError, OverloadedError
from jaxllm.loading.checkpoint import Checkpoint
from jaxllm.loading.sources import open_checkpoint
from jaxllm.models.model import Model, model_max_len
from jaxllm.outputs import RequestOutput
from jaxllm.pallas_kernels.ragged_paged_attention.api import IMPLEMENTATIONS
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler import (
    Request,
    RequestRefusedError,
    RequestStatus,
    SamplingRow,
    Scheduler,
    SchedulerBusyError,
    SchedulerConfig,
    SchedulerConfigError,
)
from jaxllm.scheduler.buckets import pick
from jaxllm.scheduler.step_batch import StepBatch
from jaxllm.scheduler.step_plan import StepPlan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


_MAX_SLEEP_S = 1e-3  # in a merge window, for new requests may end it


class Engine:
    """Serves one model. Not thread-safe: one thread adds requests and calls `step`."""

    def __init__(self, config: EngineConfig, *, progress: bool = False):
        """Opens the model, reads its weights and compiles the first program, side by side."""
        checkpoint = open_checkpoint(config.model, revision=config.revision)
        platform = jax.default_backend()
        self.config = resolved = resolve(config, platform=platform, model_max_len=model_max_len(checkpoint.config))
        if resolved.attention_implementation not in (None, *IMPLEMENTATIONS):
            raise ConfigError(
                f"attention_implementation is {resolved.attention_implementation!r}; it must be one of "
                f"{', '.join(IMPLEMENTATIONS)}, or None for auto"
            )
        if resolved.attention_implementation == "tpu" and platform != "tpu":
            raise ConfigError(f"attention_implementation is 'tpu' and JAX runs on {platform}: leave it out for auto")
        _use_compilation_cache(resolved)
        mesh = _make_mesh(resolved.tensor_parallel_size)
        model = Model.from_checkpoint(
            checkpoint, dtype=jnp.dtype(resolved.dtype), max_model_len=resolved.max_model_len, mesh=mesh
        )
        with ThreadPoolExecutor(2, thread_name_prefix="jaxllm-load") as loaders:
            tokenizer = loaders.submit(checkpoint.tokenizer)
            weights = loaders.submit(model.load, checkpoint, progress=progress)
            self.runner = Runner(model, resolved, mesh)
            self.runner.start(weights.result())
            self.tokenizer: PreTrainedTokenizerFast = tokenizer.result()

        self.scheduler = Scheduler(_scheduler_config(resolved, self.runner))
        self.vocab_size = model.config.vocab_size
        self._eos_token_ids = _eos_token_ids(checkpoint, self.tokenizer)
        self._seeds = random.Random(config.seed)
        self._outputs = OutputProcessor(self.tokenizer)
        self._in_flight: deque[tuple[StepPlan, StepHandle]] = deque()

    @property
    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> None:
        """Queues a request; `step` returns its output when it has finished.

        Args:
          request_id: unique among the unfinished requests.
          prompt_token_ids: at least one, fewer than max_model_len, within the vocabulary.
          prompt: the text of the prompt, to be returned with the output.
          priority: lower runs first.
          tenant: on whose account it runs.
          cache_salt: it shares cached prefixes with requests of the same salt only.
          timeout_s, queue_timeout_s: it ends (with the reason "timeout") when it has not finished, or not started, in
            this time.
          on_text: called with each new piece of text, from within `step`.

        Raises InvalidRequestError, or OverloadedError if there is no room now, and leaves everything as it was.
        """
        now = time.monotonic()
        max_model_len = self.scheduler.config.max_model_len
        outside = [token for token in prompt_token_ids if not 0 <= token < self.vocab_size]
        if outside:
            raise InvalidRequestError(
                f"token id {outside[0]:,} is not in the vocabulary; ids must be from 0 to {self.vocab_size - 1:,}"
            )
        stop_token_ids = params.stop_token_ids or ()
        try:
            request = Request(
                request_id,
                prompt_token_ids,
                max_tokens=params.max_tokens or max(1, max_model_len - len(prompt_token_ids)),
                stop_token_ids=(*stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)),
                priority=priority,
                tenant=tenant,
                arrival_time=now,
                deadline=None if timeout_s is None else now + timeout_s,
                queue_deadline=None if queue_timeout_s is None else now + queue_timeout_s,
                cache_salt=cache_salt,
                sampling=SamplingRow(
                    temperature=params.temperature,
                    top_k=params.top_k,
                    top_p=params.top_p,
                    min_p=params.min_p,
                    seed=self._seeds.getrandbits(32) if params.seed is None else params.seed_uint32(),
                ),
            )
            self.scheduler.add_request(request)
        except SchedulerBusyError as error:
            raise OverloadedError(str(error), error.retry_after_s) from error
        except RequestRefusedError as error:
            raise InvalidRequestError(str(error)) from error
        self._outputs.add(request, prompt=prompt, params=params, on_text=on_text)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """Ends a request in any state. Returns what it has so far; None if no unfinished one has this id."""
        return self._outputs.finish(request_id) if self.scheduler.abort_request(request_id) else None

    def abort_all(self) -> list[RequestOutput]:
        """Ends every request, after a `step` that raised. Returns what they have so far.

        Nothing that a step may have left half done is found in the prefix cache afterwards.
        """
        for request_id in self.scheduler.request_ids:
            self.scheduler.abort_request(request_id)
        self.scheduler.reset_prefix_cache()
        return [self._outputs.finish(request_id) for request_id in self._outputs.request_ids]

    def step(self) -> list[RequestOutput]:
        """Launches the next step, and takes in the one before while it runs. Returns what has finished."""
        expired = self.scheduler.expire()
        plan = self.scheduler.schedule()
        if plan is not None:
            bucket = pick(self.runner.ready_buckets, plan.num_tokens, plan.num_seqs, plan.is_decode_only)
            handle = self.runner.launch(StepBatch.build(plan, self.scheduler.table, bucket))
            self._in_flight.append((plan, handle))
            self._outputs.note_start(plan.started)
        outputs: list[RequestOutput] = []
        if len(self._in_flight) > (0 if plan is None else 1):
            plan, handle = self._in_flight.popleft()
            output = self.scheduler.update(plan, handle.sampled_token_ids()[: plan.num_seqs])
            finished, stopped = self._outputs.process(output)
            for ended in stopped:
                self.scheduler.finish_request(ended.request_id, RequestStatus.FINISHED_STOP)
            outputs = finished + stopped
        elif plan is None:
            time.sleep(min(self.scheduler.wait_s, _MAX_SLEEP_S))
        return outputs + [self._outputs.finish(request.request_id) for request in expired]

    def shutdown(self) -> None:
        """Stops background work."""
        self.runner.shutdown()


def _scheduler_config(config: ResolvedConfig, runner: Runner) -> SchedulerConfig:
    try:
        return SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            page_size=config.page_size,
            num_pages=runner.num_pages,
            windows=runner.groups.windows,
            enable_prefix_caching=config.enable_prefix_caching,
            policy=config.scheduling_policy,
            max_queued_requests=config.max_queued_requests,
            max_queued_tokens=config.max_queued_tokens,
            max_wait_ms=config.max_wait_ms,
            min_batch=config.min_batch,
            tpot_target_ms=config.tpot_target_ms,
            ttft_target_ms=config.ttft_target_ms,
            step_sizes=tuple(bucket.num_tokens for bucket in runner.buckets if not bucket.is_decode_only),
        )
    except SchedulerConfigError as error:
        raise ConfigError(str(error)) from error


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


def _use_compilation_cache(config: ResolvedConfig) -> None:
    """Keeps compiled programs on disk, unless JAX has been told where already."""
    if config.compilation_cache_dir and not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", config.compilation_cache_dir)


def _eos_token_ids(checkpoint: Checkpoint, tokenizer: "PreTrainedTokenizerFast") -> tuple[int, ...]:
    """The model's own end tokens: of its generation config, its config and its tokenizer."""
    found: list[int] = []
    for ids in (
        checkpoint.generation_config.get("eos_token_id"),
        checkpoint.config.get("eos_token_id"),
        tokenizer.eos_token_id,
    ):
        found += ids if isinstance(ids, list) else [ids] if ids is not None else []
    return tuple(dict.fromkeys(found))
