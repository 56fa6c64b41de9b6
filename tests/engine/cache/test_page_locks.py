from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from engine.cache.page_locks import PageLocks

SIZE = 256


def memory() -> torch.Tensor:
    return torch.zeros(SIZE, dtype=torch.uint8)


class Kernel:
    """Page-locks memory when it is told to."""

    def __init__(self) -> None:
        self.locked: list[int] = []
        self.threads: set[str] = set()
        self.begun, self.may = threading.Semaphore(0), threading.Semaphore(0)

    def pin(self, piece: torch.Tensor) -> bool:
        self.threads.add(threading.current_thread().name)
        self.begun.release()
        assert self.may.acquire(timeout=10)
        self.locked.append(piece.data_ptr())
        return True

    def unpin(self, piece: torch.Tensor) -> None:
        self.locked.remove(piece.data_ptr())


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


def test_memory_is_locked_beside_and_counted_when_it_is(kernel: Kernel) -> None:
    locks, piece = PageLocks(kernel.pin, kernel.unpin), memory()
    unlock = locks.lock(piece)
    assert kernel.begun.acquire(timeout=10)
    assert (locks.bytes, kernel.locked) == (0, [])
    kernel.may.release()
    locks.settle()
    assert (locks.bytes, locks.failed, kernel.locked) == (SIZE, 0, [piece.data_ptr()])
    assert threading.current_thread().name not in kernel.threads
    unlock()
    assert (locks.bytes, kernel.locked) == (0, [])


def test_memory_that_is_being_locked_is_unlocked_when_that_has_ended(kernel: Kernel) -> None:
    locks = PageLocks(kernel.pin, kernel.unpin)
    unlock = locks.lock(memory())
    assert kernel.begun.acquire(timeout=10)
    ended: list[list[int]] = []
    going = threading.Thread(target=lambda: (unlock(), ended.append(list(kernel.locked))))
    going.start()
    going.join(0.05)
    assert going.is_alive(), "it goes while it is being locked"
    kernel.may.release()
    going.join(10)
    assert (ended, locks.bytes) == ([[]], 0)


def test_memory_that_goes_before_its_turn_is_never_locked(kernel: Kernel) -> None:
    locks, first = PageLocks(kernel.pin, kernel.unpin), memory()
    unlock_first, unlock = locks.lock(first), locks.lock(memory())
    assert kernel.begun.acquire(timeout=10)
    unlock()
    kernel.may.release()
    locks.settle()
    assert (locks.bytes, kernel.locked) == (SIZE, [first.data_ptr()])
    unlock_first()
    assert (locks.bytes, locks.failed, kernel.locked) == (0, 0, [])


def refuse(_: torch.Tensor) -> bool:
    raise RuntimeError("cudaErrorMemoryAllocation")


@pytest.mark.parametrize("pin", [lambda _: False, refuse])
def test_what_cannot_be_locked_is_counted_and_not_unlocked(pin: Callable[[torch.Tensor], bool]) -> None:
    unlocked: list[torch.Tensor] = []
    locks = PageLocks(pin, unlocked.append)
    unlock = locks.lock(memory())
    locks.settle()
    assert (locks.bytes, locks.failed) == (0, 1)
    unlock()
    assert (locks.bytes, locks.failed, unlocked) == (0, 1, [])
