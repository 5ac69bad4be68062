"""How keys and values are held in a page's dtype."""

import jax.numpy as jnp
from jax import Array


def to_cache_dtype(x_TKH: Array, scale_K: Array | None, dtype: jnp.dtype) -> Array:
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
    x_KCH = x_KCH.astype(dtype)
    return x_KCH if scale_K is None else x_KCH * scale_K[:, None, None].astype(dtype)
