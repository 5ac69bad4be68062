"""Ragged paged attention for TPUs, in Pallas: one kernel for every mix of rows. `docs/kernels.md` tells how it works."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxllm.pallas_kernels.ragged_paged_attention import tpu_blocks
from jaxllm.pallas_kernels.ragged_paged_attention.pages import to_cache_dtype
from jaxllm.pallas_kernels.ragged_paged_attention.tpu_blocks import Blocks
from jaxllm.pallas_kernels.ragged_paged_attention.tpu_chunks import Chunks, ChunkScratch
from jaxllm.pallas_kernels.ragged_paged_attention.tpu_decode import Decode, DecodeScratch
from jaxllm.pallas_kernels.ragged_paged_attention.tpu_layout import NUM_LANES, NUM_SUBLANES, Layout, round_up
from jaxllm.pallas_kernels.ragged_paged_attention.tpu_pages import LOG2_E, Attention, KVBlocks, PageTable


def kv_cache_shape(
    num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype
) -> tuple[int, ...]:
    """[page, tile, slot, lane]; see `tpu_layout`."""
    layout = Layout(
        num_heads=num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        q_dtype=jnp.dtype(dtype),
        kv_dtype=jnp.dtype(dtype),
    )
    return (num_pages, *layout.page_shape)


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
) -> tuple[Array, Array]:
    """See `api.ragged_paged_attention`."""
    (T, N, H), K, (S, P) = q_TNH.shape, k_TKH.shape[1], page_table_SP.shape
    layout = Layout(
        num_heads=N,
        num_kv_heads=K,
        head_dim=H,
        page_size=kv_pages.shape[2],
        q_dtype=q_TNH.dtype,
        kv_dtype=kv_pages.dtype,
    )
    attention = Attention(sm_scale=sm_scale, sliding_window=sliding_window, soft_cap=soft_cap)
    blocks = tpu_blocks.choose(layout)
    q_padding, new_padding = (0, 0) if decode_only else (blocks.chunk_queries, layout.page_size)

    if k_scale_K is not None:
        q_TNH = (q_TNH * jnp.repeat(k_scale_K, N // K)[:, None]).astype(q_TNH.dtype)
    q = jnp.pad(layout.q_words_of(q_TNH), ((0, q_padding), (0, 0), (0, 0)))
    tiles = layout.tiles(
        to_cache_dtype(k_TKH, k_scale_K, kv_pages.dtype), to_cache_dtype(v_TKH, v_scale_K, kv_pages.dtype)
    )
    kv_new = jnp.pad(layout.kv_words_of(tiles), ((new_padding, new_padding), (0, 0), (0, 0)))
    table = jnp.pad(page_table_SP, ((0, 0), (0, -P % NUM_LANES))).reshape(S, -1, NUM_LANES)
    sinks = []
    if sinks_N is not None:
        sinks_hr = layout.sinks_of(sinks_N) * LOG2_E
        num_rows = round_up(layout.rows_per_token, NUM_SUBLANES)
        padded = jnp.pad(sinks_hr, ((0, 0), (0, num_rows - layout.rows_per_token)))
        sinks.append(jnp.broadcast_to(padded[:, :, None], (*padded.shape, NUM_LANES)))
        if not decode_only:
            pairs = sinks_hr.reshape(layout.num_tile_heads, layout.words_per_tile_head, layout.q_pack)
            sinks.append(jnp.tile(pairs, (1, 1, blocks.chunk_queries)).reshape(layout.num_tile_heads, 1, -1))

    is_real_S = (jnp.arange(S) < num_seqs[0]) & (kv_lens_S > 0)
    q_lens_S = jnp.where(is_real_S, cu_q_lens[1:] - cu_q_lens[:-1], 0)
    row_lists = _list_rows(q_lens_S == 1) + (() if decode_only else _list_rows(q_lens_S > 1))

    kernel = _kernel(layout, attention, blocks, has_sinks=bool(sinks), decode_only=decode_only)
    words, kv_pages = kernel(
        [kv_lens_S, cu_q_lens, *row_lists],
        [table, q.reshape(-1, NUM_LANES), kv_new.reshape(-1, NUM_LANES)],
        sinks,
        kv_pages,
    )

    out_TNH = layout.out_of_words(words.reshape(-1, layout.q_stride, NUM_LANES))[:T]
    if v_scale_K is not None:
        out_TNH = (out_TNH * jnp.repeat(v_scale_K, N // K)[:, None]).astype(out_TNH.dtype)
    is_real_T = jnp.arange(T) < cu_q_lens[num_seqs[0]]
    return jnp.where(is_real_T[:, None, None], out_TNH, 0), kv_pages


def _list_rows(is_listed_S: Array) -> tuple[Array, Array]:
    """The numbers of some rows, int32 [S], and how many they are, int32 [1]."""
    rows = jnp.nonzero(is_listed_S, size=is_listed_S.shape[0], fill_value=0)[0]
    return rows.astype(jnp.int32), jnp.sum(is_listed_S, dtype=jnp.int32)[None]


def _kernel(layout: Layout, attention: Attention, blocks: Blocks, *, has_sinks: bool, decode_only: bool) -> Callable:
    """The Pallas call, made for its arguments' shapes when called."""

    def body(*refs: Any) -> None:
        refs = iter(refs)
        kv_lens, cu_q_lens, decodes, num_decodes = (next(refs) for _ in range(4))
        chunks, num_chunks = (None, None) if decode_only else (next(refs), next(refs))
        table, q, kv_new = (next(refs) for _ in range(3))
        decode_sinks = next(refs) if has_sinks else None
        chunk_sinks = next(refs) if has_sinks and not decode_only else None
        _, out, pages = (next(refs) for _ in range(3))  # The pages come in where they go out.
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
            kv_new_hbm=kv_new,
            new_padding=0 if decode_only else layout.page_size,
            sinks=decode_sinks,
            out_hbm=out,
            blocks=kv_blocks(),
            scratch=DecodeScratch(*(next(refs) for _ in dataclasses.fields(DecodeScratch))),
        )
        if decode_only:
            decode.run(decodes, num_decodes[0])
            return
        chunk = Chunks(
            layout=layout,
            attention=attention,
            num_queries=blocks.chunk_queries,
            num_tokens=blocks.chunk_tokens,
            kv_lens=kv_lens,
            cu_q_lens=cu_q_lens,
            q_hbm=q,
            kv_new_hbm=kv_new,
            sinks=chunk_sinks,
            out_hbm=out,
            blocks=kv_blocks(),
            scratch=ChunkScratch(*(next(refs) for _ in dataclasses.fields(ChunkScratch))),
        )
        chunk.write(chunks, num_chunks[0])
        decode.run(decodes, num_decodes[0])
        chunk.attend(chunks, num_chunks[0])

    def call(scalars: list[Array], arrays: list[Array], sinks: list[Array], pages: Array) -> tuple[Array, Array]:
        table, q, _ = arrays
        in_hbm = pl.BlockSpec(memory_space=pl.ANY)
        scratch = [
            pltpu.SMEM((PageTable.SLOTS, *table.shape[1:]), jnp.int32),
            pltpu.SemaphoreType.DMA((PageTable.SLOTS,)),
            *KVBlocks.scratch(layout, blocks.decode_fetch),
            *DecodeScratch.shapes(layout),
        ]
        if not decode_only:
            scratch += [
                *KVBlocks.scratch(layout, blocks.chunk_fetch),
                *ChunkScratch.shapes(layout, blocks.chunk_queries, blocks.chunk_tokens),
            ]
        return pl.pallas_call(
            body,
            out_shape=(jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(pages.shape, pages.dtype)),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(scalars),
                grid=(1,),
                in_specs=[in_hbm] * len(arrays) + [pl.BlockSpec(memory_space=pltpu.VMEM)] * len(sinks) + [in_hbm],
                out_specs=(in_hbm, in_hbm),
                scratch_shapes=scratch,
            ),
            input_output_aliases={len(scalars) + len(arrays) + len(sinks): 1},
            compiler_params=pltpu.CompilerParams(
                vmem_limit_bytes=64 << 20, disable_bounds_checks=True, fuse_transposed_lhs_in_matmul=True
            ),
            name="ragged_paged_attention_decode" if decode_only else "ragged_paged_attention",
        )(*scalars, *arrays, *sinks, pages)

    return call
