"""The running requests as arrays: one row each."""

from collections import Counter
from collections.abc import Sequence
from typing import cast

import numpy as np

from jaxllm.scheduler.config import SchedulerConfig
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.sampling_row import SamplingRow
from jaxllm.scheduler.windows import num_left_pages, num_window_pages

_STOP_BITS = 0xFFFF
_NO_PRIORITY = np.iinfo(np.int64).min


class RunningTable:
    """A structure of arrays over R = max_num_seqs rows.

    A running request owns one row, which never moves while it runs; the device keeps its own state of the
    request under the same number. What most requests do in most steps, gaining a token, is a vector
    operation here.

    A row's tokens are the `num_tokens` that the host knows and, behind them, those that launched steps sample
    and only the device knows yet, the pending ones; `num_total_tokens` counts both. The first
    `num_computed_tokens` of them have their keys and values in the row's pages once the launched steps have run;
    the rest is what the row wants:

        in its prompt             │ computed │          wanted │
        decoding                  │ computed           │ wanted │   its last known token
        decoding, host one ahead  │ computed           │ wanted │   its last token, which is pending
        verifying drafts          │ computed                    │   nothing, until the step's result is known

    token_ids: int32[R, max_model_len], the known tokens and, behind them, drafts. Memory that no request reached
        was never touched.
    num_tokens, num_total_tokens, num_computed_tokens: int32[R].
    max_total_tokens: int32[R], prompt and output may not be longer.
    num_draft_tokens: int32[R], drafts behind the known tokens, to be verified in the next step.
    is_verifying: bool[R], whether a launched step verifies drafts of the row.
    page_table: int32[G, R, P], the pages of each row in each group of layers; the null page 0 after them, and in
        place of those that left the group's window.
    group_tables: the same for each group, int32[R, P]: views.
    num_pages: int32[R], pages that the row spans in each group, since all groups hold the same tokens.
    first_page: int32[G, R], how many of them left the group's window. Groups of one window are alike.
    has_windows: whether any group has one.
    num_slots: int32[R], tokens that the pages hold.
    num_registered_pages: int32[R], of the first pages: those that the prefix cache was told of.
    sampling: int32[F, R+1], the bits of each row's `SamplingRow`, one setting after the other. The last column is that
        of padding rows.
    tenant: int64[R], the tenant's number.
    priority: int64[R]; the least there is for a free row.
    released_at: int64[R], the `step_number` at which a request left the row last.
    step_number: counts plans. Each plan has its number; a row has changed hands if its `released_at` is that or a
        later one.
    requests: object[R], who owns each row, or None. The numbers of a free row are 0.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        num_rows = config.max_num_seqs
        self.num_rows = num_rows
        self._config = config
        self._page_size = config.page_size
        self.token_ids = np.zeros((num_rows, config.max_model_len), np.int32)
        self.flat_token_ids = self.token_ids.reshape(-1)
        self.first_token_index = np.arange(num_rows) * config.max_model_len
        self._counters = np.zeros((8, num_rows), np.int32)  # all that a row without a request has none of
        self.num_tokens, self.num_total_tokens, self.num_computed_tokens, self.max_total_tokens = self._counters[:4]
        self.num_pages, self.num_slots, self.num_registered_pages, self.num_draft_tokens = self._counters[4:]
        self.is_verifying = np.zeros(num_rows, bool)
        self.num_groups = config.num_groups
        self.page_table = np.zeros((config.num_groups, num_rows, config.max_pages_per_seq), np.int32)
        self.group_tables = list(self.page_table)
        self.first_page = np.zeros((config.num_groups, num_rows), np.int32)
        self.has_windows = any(config.windows)
        self.sampling = np.repeat(SamplingRow().bits[:, None], num_rows + 1, axis=1)
        self.tenant = np.zeros(num_rows, np.int64)
        self.priority = np.full(num_rows, _NO_PRIORITY)
        self.released_at = np.full(num_rows, -1, np.int64)
        self.step_number = 0
        self.last_release = -1
        self.num_verifying = 0
        self.requests = np.full(num_rows, None, object)
        self._num_stops: dict[int, int] = {}  # requests that a token with these low bits may stop
        self._is_stop = np.zeros(_STOP_BITS + 1, bool)
        self._free_rows = list(range(num_rows - 1, -1, -1))  # a stack; low numbers first

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def num_pending_tokens(self) -> np.ndarray:
        """int32[R]"""
        return self.num_total_tokens - self.num_tokens

    @property
    def running_requests(self) -> list[Request]:
        """Those that own a row."""
        return [request for request in self.requests if request is not None]

    def requests_of(self, rows: np.ndarray) -> list[Request]:
        """The owners of these rows (int[M]), none of which is free."""
        return cast(list[Request], self.requests[rows].tolist())

    def admit(self, request: Request, tenant: int = 0) -> int:
        """Gives the request a free row, which takes over its tokens. Returns the row."""
        row = self._free_rows.pop()
        num_tokens = request.num_tokens
        first = row * self.token_ids.shape[1]
        self.flat_token_ids[first : first + num_tokens] = request.token_ids
        self.num_tokens[row] = self.num_total_tokens[row] = num_tokens
        self.max_total_tokens[row] = self._config.max_total_tokens(request.num_prompt_tokens, request.max_tokens)
        self.sampling[:, row] = request.sampling.bits
        self.tenant[row] = tenant
        self.priority[row] = request.priority
        for token_id in request.stop_token_ids:
            bits = token_id & _STOP_BITS
            self._num_stops[bits] = self._num_stops.get(bits, 0) + 1
            self._is_stop[bits] = True
        self.requests[row] = request
        request.attach(self, row)
        return row

    def release(self, rows: np.ndarray) -> list[list[int]]:
        """Takes rows (int[M], distinct) from their requests, which get their known tokens back. Returns the pages of
        each row, the beginnings of all groups first."""
        num_pages = self.num_pages[rows].tolist()
        most = max(num_pages)
        pages = self._by_page(rows, 0, most)
        for request in self.requests_of(rows):
            request.detach()
            for token_id in request.stop_token_ids:
                bits = token_id & _STOP_BITS
                number = self._num_stops.pop(bits) - 1
                if number:
                    self._num_stops[bits] = number
                else:
                    self._is_stop[bits] = False
        for table in self.group_tables:
            table[rows, :most] = 0
        if self.has_windows:
            self.first_page[:, rows] = 0
        self._counters[:, rows] = 0
        if self.num_verifying:
            self.num_verifying -= int(np.count_nonzero(self.is_verifying[rows]))
            self.is_verifying[rows] = False
        self.priority[rows] = _NO_PRIORITY
        self.released_at[rows] = self.last_release = self.step_number
        self.requests[rows] = None
        self._free_rows += rows.tolist()
        if self.has_windows:
            return [[page for page in row_pages if page] for row_pages in pages]
        return [row_pages[: number * self.num_groups] for row_pages, number in zip(pages, num_pages, strict=True)]

    def known_token_ids(self, row: int) -> np.ndarray:
        """int32[num_tokens]: a view of the row's tokens that the host knows."""
        return self.token_ids[row, : self.num_tokens.item(row)]

    def is_decoding(self, row: int) -> bool:
        """Whether the row has caught up with its tokens but for the last one."""
        return self.num_total_tokens.item(row) - self.num_computed_tokens.item(row) <= 1

    def num_wanted_tokens(self) -> np.ndarray:
        """int32[R]: what each row needs to catch up. A row whose last token is pending wants nothing more."""
        wanted_R = self.num_total_tokens - self.num_computed_tokens
        wanted_R *= self.num_total_tokens < self.max_total_tokens
        if self.num_verifying:
            wanted_R[self.is_verifying] = 0
        return wanted_R

    def may_stop(self, token_ids: np.ndarray) -> np.ndarray:
        """bool, of the shape of `token_ids`. Where it is False, no row has the token among its stop tokens. Where it is
        True, some row has it, or, seldom, one of the same low bits: the requests' own `stop_token_ids` tell."""
        return self._is_stop[token_ids & _STOP_BITS]

    def append_token(self, rows: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
        """The oldest pending token of each of these rows (int[M], distinct) has become known to the host.

        Returns num_tokens of the rows.
        """
        num_tokens = self.num_tokens[rows]
        self.flat_token_ids[self.first_token_index[rows] + num_tokens] = token_ids
        num_tokens += 1
        self.num_tokens[rows] = num_tokens
        return num_tokens

    def set_drafts(self, row: int, token_ids: Sequence[int]) -> bool:
        """Drafts for the next step to verify, as many as max_total_tokens leaves room for. False, and nothing is done,
        for a row whose last token the host does not know, that reads a prompt, or that verifies drafts already."""
        num_tokens = self.num_tokens.item(row)
        if not self.is_decoding(row) or self.is_verifying[row] or self.num_total_tokens[row] != num_tokens:
            return False
        number = max(0, min(len(token_ids), self.max_total_tokens.item(row) - num_tokens - 1))
        self.token_ids[row, num_tokens : num_tokens + number] = token_ids[:number]
        self.num_draft_tokens[row] = number
        return True

    def begin_verification(self) -> None:
        """The rows with drafts have been planned: their drafts count as tokens until `accept_tokens` settles it."""
        has_drafts = self.num_draft_tokens > 0
        self.num_total_tokens += self.num_draft_tokens
        self.num_draft_tokens[:] = 0
        self.is_verifying |= has_drafts
        self.num_verifying += int(np.count_nonzero(has_drafts))

    def accept_tokens(self, row: int, token_ids: np.ndarray, num_computed_tokens: int) -> None:
        """The result of a verification: the row's new tokens, and how many tokens the step found computed."""
        num_tokens = self.num_tokens[row] + len(token_ids)
        self.token_ids[row, self.num_tokens[row] : num_tokens] = token_ids
        self.num_tokens[row] = self.num_total_tokens[row] = num_tokens
        self.num_computed_tokens[row] = num_computed_tokens + len(token_ids)
        self.num_verifying -= 1
        self.is_verifying[row] = False

    def append_page(self, rows: np.ndarray, pages: Sequence[int]) -> None:
        """One more page in each group for each of these rows (int[M], distinct); `pages` are G*M, in any order."""
        number, num_pages_M = len(rows), self.num_pages[rows]
        for group, table in enumerate(self.group_tables):
            table[rows, num_pages_M] = pages[group * number : (group + 1) * number]
        self.num_pages[rows] += 1
        self.num_slots[rows] += self._page_size

    def pop_pages(self, row: int, num_pages: int) -> list[int]:
        """Takes the last pages of each group from a row. None of them has left a window."""
        start, end = self.num_pages[row] - num_pages, self.num_pages[row]
        [pages] = self._by_page(np.array([row]), start, end)
        self.page_table[:, row, start:end] = 0
        self.num_pages[row] -= num_pages
        self.num_slots[row] -= num_pages * self._page_size
        return pages

    def append_pages(self, row: int, pages: Sequence[int]) -> None:
        """More pages for one row: the first of each group, the second of each group ..."""
        start = self.num_pages.item(row)
        self.num_pages[row] = end = start + len(pages) // self.num_groups
        self.num_slots[row] = end * self._page_size
        if len(pages) == 1:
            self.group_tables[0][row, start] = pages[0]
        elif end == start + 1:
            for page, table in zip(pages, self.group_tables, strict=True):
                table[row, start] = page
        else:
            for group, table in enumerate(self.group_tables):
                table[row, start:end] = pages[group :: self.num_groups]

    def leave_pages(self, groups: np.ndarray, rows: np.ndarray, first_pages: np.ndarray) -> list[int]:
        """The pages before `first_pages` (int[M]) of these rows (int[M], distinct) have left the window of these
        groups, and are taken from the rows."""
        numbers = first_pages - self.first_page[groups[0], rows]
        places = np.repeat(first_pages - np.cumsum(numbers), numbers)
        places += np.arange(len(places))
        rows_of_places, left = np.repeat(rows, numbers), []
        for group in groups.tolist():
            left.append(self.group_tables[group][rows_of_places, places])
            self.group_tables[group][rows_of_places, places] = 0
            self.first_page[group, rows] = first_pages
        return cast(list[int], np.array(left).T.ravel().tolist())

    def num_full_pages(self, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        """int32[M], of these rows (int[M]; all, if left out): pages whose tokens are all known, and computed by
        launched steps."""
        return np.minimum(self.num_tokens[rows], self.num_computed_tokens[rows]) // self._page_size

    @property
    def owned_pages(self) -> list[int]:
        """The pages of all rows; a shared page as often as it is shared."""
        return self.page_table[self._is_owned].tolist()

    @property
    def _is_owned(self) -> np.ndarray:
        """bool[G, R, P]: where the page table holds a page of the row."""
        page_P = np.arange(self.page_table.shape[2])
        return (page_P < self.num_pages[:, None]) & (page_P >= self.first_page[..., None])

    def _by_page(self, rows: np.ndarray, start: int, end: int) -> list[list[int]]:
        """For each of these rows (int[M]) its page `start` in each group, the next one in each group ..."""
        if self.num_groups == 1:
            return cast(list[list[int]], self.group_tables[0][rows, start:end].tolist())
        pages_MPG = self.page_table[:, rows, start:end].transpose(1, 2, 0)
        return cast(list[list[int]], pages_MPG.reshape(len(rows), -1).tolist())

    def check_integrity(self) -> None:
        """Asserts that the numbers of the rows agree with each other. For tests."""
        free_rows = [row for row, request in enumerate(self.requests) if request is None]
        assert sorted(self._free_rows) == free_rows
        assert all(request.row == row for row, request in enumerate(self.requests) if request is not None)
        assert not self._counters[:, free_rows].any(), "a free row is not blank"
        assert not self.first_page[:, free_rows].any(), "a free row is not blank"
        assert self.num_verifying == np.count_nonzero(self.is_verifying)
        assert (self.num_tokens <= self.num_total_tokens).all()
        assert (self.num_total_tokens <= self.max_total_tokens).all()
        assert (self.num_computed_tokens <= self.num_total_tokens).all()
        has_pending = self.num_total_tokens > self.num_tokens
        assert (self.num_computed_tokens == self.num_total_tokens - 1)[has_pending].all()
        assert (self.num_slots == self.num_pages * self._page_size).all()
        assert (self.num_computed_tokens <= self.num_slots).all()
        assert (self.num_slots - self.num_computed_tokens < self._page_size).all(), "a page too many"
        assert (self.num_registered_pages <= self.num_full_pages()).all()
        assert ((self.page_table != 0) == self._is_owned).all(), "a page is null, or out of place"
        assert (self.first_page <= self.num_pages).all()
        for window, first_page_R in zip(self._config.windows, self.first_page, strict=True):
            if window is None:
                assert not first_page_R.any()
            else:
                most = num_window_pages(window, self._config.max_num_batched_tokens, self._page_size)
                assert (self.num_pages - first_page_R <= most).all(), "a row holds more than its window"
                left_R = num_left_pages(self.num_computed_tokens, window, self._page_size)
                assert (first_page_R <= np.maximum(left_R, 0)).all(), "a page left that the next token sees"
        stops = [token_id & _STOP_BITS for request in self.running_requests for token_id in request.stop_token_ids]
        assert self._num_stops == dict(Counter(stops))
        assert np.flatnonzero(self._is_stop).tolist() == sorted(set(stops))
