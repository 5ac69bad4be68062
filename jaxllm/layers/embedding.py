"""Token embedding and the output head, which may be the same table."""

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec

from jaxllm.layers.parameter import parameter


class Embedding(nnx.Module):
    """A table [V, D]: rows are looked up on the way in, and multiplied on the way out. Split over V."""

    def __init__(self, vocab_size: int, dim: int, dtype: jnp.dtype):
        self.weight = parameter((vocab_size, dim), dtype, PartitionSpec("model", None))

    def __call__(self, token_ids_T: Array, dtype: jnp.dtype) -> Array:
        """Embeddings [T, D] in `dtype`. An id is within the vocabulary: the engine has checked it."""
        return jnp.take(self.weight[...], token_ids_T, axis=0, mode="clip").astype(dtype)

    def logits(self, x_SD: Array) -> Array:
        """float32 [S, V]."""
        weight = self.weight[...]
        return jnp.einsum("SD,VD->SV", x_SD.astype(weight.dtype), weight, preferred_element_type=jnp.float32)
