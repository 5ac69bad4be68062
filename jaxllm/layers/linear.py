"""Dense projections whose weights may have more than two axes (heads kept apart, gate beside up)."""

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec

from jaxllm.layers.parameter import REPLICATED, parameter


class Linear(nnx.Module):
    """`y = einsum(equation, x, weight) + bias`, multiplied in the weight's dtype, summed in float32.

    Args:
      equation: like "TD,DF->TF", in the legend's letters.
      shape: shape of the weight.
      bias_shape: shape of the bias, the trailing axes of the output; None for none.
      partition, bias_partition: how they are split over the mesh.
    """

    def __init__(
        self,
        equation: str,
        shape: tuple[int, ...],
        dtype: jnp.dtype,
        partition: PartitionSpec,
        *,
        bias_shape: tuple[int, ...] | None = None,
        bias_partition: PartitionSpec = REPLICATED,
    ):
        self.equation = equation
        self.weight = parameter(shape, dtype, partition)
        self.bias = None if bias_shape is None else parameter(bias_shape, jnp.dtype(jnp.float32), bias_partition)

    def __call__(self, x: Array) -> Array:
        weight = self.weight[...]
        y = jnp.einsum(self.equation, x.astype(weight.dtype), weight, preferred_element_type=jnp.float32)
        if self.bias is not None:
            y += self.bias[...].reshape((1,) * (y.ndim - len(self.bias.shape)) + self.bias.shape)
        return y.astype(x.dtype)
