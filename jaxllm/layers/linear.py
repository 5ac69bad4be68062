"""Dense projections."""

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec

from jaxllm.layers.parameter import parameter


class Linear(nnx.Module):
    """`y = x @ weight + bias`, multiplied in the weight's dtype, summed in float32, rounded to x's dtype.

    The weight has two axes, [in, out], also where its columns stand for heads: a TPU tiles the last two axes of an
    array, and a weight [D, K, H] would be laid out anew for the matrix unit in every step.

    Args:
      partition: how the two axes are split over the mesh.
      bias: whether there is one, float32 [out].
      num_copies: how many neighbouring devices have the same columns (`parameter`).
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        dtype: jnp.dtype,
        partition: PartitionSpec,
        *,
        bias: bool = False,
        num_copies: int = 1,
    ):
        self.weight = parameter((in_dim, out_dim), dtype, partition, num_copies=num_copies)
        float32, columns = jnp.dtype(jnp.float32), PartitionSpec(partition[1])
        self.bias = parameter((out_dim,), float32, columns, num_copies=num_copies) if bias else None

    def __call__(self, x_TX: Array) -> Array:
        weight = self.weight[...]
        # Where devices add up their parts of a sum, they send them in this dtype.
        dtype = x_TX.dtype if self.bias is None else jnp.float32
        y_TY = jnp.matmul(x_TX.astype(weight.dtype), weight, preferred_element_type=dtype)
        return y_TY if self.bias is None else (y_TY + self.bias[...][None, :]).astype(x_TX.dtype)
