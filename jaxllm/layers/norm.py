"""Root mean square normalisation (Zhang & Sennrich, arXiv 1910.07467)."""

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from jaxllm.layers.parameter import parameter


class RMSNorm(nnx.Module):
    """`x / rms(x) * weight` over the last axis, in float32.

    `unit_offset` is Gemma's form, whose stored weight w stands for a factor of 1 + w.
    """

    def __init__(self, dim: int, *, eps: float, unit_offset: bool = False):
        self.eps = eps
        self.unit_offset = unit_offset
        self.weight = parameter((dim,), jnp.dtype(jnp.float32))

    def __call__(self, x: Array) -> Array:
        x32 = x.astype(jnp.float32)
        x32 = x32 * lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        weight = self.weight[...] + 1.0 if self.unit_offset else self.weight[...]
        return (x32 * weight.reshape((1,) * (x.ndim - 1) + weight.shape)).astype(x.dtype)
