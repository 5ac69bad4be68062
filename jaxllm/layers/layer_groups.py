"""Which layers share a page table, and which share a cache array."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerGroups:
    """Groups of layers that attend alike, of one size or smaller.

    A page belongs to one group: its tokens' keys and values in each layer of the group lie in one cache array each, so
    that pages of all groups are equal, and the arrays serve all groups.

    windows: for each group the size of its sliding window in tokens; None attends to all.
    num_arrays: cache arrays, which is the size of the largest group.
    places: for each layer its group, and its array.
    """

    windows: tuple[int | None, ...]
    num_arrays: int
    places: tuple[tuple[int, int], ...]

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    @classmethod
    def of(cls, sliding_windows: Sequence[int | None], max_model_len: int) -> "LayerGroups":
        """The groups of layers with these windows, one entry for each layer.

        Layers of a kind are cut into groups of the size by which a request of `max_model_len` tokens takes the least
        memory: the last group of a kind may be smaller, and its pages have a part that nobody uses. With Gemma 3 this
        is the number of its global layers. A window that no request fills is none.
        """
        layers_of: dict[int | None, list[int]] = defaultdict(list)
        for layer, window in enumerate(sliding_windows):
            layers_of[None if window is None or window >= max_model_len else window].append(layer)

        def num_kept_tokens(size: int) -> int:
            """Of a request of max_model_len tokens, over all layers and what stands for layers that are not there."""
            return sum(
                -(-len(layers) // size) * size * (max_model_len if window is None else window)
                for window, layers in layers_of.items()
            )

        sizes = {len(layers) for layers in layers_of.values()}
        size = min(sizes, key=lambda size: (num_kept_tokens(size), -size))
        windows: list[int | None] = []
        places: dict[int, tuple[int, int]] = {}
        for window, layers in layers_of.items():
            for start in range(0, len(layers), size):
                for array, layer in enumerate(layers[start : start + size]):
                    places[layer] = len(windows), array
                windows.append(window)
        return cls(tuple(windows), size, tuple(places[layer] for layer in range(len(sliding_windows))))
