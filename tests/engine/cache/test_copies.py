"""Copies over a side stream: with streams that do nothing before they have to, and on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine.cache import copies
from engine.cache.copies import DONE, CopyTimes, DirectCopies, StreamCopies, copies_for
from engine.cache.host import HostSlab
from engine.cache.image import ImageCodec
from engine.cache.segments import HostSlot
from tests.engine.late_copies import CUDA, Cuda, LateCodec

SHAPE = (2, 4, 1, 2, torch.float32, "auto")  # layers, tokens, heads, dimensions
SIZE = 2 * 2 * 4 * 2 * 4
BLOCKS = 6


class Machine:
    """A pool whose block `n` holds nothing but `n`, and host memory. Passes over the pool are as late as copies."""

    def __init__(self) -> None:
        self.cuda = Cuda()
        self.copies = StreamCopies(CUDA, self.cuda)
        self.codec = LateCodec(self.cuda, *SHAPE)
        self.pool = torch.zeros(2, 2, BLOCKS, 4, 1, 2)
        for block in range(BLOCKS):
            self.fill(block, block)
        self.slab = HostSlab(8 * SIZE, segment_bytes=4 * SIZE, locks=self.copies.page_locks())

    def fill(self, block: int, value: float) -> None:
        self.pool[:, :, block] = value

    def then(self, work: Callable[[], object]) -> None:
        """What the next pass does."""
        self.cuda.main.do(work)

    def slot(self, value: float = 0.5) -> HostSlot:
        """A slot that holds nothing but a value."""
        slot = self.slab.take(SIZE)
        assert slot is not None
        self.slab.view(slot).view(torch.float32).fill_(value)
        return slot

    def store(self, block: int, slot: HostSlot) -> copies.Copied:
        return self.copies.store(self.codec, self.pool, block, slot)

    def load(self, slots: list[HostSlot], blocks: list[int]) -> copies.Copied:
        return self.copies.load_many(self.codec, slots, self.pool, blocks)

    def freed(self, block: int) -> None:
        self.copies.freed(self.codec, block)

    def host(self, slot: HostSlot) -> list[float]:
        """What a slot holds, each value once."""
        values: list[float] = self.slab.view(slot).view(torch.float32).unique().tolist()
        return values

    def block(self, block: int) -> list[float]:
        """What a block holds, each value once."""
        values: list[float] = self.pool[:, :, block].unique().tolist()
        return values


@pytest.fixture
def machine() -> Machine:
    return Machine()


# --- between the streams ----------------------------------------------------------------------------------------------


def test_a_block_is_copied_out_after_the_pass_that_filled_it(machine: Machine) -> None:
    machine.then(lambda: machine.fill(1, 7))
    slot = machine.slot()
    machine.store(1, slot)
    assert machine.host(slot) == [7]


def test_a_block_is_copied_in_after_the_last_pass_that_used_its_memory(machine: Machine) -> None:
    machine.then(lambda: machine.fill(2, 7))
    machine.load([machine.slot(9)], [2]).wait()
    machine.cuda.main.synchronize()
    assert machine.block(2) == [9]


def test_the_next_pass_reads_what_was_copied_in(machine: Machine) -> None:
    machine.load([machine.slot(8), machine.slot(9)], [4, 2])
    seen: list[list[float]] = []
    machine.then(lambda: seen.extend([machine.block(4), machine.block(2)]))
    machine.cuda.main.synchronize()
    assert seen == [[8], [9]]


def test_memory_is_written_to_after_it_was_copied_out(machine: Machine) -> None:
    first, second = machine.slot(), machine.slot()
    machine.store(3, first)
    machine.store(4, second)
    for block in (4, 3):  # not in the order in which they were copied
        machine.freed(block)
    machine.copies.before_writes()
    machine.then(lambda: machine.fill(3, 7))
    machine.then(lambda: machine.fill(4, 7))
    machine.cuda.main.synchronize()
    assert (machine.host(first), machine.host(second)) == ([3], [4])


def test_a_block_that_was_copied_out_twice_waits_for_both(machine: Machine) -> None:
    first, second = machine.slot(), machine.slot()
    machine.store(3, first)
    machine.store(3, second)
    machine.freed(3)
    machine.copies.before_writes()
    machine.then(lambda: machine.fill(3, 7))
    machine.cuda.main.synchronize()
    assert (machine.host(first), machine.host(second)) == ([3], [3])


def test_what_is_copied_out_and_stays_holds_up_nobody(machine: Machine) -> None:
    copied = machine.store(3, machine.slot())
    machine.copies.freed(LateCodec(machine.cuda, *SHAPE), 3)  # another pool's
    machine.copies.before_writes()
    machine.then(lambda: machine.fill(1, 7))
    machine.cuda.main.synchronize()
    assert machine.block(1) == [7] and copied.seconds is None


def test_what_was_waited_for_is_not_waited_for_again(machine: Machine) -> None:
    machine.store(3, machine.slot())
    machine.freed(3)
    machine.copies.before_writes()
    machine.store(2, machine.slot())
    machine.copies.before_moving()
    machine.cuda.main.synchronize()
    queued = machine.cuda.main.queued
    machine.freed(2)  # another block of this number
    machine.copies.before_writes()
    assert machine.cuda.main.queued == queued


def test_every_copy_comes_before_memory_goes(machine: Machine) -> None:
    slots = [machine.slot() for _ in range(BLOCKS)]
    for block, slot in enumerate(slots):
        machine.store(block, slot)
    machine.copies.before_moving()
    machine.then(lambda: machine.pool.fill_(torch.nan))
    machine.cuda.main.synchronize()
    assert [machine.host(slot) for slot in slots] == [[0], [1], [2], [3], [4], [5]]


@pytest.mark.parametrize("outwards", [False, True])
def test_what_a_failed_copy_has_begun_is_waited_for(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, outwards: bool
) -> None:
    machine.slot()  # so that the segment stays
    slot, name = machine.slot(9), "store" if outwards else "load_many"
    real = getattr(machine.codec, name)

    def half(*arguments: object) -> None:
        real(*arguments)
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(machine.codec, name, half)
    with pytest.raises(RuntimeError, match="out of memory"):
        machine.store(3, slot) if outwards else machine.load([slot], [3])
    machine.then(lambda: machine.fill(3, 7))
    machine.cuda.main.synchronize()
    machine.slab.give_back(slot)
    again = machine.slot(4)  # in the same place
    machine.cuda.side.synchronize()
    assert (machine.block(3), machine.host(again)) == ([7], [4])


# --- host memory ------------------------------------------------------------------------------------------------------


def test_a_slot_is_reused_by_another_copy_at_once_and_by_others_when_it_is_free(machine: Machine) -> None:
    machine.slot()  # so that the segment stays
    slot = machine.slot(9)
    machine.load([slot], [2])
    place = slot.place
    machine.slab.give_back(slot)
    again = machine.slab.take(SIZE)
    assert again is not None and again.place == place
    machine.store(1, again)
    assert machine.cuda.side.done == 0, "nobody had to wait"
    machine.slab.view(again).view(torch.float32).fill_(4)
    machine.cuda.main.synchronize()
    assert (machine.block(2), machine.host(again)) == ([9], [4])


def test_a_slot_is_moved_with_what_is_copied_to_it(machine: Machine) -> None:
    slots = [machine.slot(9) for _ in range(8)]
    machine.store(3, slots[7])
    for slot in slots[:4] + slots[5:7]:
        machine.slab.give_back(slot)
    assert machine.slab.compact() == 2 * SIZE
    assert (machine.host(slots[4]), machine.host(slots[7])) == ([9], [3])


def test_a_slot_is_not_moved_to_where_a_copy_still_reads(machine: Machine) -> None:
    slots = [machine.slot(10 + number) for number in range(8)]
    machine.load([slots[1]], [2])
    for slot in slots[:2] + slots[5:]:
        machine.slab.give_back(slot)
    machine.slab.compact()  # the fifth goes to the place of the second, for a while
    machine.cuda.main.synchronize()
    assert (machine.block(2), machine.host(slots[4])) == ([11], [14])


def test_memory_is_copied_to_the_end_before_it_is_unlocked_and_goes(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot, under_way, real = machine.slot(9), [], machine.cuda.cudaHostUnregister

    def unlock(address: int) -> int:
        under_way.append(machine.cuda.side.queued - machine.cuda.side.done)
        return real(address)

    monkeypatch.setattr(machine.cuda, "cudaHostUnregister", unlock)
    assert machine.slab.locks is not None
    machine.slab.locks.settle()
    assert machine.slab.page_locked_bytes == 4 * SIZE
    machine.load([slot], [2])
    machine.slab.give_back(slot)
    assert (under_way, machine.cuda.locked, machine.slab.page_locked_bytes) == ([0], {}, 0)
    machine.cuda.main.synchronize()
    assert machine.block(2) == [9]


def test_memory_that_cannot_be_page_locked_does_as_well(machine: Machine) -> None:
    machine.cuda.refuses = True
    slot = machine.slot(9)
    assert machine.slab.locks is not None
    machine.slab.locks.settle()
    assert (machine.slab.page_locked_bytes, machine.slab.locks.failed) == (0, 1)
    machine.load([slot], [2])
    machine.slab.give_back(slot)
    machine.cuda.main.synchronize()
    assert machine.block(2) == [9]


# --- how long they take -----------------------------------------------------------------------------------------------


def test_copies_are_measured_when_they_have_ended(machine: Machine) -> None:
    now = [100.0]
    times = CopyTimes(lambda: now[0])
    copied = machine.store(1, machine.slot())
    times.note(SIZE, 0.0, copied)
    assert times.seconds_for(SIZE) is None and times.backlog_s() == 0
    copied.wait()
    assert times.seconds_for(SIZE) == 0.25 and times.backlog_s() == 0
    for _ in range(3):
        times.note(2 * SIZE, 0.0, machine.load([machine.slot(), machine.slot()], [2, 3]))
    assert times.backlog_s() == 1.5
    now[0] += 299
    assert times.seconds_for(SIZE) == 0.25
    now[0] += 2
    assert times.seconds_for(SIZE) is None, "that is long ago"


def test_copies_that_end_at_once_are_measured_by_the_clock() -> None:
    now = [100.0]
    times = CopyTimes(lambda: now[0])
    times.note(1000, 98.0, DONE)
    assert times.seconds_for(500) == 1.0 and times.backlog_s() == 0


# --- which ------------------------------------------------------------------------------------------------------------


def test_only_cuda_has_a_side_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.device] = []
    monkeypatch.setattr(copies, "StreamCopies", made.append)
    for name in ("cpu", "mps"):
        direct = copies_for(torch.device(name))
        assert isinstance(direct, DirectCopies) and direct.page_locks() is None
    copies_for(torch.device("cuda:0"))
    assert made == [torch.device("cuda:0")]


def test_copies_in_ram_have_ended_when_the_call_returns() -> None:
    codec, pool, slab, direct = ImageCodec(*SHAPE), torch.rand(2, 2, 3, 4, 1, 2), HostSlab(SIZE), DirectCopies()
    slot = slab.take(SIZE)
    assert slot is not None
    assert direct.store(codec, pool, 0, slot) is DONE and slot.copied is DONE
    assert direct.load_many(codec, [slot], pool, [2]) is DONE
    assert pool[:, :, 2].equal(pool[:, :, 0])
    direct.store(codec, pool, 0, slot, tokens=1)
    direct.load_many(codec, [slot], pool, [1])
    assert pool[:, :, 1, 0].equal(pool[:, :, 0, 0]) and pool[:, :, 1, 1:].eq(0).all()


# --- a GPU ------------------------------------------------------------------------------------------------------------

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
LONG = 200_000_000  # cycles: about a tenth of a second


class Gpu(Machine):
    """The same on a GPU, with page-locked memory; either stream can be held up."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.copies = StreamCopies(self.device)
        self.codec = ImageCodec(*SHAPE)
        self.pool = torch.zeros(2, 2, BLOCKS, 4, 1, 2, device=self.device)
        for block in range(BLOCKS):
            self.fill(block, block)
        self.slab = HostSlab(8 * SIZE, segment_bytes=4 * SIZE, locks=self.copies.page_locks())
        self.slot()
        assert self.slab.locks is not None
        self.slab.locks.settle()
        self.block(0)  # so that what a first time needs is there
        torch.cuda.synchronize()

    def then(self, work: Callable[[], object]) -> None:
        work()

    def hold_up_main(self) -> None:
        torch.cuda._sleep(LONG)

    def hold_up_side(self) -> None:
        with torch.cuda.stream(self.copies._side):
            torch.cuda._sleep(LONG)


@GPU
def test_a_gpu_copies_out_after_the_pass_that_filled_a_block() -> None:
    gpu = Gpu()
    slot = gpu.slot()
    gpu.hold_up_main()
    gpu.fill(1, 7)
    gpu.store(1, slot)
    assert gpu.host(slot) == [7]


@GPU
def test_a_gpu_copies_in_after_the_last_pass_and_before_the_next() -> None:
    gpu = Gpu()
    slot = gpu.slot(9)
    gpu.hold_up_main()
    gpu.fill(2, 7)
    gpu.hold_up_side()
    gpu.load([slot], [2])
    assert gpu.block(2) == [9]


@GPU
def test_a_gpu_writes_to_memory_after_it_was_copied_out_and_waits_for_nothing_else() -> None:
    gpu = Gpu()
    first, second = gpu.slot(), gpu.slot()
    gpu.hold_up_side()
    staying = gpu.store(4, second)
    gpu.copies.before_writes()
    gpu.fill(5, 7)
    assert gpu.block(5) == [7] and staying.seconds is None
    copied = gpu.store(3, first)
    gpu.freed(3)
    gpu.copies.before_writes()
    gpu.fill(3, 7)
    assert gpu.block(3) == [7] and gpu.host(first) == [3] and gpu.host(second) == [4]
    assert copied.seconds is not None and 0 < copied.seconds < 1


@GPU
def test_a_gpu_copies_before_memory_goes() -> None:
    gpu = Gpu()
    slot = gpu.slot()
    gpu.hold_up_side()
    gpu.store(3, slot)
    gpu.copies.before_moving()
    gpu.pool.fill_(torch.nan)
    torch.cuda.current_stream().synchronize()
    assert gpu.host(slot) == [3]


@GPU
def test_host_memory_of_a_gpu_is_page_locked_until_it_goes() -> None:
    gpu = Gpu()
    slots = [gpu.slot(9) for _ in range(5)]
    assert gpu.slab.locks is not None
    gpu.slab.locks.settle()
    assert gpu.slab.page_locked_bytes == gpu.slab.held_bytes and gpu.slab.view(slots[4]).is_pinned()
    view = gpu.slab.view(slots[4])
    gpu.hold_up_side()
    gpu.load([slots[4]], [2])
    for slot in slots:
        gpu.slab.give_back(slot)
    assert gpu.slab.page_locked_bytes == 4 * SIZE and not view.is_pinned()
    assert gpu.block(2) == [9]
