"""Copies pages of the KV cache between the device and the host, beside the steps."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import prod
from queue import SimpleQueue
from typing import Literal

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_CHUNK_SIZES = (8, 4, 2, 1)  # Pages that one program moves. Any number is a sum of these, so nothing is padded.

_Part = tuple[np.ndarray, Array | np.ndarray]  # A view of the pool, and what goes into its slots.


@dataclass(frozen=True, kw_only=True)
class Move:
    """A chunk of pages that has been copied, or could not be.

    kind: "saved" to the host; or "loaded" to the device, where `PageMover.write` puts it into the caches.
    slots: the host slots of the pages.
    ticket: of a loaded chunk: which `load` it belongs to; else None.
    seconds: that the copy took, without the time in which it waited for other copies or for a step.
    error: why it failed, or None. The slots of a save that failed hold nothing.
    staging: a loaded chunk on the device, an array for each cache array.
    """

    kind: Literal["saved", "loaded"]
    slots: tuple[int, ...]
    ticket: int | None = None
    seconds: float
    error: str | None
    staging: list[Array]

    @property
    def num_pages(self) -> int:
        return len(self.slots)


class PageMover:
    """Moves pages between cache arrays, of which it knows only that axis 0 is the page, and a pool on the host.

    The thread that owns the caches calls `save` and `load`, which begin copies; takes from `finished`, between steps,
    the chunks that have been copied; and hands the loaded ones to `write`. The copies run in one other thread, in
    the order of the calls, except that a load may fall behind later saves: it finds in its slots what earlier saves
    put there, and they must not be saved to before it has finished.

    structs: the cache arrays with their shardings, of any number of pages. Of arrays that are split over the devices of
        several hosts, the pool holds what is on this host's.
    num_host_pages: slots of the pool. They take memory from their first use on.
    mesh: of the shardings.
    max_staged_chunks: chunks on their way that may lie on the device, in each direction.
    """

    def __init__(
        self,
        structs: Sequence[jax.ShapeDtypeStruct],
        *,
        num_host_pages: int,
        mesh: Mesh,
        max_staged_chunks: int = 4,
    ):
        self._structs = list(structs)
        self.num_host_pages = num_host_pages
        self._mesh = mesh
        self._pools = [np.empty((num_host_pages, *struct.shape[1:]), struct.dtype) for struct in self._structs]
        self._filled_slots: set[int] = set()  # Known to the copying thread only.
        self._max_staged_chunks = max_staged_chunks
        self._num_saving = self._num_loading = 0  # Chunks that were begun and have not come out of `finished`.
        self._waiting_loads: deque[tuple[int, tuple[int, ...]]] = deque()  # Chunks: ticket, slots.
        self._finished: SimpleQueue[Move] = SimpleQueue()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jaxllm-pages")
        self._readers: dict[int, jax.stages.Compiled] = {}
        self._writers: dict[int, jax.stages.Compiled] = {}

    @property
    def page_bytes(self) -> int:
        """Of one page in all cache arrays, over all devices."""
        return sum(prod(struct.shape[1:]) * struct.dtype.itemsize for struct in self._structs)

    @property
    def max_staging_bytes(self) -> int:
        """What chunks on their way may take on the devices, all together."""
        return 2 * self._max_staged_chunks * max(_CHUNK_SIZES) * self.page_bytes

    def compile(self, num_pages: int) -> None:
        """Makes all programs, for caches of so many pages; to be called before the first move."""
        structs = [
            jax.ShapeDtypeStruct((num_pages, *struct.shape[1:]), struct.dtype, sharding=struct.sharding)
            for struct in self._structs
        ]
        whole = NamedSharding(self._mesh, PartitionSpec())
        shardings = [struct.sharding for struct in self._structs]
        read = jax.jit(_read, out_shardings=shardings)
        write = jax.jit(_write, out_shardings=shardings, donate_argnums=0)
        options = {"xla_backend_optimization_level": 1} if self._mesh.devices.flat[0].platform == "cpu" else {}
        for size in _CHUNK_SIZES:
            pages = jax.ShapeDtypeStruct((size,), np.int32, sharding=whole)
            staging = [
                jax.ShapeDtypeStruct((size, *struct.shape[1:]), struct.dtype, sharding=struct.sharding)
                for struct in self._structs
            ]
            with jax.set_mesh(self._mesh):
                self._readers[size] = read.lower(structs, pages).compile(options)
                self._writers[size] = write.lower(structs, staging, pages).compile(options)

    def save(self, kv_pages: list[Array], moves: Sequence[tuple[int, int]]) -> None:
        """Begins to copy pages to the host, as the launched steps leave them: (page, slot) for each.

        What is launched afterwards may overwrite the pages. Returns at once, unless more chunks are on their way than
        may lie on the device: it waits for those beyond.
        """
        for start, size in _chunks(len(moves)):
            pages, slots = zip(*moves[start : start + size], strict=True)
            staging = self._readers[size](kv_pages, np.array(pages, np.int32))
            parts: list[_Part] = []
            for pool, array in zip(self._pools, staging, strict=True):
                for shard in array.addressable_shards:
                    if shard.replica_id == 0:
                        shard.data.copy_to_host_async()
                        parts.append((pool[:, *shard.index[1:]], shard.data))
            if self._num_saving >= self._max_staged_chunks:
                parts = [(pool, np.asarray(data)) for pool, data in parts]
            self._num_saving += 1
            self._thread.submit(self._save, slots, parts)

    def load(self, ticket: int, slots: Sequence[int]) -> None:
        """Begins to bring what is in these slots to the device, in chunks. Returns at once."""
        for first, size in _chunks(len(slots)):
            self._waiting_loads.append((ticket, tuple(slots[first : first + size])))
        self._begin_loads()

    def finished(self, *, wait: bool = False) -> list[Move]:
        """The chunks that have been copied since the last call, in the order in which they were: the loaded ones come
        in that of their slots and of the calls of `load`.

        A loaded one takes memory on the device as long as its `Move` is kept.

        wait: for one at least. Something must be on its way.
        """
        moves: list[Move] = []
        while (wait and not moves) or not self._finished.empty():
            move = self._finished.get()
            if move.kind == "saved":
                self._num_saving -= 1
            else:
                self._num_loading -= 1
            moves.append(move)
        self._begin_loads()
        return moves

    def write(self, kv_pages: list[Array], move: Move, pages: Sequence[int]) -> list[Array]:
        """Puts a loaded chunk into these pages of the caches, which are donated. Returns the new caches, at once."""
        assert move.staging, f"nothing was loaded from {move.slots}: {move.error}"
        assert len(pages) == move.num_pages, f"{move.num_pages} pages were loaded for {pages}"
        return self._writers[move.num_pages](kv_pages, move.staging, np.array(pages, np.int32))

    def shutdown(self) -> None:
        """Gives up the copies that have not begun, and waits for the one that has."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _begin_loads(self) -> None:
        """Hands chunks to the thread, as many as may lie on the device."""
        while self._waiting_loads and self._num_loading < self._max_staged_chunks:
            self._num_loading += 1
            self._thread.submit(self._load, *self._waiting_loads.popleft())

    # In the copying thread. Whatever fails must come out of `finished`, where requests wait for it.

    def _save(self, slots: tuple[int, ...], parts: list[_Part]) -> None:
        seconds, error = 0.0, None
        try:
            jax.block_until_ready([data for _, data in parts])  # The step before it is not the copy's time.
            start = time.perf_counter()
            self._put(slots, parts)
            seconds = time.perf_counter() - start
            self._filled_slots.update(slots)
        except Exception as exception:
            self._filled_slots.difference_update(slots)
            error = f"{type(exception).__name__}: {exception}"
        self._finished.put(Move(kind="saved", slots=slots, seconds=seconds, error=error, staging=[]))

    def _load(self, ticket: int, slots: tuple[int, ...]) -> None:
        seconds, error, staging = 0.0, None, []
        try:
            if missing := set(slots) - self._filled_slots:
                raise LookupError(f"no page has been saved to the host slots {sorted(missing)}")
            start = time.perf_counter()
            staging = jax.block_until_ready(self._get(slots))
            seconds = time.perf_counter() - start
        except Exception as exception:
            error = f"{type(exception).__name__}: {exception}"
        self._finished.put(
            Move(kind="loaded", slots=slots, ticket=ticket, seconds=seconds, error=error, staging=staging)
        )

    def _put(self, slots: tuple[int, ...], parts: list[_Part]) -> None:
        for pool, data in parts:
            pool[list(slots)] = np.asarray(data)

    def _get(self, slots: tuple[int, ...]) -> list[Array]:
        """On the device, from copies: on CPU, JAX may use the memory that it is given, and the pool changes."""
        staging: list[Array] = []
        for pool, struct in zip(self._pools, self._structs, strict=True):
            shape = (len(slots), *struct.shape[1:])
            staging.append(jax.make_array_from_callback(shape, struct.sharding, partial(_part, pool, list(slots))))
        return staging


def _part(pool: np.ndarray, slots: list[int], index: tuple[slice, ...] | None) -> np.ndarray:
    """A copy of what is in the slots, of the part of each page that belongs to a device."""
    assert index is not None
    return pool[:, *index[1:]][slots]


def _chunks(num_pages: int) -> Iterator[tuple[int, int]]:
    """(start, size) of each chunk."""
    start = 0
    for size in _CHUNK_SIZES:
        while num_pages - start >= size:
            yield start, size
            start += size


def _read(kv_pages: list[Array], pages: Array) -> list[Array]:
    return [cache.at[pages].get(mode="promise_in_bounds") for cache in kv_pages]


def _write(kv_pages: list[Array], staging: list[Array], pages: Array) -> list[Array]:
    """Page by page: XLA on CPU would convert a whole bfloat16 cache for a scatter."""

    def write_page(index: Array, kv_pages: list[Array]) -> list[Array]:
        return [
            lax.dynamic_update_slice_in_dim(cache, lax.dynamic_slice_in_dim(chunk, index, 1), pages[index], 0)
            for cache, chunk in zip(kv_pages, staging, strict=True)
        ]

    return lax.fori_loop(0, len(pages), write_page, kv_pages)
