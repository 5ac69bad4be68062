"""Which pages of the prefix cache lie in the host's memory."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class HostSlots:
    """Keeps pages that the pool hands out again, in slots 0 to num_slots - 1 of the host's memory.

    A page is found by its key, as in the prefix cache. The slot whose page was kept or wanted longest ago is given up
    first, unless it is busy: being written by a save, or read by a load. The engine makes the copies, and knows where a
    slot lies; a further tier, such as a disk, is a further range of slots.

    num_slots: 0 turns the tier off.
    max_saving_pages: pages on their way to the host at once; those evicted beyond are lost.
    num_saved_pages, num_lost_pages, num_failed_pages: since the start. Lost ones were not saved, or given up; failed
        ones are those whose copy did not succeed.
    """

    def __init__(self, num_slots: int, max_saving_pages: int) -> None:
        self.num_slots = num_slots
        self._max_saving_pages = max_saving_pages
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()  # the next to give up first
        self._key_of: dict[int, bytes] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        self._num_uses: Counter[int] = Counter()  # of the busy slots
        self._saving: set[int] = set()
        self._saves: list[tuple[int, int]] = []  # that nobody has been told of
        self.num_saved_pages = 0
        self.num_lost_pages = 0
        self.num_failed_pages = 0

    def __len__(self) -> int:
        """Pages that can be found here."""
        return len(self._slot_of)

    def __contains__(self, key: object) -> bool:
        return key in self._slot_of

    def slots_of(self, keys: Iterable[bytes]) -> list[int]:
        """Where these pages lie, which are all here."""
        return [self._slot_of[key] for key in keys]

    def save(self, key: bytes, page: int) -> None:
        """A page of the device that is about to be handed out again. It is kept if there is room."""
        if key in self._slot_of:
            self._slot_of.move_to_end(key)
            return
        slot = self._free_slot() if len(self._saving) < self._max_saving_pages else None
        if slot is None:
            self.num_lost_pages += 1
            return
        self._slot_of[key] = slot
        self._key_of[slot] = key
        self._saving.add(slot)
        self._num_uses[slot] += 1
        self._saves.append((page, slot))

    def take_saves(self) -> list[tuple[int, int]]:
        """(page, slot) of the copies to make before the next step runs; each is told once."""
        saves, self._saves = self._saves, []
        return saves

    def end_save(self, slots: Sequence[int], *, is_sound: bool) -> None:
        """The copies to these slots were made, or failed."""
        for slot in slots:
            self._saving.discard(slot)
            if is_sound:
                self.num_saved_pages += 1
            else:
                self.num_failed_pages += 1
                self._forget_slot(slot)
            self._end_use(slot)

    def begin_load(self, slots: Sequence[int]) -> None:
        """These slots are going to be read. They stay until `end_load`."""
        for slot in reversed(slots):  # the first page of a prompt is given up last
            self._num_uses[slot] += 1
            self._slot_of.move_to_end(self._key_of[slot])

    def end_load(self, slots: Sequence[int], *, is_sound: bool) -> None:
        """The slots are not read any more. What could not be read is forgotten."""
        for slot in slots:
            if not is_sound and slot in self._key_of:  # and was not forgotten when its save failed
                self.num_failed_pages += 1
                self._forget_slot(slot)
            self._end_use(slot)

    def forget(self, keys: Iterable[bytes] | None = None) -> None:
        """Forgets pages (all, if None)."""
        for key in list(self._slot_of) if keys is None else keys:
            if (slot := self._slot_of.get(key)) is not None:
                self._forget_slot(slot)
                if not self._num_uses[slot]:
                    self._free.append(slot)

    def _free_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        for key, slot in self._slot_of.items():
            if not self._num_uses[slot]:
                del self._slot_of[key], self._key_of[slot]
                self.num_lost_pages += 1
                return slot
        return None

    def _forget_slot(self, slot: int) -> None:
        if (key := self._key_of.pop(slot, None)) is not None:
            del self._slot_of[key]

    def _end_use(self, slot: int) -> None:
        self._num_uses[slot] -= 1
        if not self._num_uses[slot]:
            del self._num_uses[slot]
            if slot not in self._key_of:
                self._free.append(slot)

    def check_integrity(self) -> None:
        """Asserts that each slot is free, busy, or holds a page that can be found. For tests."""
        assert self._slot_of == {key: slot for slot, key in self._key_of.items()}
        kept = set(self._key_of) | set(self._num_uses)
        assert sorted([*self._free, *kept]) == list(range(self.num_slots)), "a slot is lost, or both free and used"
        assert self._saving <= set(self._num_uses)
        assert all(number > 0 for number in self._num_uses.values())
        assert {slot for _, slot in self._saves} <= self._saving
