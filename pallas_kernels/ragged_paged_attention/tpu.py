"""Ragged paged attention for TPUs, in Pallas: one kernel for every mix of rows. `docs/kernels.md` tells how it works."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxllm.pallas_kernels.ragged_paged_attention import tpu_blocks
from jaxllm.pallas_kernels.ragged_paged_attention.pages import to_cache_dtype
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
    tiles = layout.tiles(
        to_cache_dtype(k_TKH, k_scale_K, kv_pages.dtype), to_cache_dtype(v_TKH, v_scale_K, kv_pages.dtype)
    )
    if k_scale_K is not None:
        q_TNH = (q_TNH * jnp.repeat(k_scale_K, N // K)[:, None]).astype(q_TNH.dtype)
    q = layout.q_words_of(q_TNH).reshape(-1, NUM_LANES)
    kv_new = layout.kv_words_of(tiles).reshape(-1, NUM_LANES)
    table = jnp.pad(page_table_SP, ((0, 0), (0, -P % NUM_LANES))).reshape(S, -1, NUM_LANES)
    is_row = (jnp.arange(S) < num_seqs[0]) & (kv_lens_S > 0)
    rows = jnp.nonzero(is_row, size=S, fill_value=0)[0].astype(jnp.int32)
    count = jnp.sum(is_row, dtype=jnp.int32)[None]
    blocks = tpu_blocks.choose(layout)
    B, C = blocks.decode_fetch // layout.page_size, blocks.decode_tokens
    rows8 = round_up(layout.rows_per_token, 8)

    sinks = jnp.full((layout.num_tile_heads, rows8, NUM_LANES), 0.0, jnp.float32)
    has_sinks = sinks_N is not None
    if has_sinks:
        sinks = layout.sinks_of(sinks_N, rows8) * LOG2_E

    def kernel(kv_lens, cu_q, rows, count, table, q, kv_new, sinks, pages_in, out, pages, tbl_s, tbl_sem, kv, kv_sem, *scr):
        t = PageTable(table, tbl_s, tbl_sem)
        Decode(layout, attention, C, kv_lens, cu_q, q, kv_new, sinks if has_sinks else None, out,
               KVBlocks(layout, t, pages, kv, kv_sem), DecodeScratch(*scr)).run(rows, count[0])

    dma = pltpu.SemaphoreType.DMA
    Kt = layout.num_tile_heads
    scratch = [
        pltpu.SMEM((PageTable.SLOTS, table.shape[1], NUM_LANES), jnp.int32), dma((PageTable.SLOTS,)),
        pltpu.VMEM((2, B, *layout.page_shape), layout.kv_dtype), dma((2,)),
        pltpu.VMEM((2, layout.q_stride, NUM_LANES), jnp.uint32), dma((2,)),
        pltpu.VMEM((2, layout.group * layout.kv_stride, NUM_LANES), jnp.uint32), dma((2,)),
        pltpu.VMEM((2, layout.q_stride, NUM_LANES), jnp.uint32), dma((2,)),
        pltpu.VMEM((2, layout.num_tiles, layout.group, layout.lanes), layout.kv_dtype), dma((2,)),
        pltpu.VMEM((Kt, rows8, layout.lanes), layout.dot_dtype),
        pltpu.VMEM((layout.folds, layout.q_pack * layout.q_words + rows8, NUM_LANES), jnp.float32),
        pltpu.VMEM((Kt, rows8, NUM_LANES), jnp.float32),
        pltpu.VMEM((Kt, rows8, NUM_LANES), jnp.float32),
        pltpu.VMEM((Kt, rows8, layout.lanes), jnp.float32),
    ]
    any_ = pl.BlockSpec(memory_space=pl.ANY)
    out, kv_pages = pl.pallas_call(
        kernel,
        out_shape=(jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4, grid=(1,), in_specs=[any_] * 3 + [pl.BlockSpec(memory_space=pltpu.VMEM), any_], out_specs=(any_, any_), scratch_shapes=scratch,
        ),
        input_output_aliases={8: 1},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=64 << 20, disable_bounds_checks=True),
    )(kv_lens_S, cu_q_lens, rows, count, table, q, kv_new, sinks, kv_pages)
    out_TNH = layout.out_of_words(out.reshape(T, -1, NUM_LANES))
    if v_scale_K is not None:
        out_TNH = (out_TNH * jnp.repeat(v_scale_K, N // K)[:, None]).astype(out_TNH.dtype)
    is_real_T = jnp.arange(T) < cu_q_lens[num_seqs[0]]
    return jnp.where(is_real_T[:, None, None], out_TNH, 0), kv_pages
