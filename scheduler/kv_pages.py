"""The pages of the running rows: taking, sharing, and giving back."""

from collections.abc import Sequence

import numpy as np

from jaxllm.scheduler.config import SchedulerConfig
from jaxllm.scheduler.page_loads import PageLoads
from jaxllm.scheduler.page_pool import PagePool
from jaxllm.scheduler.page_tiers import PageTiers
from jaxllm.scheduler.prefix_cache import PrefixCache
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.running_table import RunningTable


class KVPages:
    """Moves pages between the pool, the prefix cache and the page table of the running rows."""

    def __init__(self, config: SchedulerConfig, table: RunningTable) -> None:
        self.cache = PrefixCache(config.page_size, config.enable_prefix_caching)
        self.tiers = PageTiers(config.num_host_pages, config.max_saving_pages)
        self.pool = PagePool(config.num_pages, self.cache, self.tiers)
        self.loads = PageLoads(self.pool, self.cache, self.tiers)
        self._page_size = config.page_size
        self._table = table
        self._coming: set[bytes] = set()  # keys of pages that a row will have computed soon

    @property
    def num_free_pages(self) -> int:
        return self.pool.num_free_pages

    def prepare(self, request: Request) -> None:
        """Hashes the prompt of a request that has arrived, so that no step has to wait for it."""
        if self.cache.serves(request):
            self.cache.keys(request)

    def begin_admissions(self, reading_row: int | None) -> None:
        """Makes known what launched steps have computed, and what the row amid its prompt is going to compute or
        comes from the host."""
        self._coming.clear()
        if not self.cache.is_enabled:
            return
        table = self._table
        num_full_R = table.num_full_pages()
        rows = (num_full_R > table.num_registered_pages).nonzero()[0]
        if rows.size:
            self._register(rows, num_full_R[rows])
        self._coming.update(self.loads.coming_keys)
        if reading_row is not None and table.requests[reading_row] is not None:
            self._expect(table.requests[reading_row], table.num_registered_pages.item(reading_row))

    def match(self, request: Request) -> list[int] | None:
        """The cached pages that the request would share; None if more of them will be there in a few steps."""
        if not self.cache.serves(request):
            return []
        pages = self.cache.match(request)
        if self._coming and len(pages) < (request.num_tokens - 1) // self._page_size:
            return None if request.page_keys[len(pages)] in self._coming else pages
        return pages

    def slots_behind(self, request: Request, shared_pages: Sequence[int]) -> list[int]:
        """Where the host has the pages of the request that follow those it would share."""
        if not len(self.tiers) or not self.cache.serves(request):
            return []
        most = (request.num_tokens - 1) // self._page_size
        return self.tiers.find(request.page_keys[len(shared_pages) : most])

    def begin_load(self, request: Request, shared_pages: Sequence[int], slots: Sequence[int]) -> None:
        """Begins to bring back what the host has, behind the shared pages. Those who begin alike wait for it too."""
        self.loads.begin(request, shared_pages, slots)
        self._coming.update(request.page_keys[len(shared_pages) : len(shared_pages) + len(slots)])

    def num_missing(self, request: Request, shared_pages: Sequence[int]) -> int:
        """Free pages that the request takes up when it is admitted, for all its tokens."""
        num_pages = -(-request.num_tokens // self._page_size)
        return num_pages - len(shared_pages) + self.pool.num_unowned(shared_pages) if shared_pages else num_pages

    def admit(self, row: int, request: Request, shared_pages: Sequence[int], num_tokens: int) -> None:
        """The row of an admitted request begins with pages of others, which count as computed, and gets what it lacks
        to hold `num_tokens` tokens."""
        table, num_shared = self._table, len(shared_pages)
        if num_shared:
            self.pool.share(shared_pages)
            table.append_pages(row, shared_pages)
            table.num_computed_tokens[row] = num_shared * self._page_size
            table.num_registered_pages[row] = num_shared
        table.append_pages(row, self.pool.allocate(-(-num_tokens // self._page_size) - num_shared))
        if self.cache.serves(request):
            self.cache.count(table.num_tokens.item(row), num_shared)
            self._expect(request, num_shared)

    def grow(self, row: int, num_tokens: int) -> None:
        """Gives a row the pages that it lacks to hold `num_tokens` tokens."""
        num_pages = -(-num_tokens // self._page_size) - self._table.num_pages.item(row)
        if num_pages > 0:
            self._table.append_pages(row, self.pool.allocate(num_pages))

    def grow_by_one(self, rows: np.ndarray) -> None:
        """Gives each of these rows (int[M], distinct) one more page."""
        self._table.append_page(rows, self.pool.allocate(len(rows)))

    def shrink(self, row: int, num_tokens: int) -> None:
        """Takes the pages of a row that `num_tokens` tokens do not need."""
        num_pages = int(self._table.num_pages[row]) - -(-num_tokens // self._page_size)
        if num_pages > 0:
            self.pool.free(self._table.pop_pages(row, num_pages))

    def release(self, rows: np.ndarray, *, is_sound: bool = True) -> None:
        """Takes rows (int[M], distinct) and their pages from their requests. Others will not find pages that are not
        sound."""
        table = self._table
        if not is_sound:
            pages = table.page_table[rows]
            self.pool.forget_cached(pages[pages > 0].tolist())
            self.tiers.forget(key for request in table.requests_of(rows) for key in request.page_keys)
        elif self.cache.is_enabled:
            num_full_M = table.num_full_pages(rows)
            is_more_M = num_full_M > table.num_registered_pages[rows]
            if is_more_M.any():
                self._register(rows[is_more_M], num_full_M[is_more_M])
        for row_pages in table.release(rows):
            self.pool.free(row_pages)

    def num_freed_by(self, rows: Sequence[int], kept_pages: Sequence[int]) -> int:
        """Pages other than `kept_pages` that are free when these rows give up their own."""
        pages = self._table.page_table[rows]
        return self.pool.num_freed(pages[pages > 0].tolist(), kept_pages)

    def forget_all(self) -> None:
        """Nothing that was computed is found any more, on the device or on the host."""
        self.pool.forget_cached()
        self.tiers.forget()

    def _register(self, rows: np.ndarray, num_full_pages: np.ndarray) -> None:
        """Makes known the first pages of these rows (int[M], distinct), so many (int[M]) each."""
        table, cache = self._table, self.cache
        firsts, ends = table.num_registered_pages[rows].tolist(), num_full_pages.tolist()
        tables = table.page_table[rows, : max(ends)].tolist()
        for request, first, end, pages in zip(table.requests_of(rows), firsts, ends, tables, strict=True):
            if cache.serves(request):
                cache.register(cache.keys(request)[first:end], pages[first:end])
        table.num_registered_pages[rows] = num_full_pages

    def _expect(self, request: Request, num_known_pages: int) -> None:
        """A row is going to compute the pages of a request that come after these."""
        if self.cache.serves(request) and len(request.page_keys) > num_known_pages:
            self._coming.update(request.page_keys[num_known_pages:])

    def check_integrity(self) -> None:
        """Asserts that each page is owned by whom the page table says. For tests."""
        self.pool.check_integrity([*self._table.owned_pages, *self.loads.owned_pages])
        self.loads.check_integrity()
        self.tiers.check_integrity()
