"""Which requests get pages back from the host before they start."""

from collections.abc import Callable, Sequence

from jaxllm.scheduler.config import SchedulerConfig
from jaxllm.scheduler.host_tier.page_loads import HostPrefix
from jaxllm.scheduler.kv_pages import KVPages
from jaxllm.scheduler.pacing import Pacing
from jaxllm.scheduler.request import Request, RequestStatus
from jaxllm.scheduler.waiting_queue import WaitingQueue

_STEPS_BETWEEN_LOOKS = 8


class PageReturns:
    """Moves requests between the queue and the loads of pages.

    A request whose pages lie on the host waits for them outside of the queue, so that it holds up nobody. Room for all
    its tokens is reserved when it leaves the queue. It takes its old place in line when its pages are on the device, or
    will not come.

    Where there is room, the pages are asked for when the request would start. While all rows are taken, those of the
    next requests are asked for some steps ahead. A request whose pages get lost again before it has started computes
    them: if it waited a second time, others that start meanwhile could keep it from starting for ever.
    """

    def __init__(self, config: SchedulerConfig, pages: KVPages, waiting: WaitingQueue, pacing: Pacing) -> None:
        self._config = config
        self._pages = pages
        self._waiting = waiting
        self._pacing = pacing
        self._loads = pages.loads
        self._last_first: Request | None = None  # in line, when the next requests were looked at
        self._next_look = 0

    def wanted(self, request: Request, shared_pages: Sequence[int]) -> HostPrefix | None:
        """The pages on the host that should be brought back before the request starts, behind `shared_pages`, which it
        shares on the device. None if there are none, or if computing them is expected to take less time."""
        if request.has_pages_back:
            return None
        prefix = self._pages.on_host(request, shared_pages)
        return prefix if prefix is not None and self._is_worth(prefix) else None

    def note_start(self, request: Request, shared_pages: Sequence[int]) -> None:
        """The request starts. If it computes pages that lie on the host, the estimated time of a copy is lowered a
        little: without copies, nothing else would ever correct the estimate."""
        if self._config.kv_return_by != "auto" or request.has_pages_back:
            return
        if self._pages.on_host(request, shared_pages) is not None:
            self._loads.fade_estimate()

    def may_set_out(self, prefix: HostPrefix) -> bool:
        """Whether these pages may be on their way beside those that are."""
        num_loading = self._loads.num_loading_pages
        return num_loading == 0 or num_loading + len(prefix.slots) <= self._config.max_loading_pages

    def begin(self, request: Request, prefix: HostPrefix, shared_pages: Sequence[int]) -> None:
        """Takes the request out of the queue to wait for its pages."""
        self._waiting.remove(request)
        request.move_to(RequestStatus.WAITING_FOR_PAGES)
        self._pages.begin_load(request, prefix, shared_pages)

    def is_prefetch_due(self, first: Request | None, step_number: int) -> bool:
        """Whether to look for pages of the next requests, of which `first` is the first. That is worth while when
        another request is the first, and every few steps: a look takes time that grows with their prompts."""
        if first is None or (first is self._last_first and step_number < self._next_look):
            return False
        self._last_first, self._next_look = first, step_number + _STEPS_BETWEEN_LOOKS
        return True

    def prefetch(self, num_row_pages: int, first_waiting: Callable[[], Request | None]) -> None:
        """Begins to bring back pages of the next requests, for which there is no row yet. The running rows keep
        `num_row_pages` free pages."""
        passed: list[Request] = []
        while len(passed) < self._config.prefetch_window and (request := first_waiting()) is not None:
            if request.num_awaited_plans:
                break
            shared_pages = self._pages.match(request)
            if shared_pages is not None and (prefix := self.wanted(request, shared_pages)) is not None:
                if not self.may_set_out(prefix):
                    break
                num_reserved_pages = num_row_pages + self._loads.num_reserved_pages
                num_missing = self._pages.num_missing(request, shared_pages)
                if num_missing <= self._pages.num_free_pages - num_reserved_pages:
                    self.begin(request, prefix, shared_pages)
                    continue
            self._waiting.remove(request)
            passed.append(request)
        for request in passed:
            self._waiting.push(request)

    def take_in(self, ticket: int, num_pages: int, seconds: float) -> None:
        """See `Scheduler.pages_loaded`."""
        if (complete := self._loads.take_in(ticket, num_pages, seconds)) is not None:
            complete.has_pages_back = True
            self._go_back(complete)

    def fail(self, ticket: int) -> None:
        """See `Scheduler.load_failed`."""
        if (request := self._loads.fail(ticket)) is not None:
            self._go_back(request)

    def give_up(self, request: Request) -> None:
        """The request waits for its pages no longer, and goes back to the queue without them."""
        self._loads.end(request)
        self._go_back(request)

    def _go_back(self, request: Request) -> None:
        request.move_to(RequestStatus.PREEMPTED if request.has_started else RequestStatus.WAITING)
        self._waiting.push(request)

    def _is_worth(self, prefix: HostPrefix) -> bool:
        if self._config.kv_return_by != "auto":
            return self._config.kv_return_by == "copy"
        copy_s = self._loads.expected_seconds(len(prefix.slots))
        compute_s = self._pacing.seconds_to_compute(prefix.num_new_pages * self._config.page_size)
        return copy_s is None or compute_s is None or copy_s <= compute_s
