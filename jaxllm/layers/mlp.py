"""The gated feed-forward block (Shazeer, arXiv 2002.05202)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec

from jaxllm.errors import UnsupportedModelError
from jaxllm.layers.linear import Linear

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


def check_activation(name: str) -> str:
    """`name`, if it is one of ours. Raises UnsupportedModelError otherwise."""
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(f"activation {name!r} is not supported; known: {', '.join(ACTIVATIONS)}")
    return name


class GatedMLP(nnx.Module):
    """`down(activation(gate(x)) * up(x))`. Gate and up are one weight [D, 2, F], split over F."""

    def __init__(self, model_dim: int, ff_dim: int, activation: str, dtype: jnp.dtype):
        self.activation = activation
        self.gate_up = Linear("TD,DXF->TXF", (model_dim, 2, ff_dim), dtype, PartitionSpec(None, None, "model"))
        self.down = Linear("TF,FD->TD", (ff_dim, model_dim), dtype, PartitionSpec("model", None))

    def __call__(self, x_TD: Array) -> Array:
        gate_up_TXF = self.gate_up(x_TD)
        return self.down(ACTIVATIONS[self.activation](gate_up_TXF[:, 0]) * gate_up_TXF[:, 1])
