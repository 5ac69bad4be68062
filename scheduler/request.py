"""What a client asked for, and how far it has come."""

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxllm.scheduler.errors import RequestRefusedError
from jaxllm.scheduler.request_options import RequestOptions
from jaxllm.scheduler.sampling_row import SamplingRow

if TYPE_CHECKING:
    from jaxllm.scheduler.running_table import RunningTable

_MAX_INT32 = 2**31 - 1
_NO_TOKENS = np.zeros(0, np.int32)
_GREEDY = SamplingRow()
_DEFAULT_OPTIONS = RequestOptions()


class RequestStatus(enum.Enum):
    """Where a request is. Only these moves exist:

    WAITING_FOR_INPUT ──► WAITING ──► PREFILLING ──► DECODING      any of the six ──► one of FINISHED_*
                             ▲           ▲  └───► PREEMPTED ◄──┘
                             │           └────────────┘ ▲
                             └────► WAITING_FOR_PAGES ◄─┘
    """

    WAITING_FOR_INPUT = "waiting_for_input"  # in line, until who prepares its input says that it is ready
    WAITING = "waiting"  # for a row, for pages, or for room in the token budget
    WAITING_FOR_PAGES = "waiting_for_pages"  # some of its pages are on their way from the host
    PREFILLING = "prefilling"  # running, more than one known token from having caught up
    DECODING = "decoding"  # running, one token a step
    PREEMPTED = "preempted"  # gave its pages to a more urgent request; waits to compute its tokens again
    FINISHED_STOP = "finished_stop"  # a stop token or a stop string
    FINISHED_LENGTH = "finished_length"  # max_tokens or max_model_len
    FINISHED_ABORT = "finished_abort"  # the client left
    FINISHED_TIMEOUT = "finished_timeout"  # its deadline passed, or it waited for longer than it wanted to
    FINISHED_ERROR = "finished_error"  # the step that it was in failed, or gave it nothing to sample from

    __hash__ = object.__hash__  # Enum hashes names in Python, several times a transition

    @property
    def is_finished(self) -> bool:
        return self in _FINISHED

    def may_become(self, new: "RequestStatus") -> bool:
        """Whether a request may go from this status to `new`."""
        return new in _MOVES.get(self, ())


_FINISHED = frozenset(status for status in RequestStatus if status.name.startswith("FINISHED_"))
_MOVES = {
    RequestStatus.WAITING_FOR_INPUT: {RequestStatus.WAITING, *_FINISHED},
    RequestStatus.WAITING: {RequestStatus.PREFILLING, RequestStatus.WAITING_FOR_PAGES, *_FINISHED},
    RequestStatus.WAITING_FOR_PAGES: {RequestStatus.WAITING, RequestStatus.PREEMPTED, *_FINISHED},
    RequestStatus.PREFILLING: {RequestStatus.DECODING, RequestStatus.PREEMPTED, *_FINISHED},
    RequestStatus.DECODING: {RequestStatus.PREEMPTED, *_FINISHED},
    RequestStatus.PREEMPTED: {RequestStatus.PREFILLING, RequestStatus.WAITING_FOR_PAGES, *_FINISHED},
}


class Request:
    """One prompt to continue.

    A request that does not run keeps its tokens itself. While it runs, they live in its row of the
    `RunningTable`, where vector operations advance them, and this object only looks at them.

    Times are those of the scheduler's clock, in seconds.

    Args:
        request_id: unique among the requests that have not finished.
        prompt_token_ids: int32 values, 0 or more.
        max_tokens: the most tokens to generate; max_model_len may end the request sooner.
        min_tokens: stop tokens before so many tokens do not end it.
        stop_token_ids: any of these ends the request, and is the last of its output tokens.
        options: how it is to be served.
        arrival_time: earlier runs first among equal priorities.
        use_prefix_cache: whether it may share pages of prompts that begin alike, in both directions.
        adapter_id: of what changes the model for it; it shares pages with requests of the same adapter only.
        is_ready: whether its input has been prepared; if not, it waits for `Scheduler.input_ready`.
        sampling: settings for the device.

    Raises:
        RequestRefusedError: a token id is not an int32 value of 0 or more, min_tokens is out of range, or
            arrival_time is no number.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        *,
        max_tokens: int,
        min_tokens: int = 0,
        stop_token_ids: tuple[int, ...] = (),
        options: RequestOptions = _DEFAULT_OPTIONS,
        arrival_time: float = 0.0,
        use_prefix_cache: bool = True,
        adapter_id: str = "",
        is_ready: bool = True,
        sampling: SamplingRow = _GREEDY,
    ) -> None:
        self.request_id = request_id
        self.max_tokens = max_tokens
        if not 0 <= min_tokens <= max(0, max_tokens):
            raise RequestRefusedError(
                f"request {request_id!r}: min_tokens is {min_tokens:,}; it must be from 0 to max_tokens {max_tokens:,}",
                param="min_tokens",
            )
        if arrival_time != arrival_time:
            raise RequestRefusedError(f"request {request_id!r}: arrival_time is nan; it must be a number of seconds")
        self.min_tokens = min_tokens
        self.stop_token_ids = frozenset(_int32_token_ids(request_id, "stop_token_ids", stop_token_ids).tolist())
        self.options = options
        self.priority, self.tenant = options.priority, options.tenant  # looked at in each step
        self.arrival_time = arrival_time
        self.arrival_number = 0  # given by the scheduler: tells apart requests of one arrival_time
        self.entry_time = 0.0  # given by the scheduler: when it was taken in, by its own clock
        self.deadline = None if options.timeout_s is None else arrival_time + options.timeout_s
        self.queue_deadline = None if options.queue_timeout_s is None else arrival_time + options.queue_timeout_s
        self.use_prefix_cache = use_prefix_cache
        self.adapter_id = adapter_id
        self.sampling = sampling
        self.page_keys: list[bytes] = []  # of its first full pages, as far as `PrefixCache.keys` was asked
        self.num_times_overtaken = 0  # by requests behind it that found more in the cache
        self.num_given_up_tokens = 0  # computed before its last preemption
        self.has_started = False  # whether it has had a row
        self.has_pages_back = False  # whether it got pages from the host since it ran last
        self.num_awaited_plans = 0  # in flight, which sample for it, although it was preempted since
        self._token_ids = _int32_token_ids(request_id, "prompt_token_ids", prompt_token_ids)
        self.num_prompt_tokens = len(self._token_ids)
        self._status = RequestStatus.WAITING if is_ready else RequestStatus.WAITING_FOR_INPUT
        self._table: RunningTable | None = None
        self._row = -1

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.value}, {self.num_prompt_tokens} prompt tokens, "
            f"{self.num_output_tokens} output tokens)"
        )

    @property
    def arrival(self) -> tuple[float, int]:
        """By which requests that arrived earlier come first."""
        return self.arrival_time, self.arrival_number

    @property
    def status(self) -> RequestStatus:
        if self._table is not None and self._table.is_decoding(self._row):
            return RequestStatus.DECODING
        return self._status

    @property
    def row(self) -> int | None:
        """The row of the running table that the request owns, or None if it does not run."""
        return self._row if self._table is not None else None

    @property
    def token_ids(self) -> np.ndarray:
        """int32[num_tokens]: prompt and output as far as the host knows them. A view; do not write to it."""
        return self._token_ids if self._table is None else self._table.known_token_ids(self._row)

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids) if self._table is None else self._table.num_tokens.item(self._row)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        """A fresh list."""
        return self.token_ids[: self.num_prompt_tokens].tolist()

    @property
    def output_token_ids(self) -> list[int]:
        """A fresh list of the tokens generated so far: all of them, once the request has finished."""
        return self.token_ids[self.num_prompt_tokens :].tolist()

    def attach(self, table: "RunningTable", row: int) -> None:
        """Hands the tokens over to a row of the running table."""
        self.move_to(RequestStatus.PREFILLING)
        self.has_started, self.has_pages_back = True, False
        self._table, self._row = table, row
        self._token_ids = _NO_TOKENS

    def detach(self) -> None:
        """Takes the tokens back from the row."""
        self._token_ids = self.token_ids.copy()
        self._table, self._row = None, -1

    def append_tokens(self, token_ids: list[int]) -> None:
        """Takes in tokens that were sampled before it was preempted."""
        assert self._table is None
        self._token_ids = np.append(self._token_ids, np.array(token_ids, np.int32))

    def move_to(self, status: RequestStatus) -> None:
        assert self.status.may_become(status), f"{self!r} cannot become {status.value}"
        self._status = status


def _int32_token_ids(request_id: str, name: str, token_ids: Sequence[int]) -> np.ndarray:
    """A copy as int32[n]. What is no int32 is refused here, at the door, and not in the middle of a step."""
    values = np.asarray(token_ids) if len(token_ids) else np.zeros(0, np.int32)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise RequestRefusedError(f"request {request_id!r}: {name} must be a flat sequence of integers")
    outside = values[(values < 0) | (values > _MAX_INT32)]
    if outside.size:
        raise RequestRefusedError(
            f"request {request_id!r}: {name} holds {outside[0]:,}; token ids go from 0 to {_MAX_INT32:,}"
        )
    return values.astype(np.int32)
