"""Copies of blocks between pools and host memory, and when each side may be used. Decides nothing.

In RAM a copy has ended when the call returns. On CUDA it goes over a side stream, beside the forward passes, and fences
keep the two streams in order:

- a block is copied out after the pass that filled it, and in after the last one that used its memory;
- the next pass reads it after it was copied in;
- its memory is written to by others after it was copied out. What is copied out and stays holds up nobody.

All copies go over the one side stream, in order: what host memory one of them uses, the next may use without waiting.
Everybody else waits for the last copy of a slot (`HostSlot.copied`) before they read it, write to it or let it go.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from engine.cache.page_locks import PageLocks
from engine.cache.rates import MovingRate

if TYPE_CHECKING:
    from engine.cache.image import ImageCodec
    from engine.cache.segments import HostSlot

PROBE_S = 300.0  # after which what was found slow is tried again

log = logging.getLogger(__name__)


class Copied(Protocol):
    """A copy that was asked for."""

    def wait(self) -> None:
        """Return when it has ended; on any thread."""

    @property
    def seconds(self) -> float | None:
        """How long it took; None: it has not ended, or nobody has measured it."""


class _Done:
    seconds = None

    def wait(self) -> None:
        pass


DONE: Copied = _Done()  # of every copy that has ended when the call returns


class Copies(Protocol):
    """What copies blocks. For the engine's thread; raises what torch raises."""

    def store(
        self, codec: ImageCodec, pool_data: torch.Tensor, block: int, into: HostSlot, tokens: int | None = None
    ) -> Copied:
        """Copy a block, or its first `tokens`, to a slot."""

    def load_many(
        self, codec: ImageCodec, images: Sequence[HostSlot], pool_data: torch.Tensor, blocks: Sequence[int]
    ) -> Copied:
        """Copy slots to blocks, one to each; the next forward pass finds them there."""

    def freed(self, codec: ImageCodec, block: int) -> None:
        """This block of the codec's pool is nobody's from now on."""

    def before_writes(self) -> None:
        """Pools are about to be written to: what is still copied out of blocks that were freed comes first."""

    def before_moving(self) -> None:
        """A pool's memory is about to go: every copy comes first."""

    def page_locks(self) -> PageLocks | None:
        """What page-locks memory that is copied to and from; None: it does as it is."""


class DirectCopies:
    """Copies that have ended when the call returns; nobody waits for anything."""

    def store(
        self, codec: ImageCodec, pool_data: torch.Tensor, block: int, into: HostSlot, tokens: int | None = None
    ) -> Copied:
        """Copy a block, or its first `tokens`, to a slot."""
        codec.store(pool_data, block, into.image, tokens)
        return DONE

    def load_many(
        self, codec: ImageCodec, images: Sequence[HostSlot], pool_data: torch.Tensor, blocks: Sequence[int]
    ) -> Copied:
        """Copy slots to blocks, one to each."""
        codec.load_many([slot.image for slot in images], pool_data, blocks)
        return DONE

    def freed(self, codec: ImageCodec, block: int) -> None:
        """Nothing is under way."""

    def before_writes(self) -> None:
        """Nothing is under way."""

    def before_moving(self) -> None:
        """Nothing is under way."""

    def page_locks(self) -> None:
        """RAM is copied to RAM as it is."""


class _Queued:
    """A copy on the side stream, between two of its events."""

    __slots__ = ("began", "ended")

    def __init__(self, cuda: Any) -> None:
        self.began, self.ended = (cuda.Event(enable_timing=True, blocking=True) for _ in range(2))

    def wait(self) -> None:
        self.ended.synchronize()

    @property
    def seconds(self) -> float | None:
        return self.began.elapsed_time(self.ended) / 1000 if self.ended.query() else None


class StreamCopies:
    """Copies over a side stream of `device`, beside what runs on its current one. `cuda` is `torch.cuda`."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._side = cuda.Stream(device)
        self._outgoing: dict[tuple[ImageCodec, int], _Queued] = {}  # the last copy out of each block
        self._freed: list[_Queued] = []  # those of blocks that are others' now

    def store(
        self, codec: ImageCodec, pool_data: torch.Tensor, block: int, into: HostSlot, tokens: int | None = None
    ) -> Copied:
        """Queue a copy of a block, or of its first `tokens`, to a slot."""
        copied = self._outgoing[codec, block] = _Queued(self._cuda)
        self._queue(copied, [into], partial(codec.store, pool_data, block, into.image, tokens))
        return copied

    def load_many(
        self, codec: ImageCodec, images: Sequence[HostSlot], pool_data: torch.Tensor, blocks: Sequence[int]
    ) -> Copied:
        """Queue a copy of slots to blocks, one to each; what runs next waits for it."""
        copied = _Queued(self._cuda)
        try:
            self._queue(copied, images, partial(codec.load_many, [slot.image for slot in images], pool_data, blocks))
        finally:
            self._current.wait_event(copied.ended)
        return copied

    def freed(self, codec: ImageCodec, block: int) -> None:
        """This block of the codec's pool is nobody's from now on."""
        copied = self._outgoing.pop((codec, block), None)
        if copied is not None and not copied.ended.query():
            self._freed.append(copied)

    def before_writes(self) -> None:
        """Have what runs next wait for what is still copied out of blocks that were freed."""
        for copied in self._freed:
            self._current.wait_event(copied.ended)
        self._freed.clear()

    def before_moving(self) -> None:
        """Have what runs next wait for every copy; blocks may have other numbers afterwards."""
        self._current.wait_stream(self._side)
        self._outgoing.clear()
        self._freed.clear()

    @property
    def _current(self) -> Any:
        return self._cuda.current_stream(self._device)

    def _queue(self, copied: _Queued, slots: Sequence[HostSlot], copy: Callable[[], None]) -> None:
        """Have `copy` done after what runs now. Where it fails, a part of it may be under way all the same."""
        self._side.wait_stream(self._current)
        with self._cuda.stream(self._side):
            copied.began.record(self._side)
            try:
                copy()
            finally:
                copied.ended.record(self._side)
                for slot in slots:
                    slot.copied = copied

    # --- page-locked memory -------------------------------------------------------------------------------------------

    def page_locks(self) -> PageLocks:
        """What page-locks memory, so that copies to and from it need no help of the processor's."""
        return PageLocks(self._pin, self._unpin)

    def _pin(self, memory: torch.Tensor) -> bool:
        with self._cuda.device(self._device):  # of this thread
            code = int(self._cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        return code == 0

    def _unpin(self, memory: torch.Tensor) -> None:
        code = int(self._cuda.cudart().cudaHostUnregister(memory.data_ptr()))
        if code:
            log.error("%d bytes of host memory could not be unlocked: CUDA error %d", memory.nbytes, code)


def copies_for(device: torch.device) -> Copies:
    """How blocks are copied to and from a pool on this device."""
    return StreamCopies(device) if device.type == "cuda" else DirectCopies()


class CopyTimes:
    """How long copies between pools and host memory take, by those that were made: in seconds, on `clock`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._rate, self._measured_at = clock, MovingRate(), 0.0
        self._queued: deque[tuple[int, Copied]] = deque()  # bytes, in order

    def note(self, amount: int, began: float, copied: Copied) -> None:
        """So many bytes are copied, which was asked for at `began` and just now returned."""
        if copied is DONE:
            self._observe(amount, self._clock() - began)
        else:
            self._queued.append((amount, copied))

    def seconds_for(self, amount: int) -> float | None:
        """How long copying so many bytes takes; None: nobody has tried lately."""
        self._look()
        return self._rate.seconds_for(amount) if self._clock() - self._measured_at < PROBE_S else None

    def backlog_s(self) -> float:
        """How long the copies still take that were asked for and have not ended."""
        self._look()
        return self._rate.seconds_for(sum(amount for amount, _ in self._queued)) or 0.0 if self._queued else 0.0

    def _look(self) -> None:
        """Learn from those that have ended since."""
        while self._queued and (seconds := self._queued[0][1].seconds) is not None:
            self._observe(self._queued.popleft()[0], seconds)

    def _observe(self, amount: int, seconds: float) -> None:
        self._measured_at = self._clock()
        self._rate.observe(amount, seconds)
