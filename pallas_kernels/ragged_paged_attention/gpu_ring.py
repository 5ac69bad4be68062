"""The ring through which the tiles' kernel hands keys and values from the warpgroup that fetches to those that compute.

Its stages hold operands of the matrix unit: the keys of a block, its values, the keys of the next block, and so on
through all segments of a thread block. The n-th of them is in stage n modulo their number.
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxllm.pallas_kernels.ragged_paged_attention.gpu_blocks import Blocks
from jaxllm.pallas_kernels.ragged_paged_attention.gpu_keys import KVBlocks, Limits, clear, convert, tiled
from jaxllm.pallas_kernels.ragged_paged_attention.gpu_softmax import Ref
from jaxllm.pallas_kernels.ragged_paged_attention.gpu_work import Segment, Visible


class Ring(NamedTuple):
    """In shared memory."""

    operands: Any  # [stages, block, H] in the dtype of the queries
    there: Any  # [stages]: an operand is there,
    free: Any  # [stages]: and nobody needs it any more.
    narrow: Any  # [2 * blocks, block, H] in the dtype of the pages: what is to be converted. None if nothing is
    fetched: Any  # [2 * blocks]: it has come. Without conversion [1]: what is to be cleared has

    @classmethod
    def types(
        cls,
        blocks: Blocks,
        *,
        head_dim: int,
        page_size: int,
        dtype: jnp.dtype,
        kv_dtype: jnp.dtype,
        num_warpgroups: int,
    ) -> "Ring":
        """`num_warpgroups`: that compute."""
        num_fetched, copies = 2 * blocks.stages, KVBlocks.arrivals(blocks.keys, page_size)
        converts = blocks.wide_stages > 0
        num_stages = blocks.wide_stages if converts else num_fetched
        return cls(
            operands=tiled((num_stages, blocks.keys, head_dim), dtype),
            there=plgpu.Barrier(num_arrivals=1 if converts else copies, num_barriers=num_stages),
            free=plgpu.Barrier(num_arrivals=num_warpgroups, num_barriers=num_stages),
            narrow=tiled((num_fetched, blocks.keys, head_dim), kv_dtype) if converts else None,
            fetched=plgpu.Barrier(num_arrivals=copies, num_barriers=num_fetched if converts else 1),
        )

    def take(self, number: Array) -> Ref:
        """Waits for an operand, [block, H]."""
        stage = self._stage(number)
        plgpu.barrier_wait(self.there.at[stage])
        return self.operands.at[stage]

    def give_back(self, number: Array) -> None:
        plgpu.barrier_arrive(self.free.at[self._stage(number)])

    def fill(
        self, pages: Ref, page_table: Ref, segment: Segment, visible: Visible, kv_head: Array, num_earlier: Array
    ) -> None:
        """Brings the operands of a segment. `num_earlier`: operands of the segments before.

        Values that no token of the unit sees are zero in what comes: whatever lies in an unwritten slot, NaN included,
        has a weight of zero.
        """
        block_len = self.operands.shape[1]
        num_operands = 2 * (segment.end_block - segment.first_block)

        def fetch(i: Array, blocks: KVBlocks, stage: Array, barrier: Ref = None) -> None:
            block, is_values = segment.first_block + lax.div(i, 2), lax.rem(i, 2)
            head = is_values * blocks.num_heads + kv_head
            blocks.fetch(blocks.find(segment.unit.seq, visible, block), head, block, stage, barrier)

        def free_stage(i: Array) -> Array:
            stage = self._stage(num_earlier + i)
            is_used = num_earlier + i >= self.operands.shape[0]
            pl.when(is_used)(partial(plgpu.barrier_wait, self.free.at[stage]))
            return stage

        def limits(i: Array) -> tuple[Limits, Array]:
            """What is visible of an operand, and whether it must be cleared of the rest."""
            found = Limits.of(visible, segment.first_block + lax.div(i, 2), block_len)
            return found, (lax.rem(i, 2) == 1) & found.leave_out_some(block_len)

        if self.narrow is None:
            fetched_there = KVBlocks(pages, page_table, self.operands, self.there)

            def bring(i: Array, _: None) -> None:
                stage, (its_limits, is_edge) = free_stage(i), limits(i)

                @pl.when(is_edge)
                def bring_cleared() -> None:
                    fetch(i, fetched_there, stage, self.fetched.at[0])
                    plgpu.barrier_wait(self.fetched.at[0])
                    clear(self.operands.at[stage], its_limits)
                    for _ in range(KVBlocks.arrivals(block_len, pages.shape[2])):
                        plgpu.barrier_arrive(self.there.at[stage])

                pl.when(~is_edge)(partial(fetch, i, fetched_there, stage))

            lax.fori_loop(0, num_operands, bring, None)
            return

        narrow, num_narrow = KVBlocks(pages, page_table, self.narrow, self.fetched), self.narrow.shape[0]

        def bring_converted(i: Array, _: None) -> None:
            source_stage = lax.rem(i, num_narrow)
            source = narrow.wait(source_stage)
            stage, (its_limits, is_edge) = free_stage(i), limits(i)
            convert(source, self.operands.at[stage])
            pl.when(is_edge)(partial(clear, self.operands.at[stage], its_limits))
            plgpu.barrier_arrive(self.there.at[stage])
            pl.when(i + num_narrow < num_operands)(partial(fetch, i + num_narrow, narrow, source_stage))

        lax.fori_loop(0, jnp.minimum(num_operands, num_narrow), lambda i, _: fetch(i, narrow, i), None)
        lax.fori_loop(0, num_operands, bring_converted, None)

    def wait_until_empty(self, num_operands: Array) -> None:
        """Until all that was brought is no more needed."""
        num_stages = self.operands.shape[0]

        def wait(number: Array, _: None) -> None:
            plgpu.barrier_wait(self.free.at[self._stage(number)])

        lax.fori_loop(jnp.maximum(num_operands - num_stages, 0), num_operands, wait, None)

    def _stage(self, number: Array) -> Array:
        return lax.rem(number, self.operands.shape[0])
