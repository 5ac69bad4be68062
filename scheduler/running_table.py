"""The running requests as arrays: one row each."""

from typing import cast

import numpy as np

from jaxllm.scheduler.config import SchedulerConfig
from jaxllm.scheduler.request import Request


class RunningTable:
    """A structure of arrays over R = max_num_seqs rows.

    A running request owns one row, which never moves while it runs; the device keeps its own state of the
    request under the same number. What most requests do in most steps, gaining a token, is a vector
    operation here.

    A row's tokens are the `num_tokens` that the host knows and, behind them, `num_pending_tokens` that
    launched steps sample and only the device knows. The first `num_computed_tokens` of all these have their
    keys and values in the row's pages once the launched steps have run; the rest is what the row wants:

        in its prompt             │ computed │          wanted │
        decoding                  │ computed           │ wanted │   its last known token
        decoding, host one ahead  │ computed           │ wanted │   its last token, which is pending

    token_ids: int32[R, max_model_len]. Memory that no request reached was never touched.
    num_tokens, num_pending_tokens, num_computed_tokens: int32[R].
    max_total_tokens: int32[R], prompt and output may not be longer.
    page_table: int32[R, P], the pages of each row; the null page 0 after them.
    num_pages: int32[R].
    stop_token_ids: int32[R, W], padded with -1; W grows on demand.
    temperature, top_p, min_p: float32[R]; top_k: int32[R]; seed: uint32[R]. See `SamplingRow`.
    occupancy: int64[R], increased when a request leaves the row, so that (row, occupancy) names one stay.
    requests: who owns each row, or None. The numbers of a free row are 0.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        num_rows = config.max_num_seqs
        self.token_ids = np.zeros((num_rows, config.max_model_len), np.int32)
        self.num_tokens = np.zeros(num_rows, np.int32)
        self.num_pending_tokens = np.zeros(num_rows, np.int32)
        self.num_computed_tokens = np.zeros(num_rows, np.int32)
        self.max_total_tokens = np.zeros(num_rows, np.int32)
        self.page_table = np.zeros((num_rows, config.max_pages_per_seq), np.int32)
        self.num_pages = np.zeros(num_rows, np.int32)
        self.stop_token_ids = np.full((num_rows, 1), -1, np.int32)
        self.temperature = np.zeros(num_rows, np.float32)
        self.top_k = np.zeros(num_rows, np.int32)
        self.top_p = np.ones(num_rows, np.float32)
        self.min_p = np.zeros(num_rows, np.float32)
        self.seed = np.zeros(num_rows, np.uint32)
        self.occupancy = np.zeros(num_rows, np.int64)
        self.requests: list[Request | None] = [None] * num_rows
        self._free_rows = list(range(num_rows - 1, -1, -1))  # a stack; low numbers first

    @property
    def num_rows(self) -> int:
        return len(self.requests)

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def running_requests(self) -> list[Request]:
        """Those that own a row."""
        return [request for request in self.requests if request is not None]

    def requests_of(self, rows: np.ndarray) -> list[Request]:
        """The owners of these rows (int[M]), none of which is free."""
        return cast(list[Request], [self.requests[row] for row in rows.tolist()])

    def admit(self, request: Request) -> int:
        """Gives the request a free row, which takes over its tokens. Returns the row."""
        row = self._free_rows.pop()
        num_tokens, sampling = request.num_tokens, request.sampling
        self.token_ids[row, :num_tokens] = request.token_ids
        self.num_tokens[row] = num_tokens
        self.max_total_tokens[row] = self.max_total_tokens_of(request)
        self._set_stop_token_ids(row, request.stop_token_ids)
        self.temperature[row] = sampling.temperature
        self.top_k[row] = sampling.top_k
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.seed[row] = sampling.seed
        self.requests[row] = request
        request.attach(self, row)
        return row

    def release(self, row: int) -> list[int]:
        """Takes the row from its request, which gets its known tokens back. Returns the pages of the row."""
        request = self.requests[row]
        assert request is not None
        request.detach()
        pages = self.page_table[row, : self.num_pages[row]].tolist()
        self.page_table[row, : len(pages)] = 0
        for counter in (self.num_tokens, self.num_pending_tokens, self.num_computed_tokens, self.num_pages):
            counter[row] = 0
        self.max_total_tokens[row] = 0
        self.occupancy[row] += 1
        self.requests[row] = None
        self._free_rows.append(row)
        return pages

    def max_total_tokens_of(self, request: Request) -> int:
        """The most tokens, prompt and output, that the request may come to have."""
        return min(request.num_prompt_tokens + request.max_tokens, self._config.max_model_len)

    def known_token_ids(self, row: int) -> np.ndarray:
        """int32[num_tokens]: a view of the row's tokens that the host knows."""
        return self.token_ids[row, : self.num_tokens[row]]

    def is_decoding(self, row: int) -> bool:
        """Whether the row has caught up with its tokens but for the last one."""
        num_tokens = self.num_tokens[row] + self.num_pending_tokens[row]
        return bool(num_tokens - self.num_computed_tokens[row] <= 1)

    def num_wanted_tokens(self) -> np.ndarray:
        """int32[R]: what each row needs to catch up. A row whose last token is pending wants nothing more."""
        num_tokens = self.num_tokens + self.num_pending_tokens
        return (num_tokens - self.num_computed_tokens) * (num_tokens < self.max_total_tokens)

    def append_token(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """The pending token of each of these rows (int[M], distinct) has become known to the host."""
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1
        self.num_pending_tokens[rows] -= 1

    def append_page(self, rows: np.ndarray, pages: list[int]) -> None:
        """One more page for each of these rows (int[M], distinct)."""
        self.page_table[rows, self.num_pages[rows]] = pages
        self.num_pages[rows] += 1

    def append_pages(self, row: int, pages: list[int]) -> None:
        """More pages for one row."""
        num_pages = self.num_pages[row]
        self.page_table[row, num_pages : num_pages + len(pages)] = pages
        self.num_pages[row] += len(pages)

    @property
    def owned_pages(self) -> list[int]:
        """The pages of all rows."""
        return self.page_table[self._is_owned].tolist()

    @property
    def _is_owned(self) -> np.ndarray:
        """bool[R, P]: where the page table holds a page of the row."""
        return np.arange(self.page_table.shape[1]) < self.num_pages[:, None]

    def _set_stop_token_ids(self, row: int, stop_token_ids: tuple[int, ...]) -> None:
        num_missing = len(stop_token_ids) - self.stop_token_ids.shape[1]
        if num_missing > 0:
            self.stop_token_ids = np.pad(self.stop_token_ids, ((0, 0), (0, num_missing)), constant_values=-1)
        self.stop_token_ids[row] = -1
        self.stop_token_ids[row, : len(stop_token_ids)] = stop_token_ids

    def check_integrity(self) -> None:
        """Asserts that the numbers of the rows agree with each other. For tests."""
        free_rows = [row for row, request in enumerate(self.requests) if request is None]
        assert sorted(self._free_rows) == free_rows
        assert all(request.row == row for row, request in enumerate(self.requests) if request is not None)
        num_tokens = self.num_tokens + self.num_pending_tokens
        for counter in (num_tokens, self.max_total_tokens, self.num_computed_tokens, self.num_pages):
            assert not counter[free_rows].any(), "a free row is not blank"
        assert (self.num_pending_tokens >= 0).all()
        assert (num_tokens <= self.max_total_tokens).all()
        assert (self.num_computed_tokens <= num_tokens).all()
        has_pending = self.num_pending_tokens > 0
        assert (self.num_computed_tokens == num_tokens - 1)[has_pending].all()
        assert (self.num_pages == -(-self.num_computed_tokens // self._config.page_size)).all()
        assert ((self.page_table != 0) == self._is_owned).all(), "a page is null, or lies beyond num_pages"
