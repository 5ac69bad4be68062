"""How many pages fit, and the arrays that hold them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.errors import ConfigError, OutOfMemoryError
from jaxllm.layers.cache_spec import CacheSpec
from jaxllm.layers.layer_groups import LayerGroups
from jaxllm.pallas_kernels.ragged_paged_attention import KVCacheSpec, check_support, kv_cache_shape, view_pages

KV_CACHE_PARTITION = PartitionSpec(None, "model")


@dataclass(frozen=True, kw_only=True)
class KVCacheLayout:
    """Everything about the cache but its number of pages: what each layer keeps, and where (`LayerGroups`). The arrays
    are of one shape, and split over "model" by KV heads."""

    specs: tuple[CacheSpec, ...]
    groups: LayerGroups
    page_size: int
    dtype: jnp.dtype
    implementation: str | None
    sharding: NamedSharding

    @classmethod
    def of(
        cls,
        specs: Sequence[CacheSpec],
        max_model_len: int,
        *,
        page_size: int,
        dtype: jnp.dtype,
        implementation: str | None,
        mesh: Mesh,
    ) -> "KVCacheLayout":
        """The layout for layers that keep this, one entry for each."""
        return cls(
            specs=tuple(specs),
            groups=LayerGroups.of(specs, max_model_len),
            page_size=page_size,
            dtype=dtype,
            implementation=implementation,
            sharding=NamedSharding(mesh, KV_CACHE_PARTITION),
        )

    def structs(self, num_pages: int) -> list[jax.ShapeDtypeStruct]:
        """One array, for each of them."""
        num_parts = self.groups.places[0].num_parts
        _, num_rows, *rest = kv_cache_shape(self._kernel_spec(self.specs[0]), self.implementation)
        shape = (num_pages, num_parts * num_rows, *rest)
        return [jax.ShapeDtypeStruct(shape, self.dtype, sharding=self.sharding)] * self.groups.num_arrays

    def choose_implementation(
        self, num_heads: int, q_dtype: jnp.dtype, max_seqs: int, max_pages_per_seq: int
    ) -> "KVCacheLayout":
        """That of the attention which is asked for, or else fits the devices of the mesh that is set.

        `num_heads` query heads are split like the KV heads. Raises ConfigError for what the kernel cannot do.
        """
        try:
            implementations = {
                check_support(
                    self._kernel_spec(spec),
                    num_heads=num_heads,
                    q_dtype=q_dtype,
                    max_seqs=max_seqs,
                    max_pages_per_seq=max_pages_per_seq,
                    implementation=self.implementation,
                )
                for spec in set(self.specs)
            }
            # A kernel for some of the layers only leaves all of them to the one that does everything.
            layout = replace(self, implementation=implementations.pop() if len(implementations) == 1 else "xla")
            layout._check_views()
        except ValueError as error:
            raise ConfigError(f"attention: {error}") from error
        return layout

    def _check_views(self) -> None:
        """Raises ValueError unless every layer finds its own pages in the arrays."""
        array = self.structs(1)[0]
        for spec, place in set(zip(self.specs, self.groups.places, strict=True)):
            view = partial(
                view_pages,
                page_size=self.page_size,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                implementation=self.implementation,
            )
            assert jax.eval_shape(view, array).shape[0] == place.num_parts

    def _kernel_spec(self, spec: CacheSpec) -> KVCacheSpec:
        """Of one page."""
        return KVCacheSpec(
            num_pages=1,
            page_size=self.page_size,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=self.dtype,
        )

    def page_bytes(self) -> int:
        """Bytes that one page takes on each device, over all arrays."""
        (struct, *_) = self.structs(1)
        return self.groups.num_arrays * prod(self.sharding.shard_shape(struct.shape)) * self.dtype.itemsize

    def allocate(self, num_pages: int) -> list[jax.Array]:
        structs = self.structs(num_pages)
        return jax.jit(
            lambda: [jnp.zeros(struct.shape, struct.dtype) for struct in structs],
            out_shardings=[struct.sharding for struct in structs],
        )()


@dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """Bytes on one device: what we may use in all, and what weights and the largest program take of it."""

    limit_bytes: int
    weights_bytes: int
    temporaries_bytes: int

    def num_pages(self, page_bytes: int, *, at_least: int, at_most: int) -> int:
        """Pages that fit into the rest. Raises OutOfMemoryError if not even `at_least` do."""
        free_bytes = self.limit_bytes - self.weights_bytes - self.temporaries_bytes
        num_pages = max(0, free_bytes // page_bytes)
        if num_pages < at_least:
            raise OutOfMemoryError(
                f"the KV cache needs at least {at_least:,} pages of {page_bytes / 1e6:,.2f} MB to hold one sequence of "
                f"max_model_len, and {max(0, free_bytes) / 1e6:,.0f} MB are left: of {self.limit_bytes / 1e6:,.0f} MB, "
                f"weights take {self.weights_bytes / 1e6:,.0f} MB and programs {self.temporaries_bytes / 1e6:,.0f} MB. "
                "Lower max_model_len or max_num_batched_tokens, raise memory_utilization, or split the model over more "
                "devices with tensor_parallel_size."
            )
        return min(num_pages, at_most)


def memory_limit_bytes(device: jax.Device, utilization: float, weights_bytes: int) -> int:
    """What we may take of a device's memory: on accelerators in all, on CPU beside the weights (`EngineConfig`)."""
    stats = device.memory_stats()
    if stats is None:
        return weights_bytes + int(host_memory_bytes() * utilization)
    return int(stats["bytes_limit"] * utilization)


def host_memory_bytes() -> int:
    """The host's memory, or what a container may use of it.

    Not what happens to be free: the number of pages follows from this, the programs from that, and a program of
    another shape is not found in the compilation cache.
    """
    host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    container_limit = Path("/sys/fs/cgroup/memory.max")
    if container_limit.exists() and (text := container_limit.read_text().strip()) != "max":
        return min(host_bytes, int(text))
    return host_bytes
