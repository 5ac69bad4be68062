"""Where each layer's keys and values lie, while a step program is traced."""

from typing import NamedTuple

from jax import Array

from jaxllm.layers.layer_groups import LayerGroups


class LayerCache(NamedTuple):
    """One layer's cache: `kv_pages` of the kernel's layout, and page_table_SP, int32 [S, P], its group's pages."""

    kv_pages: Array
    page_table_SP: Array


class KVCaches:
    """The caches by layer: `x, caches[i] = layer(x, caches[i])`, from the first layer to the last.

    Layers of different groups write to the same array, so each takes it from the one before.
    """

    def __init__(self, arrays: list[Array], page_table_GSP: Array, groups: LayerGroups) -> None:
        self.arrays = list(arrays)
        self._page_table_GSP = page_table_GSP
        self._groups = groups

    def __getitem__(self, layer: int) -> LayerCache:
        group, array = self._groups.places[layer]
        return LayerCache(self.arrays[array], self._page_table_GSP[group])

    def __setitem__(self, layer: int, cache: LayerCache) -> None:
        _, array = self._groups.places[layer]
        self.arrays[array] = cache.kv_pages
