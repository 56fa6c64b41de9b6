"""The RAM of the host tier: slots of given sizes in segments that go back to the machine. Knows not what slots hold."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch

from engine.cache.page_locks import PageLocks
from engine.cache.segments import HostSlot, Segment, Shelf

SEGMENT_BYTES = 16 * 2**20
ALIGNMENT = 64  # bytes; what any dtype asks for, and a line of the processor's cache

log = logging.getLogger(__name__)


class HostSlab:
    """At most `budget` bytes of RAM, mapped in segments of about `segment_bytes`, each cut into places of one size.

    A segment is mapped when a slot needs it and counted before; when its last slot is given back it goes back to the
    machine at once. A slot larger than a segment gets one of its own. `locks`, where there are any, page-lock every new
    segment a little later, and unlock it before its memory goes; no memory goes, or moves, while it is copied.
    """

    def __init__(self, budget: int, *, segment_bytes: int = SEGMENT_BYTES, locks: PageLocks | None = None) -> None:
        if budget < 0:
            raise ValueError(f"the budget is {budget} bytes; it cannot be less than 0")
        self.budget = budget
        self.held_bytes = 0  # of all segments
        self.used_bytes = 0  # of all slots, each rounded up to ALIGNMENT
        self.locks = locks
        self._segment_bytes = segment_bytes
        self._shelves: dict[int, Shelf] = {}
        self._shrinking = False

    # --- slots ------------------------------------------------------------------------------------------------------

    def take(self, size: int) -> HostSlot | None:
        """A slot of `size` bytes, which hold anything. None: no room.

        While `used_bytes` is within the budget by that much, `compact` makes room; else slots must be given back first.
        """
        if size < 1:
            raise ValueError(f"a slot of {size} bytes; it needs at least 1")
        stride, slot = _stride(size), HostSlot(size)
        if self.used_bytes + stride > self.budget:
            return None
        shelf = self._shelves.get(stride)
        if shelf is None or not shelf.put(slot):
            room = (self.budget - self.held_bytes) // stride
            if room < 1 or not self._map(stride, min(room, max(1, self._segment_bytes // stride))):
                return None
            self._shelves[stride].put(slot)
        self.used_bytes += stride
        return slot

    def view(self, slot: HostSlot) -> torch.Tensor:
        """The bytes of a slot, uint8 `[size]`, when no copy uses them any more.

        Valid until the slot is given back or the slab is compacted. Raises `RuntimeError` for one that was given back.
        """
        slot.copied.wait()
        return slot.image

    def give_back(self, slot: HostSlot) -> None:
        """The slot is of no more use. Raises `RuntimeError` for one that was given back already."""
        segment = slot.home
        shelf = self._shelves[segment.stride]
        shelf.remove(segment)
        segment.slots[slot.place] = slot.segment = None
        segment.free.append(slot.place)
        shelf.add(segment)
        self.used_bytes -= segment.stride
        if not segment.used:
            self._unmap(segment)

    # --- changing size ----------------------------------------------------------------------------------------------

    def resize(self, budget: int) -> int:
        """Have another budget, and `compact` if that makes the slab fit.

        By how many bytes `used_bytes` has to fall before it can fit; 0: it fits now. Once enough slots were given back,
        `compact` makes it fit; until then no slot is to be had that the new budget has no room for.
        """
        if budget < 0:
            raise ValueError(f"the budget is {budget} bytes; it cannot be less than 0")
        self.budget = budget
        self._shrinking = self.held_bytes > budget
        excess = max(0, self.used_bytes - budget)
        if self._shrinking and not excess:
            self.compact()
        return excess

    def compact(self) -> int:
        """Move slots until no place is free, and so give back all that no slot needs; how many bytes that was.

        What moves are the slots of the sparsest segments of each size, into the fullest. A view made before still reads
        what its slot held, from memory that goes when the view does; what is written through it is lost.
        """
        before = self.held_bytes
        for shelf in list(self._shelves.values()):
            fullest_first = sorted(shelf, key=lambda segment: -segment.used)
            while fullest_first and shelf.free:
                if not self._drain(shelf, fullest_first.pop()):  # taken out: the list must not keep what has gone
                    break
        return before - self.held_bytes

    def _drain(self, shelf: Shelf, segment: Segment) -> bool:
        """Move a segment's slots into others, and into one that is just large enough where those have no room.

        False: there was no memory for that one, and nothing has moved.
        """
        shelf.remove(segment)
        missing = segment.used - shelf.free
        # This one is mapped before the larger one goes: for a moment, up to a segment more than the budget is held.
        if missing > 0 and not self._map(segment.stride, missing):
            shelf.add(segment)
            return False
        for slot in filter(None, segment.slots):
            source = self.view(slot)
            shelf.put(slot)
            self.view(slot).numpy()[:] = source.numpy()  # numpy's: see `image`
        shelf.add(segment)
        self._unmap(segment)
        return True

    # --- segments ---------------------------------------------------------------------------------------------------

    def _map(self, stride: int, count: int) -> bool:
        try:
            segment = Segment(stride, count)
        except OSError as error:  # the machine has less than the budget says: no room, and nothing worse
            log.warning("no memory for another %d bytes of the host tier: %s", stride * count, error)
            return False
        self.held_bytes += segment.size
        self._shelves.setdefault(stride, Shelf()).add(segment)
        if self.locks is not None:
            segment.unlock = self.locks.lock(segment.bytes)
        return True

    def _unmap(self, segment: Segment) -> None:
        shelf = self._shelves[segment.stride]
        shelf.remove(segment)
        if not shelf.by_free:
            del self._shelves[segment.stride]
        for copied in segment.copies:
            copied.wait()
        if segment.unlock is not None:
            segment.unlock()
        self.held_bytes -= segment.size
        self._shrinking = self._shrinking and self.held_bytes > self.budget

    # --- counting ---------------------------------------------------------------------------------------------------

    @property
    def page_locked_bytes(self) -> int:
        """As many of `held_bytes` are page-locked now."""
        return self.locks.bytes if self.locks is not None else 0

    def violations(self) -> list[str]:
        """Every broken law of the books as a sentence; empty when all hold. Changes nothing."""
        return list(self._broken())

    def _broken(self) -> Iterator[str]:
        held = used = 0
        seen: set[HostSlot] = set()
        for stride, shelf in self._shelves.items():
            if not shelf.by_free:
                yield f"a shelf for places of {stride} bytes has no segment"
            for free, segments in shelf.by_free.items():
                for segment in segments:
                    held += segment.size
                    used += stride * segment.used
                    if (segment.stride, len(segment.free)) != (stride, free):
                        yield f"a segment with {len(segment.free)} free places is kept as one with {free}"
                    yield from _misplaced(segment, seen)
        counted = (self.held_bytes, self.used_bytes)
        if (held, used) != counted:
            yield f"held and used are {held} and {used} bytes, counted as {counted}"
        if self.page_locked_bytes > self.held_bytes:
            yield f"{self.page_locked_bytes} bytes are page-locked of {self.held_bytes}"
        if self.held_bytes > self.budget and not self._shrinking:
            yield f"{self.held_bytes} bytes are held, the budget is {self.budget}"


def _misplaced(segment: Segment, seen: set[HostSlot]) -> Iterator[str]:
    taken = {place: slot for place, slot in enumerate(segment.slots) if slot is not None}
    if not taken:
        yield "a segment without slots is held"
    if sorted([*segment.free, *taken]) != list(range(len(segment.slots))):
        yield f"free places {segment.free} and taken places {list(taken)} do not make up a segment once"
    for place, slot in taken.items():
        if slot.segment is not segment or slot.place != place or _stride(slot.size) != segment.stride:
            yield f"the slot at place {place} says that it is elsewhere"
        if slot in seen:
            yield f"the slot at place {place} has another place too"
        seen.add(slot)


def _stride(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
