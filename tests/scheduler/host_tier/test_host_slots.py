"""Which pages the host keeps, and which it gives up first."""

import pytest

from jaxllm.scheduler.host_tier.host_slots import HostSlots


class TestHostSlots:
    KEYS = tuple(f"key {index}".encode() for index in range(9))

    def found(self, tiers):
        return tiers.slots_of(key for key in self.KEYS[:4] if key in tiers)

    def filled(self, num_slots=4):
        tiers = HostSlots(num_slots, max_saving_pages=100)
        for page, key in enumerate(reversed(self.KEYS[:num_slots])):  # as the pool gives them up: tails before heads
            tiers.save(key, page)
        tiers.end_save([slot for _, slot in tiers.take_saves()], is_sound=True)
        tiers.check_integrity()
        return tiers

    def test_tails_are_given_up_before_heads(self):
        tiers = self.filled()
        tiers.save(self.KEYS[8], 7)
        assert len(self.found(tiers)) == 3
        slots = self.found(tiers)
        tiers.begin_load(slots)
        tiers.end_load(slots, is_sound=True)
        tiers.end_save([slot for _, slot in tiers.take_saves()], is_sound=True)
        tiers.save(self.KEYS[7], 7)  # gives up what was neither loaded nor saved last
        assert self.KEYS[8] not in tiers
        assert len(self.found(tiers)) == 3
        tiers.check_integrity()

    @pytest.mark.parametrize("again", ["wanted", "evicted"])
    def test_what_was_wanted_or_evicted_again_is_given_up_last_its_beginning_at_the_end(self, again):
        tiers = self.filled()
        slots = tiers.slots_of(self.KEYS[2:4])
        if again == "wanted":
            tiers.begin_load(slots)
            tiers.end_load(slots, is_sound=True)
        else:
            tiers.save(self.KEYS[3], 7)
            tiers.save(self.KEYS[2], 8)
            assert tiers.take_saves() == [], "copied again"
        for number, left in enumerate([(0, 2, 3), (2, 3), (2,), ()]):
            tiers.save(b"new %d" % number, 9)
            assert tuple(index for index in range(4) if self.KEYS[index] in tiers) == left
        tiers.check_integrity()

    def test_a_page_whose_save_and_load_failed_is_counted_once(self):
        tiers = HostSlots(4, max_saving_pages=100)
        tiers.save(self.KEYS[0], 1)
        slots = tiers.slots_of(self.KEYS[:1])
        tiers.begin_load(slots)
        tiers.end_save(slots, is_sound=False)
        assert self.KEYS[0] not in tiers
        tiers.take_saves()
        tiers.check_integrity()
        tiers.end_load(slots, is_sound=False)
        tiers.check_integrity()
        assert tiers.num_failed_pages == 1

    def test_busy_slots_stay(self):
        tiers = self.filled()
        slots = self.found(tiers)
        tiers.begin_load(slots)
        tiers.save(self.KEYS[8], 7)
        assert tiers.take_saves() == []
        assert self.found(tiers) == slots
        tiers.forget()
        assert len(tiers) == 0
        tiers.save(self.KEYS[8], 7)
        assert tiers.take_saves() == [], "a slot that is read was given away"
        tiers.end_load(slots, is_sound=True)
        tiers.check_integrity()
        tiers.save(self.KEYS[8], 7)
        assert len(tiers.take_saves()) == 1
        tiers.check_integrity()
