"""The decode body of the TPU kernel: rows of one token.

All query heads of a KV head are the rows of one product whose other operand is a tile of keys or values. These go
into the matrix unit as its stationary side, which takes longer than the product itself: the loop does nothing else
for long, and is bound by the memory on every chip.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxllm.pallas_kernels.ragged_paged_attention.tpu_layout import NUM_LANES, NUM_SUBLANES, Layout, round_up
from jaxllm.pallas_kernels.ragged_paged_attention.tpu_pages import (
    KV_SLOTS,
    MASKED,
    Attention,
    KVBlocks,
    Ref,
    RowList,
    dot,
    put_tokens,
)


class DecodeScratch(NamedTuple):
    """VMEM, but for the semaphores. Leading 2: one for the row at hand, one for the next."""

    q_in: Ref  # [2, q_rows, lanes]
    q_sems: Ref  # [2]
    new: Ref  # [2, kv_rows, lanes]
    new_sems: Ref  # [2]
    out: Ref  # [2, q_rows, lanes]
    out_sems: Ref  # [2]
    written: Ref  # [2, tiles, group, lanes]
    written_sems: Ref  # [2]
    q: Ref  # [tile heads, rows, lanes]
    rows: Ref  # float32 [q_rows + rows, lanes]
    max: Ref  # float32 [tile heads, rows, 128]
    total: Ref  # float32 [tile heads, rows, 128], a part of the sum in each lane
    acc: Ref  # float32 [tile heads, rows, lanes]

    @classmethod
    def shapes(cls, layout: Layout) -> "DecodeScratch":
        num_rows = round_up(layout.rows_per_token, NUM_SUBLANES)
        heads, sems = layout.num_tile_heads, pltpu.SemaphoreType.DMA((2,))
        token = pltpu.VMEM((2, layout.q_rows, layout.lanes), layout.io_dtype)
        running = pltpu.VMEM((heads, num_rows, NUM_LANES), jnp.float32)
        return cls(
            *(token, sems),
            *(pltpu.VMEM((2, layout.kv_rows, layout.lanes), layout.kv_dtype), sems),
            *(token, sems),
            *(pltpu.VMEM((2, layout.num_tiles, layout.group, layout.lanes), layout.kv_dtype), sems),
            pltpu.VMEM((heads, num_rows, layout.lanes), layout.dot_dtype),
            pltpu.VMEM((layout.q_rows + num_rows, layout.lanes), jnp.float32),
            running,
            running,
            pltpu.VMEM((heads, num_rows, layout.lanes), jnp.float32),
        )


@dataclasses.dataclass(frozen=True)
class Decode:
    """`num_tokens`: tokens of KV that one product takes."""

    layout: Layout
    attention: Attention
    num_tokens: int
    kv_lens: Ref
    cu_q_lens: Ref
    q_hbm: Ref
    new_hbm: Ref
    sinks: Ref | None
    out_hbm: Ref
    blocks: KVBlocks
    scratch: DecodeScratch

    def run(self, rows: RowList) -> None:
        """Attends for every row of the list."""

        def row(i: Array, row: Array, block: Array) -> Array:
            return self._row(rows, i, row, block)

        self.blocks.table.for_each_row(rows, row, jnp.int32(0))
        for back in (2, 1):

            @pl.when(rows.count >= back)
            def _(back: int = back) -> None:
                self._send_out(rows.count - back, 0).wait()
                self._send_written(rows.count - back, 0, 0).wait()

    def _row(self, rows: RowList, i: Array, row: Array, block: Array) -> Array:
        """Attends for the i-th row, whose first block is on its way and is the block-th of the step."""
        kv_len = self.kv_lens[row]
        first, end = self._pages(row)
        num_blocks = (end - first + self.blocks.num_pages - 1) // self.blocks.num_pages

        @pl.when(i == 0)
        def _() -> None:
            self._fetch_token(i, row)
            self.blocks.start(i, first, end, block % KV_SLOTS)

        @pl.when(i + 1 < rows.count)
        def _() -> None:
            self._fetch_token(i + 1, rows[i + 1])

        for copy in self._token_copies(i, row):
            copy.wait()
        self._begin(i % 2)

        @pl.loop(0, num_blocks)
        def _(b: Array) -> None:
            slot, next_slot = (block + b) % KV_SLOTS, (block + b + 1) % KV_SLOTS
            first_page = first + b * self.blocks.num_pages

            @pl.when(b + 1 < num_blocks)
            def _() -> None:
                self.blocks.start(i, first_page + self.blocks.num_pages, end, next_slot)

            @pl.when((b + 1 == num_blocks) & (i + 1 < rows.count))
            def _() -> None:
                next_first, next_end = self._pages(rows[i + 1])
                self.blocks.start(i + 1, next_first, next_end, next_slot)

            self.blocks.wait(first_page, end, slot)

            @pl.when(b + 1 == num_blocks)
            def _() -> None:
                self._write(i, kv_len - 1, first_page, slot)

            self._attend_block(kv_len, first_page, slot)

        self._finish(i, row)
        return block + num_blocks

    def _pages(self, row: Array) -> tuple[Array, Array]:
        """The pages that a row sees: the first, and the one after the last."""
        page_size = self.layout.page_size
        kv_len = self.kv_lens[row]
        return self.attention.first_visible(kv_len - 1) // page_size, (kv_len + page_size - 1) // page_size

    def _token_copies(self, i: Array, row: Array) -> tuple[Any, Any]:
        """The row's query, and its key and value."""
        scratch, slot, token = self.scratch, i % 2, self.cu_q_lens[row]
        return (
            pltpu.make_async_copy(self.q_hbm.at[token], scratch.q_in.at[slot], scratch.q_sems.at[slot]),
            pltpu.make_async_copy(self.new_hbm.at[token], scratch.new.at[slot], scratch.new_sems.at[slot]),
        )

    def _fetch_token(self, i: Array, row: Array) -> None:
        for copy in self._token_copies(i, row):
            copy.start()

    def _begin(self, slot: Array) -> None:
        """Lays the query's rows into registers of their tile heads, and starts the running maximum and sum."""
        layout, scratch = self.layout, self.scratch
        num_rows = scratch.q.shape[1]
        scratch.rows[pl.ds(0, layout.q_rows)] = scratch.q_in[slot].astype(jnp.float32)
        for h in range(layout.num_tile_heads):
            scratch.q[h] = scratch.rows[pl.ds(h * layout.rows_per_token, num_rows)].astype(layout.dot_dtype)
        if self.sinks is None:
            scratch.max[...] = jnp.full_like(scratch.max, MASKED)
            scratch.total[...] = jnp.zeros_like(scratch.total)
        else:
            scratch.max[...] = self.sinks[...]
            lane = lax.broadcasted_iota(jnp.int32, scratch.total.shape, 2)
            scratch.total[...] = jnp.where(lane == 0, 1.0, 0.0)
        scratch.acc[...] = jnp.zeros_like(scratch.acc)

    def _write(self, i: Array, position: Array, first_page: Array, slot: Array) -> None:
        """Puts the new token into the block at hand, and sends its group of slots to its page."""
        layout, scratch = self.layout, self.scratch
        page, place = position // layout.page_size, position % layout.page_size
        start = pl.multiple_of(place // layout.group * layout.group, layout.group)
        group = self.blocks.buffer.at[slot, page - first_page, :, pl.ds(start, layout.group)]
        words = pltpu.bitcast(scratch.new[i % 2], jnp.uint32)

        def tokens(fold: int, word: int) -> list[Array]:
            row = words[word : word + 1, fold * NUM_LANES : (fold + 1) * NUM_LANES]
            return [jnp.broadcast_to(row, (NUM_SUBLANES, NUM_LANES))] * layout.kv_pack

        put_tokens(layout, lambda tile: group.at[tile], tokens, place - start, place - start + 1)

        @pl.when(i >= 2)
        def _() -> None:
            self._send_written(i, 0, 0).wait()

        scratch.written[i % 2] = group[...]
        self._send_written(i, self.blocks.table.page(i, page), start).start()

    def _send_written(self, i: Array, page: Array | int, start: Array | int) -> Any:
        group = self.blocks.pages.at[page, :, pl.ds(start, self.layout.group)]
        return pltpu.make_async_copy(self.scratch.written.at[i % 2], group, self.scratch.written_sems.at[i % 2])

    def _attend_block(self, kv_len: Array, first_page: Array, slot: Array) -> None:
        """In parts of `num_tokens`. Only that of the end, and that where a window starts, need a mask."""
        n, page_size = self.num_tokens, self.layout.page_size
        position = first_page * page_size
        num_valid = jnp.minimum(kv_len - position, self.blocks.num_pages * page_size)
        num_hidden = jnp.maximum(self.attention.first_visible(kv_len - 1) - position, 0)
        first, first_whole = num_hidden // n, (num_hidden + n - 1) // n
        end_whole = jnp.maximum(num_valid // n, first_whole)
        num_before = first_whole - first

        @pl.loop(first_whole, end_whole)
        def _(c: Array) -> None:
            self._attend(slot, c * n, position, kv_len, masked=False)

        @pl.loop(0, num_before + (num_valid + n - 1) // n - end_whole)
        def _(c: Array) -> None:
            c = jnp.where(c < num_before, first, end_whole + c - num_before)
            self._attend(slot, c * n, position, kv_len, masked=True)

    def _attend(self, slot: Array, start: Array, position: Array, kv_len: Array, *, masked: bool) -> None:
        """All heads over `num_tokens` tokens, from the start-th of a block whose first has `position`.

        The heads' products stand together, so that one is under way while another's result is awaited.
        """
        layout, scratch, n = self.layout, self.scratch, self.num_tokens
        heads = range(layout.num_tile_heads)
        num_valid = kv_len - position - start if masked else None
        scores = []
        for h in heads:
            keys = self.blocks.tile(slot, h, start, n).astype(layout.dot_dtype)
            scores.append(dot(scratch.q[h], keys, (1, 1)))
        visible = None
        if masked:
            at = position + start + lax.broadcasted_iota(jnp.int32, scores[0].shape, 1)
            visible = at < kv_len
            if self.attention.sliding_window is not None:
                visible &= at >= self.attention.first_visible(kv_len - 1)
        weights, decays = [], []
        for h in heads:
            logits = self.attention.logits(scores[h])
            if visible is not None:
                logits = jnp.where(visible, logits, MASKED)
            old_max = scratch.max[h]
            new_max = jnp.maximum(old_max, jnp.max(logits, axis=1, keepdims=True))
            scratch.max[h] = new_max
            decay = jnp.exp2(old_max - new_max)
            weight = jnp.exp2(logits - jnp.concatenate([new_max] * (n // NUM_LANES), axis=1))
            scratch.total[h] = scratch.total[h] * decay + sum(
                weight[:, lane : lane + NUM_LANES] for lane in range(0, n, NUM_LANES)
            )
            weights.append(weight.astype(layout.dot_dtype))
            decays.append(decay)
        for h in heads:
            values = self.blocks.values(slot, layout.value_tile(h), start, n, num_valid)
            new = dot(weights[h], values, (1, 0))
            scratch.acc[h] = scratch.acc[h] * jnp.concatenate([decays[h]] * layout.folds, axis=1) + new

    def _finish(self, i: Array, row: Array) -> None:
        layout, scratch = self.layout, self.scratch
        for h in range(layout.num_tile_heads):
            out = scratch.acc[h] / jnp.sum(scratch.total[h], axis=1, keepdims=True)
            scratch.rows[pl.ds(h * layout.rows_per_token, layout.rows_per_token)] = out[: layout.rows_per_token]

        @pl.when(i >= 2)
        def _() -> None:
            self._send_out(i, 0).wait()

        scratch.out[i % 2] = scratch.rows[pl.ds(0, layout.q_rows)].astype(layout.io_dtype)
        self._send_out(i, self.cu_q_lens[row]).start()

    def _send_out(self, i: Array, token: Array | int) -> Any:
        slot = i % 2
        return pltpu.make_async_copy(self.scratch.out.at[slot], self.out_hbm.at[token], self.scratch.out_sems.at[slot])
