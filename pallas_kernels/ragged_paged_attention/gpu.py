"""Ragged paged attention for Hopper GPUs, in Pallas (Mosaic GPU). `docs/kernels.md` explains it.

Rows of few tokens and rows of many go to a kernel each, which share out their work in equal pieces; what was cut is
joined by a third. The new keys and values are in their pages before: a small kernel of its own puts them there.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxllm.pallas_kernels.ragged_paged_attention import (
    gpu_blocks,
    gpu_combine,
    gpu_packed,
    gpu_tiles,
    gpu_work,
    gpu_write,
)
from jaxllm.pallas_kernels.ragged_paged_attention.gpu_softmax import LOG2_E, ROWS, Ref, Scores
from jaxllm.pallas_kernels.ragged_paged_attention.gpu_work import StepRows, Unit
from jaxllm.pallas_kernels.ragged_paged_attention.pages import kv_cache_shape as kv_cache_shape
from jaxllm.pallas_kernels.ragged_paged_attention.pages import new_tokens
from jaxllm.pallas_kernels.ragged_paged_attention.pages import pages_from_tokens as pages_from_tokens
from jaxllm.pallas_kernels.ragged_paged_attention.pages import tokens_from_pages as tokens_from_pages
from jaxllm.pallas_kernels.ragged_paged_attention.pages import validate as validate_layout

HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (16, 32, 64, 128, 256)
MAX_ROWS_PER_KV_HEAD = 16
Q_DTYPES = ("bfloat16", "float16")
NARROW_DTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")


def validate(q_TNH: Array, k_TKH: Array, kv_pages: Array, page_table_SP: Array) -> None:
    """Raises ValueError for what these kernels cannot do."""
    validate_layout(q_TNH, k_TKH, kv_pages, page_table_SP)
    if q_TNH.dtype.name not in Q_DTYPES:
        raise ValueError(f"q is {q_TNH.dtype}; the GPU kernel takes {' and '.join(Q_DTYPES)}")
    if kv_pages.dtype.name not in (q_TNH.dtype.name, *NARROW_DTYPES):
        raise ValueError(
            f"kv_pages is {kv_pages.dtype}; with queries in {q_TNH.dtype} the GPU kernel takes "
            f"{', '.join((q_TNH.dtype.name, *NARROW_DTYPES))}"
        )
    if q_TNH.shape[2] not in HEAD_DIMS:
        raise ValueError(f"head size is {q_TNH.shape[2]}; the GPU kernel takes {', '.join(map(str, HEAD_DIMS))}")
    if (rows := q_TNH.shape[1] // k_TKH.shape[1]) > MAX_ROWS_PER_KV_HEAD:
        raise ValueError(f"{rows} query heads share a KV head; the GPU kernel takes at most {MAX_ROWS_PER_KV_HEAD}")
    if kv_pages.shape[2] not in PAGE_SIZES:
        raise ValueError(f"page_size is {kv_pages.shape[2]}; the GPU kernel takes {', '.join(map(str, PAGE_SIZES))}")


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
    # What kernels read must lie at a multiple of 16 bytes, as a result does and a part of another array need not. So
    # table and scales go through an operation that changes nothing.
    rows = gpu_work.StepRows(kv_lens_S, jnp.maximum(page_table_SP, 0), cu_q_lens, num_seqs)
    narrow = new_tokens(k_TKH, v_TKH, k_scale_K, v_scale_K, kv_pages.dtype)
    # References, so that kernels write where they are.
    pages = jax.new_ref(kv_pages)
    slots_T = gpu_write.slots_of_tokens(rows, q_TNH.shape[0], pages)
    out_type = jax.ShapeDtypeStruct(q_TNH.shape, q_TNH.dtype)
    out = jax.new_ref(gpu_write.write(jnp.concatenate(narrow, axis=1), slots_T, pages, out_type))
    heads = Heads(
        sinks_N=None if sinks_N is None else sinks_N.astype(jnp.float32) * LOG2_E,
        k_scale_K=None if k_scale_K is None else jnp.maximum(k_scale_K, jnp.finfo(jnp.float32).tiny),
        v_scale_K=None if v_scale_K is None else jnp.maximum(v_scale_K, jnp.finfo(jnp.float32).tiny),
    )
    packing = gpu_packed.Packing.of(q_TNH.shape[1] // k_TKH.shape[1], decode_only=decode_only)
    scores = Scores(sm_scale=sm_scale, sliding_window=sliding_window, soft_cap=soft_cap)
    _attend_few(q_TNH, pages, out, rows, heads, scores, packing)
    if not decode_only and q_TNH.shape[0] > packing.max_tokens:
        _attend_many(q_TNH, pages, out, rows, heads, scores, first_len=packing.max_tokens + 1)
    return out[...], pages[...]


class Heads(NamedTuple):
    """What differs from head to head."""

    sinks_N: Array | None  # float32, logits of base 2
    k_scale_K: Array | None
    v_scale_K: Array | None


def _attend_few(
    q_TNH: Array,
    pages: Ref,
    out: Ref,
    rows: StepRows,
    heads: Heads,
    scores: Scores,
    packing: gpu_packed.Packing,
) -> None:
    """Rows of so few tokens that their query heads of one KV head are rows of one product."""
    (_, N, H), S, K = q_TNH.shape, rows.kv_lens_S.shape[0], pages.shape[1] // 2
    blocks = gpu_blocks.packed(H, q_TNH.dtype, pages.dtype)
    work = gpu_work.plan(
        rows,
        q_lens=range(1, packing.max_tokens + 1),
        num_heads=K,
        num_units=S,
        tile=packing.max_tokens,
        alignment=1,
        block=blocks.keys,
        sliding_window=scores.sliding_window,
        num_thread_blocks=blocks.thread_blocks,
    )
    num_more_heads = max(packing.num_heads(K) - N, 0)
    sinks = None
    if heads.sinks_N is not None:
        head_KR = packing.first_head(jnp.arange(K))[:, None] + jnp.arange(ROWS) % packing.rows
        sinks = jnp.pad(heads.sinks_N, (0, num_more_heads))[head_KR]
    parts = gpu_packed.attend(
        gpu_packed.Inputs(
            work=work,
            page_table=rows.page_table_SP,
            q=jnp.pad(q_TNH, ((0, 0), (0, num_more_heads), (0, 0))),
            k_scales=heads.k_scale_K,
            v_scales=heads.v_scale_K,
            sinks=sinks,
            pages=pages,
        ),
        out,
        scores=scores,
        blocks=blocks,
        packing=packing,
    )
    inputs = gpu_combine.Inputs(work, parts, heads.v_scale_K, sinks)
    gpu_combine.combine(inputs, out, num_heads=K, group=1, place=packing.place)


def _attend_many(
    q_TNH: Array, pages: Ref, out: Ref, rows: StepRows, heads: Heads, scores: Scores, *, first_len: int
) -> None:
    """Rows of at least `first_len` tokens, in tiles at one query head."""
    (T, N, H), S, K = q_TNH.shape, rows.kv_lens_S.shape[0], pages.shape[1] // 2
    G = N // K
    blocks = gpu_blocks.tiles(H, q_TNH.dtype, pages.dtype)
    num_padded_tokens = gpu_tiles.padded_tokens(T)
    work = gpu_work.plan(
        rows,
        q_lens=range(first_len, T + 1),
        num_heads=N,
        # Of each row all but one token of a tile can be missing at its end, and of what tiles are aligned to before it.
        num_units=(T + (gpu_tiles.TILE + gpu_tiles.ALIGNMENT - 2) * min(S, T // first_len)) // gpu_tiles.TILE,
        tile=gpu_tiles.TILE,
        alignment=gpu_tiles.ALIGNMENT,
        block=blocks.keys,
        sliding_window=scores.sliding_window,
        num_thread_blocks=blocks.thread_blocks,
    )
    parts = gpu_tiles.attend(
        gpu_tiles.Inputs(
            work=work,
            page_table=rows.page_table_SP,
            q=jnp.pad(q_TNH, ((0, num_padded_tokens - T), (0, 0), (0, 0))),
            k_scales=heads.k_scale_K,
            v_scales=heads.v_scale_K,
            sinks=heads.sinks_N,
            pages=pages,
        ),
        out,
        scores=scores,
        blocks=blocks,
        group=G,
    )

    def place(head: Array, unit: Unit, row: Array) -> tuple[Array, Array, Array]:
        tile = gpu_tiles.Tile.of(unit, row // ROWS, num_padded_tokens)
        token = tile.start + lax.rem(row, ROWS)
        return token, head, (token >= tile.first) & (token < tile.end)

    sinks = None if heads.sinks_N is None else jnp.broadcast_to(heads.sinks_N[:, None], (N, gpu_tiles.TILE))
    inputs = gpu_combine.Inputs(work, parts, heads.v_scale_K, sinks)
    gpu_combine.combine(inputs, out, num_heads=N, group=G, place=place)
