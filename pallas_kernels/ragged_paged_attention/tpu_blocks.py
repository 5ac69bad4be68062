"""How much of the work the TPU kernel takes at a time: tokens of a fetch, of a product, of a tile of queries.

`benchmarks/tpu_tune.py` looks for better sizes than the rule's and puts them into the table beside this file.
"""

import dataclasses
import functools
import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from jaxllm.pallas_kernels.ragged_paged_attention import tpu_chip
from jaxllm.pallas_kernels.ragged_paged_attention.tpu_chunks import ChunkScratch
from jaxllm.pallas_kernels.ragged_paged_attention.tpu_decode import DecodeScratch
from jaxllm.pallas_kernels.ragged_paged_attention.tpu_layout import NUM_LANES, NUM_SUBLANES, Layout, round_up
from jaxllm.pallas_kernels.ragged_paged_attention.tpu_pages import KVBlocks, PageTable

TABLE = Path(__file__).with_name("tpu_block_sizes.json")

DECODE_FETCH_BYTES = {"v7x": 4 << 20}
DECODE_FETCH_BYTES_ELSEWHERE = 2 << 20
CHUNK_FETCH_BYTES = 4 << 20
CHUNK_FETCH_TOKENS = 1024
# Scores of all heads against one product's tokens, in decode, should stay in registers, of which there are 64.
SCORE_REGISTERS = 16
MAX_DECODE_TOKENS = 1024
CHUNK_ROWS = 512  # Of a tile of queries, about, in each tile head.
CHUNK_TOKENS = 256
ZEROED_TOKENS = 16  # Tokens of padding that one copy sets to zero.
# The compiler's own: registers that it spills.
SPILL_BYTES = 2 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """All in tokens, and powers of two.

    decode_fetch, chunk_fetch: KV that one fetch brings, of which three are in VMEM: whole pages.
    decode_tokens, chunk_tokens: KV of one product, at most what a fetch brings; at least 128.
    chunk_queries: queries of a tile; with all rows of a tile head, a multiple of 128.
    """

    decode_fetch: int
    decode_tokens: int
    chunk_fetch: int
    chunk_tokens: int
    chunk_queries: int


def choose(layout: Layout, chip: str | None) -> Blocks:
    """The table's row, or the rule's sizes where it has none.

    Args:
      chip: as `tpu_chip.name` gives it. Without one (simulation), the rule.

    Raises:
      ValueError: the smallest blocks do not fit into the chip's VMEM.
    """
    row = table().get(chip or "", {}).get(key(layout))
    return rule(layout, chip) if row is None else row


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
    decode_tokens = _power_of_two(SCORE_REGISTERS // registers) * NUM_LANES
    decode_tokens = min(decode_tokens, MAX_DECODE_TOKENS)
    decode_fetch = _power_of_two(DECODE_FETCH_BYTES.get(chip or "", DECODE_FETCH_BYTES_ELSEWHERE) // layout.token_bytes)
    chunk_fetch = min(_power_of_two(CHUNK_FETCH_BYTES // layout.token_bytes), CHUNK_FETCH_TOKENS)
    blocks = Blocks(
        decode_fetch=max(decode_fetch, decode_tokens, page),
        decode_tokens=decode_tokens,
        chunk_fetch=max(chunk_fetch, CHUNK_TOKENS, page),
        chunk_tokens=CHUNK_TOKENS,
        chunk_queries=max(_power_of_two(CHUNK_ROWS // layout.rows_per_token), _least_queries(layout)),
    )
    while vmem_bytes(layout, blocks) > capacity // 2:
        smaller = min(_halved(layout, blocks), key=lambda b: vmem_bytes(layout, b), default=None)
        if smaller is None:
            break
        blocks = smaller
    if vmem_bytes(layout, blocks) + SPILL_BYTES > capacity:
        raise ValueError(
            f"attention with {layout.num_heads}/{layout.num_kv_heads} heads of {layout.head_dim}, a cache of "
            f"{layout.kv_dtype} and pages of {page} tokens needs {_mib(vmem_bytes(layout, blocks) + SPILL_BYTES)} of VMEM; "
            f"{chip or 'the simulated chip'} has {_mib(capacity)}: take smaller pages, or more devices to split heads over"
        )
    return blocks


def _halved(layout: Layout, blocks: Blocks) -> Iterator[Blocks]:
    """Blocks with one size halved, for each that can be."""
    least = {
        "decode_fetch": max(blocks.decode_tokens, layout.page_size),
        "decode_tokens": NUM_LANES,
        "chunk_fetch": max(blocks.chunk_tokens, layout.page_size),
        "chunk_tokens": NUM_LANES,
        "chunk_queries": _least_queries(layout),
    }
    for name, size in dataclasses.asdict(blocks).items():
        if size // 2 >= least[name]:
            yield dataclasses.replace(blocks, **{name: size // 2})


def _least_queries(layout: Layout) -> int:
    """Tokens whose rows fill registers of 128 lanes."""
    rows = layout.rows_per_token
    return max(NUM_LANES // (rows & -rows), 1)


def scratch(layout: Layout, blocks: Blocks, table_rows: int, decode_only: bool) -> list:
    """What the kernel has in VMEM and SMEM, in the order in which its body takes it."""
    shapes = [
        pltpu.VMEM((ZEROED_TOKENS, layout.q_rows, layout.lanes), layout.io_dtype),
        pltpu.SemaphoreType.DMA,
        pltpu.SMEM((PageTable.SLOTS, table_rows, NUM_LANES), jnp.int32),
        pltpu.SemaphoreType.DMA((PageTable.SLOTS,)),
        *KVBlocks.scratch(layout, blocks.decode_fetch),
        *DecodeScratch.shapes(layout),
    ]
    if not decode_only:
        shapes += KVBlocks.scratch(layout, blocks.chunk_fetch)
        shapes += ChunkScratch.shapes(layout, blocks.chunk_queries, blocks.chunk_tokens)
    return shapes


def vmem_bytes(layout: Layout, blocks: Blocks, decode_only: bool = False) -> int:
    """Of the kernel's scratch."""
    shapes = scratch(layout, blocks, 1, decode_only)
    return sum(_padded_bytes(s) for s in shapes if getattr(s, "memory_space", None) == pltpu.VMEM)


def vmem_limit_bytes(layout: Layout, blocks: Blocks, decode_only: bool, chip: str | None) -> int:
    """What the compiler may take for the kernel."""
    return min(vmem_bytes(layout, blocks, decode_only) + SPILL_BYTES, tpu_chip.vmem_bytes(chip))


def _padded_bytes(ref: Any) -> int:
    """Of a buffer in VMEM, whose last two dimensions are in tiles of up to 8 x 128 words."""
    *leading, rows, lanes = ref.shape
    itemsize = jnp.dtype(ref.dtype).itemsize
    tile_rows = min(max(4 // itemsize, 1 << (rows - 1).bit_length()), NUM_SUBLANES)
    return prod(leading) * round_up(rows, tile_rows) * round_up(lanes, NUM_LANES) * itemsize


def _power_of_two(x: int) -> int:
    """The largest power of two that is not above x, at least 1."""
    return 1 << max(0, x.bit_length() - 1)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
