"""Ragged paged attention in plain XLA, for CPUs and for GPUs without a kernel of ours.

Two bodies under one call, and a part that is empty costs nothing:

* one-token rows (decodes): the pages in use by all rows form one list of (row, page) pairs, walked W pairs at a
  time. The cost follows the sum of the lengths, and long rows do not make short ones wait.
* longer rows (chunks): tiles of queries, each against blocks of pages, with a running maximum and sum
  (Rabe & Staats, arXiv 2112.05682; Dao et al., arXiv 2205.14135).

Pages are head-major, [page, 2K, page_size, H], so that a (page, head) tile is contiguous for the dots.
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jaxllm.pallas_kernels.ragged_paged_attention.pages import from_cache_dtype, new_tokens
from jaxllm.pallas_kernels.ragged_paged_attention.pages import kv_cache_shape as kv_cache_shape
from jaxllm.pallas_kernels.ragged_paged_attention.pages import pages_from_tokens as pages_from_tokens
from jaxllm.pallas_kernels.ragged_paged_attention.pages import tokens_from_pages as tokens_from_pages
from jaxllm.pallas_kernels.ragged_paged_attention.pages import validate as validate

PAIRS_PER_ITERATION = 32
QUERY_TILE, KV_BLOCK_TOKENS = 128, 128
SMALL_STEP_TOKENS = 32  # Steps of so few tokens are decodes and a few tokens of a prompt, which may see thousands:
SMALL_QUERY_TILE, SMALL_KV_BLOCK_TOKENS = 4, 512  # a padded query would cost as much as a real one.
_einsum = partial(jnp.einsum, preferred_element_type=jnp.float32)
_MASKED = -1e30  # Finite, so that a fully masked row gives exp(0) times a zero weight rather than NaN.


class _Options(NamedTuple):
    sm_scale: float
    sliding_window: int | None
    soft_cap: float | None
    sinks_N: Array | None
    k_scale_K: Array | None
    v_scale_K: Array | None


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
    (T, N, H), K = q_TNH.shape, k_TKH.shape[1]
    q_TKGH = q_TNH.reshape(T, K, N // K, H)
    options = _Options(sm_scale, sliding_window, soft_cap, sinks_N, k_scale_K, v_scale_K)

    kv_pages = _write(k_TKH, v_TKH, kv_pages, kv_lens_S, page_table_SP, cu_q_lens, num_seqs, options)
    if kv_pages.dtype.itemsize > 1:  # The dots run in the cache's dtype; an 8-bit cache is widened to the queries'.
        q_TKGH = q_TKGH.astype(kv_pages.dtype)

    is_real_S = jnp.arange(kv_lens_S.shape[0], dtype=jnp.int32) < num_seqs[0]
    if decode_only:
        out_TKGH = _decode(q_TKGH, kv_pages, jnp.where(is_real_S, kv_lens_S, 0), page_table_SP, options)
        return out_TKGH.reshape(T, N, H).astype(q_TNH.dtype), kv_pages

    starts_S = cu_q_lens[:-1]
    q_lens_S = jnp.where(is_real_S, cu_q_lens[1:] - starts_S, 0)
    q_SKGH = q_TKGH[jnp.minimum(starts_S, T - 1)]
    out_SKGH = _decode(q_SKGH, kv_pages, jnp.where(q_lens_S == 1, kv_lens_S, 0), page_table_SP, options)
    tokens_S = jnp.where(q_lens_S == 1, starts_S, T)  # Out of range, and dropped, if not a decode.
    out_TKGH = jnp.zeros(q_TKGH.shape, jnp.float32).at[tokens_S].set(out_SKGH, mode="drop")
    chunk_lens_S = jnp.where(q_lens_S > 1, q_lens_S, 0)
    out_TKGH = _chunks(q_TKGH, out_TKGH, kv_pages, chunk_lens_S, starts_S, kv_lens_S, page_table_SP, options)
    return out_TKGH.reshape(T, N, H).astype(q_TNH.dtype), kv_pages


def _write(
    k_TKH: Array,
    v_TKH: Array,
    kv_pages: Array,
    kv_lens_S: Array,
    page_table_SP: Array,
    cu_q_lens: Array,
    num_seqs: Array,
    options: _Options,
) -> Array:
    """Puts the new tokens' K and V into their pages, one token at a time: only real tokens cost.

    A scatter would do the same in one operation, but XLA on CPU widens a whole 16-bit cache to float32 for it.
    """
    T, page_size = k_TKH.shape[0], kv_pages.shape[2]
    kv_T2KH = jnp.concatenate(new_tokens(k_TKH, v_TKH, options.k_scale_K, options.v_scale_K, kv_pages.dtype), axis=1)
    token_T = jnp.arange(T, dtype=jnp.int32)
    seq_T = _owner(cu_q_lens[1:], token_T)
    position_T = jnp.maximum(kv_lens_S[seq_T] - cu_q_lens[seq_T + 1] + token_T, 0)
    page_T = page_table_SP[seq_T, position_T // page_size]
    slot_T = position_T % page_size

    def write_token(t: Array, kv_pages: Array) -> Array:
        return lax.dynamic_update_slice(kv_pages, kv_T2KH[t][None, :, None], (page_T[t], 0, slot_T[t], 0))

    return lax.fori_loop(0, cu_q_lens[num_seqs[0]], write_token, kv_pages)


def _decode(q_SKGH: Array, kv_pages: Array, lens_S: Array, page_table_SP: Array, options: _Options) -> Array:
    """Attention of one query per row over `lens_S` tokens; rows of length 0 give zeros and cost nothing."""
    S, K, G, H = q_SKGH.shape
    page_size = kv_pages.shape[2]
    window_start_S = jnp.zeros_like(lens_S)
    if options.sliding_window is not None:
        window_start_S = jnp.maximum(lens_S - options.sliding_window, 0)
    first_page_S = window_start_S // page_size
    num_pages_S = (lens_S + page_size - 1) // page_size - first_page_S
    end_S = jnp.cumsum(num_pages_S, dtype=jnp.int32)
    W = PAIRS_PER_ITERATION
    sinks_1KG = None if options.sinks_N is None else options.sinks_N.reshape(1, K, G)

    def body(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        max_SKG, total_SKG, out_SKGH = carry
        pair_W = i * W + jnp.arange(W, dtype=jnp.int32)
        row_W = _owner(end_S, pair_W)
        page_W = jnp.where(pair_W < end_S[-1], pair_W - end_S[row_W] + num_pages_S[row_W] + first_page_S[row_W], 0)
        position_WC = page_W[:, None] * page_size + jnp.arange(page_size, dtype=jnp.int32)
        visible_WC = (
            (position_WC < lens_S[row_W][:, None])
            & (position_WC >= window_start_S[row_W][:, None])
            & (pair_W < end_S[-1])[:, None]
        )
        visible_WC = lax.optimization_barrier(visible_WC)  # Else each use computes it anew, element by element.
        k_WKCH, v_WKCH = _read(kv_pages, page_table_SP[row_W, page_W], visible_WC, q_SKGH.dtype, options)
        scores_WKGC = _scores(_einsum("WKGH,WKCH->WKGC", q_SKGH[row_W], k_WKCH), options)
        scores_WKGC = jnp.where(visible_WC[:, None, None], scores_WKGC, _MASKED)

        # Pairs of one row meet here: their maxima first, then their sums.
        owns_SW = (row_W == jnp.arange(S, dtype=jnp.int32)[:, None]) & (pair_W < end_S[-1])
        max_WKG = jnp.max(scores_WKGC, axis=-1)
        pairs_max_SKG = jnp.max(jnp.where(owns_SW[:, :, None, None], max_WKG[None], _MASKED), axis=1)
        new_max_SKG = jnp.maximum(max_SKG, pairs_max_SKG)
        weights_WKGC = jnp.exp(scores_WKGC - new_max_SKG[row_W][..., None])
        weights_WKGC = jnp.where(visible_WC[:, None, None], weights_WKGC, 0.0)
        total_WKG = jnp.sum(weights_WKGC, axis=-1)
        out_WKGH = _einsum("WKGC,WKCH->WKGH", weights_WKGC.astype(v_WKCH.dtype), v_WKCH)
        out_WKGH = jnp.where(jnp.isfinite(total_WKG)[..., None], out_WKGH, 0.0)  # Else NaN, in the sums of all rows.
        decay_SKG = jnp.exp(max_SKG - new_max_SKG)
        total_SKG = total_SKG * decay_SKG + jnp.sum(jnp.where(owns_SW[:, :, None, None], total_WKG[None], 0.0), axis=1)
        out_SKGH = out_SKGH * decay_SKG[..., None] + _sum_pairs(owns_SW.astype(jnp.float32), out_WKGH)
        return new_max_SKG, total_SKG, out_SKGH

    max_SKG, total_SKG, out_SKGH = lax.fori_loop(0, (end_S[-1] + W - 1) // W, body, _start((S, K, G), H))
    return _finish(max_SKG, total_SKG, out_SKGH, sinks_1KG)


def _chunks(
    q_TKGH: Array,
    out_TKGH: Array,
    kv_pages: Array,
    q_lens_S: Array,
    starts_S: Array,
    kv_lens_S: Array,
    page_table_SP: Array,
    options: _Options,
) -> Array:
    """Adds the attention of rows of several tokens to `out_TKGH`, one tile of queries after the other."""
    T, K, G, H = q_TKGH.shape
    P = page_table_SP.shape[1]
    page_size = kv_pages.shape[2]
    tile, block = (SMALL_QUERY_TILE, SMALL_KV_BLOCK_TOKENS) if T <= SMALL_STEP_TOKENS else (QUERY_TILE, KV_BLOCK_TOKENS)
    tile = min(tile, T)
    sinks_KG1 = None if options.sinks_N is None else options.sinks_N.reshape(K, G, 1)
    pages_per_block = min(max(1, block // page_size), P)
    block = pages_per_block * page_size
    end_S = jnp.cumsum((q_lens_S + tile - 1) // tile, dtype=jnp.int32)
    page_table_SP = jnp.pad(page_table_SP, ((0, 0), (0, -P % pages_per_block)))

    def attend_tile(i: Array, out_TKGH: Array) -> Array:
        seq = _owner(end_S, i)
        first = (i - end_S[seq]) * tile + (q_lens_S[seq] + tile - 1) // tile * tile  # Within the row's tokens.
        # A tile that would run over the end of the array starts earlier; the tokens before `first` are masked.
        start = jnp.minimum(starts_S[seq] + first, T - tile)
        token_Q = start + jnp.arange(tile, dtype=jnp.int32)
        row_end = starts_S[seq] + q_lens_S[seq]
        is_mine_Q = (token_Q >= starts_S[seq] + first) & (token_Q < row_end)
        position_Q = kv_lens_S[seq] - row_end + token_Q
        window_start = jnp.int32(0)
        if options.sliding_window is not None:
            first_position = kv_lens_S[seq] - row_end + starts_S[seq] + first
            window_start = jnp.maximum(first_position - options.sliding_window + 1, 0)
        last_position = kv_lens_S[seq] - row_end + jnp.minimum(start + tile, row_end) - 1
        q_QKGH = lax.dynamic_slice(q_TKGH, (start, 0, 0, 0), (tile, K, G, H))
        q_KGQH = jnp.transpose(q_QKGH, (1, 2, 0, 3))

        def attend_block(b: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            max_KGQ, total_KGQ, out_KGQH = carry
            pages_B = lax.dynamic_slice(page_table_SP, (seq, b * pages_per_block), (1, pages_per_block))[0]
            position_C = b * block + jnp.arange(block, dtype=jnp.int32)
            is_held_C = (position_C < kv_lens_S[seq]) & (position_C >= window_start)
            is_held_BC = is_held_C.reshape(pages_per_block, page_size)
            kv_BKCH = _read(kv_pages, pages_B, is_held_BC, q_TKGH.dtype, options)
            k_KCH, v_KCH = (jnp.moveaxis(x, 0, 1).reshape(K, block, H) for x in kv_BKCH)
            scores_KGQC = _scores(_einsum("KGQH,KCH->KGQC", q_KGQH, k_KCH), options)
            distance_QC = position_Q[:, None] - position_C[None, :]
            visible_QC = (distance_QC >= 0) & is_mine_Q[:, None]
            if options.sliding_window is not None:
                visible_QC &= distance_QC < options.sliding_window
            scores_KGQC = jnp.where(visible_QC, scores_KGQC, _MASKED)
            new_max_KGQ = jnp.maximum(max_KGQ, jnp.max(scores_KGQC, axis=-1))
            weights_KGQC = jnp.where(visible_QC, jnp.exp(scores_KGQC - new_max_KGQ[..., None]), 0.0)
            decay_KGQ = jnp.exp(max_KGQ - new_max_KGQ)
            total_KGQ = total_KGQ * decay_KGQ + jnp.sum(weights_KGQC, axis=-1)
            block_out = _einsum("KGQC,KCH->KGQH", weights_KGQC.astype(v_KCH.dtype), v_KCH)
            return new_max_KGQ, total_KGQ, out_KGQH * decay_KGQ[..., None] + block_out

        end_block = last_position // block + 1
        max_KGQ, total_KGQ, out_KGQH = lax.fori_loop(
            window_start // block, end_block, attend_block, _start((K, G, tile), H)
        )
        out_KGQH = _finish(max_KGQ, total_KGQ, out_KGQH, sinks_KG1)
        old_QKGH = lax.dynamic_slice(out_TKGH, (start, 0, 0, 0), (tile, K, G, H))
        new_QKGH = jnp.transpose(out_KGQH, (2, 0, 1, 3))
        new_QKGH = jnp.where(is_mine_Q[:, None, None, None], new_QKGH, old_QKGH)
        return lax.dynamic_update_slice(out_TKGH, new_QKGH, (start, 0, 0, 0))

    return lax.fori_loop(0, end_S[-1], attend_tile, out_TKGH)


def _owner(end_S: Array, index: Array) -> Array:
    """The row whose part of a list an index falls into, if row s's part ends at `end_S[s]`. At most S - 1."""
    row = jnp.sum(end_S <= index[..., None], axis=-1, dtype=jnp.int32)
    return jnp.minimum(row, end_S.shape[0] - 1)


def _read(
    kv_pages: Array, pages_W: Array, is_held_WC: Array, dtype: jnp.dtype, options: _Options
) -> tuple[Array, Array]:
    """K and V of some pages, each [W, K, C, H], in the dtype of the dots.

    K and V are gathered apart, since XLA would copy their halves of a common array once more. What is not written yet,
    or lies before the window in a page that is another's by now, may be NaN, and zero times NaN is NaN: such values
    become 0.
    """
    num_pages, num_heads, page_size, head_dim = kv_pages.shape
    halves = kv_pages.reshape(num_pages * 2, num_heads // 2, page_size, head_dim)
    k_WKCH = from_cache_dtype(halves[pages_W * 2], options.k_scale_K, dtype)
    v_WKCH = from_cache_dtype(halves[pages_W * 2 + 1], options.v_scale_K, dtype)
    return k_WKCH, jnp.where(is_held_WC[:, None, :, None], v_WKCH, jnp.zeros((), dtype))


def _scores(scores: Array, options: _Options) -> Array:
    scores = scores * options.sm_scale
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    return scores


def _sum_pairs(share_SW: Array, values_W: Array) -> Array:
    """Sums each row's pairs: [S, W] x [W, ...] -> [S, ...]."""
    return _einsum("SW,WX->SX", share_SW, values_W.reshape(values_W.shape[0], -1)).reshape(
        share_SW.shape[0], *values_W.shape[1:]
    )


def _start(shape: tuple[int, ...], head_dim: int) -> tuple[Array, Array, Array]:
    return (
        jnp.full(shape, _MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, head_dim), jnp.float32),
    )


def _finish(max_KG: Array, total_KG: Array, out_KGH: Array, sinks_KG: Array | None) -> Array:
    """Divides by the sum, to which a sink adds its own weight. `sinks_KG` broadcasts against `max_KG`."""
    if sinks_KG is not None:
        new_max_KG = jnp.maximum(max_KG, sinks_KG)
        decay_KG = jnp.exp(max_KG - new_max_KG)
        out_KGH = out_KGH * decay_KG[..., None]
        total_KG = total_KG * decay_KG + jnp.exp(sinks_KG - new_max_KG)
    return out_KGH / jnp.maximum(total_KG, 1e-30)[..., None]
