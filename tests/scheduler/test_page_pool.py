"""A page has the owners that the page table says, and what is cached is given up in the order of its freeing."""

import pytest

from jaxllm.scheduler.host_tier.host_slots import HostSlots
from jaxllm.scheduler.page_pool import PagePool
from jaxllm.scheduler.prefix_cache import PrefixCache


def make_pool(num_pages):
    cache = PrefixCache(page_size=4)
    return PagePool(num_pages, cache, HostSlots(0, 1)), cache


def know(cache, pages):
    cache.register([b"key of %d" % page for page in pages], pages)


def test_pages_are_distinct_and_never_the_null_page():
    pool, _ = make_pool(10)
    pages = pool.allocate(4) + pool.allocate(0) + pool.allocate(5)
    assert sorted(pages) == list(range(1, 10))
    assert pool.num_free_pages == 0
    pool.check_integrity(pages)


def test_freed_pages_come_back():
    pool, _ = make_pool(10)
    pages = pool.allocate(9)
    pool.free(pages[:3])
    assert sorted(pool.allocate(3)) == sorted(pages[:3])


def test_a_failed_allocation_changes_nothing():
    pool, cache = make_pool(6)
    pages = pool.allocate(3)
    know(cache, pages)
    pool.free(pages[:2])
    with pytest.raises(AssertionError, match="5 pages wanted, 4 free"):
        pool.allocate(5)
    assert (pool.num_free_pages, pool.num_cached_pages) == (4, 2)
    assert all(page in cache for page in pages)
    pool.check_integrity(pages[2:])


def test_eviction_takes_blank_pages_first_then_the_longest_freed_then_tails_before_heads():
    pool, cache = make_pool(9)
    first, second = pool.allocate(3), pool.allocate(3)
    know(cache, first + second)
    pool.free(second)
    pool.free(first)
    assert pool.num_cached_pages == 6
    blank = pool.allocate(2)
    assert not set(blank) & {*first, *second}
    order = [pool.allocate(1)[0] for _ in range(6)]
    assert order == [*reversed(second), *reversed(first)]
    pool.check_integrity(blank + order)


def test_a_page_reused_loses_its_hash():
    pool, cache = make_pool(2)
    pages = pool.allocate(1)
    know(cache, pages)
    pool.free(pages)
    assert pages[0] in cache
    assert pool.allocate(1) == pages
    assert pages[0] not in cache
    pool.check_integrity(pages)


def test_a_shared_page_is_free_when_its_last_owner_has_freed_it():
    pool, cache = make_pool(4)
    pages = pool.allocate(2)
    know(cache, pages)
    for _ in range(2):
        pool.share(pages)
    assert [pool.num_freed(pages * times, []) for times in (1, 2, 3)] == [0, 0, 2]
    assert pool.num_freed(pages * 3, pages[:1]) == 1
    for num_owners in (3, 2, 1):
        pool.check_integrity(pages * num_owners)
        assert pool.num_free_pages == 1
        pool.free(pages)
    assert pool.num_free_pages == 3
    assert pool.num_unowned(pages) == 2
    pool.share(pages)
    assert (pool.num_free_pages, pool.num_cached_pages) == (1, 0)
    pool.check_integrity(pages)


def test_forgotten_pages_are_blank_when_nobody_owns_them():
    pool, cache = make_pool(6)
    owned, free = pool.allocate(2), pool.allocate(2)
    know(cache, owned + free)
    pool.free(free)
    pool.forget_cached([owned[0], free[0]])
    assert (pool.num_free_pages, pool.num_cached_pages) == (3, 1)
    pool.check_integrity(owned)
    pool.forget_cached()
    assert not cache.pages
    pool.free(owned)
    assert (pool.num_free_pages, pool.num_cached_pages) == (5, 0)
    pool.check_integrity([])


def test_integrity_notices_lost_shared_and_doubly_freed_pages():
    pool, _ = make_pool(6)
    pages = pool.allocate(2)
    pool.check_integrity(pages)
    for owned in (pages[:1], [*pages, pages[0]], [*pages, 0]):
        with pytest.raises(AssertionError):
            pool.check_integrity(owned)
    pool.free(pages)
    pool.free(pages)
    with pytest.raises(AssertionError):
        pool.check_integrity([])
