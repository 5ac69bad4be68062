"""Runs cases of ragged paged attention on an implementation; kernels on a simulated chip that notices misdeeds."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import lcm
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from attention_cases import Case, Program
from jax import Array
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as gpu_interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh

from jaxllm.pallas_kernels.ragged_paged_attention import (
    gpu_blocks,
    pages_from_tokens,
    ragged_paged_attention,
    tokens_from_pages,
    tpu_blocks,
)
from jaxllm.pallas_kernels.ragged_paged_attention.tpu_layout import NUM_LANES, Layout

TPU_KINDS = {"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "v7x": "TPU7x"}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a step gives: `kv_BC2KH` is what `kv_pages`, in the implementation's own layout, hold after it."""

    out_TNH: np.ndarray
    kv_BC2KH: np.ndarray
    kv_pages: np.ndarray
    kv_pages_before: np.ndarray


def run(case: Case, implementation: str, *, chip: str = "v6e", small_blocks: bool = True) -> Outcome:
    """One step. A kernel that races, or reads or writes out of bounds, raises an error.

    Args:
      chip: of the TPUs, for which a kernel chooses its blocks.
      small_blocks: blocks as small as can be instead, so that short sequences have many; on a GPU few thread blocks,
        so that each has many units, instead of many, so that many share one.
    """
    step = _compiled(case.program, implementation, chip, small_blocks)
    arguments = (
        case.q_TNH,
        case.k_TKH,
        case.v_TKH,
        case.kv_BC2KH,
        case.kv_lens_S,
        case.page_table_SP,
        case.cu_q_lens,
        case.num_seqs,
    )
    simulator = {"tpu": tpu_simulator, "gpu": gpu_simulator}.get(implementation, nullcontext)
    with simulator():
        results = jax.block_until_ready(step(*arguments, **case.array_options))
    return Outcome(**{name: np.asarray(result) for name, result in results.items()})


@contextmanager
def tpu_simulator() -> Iterator[None]:
    """Interprets Pallas kernels for TPUs: memory begins as NaN, and a DMA happens when it is waited for."""
    params = pltpu.InterpretParams(
        detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan", dma_execution_mode="on_wait"
    )
    try:
        with pltpu.force_tpu_interpret_mode(params):
            yield
        # Older versions of JAX note a race and go on.
        assert interpret_pallas_call.races is not None, "no kernel was interpreted"
        assert not interpret_pallas_call.races.races_found
    finally:
        pltpu.reset_tpu_interpret_mode_state()


@contextmanager
def gpu_simulator() -> Iterator[None]:
    """Interprets Pallas kernels for GPUs; memory begins as NaN."""
    params = plgpu.InterpretGPUParams(detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan")
    try:
        with plgpu.force_gpu_interpret_mode(params), warnings.catch_warnings():
            # It multiplies with numpy, which warns of what is no number in rows that nobody reads.
            warnings.filterwarnings("ignore", "invalid value encountered in matmul", RuntimeWarning)
            yield
        assert not gpu_interpreter.get_races().races_found
    finally:
        gpu_interpreter.reset_gpu_interpret_mode_state()


@functools.cache
def _compiled(program: Program, implementation: str, chip: str, small_blocks: bool) -> Callable:
    # Not the jitted function, which would not know of other blocks.
    attend = functools.partial(
        ragged_paged_attention.__wrapped__, implementation=implementation, **program.static_options
    )

    def step(
        q_TNH: Array, k_TKH: Array, v_TKH: Array, kv_BC2KH: Array, *rows: Array, **array_options: Array
    ) -> dict[str, Array]:
        kv_pages_before = pages_from_tokens(kv_BC2KH, implementation)
        out_TNH, kv_pages = attend(q_TNH, k_TKH, v_TKH, kv_pages_before, *rows, **array_options)
        return {
            "out_TNH": out_TNH,
            "kv_BC2KH": tokens_from_pages(kv_pages, program.num_kv_heads, program.head_dim, implementation),
            "kv_pages": kv_pages,
            "kv_pages_before": kv_pages_before,
        }

    def step_on_tpu(*arguments: Array, **array_options: Array) -> dict[str, Array]:
        choose = smallest_blocks if small_blocks else tpu_blocks.choose
        with jax.sharding.use_abstract_mesh(tpu_abstract_mesh(chip)), mock.patch.object(tpu_blocks, "choose", choose):
            return step(*arguments, **array_options)

    def step_on_gpu(*arguments: Array, **array_options: Array) -> dict[str, Array]:
        packed, tiles = (
            functools.partial(gpu_test_blocks, choose, few=small_blocks)
            for choose in (gpu_blocks.packed, gpu_blocks.tiles)
        )
        with mock.patch.multiple(gpu_blocks, packed=packed, tiles=tiles):
            return step(*arguments, **array_options)

    if implementation in ("tpu", "gpu"):
        return jax.jit(step_on_tpu if implementation == "tpu" else step_on_gpu)
    # Each program runs a few small cases: quick compilation is worth more than the quickest code.
    return jax.jit(step, compiler_options={"xla_backend_optimization_level": 1})


def tpu_abstract_mesh(chip: str) -> AbstractMesh:
    """What a kernel asks for the chip that it is traced for."""
    device = AbstractDevice(TPU_KINDS[chip], 2 if chip in ("v5p", "v7x") else 1, "tpu")
    return AbstractMesh((), (), abstract_device=device)


def smallest_blocks(layout: Layout, chip: str | None) -> tpu_blocks.Blocks:
    del chip
    fetch = max(NUM_LANES, layout.page_size)
    return tpu_blocks.Blocks(
        decode_fetch=fetch,
        decode_tokens=NUM_LANES,
        chunk_fetch=fetch,
        chunk_tokens=NUM_LANES,
        chunk_queries=lcm(NUM_LANES, layout.rows_per_token) // layout.rows_per_token,
    )


def gpu_test_blocks(choose: Callable, *arguments: object, few: bool) -> gpu_blocks.Blocks:
    """What a simulated GPU can do, and is quick at."""
    blocks = choose(*arguments)
    return dataclasses.replace(blocks, stages=2, thread_blocks=2 if few else 7, weights_in_registers=False)


def bits(x: np.ndarray) -> np.ndarray:
    """An array's bits, to compare exactly; all NaNs are one."""
    x = np.ascontiguousarray(x)
    unsigned = x.view(f"u{x.dtype.itemsize}")
    if jnp.issubdtype(x.dtype, jnp.floating):
        unsigned = np.where(np.isnan(x), np.array(np.nan, x.dtype).view(unsigned.dtype), unsigned)
    return unsigned
