"""Copies of pages between the device and the host."""

from typing import NamedTuple


class PageMoves(NamedTuple):
    """What is to begin before the next step is launched. Copies run beside the steps.

    saves: (page, slot): the page of the device as it is after the steps launched so far, to a slot of the host.
    loads: (ticket, slots): these slots, in order, towards the device. A slot is read as the saves before left it.
    """

    saves: list[tuple[int, int]]
    loads: list[tuple[int, list[int]]]

    def __bool__(self) -> bool:
        return bool(self.saves or self.loads)
