"""The requests whose pages are on their way back from the host."""

from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from jaxllm.scheduler.host_tier.host_slots import HostSlots
from jaxllm.scheduler.page_pool import PagePool
from jaxllm.scheduler.prefix_cache import PrefixCache
from jaxllm.scheduler.request import Request

_FADING = 0.95
_NEWEST = 0.3  # the weight of the newest time of a copy in the estimate


class HostPrefix(NamedTuple):
    """The pages that a request begins with, some of which lie on the host.

    num_new_pages: beyond those that it could share without them; of each group of layers.
    found_pages: of the device.
    keys, slots: of those on the host.
    """

    num_new_pages: int
    found_pages: list[int]
    keys: list[bytes]
    slots: list[int]


@dataclass(slots=True, eq=False)
class PageLoad:
    """One request's. It owns `prefix.found_pages` and `pages`, which are to be written.

    num_rest_pages: that it lacks beyond, to have all its tokens computed.
    """

    ticket: int
    request: Request
    prefix: HostPrefix
    pages: list[int]
    num_rest_pages: int
    num_written_pages: int = 0


class PageLoads:
    """Owns the pages of the requests that wait for them.

    A load may be given up at any time: only the scheduler says where a copy is written to, so that one which comes
    after the end is dropped. When all has come, the pages are the prefix cache's, the request goes back to its place in
    line and finds them there.

    num_loaded_pages: since the start.
    num_reserved_pages: free ones that the requests are going to need when theirs have come.
    """

    def __init__(self, pool: PagePool, cache: PrefixCache, host_slots: HostSlots) -> None:
        self._pool = pool
        self._cache = cache
        self._host_slots = host_slots
        self._by_ticket: dict[int, PageLoad] = {}
        self._ticket_of: dict[Request, int] = {}
        self._tickets = count()
        self._begun: list[tuple[int, list[int]]] = []  # that nobody has been told of
        self._writes: list[tuple[int, list[int]]] = []  # likewise
        self._seconds_per_page: float | None = None
        self.num_loaded_pages = 0
        self.num_reserved_pages = 0

    def __len__(self) -> int:
        return len(self._by_ticket)

    def __contains__(self, request: Request) -> bool:
        return request in self._ticket_of

    @property
    def requests(self) -> list[Request]:
        return list(self._ticket_of)

    @property
    def owned_pages(self) -> list[int]:
        return [page for load in self._by_ticket.values() for page in (*load.prefix.found_pages, *load.pages)]

    @property
    def num_loading_pages(self) -> int:
        """Pages that are still to come."""
        return sum(len(load.pages) - load.num_written_pages for load in self._by_ticket.values())

    @property
    def coming_keys(self) -> list[bytes]:
        """Of the pages that requests wait for, as `Request.page_keys` has them."""
        return [key for load in self._by_ticket.values() for key in load.request.page_keys]

    def begin(self, request: Request, prefix: HostPrefix, num_rest_pages: int) -> None:
        """Begins to bring what lies on the host."""
        self._pool.share(prefix.found_pages)
        self._host_slots.begin_load(prefix.slots)
        self.num_reserved_pages += num_rest_pages
        load = PageLoad(next(self._tickets), request, prefix, self._pool.allocate(len(prefix.slots)), num_rest_pages)
        self._by_ticket[load.ticket] = load
        self._ticket_of[request] = load.ticket
        self._begun.append((load.ticket, prefix.slots))

    def take_begun(self) -> list[tuple[int, list[int]]]:
        """(ticket, slots) of the loads to begin; each is told once."""
        begun, self._begun = self._begun, []
        return begun

    def take_writes(self) -> list[tuple[int, list[int]]]:
        """(ticket, pages) of all that has come or failed since the last call: where it is to be written to."""
        writes, self._writes = self._writes, []
        return writes

    def take_in(self, ticket: int, num_pages: int, seconds: float) -> Request | None:
        """The next pages of a load have come, in so many seconds. They are to be written, unless nobody waits for them
        any more. Returns the request if these were the last."""
        load = self._by_ticket.get(ticket)
        if load is None:
            self._writes.append((ticket, []))
            return None
        seconds_per_page = seconds / num_pages
        if self._seconds_per_page is not None:
            seconds_per_page = _NEWEST * seconds_per_page + (1 - _NEWEST) * self._seconds_per_page
        self._seconds_per_page = seconds_per_page
        first, end = load.num_written_pages, load.num_written_pages + num_pages
        pages = load.pages[first:end]
        self._writes.append((ticket, pages))
        self._cache.restore(load.prefix.keys[first:end], pages)
        load.num_written_pages = end
        self.num_loaded_pages += num_pages
        if end < len(load.pages):
            return None
        self.end(load.request)
        return load.request

    def fail(self, ticket: int) -> Request | None:
        """The next pages of a load cannot be read, and what comes of it later is not wanted. Returns the request, if it
        waits for it."""
        self._writes.append((ticket, []))
        load = self._by_ticket.get(ticket)
        if load is None:
            return None
        self.end(load.request, is_sound=False)
        return load.request

    def end(self, request: Request, *, is_sound: bool = True) -> None:
        """Gives back the pages of a request that waits for them no longer."""
        load = self._by_ticket.pop(self._ticket_of.pop(request))
        self.num_reserved_pages -= load.num_rest_pages
        slots, num_written = load.prefix.slots, load.num_written_pages
        self._host_slots.end_load(slots[:num_written], is_sound=True)
        self._host_slots.end_load(slots[num_written:], is_sound=is_sound)
        self._pool.free([*load.prefix.found_pages, *load.pages])

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
        assert self.num_reserved_pages == sum(load.num_rest_pages for load in self._by_ticket.values())
        assert all(load.num_written_pages < len(load.pages) for load in self._by_ticket.values())
