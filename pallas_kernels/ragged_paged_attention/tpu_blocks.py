"""How much of the work the TPU kernel takes at a time: tokens of a fetch, of a product, of a tile of queries.

`benchmarks/tpu/tune.py` looks for better sizes than the rule's and puts them into the table beside this file.
"""

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path

from jaxllm.pallas_kernels.ragged_paged_attention import tpu_chip
from jaxllm.pallas_kernels.ragged_paged_attention.tpu_layout import NUM_LANES, NUM_SUBLANES, Layout, round_up
from jaxllm.pallas_kernels.ragged_paged_attention.tpu_scratch import Blocks, vmem_bytes

TABLE = Path(__file__).with_name("tpu_block_sizes.json")

# Decode waits for the memory. One fetch is under way while the one before is attended to, so it should last longer than
# a DMA's latency, of about a microsecond. Of few heads that is thousands of tokens; a row that has fewer is one fetch
# of what it has, and a smaller fetch would not bring it sooner.
DECODE_FETCH_BYTES = 2 << 20
V7X_DECODE_FETCH_BYTES = 4 << 20  # Its memory is more than twice as fast as any other's.
# The scores of all heads against one product's tokens stay in registers, of which there are 64. The last product of a
# row is masked and takes all its tokens, however few the row has there: hence a limit where heads are few.
SCORE_REGISTERS = 16
MAX_DECODE_TOKENS = 256
# Chunks wait for the matrix unit; their fetches are large enough to be few.
CHUNK_FETCH_BYTES = 2 << 20
CHUNK_FETCH_TOKENS = 1024
CHUNK_TOKENS = 256
CHUNK_ROWS = 512  # Of a tile of queries in a tile head, at most.
# A tile of few heads is a short list of items, of which the first and the last leave the units idle: more items of
# fewer tokens, and more queries in each.
FEW_TILE_HEADS = 2
FEW_HEADS_CHUNK_TOKENS = 128
FEW_HEADS_CHUNK_ROWS = 1024
# For the registers that the compiler spills. With libtpu 0.0.52 they were up to 1.4 MiB in decode, and up to the bytes
# of 9 tiles of scores in chunks (both v7x, float32, 16/1 heads of 256, pages of 256).
SPILL_BYTES = 2 << 20
SPILLED_TILES = 16


def choose(layout: Layout, chip: str | None) -> Blocks:
    """The table's row, or the rule's sizes where it has none.

    Args:
      chip: as `tpu_chip.name` gives it. Without one (simulation), the rule.

    Raises:
      ValueError: the smallest blocks do not fit into the chip's VMEM.
    """
    row = table().get(chip or "", {}).get(key(layout))
    # Queries of float32, of which the table does not know, need more than those of bfloat16.
    return rule(layout, chip) if row is None or not fits(layout, row, chip) else row


@functools.cache
def table() -> dict[str, dict[str, Blocks]]:
    """By chip and `key`."""
    rows = json.loads(TABLE.read_text())
    return {chip: {key: Blocks(**sizes) for key, sizes in rows[chip].items()} for chip in rows}


def key(layout: Layout) -> str:
    """What a row of the table is for: N/K/H/dtype of the cache/page size."""
    return "/".join(
        map(str, (layout.num_heads, layout.num_kv_heads, layout.head_dim, layout.kv_dtype.name, layout.page_size))
    )


@functools.cache
def rule(layout: Layout, chip: str | None) -> Blocks:
    """Sizes that suit all chips and shapes, smaller where they would take more than half of the VMEM."""
    page, capacity = layout.page_size, tpu_chip.vmem_bytes(chip)
    registers = layout.num_tile_heads * (round_up(layout.rows_per_token, NUM_SUBLANES) // NUM_SUBLANES)
    decode_tokens = min(_power_of_two(SCORE_REGISTERS // registers) * NUM_LANES, MAX_DECODE_TOKENS)
    fetch_bytes = V7X_DECODE_FETCH_BYTES if chip == "v7x" else DECODE_FETCH_BYTES
    decode_fetch = _power_of_two(fetch_bytes // layout.token_bytes)
    chunk_tokens, chunk_rows = CHUNK_TOKENS, CHUNK_ROWS
    if layout.num_tile_heads <= FEW_TILE_HEADS:
        chunk_tokens, chunk_rows = FEW_HEADS_CHUNK_TOKENS, FEW_HEADS_CHUNK_ROWS
    chunk_fetch = min(_power_of_two(CHUNK_FETCH_BYTES // layout.token_bytes), CHUNK_FETCH_TOKENS)
    blocks = Blocks(
        decode_fetch=max(decode_fetch, decode_tokens, page),
        decode_tokens=decode_tokens,
        chunk_fetch=max(chunk_fetch, chunk_tokens, page),
        chunk_tokens=chunk_tokens,
        chunk_queries=max(_power_of_two(chunk_rows // layout.rows_per_token), _least_queries(layout)),
    )
    while vmem_bytes(layout, blocks) > capacity // 2:
        # Decode's fetches last, since the memory is what decode waits for.
        smaller = min(
            _halved(layout, blocks),
            key=lambda b: (b.decode_fetch < blocks.decode_fetch, vmem_bytes(layout, b)),
            default=None,
        )
        if smaller is None:
            break
        blocks = smaller
    if not fits(layout, blocks, chip):
        raise ValueError(
            f"attention with {layout.num_heads}/{layout.num_kv_heads} heads of {layout.head_dim}, a cache of "
            f"{layout.kv_dtype} and pages of {page} tokens needs "
            f"{needed_bytes(layout, blocks) / 2**20:.1f} MiB of VMEM; {chip or 'a simulated chip'} has "
            f"{capacity >> 20} MiB: take smaller pages, or more devices to split the heads over"
        )
    return blocks


def is_valid(layout: Layout, blocks: Blocks, chip: str | None) -> bool:
    """Whether the kernel can take these sizes: see `Blocks`."""
    sizes = dataclasses.asdict(blocks)
    return all(
        size == _power_of_two(size) and size >= least
        for size, least in zip(sizes.values(), _least(layout, blocks).values(), strict=True)
    ) and fits(layout, blocks, chip)


def fits(layout: Layout, blocks: Blocks, chip: str | None) -> bool:
    return needed_bytes(layout, blocks) <= tpu_chip.vmem_bytes(chip)


def _halved(layout: Layout, blocks: Blocks) -> Iterator[Blocks]:
    """Blocks with one size halved, for each that can be."""
    least = _least(layout, blocks)
    for name, size in dataclasses.asdict(blocks).items():
        if size // 2 >= least[name]:
            yield dataclasses.replace(blocks, **{name: size // 2})


def _least(layout: Layout, blocks: Blocks) -> dict[str, int]:
    """What each size is at least, the others given."""
    return {
        "decode_fetch": max(blocks.decode_tokens, layout.page_size),
        "decode_tokens": NUM_LANES,
        "chunk_fetch": max(blocks.chunk_tokens, layout.page_size),
        "chunk_tokens": NUM_LANES,
        "chunk_queries": _least_queries(layout),
    }


def _least_queries(layout: Layout) -> int:
    """Tokens whose rows fill registers of 128 lanes."""
    rows = layout.rows_per_token
    return max(NUM_LANES // (rows & -rows), 1)


def needed_bytes(layout: Layout, blocks: Blocks, *, decode_only: bool = False) -> int:
    """VMEM that the compiler may take for the kernel: the scratch, and room for what it spills."""
    tile_bytes = 4 * blocks.chunk_tokens * blocks.chunk_queries * layout.rows_per_token
    spill_bytes = SPILL_BYTES + (0 if decode_only else SPILLED_TILES * tile_bytes)
    return vmem_bytes(layout, blocks, decode_only=decode_only) + spill_bytes


def _power_of_two(x: int) -> int:
    """The largest power of two that is not above x, at least 1."""
    return 1 << max(0, x.bit_length() - 1)
