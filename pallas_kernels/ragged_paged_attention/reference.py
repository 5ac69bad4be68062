"""The specification of ragged paged attention: plain jnp, readable, slow. The oracle of every other file here."""

import jax.numpy as jnp
from jax import Array, lax

from jaxllm.pallas_kernels.ragged_paged_attention.pages import from_cache_dtype, new_tokens
from jaxllm.pallas_kernels.ragged_paged_attention.pages import kv_cache_shape as kv_cache_shape
from jaxllm.pallas_kernels.ragged_paged_attention.pages import pages_from_tokens as pages_from_tokens
from jaxllm.pallas_kernels.ragged_paged_attention.pages import tokens_from_pages as tokens_from_pages
from jaxllm.pallas_kernels.ragged_paged_attention.pages import validate as validate


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
    """See `api.ragged_paged_attention`. Everything in float32, token by token, over all P pages of its sequence."""
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
    kv_T2KH = jnp.concatenate(new_tokens(k_TKH, v_TKH, k_scale_K, v_scale_K, kv_pages.dtype), axis=1)
    kv_pages = kv_pages.at[page_T, :, position_T % page_size].set(kv_T2KH, mode="drop")

    # No sink is one of no weight.
    sinks_N = jnp.full(N, -jnp.inf) if sinks_N is None else sinks_N.astype(jnp.float32)
    sinks_KG = sinks_N.reshape(K, N // K)

    def attend(token: tuple[Array, Array, Array]) -> Array:
        q_KGH, seq, position = token
        # The token's whole sequence, C = P * page_size positions.
        kv_2KCH = jnp.moveaxis(kv_pages[page_table_SP[seq]], 0, 1).reshape(2 * K, P * page_size, H)
        k_KCH = from_cache_dtype(kv_2KCH[:K], k_scale_K, q_KGH.dtype)
        v_KCH = from_cache_dtype(kv_2KCH[K:], v_scale_K, q_KGH.dtype)
        distance_C = position - jnp.arange(P * page_size)
        visible_C = distance_C >= 0
        if sliding_window is not None:
            visible_C &= distance_C < sliding_window
        # The unused tail of a page may hold anything, NaN included: a weight of zero must not multiply it.
        v_KCH = jnp.where(visible_C[:, None], v_KCH, 0.0)

        scores_KGC = jnp.einsum("KGH,KCH->KGC", q_KGH, k_KCH) * sm_scale
        if soft_cap is not None:
            scores_KGC = soft_cap * jnp.tanh(scores_KGC / soft_cap)
        scores_KGC = jnp.where(visible_C, scores_KGC, -jnp.inf)
        max_KG = jnp.maximum(jnp.max(scores_KGC, axis=-1), sinks_KG)
        weights_KGC = jnp.exp(scores_KGC - max_KG[..., None])
        total_KG = jnp.sum(weights_KGC, axis=-1) + jnp.exp(sinks_KG - max_KG)
        return jnp.einsum("KGC,KCH->KGH", weights_KGC, v_KCH) / total_KG[..., None]

    out_TKGH = lax.map(attend, (q_TNH.astype(jnp.float32).reshape(T, K, N // K, H), seq_T, position_T))
    # Padding tokens have attended to whatever they found.
    out_TNH = jnp.where(is_real_T[:, None, None], out_TKGH.reshape(T, N, H), 0.0)
    return out_TNH.astype(q_TNH.dtype), kv_pages
