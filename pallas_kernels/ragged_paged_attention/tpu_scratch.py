"""What the TPU kernel holds in VMEM and SMEM, given how much of the work it takes at a time."""

import dataclasses
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from jaxllm.pallas_kernels.ragged_paged_attention.tpu_chunks import ChunkScratch
from jaxllm.pallas_kernels.ragged_paged_attention.tpu_decode import DecodeScratch
from jaxllm.pallas_kernels.ragged_paged_attention.tpu_layout import NUM_LANES, NUM_SUBLANES, Layout, round_up
from jaxllm.pallas_kernels.ragged_paged_attention.tpu_pages import KVScratch, PageTable

ZEROED_TOKENS = 16  # Tokens of padding that one copy sets to zero.


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


class Scratch(NamedTuple):
    zeros: Any  # [ZEROED_TOKENS, q_rows, lanes]
    zeros_sem: Any
    table: Any  # SMEM int32 [PageTable.SLOTS, P / 128, 128]
    table_sems: Any
    decode_kv: KVScratch
    decode: DecodeScratch
    chunk_kv: KVScratch | None
    chunk: ChunkScratch | None


def scratch_shapes(layout: Layout, blocks: Blocks, table_rows: int, *, decode_only: bool) -> Scratch:
    """`table_rows`: P / 128 of the page table."""
    return Scratch(
        zeros=pltpu.VMEM((ZEROED_TOKENS, layout.q_rows, layout.lanes), layout.io_dtype),
        zeros_sem=pltpu.SemaphoreType.DMA,
        table=pltpu.SMEM((PageTable.SLOTS, table_rows, NUM_LANES), jnp.int32),
        table_sems=pltpu.SemaphoreType.DMA((PageTable.SLOTS,)),
        decode_kv=KVScratch.shapes(layout, blocks.decode_fetch),
        decode=DecodeScratch.shapes(layout),
        chunk_kv=None if decode_only else KVScratch.shapes(layout, blocks.chunk_fetch),
        chunk=None if decode_only else ChunkScratch.shapes(layout, blocks.chunk_queries, blocks.chunk_tokens),
    )


def vmem_bytes(layout: Layout, blocks: Blocks, *, decode_only: bool = False) -> int:
    """What of the scratch is in VMEM."""
    scratch = scratch_shapes(layout, blocks, 1, decode_only=decode_only)
    shapes = jax.tree.leaves(scratch, is_leaf=lambda x: hasattr(x, "memory_space"))
    return sum(_padded_bytes(x) for x in shapes if getattr(x, "memory_space", None) == pltpu.VMEM)


def _padded_bytes(ref: Any) -> int:
    """Of a buffer in VMEM, whose last two dimensions are in tiles of up to 8 x 128 words."""
    *leading, rows, lanes = ref.shape
    itemsize = jnp.dtype(ref.dtype).itemsize
    tile_rows = min(max(4 // itemsize, 1 << (rows - 1).bit_length()), NUM_SUBLANES)
    return prod(leading) * round_up(rows, tile_rows) * round_up(lanes, NUM_LANES) * itemsize
