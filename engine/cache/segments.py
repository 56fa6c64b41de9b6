"""Where the slots of host memory lie: places in segments, each a mapping of RAM. Counts nothing, and frees nothing."""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Callable, Iterator

import torch

from engine.cache.copies import DONE, Copied


class HostSlot:
    """A piece of a slab, `size` bytes. It keeps its identity when its place changes.

    `image` and `memory` are its bytes, for one more of `Copies`' copies and for those who wait for `copied` themselves;
    everybody else asks `HostSlab.view`. Each raises `RuntimeError` once the slot was given back.
    """

    __slots__ = ("place", "segment", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.segment: Segment | None = None
        self.place = 0

    @property
    def home(self) -> Segment:
        """The segment that it is in."""
        if self.segment is None:
            raise RuntimeError(f"a slot of {self.size} bytes was given back before")
        return self.segment

    @property
    def image(self) -> torch.Tensor:
        """Its bytes, uint8 `[size]`."""
        start = self.place * self.home.stride
        return self.home.bytes[start : start + self.size]

    @property
    def memory(self) -> memoryview:
        """Its bytes, for files."""
        view: memoryview = self.image.numpy().data
        return view

    @property
    def copied(self) -> Copied:
        """The last of `Copies`' copies that uses its place: its own, or one of who had the place before."""
        return self.home.copies[self.place]

    @copied.setter
    def copied(self, copied: Copied) -> None:
        self.home.copies[self.place] = copied


class Segment:
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
        self.copies: list[Copied] = [DONE] * count  # the last that uses each place
        self.unlock: Callable[[], None] | None = None

    @property
    def size(self) -> int:
        """Bytes of all its places."""
        return self.stride * len(self.slots)

    @property
    def used(self) -> int:
        """How many places are taken."""
        return len(self.slots) - len(self.free)


class Shelf:
    """The segments of one stride by how many places are free, so that the fullest with room is found at once."""

    def __init__(self) -> None:
        self.by_free: dict[int, dict[Segment, None]] = {}

    def __iter__(self) -> Iterator[Segment]:
        return (segment for segments in self.by_free.values() for segment in segments)

    @property
    def free(self) -> int:
        """Free places of all segments."""
        return sum(free * len(segments) for free, segments in self.by_free.items())

    def add(self, segment: Segment) -> None:
        """Take a segment in."""
        self.by_free.setdefault(len(segment.free), {})[segment] = None

    def remove(self, segment: Segment) -> None:
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
