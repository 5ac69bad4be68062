"""The specification of ragged paged attention: plain jnp, readable, slow. The oracle of every other file here."""

import jax.numpy as jnp
from jax import Array

from jaxllm.pallas_kernels.ragged_paged_attention.pages import from_cache_dtype, to_cache_dtype


def kv_cache_shape(num_pages: int, page_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
    """[page, 2K, page_size, H]: a page holds its keys by head, then its values by head."""
    return (num_pages, 2 * num_kv_heads, page_size, head_dim)


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
    """See `api.ragged_paged_attention`. Everything in float32, over all P pages of every token's sequence."""
    del decode_only  # A promise that saves work changes no result.
    (T, N, H), K, (S, P) = q_TNH.shape, k_TKH.shape[1], page_table_SP.shape
    num_pages, page_size = kv_pages.shape[0], kv_pages.shape[2]

    # Each token's sequence and its position in it.
    token_T = jnp.arange(T)
    seq_T = jnp.clip(jnp.searchsorted(cu_q_lens, token_T, side="right") - 1, 0, S - 1)
    is_real_T = token_T < cu_q_lens[num_seqs[0]]
    position_T = kv_lens_S[seq_T] - cu_q_lens[seq_T + 1] + token_T

    # Write: padding tokens go to a page that does not exist, and are dropped.
    page_T = page_table_SP[seq_T, jnp.clip(position_T // page_size, 0, P - 1)]
    page_T = jnp.where(is_real_T, page_T, num_pages)
    kv_T2KH = jnp.concatenate(
        [to_cache_dtype(k_TKH, k_scale_K, kv_pages.dtype), to_cache_dtype(v_TKH, v_scale_K, kv_pages.dtype)],
        axis=1,
    )
    kv_pages = kv_pages.at[page_T, :, position_T % page_size].set(kv_T2KH, mode="drop")

    q_TKGH = q_TNH.astype(jnp.float32).reshape(T, K, N // K, H) * sm_scale

    # Read each token's whole sequence back, C = P * page_size positions.
    kv_T2KCH = jnp.moveaxis(kv_pages[page_table_SP[seq_T]], 1, 2).reshape(T, 2 * K, P * page_size, H)
    k_TKCH = from_cache_dtype(kv_T2KCH[:, :K], k_scale_K, q_TKGH.dtype)
    v_TKCH = from_cache_dtype(kv_T2KCH[:, K:], v_scale_K, q_TKGH.dtype)

    scores_TKGC = jnp.einsum("TKGH,TKCH->TKGC", q_TKGH, k_TKCH)
    if soft_cap is not None:
        scores_TKGC = soft_cap * jnp.tanh(scores_TKGC / soft_cap)
    distance_TC = position_T[:, None] - jnp.arange(P * page_size)[None, :]
    visible_TC = (distance_TC >= 0) & is_real_T[:, None]
    if sliding_window is not None:
        visible_TC &= distance_TC < sliding_window
    scores_TKGC = jnp.where(visible_TC[:, None, None], scores_TKGC, -jnp.inf)

    max_TKG = jnp.max(scores_TKGC, axis=-1, keepdims=True)
    if sinks_N is not None:
        sinks_1KG1 = sinks_N.astype(jnp.float32).reshape(1, K, N // K, 1)
        max_TKG = jnp.maximum(max_TKG, sinks_1KG1)
    max_TKG = jnp.where(jnp.isfinite(max_TKG), max_TKG, 0.0)
    weights_TKGC = jnp.exp(scores_TKGC - max_TKG)
    total_TKG1 = jnp.sum(weights_TKGC, axis=-1, keepdims=True)
    if sinks_N is not None:
        total_TKG1 += jnp.exp(sinks_1KG1 - max_TKG)
    # The unused tail of a page may hold anything, NaN included: a weight of zero must not multiply it.
    v_TKCH = jnp.where(visible_TC[:, None, :, None], v_TKCH, 0.0)
    out_TKGH = jnp.einsum("TKGC,TKCH->TKGH", weights_TKGC, v_TKCH) / jnp.maximum(total_TKG1, 1e-30)
    out_TNH = jnp.where(is_real_T[:, None, None], out_TKGH.reshape(T, N, H), 0.0)
    return out_TNH.astype(q_TNH.dtype), kv_pages
