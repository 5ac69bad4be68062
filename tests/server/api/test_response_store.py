"""Which responses are kept, for how long and for whom."""

import subprocess
import sys
from pathlib import Path

import pytest

from jaxllm.server.api.response_store import ResponseStore, StoredResponse


def stored(name: str, text: str = "") -> StoredResponse:
    return StoredResponse(response={"id": name, "text": text}, messages=[{"role": "user", "content": "é🌧"}])


@pytest.fixture(params=["in memory", "shared"])
def make_store(request, tmp_path):
    """Makes stores, which are closed in the end."""
    stores = []

    def make(max_responses: int, **options: int) -> ResponseStore:
        stores.append(ResponseStore(max_responses, tmp_path if request.param == "shared" else None, **options))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def test_a_response_comes_back_as_it_was(make_store):
    store = make_store(2)
    store.put("", stored("a"))
    assert store.get("", "a") == stored("a")
    assert store.get("", "b") is None


def test_the_least_recently_used_makes_room(make_store):
    store = make_store(2)
    for name in ("a", "b"):
        store.put("", stored(name))
    store.get("", "a")
    store.put("", stored("c"))
    assert [store.get("", name) is not None for name in "abc"] == [True, False, True]
    assert len(store) == 2


def test_a_response_takes_the_place_of_an_earlier_state_of_itself(make_store):
    store = make_store(2)
    for text in ("one", "two", "three"):
        store.put("", stored("a", text))
    store.put("", stored("b"))
    assert store.get("", "a") == stored("a", "three")
    assert len(store) == 2


def test_no_tenant_pushes_out_what_is_anothers(make_store):
    store = make_store(2, max_bytes=10_000)
    store.put("quiet", stored("a"))
    for number in range(5):
        store.put("busy", stored(f"r{number}"))
    assert (len(store), store.get("busy", "r4") is not None) == (3, True)
    for number in range(5):  # Nor by their size: who takes most gives up its own.
        store.put("busy", stored(f"large{number}", "x" * 6_000))
    assert store.get("quiet", "a") == stored("a")
    assert store.get("busy", "large4") is not None
    assert store.delete("quiet", "a")
    assert len(store) == 1


def test_their_bytes_are_bounded(make_store):
    store = make_store(100, max_bytes=10_000)
    for number in range(20):
        store.put("", stored(f"r{number}", "x" * 1_000))
    assert 5 <= len(store) <= 9
    assert store.get("", "r19") is not None
    assert store.get("", "r0") is None
    store.put("", stored("huge", "x" * 20_000))
    assert store.get("", "huge") is None
    assert len(store) == 0


def test_a_tenant_finds_only_its_own(make_store):
    store = make_store(4)
    store.put("one", stored("a", "of one"))
    store.put("two", stored("a", "of two"))
    assert store.get("one", "a") == stored("a", "of one")
    assert store.get("", "a") is None
    assert not store.delete("three", "a")
    assert store.delete("two", "a")
    assert not store.delete("two", "a")
    assert store.get("one", "a") is not None


def test_a_full_disk_costs_what_is_new_and_nothing_more(make_store, caplog):
    store = make_store(10)
    assert store.put("", stored("a"))
    (num_pages,) = store._run("PRAGMA page_count")
    store._run(f"PRAGMA max_page_count = {num_pages}")  # which SQLite reports as it does a full disk
    assert not store.put("", stored("b", "x" * 100_000))
    assert "could not be kept" in caplog.text
    assert store.get("", "a") == stored("a")
    assert store.get("", "b") is None
    assert store.delete("", "a")


def test_none_are_kept_where_none_may_be(make_store):
    store = make_store(0)
    store.put("", stored("a"))
    assert store.get("", "a") is None


def test_workers_with_a_folder_see_the_same(tmp_path: Path):
    one, other = ResponseStore(2, tmp_path), ResponseStore(2, tmp_path)
    one.put("", stored("a"))
    assert other.get("", "a") == stored("a")
    assert other.delete("", "a")
    assert one.get("", "a") is None
    program = (
        "import sys, pathlib\n"
        "from jaxllm.server.api.response_store import ResponseStore, StoredResponse\n"
        "store = ResponseStore(50, pathlib.Path(sys.argv[1]))\n"
        "for number in range(100):\n"
        "    store.put('', StoredResponse(response={'id': f'{sys.argv[2]}-{number}'}, messages=[]))\n"
    )
    workers = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path), name]) for name in ("x", "y")]
    assert [worker.wait(60) for worker in workers] == [0, 0]
    shared = ResponseStore(50, tmp_path)
    assert len(shared) == 50
    for store in (one, other, shared):
        store.close()
