"""The GPU kernel that joins what several thread blocks found of one unit: "Flash-Decoding", for any kind of rows."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxllm.pallas_kernels.ragged_paged_attention.gpu_results import Parts
from jaxllm.pallas_kernels.ragged_paged_attention.gpu_softmax import MASKED, Ref
from jaxllm.pallas_kernels.ragged_paged_attention.gpu_work import SLOTS_PER_BLOCK, Unit, Work, read_unit, slot_of_part

ROWS = 8  # Of a thread block.
NUM_LOADS = 8  # Parts on their way at a time: each takes as long as the memory's latency.
# Two rows for each warp, half a warp and vectors of four for each.
LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((ROWS, 64), (2, 64), (4,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)


class Inputs(NamedTuple):
    """In the GPU's memory."""

    work: Work
    parts: Parts
    v_scales: Any  # float32 [K], or None
    sinks: Any  # float32 [heads of units, rows], logits of base 2, or None


def combine(
    inputs: Inputs,
    out: Ref,
    *,
    group: int,
    num_heads: int,
    place: Callable[[Array, Unit, Array], tuple[Array, Array, Array]],
) -> None:
    """Writes the results of units of which there are parts to `out`, [T, N, H].

    Args:
      group: units of a KV head at one token: 1 or, where each query head has its own, query heads of a KV head.
      num_heads: those that are units of their own.
      place: gives the token and the query head of a row of a unit at a head, and whether it is one.
    """
    num_slots, num_rows, head_dim = inputs.parts.values.shape

    def kernel(inputs: Inputs, out: Ref, out_smem: Ref) -> None:
        work, parts = inputs.work, inputs.parts
        thread_block, first_row = lax.axis_index("block"), lax.axis_index("rows") * ROWS
        quota, end = work.totals[2], work.totals[1] * num_heads
        begin = thread_block * quota

        # Of the thread blocks that have a part of a unit, the second one has its results joined.
        @pl.when(begin < end)
        def _() -> None:
            head, unit, unit_begin, unit_end = read_unit(work, work.spans[thread_block, 0])

            @pl.when((unit_begin < begin) & (unit_begin >= begin - quota))
            def _() -> None:
                first, last = thread_block - 1, (unit_end - 1) // quota

                def load(part: Array) -> tuple[Array, Array]:
                    slot = slot_of_part(jnp.minimum(part, last), part == first)
                    rows = pl.ds(first_row, ROWS)
                    values = plgpu.load(parts.values.at[slot, rows], optimized=False)
                    weights = plgpu.load(parts.weights.at[slot, rows], optimized=False)
                    weights = plgpu.layout_cast(weights, LAYOUT.reduce(1))
                    # Beyond the last one it is loaded again, to no effect.
                    return plgpu.layout_cast(values, LAYOUT), weights + jnp.where(part <= last, 0.0, MASKED)

                def add(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                    acc, max_, total = state
                    loaded = [load(first + i * NUM_LOADS + j) for j in range(NUM_LOADS)]
                    for values, weights in loaded:
                        new_max = jnp.maximum(max_, weights)
                        correction, weight = jnp.exp2(max_ - new_max), jnp.exp2(weights - new_max)
                        acc = acc * _columns(correction, acc) + values * _columns(weight, acc)
                        max_, total = new_max, total * correction + weight
                    return acc, max_, total

                empty = (
                    plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), LAYOUT),
                    plgpu.layout_cast(jnp.full((ROWS,), 2 * MASKED, jnp.float32), LAYOUT.reduce(1)),
                    plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), LAYOUT.reduce(1)),
                )
                num_loads = -(-(last - first + 1) // NUM_LOADS)
                acc, max_, total = lax.fori_loop(0, num_loads, add, empty)
                if inputs.sinks is not None:
                    sinks = plgpu.load(inputs.sinks.at[head, pl.ds(first_row, ROWS)], optimized=False)
                    total += jnp.exp2(plgpu.layout_cast(sinks, LAYOUT.reduce(1)) - max_)
                factor = 1.0 / total
                if inputs.v_scales is not None:
                    factor *= inputs.v_scales[head // group]
                out_smem[...] = (acc * _columns(factor, acc)).astype(out_smem.dtype)
                plgpu.commit_smem()
                for row in range(ROWS):
                    token, query_head, is_real = place(head, unit, first_row + row)

                    @pl.when(is_real)
                    def _(row: int = row, token: Array = token, query_head: Array = query_head) -> None:
                        plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(row, 1)], out.at[token, pl.ds(query_head, 1)])

                plgpu.wait_smem_to_gmem(0)

    plgpu.kernel(
        kernel,
        out_type=(),
        scratch_types=[plgpu.SMEM((ROWS, head_dim), out.dtype)],
        grid=(num_slots // SLOTS_PER_BLOCK, num_rows // ROWS),
        grid_names=("block", "rows"),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        kernel_name="paged_attention_combine",
    )(inputs, out)


def _columns(factor: Array, like: Array) -> Array:
    return lax.broadcast_in_dim(factor, like.shape, [0])
