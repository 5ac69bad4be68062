"""The gated feed-forward block (Shazeer, arXiv 2002.05202)."""

from collections.abc import Callable

import jax
from flax import nnx
from jax import Array, lax
from jax.sharding import PartitionSpec

from jaxllm.errors import UnsupportedModelError
from jaxllm.layers.linear import Linear
from jaxllm.layers.step_metadata import StepMetadata
from jaxllm.layers.weight_format import WeightFormats

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
    """`down(activation(gate(x)) * up(x))`, split over F.

    Layers call each feed-forward block alike, with the step's metadata; this one treats padding as it does tokens.
    """

    def __init__(self, model_dim: int, ff_dim: int, activation: str, formats: WeightFormats):
        self.activation = activation
        self.gate = Linear(model_dim, ff_dim, formats["gate"], PartitionSpec(None, "model"))
        self.up = Linear(model_dim, ff_dim, formats["up"], PartitionSpec(None, "model"))
        self.down = Linear(ff_dim, model_dim, formats["down"], PartitionSpec("model", None))

    def __call__(self, x_TD: Array, metadata: StepMetadata) -> Array:
        hidden_TF = ACTIVATIONS[self.activation](self.gate(x_TD)) * self.up(x_TD)
        # Else XLA on TPU multiplies by `up` inside the product with `down`, which it itself estimates to be slower.
        return self.down(lax.optimization_barrier(hidden_TF))
