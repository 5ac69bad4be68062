"""The GPU kernel for rows of few tokens, decodes above all: the query heads of a KV head are rows of one product.

Memory is what such rows wait for. A warpgroup is a thread block of its own, and fetches what it will need while it
computes; two of them on a multiprocessor keep more in flight than the memory's latency needs.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxllm.pallas_kernels.ragged_paged_attention.gpu_blocks import Blocks
from jaxllm.pallas_kernels.ragged_paged_attention.gpu_keys import KVBlocks, Limits, clear, convert, tiled
from jaxllm.pallas_kernels.ragged_paged_attention.gpu_results import Parts, Results
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

TILE_ROWS = 8


class Packing(NamedTuple):
    """Which rows of a product are which query heads of a KV head.

    Queries come to shared memory in tiles of 8 heads. Those of a KV head may end within one: others come along.
    """

    group: int  # Query heads of a KV head.
    rows: int  # Of each token.
    max_tokens: int  # Of a unit.

    @classmethod
    def of(cls, group: int, *, decode_only: bool) -> "Packing":
        rows = _round_up(group + TILE_ROWS - math.gcd(group, TILE_ROWS))
        return cls(group, rows, 1 if decode_only else ROWS // rows)

    def first_head(self, kv_head: Any) -> Any:
        """The query head in a token's first row."""
        return kv_head * self.group // TILE_ROWS * TILE_ROWS

    def shift(self, kv_head: Any) -> Any:
        """The row of the KV head's first query head."""
        return kv_head * self.group - self.first_head(kv_head)

    def num_heads(self, num_kv_heads: int) -> int:
        """Query heads that an array must have, to have all rows."""
        return self.first_head(num_kv_heads - 1) + self.rows

    def place(self, kv_head: Any, unit: Unit, row: Any) -> tuple[Any, Any, Any]:
        """The token and the query head of a row of a unit, and whether it is one."""
        token, i = unit.first + row // self.rows, lax.rem(row, self.rows) - self.shift(kv_head)
        return token, kv_head * self.group + i, (token < unit.end) & (i >= 0) & (i < self.group)


def _round_up(rows: int) -> int:
    return -(-rows // TILE_ROWS) * TILE_ROWS


class Inputs(NamedTuple):
    """In the GPU's memory."""

    work: Work
    page_table: Any  # int32 [S, P]
    q: Any  # [T, at least Packing.num_heads(K), H]
    k_scales: Any  # float32 [K], or None
    v_scales: Any  # float32 [K], or None
    sinks: Any  # float32 [K, ROWS], logits of base 2, or None
    pages: Any  # [pages, 2K, page_size, H]


class Scratch(NamedTuple):
    """In shared memory."""

    q: Any  # [1, ROWS, H]: of one warpgroup
    stages: Any  # Keys and values of blocks on their way, [2 * stages, block, H]; after them results: `Results`
    wide: (
        Any  # Keys and values of the block at hand, each [block, H], in the queries' dtype. None if the pages' is that
    )
    weights: Any  # See add_values.
    q_barrier: Any
    barriers: Any  # [2 * stages]


def attend(inputs: Inputs, out: Ref, *, scores: Scores, blocks: Blocks, packing: Packing) -> Parts:
    """Writes the results of units that are whole to `out`, [T, N, H], and gives the parts of the others."""
    T, _, H = inputs.q.shape
    max_tokens, page_size = packing.max_tokens, inputs.pages.shape[2]
    dtype, kv_dtype = inputs.q.dtype, inputs.pages.dtype

    def kernel(inputs: Inputs, out: Ref, parts: Parts, scratch: Scratch) -> None:
        thread_block, (smem, results) = lax.axis_index("block"), scratch.stages
        kv = KVBlocks(inputs.pages, inputs.page_table, smem, scratch.barriers)

        def one(segment: Segment, _: None) -> None:
            unit, head = segment.unit, segment.head
            visible = Visible.by(unit, scores.sliding_window)

            def stages(number: Array) -> tuple[Array, Array]:
                """Of the keys and of the values of a block."""
                stage = 2 * lax.rem(number, blocks.stages)
                return stage, stage + 1

            def fetch(number: Array) -> None:
                block = segment.first_block + number

                @pl.when(block < segment.end_block)
                def _() -> None:
                    pages = kv.find(unit.seq, visible, block)
                    for i, stage in enumerate(stages(number)):
                        kv.fetch(pages, head + i * kv.num_heads, block, stage)

            def at_hand(number: Array, i: int) -> Ref:
                block = kv.wait(stages(number)[i])
                if scratch.wide is None:
                    return block
                convert(block, scratch.wide[i])
                return scratch.wide[i]

            def keys(number: Array) -> Ref:
                fetch(number + blocks.stages - 1)
                return at_hand(number, 0)

            def values(number: Array, is_inner: bool) -> Ref:
                block = at_hand(number, 1)
                if not is_inner:
                    limits = Limits.of(visible, segment.first_block + number, blocks.keys)
                    pl.when(limits.leave_out_some(blocks.keys))(partial(clear, block, limits))
                return block

            for i in range(max_tokens):
                token = unit.first if i == 0 else jnp.minimum(unit.first + i, T - 1)
                plgpu.copy_gmem_to_smem(
                    inputs.q.at[token, pl.ds(packing.first_head(head), packing.rows)],
                    scratch.q.at[0, pl.ds(i * packing.rows, packing.rows)],
                    scratch.q_barrier,
                )
            lax.fori_loop(0, blocks.stages - 1, lambda number, _: fetch(number), None)
            plgpu.barrier_wait(scratch.q_barrier)

            position = unit.first + unit.offset
            if max_tokens > 1:
                position += plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW_LAYOUT) // packing.rows
            state = Rows(
                scores=scores,
                block_len=blocks.keys,
                q_smem=scratch.q,
                warpgroup=0,
                weights_smem=scratch.weights,
                keys=keys,
                values=values,
            ).attend(segment, position, at_head(inputs.k_scales, head))
            # It is read again: there are no registers to keep all of it in.
            send(state, read_segment(inputs.work, thread_block, segment.number))

        def send(state: State, segment: Segment) -> None:
            unit, head = segment.unit, segment.head

            @pl.when(segment.is_whole)
            def send_results() -> None:
                sinks = (
                    None if inputs.sinks is None else plgpu.layout_cast(plgpu.load(inputs.sinks.at[head]), ROW_LAYOUT)
                )

                def copy(smem: Ref, columns: pl.Slice) -> None:
                    for i in range(max_tokens):

                        @pl.when(unit.first + i < unit.end)
                        def _(i: int = i) -> None:
                            plgpu.copy_smem_to_gmem(
                                smem.at[pl.ds(i * packing.rows + packing.shift(head), packing.group)],
                                out.at[unit.first + i, pl.ds(head * packing.group, packing.group), columns],
                            )

                results.send(state.acc, state.result(sinks, at_head(inputs.v_scales, head)), copy)

            @pl.when(~segment.is_whole)
            def send_part() -> None:
                results.send_part(state, parts, segment.slot, 0, parts.values.shape[1])

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        for_each_segment(inputs.work, thread_block, one, None)
        plgpu.wait_smem_to_gmem(0)

    arrivals = KVBlocks.arrivals(blocks.keys, page_size)
    stages = tiled((2 * blocks.stages, blocks.keys, H), kv_dtype)
    return plgpu.kernel(
        kernel,
        out_type=(Parts.types(blocks.thread_blocks, packing.rows * max_tokens, H),),
        scratch_types=[
            Scratch(
                q=tiled((1, ROWS, H), dtype),
                stages=plgpu.RefUnion(stages, Results.types(dtype)),
                wide=(tiled((blocks.keys, H), dtype),) * 2 if blocks.wide_stages else None,
                weights=None if blocks.weights_in_registers else tiled((ROWS, blocks.keys), dtype),
                q_barrier=plgpu.Barrier(num_arrivals=max_tokens),
                barriers=plgpu.Barrier(num_arrivals=arrivals, num_barriers=2 * blocks.stages),
            )
        ],
        grid=(blocks.thread_blocks,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        kernel_name="paged_attention_packed",
    )(inputs, out)[0]
