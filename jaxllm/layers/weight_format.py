"""How the weights of linear layers are stored, multiplied with, and found in a checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec

from jaxllm.layers.parameter import parameter


@dataclass(frozen=True)
class Source:
    """`assemble(*tensors)` of the checkpoint's tensors of these names gives a parameter."""

    names: tuple[str, ...]
    assemble: Callable[..., np.ndarray]


class WeightFormat(Protocol):
    """A linear layer knows its shape; its format knows bits and scales.

    A weight is [in, out] in every format, whatever the arrays are that it consists of.
    """

    def parameters(
        self, in_dim: int, out_dim: int, partition: PartitionSpec, *, num_copies: int
    ) -> dict[str, nnx.Param]:
        """The arrays that a weight consists of, by names. `partition` says how its two axes are split over the mesh;
        for `num_copies` see `parameter`."""
        ...

    def sources(self, module: str) -> dict[str, Source]:
        """Of each of these arrays: where it is in the checkpoint, in which the layer is called `module`. What is
        assembled from tensors [out, in] is whole, not yet split or copied."""
        ...

    def product(self, x_TX: Array, weight: Mapping[str, Array], dtype: jnp.dtype) -> Array:
        """`x @ weight`, [T, out] in `dtype`. Where devices add up their parts of a sum, they send them in it."""
        ...


@dataclass(frozen=True)
class Dense:
    """One array of a floating dtype, multiplied in that dtype and summed in float32."""

    dtype: jnp.dtype

    def parameters(
        self, in_dim: int, out_dim: int, partition: PartitionSpec, *, num_copies: int
    ) -> dict[str, nnx.Param]:
        return {"values": parameter((in_dim, out_dim), self.dtype, partition, num_copies=num_copies)}

    def sources(self, module: str) -> dict[str, Source]:
        return {"values": Source((f"{module}.weight",), np.transpose)}

    def product(self, x_TX: Array, weight: Mapping[str, Array], dtype: jnp.dtype) -> Array:
        values = weight["values"]
        return jnp.matmul(x_TX.astype(values.dtype), values, preferred_element_type=dtype)


class WeightFormats:
    """The formats of a model's linear layers, by the layers' paths, and the dtype of its other matrices.

    `formats["attention.q"]` is one layer's; `formats.under("attention")` has those of a part of the model, by their
    paths within it.

    dtype: of embeddings and output heads.
    """

    def __init__(self, dtype: jnp.dtype, format_of: Callable[[str], WeightFormat], path: str = ""):
        self.dtype = dtype
        self._format_of = format_of
        self._path = path

    def __getitem__(self, path: str) -> WeightFormat:
        return self._format_of(self._path + path)

    def under(self, path: str) -> "WeightFormats":
        return WeightFormats(self.dtype, self._format_of, f"{self._path}{path}.")
