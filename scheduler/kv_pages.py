"""The pages of the running rows: taking, sharing, and giving back."""

from collections.abc import Sequence

import numpy as np

from jaxllm.scheduler.config import SchedulerConfig
from jaxllm.scheduler.host_tier.host_slots import HostSlots
from jaxllm.scheduler.host_tier.page_loads import HostPrefix, PageLoads
from jaxllm.scheduler.page_pool import PagePool
from jaxllm.scheduler.prefix_cache import PrefixCache
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.running_table import RunningTable
from jaxllm.scheduler.windows import num_left_pages


class KVPages:
    """Moves pages between the pool, the prefix cache and the page table of the running rows.

    Where pages of several groups of layers stand in one list, they go page by page, and group by group within; 0
    stands for one that left its group's window.
    """

    def __init__(self, config: SchedulerConfig, table: RunningTable) -> None:
        self.cache = PrefixCache(config.page_size, config.enable_prefix_caching, config.windows)
        self.host_slots = HostSlots(config.num_host_pages, config.max_saving_pages)
        self.pool = PagePool(config.num_pages, self.cache, self.host_slots)
        self.loads = PageLoads(self.pool, self.cache, self.host_slots)
        self._config = config
        self._page_size = config.page_size
        self._num_groups = config.num_groups
        sizes = sorted({window for window in config.windows if window is not None})
        self._windows = [
            (size, np.array([group for group, window in enumerate(config.windows) if window == size])) for size in sizes
        ]
        self.num_left_pages = 0
        self._table = table
        self._coming: set[bytes] = set()  # keys of pages that a row will have computed soon

    @property
    def num_free_pages(self) -> int:
        return self.pool.num_free_pages

    @property
    def num_growths(self) -> int:
        """How often a row can get one more page in each group."""
        return self.pool.num_free_pages // self._num_groups

    def prepare(self, request: Request) -> None:
        """Hashes the prompt of a request that has arrived, so that no step has to wait for it."""
        if self.cache.serves(request):
            self.cache.keys(request)

    def leave_windows(self) -> None:
        """Frees the pages that nothing after the launched steps will see. Call it between the batch of one step and the
        plan of the next. A row whose drafts are being verified waits for what comes of them."""
        table = self._table
        for window, groups in self._windows:
            first_R = num_left_pages(table.num_computed_tokens, window, self._page_size)
            if table.num_verifying:
                first_R[table.is_verifying] = 0
            rows = (first_R > table.first_page[groups[0]]).nonzero()[0]
            if rows.size:
                self._register_full(rows)
                pages = table.leave_pages(groups, rows, first_R[rows])
                self.num_left_pages += len(pages)
                self.pool.free(pages)

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
        num_pages = len(pages) // self._num_groups
        if self._coming and num_pages < (request.num_tokens - 1) // self._page_size:
            return None if request.page_keys[num_pages] in self._coming else pages
        return pages

    def on_host(self, request: Request, shared_pages: Sequence[int]) -> HostPrefix | None:
        """What the host has of the request's prefix beyond the pages that it would share; None if nothing."""
        if not len(self.host_slots) or not self.cache.serves(request):
            return None
        keys = self.cache.longest_prefix(request, self.host_slots)
        num_new_pages = (len(keys) - len(shared_pages)) // self._num_groups
        if num_new_pages <= 0:
            return None
        found = [page for key in keys if key and (page := self.cache.page_of(key)) is not None]
        missing = [key for key in keys if key and self.cache.page_of(key) is None]
        return HostPrefix(num_new_pages, found, missing, self.host_slots.slots_of(missing))

    def begin_load(self, request: Request, prefix: HostPrefix, shared_pages: Sequence[int]) -> None:
        """Begins to bring back what the host has, and reserves what the request lacks beyond. Where there is room for
        all of the request there is for this. Those who begin alike wait for it too."""
        num_taken = len(prefix.slots) + self.pool.num_unowned(prefix.found_pages)
        num_rest = self.num_missing(request, shared_pages) - num_taken
        assert num_rest >= 0, "a prefix has more pages than the request"
        self.loads.begin(request, prefix, num_rest)
        self._coming.update(request.page_keys)

    def num_missing(self, request: Request, shared_pages: Sequence[int]) -> int:
        """The most free pages that the request takes up when it is admitted, until all its tokens are computed."""
        num_unowned = self.pool.num_unowned(shared_pages) if shared_pages else 0
        if not self._windows:
            num_spanned = -(-request.num_tokens // self._page_size)
            return num_spanned * self._num_groups - len(shared_pages) + num_unowned
        num_new = self._config.num_pages_for(request.num_tokens, len(shared_pages) // self._num_groups)
        return min(num_new + num_unowned, self._config.num_pages_for(request.num_tokens))

    def num_lacking(self, row: int) -> int:
        """The most free pages that a row takes up until all its tokens are computed."""
        table = self._table
        num_held = table.num_pages.item(row) * self._num_groups - int(table.first_page[:, row].sum())
        return max(0, self._config.num_pages_for(table.num_total_tokens.item(row)) - num_held)

    def admit(self, row: int, request: Request, shared_pages: Sequence[int], num_tokens: int) -> None:
        """The row of an admitted request begins with pages of others, which count as computed, and gets what it lacks
        to hold `num_tokens` tokens."""
        table, num_shared = self._table, len(shared_pages) // self._num_groups
        if num_shared:
            self.pool.share(shared_pages)
            table.append_pages(row, shared_pages)
            table.num_computed_tokens[row] = num_shared * self._page_size
            table.num_registered_pages[row] = num_shared
            for window, groups in self._windows:
                num_left = num_left_pages(num_shared * self._page_size, window, self._page_size)
                table.first_page[groups, row] = max(0, num_left)
        table.append_pages(row, self._allocate(-(-num_tokens // self._page_size) - num_shared))
        if self.cache.serves(request):
            self.cache.count(table.num_tokens.item(row), num_shared)
            self._expect(request, num_shared)

    def grow(self, row: int, num_tokens: int) -> None:
        """Gives a row the pages that it lacks to hold `num_tokens` tokens."""
        num_pages = -(-num_tokens // self._page_size) - self._table.num_pages.item(row)
        if num_pages > 0:
            self._table.append_pages(row, self._allocate(num_pages))

    def grow_by_one(self, rows: np.ndarray) -> None:
        """Gives each of these rows (int[M], distinct) one more page in each group."""
        self._table.append_page(rows, self._allocate(len(rows)))

    def _allocate(self, num_pages: int) -> list[int]:
        """So many pages in each group."""
        return self.pool.allocate(num_pages * self._num_groups)

    def shrink(self, row: int, num_tokens: int) -> None:
        """Takes the pages of a row that `num_tokens` tokens do not need."""
        num_pages = int(self._table.num_pages[row]) - -(-num_tokens // self._page_size)
        if num_pages > 0:
            self.pool.free(self._table.pop_pages(row, num_pages))

    def release(self, rows: np.ndarray) -> None:
        """Takes rows (int[M], distinct) and their pages from their requests."""
        self._register_full(rows)
        for row_pages in self._table.release(rows):
            self.pool.free(row_pages)

    def num_freed_by(self, rows: Sequence[int], kept_pages: Sequence[int]) -> int:
        """Pages other than `kept_pages` that are free when these rows give up their own."""
        pages = self._table.page_table[:, rows]
        return self.pool.num_freed(pages[pages > 0].tolist(), kept_pages)

    def forget(self, request: Request) -> None:
        """What was computed for a request is found by nobody any more, wherever it lies."""
        keys = self.cache.own_keys(request.page_keys)
        self.pool.forget_cached([page for key in keys if (page := self.cache.page_of(key)) is not None])
        self.host_slots.forget(keys)

    def forget_all(self) -> None:
        """Nothing that was computed is found any more, on the device or on the host."""
        self.pool.forget_cached()
        self.host_slots.forget()

    def _register_full(self, rows: np.ndarray) -> None:
        """Makes known the full pages of these rows (int[M], distinct)."""
        if not self.cache.is_enabled:
            return
        num_full_M = self._table.num_full_pages(rows)
        is_more_M = num_full_M > self._table.num_registered_pages[rows]
        if is_more_M.any():
            self._register(rows[is_more_M], num_full_M[is_more_M])

    def _register(self, rows: np.ndarray, num_full_pages: np.ndarray) -> None:
        """Makes known the first pages of these rows (int[M], distinct), so many (int[M]) each."""
        table, cache = self._table, self.cache
        firsts, ends = table.num_registered_pages[rows].tolist(), num_full_pages.tolist()
        requests, low, high = table.requests_of(rows), min(firsts), max(ends)
        serving = [
            (index, cache.keys(request)[first:end], slice(first - low, end - low))
            for index, (request, first, end) in enumerate(zip(requests, firsts, ends, strict=True))
            if cache.serves(request)
        ]
        for group, page_table_RP in enumerate(table.group_tables):
            pages_of_rows = page_table_RP[rows, low:high].tolist()
            for index, keys, part in serving:
                cache.register(keys, pages_of_rows[index][part], group)
        table.num_registered_pages[rows] = num_full_pages

    def _expect(self, request: Request, num_known_pages: int) -> None:
        """A row is going to compute the pages of a request that come after these."""
        if self.cache.serves(request) and len(request.page_keys) > num_known_pages:
            self._coming.update(request.page_keys[num_known_pages:])

    def check_integrity(self) -> None:
        """Asserts that each page is owned by whom the page table says. For tests."""
        self.pool.check_integrity([*self._table.owned_pages, *self.loads.owned_pages])
        self.loads.check_integrity()
        self.host_slots.check_integrity()
