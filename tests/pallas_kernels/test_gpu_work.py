"""Who does what on a GPU, against a definition: each block of keys of each unit is somebody's, once, in equal shares.

The arrays of `gpu_work.plan` are read as the kernels read them, but without a kernel.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jaxllm.pallas_kernels.ragged_paged_attention import (
    gpu,
    gpu_combine,
    gpu_packed,
    gpu_tiles,
    gpu_work,
    gpu_write,
)
from jaxllm.pallas_kernels.ragged_paged_attention.gpu_work import SLOTS_PER_BLOCK, Segment, StepRows, Unit, Work

MAX_SEGMENTS = 128  # Of a thread block, in these cases.
PACKED = {"q_lens": range(1, 5), "num_heads": 3, "tile": 4, "alignment": 1, "block": 16, "num_thread_blocks": 7}
TILES = {"q_lens": range(5, 257), "num_heads": 4, "tile": 32, "alignment": 8, "block": 16, "num_thread_blocks": 10}
ONE = {"q_lens": range(1, 2), "num_heads": 1, "tile": 1, "alignment": 1, "block": 8, "num_thread_blocks": 1}


class Part(NamedTuple):
    """Blocks of keys of a unit at a head that one thread block has: numbers."""

    thread_block: int
    first_block: int
    end_block: int
    is_whole: bool
    slot: int


def step_rows(rows: Sequence[tuple[int, int]], num_seqs: int) -> StepRows:
    """Rows of (tokens in the step, tokens in the sequence), and absurd ones up to `num_seqs`."""
    kv_lens_S: Any = np.full(num_seqs, 2**30, np.int32)
    kv_lens_S[: len(rows)] = [kv_len for _, kv_len in rows]
    cu_q_lens: Any = np.zeros(num_seqs + 1, np.int32)
    cu_q_lens[1:] = np.cumsum([q_len for q_len, _ in rows] + [0] * (num_seqs - len(rows)))
    page_table_SP: Any = np.zeros((num_seqs, 1), np.int32)
    real_seqs: Any = np.array([len(rows)], np.int32)
    return StepRows(kv_lens_S, page_table_SP, cu_q_lens, real_seqs)


def units_by_definition(
    rows: StepRows, *, q_lens: range, tile: int, alignment: int, block: int, sliding_window: int | None, **_: Any
) -> dict[Unit, int]:
    """Each unit, and the block after its last one."""
    found = {}
    for seq in range(int(rows.num_seqs[0])):
        start, end = (int(x) for x in rows.cu_q_lens[seq : seq + 2])
        if end - start not in q_lens:
            continue
        offset = int(rows.kv_lens_S[seq]) - end
        for token in range(start // alignment * alignment, end, tile):
            positions = offset + np.arange(max(token, start), min(token + tile, end))
            low = 0 if sliding_window is None else max(int(positions[0]) - sliding_window + 1, 0)
            unit = Unit(seq, token, int(positions[0]) - offset, int(positions[-1]) + 1 - offset, offset, low // block)
            found[unit] = int(positions[-1]) // block + 1
    return found


@partial(jax.jit, static_argnames="num_thread_blocks")
def segments(work: Work, num_thread_blocks: int) -> tuple[Array, Array]:
    """What thread blocks C do, int32 [C, MAX_SEGMENTS, 11], and how much of it there is, [C]."""

    def one(thread_block: Array) -> tuple[Array, Array]:
        def note(segment: Segment, notes: tuple[Array, Array]) -> tuple[Array, Array]:
            table, count = notes
            _, head, unit, first_block, end_block, is_whole, slot = segment
            fields = (head, *unit, first_block, end_block, is_whole, slot)
            return table.at[count].set(jnp.stack([jnp.asarray(x, jnp.int32) for x in fields])), count + 1

        empty = jnp.zeros((MAX_SEGMENTS, len(Unit._fields) + 5), jnp.int32), jnp.int32(0)
        return gpu_work.for_each_segment(work, thread_block, note, empty)

    return jax.lax.map(one, jnp.arange(num_thread_blocks))


def check(rows: StepRows, *, num_units: int, sliding_window: int | None, **kind: Any) -> int:
    """Plans, and compares with the definition. Gives the largest number of parts of a unit."""
    work = plan(rows, num_units=num_units, sliding_window=sliding_window, **kind)
    expected = units_by_definition(rows, sliding_window=sliding_window, **kind)
    num_heads, num_thread_blocks = kind["num_heads"], kind["num_thread_blocks"]
    assert len(expected) <= num_units

    table, counts = (np.asarray(x) for x in segments(work, num_thread_blocks))
    assert counts.max() <= MAX_SEGMENTS
    parts: dict[tuple[int, Unit], list[Part]] = defaultdict(list)
    blocks_C = np.zeros(num_thread_blocks, int)
    for thread_block, count in enumerate(counts):
        for head, *unit, first_block, end_block, is_whole, slot in table[thread_block, :count].tolist():
            assert end_block > first_block
            blocks_C[thread_block] += end_block - first_block
            parts[head, Unit(*unit)].append(Part(thread_block, first_block, end_block, bool(is_whole), slot))

    # Each unit, each head, each block of keys: once, in order.
    assert parts.keys() == {(head, unit) for head in range(num_heads) for unit in expected}
    for (_, unit), its_parts in parts.items():
        borders = [unit.first_block, *(part.end_block for part in its_parts)]
        assert borders[-1] == expected[unit]
        assert [part.first_block for part in its_parts] == borders[:-1]
        assert all(part.is_whole == (len(its_parts) == 1) for part in its_parts)

    # Equal shares: whoever is not the last has as much as anybody.
    total = num_heads * sum(end - unit.first_block for unit, end in expected.items())
    quota = -(-total // num_thread_blocks)
    np.testing.assert_array_equal(blocks_C, np.clip(total - quota * np.arange(num_thread_blocks), 0, quota))

    check_slots(work, parts, **kind)
    return max((len(its_parts) for its_parts in parts.values()), default=0)


def check_slots(
    work: Work, parts: dict[tuple[int, Unit], list[Part]], *, num_heads: int, num_thread_blocks: int, **_: Any
) -> None:
    """Parts have slots of their own, and a thread block that joins a unit finds all of them: see `gpu_combine`."""
    slots = [part.slot for its_parts in parts.values() if len(its_parts) > 1 for part in its_parts]
    assert len(set(slots)) == len(slots)
    quota, end = int(work.totals[2]), int(work.totals[1]) * num_heads
    joined = {}
    for thread_block in range(num_thread_blocks):
        begin = thread_block * quota
        if begin >= end:
            continue
        head, unit, unit_begin, unit_end = gpu_work.read_unit(work, work.spans[thread_block, 0])
        if begin - quota <= unit_begin < begin:
            first, last = thread_block - 1, (int(unit_end) - 1) // quota
            key = int(head), Unit(*(int(x) for x in unit))
            assert key not in joined
            joined[key] = [SLOTS_PER_BLOCK * part + (part == first) for part in range(first, last + 1)]
    assert joined == {key: [part.slot for part in its_parts] for key, its_parts in parts.items() if len(its_parts) > 1}


plan = jax.jit(
    gpu_work.plan,
    static_argnames=(
        "q_lens",
        "num_heads",
        "num_units",
        "tile",
        "alignment",
        "block",
        "sliding_window",
        "num_thread_blocks",
    ),
)


def draw_rows(rng: np.random.Generator, num_seqs: int, num_tokens: int, most_keys: int) -> list[tuple[int, int]]:
    rows, left = [], num_tokens
    for _ in range(rng.integers(0, num_seqs + 1)):
        q_len = min(int(rng.choice([0, 1, 1, rng.integers(1, 9), rng.integers(1, num_tokens + 1)])), left)
        left -= q_len
        rows.append((q_len, q_len + int(rng.choice([0, rng.integers(0, 40), rng.integers(0, most_keys)]))))
    return rows


@pytest.mark.parametrize(
    "sliding_window", [None, 21, *(pytest.param(w, marks=pytest.mark.nightly) for w in (1, 16, 300))]
)
@pytest.mark.parametrize("kind", [PACKED, TILES, ONE], ids=["packed", "tiles", "one"])
def test_each_block_of_keys_is_somebodys_once_in_equal_shares(kind, sliding_window):
    rng = np.random.default_rng(0)
    num_parts = [
        check(
            step_rows(draw_rows(rng, num_seqs=6, num_tokens=256, most_keys=600), num_seqs=6),
            num_units=6 if kind["alignment"] == 1 else 256 // 32 + 2 * 6,
            sliding_window=sliding_window,
            **kind,
        )
        for _ in range(25)
    ]
    if kind is not ONE and sliding_window is None:  # Or the cases are none.
        assert set(num_parts) >= {0, 1, 2, 3}


@pytest.mark.parametrize("rows", [[], [(0, 0)], [(0, 2**20)] * 6], ids=["none", "empty", "without tokens"])
def test_rows_without_tokens_are_no_work(rows):
    for kind in (PACKED, TILES):
        check(step_rows(rows, num_seqs=6), num_units=6, sliding_window=None, **kind)


def test_more_thread_blocks_than_blocks_of_keys():
    for num_keys in (1, 16, 17, 33):
        check(step_rows([(1, num_keys)], num_seqs=1), num_units=1, sliding_window=None, **PACKED)


@pytest.mark.parametrize("sliding_window", [pytest.param(None, marks=pytest.mark.nightly), 4096])
def test_long_sequences_do_not_overflow(sliding_window):
    """A million tokens each: 256 decodes, and a step of 8,192 tokens of a prompt at 64 heads."""
    million = 2**20
    heads = {"sliding_window": sliding_window, "num_thread_blocks": 264}
    decodes = {"q_lens": range(1, 9), "num_heads": 8, "tile": 8, "alignment": 1, "block": 64, **heads}
    check(step_rows([(1, million - i) for i in range(256)], num_seqs=256), num_units=256, **decodes)
    chunk = {"q_lens": range(9, 8193), "num_heads": 64, "tile": 128, "alignment": 8, "block": 128, **heads}
    check(step_rows([(8192, million)], num_seqs=256), num_units=2 * 64, **chunk)


def plans(*, num_tokens: int, num_seqs: int, group: int) -> list[dict[str, Any]]:
    """The arguments with which attention plans: for the kernel for rows of few tokens, and for that of many, if any."""
    found: list[dict[str, Any]] = []
    num_kv_heads, head_dim, page_size = 2, 128, 64

    def struct(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    attend = partial(
        gpu.ragged_paged_attention,
        sm_scale=1.0,
        sliding_window=None,
        soft_cap=None,
        sinks_N=None,
        k_scale_K=None,
        v_scale_K=None,
        decode_only=False,
    )
    with (
        mock.patch.object(gpu_work, "plan", lambda rows, **options: found.append(options)),
        mock.patch.object(gpu_write, "write", lambda kv, slots, pages, out: jnp.zeros(out.shape, out.dtype)),
        mock.patch.object(gpu_packed, "attend"),
        mock.patch.object(gpu_tiles, "attend"),
        mock.patch.object(gpu_combine, "combine"),
    ):
        jax.eval_shape(
            attend,
            struct(num_tokens, group * num_kv_heads, head_dim),
            *[struct(num_tokens, num_kv_heads, head_dim)] * 2,
            struct(9, 2 * num_kv_heads, page_size, head_dim),
            struct(num_seqs, dtype=jnp.int32),
            struct(num_seqs, 3, dtype=jnp.int32),
            struct(num_seqs + 1, dtype=jnp.int32),
            struct(1, dtype=jnp.int32),
        )
    return found


@pytest.mark.parametrize("num_tokens", [1, 4, 5, 8, 9, 300])
@pytest.mark.parametrize("group", [1, 3, 4, 5, 7, 12, 16])
def test_every_row_with_tokens_is_of_one_kernel(group, num_tokens):
    q_lens = [q_len for options in plans(num_tokens=num_tokens, num_seqs=8, group=group) for q_len in options["q_lens"]]
    assert q_lens[:num_tokens] == list(range(1, num_tokens + 1))
    assert len(set(q_lens)) == len(q_lens)


@pytest.mark.parametrize("num_tokens", [9, 16, 100, 127, 128, 129, 250, 1000, 2048])
@pytest.mark.parametrize("group", [1, 5, 16])
def test_there_is_room_for_all_units_of_any_rows(group, num_tokens):
    """Rows as short as can be, rows that need one tile more than their tokens fill, and random ones."""
    rng = np.random.default_rng(num_tokens)
    for num_seqs in (1, 3, 64, 256):
        for options in plans(num_tokens=num_tokens, num_seqs=num_seqs, group=group):
            lens = [[length] * num_seqs for length in (options["q_lens"].start, 121, 122, 123, 128, 130, 250)]
            lens += [[7, *[122, 6] * num_seqs], [15, *[128] * num_seqs]]  # Tiles of 129 and 135 tokens.
            lens += [rng.integers(1, 200, num_seqs).tolist() for _ in range(5)]
            for q_lens in lens:
                ends = np.minimum(np.cumsum(q_lens[:num_seqs]), num_tokens)
                rows = [(int(n), int(n)) for n in np.diff(ends, prepend=0)]
                needed = units_by_definition(step_rows(rows, num_seqs), **options)
                assert len(needed) <= options["num_units"], rows
