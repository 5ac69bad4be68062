"""Where each layer's keys and values lie, while a step program is traced."""

from typing import NamedTuple

from jax import Array

from jaxllm.layers.layer_groups import LayerGroups


class LayerCache(NamedTuple):
    """One layer's cache.

    kv_pages: the array that it lies in, to be seen as pages of the layer's own shape (`view_pages`).
    page_table_SP: int32 [S, P], which of these pages hold the tokens of each sequence.
    page_size: tokens of a page. Static.
    """

    kv_pages: Array
    page_table_SP: Array
    page_size: int


class KVCaches:
    """The caches by layer: `x, caches[i] = layer(x, caches[i])`, from the first layer to the last.

    Layers of different groups write to the same array, so each takes it from the one before.
    """

    def __init__(self, arrays: list[Array], page_table_GSP: Array, groups: LayerGroups, page_size: int) -> None:
        self.arrays = list(arrays)
        self._page_table_GSP = page_table_GSP
        self._groups = groups
        self._page_size = page_size

    def __getitem__(self, layer: int) -> LayerCache:
        group, array, part, num_parts = self._groups.places[layer]
        page_table_SP = self._page_table_GSP[group]
        if num_parts > 1:
            page_table_SP = page_table_SP * num_parts + part
        return LayerCache(self.arrays[array], page_table_SP, self._page_size)

    def __setitem__(self, layer: int, cache: LayerCache) -> None:
        self.arrays[self._groups.places[layer].array] = cache.kv_pages
