"""Dense projections."""

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec

from jaxllm.layers.parameter import parameter
from jaxllm.layers.weight_format import WeightFormat


class Linear(nnx.Module):
    """`y = x @ weight + bias`, rounded to x's dtype.

    The weight has two axes, [in, out], also where its columns stand for heads: a TPU tiles the last two axes of an
    array, and a weight [D, K, H] would be laid out anew for the matrix unit in every step.

    Args:
      format: how the weight is stored and multiplied.
      partition: how the two axes are split over the mesh.
      bias: whether there is one, float32 [out].
      num_copies: how many neighbouring devices have the same columns (`parameter`).
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        format: WeightFormat,
        partition: PartitionSpec,
        *,
        bias: bool = False,
        num_copies: int = 1,
    ):
        self.format = format
        self.weight = nnx.Dict(format.parameters(in_dim, out_dim, partition, num_copies=num_copies))
        float32, columns = jnp.dtype(jnp.float32), PartitionSpec(partition[1])
        self.bias = parameter((out_dim,), float32, columns, num_copies=num_copies) if bias else None

    def __call__(self, x_TX: Array) -> Array:
        weight = {name: array[...] for name, array in self.weight.items()}
        if self.bias is None:
            return self.format.product(x_TX, weight, x_TX.dtype)
        y_TY = self.format.product(x_TX, weight, jnp.dtype(jnp.float32))
        return (y_TY + self.bias[...][None, :]).astype(x_TX.dtype)
