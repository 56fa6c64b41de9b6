"""How much is written in a day: never more than was allowed, whatever the clock does and however often it starts."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from engine.cache import files as whole
from engine.cache.write_budget import WriteBudget
from tests.engine.cache.disk_blocks import failing

HOUR = 3600


class Clock:
    def __init__(self) -> None:
        self.now = 1_700_000_000.0  # 800 s into an hour

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_what_was_spent_comes_back_after_a_day(tmp_path: Path, clock: Clock) -> None:
    budget = WriteBudget(tmp_path / "writes", 100, clock)
    assert budget.allows(100) and not budget.allows(101)
    budget.spend(60)
    clock.now += 10 * HOUR
    budget.spend(30)
    assert budget.spent() == 90 and budget.allows(10) and not budget.allows(11)
    clock.now += 14 * HOUR  # the first hour is a day ago, and not all of it has left
    assert budget.spent() == 90
    clock.now += HOUR
    assert budget.spent() == 30 and budget.allows(70) and not budget.allows(71)
    clock.now += 100 * 24 * HOUR
    assert budget.spent() == 0


def test_in_no_24_hours_more_than_the_limit_is_written(tmp_path: Path, clock: Clock) -> None:
    budget = WriteBudget(tmp_path / "writes", 1000, clock)
    written: list[tuple[float, int]] = []
    for step in range(600):
        if budget.allows(35):
            budget.spend(35)
            written.append((clock.now, 35))
        clock.now += 700 + step % 13 * 60
    for end, _ in written:
        assert sum(size for at, size in written if end - 24 * HOUR < at <= end) <= 1000
    assert sum(size for _, size in written) > 1000 * 6  # and it is used: 600 steps are a week


def test_it_survives_a_restart(tmp_path: Path, clock: Clock) -> None:
    WriteBudget(tmp_path / "writes", 100, clock).spend(60)
    clock.now += HOUR
    again = WriteBudget(tmp_path / "writes", 100, clock)
    assert again.spent() == 60 and not again.allows(41)
    assert [path.name for path in tmp_path.iterdir()] == ["writes"]


def test_no_limit_still_counts_and_a_limit_can_come(tmp_path: Path, clock: Clock) -> None:
    budget = WriteBudget(tmp_path / "writes", None, clock)
    budget.spend(10**15)
    assert budget.allows(10**15)
    budget.bytes_per_day = 10**15
    assert not budget.allows(1) and budget.allows(0)
    budget.bytes_per_day = 0
    assert not budget.allows(1)


def test_a_clock_that_is_set_back_neither_forgets_nor_blocks_for_ever(tmp_path: Path, clock: Clock) -> None:
    budget = WriteBudget(tmp_path / "writes", 100, clock)
    budget.spend(60)
    clock.now -= 365 * 24 * HOUR
    assert budget.spent() == 60
    budget.spend(10)
    again = WriteBudget(tmp_path / "writes", 100, clock)
    clock.now += 24 * HOUR
    assert again.spent() == 70
    clock.now += HOUR
    assert again.spent() == budget.spent() == 0


@pytest.mark.parametrize("content", [b"", b"KEEPREC1", b"x" * 100, b"{}"])
def test_a_damaged_file_only_forgets(tmp_path: Path, clock: Clock, content: bytes) -> None:
    (tmp_path / "writes").write_bytes(content)
    budget = WriteBudget(tmp_path / "writes", 100, clock)
    assert budget.spent() == 0
    budget.spend(1)
    assert WriteBudget(tmp_path / "writes", 100, clock).spent() == 1


def test_a_disk_that_fails_is_no_error(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = WriteBudget(tmp_path / "writes", 100, clock)
    monkeypatch.setattr(whole, "FileIO", failing("write", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    budget.spend(60)
    assert budget.spent() == 60 and not budget.allows(41)
    assert list(tmp_path.iterdir()) == []
