"""How many pages fit, and the arrays that hold them."""

import os
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.errors import ConfigError, OutOfMemoryError
from jaxllm.pallas_kernels.ragged_paged_attention import KVCacheSpec, check_support, kv_cache_shape

KV_CACHE_PARTITION = PartitionSpec(None, "model")


@dataclass(frozen=True, kw_only=True)
class KVCacheLayout:
    """Everything about the cache but its number of pages: arrays split over "model" by KV heads, as many as a group of
    layers has layers (`LayerGroups`)."""

    num_arrays: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: jnp.dtype
    implementation: str | None
    sharding: NamedSharding

    def structs(self, num_pages: int) -> list[jax.ShapeDtypeStruct]:
        """One array, for each of them."""
        shape = kv_cache_shape(self._spec(num_pages), self.implementation)
        return [jax.ShapeDtypeStruct(shape, self.dtype, sharding=self.sharding)] * self.num_arrays

    def choose_implementation(
        self, num_heads: int, q_dtype: jnp.dtype, max_seqs: int, max_pages_per_seq: int
    ) -> "KVCacheLayout":
        """That of the attention which is asked for, or else fits the devices of the mesh that is set.

        `num_heads` query heads are split like the KV heads. Raises ConfigError for what the kernel cannot do.
        """
        try:
            implementation = check_support(
                self._spec(1),
                num_heads=num_heads,
                q_dtype=q_dtype,
                max_seqs=max_seqs,
                max_pages_per_seq=max_pages_per_seq,
                implementation=self.implementation,
            )
        except ValueError as error:
            raise ConfigError(f"attention: {error}") from error
        return replace(self, implementation=implementation)

    def _spec(self, num_pages: int) -> KVCacheSpec:
        return KVCacheSpec(
            num_pages=num_pages,
            page_size=self.page_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
        )

    def page_bytes(self) -> int:
        """Bytes that one page takes on each device, over all arrays."""
        (struct, *_) = self.structs(1)
        return self.num_arrays * prod(self.sharding.shard_shape(struct.shape)) * self.dtype.itemsize

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
