"""What both bodies of the TPU kernel do with pages: find them, fetch them in blocks, load tiles, put new tokens in."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxllm.pallas_kernels.ragged_paged_attention.tpu_layout import NUM_LANES, NUM_SUBLANES, Layout

LOG2_E = 1.4426950408889634
MASKED = -1e30  # Finite: what a row that has seen nothing yet adds up, exp2(0), the first real score wipes out.

KV_SLOTS = 3  # Blocks of pages in VMEM: one on its way, one at hand, one whose values may still be wanted.
UNROLLED_FETCHES = 8  # Of pages, so that the scalar unit works on several addresses at a time.

Ref = Any
Index = Array | int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """What becomes of the scores, and which of them count."""

    sm_scale: float
    sliding_window: int | None
    soft_cap: float | None

    def scale(self, q_TNH: Array, k_scale_N: Array | None) -> Array:
        """Queries times what `logits` leaves to them. Here, since it costs nothing where XLA makes the queries."""
        factor = self.sm_scale * LOG2_E if self.soft_cap is None else self.sm_scale / self.soft_cap
        factor_N = jnp.full(q_TNH.shape[1], factor, jnp.float32) * (1.0 if k_scale_N is None else k_scale_N)
        return (q_TNH * factor_N[:, None]).astype(q_TNH.dtype)

    def logits(self, scores: Array) -> Array:
        """The product of keys and scaled queries -> logits of base 2."""
        return scores if self.soft_cap is None else (self.soft_cap * LOG2_E) * jnp.tanh(scores)

    def first_visible(self, position: Array) -> Array:
        """The first position that the token at `position` sees."""
        if self.sliding_window is None:
            return jnp.zeros_like(position)
        return jnp.maximum(position - (self.sliding_window - 1), 0)


def dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """The product of two matrices over one axis of each, in float32."""
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=exact, preferred_element_type=jnp.float32)


@dataclasses.dataclass(frozen=True)
class RowList:
    """Rows of the step that are of one kind: every `num_cores`-th, for this core."""

    rows: Ref  # SMEM int32 [S]
    total: Array  # Of all cores.
    core: Array
    num_cores: int

    @property
    def count(self) -> Array:
        return (self.total - self.core + self.num_cores - 1) // self.num_cores

    def __getitem__(self, i: Array | int) -> Array:
        return self.rows[i * self.num_cores + self.core]


@dataclasses.dataclass(frozen=True)
class PageTable:
    """Rows of the page table, brought to SMEM before their turn: the whole table may be larger than SMEM.

    The i-th row of a list of rows waits in slot i % SLOTS.
    """

    hbm: Ref  # int32 [S, P / 128, 128]
    smem: Ref  # int32 [SLOTS, P / 128, 128]
    sems: Ref  # [SLOTS]
    SLOTS = 4  # One row in use, one whose first block is being fetched, one on its way; a power of two.

    def _copy(self, i: Index, row: Index) -> Any:
        slot = i % self.SLOTS
        return pltpu.make_async_copy(self.hbm.at[row], self.smem.at[slot], self.sems.at[slot])

    def start(self, i: Index, row: Index) -> None:
        self._copy(i, row).start()

    def wait(self, i: Index) -> None:
        self._copy(i, 0).wait()

    def page(self, i: Index, p: Index) -> Array:
        return self.smem[i % self.SLOTS, p // NUM_LANES, p % NUM_LANES]

    def for_each_row(self, rows: RowList, body: Callable[[Array, Array, Any], Any], carry: Any) -> None:
        """Calls `carry = body(i, row, carry)` for the rows of a list; the tables of the i-th and the next are there."""

        count = rows.count

        @pl.when(count > 0)
        def _():
            self.start(0, rows[0])
            self.wait(0)

        @pl.when(count > 1)
        def _():
            self.start(1, rows[1])

        def step(i: Array, carry: Any) -> Any:
            @pl.when(i + 2 < count)
            def _() -> None:
                self.start(i + 2, rows[i + 2])

            @pl.when(i + 1 < count)
            def _() -> None:
                self.wait(i + 1)

            return body(i, rows[i], carry)

        lax.fori_loop(0, count, step, carry)


class KVScratch(NamedTuple):
    buffer: Ref  # VMEM [KV_SLOTS, pages of a block, tiles, page_size, lanes]
    sems: Ref  # [KV_SLOTS]

    @classmethod
    def shapes(cls, layout: Layout, num_tokens: int) -> "KVScratch":
        buffer = pltpu.VMEM((KV_SLOTS, num_tokens // layout.page_size, *layout.page_shape), layout.kv_dtype)
        return cls(buffer, pltpu.SemaphoreType.DMA((KV_SLOTS,)))


@dataclasses.dataclass(frozen=True)
class KVBlocks:
    """Blocks of pages in VMEM: one is attended to while the next is on its way."""

    layout: Layout
    table: PageTable
    pages: Ref  # HBM [pages, tiles, page_size, lanes]
    buffer: Ref  # VMEM [KV_SLOTS, pages of a block, tiles, page_size, lanes]
    sems: Ref  # [KV_SLOTS]

    @property
    def num_pages(self) -> int:
        return self.buffer.shape[1]

    def start(self, i: Index, first_page: Array, end_page: Array, slot: Index) -> None:
        """Begins to fetch a block of the i-th row that starts at its `first_page`; no page from `end_page` on."""

        count = jnp.minimum(end_page - first_page, self.num_pages)

        def start_page(p: Array) -> None:
            page = self.table.page(i, first_page + p)
            pltpu.make_async_copy(self.pages.at[page], self.buffer.at[slot, p], self.sems.at[slot]).start()

        unroll = min(UNROLLED_FETCHES, self.num_pages)

        @pl.loop(0, count // unroll)
        def _(c: Array) -> None:
            for p in range(unroll):
                start_page(c * unroll + p)

        @pl.loop(count // unroll * unroll, count)
        def _(p: Array) -> None:
            start_page(p)

    def wait(self, first_page: Array, end_page: Array, slot: Array) -> None:
        block = self.buffer.at[slot, pl.ds(0, jnp.minimum(end_page - first_page, self.num_pages))]
        pltpu.make_async_copy(block, block, self.sems.at[slot]).wait()

    def tile(self, slot: Index, tile: Index, start: Array, num_tokens: int) -> Array:
        """[tokens, lanes] of a block, as it is stored. `start` is a multiple of `num_tokens`."""
        page_size, lanes = self.layout.page_size, self.layout.lanes
        if num_tokens >= page_size:
            pages = num_tokens // page_size
            x = self.buffer[slot, pl.ds(start // page_size, pages), tile]
            return x.reshape(num_tokens, lanes)
        within = pl.multiple_of(start % page_size, num_tokens)
        return self.buffer[slot, start // page_size, tile, pl.ds(within, num_tokens)]

    def values(self, slot: Index, tile: Index, start: Array, num_tokens: int, num_valid: Array | None) -> Array:
        """A tile with zeros from token `num_valid` on: what is not written may be NaN, and 0 * NaN is not 0."""
        x = self.tile(slot, tile, start, num_tokens)
        if num_valid is not None:
            words = pltpu.bitcast(x, jnp.uint32)
            slot_of_word = lax.broadcasted_iota(jnp.int32, words.shape, 0) * self.layout.kv_pack
            x = pltpu.bitcast(words & _slots_between(-slot_of_word, num_valid - slot_of_word, self.layout), x.dtype)
        return x.astype(self.layout.dot_dtype)


def put_tokens(
    layout: Layout,
    group: Callable[[int], Ref],
    tokens: Callable[[int, int], list[Array]],
    start: Array,
    end: Array,
) -> None:
    """Puts new tokens into one group of slots of every tile, and leaves the slots outside `start : end` as they are.

    Args:
      group: group(tile) is a reference to [group, lanes] in VMEM.
      tokens: tokens(fold, word) is uint32 [8, 128] for each part of a word of the group: the word-th word, of
        `kv_pack` tiles, of the tokens in the slots `part`, `part + kv_pack`, ...
    """
    pack, bits = layout.kv_pack, 32 // layout.kv_pack
    slot_of_word = lax.broadcasted_iota(jnp.int32, (NUM_SUBLANES, NUM_LANES), 0) * pack
    mask = _slots_between(start - slot_of_word, end - slot_of_word, layout)
    for fold in range(layout.folds):
        lanes = pl.ds(fold * NUM_LANES, NUM_LANES)
        for word in range(-(-layout.num_tiles // pack)):
            words = tokens(fold, word)
            for tile in range(word * pack, min((word + 1) * pack, layout.num_tiles)):
                ref = group(tile)
                old = pltpu.bitcast(ref[:, lanes], jnp.uint32)
                new = (old & ~mask) | (_pick(words, bits, tile % pack) & mask)
                ref[:, lanes] = pltpu.bitcast(new, layout.kv_dtype)


def _pick(tokens: list[Array], bits: int, part: int) -> Array:
    """The part-th field of each token's word, next to each other: a word of `len(tokens)` slots of one tile."""
    if len(tokens) == 1:
        return tokens[0]
    field = jnp.uint32((1 << bits) - 1)
    word = jnp.zeros_like(tokens[0])
    for slot, token in enumerate(tokens):
        word |= ((token >> (bits * part)) & field) << (bits * slot)
    return word


def _slots_between(start: Array, end: Array, layout: Layout) -> Array:
    """Words whose slots `start : end`, counted from the word's first and perhaps outside of it, have all bits set."""
    bits = 32 // layout.kv_pack
    mask = jnp.zeros(end.shape, jnp.uint32)
    for slot in range(layout.kv_pack):
        field = jnp.uint32(((1 << bits) - 1) << (bits * slot))
        mask |= jnp.where((start <= slot) & (slot < end), field, jnp.uint32(0))
    return mask


def zero_tokens(out: Ref, start: Array, zeros: Ref, sem: Ref) -> None:
    """Zeros from the start-th token of `out` to its end; `zeros` is a scratch of some tokens."""
    num_tokens = out.shape[0]
    size = min(zeros.shape[0], num_tokens)

    def copy(token: Array | int, count: Array | int) -> Any:
        return pltpu.make_async_copy(zeros.at[pl.ds(0, count)], out.at[pl.ds(token, count)], sem)

    @pl.when(start < num_tokens)
    def _() -> None:
        zeros[...] = jnp.zeros_like(zeros)
        rest = (num_tokens - start) % size

        @pl.when(rest > 0)
        def _() -> None:
            copy(start, rest).start()
            copy(start, rest).wait()

        @pl.loop(0, (num_tokens - start) // size)
        def _(i: Array) -> None:
            copy(start + rest + i * size, size).start()

        @pl.loop(0, (num_tokens - start) // size)
        def _(_: Array) -> None:
            copy(0, size).wait()
