"""The RAM of the host tier: slots of given sizes in segments that go back to the machine. Knows not what slots hold."""

from __future__ import annotations

import contextlib
import logging
import mmap
import sys
from collections.abc import Callable, Iterator

import torch

SEGMENT_BYTES = 16 * 2**20
ALIGNMENT = 64  # bytes; what any dtype asks for, and a line of the processor's cache

log = logging.getLogger(__name__)


class HostSlot:
    """A piece of a slab, `size` bytes. It keeps its identity when its place changes."""

    __slots__ = ("place", "segment", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.segment: _Segment | None = None
        self.place = 0


class _Segment:
    """One mapping of RAM, cut into `count` places of `stride` bytes."""

    def __init__(self, stride: int, count: int) -> None:
        if sys.platform == "win32":
            memory = mmap.mmap(-1, stride * count)
        else:
            memory = mmap.mmap(-1, stride * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # a kernel without huge pages; with them, memory is new in half the time
                memory.madvise(mmap.MADV_HUGEPAGE)
        # Never closed: torch would not be asked, and a view be left without memory. It ends with its last tensor.
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self.stride = stride
        self.slots: list[HostSlot | None] = [None] * count
        self.free = list(reversed(range(count)))
        self.page_locked = False

    @property
    def size(self) -> int:
        """Bytes of all its places."""
        return self.stride * len(self.slots)

    @property
    def used(self) -> int:
        """How many places are taken."""
        return len(self.slots) - len(self.free)

    def view(self, slot: HostSlot) -> torch.Tensor:
        """The bytes of a slot that is in here."""
        start = slot.place * self.stride
        return self.bytes[start : start + slot.size]


class _Shelf:
    """The segments of one stride by how many places are free, so that the fullest with room is found at once."""

    def __init__(self) -> None:
        self.by_free: dict[int, dict[_Segment, None]] = {}

    def __iter__(self) -> Iterator[_Segment]:
        return (segment for segments in self.by_free.values() for segment in segments)

    @property
    def free(self) -> int:
        """Free places of all segments."""
        return sum(free * len(segments) for free, segments in self.by_free.items())

    def add(self, segment: _Segment) -> None:
        """Take a segment in."""
        self.by_free.setdefault(len(segment.free), {})[segment] = None

    def remove(self, segment: _Segment) -> None:
        """Let a segment go; before its places change, for it is found by them."""
        segments = self.by_free[len(segment.free)]
        del segments[segment]
        if not segments:
            del self.by_free[len(segment.free)]

    def put(self, slot: HostSlot) -> bool:
        """Give a slot a place in the fullest segment that has one; the others drain. False: all are full."""
        free = min((free for free in self.by_free if free), default=0)
        if not free:
            return False
        segment = next(iter(self.by_free[free]))
        self.remove(segment)
        slot.segment, slot.place = segment, segment.free.pop()
        segment.slots[slot.place] = slot
        self.add(segment)
        return True


class HostSlab:
    """At most `budget` bytes of RAM, mapped in segments of about `segment_bytes`, each cut into places of one size.

    A segment is mapped when a slot needs it and counted before; when its last slot is given back it goes back to the
    machine at once. A slot larger than a segment gets one of its own. `pin(segment)` may page-lock the memory of every
    new segment and says whether it has (it is used either way), `unpin(segment)` undoes that before the memory goes.
    """

    def __init__(
        self,
        budget: int,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        pin: Callable[[torch.Tensor], bool] | None = None,
        unpin: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        if budget < 0:
            raise ValueError(f"the budget is {budget} bytes; it cannot be less than 0")
        self.budget = budget
        self.held_bytes = 0  # of all segments
        self.used_bytes = 0  # of all slots, each rounded up to ALIGNMENT
        self.page_locked_bytes = 0
        self.failed_pins = 0
        self._segment_bytes = segment_bytes
        self._pin, self._unpin = pin, unpin
        self._shelves: dict[int, _Shelf] = {}
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
        """The bytes of a slot, uint8 `[size]`. Valid until the slot is given back or the slab is compacted.

        Raises `RuntimeError` for a slot that was given back.
        """
        return self._segment(slot).view(slot)

    def give_back(self, slot: HostSlot) -> None:
        """The slot is of no more use. Raises `RuntimeError` for one that was given back already."""
        segment = self._segment(slot)
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

    def _drain(self, shelf: _Shelf, segment: _Segment) -> bool:
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
            source = segment.view(slot)
            shelf.put(slot)
            self.view(slot).numpy()[:] = source.numpy()  # numpy's: see `image`
        shelf.add(segment)
        self._unmap(segment)
        return True

    # --- segments ---------------------------------------------------------------------------------------------------

    def _map(self, stride: int, count: int) -> bool:
        try:
            segment = _Segment(stride, count)
        except OSError as error:  # the machine has less than the budget says: no room, and nothing worse
            log.warning("no memory for another %d bytes of the host tier: %s", stride * count, error)
            return False
        self.held_bytes += segment.size
        self._shelves.setdefault(stride, _Shelf()).add(segment)
        if self._pin is not None:
            try:
                segment.page_locked = self._pin(segment.bytes)
            except Exception as error:  # whatever it is, pageable memory does as well
                log.warning("%d bytes of the host tier stay pageable: %s", segment.size, error)
            self.page_locked_bytes += segment.size * segment.page_locked
            self.failed_pins += not segment.page_locked
        return True

    def _unmap(self, segment: _Segment) -> None:
        shelf = self._shelves[segment.stride]
        shelf.remove(segment)
        if not shelf.by_free:
            del self._shelves[segment.stride]
        self.held_bytes -= segment.size
        if segment.page_locked:
            self.page_locked_bytes -= segment.size
            if self._unpin is not None:
                self._unpin(segment.bytes)
        self._shrinking = self._shrinking and self.held_bytes > self.budget

    def _segment(self, slot: HostSlot) -> _Segment:
        if slot.segment is None:
            raise RuntimeError(f"a slot of {slot.size} bytes was given back before")
        return slot.segment

    # --- counting ---------------------------------------------------------------------------------------------------

    def violations(self) -> list[str]:
        """Every broken law of the books as a sentence; empty when all hold. Changes nothing."""
        return list(self._broken())

    def _broken(self) -> Iterator[str]:
        held = used = page_locked = 0
        seen: set[HostSlot] = set()
        for stride, shelf in self._shelves.items():
            if not shelf.by_free:
                yield f"a shelf for places of {stride} bytes has no segment"
            for free, segments in shelf.by_free.items():
                for segment in segments:
                    held += segment.size
                    used += stride * segment.used
                    page_locked += segment.size * segment.page_locked
                    if (segment.stride, len(segment.free)) != (stride, free):
                        yield f"a segment with {len(segment.free)} free places is kept as one with {free}"
                    yield from _misplaced(segment, seen)
        counted = (self.held_bytes, self.used_bytes, self.page_locked_bytes)
        if (held, used, page_locked) != counted:
            yield f"held, used and page-locked are {held}, {used}, {page_locked} bytes, counted as {counted}"
        if self.held_bytes > self.budget and not self._shrinking:
            yield f"{self.held_bytes} bytes are held, the budget is {self.budget}"


def _misplaced(segment: _Segment, seen: set[HostSlot]) -> Iterator[str]:
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
