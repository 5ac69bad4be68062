"""Runs steps: one compiled program for each bucket, with donated caches."""

import logging
import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.config import ResolvedConfig
from jaxllm.engine.compiler_options import compiler_options
from jaxllm.engine.device_state import DeviceState
from jaxllm.engine.kv_cache import KVCacheLayout, MemoryBudget, memory_limit_bytes
from jaxllm.engine.page_mover import Move, PageMover
from jaxllm.engine.sampler import Logprobs
from jaxllm.engine.step_command import StepCommand
from jaxllm.engine.step_program import StepResult, make_step
from jaxllm.errors import ConfigError
from jaxllm.layers.parameter import activation_dtype
from jaxllm.models.family import ModelConfig
from jaxllm.models.model import Model
from jaxllm.scheduler import PageMoves
from jaxllm.scheduler.batch_layout import BatchLayout
from jaxllm.scheduler.buckets import Bucket, compile_order, declare_buckets
from jaxllm.scheduler.sampled_tokens import SampledTokens
from jaxllm.scheduler.windows import num_request_pages

logger = logging.getLogger(__name__)

COMPILE_THREADS_PREFIX = "jaxllm-compile"
_MIN_TOKENS = 4  # XLA on CPU leaves its fast path for products of one row.
_COMPILE_THREADS = min(8, max(1, (os.cpu_count() or 2) // 2))  # XLA has threads of its own in each compilation.


@dataclass(frozen=True)
class StepHandle:
    """A step on its way."""

    _result: StepResult

    def sampled(self, num_seqs: int) -> SampledTokens:
        """The tokens of so many rows. Waits for the step."""
        packed = np.asarray(self._result.sampled)[:, :num_seqs]
        return SampledTokens(num_tokens=packed[0], token_ids=packed[1:].T)

    def logprobs(self) -> Logprobs:
        """As numpy arrays; zeros if no row of the batch wants them. Waits for the step."""
        return jax.device_get(self._result.logprobs)


class Runner:
    """Owns the weights, the caches and the programs, and the host's part of the KV cache; carries out `StepCommand`s.

    The constructor compiles the program of the largest bucket, which fits every step; it needs the model's shapes
    only. `start` takes the weights, after which steps can be launched. The other programs are compiled in background
    threads, in the order of `compile_order`, and `ready_buckets` grows as they come.

    Who schedules looks at `ready_buckets` and `finished_moves`, so that none of its commands has to wait. A runner that
    follows, on another host, needs nothing but the commands, and waits where it is later.
    """

    def __init__(self, model: Model, config: ResolvedConfig, mesh: Mesh):
        self._model = model
        self._config = config
        self._mesh = mesh
        self._whole = NamedSharding(mesh, PartitionSpec())
        self._platform = mesh.devices.flat[0].platform
        layout = KVCacheLayout.of(
            model.config.cache_specs,
            config.max_model_len,
            page_size=config.page_size,
            dtype=jnp.dtype(config.kv_cache_dtype),
            implementation=config.options.attention_implementation,
            mesh=mesh,
        )
        with jax.set_mesh(mesh):
            self._layout = layout.choose_implementation(
                model.config.num_heads,
                activation_dtype(jnp.dtype(config.dtype), self._platform),
                config.max_num_seqs,
                config.max_pages_per_seq,
            )
        self.groups = layout.groups
        has_target = config.options.tpot_target_ms is not None
        self.buckets = declare_buckets(
            config.max_num_batched_tokens,
            config.max_num_seqs,
            _MIN_TOKENS,
            with_small_mixed=has_target,
        )
        order = compile_order(self.buckets, for_short_steps=has_target)
        # While weights are read there is time for those that most steps need.
        num_at_once = 3 if has_target else 2
        self._at_once, self._later = order[:num_at_once], order[num_at_once:]
        self._programs: dict[Bucket, jax.stages.Compiled] = {}
        self._executor = ThreadPoolExecutor(_COMPILE_THREADS, thread_name_prefix=COMPILE_THREADS_PREFIX)
        self._compiling: dict[Bucket, Future[None]] = {}
        self.num_pages = config.options.num_pages or 0
        self._mover = self._make_mover()
        self._loaded: deque[Move] = deque()  # Chunks that have come from the host, to be written in this order.
        self._compile_first()

    def start(self, weights: list[jax.Array]) -> None:
        """Takes the weights, in the order of the model's `structs`, and allocates the caches."""
        self._weights = weights
        if self._mover is not None:
            self._mover.compile(self.num_pages)
        self._kv_pages = self._layout.allocate(self.num_pages)
        self._state = DeviceState.allocate(self._config.max_num_seqs, self._whole)
        self._begin_to_compile(self._later)

    @property
    def ready_buckets(self) -> Sequence[Bucket]:
        """Those whose program is compiled."""
        return list(self._programs)

    def wait_until_compiled(self) -> None:
        """Returns when every program is ready. Raises what a compilation raised."""
        for future in self._compiling.values():
            future.result()

    def launch(self, command: StepCommand) -> StepHandle | None:
        """Begins copies of pages, and starts the step if there is one. What is begun runs in the order of the commands.

        Returns at once if the step's bucket is ready and its writes are of `finished_moves`; else it waits for them.
        Raises RuntimeError for pages that are to be written and could not be copied here.
        """
        if command.moves:
            self._move_pages(command.moves)
        if command.bucket is None:
            return None
        if command.bucket not in self._programs:
            self._compiling[command.bucket].result()
        packed = jax.device_put(command.buffer, self._whole)
        self._kv_pages, self._state, result = self._programs[command.bucket](
            self._weights, self._kv_pages, self._state, packed
        )
        return StepHandle(result)

    @property
    def vocab_size(self) -> int:
        return self._model.config.vocab_size

    @property
    def num_host_pages(self) -> int:
        """Pages that the host's memory holds beside the device's."""
        return 0 if self._mover is None else self._mover.num_host_pages

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, over all devices."""
        return self._layout.page_bytes() * self._mesh.shape["model"]

    def finished_moves(self) -> Sequence[Move]:
        """The copies that have been made since the last call, or have failed. Never waits.

        Of each that was loaded, a command's writes must say where it goes.
        """
        if self._mover is None:
            return ()
        moves = self._mover.finished()
        self._loaded += [move for move in moves if move.kind == "loaded"]
        return moves

    @property
    def is_usable(self) -> bool:
        """Whether a further step can run: not if one has failed on the device, or on its way there, for then the
        caches that it was given are lost. Waits for the steps in flight."""
        try:
            jax.block_until_ready([self._kv_pages, self._state])
        except RuntimeError:
            return False
        return True

    def shutdown(self) -> None:
        """Gives up the compilations and copies that have not begun."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        if self._mover is not None:
            self._mover.shutdown()

    def _make_mover(self) -> PageMover | None:
        """None without memory on the host. Raises ConfigError if that does not hold a page."""
        host_kv_gb = self._config.options.host_kv_gb
        if not host_kv_gb:
            return None
        if (num_host_pages := int(host_kv_gb * 1e9 // self.page_bytes)) < 1:
            raise ConfigError(
                f"host_kv_gb is {host_kv_gb}, and a page of the KV cache has {self.page_bytes / 1e9:.6f} "
                "GB. Give it room for many, or leave host_kv_gb at 0."
            )
        return PageMover(self._layout.structs(1), num_host_pages=num_host_pages, mesh=self._mesh)

    def _move_pages(self, moves: PageMoves) -> None:
        assert self._mover is not None, "nothing moves without a tier"
        for ticket, pages in moves.writes:
            move = self._next_loaded(self._mover)
            assert move.ticket == ticket, f"pages of the load {move.ticket} have come, not of {ticket}"
            if pages and move.error is not None:
                raise RuntimeError(f"pages could not be copied from the host: {move.error}")
            if pages:
                self._kv_pages = self._mover.write(self._kv_pages, move, pages)
        if moves.saves:
            self._mover.save(self._kv_pages, moves.saves)
        for ticket, slots in moves.loads:
            self._mover.load(ticket, slots)

    def _next_loaded(self, mover: PageMover) -> Move:
        """The oldest chunk that no command has said anything of. Waits until it has come."""
        while not self._loaded:
            self._loaded += [move for move in mover.finished(wait=True) if move.kind == "loaded"]
        return self._loaded.popleft()

    def _begin_to_compile(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            self._compiling[bucket] = self._executor.submit(self._compile_in_background, bucket)

    def _compile_largest(self) -> int:
        """Compiles the largest bucket's program and begins with those that come next. Returns bytes of temporaries."""
        largest, *next_ones = self._at_once
        self._begin_to_compile(next_ones)
        return self._compile(largest)

    def _compile_first(self) -> None:
        """Compiles the largest bucket's program and settles the number of pages, which its temporaries decide."""
        config, page_bytes = self._config, self._layout.page_bytes()
        if config.options.num_pages is not None:
            self._compile_largest()
            return
        limit_bytes = memory_limit_bytes(
            self._mesh.local_devices[0], config.memory_utilization, self._model.weights_bytes
        )
        num_pages = num_request_pages(
            config.max_model_len, self.groups.windows, config.max_num_batched_tokens, config.page_size
        )
        if self._mover is not None:
            limit_bytes -= self._mover.max_staging_bytes // self._mesh.shape["model"]
        at_least, at_most = num_pages + 1, config.max_num_seqs * num_pages + 1
        itemsize = activation_dtype(jnp.dtype(config.dtype), self._platform).itemsize
        num_devices = self._mesh.shape["model"]
        temporaries_bytes = _estimate_temporaries_bytes(self._model.config, self.buckets[-1], itemsize, num_devices)
        while True:
            budget = MemoryBudget(
                limit_bytes=limit_bytes,
                weights_bytes=self._model.weights_bytes,
                temporaries_bytes=temporaries_bytes,
            )
            self.num_pages = budget.num_pages(page_bytes, at_least=at_least, at_most=at_most)
            needed_bytes = self._compile_largest()
            if needed_bytes <= budget.limit_bytes - budget.weights_bytes - self.num_pages * page_bytes:
                return
            self.wait_until_compiled()  # What was begun has the wrong number of pages, and is made anew.
            self._programs.clear()
            temporaries_bytes = needed_bytes

    def _compile_in_background(self, bucket: Bucket) -> None:
        if not threading.main_thread().is_alive():
            return  # The process is ending, and would wait for every program that is still to come.
        try:
            self._compile(bucket)
        except Exception:
            logger.exception("the program of %s cannot be compiled; its steps go on in a larger bucket", bucket)
            raise

    def _compile(self, bucket: Bucket) -> int:
        """Makes the bucket's program. Returns the bytes of its temporaries."""
        config = self._config
        layout = BatchLayout.of(bucket, config.max_pages_per_seq, self.groups.num_groups)
        step = make_step(self._model, layout, self._layout)
        arguments = (
            self._model.structs,
            self._layout.structs(self.num_pages),
            DeviceState.structs(config.max_num_seqs, self._whole),
            jax.ShapeDtypeStruct((layout.size,), jnp.int32, sharding=self._whole),
        )
        out_shardings = ([self._layout.sharding] * self.groups.num_arrays, self._whole, self._whole)
        with jax.set_mesh(self._mesh):
            lowered = jax.jit(step, donate_argnums=(1, 2), out_shardings=out_shardings).lower(*arguments)
            program = lowered.compile(compiler_options(bucket, self._mesh))
        self._programs[bucket] = program
        memory = program.memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes


def _estimate_temporaries_bytes(config: ModelConfig, bucket: Bucket, itemsize: int, num_devices: int) -> int:
    """A generous guess at a program's temporaries: a few activations of a layer, and of the logits (float32)."""
    head_dim = max(spec.head_dim for spec in config.cache_specs)
    widths = config.model_dim + (config.ff_dim + config.num_heads * head_dim) // num_devices
    logits = bucket.num_seqs * config.vocab_size // num_devices
    return 6 * itemsize * bucket.num_tokens * widths + 4 * 4 * logits
