"""A disk that others fill: the disk tier leaves room on it, and gives way."""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path

import pytest

from engine.budgets import disk_most, disk_reserve
from engine.cache import disk_space
from engine.cache.block_file import DiskFull
from engine.cache.disk_space import DiskSpace
from engine.cache.journal import Journal
from engine.ledger import cold_usage
from tests.engine.cache.disk_blocks import file_system
from tests.engine.cold_rig import ColdRig
from tests.engine.model.tiny import prompt
from tests.engine.played_rig import PlayedRig
from tests.engine.test_tiers import PROMPT, follow, turn
from tests.engine.tiered import engine, model, settings, until

MIB = 2**20
RESERVE = 64 * MIB  # of a disk of so many
TOTAL = 1024 * MIB


class Disk:
    """A file system of 1 GiB on which `others` leave free what is said, but for the tier's files in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.room, self.looks = folder, TOTAL, 0

    def __call__(self, folder: Path) -> tuple[int, int]:
        assert folder == self.folder
        self.looks += 1
        return TOTAL, self.room - sum(path.stat().st_size for path in self.folder.rglob("*.kv"))


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk(tmp_path)
    monkeypatch.setattr(disk_space, "space_at", disk)
    return disk


def files(folder: Path) -> int:
    return len(list(folder.rglob("*.kv")))


# --- room for others --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "reserve"),
    [
        (0, 0),
        (12 * MIB, 6 * MIB),
        (128 * MIB, 64 * MIB),
        (1024 * MIB, 64 * MIB),
        (2000 * MIB, 100 * MIB),
        (5120 * MIB, 256 * MIB),
        (2**40, 256 * MIB),
    ],
)
def test_a_part_of_every_disk_stays_free(total: int, reserve: int) -> None:
    assert disk_reserve(total) == reserve


def test_the_doctor_counts_the_reserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "block").write_bytes(bytes(MIB))
    monkeypatch.setattr("engine.budgets.disk_size", lambda _: TOTAL)
    monkeypatch.setattr("engine.budgets.free_disk", lambda _: 100 * MIB)
    assert disk_most(tmp_path) == 37 * MIB
    monkeypatch.setattr("engine.budgets.free_disk", lambda _: 3 * MIB)
    assert disk_most(tmp_path) == 0


def test_no_more_is_written_than_leaves_room_for_others(rigs: list[ColdRig], tmp_path: Path, disk: Disk) -> None:
    disk.room = RESERVE + 5 * 8192
    rigs.append(rig := ColdRig(tmp_path))
    _, more = turn(rig, PROMPT)
    rig.save()
    assert files(tmp_path) == 5, "of the 9 blocks of this chat"
    assert cold_usage(rig.tiers, "disk").budget_bytes == 5 * 8192
    assert rig.sources(follow(rig, more)) == (33, 0, 0, 4), "no chat is the worse for it"


def test_what_others_need_is_let_go(
    rigs: list[ColdRig], tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    rigs.append(rig := ColdRig(tmp_path, disk_blocks=100, disk_low=1.0))
    turn(rig, PROMPT)
    rig.save()
    assert (files(tmp_path), cold_usage(rig.tiers, "disk").budget_bytes) == (9, 100 * 8192)
    rig.tiers.journal.take()
    disk.room = RESERVE + 4 * 8192  # and 5 of the reserve are taken
    for _ in range(20):
        rig.now += 1
        rig.tiers.settle()
        rig.settle()
    assert sorted(cold.depth for cold in rig.tiers.index) == [0, 1, 2, 3], "the end of a chain goes first"
    assert files(tmp_path) == 4
    assert cold_usage(rig.tiers, "disk").budget_bytes == 4 * 8192
    told = [(event.action, event.blocks, event.bytes, event.reason) for event in rig.tiers.journal.take()]
    assert told == [
        ("skipped", 0, 96 * 8192, "the disk is nearly full, and some of it stays free for all else"),
        ("evicted", 5, 5 * rig.image_bytes, "it was full"),
    ]
    assert [record.message.split(":")[0] for record in caplog.records if record.levelno >= logging.WARNING] == [
        "the disk is nearly full, and some of it stays free for all else"
    ]
    disk.room = TOTAL
    rig.now += 20
    assert cold_usage(rig.tiers, "disk").budget_bytes == 100 * 8192, "room that is there again may be taken again"


def test_a_file_system_that_frees_late_does_not_cost_more_than_is_missing(
    rigs: list[ColdRig], tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    rigs.append(rig := ColdRig(tmp_path, disk_low=1.0))
    turn(rig, PROMPT)
    rig.save()
    rig.now += 2
    monkeypatch.setattr(disk_space, "space_at", lambda _: (TOTAL, RESERVE - 2 * 8192))  # whatever is deleted
    for _ in range(8):
        rig.now += 1
        rig.tiers.settle()
        rig.settle()
    assert files(tmp_path) == 7


def test_the_file_system_is_not_asked_all_the_time(rigs: list[ColdRig], tmp_path: Path, disk: Disk) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    for _ in range(1000):
        rig.now += 0.01
        rig.tiers.settle()
    assert 5 < disk.looks < 15


def test_each_write_looks_again_whether_others_took_the_room(rigs: list[ColdRig], tmp_path: Path, disk: Disk) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    follow(rig, PROMPT)
    rig.tiers.settle()
    disk.room = RESERVE + 8191
    rig.save()
    assert files(tmp_path) == 0
    (told,) = {event.reason for event in rig.tiers.journal.take() if event.action == "skipped"}
    assert told == "the disk is nearly full, and some of it stays free for all else"


def test_a_disk_that_is_full_whatever_it_says_is_given_some_room(
    rigs: list[ColdRig], tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    with file_system(tmp_path / "small", "size=1m,nr_inodes=60") as place:  # too few files, and bytes enough
        disk.folder = place
        rigs.append(rig := ColdRig(place))
        for number in range(8):
            turn(rig, [60 + number, *PROMPT[1:]], f"chat {number}")
            rig.save()
            rig.settle()
        usage = cold_usage(rig.tiers, "disk")
        assert 9 * 8192 < usage.used_bytes < usage.budget_bytes < 55 * 8192
        assert files(place) * 8192 == usage.held_bytes
        assert len([record for record in caplog.records if "could not keep a block" in record.message]) == 1
        rig.now += 61
        assert cold_usage(rig.tiers, "disk").budget_bytes == 10_000 * 8192, "and later it is tried again"
        rig.close()
        rig.check()
        rigs.clear()


def test_writes_that_fail_together_cost_as_much_as_one(tmp_path: Path, disk: Disk) -> None:
    space = DiskSpace(tmp_path, lambda: 0.0, Journal(lambda: 0.0))
    assert space.most(10_000, 5000) == 10_000
    for _ in range(3):
        space.failed(DiskFull("no space left"), 1000, 5000 if not space.paused else 4000)
    assert space.most(10_000, 5000) == 4000


def test_what_is_being_written_counts_once_it_is_there(tmp_path: Path, disk: Disk) -> None:
    disk.room = RESERVE + 20 * 8192
    rig = PlayedRig(tmp_path)
    turn(rig, PROMPT)
    rig.residency.saver.save()
    for jobs in (0, 3, 2):  # of 9 files, and nobody has noticed
        rig.work(jobs)
        rig.now += 2
        assert cold_usage(rig.tiers, "disk").budget_bytes == 20 * 8192
    rig.settle()
    rig.close()


def test_a_small_disk_is_not_filled(rigs: list[ColdRig], tmp_path: Path) -> None:
    with file_system(tmp_path / "small", "size=512k") as place:
        rigs.append(rig := ColdRig(place))
        for number in range(12):
            turn(rig, [60 + number, *PROMPT[1:]], f"chat {number}")
            rig.save()
        rig.settle()
        assert files(place) > 9
        assert shutil.disk_usage(place).free >= 256 * 1024 - 8192
        rig.close()
        rig.check()
        rigs.clear()


# --- nobody there -----------------------------------------------------------------------------------------------------


async def test_an_engine_at_rest_gives_way_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.keeper.DISK_SECONDS", 0.05)
    monkeypatch.setattr("engine.keeper.LOG_SECONDS", 0.02)
    kv = tmp_path / "kv"
    async with engine(settings(model(tmp_path / "model"), tmp_path)) as driven:
        await driven.turn(prompt(45))
        await driven.saved()
        assert files(kv) == 7
        await asyncio.sleep(0.3)  # until all of it has been told
        monkeypatch.setattr(disk_space, "space_at", lambda _: (TOTAL, 0))
        await until(lambda: files(kv) == 0)  # and nothing is asked of it meanwhile
