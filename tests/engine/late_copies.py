"""CUDA's streams without a GPU: what is queued on one is done when somebody has to wait for it, and no sooner.

So a copy comes as late as the fences allow, and whoever forgets one reads what was there before, or has it spoilt.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from engine.cache.copies import Copied, StreamCopies
from engine.cache.image import ImageCodec
from engine.cache.pool import KVPool
from engine.cache.segments import HostSlot

CUDA = torch.device("cuda")
ONE_AT_A_TIME = threading.RLock()  # workers wait for copies too


class Stream:
    """Work in order, of which `done` pieces are done."""

    def __init__(self) -> None:
        self._work: deque[Callable[[], object]] = deque()
        self.queued = self.done = 0

    def do(self, work: Callable[[], object]) -> None:
        """Queue some work."""
        self._work.append(work)
        self.queued += 1

    def synchronize(self, upto: int | None = None) -> None:
        """Do what is queued, or the first so many pieces ever."""
        with ONE_AT_A_TIME:
            while self.done < (self.queued if upto is None else upto):
                work = self._work.popleft()
                try:
                    work()
                finally:
                    self.done += 1

    def record_event(self) -> Event:
        """A mark behind what is queued now."""
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Go on when the other stream has come to a mark."""
        self.do(event.synchronize)

    def wait_stream(self, other: Stream) -> None:
        """Go on when the other stream has done what is queued there now."""
        self.wait_event(other.record_event())


class Event:
    """A mark on a stream. Between any two lies a quarter of a second."""

    def __init__(self, **_: bool) -> None:
        self._stream, self._at = Stream(), 0

    def record(self, stream: Stream) -> None:
        """Behind what is queued there now."""
        self._stream, self._at = stream, stream.queued

    def synchronize(self) -> None:
        """Have the stream come this far."""
        self._stream.synchronize(self._at)

    def query(self) -> bool:
        """Whether it has."""
        return self._stream.done >= self._at

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds."""
        assert end.query()
        return 250.0


class Cuda:
    """Stands in for `torch.cuda`: `main` is the stream that is the current one, `side` the one that is made."""

    def __init__(self) -> None:
        self.main, self.side = Stream(), Stream()
        self._current = self.main
        self.locked: dict[int, int] = {}  # page-locked bytes, by address
        self.refuses = False  # to page-lock
        self.Stream = lambda device: self.side
        self.Event = Event

    def current_stream(self, device: torch.device) -> Stream:
        """Where work goes now."""
        return self._current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Within it, work goes there."""
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        """There is but one."""
        assert device == CUDA
        yield

    def cudart(self) -> Cuda:
        """The functions of the runtime."""
        return self

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        """Page-lock memory; 0: it is."""
        if not self.refuses:
            self.locked[address] = size
        return 2 if self.refuses else 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
        """Undo that."""
        return 0 if self.locked.pop(address, 0) else 713


class LateCodec(ImageCodec):
    """Its copies are queued on the current stream, like those of a GPU."""

    def __init__(self, cuda: Cuda, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._cuda = cuda

    def store(self, pool_data: torch.Tensor, slot: int, into: torch.Tensor, tokens: int | None = None) -> None:
        """Queue it; what is wrong with the arguments is said at once."""
        self._check(pool_data, [into])
        self._cuda.current_stream(CUDA).do(partial(super().store, pool_data, slot, into, tokens))

    def load_many(self, images: Sequence[torch.Tensor], pool_data: torch.Tensor, slots: Sequence[int]) -> None:
        """Queue it; what is wrong with the arguments is said at once."""
        self._check(pool_data, images)
        self._cuda.current_stream(CUDA).do(partial(super().load_many, images, pool_data, slots))


class LateCopies(StreamCopies):
    """Copies for a model that computes on the processor: a pass begins when all that it has to wait for has ended.

    A block of `pool` that is nobody's turns NaN where the next pass may write to it, and no sooner.
    """

    def __init__(self, pool: KVPool | None = None) -> None:
        self.cuda = Cuda()
        super().__init__(CUDA, self.cuda)
        self._pool = pool
        self._nobodys: set[int] = set()

    def load_many(
        self, codec: ImageCodec, images: Sequence[HostSlot], pool_data: torch.Tensor, blocks: Sequence[int]
    ) -> Copied:
        """Such a block may also be filled, without any pass in between."""
        self._nobodys -= set(blocks)
        return super().load_many(codec, images, pool_data, blocks)

    def freed(self, codec: ImageCodec, block: int) -> None:
        """It is spoilt later."""
        super().freed(codec, block)
        self._nobodys.add(block)

    def before_writes(self) -> None:
        """Wait, and spoil what the next pass may write to."""
        super().before_writes()
        self.cuda.main.synchronize()
        for block in self._nobodys if self._pool is not None else ():
            self._pool.poison(block)
        self._nobodys.clear()

    def before_moving(self) -> None:
        """Wait; blocks have other numbers afterwards."""
        super().before_moving()
        self.cuda.main.synchronize()
        self._nobodys.clear()

    def page_locks(self) -> None:
        """Nothing is page-locked."""
