"""Ragged paged attention for TPUs, in Pallas: one kernel for every mix of rows. `docs/kernels.md` explains it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxllm.pallas_kernels.ragged_paged_attention import tpu_blocks, tpu_chip
from jaxllm.pallas_kernels.ragged_paged_attention.pages import new_tokens
from jaxllm.pallas_kernels.ragged_paged_attention.tpu_chunks import Chunks
from jaxllm.pallas_kernels.ragged_paged_attention.tpu_decode import Decode
from jaxllm.pallas_kernels.ragged_paged_attention.tpu_layout import NUM_LANES, NUM_SUBLANES, Layout, round_up
from jaxllm.pallas_kernels.ragged_paged_attention.tpu_pages import (
    LOG2_E,
    Attention,
    KVBlocks,
    PageTable,
    Ref,
    RowList,
    zero_tokens,
)
from jaxllm.pallas_kernels.ragged_paged_attention.tpu_scratch import Blocks, Scratch, scratch_shapes

PAGE_SIZES = (16, 32, 64, 128, 256)
MAX_HEAD_DIM = 256
MAX_ROWS_PER_KV_HEAD = 16
KV_DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")
MAX_PAGES_PER_SEQ = 16_384  # PageTable.SLOTS times that, and four numbers for each sequence, are in SMEM, of 1 MiB.
MAX_SEQS = 16_384


def kv_cache_shape(
    num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype
) -> tuple[int, ...]:
    """[page, tile, slot, lane]; see `tpu_layout`."""
    return (num_pages, *_cache_layout(page_size, num_kv_heads, head_dim, dtype).page_shape)


def pages_from_tokens(kv_BC2KH: Array) -> Array:
    _, page_size, _, num_kv_heads, head_dim = kv_BC2KH.shape
    layout = _cache_layout(page_size, num_kv_heads, head_dim, kv_BC2KH.dtype)
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
    S, P = page_table_SP.shape
    if P > MAX_PAGES_PER_SEQ:
        raise ValueError(
            f"the page table has {P:,} pages for each sequence; the TPU kernel takes at most {MAX_PAGES_PER_SEQ:,}, "
            f"which are {MAX_PAGES_PER_SEQ * layout.page_size:,} tokens: take larger pages"
        )
    if S > MAX_SEQS:
        raise ValueError(f"the page table has {S:,} sequences; the TPU kernel takes at most {MAX_SEQS:,} in a step")


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
        blocks = tpu_blocks.choose(layout, tpu_chip.name())

    q_TNH = attention.scale(q_TNH, None if k_scale_K is None else jnp.repeat(k_scale_K, N // K))
    tiles = layout.tiles(*new_tokens(k_TKH, v_TKH, k_scale_K, v_scale_K, kv_pages.dtype))
    table = jnp.pad(page_table_SP, ((0, 0), (0, -P % NUM_LANES))).reshape(S, -1, NUM_LANES)
    if decode_only:
        rows = Rows(kv_lens_S, cu_q_lens, num_seqs, jnp.arange(S, dtype=jnp.int32), num_seqs, None, None)
    else:
        q_lens_S = jnp.where(jnp.arange(S) < num_seqs[0], cu_q_lens[1:] - cu_q_lens[:-1], 0)
        rows = Rows(kv_lens_S, cu_q_lens, num_seqs, *_list_rows(q_lens_S == 1), *_list_rows(q_lens_S > 1))
    arrays = Arrays(
        table=table,
        q=layout.rows(q_TNH),
        new=layout.new_rows(tiles),
        decode_sinks=None if sinks_N is None else _decode_sinks(layout, sinks_N),
        chunk_sinks=None if sinks_N is None or decode_only else _chunk_sinks(layout, blocks, sinks_N),
        # A cache that is small enough would be copied to VMEM and back.
        pages=pltpu.with_memory_space_constraint(kv_pages, pltpu.HBM),
    )
    out, kv_pages = _call(layout, attention, blocks, rows, arrays)

    out_TNH = layout.out_heads(out)
    if v_scale_K is not None:
        out_TNH = (out_TNH * jnp.repeat(v_scale_K, N // K)[:, None]).astype(out_TNH.dtype)
    return out_TNH, kv_pages


def _decode_sinks(layout: Layout, sinks_N: Array) -> Array:
    """Logits of base 2, float32 [tile heads, rows, 128], the same in all lanes."""
    num_rows = round_up(layout.rows_per_token, NUM_SUBLANES)
    sinks = jnp.pad(layout.sinks(sinks_N) * LOG2_E, ((0, 0), (0, num_rows - layout.rows_per_token)))
    return jnp.broadcast_to(sinks[:, :, None], (*sinks.shape, NUM_LANES))


def _chunk_sinks(layout: Layout, blocks: Blocks, sinks_N: Array) -> Array:
    """Logits of base 2, float32 [tile heads, 1, rows], in the order of the rows of a tile of queries."""
    words = layout.sinks(sinks_N) * LOG2_E
    words = words.reshape(layout.num_tile_heads, layout.words_per_tile_head, layout.q_pack)
    return jnp.tile(words, (1, 1, blocks.chunk_queries)).reshape(layout.num_tile_heads, 1, -1)


def _list_rows(is_listed_S: Array) -> tuple[Array, Array]:
    """The numbers of some rows, int32 [S], and how many they are, int32 [1]. No scatter, which a TPU is slow at."""
    row_S = jnp.arange(is_listed_S.shape[0], dtype=jnp.int32)
    place_S = jnp.cumsum(is_listed_S, dtype=jnp.int32) - 1
    is_at_SS = is_listed_S[None, :] & (place_S[None, :] == row_S[:, None])
    rows = jnp.sum(jnp.where(is_at_SS, row_S[None, :], 0), axis=1, dtype=jnp.int32)
    return rows, place_S[-1:] + 1


class Rows(NamedTuple):
    """In SMEM, int32: what the kernel must know before it can fetch anything. None where there are decodes only."""

    kv_lens: Any  # [S]
    cu_q_lens: Any  # [S + 1]
    num_seqs: Any  # [1]
    decodes: Any  # [S], the rows of one token
    num_decodes: Any  # [1]
    chunks: Any  # [S], the rows of several, or None
    num_chunks: Any  # [1], or None


class Arrays(NamedTuple):
    """In HBM, but for the sinks, which are in VMEM."""

    table: Any  # int32 [S, P / 128, 128]
    q: Any  # [T, q_rows, lanes]
    new: Any  # [T, kv_rows, lanes]
    decode_sinks: Any  # float32 [tile heads, rows, 128], or None
    chunk_sinks: Any  # float32 [tile heads, 1, rows], or None
    pages: Any  # [pages, tiles, page_size, lanes]


def _call(layout: Layout, attention: Attention, blocks: Blocks, rows: Rows, arrays: Arrays) -> tuple[Array, Array]:
    """The Pallas call: the outputs, as `arrays.q`, and the pages."""
    num_cores = tpu_chip.num_cores()
    decode_only = rows.chunks is None

    def kernel(rows: Rows, arrays: Arrays, out: Ref, pages: Ref, scratch: Scratch) -> None:
        core = pl.program_id(0)
        padding = jnp.where(core == 0, rows.cu_q_lens[rows.num_seqs[0]], out.shape[0])
        zero_tokens(out, padding, scratch.zeros, scratch.zeros_sem)
        table = PageTable(arrays.table, scratch.table, scratch.table_sems)
        decode = Decode(
            layout=layout,
            attention=attention,
            num_tokens=blocks.decode_tokens,
            kv_lens=rows.kv_lens,
            cu_q_lens=rows.cu_q_lens,
            q_hbm=arrays.q,
            new_hbm=arrays.new,
            sinks=arrays.decode_sinks,
            out_hbm=out,
            blocks=KVBlocks(layout, table, pages, *scratch.decode_kv),
            scratch=scratch.decode,
        )
        decodes = RowList(rows.decodes, rows.num_decodes[0], core, num_cores)
        if decode_only:
            decode.run(decodes)
            return
        assert scratch.chunk is not None
        assert scratch.chunk_kv is not None
        chunk = Chunks(
            layout=layout,
            attention=attention,
            num_queries=blocks.chunk_queries,
            num_tokens=blocks.chunk_tokens,
            kv_lens=rows.kv_lens,
            cu_q_lens=rows.cu_q_lens,
            q_hbm=arrays.q,
            new_hbm=arrays.new,
            sinks=arrays.chunk_sinks,
            out_hbm=out,
            blocks=KVBlocks(layout, table, pages, *scratch.chunk_kv),
            scratch=scratch.chunk,
        )
        chunks = RowList(rows.chunks, rows.num_chunks[0], core, num_cores)
        chunk.write(chunks)
        decode.run(decodes)
        chunk.attend(chunks)

    def where(array: Array | None, memory_space: Any) -> pl.BlockSpec | None:
        return None if array is None else pl.BlockSpec(memory_space=memory_space)

    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    in_specs = Arrays(
        table=in_hbm,
        q=in_hbm,
        new=in_hbm,
        decode_sinks=where(arrays.decode_sinks, pltpu.VMEM),
        chunk_sinks=where(arrays.chunk_sinks, pltpu.VMEM),
        pages=in_hbm,
    )
    num_operands = len(jax.tree.leaves((rows, arrays)))
    return pl.pallas_call(
        kernel,
        out_shape=(
            jax.ShapeDtypeStruct(arrays.q.shape, arrays.q.dtype),
            jax.ShapeDtypeStruct(arrays.pages.shape, arrays.pages.dtype),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(num_cores,),
            in_specs=[in_specs],
            out_specs=(in_hbm, in_hbm),
            scratch_shapes=[scratch_shapes(layout, blocks, arrays.table.shape[1], decode_only=decode_only)],
        ),
        input_output_aliases={num_operands - 1: 1},  # The pages are the last operand.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=(pltpu.PARALLEL,),
            vmem_limit_bytes=tpu_blocks.needed_bytes(layout, blocks, decode_only=decode_only),
            disable_bounds_checks=True,
            fuse_transposed_lhs_in_matmul=True,
        ),
        name="ragged_paged_attention_decode" if decode_only else "ragged_paged_attention",
    )(rows, arrays)
