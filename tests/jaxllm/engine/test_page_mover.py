"""That a page comes back from the host as it was, whatever steps, failures and devices do meanwhile."""

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxllm.engine.page_mover import Move, PageMover

NUM_PAGES, NUM_SLOTS, NUM_LAYERS = 24, 40, 3
PAGE_SHAPE = (4, 8, 16)
TIMEOUT_S = 60


def _slow_overwrite(kv_pages: list[Array], pages: Array, new: list[Array], matrix: Array) -> list[Array]:
    """Takes long enough to be on its way still when the host does the next thing."""
    zero = jnp.minimum(jnp.abs(matrix @ matrix).sum(), 0.0)
    return [
        cache.at[pages].set(values + zero.astype(values.dtype)) for cache, values in zip(kv_pages, new, strict=True)
    ]


class Caches:
    """Small caches with a mover, and what numpy says is in them."""

    def __init__(self, dtype: str = "float32", page_shape: tuple[int, ...] = PAGE_SHAPE, **options):
        mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        sharding = NamedSharding(mesh, PartitionSpec(None, "model"))
        self.struct = jax.ShapeDtypeStruct((NUM_PAGES, *page_shape), jnp.dtype(dtype), sharding=sharding)
        self.mover = PageMover([self.struct] * NUM_LAYERS, num_host_pages=NUM_SLOTS, mesh=mesh, **options)
        self.mover.compile(NUM_PAGES)
        self._rng = np.random.default_rng(0)
        self._matrix = jnp.ones((256, 256))
        self.expected = [self.random_pages(NUM_PAGES) for _ in range(NUM_LAYERS)]
        self.kv_pages = [jax.device_put(pages.copy(), sharding) for pages in self.expected]
        self._overwrite = jax.jit(_slow_overwrite, donate_argnums=0)

    def random_pages(self, num_pages: int) -> np.ndarray:
        return self._rng.standard_normal((num_pages, *self.struct.shape[1:])).astype(self.struct.dtype)

    def overwrite(self, pages: Sequence[int]) -> None:
        """As a step does: a donating program writes into the pages. Returns while it runs."""
        new = [self.random_pages(len(pages)) for _ in self.expected]
        self.kv_pages = self._overwrite(self.kv_pages, np.array(pages), new, self._matrix)
        for expected, values in zip(self.expected, new, strict=True):
            expected[list(pages)] = values

    def content(self, pages: Sequence[int]) -> list[np.ndarray]:
        return [expected[list(pages)] for expected in self.expected]

    def write(self, move: Move, pages: Sequence[int], content: list[np.ndarray]) -> None:
        """Puts a loaded chunk into these pages; `content` is what must be in it."""
        self.kv_pages = self.mover.write(self.kv_pages, move, pages)
        for expected, values in zip(self.expected, content, strict=True):
            expected[list(pages)] = values

    @property
    def is_idle(self) -> bool:
        """Whether all that was begun has come out of `finished`."""
        mover = self.mover
        return not (mover._num_saving or mover._num_loading or mover._waiting_loads)

    def settle(self) -> list[Move]:
        """All moves that were begun, loaded chunks not written."""
        moves, end = [], time.monotonic() + TIMEOUT_S
        while not self.is_idle:
            assert time.monotonic() < end, "a move does not come out"
            moves += self.mover.finished()
            time.sleep(1e-4)
        return moves

    def check(self) -> None:
        for cache, expected in zip(self.kv_pages, self.expected, strict=True):
            np.testing.assert_array_equal(np.asarray(cache), expected)


@pytest.fixture
def make_caches() -> Iterator[Callable[..., Caches]]:
    made: list[Caches] = []

    def make(*args, **options) -> Caches:
        made.append(Caches(*args, **options))
        return made[-1]

    yield make
    for caches in made:
        caches.mover.shutdown()


@pytest.fixture
def caches(make_caches) -> Caches:
    return make_caches()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"])
def test_pages_come_back_as_they_were(make_caches, dtype):
    """13 pages: chunks of 8, 4 and 1. No other page is touched."""
    caches = make_caches(dtype)
    pages, slots = [*range(20, 9, -1), 1, 23], list(range(17, 30))
    before = caches.content(pages)
    caches.mover.save(caches.kv_pages, list(zip(pages, slots, strict=True)))
    caches.overwrite(pages)
    saved = caches.settle()
    assert [move.slots for move in saved] == [tuple(slots[:8]), tuple(slots[8:12]), (slots[12],)]
    assert all(move.kind == "saved" and move.error is None and move.seconds > 0 for move in saved)

    caches.mover.load(7, slots)
    loaded = caches.settle()
    assert [(move.kind, move.ticket, move.slots) for move in loaded] == [
        ("loaded", 7, tuple(slots[:8])),
        ("loaded", 7, tuple(slots[8:12])),
        ("loaded", 7, (slots[12],)),
    ]
    for move, part in zip(loaded, (slice(0, 8), slice(8, 12), slice(12, 13)), strict=True):
        caches.write(move, pages[part], [values[part] for values in before])
    caches.check()


def test_arrays_may_have_shapes_of_their_own(make_caches):
    """Nothing but axis 0 is known of them."""
    caches = make_caches()
    struct = caches.struct
    other = jax.ShapeDtypeStruct((NUM_PAGES, 2, 4), jnp.int8, sharding=struct.sharding)
    mover = PageMover([struct, other], num_host_pages=2, mesh=struct.sharding.mesh)
    mover.compile(NUM_PAGES)
    assert mover.page_bytes == 4 * prod(PAGE_SHAPE) + 8
    kv_pages = [jnp.ones(struct.shape, struct.dtype), jnp.ones(other.shape, other.dtype).at[3].set(5)]
    mover.save(kv_pages, [(3, 1)])
    mover.load(0, [1])
    end = time.monotonic() + TIMEOUT_S
    moves: list[Move] = []
    while len(moves) < 2 and time.monotonic() < end:
        moves += mover.finished()
    kv_pages = mover.write(kv_pages, moves[1], [9])
    assert (np.asarray(kv_pages[1])[9] == 5).all()
    mover.shutdown()


def test_a_page_is_saved_as_it_was_when_the_next_step_overwrote_it(caches):
    """Thousands of random rounds: saves, steps that overwrite at once with donation, loads, writes."""
    rng = np.random.default_rng(1)
    in_slot: dict[int, list[np.ndarray]] = {}
    loading: dict[int, list[int]] = {}  # slots that must not be saved to
    num_written = num_rounds_in_flight = 0
    for ticket in range(3000):
        busy = {slot for slots in loading.values() for slot in slots}
        pages = rng.permutation(np.arange(1, NUM_PAGES))[: rng.integers(1, 12)].tolist()
        free = [slot for slot in rng.permutation(NUM_SLOTS).tolist() if slot not in busy]
        moves = list(zip(pages, free, strict=False))
        caches.mover.save(caches.kv_pages, moves)
        for page, slot in moves:
            in_slot[slot] = [values[0] for values in caches.content([page])]
        caches.overwrite(pages)
        num_rounds_in_flight += not caches.kv_pages[0].is_ready()
        slots = [slot for slot in rng.permutation(NUM_SLOTS).tolist() if slot in in_slot and slot not in busy]
        if len(loading) < 3 and slots:
            loading[ticket] = slots[: rng.integers(1, 12)]
            caches.mover.load(ticket, loading[ticket])
        for move in caches.mover.finished():
            assert move.error is None
            if move.kind == "saved":
                continue
            pages = rng.permutation(np.arange(1, NUM_PAGES))[: move.num_pages].tolist()
            caches.write(move, pages, [np.stack(values) for values in zip(*map(in_slot.get, move.slots), strict=True)])
            num_written += move.num_pages
            if move.slots[-1] == loading[move.ticket][-1]:
                del loading[move.ticket]
        if ticket % 100 == 0:
            caches.check()
    assert num_written > 3000
    assert num_rounds_in_flight > 1000, "the steps end too soon to prove anything"
    caches.settle()
    caches.check()
    for slot, values in in_slot.items():
        for pool, value in zip(caches.mover._pools, values, strict=True):
            np.testing.assert_array_equal(pool[slot], value)


def test_a_load_sees_the_save_before_it(caches):
    before = caches.content([3])
    caches.mover.save(caches.kv_pages, [(5, 0)])
    caches.mover.save(caches.kv_pages, [(3, 0)])
    caches.mover.load(1, [0])
    caches.write(caches.settle()[-1], [8], before)
    caches.check()


def test_a_later_save_does_not_change_what_was_loaded(caches):
    """JAX may use the memory it is given, so it must not be the pool's."""
    before = caches.content([1, 2, 3, 4])
    caches.mover.save(caches.kv_pages, [(1, 0), (2, 1), (3, 2), (4, 3)])
    caches.mover.load(1, [0, 1, 2, 3])
    loaded = caches.settle()[-1]
    caches.mover.save(caches.kv_pages, [(5, 0), (6, 1), (7, 2), (8, 3)])
    caches.settle()
    caches.write(loaded, [9, 10, 11, 12], before)
    caches.check()


def test_a_save_that_failed_is_reported_and_its_slots_cannot_be_loaded(caches, monkeypatch):
    caches.mover.save(caches.kv_pages, [(1, 0), (2, 1), (3, 2)])
    caches.settle()

    def fail(*_):
        raise MemoryError("the host is full")

    with monkeypatch.context() as patch:
        patch.setattr(caches.mover, "_put", fail)
        caches.mover.save(caches.kv_pages, [(4, 1), (5, 3)])
        (saved,) = caches.settle()
    assert (saved.kind, saved.slots, saved.error) == ("saved", (1, 3), "MemoryError: the host is full")

    caches.mover.load(5, [0, 1, 2])  # Chunks of 2 and 1: what the first lacks does not harm the second.
    first, second = caches.settle()
    assert (first.slots, first.staging) == ((0, 1), [])
    assert first.error == "LookupError: no page has been saved to the host slots [1]"
    assert second.slots == (2,)
    caches.write(second, [20], caches.content([3]))

    caches.mover.save(caches.kv_pages, [(6, 1)])
    caches.mover.load(6, [1])
    caches.write(caches.settle()[-1], [21], caches.content([6]))
    caches.check()


def test_a_load_that_failed_is_reported_and_may_be_tried_again(caches, monkeypatch):
    caches.mover.save(caches.kv_pages, [(page, page) for page in range(1, 13)])
    caches.settle()

    def fail(slots):
        raise RuntimeError(f"no room for {len(slots)} pages")

    with monkeypatch.context() as patch:
        patch.setattr(caches.mover, "_get", fail)
        caches.mover.load(5, list(range(1, 13)))
        errors = [(move.num_pages, move.error) for move in caches.settle()]
    assert errors == [(8, "RuntimeError: no room for 8 pages"), (4, "RuntimeError: no room for 4 pages")]
    caches.mover.load(6, [1])
    caches.write(caches.settle()[-1], [21], caches.content([1]))
    caches.check()


def test_what_lies_on_the_device_is_bounded(make_caches, monkeypatch):
    """Loads are begun as they are taken away; saves beyond the bound leave the device before `save` returns."""
    caches = make_caches(max_staged_chunks=2)
    caches.mover.save(caches.kv_pages, [(1, slot) for slot in range(NUM_SLOTS)])
    assert caches.mover.max_staging_bytes == 2 * 2 * 8 * caches.mover.page_bytes
    caches.settle()
    num_got = []
    get = caches.mover._get
    monkeypatch.setattr(caches.mover, "_get", lambda slots: num_got.append(len(slots)) or get(slots))
    caches.mover.load(1, list(range(NUM_SLOTS)))
    time.sleep(0.2)
    assert num_got == [8, 8]
    assert sum(move.num_pages for move in caches.settle()) == NUM_SLOTS == sum(num_got)

    on_device = []
    release = threading.Event()

    def put(slots, parts):
        release.wait(TIMEOUT_S)
        on_device.append(isinstance(parts[0][1], Array))

    monkeypatch.setattr(caches.mover, "_put", put)
    caches.mover.save(caches.kv_pages, [(1, slot) for slot in range(NUM_SLOTS)])
    assert not caches.mover.finished()
    release.set()
    caches.settle()
    assert on_device == [True, True, False, False, False]


def test_nothing_waits_for_a_copy(caches, monkeypatch):
    """While a copy hangs, the calls of the thread that runs the steps return."""
    release = threading.Event()
    monkeypatch.setattr(caches.mover, "_put", lambda *_: release.wait(TIMEOUT_S))
    caches.mover.save(caches.kv_pages, [(1, 1), (2, 2)])
    caches.mover.load(1, [1, 2])
    caches.overwrite([1, 2])
    assert caches.mover.finished() == []
    assert not caches.is_idle
    caches.check()
    release.set()
    assert [move.kind for move in caches.settle()] == ["saved", "loaded"]


def test_shutdown_gives_up_what_has_not_begun(caches, monkeypatch):
    started, release, num_put = threading.Event(), threading.Event(), []

    def put(slots, parts):
        started.set()
        release.wait(TIMEOUT_S)
        num_put.append(len(slots))

    monkeypatch.setattr(caches.mover, "_put", put)
    caches.mover.save(caches.kv_pages, [(page, page) for page in range(1, 17)])
    assert started.wait(TIMEOUT_S)
    threading.Timer(0.1, release.set).start()
    caches.mover.shutdown()
    assert num_put == [8]


def test_nothing_is_compiled_once_service_has_begun(caches):
    names: list[str] = []

    def note(name: str, *_, **__) -> None:
        names.append(name)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        jax.jit(lambda x: x + 1)(np.zeros(3))
        assert "/jax/core/compile/backend_compile_duration" in names, "JAX does not tell any more"
        names.clear()
        for num_pages in range(1, 16):
            caches.mover.save(caches.kv_pages, [(page, page) for page in range(1, num_pages + 1)])
            caches.mover.load(1, list(range(1, num_pages + 1)))
            for move in caches.settle():
                if move.kind == "loaded":
                    caches.write(move, move.slots, caches.content(move.slots))
        assert not names
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    caches.check()


def test_a_write_copies_no_cache(make_caches):
    """In place: bfloat16 too, which XLA on CPU likes to convert as a whole."""
    caches = make_caches("bfloat16")
    moved = re.compile(r"= \w+\[([\d,]+)\]\S* (copy|transpose|convert|pad|concatenate)\(")
    for program in caches.mover._writers.values():
        assert program.memory_analysis().alias_size_in_bytes >= NUM_LAYERS * 2 * prod(caches.struct.shape)
        sizes = [prod(map(int, dims.split(","))) for dims, _ in moved.findall(program.as_text())]
        assert prod(caches.struct.shape) not in sizes


OVER_DEVICES = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxllm.engine.page_mover import PageMover

mesh = jax.make_mesh((1, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
sharding = NamedSharding(mesh, PartitionSpec(None, "model"))
struct = jax.ShapeDtypeStruct((12, 4, 8, 16), jnp.bfloat16, sharding=sharding)
mover = PageMover([struct] * 2, num_host_pages=9, mesh=mesh)
mover.compile(12)
rng = np.random.default_rng(0)
expected = [rng.standard_normal(struct.shape).astype(struct.dtype) for _ in range(2)]
kv_pages = [jax.device_put(pages.copy(), sharding) for pages in expected]
mover.save(kv_pages, [(page, 9 - page) for page in range(1, 10)])
mover.load(1, range(9))
results = {"errors": [], "devices": []}
while len(results["errors"]) < 4:  # Chunks of 8 and 1, there and back.
    for move in mover.finished(wait=True):
        results["errors"].append(move.error)
        if move.kind == "loaded":
            pages = [slot + 2 for slot in move.slots]
            kv_pages = mover.write(kv_pages, move, pages)
            results["devices"] += [len(array.sharding.device_set) for array in (*move.staging, *kv_pages)]
for pages, cache in zip(expected, kv_pages):
    pages[2:11] = pages[9:0:-1].copy()
    np.testing.assert_array_equal(np.asarray(cache), pages)
    assert cache.sharding == sharding
mover.shutdown()
print(json.dumps(results))
"""


def test_caches_that_are_split_over_devices_stay_split(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    result = subprocess.run([sys.executable, "-c", OVER_DEVICES], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    results = json.loads(result.stdout)
    assert results["errors"] == [None] * 4  # Chunks of 8 and 1, saved and loaded.
    assert set(results["devices"]) == {2}
