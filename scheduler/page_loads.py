"""The requests whose pages are on their way back from the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from jaxllm.scheduler.page_pool import PagePool
from jaxllm.scheduler.page_tiers import PageTiers
from jaxllm.scheduler.prefix_cache import PrefixCache
from jaxllm.scheduler.request import Request

_FADING = 0.95
_NEWEST = 0.3  # the weight of the newest time of a copy in the estimate


@dataclass(slots=True, eq=False)
class PageLoad:
    """One request's.

    pages: owned by the load: those that were found on the device, and behind them those to be written.
    keys, slots: of the pages to be written.
    """

    ticket: int
    request: Request
    pages: list[int]
    keys: list[bytes]
    slots: list[int]
    num_written_pages: int = 0


class PageLoads:
    """Owns the pages of the requests that wait for them.

    A load may be given up at any time: only the scheduler says where a copy is written to, so that one which comes
    after the end is dropped. When all has come, the pages are the prefix cache's, the request goes back to its place in
    line and finds them there.

    num_loaded_pages: since the start.
    """

    def __init__(self, pool: PagePool, cache: PrefixCache, tiers: PageTiers) -> None:
        self._pool = pool
        self._cache = cache
        self._tiers = tiers
        self._by_ticket: dict[int, PageLoad] = {}
        self._ticket_of: dict[Request, int] = {}
        self._tickets = count()
        self._begun: list[tuple[int, list[int]]] = []  # that nobody has been told of
        self._seconds_per_page: float | None = None
        self.num_loaded_pages = 0

    def __len__(self) -> int:
        return len(self._by_ticket)

    def __contains__(self, request: Request) -> bool:
        return request in self._ticket_of

    @property
    def requests(self) -> list[Request]:
        return list(self._ticket_of)

    @property
    def owned_pages(self) -> list[int]:
        return [page for load in self._by_ticket.values() for page in load.pages]

    @property
    def num_loading_pages(self) -> int:
        """Pages that are still to come."""
        return sum(len(load.slots) - load.num_written_pages for load in self._by_ticket.values())

    @property
    def coming_keys(self) -> list[bytes]:
        return [key for load in self._by_ticket.values() for key in load.keys[load.num_written_pages :]]

    def begin(self, request: Request, found_pages: Sequence[int], slots: Sequence[int]) -> None:
        """Begins to bring what lies in `slots`: the pages of the request behind those found on the device."""
        self._pool.share(found_pages)
        self._tiers.begin_load(slots)
        first = len(found_pages)
        load = PageLoad(
            ticket=next(self._tickets),
            request=request,
            pages=[*found_pages, *self._pool.allocate(len(slots))],
            keys=request.page_keys[first : first + len(slots)],
            slots=list(slots),
        )
        self._by_ticket[load.ticket] = load
        self._ticket_of[request] = load.ticket
        self._begun.append((load.ticket, load.slots))

    def take_begun(self) -> list[tuple[int, list[int]]]:
        """(ticket, slots) of the loads to begin; each is told once."""
        begun, self._begun = self._begun, []
        return begun

    def take_in(self, ticket: int, num_pages: int, seconds: float) -> tuple[list[int], Request | None]:
        """The next pages of a load have come, in so many seconds.

        Returns the pages of the device to write them to, before anything else is launched (none, if nobody waits for
        them any more), and the request if these were the last.
        """
        load = self._by_ticket.get(ticket)
        if load is None:
            return [], None
        seconds_per_page = seconds / num_pages
        if self._seconds_per_page is not None:
            seconds_per_page = _NEWEST * seconds_per_page + (1 - _NEWEST) * self._seconds_per_page
        self._seconds_per_page = seconds_per_page
        first, end = load.num_written_pages, load.num_written_pages + num_pages
        num_found = len(load.pages) - len(load.slots)
        pages = load.pages[num_found + first : num_found + end]
        self._cache.register(load.keys[first:end], pages)
        load.num_written_pages = end
        self.num_loaded_pages += num_pages
        if end < len(load.slots):
            return pages, None
        self.end(load.request)
        return pages, load.request

    def fail(self, ticket: int) -> Request | None:
        """What is still to come of a load cannot be read. Returns the request, if it waits for it."""
        load = self._by_ticket.get(ticket)
        if load is None:
            return None
        self.end(load.request, is_sound=False)
        return load.request

    def end(self, request: Request, *, is_sound: bool = True) -> None:
        """Gives back the pages of a request that waits for them no longer."""
        load = self._by_ticket.pop(self._ticket_of.pop(request))
        self._begun = [(ticket, slots) for ticket, slots in self._begun if ticket != load.ticket]
        self._tiers.end_load(load.slots[: load.num_written_pages], is_sound=True)
        self._tiers.end_load(load.slots[load.num_written_pages :], is_sound=is_sound)
        self._pool.free(load.pages)

    def expected_seconds(self, num_pages: int) -> float | None:
        """How long so many pages take to come; None before any have."""
        return None if self._seconds_per_page is None else num_pages * self._seconds_per_page

    def fade_estimate(self) -> None:
        """Expects a little less from now on."""
        if self._seconds_per_page is not None:
            self._seconds_per_page *= _FADING

    def check_integrity(self) -> None:
        """Asserts that loads and requests agree. For tests."""
        assert {
            request: load.ticket for load in self._by_ticket.values() for request in [load.request]
        } == self._ticket_of
        assert {ticket for ticket, _ in self._begun} <= set(self._by_ticket)
        assert all(load.num_written_pages < len(load.slots) for load in self._by_ticket.values())
