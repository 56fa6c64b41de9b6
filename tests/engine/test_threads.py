"""Torch gets the cores that other programs leave."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.threads import Threads, cpu_seconds


class Machine:
    """Four cores, and what they have done."""

    def __init__(self) -> None:
        self.now, self.all, self.own = 100.0, 5000.0, 70.0

    def passes(self, seconds: float, *, own: float, others: float) -> None:
        """Time in which this process and others used so many cores each."""
        self.now += seconds
        self.own += own * seconds
        self.all += (own + others) * seconds


@pytest.fixture
def machine() -> Iterator[Machine]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield Machine()
    torch.set_num_threads(before)


@pytest.fixture
def threads(machine: Machine) -> Threads:
    return Threads(4, lambda: machine.now, lambda: (machine.all, machine.own))


@pytest.mark.parametrize(
    ("others", "expected"), [(0.0, 4), (0.7, 4), (0.8, 3), (1.0, 3), (1.74, 3), (1.76, 2), (2.8, 1), (4.0, 1), (9.0, 1)]
)
def test_others_are_left_what_they_use(others: float, expected: int, machine: Machine, threads: Threads) -> None:
    machine.passes(0.5, own=3.0, others=others)
    threads.adapt()
    assert torch.get_num_threads() == expected
    machine.passes(0.5, own=1.0, others=0.0)
    threads.adapt()
    assert torch.get_num_threads() == 4


def test_a_moment_says_nothing(machine: Machine, threads: Threads) -> None:
    machine.passes(0.1, own=1.0, others=3.0)
    threads.adapt()
    assert torch.get_num_threads() == 4
    machine.passes(0.3, own=1.0, others=3.0)
    threads.adapt()
    assert torch.get_num_threads() == 1


def test_no_more_than_were_set(machine: Machine) -> None:
    torch.set_num_threads(2)
    threads = Threads(4, lambda: machine.now, lambda: (machine.all, machine.own))
    for others, expected in ((1.0, 2), (3.0, 1), (0.0, 2)):
        machine.passes(1.0, own=1.0, others=others)
        threads.adapt()
        assert torch.get_num_threads() == expected


def test_what_this_process_does_is_its_own() -> None:
    everything, own = cpu_seconds()
    a = torch.ones(700, 700)
    for _ in range(20):
        a @ a
    later, own_later = cpu_seconds()
    assert own_later > own
    assert later - everything >= (own_later - own) * 0.5  # the kernel counts the machine's time in larger pieces
