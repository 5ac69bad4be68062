"""Who owns a page, and which page is given up next."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from jaxllm.scheduler.host_tier.host_slots import HostSlots
from jaxllm.scheduler.prefix_cache import PrefixCache


class PagePool:
    """Hands out the pages 1 to num_pages - 1. Page 0 is the null page: padding points at it, nobody owns it.

    A page may have several owners, which read it and do not write to it. When the last one frees it, a page that
    the prefix cache knows keeps its content until it is needed: blank pages are handed out first, then the cached
    one that was freed longest ago, whose content may find a place in the `host_slots`. Which rows own a page is
    written in the page table of the running rows. A page may be handed out again while a step that used it for its
    former owner is in flight: steps run in order on the device.
    """

    def __init__(self, num_pages: int, cache: PrefixCache, host_slots: HostSlots) -> None:
        self.num_pages = num_pages
        self._cache = cache
        self._host_slots = host_slots
        self._blank = list(range(num_pages - 1, 0, -1))  # a stack; low numbers first
        self._cached: OrderedDict[int, None] = OrderedDict()  # unowned, with content; the next to give up first
        self._num_owners: dict[int, int] = {}  # of the pages that have more than one

    @property
    def num_free_pages(self) -> int:
        """Pages that `allocate` can hand out: blank ones and cached ones that nobody owns."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached_pages(self) -> int:
        """Those of the free pages that still have content."""
        return len(self._cached)

    def allocate(self, num_pages: int) -> list[int]:
        """Takes `num_pages` free pages, which there must be. The cache forgets what was in them."""
        blank, num_left = self._blank, len(self._blank) - num_pages
        if num_left < 0:
            assert -num_left <= len(self._cached), f"{num_pages} pages wanted, {self.num_free_pages} free"
            evicted = [self._cached.popitem(last=False)[0] for _ in range(-num_left)]
            if self._host_slots.num_slots:
                for page in evicted:
                    self._host_slots.save(self._cache.key_of(page), page)
            self._cache.forget(evicted)
            blank.extend(evicted)
            num_left = 0
        pages = blank[num_left:]
        del blank[num_left:]
        return pages

    def num_unowned(self, pages: Iterable[int]) -> int:
        """How many of these cached pages `share` would take out of the free ones."""
        return sum([page in self._cached for page in pages])

    def num_freed(self, pages: Iterable[int], kept_pages: Iterable[int]) -> int:
        """How many other than `kept_pages` would be free if each of `pages` lost an owner for each time it is there."""
        lost = Counter(pages)
        for page in kept_pages:
            lost.pop(page, None)
        return sum([self._num_owners.get(page, 1) == number for page, number in lost.items()])

    def share(self, pages: Iterable[int]) -> None:
        """Adds an owner to pages that the cache has. The null page, which may be among them, has none."""
        for page in pages:
            if page in self._cached:
                del self._cached[page]
            elif page:
                self._num_owners[page] = self._num_owners.get(page, 1) + 1

    def free(self, pages: Sequence[int]) -> None:
        """Takes an owner from each page of a sequence. The last pages are given up before the first: they are of
        no use without them."""
        for page in reversed(pages):
            if (num_owners := self._num_owners.get(page)) is not None:
                if num_owners > 2:
                    self._num_owners[page] = num_owners - 1
                else:
                    del self._num_owners[page]
            elif page in self._cache:
                self._cached[page] = None
            else:
                self._blank.append(page)

    def forget_cached(self, pages: Sequence[int] | None = None) -> None:
        """Makes the cache forget pages (all, if None); those that nobody owns are blank then."""
        pages = self._cache.pages if pages is None else pages
        self._cache.forget(pages)
        for page in pages:
            if page in self._cached:
                del self._cached[page]
                self._blank.append(page)

    def check_integrity(self, owned_pages: Sequence[int]) -> None:
        """Asserts that each page but the null page is blank, cached or owned, as often as `owned_pages` has it.

        O(num_pages); for tests.
        """
        owners = Counter(owned_pages)
        pages = sorted([*self._blank, *self._cached, *owners])
        assert pages == list(range(1, self.num_pages)), "a page is lost, or both free and owned, or freed twice"
        assert self._num_owners == {page: number for page, number in owners.items() if number > 1}
        assert all(page in self._cache for page in self._cached)
        assert not any(page in self._cache for page in self._blank), "a blank page can be found"
        self._cache.check_integrity()
