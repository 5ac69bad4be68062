"""The pages of the running rows: taking, sharing, and giving back."""

from collections.abc import Sequence

import numpy as np

from jaxllm.scheduler.config import SchedulerConfig
from jaxllm.scheduler.page_pool import PagePool
from jaxllm.scheduler.prefix_cache import PrefixCache
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.running_table import RunningTable


class KVPages:
    """Moves pages between the pool, the prefix cache and the page table of the running rows."""

    def __init__(self, config: SchedulerConfig, table: RunningTable) -> None:
        self.cache = PrefixCache(config.page_size, config.enable_prefix_caching)
        self.pool = PagePool(config.num_pages, self.cache)
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
        """Makes known what launched steps have computed, and what the row amid its prompt is going to
        compute."""
        self._coming.clear()
        if not self.cache.is_enabled:
            return
        table = self._table
        num_full_R = table.num_full_pages()
        rows = (num_full_R > table.num_registered_pages).nonzero()[0]
        for row, num_full_pages in zip(rows.tolist(), num_full_R[rows].tolist(), strict=True):
            self._register(row, num_full_pages)
        if reading_row is not None and table.requests[reading_row] is not None:
            self._expect(reading_row)

    def match(self, request: Request) -> list[int] | None:
        """The cached pages that the request would share; None if more of them will be there in a few steps."""
        pages = self.cache.match(request)
        if self._coming and self.cache.serves(request):
            keys, most = request.page_keys, (request.num_tokens - 1) // self._page_size
            if len(pages) < most and keys[len(pages)] in self._coming:
                return None
        return pages

    def num_missing(self, request: Request, shared_pages: Sequence[int]) -> int:
        """Free pages that the request takes up when it is admitted, for all its tokens."""
        num_pages = -(-request.num_tokens // self._page_size)
        return num_pages - len(shared_pages) + self.pool.num_unowned(shared_pages) if shared_pages else num_pages

    def admit(self, row: int, request: Request, shared_pages: Sequence[int]) -> None:
        """The row of an admitted request begins with pages of others, which count as computed."""
        table, num_pages = self._table, len(shared_pages)
        self.cache.count(request, num_pages)
        if num_pages:
            self.pool.share(shared_pages)
            table.append_pages(row, shared_pages)
            table.num_computed_tokens[row] = num_pages * self._page_size
            table.num_registered_pages[row] = num_pages
        if self.cache.is_enabled:
            self._expect(row)

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

    def release(self, row: int, *, is_sound: bool = True) -> None:
        """Takes the row and its pages from its request. Others will not find pages that are not sound."""
        table = self._table
        if not is_sound:
            self.pool.forget_cached(table.page_table[row, : table.num_pages[row]].tolist())
        elif self.cache.is_enabled:
            num_full = min(table.num_tokens.item(row), table.num_computed_tokens.item(row)) // self._page_size
            if num_full > table.num_registered_pages.item(row):
                self._register(row, num_full)
        self.pool.free(table.release(row))

    def num_freed_by(self, row: int) -> int:
        """Pages that are free when this row gives up its own."""
        return self.pool.num_sole(self._table.page_table[row, : self._table.num_pages[row]].tolist())

    def _register(self, row: int, num_full_pages: int) -> None:
        table, request = self._table, self._table.requests[row]
        if self.cache.serves(request):
            first = table.num_registered_pages.item(row)
            pages = table.page_table[row, first:num_full_pages].tolist()
            self.cache.register(self.cache.keys(request)[first:num_full_pages], pages)
        table.num_registered_pages[row] = num_full_pages

    def _expect(self, row: int) -> None:
        request = self._table.requests[row]
        if self.cache.serves(request):
            self._coming.update(request.page_keys[self._table.num_registered_pages.item(row) :])

    def check_integrity(self) -> None:
        """Asserts that each page is owned by whom the page table says. For tests."""
        self.pool.check_integrity(self._table.owned_pages)
