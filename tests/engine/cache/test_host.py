from __future__ import annotations

import json
import mmap
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from engine.cache.host import HostSlab
from engine.cache.page_locks import PageLocks
from engine.cache.segments import HostSlot

SIZE = 64


def slab(budget: int = 1024, segment_bytes: int = 256, **hooks) -> HostSlab:
    return HostSlab(budget, segment_bytes=segment_bytes, **hooks)


def take(made: HostSlab, count: int, size: int = SIZE) -> list[HostSlot]:
    """Slots, each filled with its own number."""
    slots = []
    for number in range(count):
        slot = made.take(size)
        assert slot is not None, f"no room for slot {number}"
        made.view(slot).fill_(number)
        slots.append(slot)
    return slots


def numbers(made: HostSlab, slots: list[HostSlot]) -> list[int]:
    """What `take` wrote to the slots, each of which holds but one number."""
    values = [made.view(slot).unique().tolist() for slot in slots]
    assert all(len(value) == 1 for value in values)
    return [value[0] for value in values]


def books(made: HostSlab) -> tuple[int, int]:
    assert made.violations() == []
    return made.held_bytes, made.used_bytes


# --- slots -----------------------------------------------------------------------------------------------------------


def test_segments_come_when_they_are_needed_and_go_when_they_are_empty():
    made = slab()
    assert books(made) == (0, 0)
    slots = take(made, 5)
    assert books(made) == (512, 320)
    made.give_back(slots[4])
    assert books(made) == (256, 256)
    for slot in slots[:4]:
        made.give_back(slot)
    assert books(made) == (0, 0) and made._shelves == {}


def test_a_segment_is_counted_before_it_is_mapped():
    made = slab(budget=300)
    take(made, 4)
    assert made.take(SIZE) is None
    assert books(made) == (256, 256)


def test_the_last_segment_is_as_large_as_the_budget_leaves():
    made = slab(budget=400)
    take(made, 6)
    assert books(made) == (384, 384)
    assert made.take(SIZE) is None and made.take(1) is None


def test_what_is_larger_than_a_segment_gets_its_own():
    made = slab(budget=1024)
    (big,) = take(made, 1, size=700)
    assert books(made) == (704, 704) and made.view(big).shape == (700,)
    assert made.take(1025) is None
    made.give_back(big)
    assert books(made) == (0, 0)


def test_no_budget_no_room():
    made = slab(budget=0)
    assert made.take(1) is None and made.resize(0) == 0 and made.compact() == 0
    assert books(made) == (0, 0)


def test_the_fullest_segment_is_filled_first():
    made = slab()
    slots = take(made, 12)
    for number in (0, 4, 5, 6, 9):
        made.give_back(slots[number])
    for number in (1, 2, 3):  # the first segment, which was the fullest with room, has gone
        made.give_back(slots[number])
    assert books(made) == (512, 256)
    (slot,) = take(made, 1)
    assert slot.segment is slots[8].segment
    assert numbers(made, slots[7:9] + slots[10:]) == [7, 8, 10, 11]


def test_sizes_do_not_share_segments_and_any_dtype_fits_any_slot():
    made = slab()
    odd, even = take(made, 3, size=5), take(made, 2, size=80)
    assert books(made) == (256 + 256, 3 * 64 + 2 * 128)
    for slot in odd + even:
        view = made.view(slot)
        assert view.dtype == torch.uint8 and view.shape == (slot.size,) and view.data_ptr() % 64 == 0
    assert made.view(even[1]).view(torch.float64).shape == (10,)


def test_a_slot_is_given_back_once():
    made = slab()
    slot, _ = take(made, 2)
    made.give_back(slot)
    with pytest.raises(RuntimeError, match="given back before"):
        made.give_back(slot)
    with pytest.raises(RuntimeError, match="given back before"):
        made.view(slot)
    assert books(made) == (256, 64)


@pytest.mark.parametrize("size", [0, -1])
def test_nothing_is_no_size(size):
    with pytest.raises(ValueError, match="needs at least 1"):
        slab().take(size)


def test_less_than_nothing_is_no_budget():
    with pytest.raises(ValueError, match="cannot be less than 0"):
        slab(budget=-1)
    with pytest.raises(ValueError, match="cannot be less than 0"):
        slab().resize(-1)


def test_a_machine_without_memory_has_no_room(monkeypatch):
    made = slab()
    slots = take(made, 6)
    made.give_back(slots[0])

    def fail(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", fail)
        assert made.take(100) is None and made.take(SIZE) is not None
        assert made.resize(384) == 0 and books(made) == (512, 384), "it cannot be compacted and goes on as it is"
        assert numbers(made, slots[1:]) == [1, 2, 3, 4, 5]
    assert made.compact() == 128 and books(made) == (384, 384)


# --- changing size ---------------------------------------------------------------------------------------------------


def test_compaction_empties_the_sparsest():
    made = slab()
    slots = take(made, 12)
    for number in (0, 5, 6, 8, 9, 10):
        made.give_back(slots[number])
    kept = [slots[number] for number in (1, 2, 3, 4, 7, 11)]
    still = {slot: made.view(slot).data_ptr() for slot in kept[:3]}
    assert books(made) == (768, 384)
    assert made.compact() == 384
    assert books(made) == (384, 384), "four in the fullest, and the others in one that is as large as they are"
    assert numbers(made, kept) == [1, 2, 3, 4, 7, 11]
    assert {slot: made.view(slot).data_ptr() for slot in kept[:3]} == still, "the fullest stayed"
    assert made.compact() == 0


def test_compaction_maps_nothing_where_all_fits_into_what_is_there(monkeypatch):
    made = slab()
    slots = take(made, 8)
    for number in (0, 1, 2, 7):
        made.give_back(slots[number])
    monkeypatch.setattr(mmap, "mmap", None)
    assert made.compact() == 256 and books(made) == (256, 256)
    assert numbers(made, slots[3:7]) == [3, 4, 5, 6]


def test_compaction_makes_room_for_another_size():
    made = slab(budget=512)
    slots = take(made, 8)
    for number in (0, 1, 4):
        made.give_back(slots[number])
    assert made.take(150) is None, "there are 192 bytes, but not in one place"
    made.compact()
    assert made.take(150) is not None
    assert books(made) == (512, 512)
    assert numbers(made, [slots[number] for number in (2, 3, 5, 6, 7)]) == [2, 3, 5, 6, 7]


def test_a_smaller_budget_asks_for_slots_and_then_holds():
    made = slab()
    slots = take(made, 12)
    assert made.resize(400) == 768 - 400
    assert made.take(SIZE) is None and books(made) == (768, 768)
    made.give_back(slots[0])
    assert made.take(SIZE) is None, "there is a place, but no room for what would be in it"
    for slot in slots[2::2]:
        made.give_back(slot)
    assert books(made) == (768, 384)
    made.compact()
    assert books(made) == (384, 384)
    assert numbers(made, slots[1::2]) == [1, 3, 5, 7, 9, 11]


def test_a_smaller_budget_that_the_slots_fit_holds_at_once():
    made = slab()
    slots = take(made, 8)
    for number in (0, 1, 2, 4):
        made.give_back(slots[number])
    assert made.resize(256) == 0
    assert books(made) == (256, 256) and numbers(made, [slots[3], *slots[5:]]) == [3, 5, 6, 7]


def test_a_larger_budget_has_room_at_once():
    made = slab(budget=64)
    take(made, 1)
    assert made.take(SIZE) is None
    assert made.resize(256) == 0
    take(made, 3)
    assert books(made) == (256, 256)


def test_more_than_the_budget_is_a_violation_unless_it_shrinks():
    made = slab()
    slots = take(made, 8)
    made.resize(300)
    assert made.violations() == []
    for slot in slots[:4]:
        made.give_back(slot)
    assert books(made) == (256, 256)
    made.budget = 200
    assert made.violations() == ["256 bytes are held, the budget is 200"]


def test_a_view_reads_what_it_read_whatever_becomes_of_its_slot():
    made = slab()
    slots = take(made, 8)
    for number in (0, 1, 2, 4):
        made.give_back(slots[number])
    kept = [slots[3], *slots[5:]]
    views = [made.view(slot) for slot in kept]
    made.compact()
    made.view(slots[3]).fill_(99)
    for slot in kept:
        made.give_back(slot)
    assert made.held_bytes == 0
    assert [view.unique().tolist() for view in views] == [[3], [5], [6], [7]]


# --- page-locking ----------------------------------------------------------------------------------------------------


def test_every_new_segment_is_page_locked_and_unlocked_before_it_goes():
    locked: list[int] = []

    def pin(segment: torch.Tensor) -> bool:
        assert segment.shape == (256,)
        locked.append(segment.data_ptr())
        return True

    locks = PageLocks(pin, lambda segment: locked.remove(segment.data_ptr()))
    made = slab(locks=locks)
    slots = take(made, 8)
    locks.settle()
    assert len(locked) == 2 and made.page_locked_bytes == 512
    for slot in slots[:4]:
        made.give_back(slot)
    assert locked == [made.view(slots[4]).data_ptr()] and made.page_locked_bytes == 256
    for slot in slots[4:]:
        made.give_back(slot)
    assert locked == [] and books(made) == (0, 0) and made.page_locked_bytes == locks.failed == 0


def test_a_segment_that_cannot_be_page_locked_is_used_as_it_is():
    unlocked: list[torch.Tensor] = []
    locks = PageLocks(lambda _: False, unlocked.append)
    made = slab(locks=locks)
    slots = take(made, 8)
    locks.settle()
    assert (made.page_locked_bytes, locks.failed) == (0, 2) and numbers(made, slots) == list(range(8))
    for slot in slots:
        made.give_back(slot)
    assert books(made) == (0, 0) and unlocked == []


# --- the books -------------------------------------------------------------------------------------------------------


def test_what_is_wrong_with_the_books_is_said():
    def broken(spoil) -> list[str]:
        made = slab()
        slots = take(made, 3)
        spoil(made, slots)
        return made.violations()

    def spoil_free(made, slots):
        slots[0].segment.free.append(0)

    def spoil_place(made, slots):
        slots[0].place = 1

    def spoil_twice(made, slots):
        slots[0].segment.slots[3] = slots[0]

    def spoil_held(made, slots):
        made.held_bytes += 1

    def spoil_empty(made, slots):
        slots[0].segment.slots[:3] = [None] * 3

    assert broken(lambda made, slots: None) == []
    assert "a segment with 2 free places is kept as one with 1" in broken(spoil_free)
    assert broken(spoil_place) == ["the slot at place 0 says that it is elsewhere"]
    assert "the slot at place 3 has another place too" in broken(spoil_twice)
    assert broken(spoil_held) == ["held and used are 256 and 192 bytes, counted as (257, 192)"]
    assert "a segment without slots is held" in broken(spoil_empty)


class Slots(RuleBasedStateMachine):
    """Few sizes and a small budget, so that segments are full, sparse and drained all the time."""

    @initialize(budget=st.integers(0, 4000), segment_bytes=st.sampled_from([1, 256, 600]))
    def start(self, budget: int, segment_bytes: int) -> None:
        locks = PageLocks(lambda segment: segment.numel() % 128 == 0, lambda segment: None)
        self.slab = HostSlab(budget, segment_bytes=segment_bytes, locks=locks)
        self.slots: dict[HostSlot, torch.Tensor] = {}
        self.views: list[tuple[HostSlot, torch.Tensor, torch.Tensor]] = []
        self.number = 0

    @rule(size=st.sampled_from([1, 64, 65, 200, 700]))
    def take(self, size: int) -> None:
        fits = self.slab.used_bytes + -(-size // 64) * 64 <= self.slab.budget
        slot = self.slab.take(size)
        if slot is None and fits:
            self.slab.compact()
            slot = self.slab.take(size)
        assert (slot is not None) == fits
        if slot is not None:
            self.number += 1
            self.slots[slot] = (torch.arange(size) * 7 + self.number).to(torch.uint8)
            self.slab.view(slot).copy_(self.slots[slot])

    def some(self, data: st.DataObject) -> HostSlot:
        return list(self.slots)[data.draw(st.integers(0, len(self.slots) - 1))]

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        if self.slots:
            slot = self.some(data)
            del self.slots[slot]
            self.slab.give_back(slot)
            with pytest.raises(RuntimeError, match="given back before"):
                self.slab.give_back(slot)

    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        if self.slots:
            slot = self.some(data)
            self.views.append((slot, self.slab.view(slot), self.slots[slot]))

    @rule()
    def compact(self) -> None:
        before = self.slab.held_bytes
        assert self.slab.compact() == before - self.slab.held_bytes
        assert self.slab.held_bytes == self.slab.used_bytes

    @rule(budget=st.integers(0, 4000))
    def resize(self, budget: int) -> None:
        excess = self.slab.resize(budget)
        assert excess == max(0, self.slab.used_bytes - budget)
        assert excess or self.slab.held_bytes <= budget

    @rule(data=st.data(), budget=st.integers(0, 4000))
    def shrink(self, data: st.DataObject, budget: int) -> None:
        goal = self.slab.used_bytes - self.slab.resize(budget)
        while self.slab.used_bytes > goal:
            slot = self.some(data)
            del self.slots[slot]
            self.slab.give_back(slot)
        self.slab.compact()
        assert self.slab.held_bytes <= budget

    @invariant()
    def every_slot_holds_what_was_written(self) -> None:
        for slot, pattern in self.slots.items():
            assert self.slab.view(slot).equal(pattern)
        self.views = [view for view in self.views if view[0] in self.slots]
        for _, view, pattern in self.views:
            assert view.equal(pattern)

    @invariant()
    def the_books_are_right(self) -> None:
        assert self.slab.violations() == []
        assert self.slab.used_bytes == sum(-(-slot.size // 64) * 64 for slot in self.slots)


def test_slots_live_through_anything():
    run_state_machine_as_test(
        Slots,
        settings=settings(max_examples=150, stateful_step_count=60, suppress_health_check=list(HealthCheck)),
    )


# --- the machine's memory --------------------------------------------------------------------------------------------

RSS = """
import json, psutil
from engine.cache.host import HostSlab

SIZE, COUNT = 737_280, 364  # 256 MiB
process, seen = psutil.Process(), []

def note():
    seen.append(process.memory_info().rss)

def fill(count):
    slots = [slab.take(SIZE) for _ in range(count)]
    for slot in slots:
        slab.view(slot).fill_(1)
    return slots

slab = HostSlab(SIZE * COUNT)
for slot in fill(30):  # so that what a first time needs is there
    slab.give_back(slot)
for _ in range(2):
    note()
    slots = fill(COUNT)
    note()
    view = slab.view(slots[0])
    for slot in slots[::2]:
        slab.give_back(slot)
    slab.compact()
    del view
    note()
    for slot in slots[1::2]:
        slab.give_back(slot)
    assert slab.held_bytes == 0
note()
print(json.dumps({"bytes": SIZE * COUNT, "seen": seen}))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measured where pages are counted as they are touched")
def test_the_process_grows_and_shrinks_by_what_the_slots_hold():
    done = subprocess.run([sys.executable, "-c", RSS], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    size, (empty, full, half, again, refilled, half_again, last) = told["bytes"], told["seen"]
    assert size > 0.99 * 2**28
    for change, expected in (
        (full - empty, size),
        (half - full, -size / 2),
        (again - half, -size / 2),
        (refilled - again, size),
        (half_again - refilled, -size / 2),
        (last - half_again, -size / 2),
    ):
        assert change == pytest.approx(expected, rel=0.05)
