"""The GPU kernel for rows of many tokens: chunks of prompts. Tiles of 128 tokens at one query head.

The matrix unit is what such rows wait for. Two warpgroups compute, with 64 tokens each and the same keys: while one
multiplies, the other one weighs its scores ("FlashAttention-3", arXiv 2407.08608). A third one fetches, and makes of
what it gets operands of the matrix unit: it converts what has 8 bits, and clears values that nobody sees.
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxllm.pallas_kernels.ragged_paged_attention.gpu_blocks import Blocks
from jaxllm.pallas_kernels.ragged_paged_attention.gpu_keys import tiled
from jaxllm.pallas_kernels.ragged_paged_attention.gpu_results import Parts, Results
from jaxllm.pallas_kernels.ragged_paged_attention.gpu_ring import Ring
from jaxllm.pallas_kernels.ragged_paged_attention.gpu_rows import Rows
from jaxllm.pallas_kernels.ragged_paged_attention.gpu_softmax import ROW_LAYOUT, ROWS, Ref, Scores, State, at_head
from jaxllm.pallas_kernels.ragged_paged_attention.gpu_work import (
    Segment,
    Unit,
    Visible,
    Work,
    for_each_segment,
    read_segment,
)

WARPGROUPS = 2  # That compute.
TILE = WARPGROUPS * ROWS
ALIGNMENT = 8  # Of a tile's first token: what a tile in shared memory has rows of.
COMPUTE_REGISTERS, FETCH_REGISTERS = 216, 72  # Of each thread; 65,536 in all.


class Inputs(NamedTuple):
    """In the GPU's memory."""

    work: Work
    page_table: Any  # int32 [S, P]
    q: Any  # [padded_tokens(T), N, H]
    k_scales: Any  # float32 [K], or None
    v_scales: Any  # float32 [K], or None
    sinks: Any  # float32 [N], logits of base 2, or None
    pages: Any  # [pages, 2K, page_size, H]


class Scratch(NamedTuple):
    """In shared memory. W warpgroups compute."""

    q: Any  # [W, ROWS, H]
    results: Any  # Results, with an axis of W
    ring: Any  # Ring, of keys and values
    weights: Any  # [W, ROWS, block], see add_values.
    q_barriers: Any  # [W]: queries are there
    q_free: Any  # [W]: they are no more needed
    turn: Any  # Of the warpgroups that compute.


def padded_tokens(num_tokens: int) -> int:
    """Tokens that the queries must have room for."""
    return max(-(-num_tokens // ALIGNMENT) * ALIGNMENT, ROWS)


class Tile(NamedTuple):
    """A warpgroup's part of a unit. Row r of its products is token `start` + r, if that is at least `first`."""

    start: Any
    first: Any
    end: Any

    @classmethod
    def of(cls, unit: Unit, warpgroup: Any, num_padded_tokens: int) -> "Tile":
        token = unit.token + warpgroup * ROWS
        return cls(
            # The last tile of a step may be one with the one before, or begin before it.
            start=pl.multiple_of(jnp.minimum(token, num_padded_tokens - ROWS), ALIGNMENT),
            first=jnp.maximum(unit.first, token),
            end=jnp.minimum(unit.end, token + ROWS),
        )


def attend(inputs: Inputs, out: Ref, *, scores: Scores, blocks: Blocks, group: int) -> Parts:
    """Writes the results of units that are whole to `out`, [T, N, H], and gives the parts of the others.

    Args:
      group: query heads of a KV head.
    """
    num_padded_tokens, _, H = inputs.q.shape
    T, dtype, kv_dtype = out.shape[0], inputs.q.dtype, inputs.pages.dtype

    def kernel(inputs: Inputs, out: Ref, parts: Parts, scratch: Scratch) -> None:
        warpgroup, thread_block, ring = lax.axis_index("warpgroup"), lax.axis_index("block"), scratch.ring

        def for_each(body: Any) -> Array:
            """`body(segment, keys and values of blocks before it)`. Gives how many there were of them."""

            def one(segment: Segment, num_earlier: Array) -> Array:
                body(segment, num_earlier)
                return num_earlier + 2 * (segment.end_block - segment.first_block)

            return for_each_segment(inputs.work, thread_block, one, jnp.int32(0))

        def take_turn() -> None:
            plgpu.barrier_arrive(scratch.turn)
            plgpu.barrier_wait(scratch.turn)

        def compute(segment: Segment, num_earlier: Array) -> None:
            unit, kv_head = segment.unit, segment.head // group
            start = Tile.of(unit, warpgroup, num_padded_tokens).start
            plgpu.barrier_wait(scratch.q_barriers.at[warpgroup])
            rows = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW_LAYOUT)
            pl.when(warpgroup == 1)(take_turn)
            state = Rows(
                scores=scores,
                block_len=blocks.keys,
                q_smem=scratch.q,
                warpgroup=warpgroup,
                weights_smem=None if scratch.weights is None else scratch.weights.at[warpgroup],
                keys=lambda number: ring.take(num_earlier + 2 * number),
                values=lambda number, _: ring.take(num_earlier + 2 * number + 1),
                end_keys=lambda number: ring.give_back(num_earlier + 2 * number),
                end_values=lambda number: ring.give_back(num_earlier + 2 * number + 1),
                turn=take_turn,
            ).attend(segment, start + unit.offset + rows, at_head(inputs.k_scales, kv_head))
            pl.when(warpgroup == 0)(take_turn)
            plgpu.barrier_arrive(scratch.q_free.at[warpgroup])
            # It is read again: there are no registers to keep all of it in.
            send(state, read_segment(inputs.work, thread_block, segment.number))

        def send(state: State, segment: Segment) -> None:
            head, tile = segment.head, Tile.of(segment.unit, warpgroup, num_padded_tokens)
            results = Results(*(ref.at[warpgroup] for ref in scratch.results))

            @pl.when(segment.is_whole)
            def send_results() -> None:
                def copy(smem: Ref, columns: pl.Slice) -> None:
                    # As many rows as there are, by the binary digits of their number: a copy has a size that is known.
                    token, count = tile.first, jnp.maximum(tile.end - tile.first, 0)
                    for size in (64, 32, 16, 8, 4, 2, 1):
                        if size > T:
                            continue

                        @pl.when((count & size) != 0)
                        def _(size: int = size, token: Array = token) -> None:
                            plgpu.copy_smem_to_gmem(
                                smem.at[pl.ds(token - tile.start, size)], out.at[pl.ds(token, size), head, columns]
                            )

                        token += count & size

                v_scale = at_head(inputs.v_scales, head // group)
                results.send(state.acc, state.result(at_head(inputs.sinks, head), v_scale), copy)

            @pl.when(~segment.is_whole)
            def send_part() -> None:
                results.send_part(state, parts, segment.slot, warpgroup * ROWS, ROWS)

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def fetch(segment: Segment, num_earlier: Array) -> None:
            unit, head = segment.unit, segment.head
            for i in range(WARPGROUPS):
                pl.when(num_earlier > 0)(partial(plgpu.barrier_wait, scratch.q_free.at[i]))
                start = Tile.of(unit, i, num_padded_tokens).start
                plgpu.copy_gmem_to_smem(
                    inputs.q.at[pl.ds(start, ROWS), head], scratch.q.at[i], scratch.q_barriers.at[i]
                )
            visible = Visible.by(unit, scores.sliding_window)
            ring.fill(inputs.pages, inputs.page_table, segment, visible, head // group, num_earlier)

        @pl.when(warpgroup < WARPGROUPS)
        def _() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            for_each(compute)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == WARPGROUPS)
        def _() -> None:
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")
            num_operands = for_each(fetch)
            # Whoever waits for a barrier sees all of its phases: a simulated GPU of jax 0.11 insists.
            ring.wait_until_empty(num_operands)
            for i in range(WARPGROUPS):
                pl.when(num_operands > 0)(partial(plgpu.barrier_wait, scratch.q_free.at[i]))

    weights = tiled((WARPGROUPS, ROWS, blocks.keys), dtype)
    return plgpu.kernel(
        kernel,
        out_type=(Parts.types(blocks.thread_blocks, TILE, H),),
        scratch_types=[
            Scratch(
                q=tiled((WARPGROUPS, ROWS, H), dtype),
                results=Results.types(dtype, (WARPGROUPS,)),
                ring=Ring.types(
                    blocks,
                    head_dim=H,
                    page_size=inputs.pages.shape[2],
                    dtype=dtype,
                    kv_dtype=kv_dtype,
                    num_warpgroups=WARPGROUPS,
                ),
                weights=None if blocks.weights_in_registers else weights,
                q_barriers=plgpu.Barrier(num_barriers=WARPGROUPS),
                q_free=plgpu.Barrier(num_barriers=WARPGROUPS),
                turn=plgpu.Barrier(num_arrivals=WARPGROUPS),
            )
        ],
        grid=(blocks.thread_blocks,),
        grid_names=("block",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        kernel_name="paged_attention_tiles",
    )(inputs, out)[0]
