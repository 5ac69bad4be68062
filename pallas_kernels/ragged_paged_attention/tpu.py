"""Ragged paged attention for TPUs, in Pallas: one kernel for every mix of rows. `docs/kernels.md` explains it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxllm.pallas_kernels.ragged_paged_attention import tpu_blocks, tpu_chip
from jaxllm.pallas_kernels.ragged_paged_attention.pages import to_cache_dtype
from jaxllm.pallas_kernels.ragged_paged_attention.tpu_blocks import Blocks
from jaxllm.pallas_kernels.ragged_paged_attention.tpu_chunks import Chunks, ChunkScratch
from jaxllm.pallas_kernels.ragged_paged_attention.tpu_decode import Decode, DecodeScratch
from jaxllm.pallas_kernels.ragged_paged_attention.tpu_layout import NUM_LANES, NUM_SUBLANES, Layout, round_up
from jaxllm.pallas_kernels.ragged_paged_attention.tpu_pages import (
    LOG2_E,
    Attention,
    KVBlocks,
    PageTable,
    RowList,
    zero_tokens,
)

ZEROED_TOKENS = 16  # Tokens of padding that one copy sets to zero.


PAGE_SIZES = (16, 32, 64, 128, 256)
MAX_HEAD_DIM = 256
MAX_ROWS_PER_KV_HEAD = 16
KV_DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")
MAX_TABLE_ROW_BYTES = 64 << 10  # PageTable.SLOTS of them are in SMEM, whose 1 MiB also holds what all rows have.


def kv_cache_shape(
    num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype
) -> tuple[int, ...]:
    """[page, tile, slot, lane]; see `tpu_layout`."""
    return (num_pages, *_cache_layout(page_size, num_kv_heads, head_dim, dtype).page_shape)


def pages_from_tokens(kv_BC2KH: Array) -> Array:
    layout = _cache_layout(kv_BC2KH.shape[1], *kv_BC2KH.shape[3:], kv_BC2KH.dtype)
    return jnp.swapaxes(layout.tiles(kv_BC2KH[:, :, 0], kv_BC2KH[:, :, 1]), 1, 2)


def tokens_from_pages(kv_pages: Array, num_kv_heads: int, head_dim: int) -> Array:
    layout = _cache_layout(kv_pages.shape[2], num_kv_heads, head_dim, kv_pages.dtype)
    return jnp.stack(layout.heads(jnp.swapaxes(kv_pages, 1, 2)), 2)


def _cache_layout(page_size: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype) -> Layout:
    """A layout as far as pages are concerned."""
    return Layout(
        num_heads=num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        q_dtype=jnp.dtype(jnp.bfloat16),
        kv_dtype=jnp.dtype(dtype),
    )


def _layout(q_TNH: Array, k_TKH: Array, kv_pages: Array) -> Layout:
    return Layout(
        num_heads=q_TNH.shape[1],
        num_kv_heads=k_TKH.shape[1],
        head_dim=q_TNH.shape[2],
        page_size=kv_pages.shape[2],
        q_dtype=q_TNH.dtype,
        kv_dtype=kv_pages.dtype,
    )


def validate(q_TNH: Array, k_TKH: Array, kv_pages: Array, page_table_SP: Array) -> None:
    """Raises ValueError for what this kernel cannot do, or what does not fit into the chip."""
    layout = _layout(q_TNH, k_TKH, kv_pages)
    if layout.kv_dtype.name not in KV_DTYPES:
        raise ValueError(f"kv_pages is {layout.kv_dtype}; the TPU kernel takes {', '.join(KV_DTYPES)}")
    if layout.q_dtype.name not in ("float32", "bfloat16"):
        raise ValueError(f"q is {layout.q_dtype}; the TPU kernel takes float32 and bfloat16")
    if layout.head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head size is {layout.head_dim}; the TPU kernel takes at most {MAX_HEAD_DIM}")
    if (rows := layout.num_heads // layout.num_kv_heads) > MAX_ROWS_PER_KV_HEAD:
        raise ValueError(f"{rows} query heads share a KV head; the TPU kernel takes at most {MAX_ROWS_PER_KV_HEAD}")
    sizes = [size for size in PAGE_SIZES if size >= layout.group]
    if layout.page_size not in sizes:
        raise ValueError(
            f"page_size is {layout.page_size}; with a cache of {layout.kv_dtype} the TPU kernel takes "
            f"{', '.join(map(str, sizes))}"
        )
    if kv_pages.shape[1:] != layout.page_shape:
        raise ValueError(
            f"kv_pages has shape {kv_pages.shape}; make it with kv_cache_shape: {layout.page_shape} a page"
        )
    max_pages = MAX_TABLE_ROW_BYTES // 4
    if (P := page_table_SP.shape[1]) > max_pages:
        raise ValueError(
            f"the page table has {P:,} pages for each sequence; the TPU kernel takes at most {max_pages:,}, which are "
            f"{max_pages * layout.page_size:,} tokens: take larger pages"
        )


def ragged_paged_attention(
    q_TNH: Array,
    k_TKH: Array,
    v_TKH: Array,
    kv_pages: Array,
    kv_lens_S: Array,
    page_table_SP: Array,
    cu_q_lens: Array,
    num_seqs: Array,
    *,
    sm_scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks_N: Array | None,
    k_scale_K: Array | None,
    v_scale_K: Array | None,
    decode_only: bool,
    blocks: Blocks | None = None,
) -> tuple[Array, Array]:
    """See `api.ragged_paged_attention`. `blocks`: None for those of the table, or of the rule."""
    (_, N, _), K, (S, P) = q_TNH.shape, k_TKH.shape[1], page_table_SP.shape
    layout = _layout(q_TNH, k_TKH, kv_pages)
    attention = Attention(sm_scale=sm_scale, sliding_window=sliding_window, soft_cap=soft_cap)
    if blocks is None:
        blocks = tpu_blocks.choose(layout)

    q_TNH = attention.scale(q_TNH, None if k_scale_K is None else jnp.repeat(k_scale_K, N // K))
    tiles = layout.tiles(
        to_cache_dtype(k_TKH, k_scale_K, kv_pages.dtype), to_cache_dtype(v_TKH, v_scale_K, kv_pages.dtype)
    )
    table = jnp.pad(page_table_SP, ((0, 0), (0, -P % NUM_LANES))).reshape(S, -1, NUM_LANES)
    if decode_only:
        rows = [jnp.arange(S, dtype=jnp.int32), num_seqs]
    else:
        q_lens_S = jnp.where(jnp.arange(S) < num_seqs[0], cu_q_lens[1:] - cu_q_lens[:-1], 0)
        rows = [*_list_rows(q_lens_S == 1), *_list_rows(q_lens_S > 1)]
    sinks = [] if sinks_N is None else _sinks(layout, blocks, sinks_N, decode_only)

    kernel = _kernel(layout, attention, blocks, has_sinks=bool(sinks), decode_only=decode_only)
    out, kv_pages = kernel(
        [kv_lens_S, cu_q_lens, num_seqs, *rows], [table, layout.rows(q_TNH), layout.new_rows(tiles)], sinks, kv_pages
    )

    out_TNH = layout.out_heads(out)
    if v_scale_K is not None:
        out_TNH = (out_TNH * jnp.repeat(v_scale_K, N // K)[:, None]).astype(out_TNH.dtype)
    return out_TNH, kv_pages


def _sinks(layout: Layout, blocks: Blocks, sinks_N: Array, decode_only: bool) -> list[Array]:
    """Logits of base 2, as each body has its rows: [tile heads, rows, 128], and [tile heads, 1, rows of a tile]."""
    sinks = layout.sinks(sinks_N) * LOG2_E
    num_rows = round_up(layout.rows_per_token, NUM_SUBLANES)
    padded = jnp.pad(sinks, ((0, 0), (0, num_rows - layout.rows_per_token)))
    decode = jnp.broadcast_to(padded[:, :, None], (*padded.shape, NUM_LANES))
    if decode_only:
        return [decode]
    words = sinks.reshape(layout.num_tile_heads, layout.words_per_tile_head, layout.q_pack)
    return [decode, jnp.tile(words, (1, 1, blocks.chunk_queries)).reshape(layout.num_tile_heads, 1, -1)]


def _list_rows(is_listed_S: Array) -> tuple[Array, Array]:
    """The numbers of some rows, int32 [S], and how many they are, int32 [1]. No scatter, which a TPU is slow at."""
    row_S = jnp.arange(is_listed_S.shape[0], dtype=jnp.int32)
    place_S = jnp.cumsum(is_listed_S, dtype=jnp.int32) - 1
    is_at_SS = is_listed_S[None, :] & (place_S[None, :] == row_S[:, None])
    rows = jnp.sum(jnp.where(is_at_SS, row_S[None, :], 0), axis=1, dtype=jnp.int32)
    return rows, place_S[-1:] + 1


def _scratch(layout: Layout, blocks: Blocks, table_rows: int, decode_only: bool) -> list:
    """What the kernel has in VMEM and SMEM, in the order in which its body takes it."""
    scratch = [
        pltpu.VMEM((ZEROED_TOKENS, layout.q_rows, layout.lanes), layout.io_dtype),
        pltpu.SemaphoreType.DMA,
        pltpu.SMEM((PageTable.SLOTS, table_rows, NUM_LANES), jnp.int32),
        pltpu.SemaphoreType.DMA((PageTable.SLOTS,)),
        *KVBlocks.scratch(layout, blocks.decode_fetch),
        *DecodeScratch.shapes(layout),
    ]
    if not decode_only:
        scratch += KVBlocks.scratch(layout, blocks.chunk_fetch)
        scratch += ChunkScratch.shapes(layout, blocks.chunk_queries, blocks.chunk_tokens)
    return scratch


def _kernel(layout: Layout, attention: Attention, blocks: Blocks, *, has_sinks: bool, decode_only: bool) -> Callable:
    """The Pallas call, made for its arguments' shapes when called."""

    num_cores = tpu_chip.num_cores()

    def body(*refs: Any) -> None:
        refs = iter(refs)
        kv_lens, cu_q_lens, num_seqs, decodes, num_decodes = (next(refs) for _ in range(5))
        chunks, num_chunks = (None, None) if decode_only else (next(refs), next(refs))
        table, q, new = (next(refs) for _ in range(3))
        decode_sinks = next(refs) if has_sinks else None
        chunk_sinks = next(refs) if has_sinks and not decode_only else None
        _, out, pages = (next(refs) for _ in range(3))  # The pages come in where they go out.
        core = pl.program_id(0)
        padding = jnp.where(core == 0, cu_q_lens[num_seqs[0]], out.shape[0])
        zero_tokens(out, padding, next(refs), next(refs))
        page_table = PageTable(table, next(refs), next(refs))

        def kv_blocks() -> KVBlocks:
            return KVBlocks(layout, page_table, pages, next(refs), next(refs))

        decode = Decode(
            layout=layout,
            attention=attention,
            num_tokens=blocks.decode_tokens,
            kv_lens=kv_lens,
            cu_q_lens=cu_q_lens,
            q_hbm=q,
            new_hbm=new,
            sinks=decode_sinks,
            out_hbm=out,
            blocks=kv_blocks(),
            scratch=DecodeScratch(*(next(refs) for _ in dataclasses.fields(DecodeScratch))),
        )
        decode_rows = RowList(decodes, num_decodes[0], core, num_cores)
        if decode_only:
            decode.run(decode_rows)
            return
        chunk = Chunks(
            layout=layout,
            attention=attention,
            num_queries=blocks.chunk_queries,
            num_tokens=blocks.chunk_tokens,
            kv_lens=kv_lens,
            cu_q_lens=cu_q_lens,
            q_hbm=q,
            new_hbm=new,
            sinks=chunk_sinks,
            out_hbm=out,
            blocks=kv_blocks(),
            scratch=ChunkScratch(*(next(refs) for _ in dataclasses.fields(ChunkScratch))),
        )
        chunk_rows = RowList(chunks, num_chunks[0], core, num_cores)
        chunk.write(chunk_rows)
        decode.run(decode_rows)
        chunk.attend(chunk_rows)

    def call(scalars: list[Array], arrays: list[Array], sinks: list[Array], pages: Array) -> tuple[Array, Array]:
        table, q, _ = arrays
        in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
        return pl.pallas_call(
            body,
            out_shape=(jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(pages.shape, pages.dtype)),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(scalars),
                grid=(num_cores,),
                in_specs=[in_hbm] * len(arrays) + [pl.BlockSpec(memory_space=pltpu.VMEM)] * len(sinks) + [in_hbm],
                out_specs=(in_hbm, in_hbm),
                scratch_shapes=_scratch(layout, blocks, table.shape[1], decode_only),
            ),
            input_output_aliases={len(scalars) + len(arrays) + len(sinks): 1},
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=(pltpu.PARALLEL,),
                vmem_limit_bytes=64 << 20,
                disable_bounds_checks=True,
                fuse_transposed_lhs_in_matmul=True,
            ),
            name="ragged_paged_attention_decode" if decode_only else "ragged_paged_attention",
        )(*scalars, *arrays, *sinks, pages)

    return call
