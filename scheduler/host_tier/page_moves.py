"""Copies of pages between the device and the host."""

from typing import NamedTuple


class PageMoves(NamedTuple):
    """What is to happen before the next step is launched, in this order. Saves and loads then run beside the steps.

    writes: (ticket, pages): what loads have brought, in the order in which the scheduler was told, goes into these
        pages of the device; nowhere, if there are none.
    saves: (page, slot): the page of the device as it is after the steps launched so far, to a slot of the host.
    loads: (ticket, slots): these slots, in order, towards the device. A slot is read as the saves before left it.
    """

    writes: list[tuple[int, list[int]]]
    saves: list[tuple[int, int]]
    loads: list[tuple[int, list[int]]]

    def __bool__(self) -> bool:
        return bool(self.writes or self.saves or self.loads)
