"""No page is handed out twice, and never the null page."""

import pytest

from jaxllm.scheduler import PagePool


def test_pages_are_distinct_and_never_the_null_page():
    pool = PagePool(10)
    pages = pool.allocate(4) + pool.allocate(0) + pool.allocate(5)
    assert sorted(pages) == list(range(1, 10))
    assert pool.num_free_pages == 0


def test_freed_pages_come_back():
    pool = PagePool(10)
    pages = pool.allocate(9)
    pool.free(pages[:3])
    assert sorted(pool.allocate(3)) == sorted(pages[:3])


def test_more_than_there_are_is_our_own_mistake():
    pool = PagePool(4)
    with pytest.raises(AssertionError, match="4 pages wanted, 3 free"):
        pool.allocate(4)


def test_integrity_notices_lost_shared_and_doubly_freed_pages():
    pool = PagePool(6)
    pages = pool.allocate(2)
    pool.check_integrity(pages)
    for owned in (pages[:1], [*pages, pages[0]], [*pages, 0]):
        with pytest.raises(AssertionError):
            pool.check_integrity(owned)
    pool.free(pages)
    pool.free(pages)
    with pytest.raises(AssertionError):
        pool.check_integrity([])
