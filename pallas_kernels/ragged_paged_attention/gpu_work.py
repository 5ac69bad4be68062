"""Which thread block of a GPU does what: every one gets the same number of blocks of keys, whatever the rows are.

A *unit* is a tile of a row's tokens at one head; it attends to some blocks of keys. All blocks of all units, heads
outermost, form one line that is cut into equal pieces, one for each thread block ("stream-K", arXiv 2301.03598). A unit
that is cut leaves partial results, at most two for each thread block, and `gpu_combine` joins them. The arrays depend
on lengths alone: the layers of a step have them in common, and XLA computes them once.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

SLOTS_PER_BLOCK = 2  # Of partial results: that of a unit which began before a thread block, and which ends after it.


class Work(NamedTuple):
    """Arrays of int32 in XLA; references to them in a kernel. U units at each head, C thread blocks."""

    totals: Any  # [3]: units, blocks of keys of all units at one head, blocks of keys for each thread block
    ends: Any  # [U + 1]: blocks of keys of all units before each
    units: Any  # [U, 6]: see Unit
    spans: Any  # [C, 2]: the first unit of each thread block, and the one after its last, counted over all heads


class Unit(NamedTuple):
    """Tokens of one row. Scalars in a kernel, and arrays [U] in XLA."""

    seq: Any  # the row
    token: Any  # the first token of the tile, which may be one of the row before
    first: Any  # the first token of the row in the tile
    end: Any  # the token after the last one of the row in the tile
    offset: Any  # a token's position less its number in the step
    first_block: Any  # of the keys that some token of the unit sees


class Segment(NamedTuple):
    """What a thread block does of one unit: scalars in a kernel."""

    number: Any  # of the unit, over all heads
    head: Any
    unit: Unit
    first_block: Any  # of keys
    end_block: Any
    is_whole: Any  # No other thread block has a part of the unit.
    slot: Any  # of the partial result, if not


class Visible(NamedTuple):
    """The keys that some token of a unit sees: positions `low` to `high`, the latter not included."""

    low: Any
    high: Any

    @classmethod
    def by(cls, unit: Unit, sliding_window: int | None) -> "Visible":
        low = 0 if sliding_window is None else jnp.maximum(unit.first + unit.offset - sliding_window + 1, 0)
        return cls(low, unit.end + unit.offset)


class StepRows(NamedTuple):
    """The rows of a step: see `api.ragged_paged_attention`."""

    kv_lens_S: Array
    page_table_SP: Array
    cu_q_lens: Array
    num_seqs: Array

    @property
    def q_lens_S(self) -> Array:
        """The tokens of each row; none of those that pad."""
        is_real_S = jnp.arange(self.kv_lens_S.shape[0]) < self.num_seqs[0]
        return jnp.where(is_real_S, self.cu_q_lens[1:] - self.cu_q_lens[:-1], 0)


def plan(
    rows: StepRows,
    *,
    q_lens: range,
    num_heads: int,
    num_units: int,
    tile: int,
    alignment: int,
    block: int,
    sliding_window: int | None,
    num_thread_blocks: int,
) -> Work:
    """The work on the rows whose number of tokens lies in `q_lens`.

    Args:
      num_heads: those that are units of their own.
      num_units: at least as many as rows can need, at one head.
      tile: tokens of a unit; tiles begin at multiples of `alignment`.
      block: tokens of a block of keys.
    """
    starts_S, ends_S, q_lens_S = rows.cu_q_lens[:-1], rows.cu_q_lens[1:], rows.q_lens_S
    aligned_S = starts_S // alignment * alignment
    tiles_S = jnp.where((q_lens_S >= q_lens.start) & (q_lens_S < q_lens.stop), -((aligned_S - ends_S) // tile), 0)
    tile_ends_S = jnp.cumsum(tiles_S, dtype=jnp.int32)

    unit_U = jnp.arange(num_units, dtype=jnp.int32)
    seq_U = jnp.minimum(_count_up_to(tile_ends_S, unit_U), len(q_lens_S) - 1)
    token_U = aligned_S[seq_U] + (unit_U - tile_ends_S[seq_U] + tiles_S[seq_U]) * tile
    units = Unit(
        seq=seq_U,
        token=token_U,
        first=jnp.maximum(token_U, starts_S[seq_U]),
        end=jnp.minimum(token_U + tile, ends_S[seq_U]),
        offset=rows.kv_lens_S[seq_U] - ends_S[seq_U],
        first_block=jnp.zeros_like(unit_U),
    )
    visible = Visible.by(units, sliding_window)
    units = units._replace(first_block=units.first_block + visible.low // block)
    blocks_U = jnp.where(unit_U < tile_ends_S[-1], -(-visible.high // block) - units.first_block, 0)
    ends = jnp.pad(jnp.cumsum(blocks_U, dtype=jnp.int32), (1, 0))
    total = ends[-1]
    quota = -(-total * num_heads // num_thread_blocks)

    def unit_at(position_C: Array) -> Array:
        head_C, rest_C = jnp.divmod(position_C, jnp.maximum(total, 1))
        return head_C * tile_ends_S[-1] + _count_up_to(ends[1:], rest_C)

    begin_C = jnp.minimum(jnp.arange(num_thread_blocks, dtype=jnp.int32) * quota, total * num_heads)
    end_C = jnp.minimum(begin_C + quota, total * num_heads)
    first_C = unit_at(begin_C)
    return Work(
        totals=jnp.stack([tile_ends_S[-1], total, quota]),
        ends=ends,
        units=jnp.stack(units, axis=-1),
        spans=jnp.stack([first_C, jnp.where(end_C > begin_C, unit_at(end_C - 1) + 1, first_C)], axis=-1),
    )


def _count_up_to(sorted_: Array, values: Array) -> Array:
    """How many of the sorted numbers are at most each value."""
    return jnp.searchsorted(sorted_, values, side="right", method="compare_all").astype(jnp.int32)


def read_unit(work: Work, number: Any) -> tuple[Any, Unit, Any, Any]:
    """In a kernel: the head and the unit of a number over all heads, and where its blocks of keys begin and end."""
    num_units, total = work.totals[0], work.totals[1]
    head, row = number // num_units, lax.rem(number, num_units)
    unit = Unit(*(work.units[row, i] for i in range(len(Unit._fields))))
    return head, unit, head * total + work.ends[row], head * total + work.ends[row + 1]


def slot_of_part(thread_block: Any, begins_unit: Any) -> Any:
    """Where a thread block leaves its part of a unit, which begins with it or in a thread block before."""
    return SLOTS_PER_BLOCK * thread_block + begins_unit.astype(jnp.int32)


def for_each_segment(work: Work, thread_block: Any, body: Callable[[Segment, Any], Any], carry: Any) -> Any:
    """In a kernel: `carry = body(segment, carry)` for what a thread block has to do, in order."""

    def one(number: Any, carry: Any) -> Any:
        return body(read_segment(work, thread_block, number), carry)

    return lax.fori_loop(work.spans[thread_block, 0], work.spans[thread_block, 1], one, carry)


def read_segment(work: Work, thread_block: Any, number: Any) -> Segment:
    """In a kernel: what a thread block does of the unit of that number, of which it has a part."""
    head, unit, unit_begin, unit_end = read_unit(work, number)
    begin = thread_block * work.totals[2]
    first, last = jnp.maximum(begin, unit_begin), jnp.minimum(begin + work.totals[2], unit_end)
    first_block = unit.first_block - unit_begin
    return Segment(
        number=number,
        head=head,
        unit=unit,
        first_block=first_block + first,
        end_block=first_block + last,
        is_whole=(first == unit_begin) & (last == unit_end),
        slot=slot_of_part(thread_block, first == unit_begin),
    )
