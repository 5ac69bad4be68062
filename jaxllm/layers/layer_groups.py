"""Which layers share a page table, and which share a cache array."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import NamedTuple

from jaxllm.layers.cache_spec import CacheSpec


class Place(NamedTuple):
    """Where a layer's cache lies: in each page of a group, in one array, the part `part` of `num_parts` equal ones."""

    group: int
    array: int
    part: int = 0
    num_parts: int = 1


@dataclass(frozen=True)
class LayerGroups:
    """Groups of layers that keep alike.

    A page belongs to one group, and is a piece of every cache array, of one size in all of them. The group's layers
    have a part of it each: a whole piece, or, where others keep more of a token, as many layers as fit share a piece.
    So all groups draw their pages from one pool, and the arrays serve all groups. The last group of layers of a kind
    may be smaller; its pages have a rest that nobody uses.

    windows: for each group the size of its sliding window in tokens; None attends to all.
    num_arrays: cache arrays.
    places: for each layer.
    """

    windows: tuple[int | None, ...]
    num_arrays: int
    places: tuple[Place, ...]

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    @classmethod
    def of(cls, specs: Sequence[CacheSpec], max_model_len: int) -> "LayerGroups":
        """The groups of layers that keep this, one entry for each layer.

        Layers of a kind are cut into groups of the size by which a request of `max_model_len` tokens takes the least
        memory. With Gemma 3 this is the number of its global layers. A window that no request fills is none.
        """
        layers_of: dict[CacheSpec, list[int]] = defaultdict(list)
        for layer, spec in enumerate(specs):
            window = spec.sliding_window
            is_filled = window is not None and window < max_model_len
            layers_of[spec if is_filled else replace(spec, sliding_window=None)].append(layer)
        piece_size = lcm(*(spec.token_size for spec in layers_of))
        num_parts = {spec: piece_size // spec.token_size for spec in layers_of}

        def num_kept_tokens(num_arrays: int) -> int:
            """Of a request of max_model_len tokens, over all arrays and groups."""
            return sum(
                -(-len(layers) // (num_arrays * num_parts[spec])) * num_arrays * (spec.sliding_window or max_model_len)
                for spec, layers in layers_of.items()
            )

        choices = {-(-len(layers) // num_parts[spec]) for spec, layers in layers_of.items()}
        num_arrays = min(choices, key=lambda num_arrays: (num_kept_tokens(num_arrays), -num_arrays))
        windows: list[int | None] = []
        places: dict[int, Place] = {}
        for spec, layers in layers_of.items():
            size = num_arrays * num_parts[spec]
            for start in range(0, len(layers), size):
                for index, layer in enumerate(layers[start : start + size]):
                    places[layer] = Place(len(windows), *divmod(index, num_parts[spec]), num_parts[spec])
                windows.append(spec.sliding_window)
        return cls(tuple(windows), num_arrays, tuple(places[layer] for layer in range(len(specs))))
