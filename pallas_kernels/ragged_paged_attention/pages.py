"""How a page holds keys and values: the layout of the implementations in plain XLA, and the dtypes of all."""

import jax.numpy as jnp
from jax import Array


def kv_cache_shape(
    num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype
) -> tuple[int, ...]:
    """[page, 2K, page_size, H] in any dtype: a page holds its keys by head, then its values by head."""
    del dtype
    return (num_pages, 2 * num_kv_heads, page_size, head_dim)


def pages_from_tokens(kv_BC2KH: Array) -> Array:
    """Whole pages in the layout of `kv_cache_shape`, from the K and V of each of their C = page_size slots."""
    B, C, _, K, H = kv_BC2KH.shape
    return jnp.moveaxis(kv_BC2KH.reshape(B, C, 2 * K, H), 1, 2)


def tokens_from_pages(kv_pages: Array, num_kv_heads: int, head_dim: int) -> Array:
    """The inverse of `pages_from_tokens`."""
    num_pages, _, page_size, _ = kv_pages.shape
    return jnp.moveaxis(kv_pages, 2, 1).reshape(num_pages, page_size, 2, num_kv_heads, head_dim)


def validate(q_TNH: Array, k_TKH: Array, kv_pages: Array, page_table_SP: Array) -> None:
    """Refuses a cache that has not the layout of `kv_cache_shape`."""
    _, K, H = k_TKH.shape
    if kv_pages.ndim != 4 or kv_pages.shape[1::2] != (2 * K, H):
        raise ValueError(
            f"kv_pages has shape {kv_pages.shape}; expected [num_pages, {2 * K}, page_size, {H}] for {K} KV heads of "
            f"{H}: make it with kv_cache_shape"
        )


def new_tokens(
    k_TKH: Array, v_TKH: Array, k_scale_K: Array | None, v_scale_K: Array | None, dtype: jnp.dtype
) -> tuple[Array, Array]:
    """The step's K and V as the cache takes them, [T, K, H] each.

    A value that is NaN or infinite would reach tokens that do not see it: they weigh it by zero, and zero times NaN is
    NaN. It becomes 0, with NaN in its key, so that who sees it has NaN, and nobody else. (int8 knows no NaN.)
    """
    narrow_k_TKH, narrow_v_TKH = _to_cache_dtype(k_TKH, k_scale_K, dtype), _to_cache_dtype(v_TKH, v_scale_K, dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        return narrow_k_TKH, narrow_v_TKH
    # 8-bit floats are cut off where they end, 16-bit ones overflow when they are made.
    is_sound_TKH = jnp.isfinite(v_TKH if dtype.itemsize == 1 else narrow_v_TKH)
    return (
        jnp.where(is_sound_TKH, narrow_k_TKH, jnp.array(jnp.nan, dtype)),
        jnp.where(is_sound_TKH, narrow_v_TKH, jnp.zeros((), dtype)),
    )


def _to_cache_dtype(x_TKH: Array, scale_K: Array | None, dtype: jnp.dtype) -> Array:
    """x / scale in the cache's dtype: rounded and clipped for int8, clipped to the finite range for fp8."""
    x_TKH = x_TKH.astype(jnp.float32)
    if scale_K is not None:
        x_TKH = x_TKH / scale_K[None, :, None]
    if jnp.issubdtype(dtype, jnp.integer):
        x_TKH = jnp.round(x_TKH)
    if dtype.itemsize == 1:
        info = jnp.iinfo(dtype) if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype)
        x_TKH = jnp.clip(x_TKH, float(info.min), float(info.max))
    return x_TKH.astype(dtype)


def from_cache_dtype(x_KCH: Array, scale_K: Array | None, dtype: jnp.dtype) -> Array:
    """The values that a cache holds, times their scale, in `dtype`. x has shape [..., K, C, H]."""
    if scale_K is None:
        return x_KCH.astype(dtype)
    # A scale that is rounded to a narrow dtype first would make every value wrong in the same direction.
    return (x_KCH.astype(jnp.float32) * scale_K[:, None, None]).astype(dtype)
