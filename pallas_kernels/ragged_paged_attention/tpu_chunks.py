"""The chunk body of the TPU kernel: rows of several tokens.

First all their new keys and values go into their pages, so that attention finds every token in its page and the
tokens of this step are no special case. Then tiles of queries attend to blocks of pages, up to their diagonal.

Scores are kept with keys along sublanes and queries along lanes. A maximum over keys is then one register against
another, what belongs to a query is one row for 128 queries, and the product with the values uses the whole matrix
unit: its contraction is over keys, and its columns are queries, however small a head is.

The work on a tile is a list of items, one KV head's queries against `num_tokens` keys each. An item goes through three
stages, scores, softmax, values, and while one item is in the third, the next is in the second and the one after it
in the first, so that the matrix unit and the vector unit work at the same time.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxllm.pallas_kernels.ragged_paged_attention.tpu_layout import NUM_LANES, NUM_SUBLANES, Layout
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

WRITE_SLOTS = 3  # Pages that are being written: one on its way here, one at hand, one on its way back.
UNROLL = 4  # Items that follow each other in one run of instructions; even, since items alternate between buffers.


class ChunkScratch(NamedTuple):
    """VMEM, but for the semaphores and the counts, which are in SMEM."""

    new: Ref  # [WRITE_SLOTS, page_size, kv_rows, lanes]
    new_sems: Ref  # [WRITE_SLOTS]
    page: Ref  # [WRITE_SLOTS, tiles, page_size, lanes]
    page_sems: Ref  # [WRITE_SLOTS]
    written_sems: Ref  # [WRITE_SLOTS]
    num_written: Ref  # int32 [WRITE_SLOTS], slots of the page on their way back
    new_words: Ref  # uint32 [folds, page_size * kv_rows / kv_pack, 128]
    q_in: Ref  # [2, queries, q_rows, lanes]
    q_sems: Ref  # [2]
    out: Ref  # [2, queries, q_rows, lanes]
    out_sems: Ref  # [2]
    num_out: Ref  # int32 [2], tokens of the output on their way
    words: Ref  # uint32 [folds, queries * q_rows / q_pack, 128], of the queries, and later of the outputs
    q: Ref  # [tile heads, rows, lanes]
    # The last head of these three stands for none: what an item without work does goes there.
    max: Ref  # float32 [tile heads + 1, 1, rows]
    total: Ref  # float32 [tile heads + 1, 1, rows]
    acc: Ref  # float32 [tile heads + 1, lanes, rows]
    # Between the stages, for every other item each.
    scores: tuple[Ref, Ref]  # float32 [keys, rows]
    weights: tuple[Ref, Ref]  # [keys, rows]
    decay: tuple[Ref, Ref]  # float32 [1, rows]

    @classmethod
    def shapes(cls, layout: Layout, num_queries: int, num_tokens: int) -> "ChunkScratch":
        heads, num_rows = layout.num_tile_heads, num_queries * layout.rows_per_token
        write_sems, sems = pltpu.SemaphoreType.DMA((WRITE_SLOTS,)), pltpu.SemaphoreType.DMA((2,))
        tile = pltpu.VMEM((2, num_queries, layout.q_rows, layout.lanes), layout.io_dtype)
        running = pltpu.VMEM((heads + 1, 1, num_rows), jnp.float32)
        scores = pltpu.VMEM((num_tokens, num_rows), jnp.float32)
        weights = pltpu.VMEM((num_tokens, num_rows), layout.dot_dtype)
        decay = pltpu.VMEM((1, num_rows), jnp.float32)
        return cls(
            *(pltpu.VMEM((WRITE_SLOTS, layout.page_size, layout.kv_rows, layout.lanes), layout.kv_dtype), write_sems),
            *(pltpu.VMEM((WRITE_SLOTS, *layout.page_shape), layout.kv_dtype), write_sems, write_sems),
            pltpu.SMEM((WRITE_SLOTS,), jnp.int32),
            pltpu.VMEM(_words_shape(layout, layout.page_size, layout.kv_rows // layout.kv_pack), jnp.uint32),
            *(tile, sems),
            *(tile, sems),
            pltpu.SMEM((2,), jnp.int32),
            pltpu.VMEM(_words_shape(layout, num_queries, layout.q_rows // layout.q_pack), jnp.uint32),
            pltpu.VMEM((heads, num_rows, layout.lanes), layout.dot_dtype),
            running,
            running,
            pltpu.VMEM((heads + 1, layout.lanes, num_rows), jnp.float32),
            *((scores, scores), (weights, weights), (decay, decay)),
        )


def _words_shape(layout: Layout, num_tokens: int, words_per_token: int) -> tuple[int, int, int]:
    return (layout.folds, num_tokens * words_per_token, NUM_LANES)


class Span(NamedTuple):
    """Scalars: the position of a tile's first query, and that after its last token."""

    query: Array
    end: Array


class Item(NamedTuple):
    """Scalars: one head's queries against some keys, which begin at `start` in the block `slot` and have positions
    from `key`."""

    head: Array
    slot: Array
    start: Array
    key: Array


@dataclasses.dataclass(frozen=True)
class Chunks:
    """`num_queries`: tokens of a tile of queries; `num_tokens`: tokens of KV that one product takes."""

    layout: Layout
    attention: Attention
    num_queries: int
    num_tokens: int
    kv_lens: Ref
    cu_q_lens: Ref
    q_hbm: Ref
    new_hbm: Ref
    sinks: Ref | None  # float32 [tile heads, 1, rows]
    out_hbm: Ref
    blocks: KVBlocks
    scratch: ChunkScratch

    # Writing.

    def write(self, rows: RowList) -> None:
        """Puts the new tokens of every row of the list into their pages."""
        scratch = self.scratch
        for slot in range(WRITE_SLOTS):
            scratch.num_written[slot] = 0

        def row(i: Array, row: Array, number: Array) -> Array:
            return self._write_row(rows, i, row, number)

        self.blocks.table.for_each_row(rows, row, jnp.int32(0))
        for slot in range(WRITE_SLOTS):
            self._wait_written(slot)

    def _write_row(self, rows: RowList, i: Array, row: Array, number: Array) -> Array:
        page_size = self.layout.page_size
        start, end = self._new_positions(row)
        first, last = start // page_size, (end - 1) // page_size

        @pl.when(i == 0)
        def _() -> None:
            self._start_page(i, row, first, number % WRITE_SLOTS)

        @pl.loop(first, last + 1)
        def _(p: Array) -> None:
            this = number + p - first
            slot, next_slot = this % WRITE_SLOTS, (this + 1) % WRITE_SLOTS
            self._wait_written(next_slot)

            @pl.when(p < last)
            def _() -> None:
                self._start_page(i, row, p + 1, next_slot)

            @pl.when((p == last) & (i + 1 < rows.count))
            def _() -> None:
                next_row = rows[i + 1]
                self._start_page(i + 1, next_row, self._new_positions(next_row)[0] // page_size, next_slot)

            self._write_page(i, row, p, slot)

        return number + last + 1 - first

    def _new_positions(self, row: Array) -> tuple[Array, Array]:
        """The positions `start : end` of a row's new tokens."""
        end = self.kv_lens[row]
        return end - self._q_len(row), end

    def _q_len(self, row: Array) -> Array:
        return self.cu_q_lens[row + 1] - self.cu_q_lens[row]

    def _page_slots(self, row: Array, p: Array) -> tuple[Array, Array, Array, Array]:
        """The slots `start : end` of a page that get new tokens, and the whole groups `low : high` that hold them."""
        page_size, group = self.layout.page_size, self.layout.group
        start, end = self._new_positions(row)
        start = jnp.maximum(start - p * page_size, 0)
        end = jnp.minimum(end - p * page_size, page_size)
        return start, end, start // group * group, (end + group - 1) // group * group

    def _page_copies(self, i: Array, row: Array, p: Array, slot: Array) -> tuple[Any, Any]:
        """The new tokens of a page, to where their slots are, and what the page holds around them."""
        layout, scratch = self.layout, self.scratch
        start, end, low, high = self._page_slots(row, p)
        first = self.cu_q_lens[row] + p * layout.page_size + start - self._new_positions(row)[0]
        new, new_slots = self.new_hbm.at[pl.ds(first, end - start)], pl.ds(start, end - start)
        slots = pl.ds(pl.multiple_of(low, layout.group), pl.multiple_of(high - low, layout.group))
        page = self.blocks.pages.at[self.blocks.table.page(i, p), :, slots]
        return (
            pltpu.make_async_copy(new, scratch.new.at[slot, new_slots], scratch.new_sems.at[slot]),
            pltpu.make_async_copy(page, scratch.page.at[slot, :, slots], scratch.page_sems.at[slot]),
        )

    def _is_partial(self, row: Array, p: Array) -> Array:
        start, end, low, high = self._page_slots(row, p)
        return (start > low) | (end < high)

    def _start_page(self, i: Array, row: Array, p: Array, slot: Array) -> None:
        new, old = self._page_copies(i, row, p, slot)
        new.start()

        @pl.when(self._is_partial(row, p))
        def _() -> None:
            old.start()

    def _write_page(self, i: Array, row: Array, p: Array, slot: Array) -> None:
        layout, scratch = self.layout, self.scratch
        new, old = self._page_copies(i, row, p, slot)
        new.wait()

        @pl.when(self._is_partial(row, p))
        def _() -> None:
            old.wait()

        start, end, low, high = self._page_slots(row, p)
        stride = layout.kv_rows // layout.kv_pack
        for fold in range(layout.folds):
            rows = scratch.new[slot, :, :, pl.ds(fold * NUM_LANES, NUM_LANES)].reshape(-1, NUM_LANES)
            scratch.new_words[fold] = pltpu.bitcast(rows, jnp.uint32)

        @pl.loop(low // layout.group, high // layout.group)
        def _(g: Array) -> None:
            first = pl.multiple_of(g * layout.group, layout.group)
            group = scratch.page.at[slot, :, pl.ds(first, layout.group)]

            def tokens(fold: int, word: int) -> list[Array]:
                return [
                    scratch.new_words[
                        fold, pl.ds((first + part) * stride + word, NUM_SUBLANES, stride=layout.kv_pack * stride)
                    ]
                    for part in range(layout.kv_pack)
                ]

            put_tokens(layout, lambda tile: group.at[tile], tokens, start - first, end - first)

        scratch.num_written[slot] = high - low
        slots = pl.ds(pl.multiple_of(low, layout.group), pl.multiple_of(high - low, layout.group))
        page = self.blocks.pages.at[self.blocks.table.page(i, p), :, slots]
        pltpu.make_async_copy(scratch.page.at[slot, :, slots], page, scratch.written_sems.at[slot]).start()

    def _wait_written(self, slot: Array | int) -> None:
        scratch = self.scratch
        num_slots = scratch.num_written[slot]

        @pl.when(num_slots > 0)
        def _() -> None:
            slots = scratch.page.at[slot, :, pl.ds(0, pl.multiple_of(num_slots, self.layout.group))]
            pltpu.make_async_copy(slots, slots, scratch.written_sems.at[slot]).wait()
            scratch.num_written[slot] = 0

    # Attending.

    def attend(self, rows: RowList) -> None:
        """Attends for every row of the list, whose keys and values are all in their pages."""
        scratch = self.scratch
        for slot in range(2):
            scratch.num_out[slot] = 0

        def row(i: Array, row: Array, numbers: tuple[Array, Array]) -> tuple[Array, Array]:
            @pl.when(i == 0)
            def _() -> None:
                self._copy_q(row, 0, 0).start()
                self.blocks.start(0, *self._pages(row, 0), 0)
                self._start_sums()
                self._copy_q(row, 0, 0).wait()
                self._lay_queries(0)

            def tile(t: Array, numbers: tuple[Array, Array]) -> tuple[Array, Array]:
                return self._attend_tile(rows, i, row, t, *numbers)

            return lax.fori_loop(0, self._num_tiles(row), tile, numbers)

        self.blocks.table.for_each_row(rows, row, (jnp.int32(0), jnp.int32(0)))
        for slot in range(2):
            self._wait_out(slot)

    def _num_tiles(self, row: Array) -> Array:
        return (self._q_len(row) + self.num_queries - 1) // self.num_queries

    def _pages(self, row: Array, t: Array | int) -> tuple[Array, Array]:
        """The pages that a tile sees: the first, and the one after the last."""
        start, end = self._new_positions(row)
        start += t * self.num_queries
        last = jnp.minimum(start + self.num_queries, end) - 1
        return self.attention.first_visible(start) // self.layout.page_size, last // self.layout.page_size + 1

    def _num_queries(self, row: Array, t: Array | int) -> Array:
        return jnp.minimum(self._q_len(row) - t * self.num_queries, self.num_queries)

    def _copy_q(self, row: Array, t: Array | int, slot: Array | int) -> Any:
        num_queries = self._num_queries(row, t)
        return pltpu.make_async_copy(
            self.q_hbm.at[pl.ds(self.cu_q_lens[row] + t * self.num_queries, num_queries)],
            self.scratch.q_in.at[slot, pl.ds(0, num_queries)],
            self.scratch.q_sems.at[slot],
        )

    def _attend_tile(
        self, rows: RowList, i: Array, row: Array, t: Array, tile: Array, block: Array
    ) -> tuple[Array, Array]:
        """The t-th tile of the i-th row: the tile-th of the step, and its first block is the block-th."""
        first, end = self._pages(row, t)
        num_blocks = (end - first + self.blocks.num_pages - 1) // self.blocks.num_pages
        is_last_tile = t + 1 == self._num_tiles(row)
        has_next = ~is_last_tile | (i + 1 < rows.count)
        next_i = jnp.where(is_last_tile, i + 1, i)
        next_row = jnp.where(has_next, rows[jnp.minimum(next_i, rows.count - 1)], row)
        next_t = jnp.where(is_last_tile, 0, t + 1)

        @pl.when(has_next)
        def _() -> None:
            self._copy_q(next_row, next_t, 1 - tile % 2).start()

        start, row_end = self._new_positions(row)
        query = start + t * self.num_queries
        tile_end = jnp.minimum(query + self.num_queries, row_end)
        span = Span(query=query, end=tile_end)
        none = Item(jnp.int32(self.layout.num_tile_heads), block % KV_SLOTS, jnp.int32(0), jnp.int32(0))

        def attend_block(b: Array, last_items: tuple[Item, Item]) -> tuple[Item, Item]:
            slot, next_slot = (block + b) % KV_SLOTS, (block + b + 1) % KV_SLOTS
            first_page = first + b * self.blocks.num_pages

            @pl.when(b + 1 < num_blocks)
            def _() -> None:
                self.blocks.start(i, first_page + self.blocks.num_pages, end, next_slot)

            @pl.when((b + 1 == num_blocks) & has_next)
            def _() -> None:
                self.blocks.start(next_i, *self._pages(next_row, next_t), next_slot)

            self.blocks.wait(first_page, end, slot)
            return self._attend_block(span, first_page * self.layout.page_size, slot, last_items)

        older, newer = lax.fori_loop(0, num_blocks, attend_block, (none, none))

        @pl.when(has_next)
        def _() -> None:
            self._copy_q(next_row, next_t, 1 - tile % 2).wait()

        # The next tile's queries are laid out (if there is one) while the last items are brought to their end.
        self._add_values(older, 0, span, masked=True)
        self._softmax(newer, 1, span, masked=True)
        self._lay_queries(1 - tile % 2)
        self._add_values(newer, 1, span, masked=True)
        self._wait_out(tile % 2)
        self._finish(row, t, tile % 2)
        return tile + 1, block + num_blocks

    def _lay_queries(self, slot: Array | int) -> None:
        """Puts the rows of each tile head together: [queries, q_rows] -> [tile heads, rows]."""
        layout, scratch = self.layout, self.scratch
        for fold in range(layout.folds):
            rows = scratch.q_in[slot, :, :, pl.ds(fold * NUM_LANES, NUM_LANES)].reshape(-1, NUM_LANES)
            scratch.words[fold] = pltpu.bitcast(rows, jnp.uint32)
        num_rows = self.num_queries * layout.q_pack
        for h in range(layout.num_tile_heads):
            for j in range(layout.words_per_tile_head):
                words = [scratch.words[fold, self._words(h, j)] for fold in range(layout.folds)]
                rows = jnp.concatenate([pltpu.bitcast(x, layout.io_dtype) for x in words], axis=1)
                scratch.q[h, pl.ds(j * num_rows, num_rows)] = rows.astype(layout.dot_dtype)

    def _start_sums(self) -> None:
        scratch = self.scratch
        scratch.acc[...] = jnp.zeros_like(scratch.acc)
        if self.sinks is None:
            scratch.max[...] = jnp.full_like(scratch.max, MASKED)
            scratch.total[...] = jnp.zeros_like(scratch.total)
        else:
            scratch.max[pl.ds(0, self.layout.num_tile_heads)] = self.sinks[...]
            scratch.total[...] = jnp.ones_like(scratch.total)

    def _words(self, h: int, j: int) -> Any:
        """Where a head's j-th words are, for all tokens of a tile."""
        layout = self.layout
        return pl.ds(h * layout.words_per_tile_head + j, self.num_queries, stride=layout.q_rows // layout.q_pack)

    def _attend_block(
        self, span: Span, position: Array, slot: Array, last_items: tuple[Item, Item]
    ) -> tuple[Item, Item]:
        """Takes up the items of a block, whose first token has `position`, and brings those before them further."""
        n, heads = self.num_tokens, self.layout.num_tile_heads
        num_tokens = jnp.minimum(span.end - position, self.blocks.num_pages * self.layout.page_size)
        num_items = (num_tokens + n - 1) // n * heads

        def item(x: Array) -> Item:
            part = lax.div(x, heads)
            is_none = x >= num_items
            start = jnp.where(is_none, 0, part * n)
            return Item(jnp.where(is_none, heads, x - part * heads), slot, start, position + start)

        def run(g: Array, last_items: tuple[Item, Item]) -> tuple[Item, Item]:
            items = [*last_items, *(item(g * UNROLL + u) for u in range(UNROLL))]
            masked = functools.reduce(jnp.logical_or, [self._needs_mask(x, span) for x in items])

            @pl.when(masked)
            def _() -> None:
                self._run(items, span, masked=True)

            @pl.when(~masked)
            def _() -> None:
                self._run(items, span, masked=False)

            return items[-2], items[-1]

        return lax.fori_loop(0, (num_items + UNROLL - 1) // UNROLL, run, last_items)

    def _needs_mask(self, item: Item, span: Span) -> Array:
        """Whether a query of the tile does not see a key of the item: at the diagonal, and where a window starts."""
        needs_mask = item.key + self.num_tokens - 1 > span.query
        if self.attention.sliding_window is not None:
            needs_mask |= self.attention.first_visible(span.query + self.num_queries - 1) > item.key
        return needs_mask

    def _run(self, items: list[Item], span: Span, *, masked: bool) -> None:
        """One more stage for each of the items, of which the last `UNROLL` begin and the first two are under way."""
        for u in range(UNROLL):
            even = u % 2
            self._score(items[u + 2], even)
            self._add_values(items[u], even, span, masked=masked)
            self._softmax(items[u + 1], 1 - even, span, masked=masked)

    def _score(self, item: Item, buffer: int) -> None:
        scratch = self.scratch
        head = jnp.minimum(item.head, self.layout.num_tile_heads - 1)
        keys = self.blocks.tile(item.slot, head, item.start, self.num_tokens).astype(self.layout.dot_dtype)
        scratch.scores[buffer][...] = dot(keys, scratch.q[head], (1, 1))

    def _softmax(self, item: Item, buffer: int, span: Span, *, masked: bool) -> None:
        layout, scratch, h = self.layout, self.scratch, item.head
        logits = self.attention.logits(scratch.scores[buffer][...])
        if masked:
            # The last key that each query sees, counted from the item's first: one row for all keys.
            row = lax.broadcasted_iota(jnp.int32, (1, logits.shape[1]), 1)
            token = row % (self.num_queries * layout.q_pack) // layout.q_pack
            last = token + (span.query - item.key)
            key = lax.broadcasted_iota(jnp.int32, logits.shape, 0)
            visible = key <= last
            if self.attention.sliding_window is not None:
                visible &= key > last - self.attention.sliding_window
            logits = jnp.where(visible, logits, MASKED)
        old_max = scratch.max[h]
        new_max = jnp.maximum(old_max, jnp.max(logits, axis=0, keepdims=True))
        decay, weights = jnp.exp2(old_max - new_max), jnp.exp2(logits - new_max)
        scratch.max[h] = new_max
        scratch.total[h] = scratch.total[h] * decay + jnp.sum(weights, axis=0, keepdims=True)
        scratch.decay[buffer][...] = decay
        scratch.weights[buffer][...] = weights.astype(layout.dot_dtype)

    def _add_values(self, item: Item, buffer: int, span: Span, *, masked: bool) -> None:
        scratch, h = self.scratch, item.head
        tile = self.layout.value_tile(jnp.minimum(h, self.layout.num_tile_heads - 1))
        num_valid = span.end - item.key if masked else None
        values = self.blocks.values(item.slot, tile, item.start, self.num_tokens, num_valid)
        new = dot(values, scratch.weights[buffer][...], (0, 0))
        scratch.acc[h] = scratch.acc[h] * scratch.decay[buffer][...] + new

    def _finish(self, row: Array, t: Array, slot: Array) -> None:
        """Sends the output of a tile, and makes ready for the sums of the next."""
        layout, scratch = self.layout, self.scratch
        num_rows = self.num_queries * layout.q_pack
        for h in range(layout.num_tile_heads):
            out = (scratch.acc[h] * (1.0 / scratch.total[h])).astype(layout.io_dtype).T
            for j in range(layout.words_per_tile_head):
                for fold in range(layout.folds):
                    rows = out[j * num_rows : (j + 1) * num_rows, fold * NUM_LANES : (fold + 1) * NUM_LANES]
                    scratch.words[fold, self._words(h, j)] = pltpu.bitcast(rows, jnp.uint32)
        for fold in range(layout.folds):
            rows = pltpu.bitcast(scratch.words[fold], layout.io_dtype).reshape(-1, layout.q_rows, NUM_LANES)
            scratch.out[slot, :, :, pl.ds(fold * NUM_LANES, NUM_LANES)] = rows
        self._start_sums()
        num_tokens = self._num_queries(row, t)
        scratch.num_out[slot] = num_tokens
        self._send_out(self.cu_q_lens[row] + t * self.num_queries, num_tokens, slot).start()

    def _send_out(self, token: Array | int, num_tokens: Array, slot: Array | int) -> Any:
        tokens = self.scratch.out.at[slot, pl.ds(0, num_tokens)]
        return pltpu.make_async_copy(tokens, self.out_hbm.at[pl.ds(token, num_tokens)], self.scratch.out_sems.at[slot])

    def _wait_out(self, slot: Array | int) -> None:
        num_tokens = self.scratch.num_out[slot]

        @pl.when(num_tokens > 0)
        def _() -> None:
            self._send_out(0, num_tokens, slot).wait()
            self.scratch.num_out[slot] = 0
