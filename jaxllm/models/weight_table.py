"""Where a model's parameters are in a checkpoint of Hugging Face, which stores projections as [out, in]."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxllm.layers.weight_format import Source, WeightFormat


@dataclass(frozen=True)
class Projection:
    """The weight of a linear layer, of which its format says what tensors it has."""

    module: str


WeightTable = dict[str, Source | Projection]
"""Of each parameter by its path, and of each linear layer's weight by the path of the layer."""


def same(name: str) -> Source:
    """The tensor as it is."""
    return Source((name,), lambda x: x)


def projection(module: str) -> Projection:
    """The linear layer that the checkpoint calls so."""
    return Projection(module)


def parameter_sources(table: WeightTable, formats: Mapping[str, WeightFormat]) -> dict[str, Source]:
    """Of each parameter by its path, for linear layers of these formats, by their paths."""
    sources: dict[str, Source] = {}
    for path, entry in table.items():
        if isinstance(entry, Source):
            sources[path] = entry
        else:
            parts = formats[path].sources(entry.module)
            sources |= {f"{path}.weight.{name}": source for name, source in parts.items()}
    return sources
