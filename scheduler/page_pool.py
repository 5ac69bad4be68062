"""The pages of the KV cache that nobody owns."""


class PagePool:
    """Hands out the pages 1 to num_pages - 1. Page 0 is the null page: padding points at it, nobody owns it.

    Who owns a page is written in the page table of the running rows, and nowhere else. A page may be handed
    out again while a step that used it for its former owner is in flight: steps run in order on the device.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))  # a stack; low numbers first

    @property
    def num_free_pages(self) -> int:
        return len(self._free)

    def allocate(self, num_pages: int) -> list[int]:
        """Takes `num_pages` pages out of the pool, which must have them."""
        num_left = len(self._free) - num_pages
        assert num_left >= 0, f"{num_pages} pages wanted, {len(self._free)} free"
        pages = self._free[num_left:]
        del self._free[num_left:]
        return pages

    def free(self, pages: list[int]) -> None:
        """Puts pages back."""
        self._free.extend(pages)

    def check_integrity(self, owned_pages: list[int]) -> None:
        """Asserts that each page but the null page is free or owned, once. O(num_pages); for tests."""
        pages = sorted(self._free + owned_pages)
        assert pages == list(range(1, self.num_pages)), "a page is lost, shared, or both free and owned"
