"""A disk that others fill, and a folder that somebody removes: the disk tier gives way, and begins again."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.budgets import disk_most, disk_reserve
from engine.cache import disk_space
from engine.cache.disk import BlockFiles
from engine.cache.holders import HolderFiles, SessionRecord
from engine.cache.write_budget import WriteBudget
from engine.ledger import cold_usage
from tests.engine.cache.disk_blocks import everything, file_system, read, write
from tests.engine.cold_rig import ColdRig
from tests.engine.test_tiers import PROMPT, follow, turn

MIB = 2**20
RESERVE = 64 * MIB  # of a disk of so many
TOTAL = 1024 * MIB


@pytest.fixture
def rigs() -> Iterator[list[ColdRig]]:
    made: list[ColdRig] = []
    yield made
    for rig in made:
        rig.close()
        rig.check()


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


# --- a folder that is removed -----------------------------------------------------------------------------------------


def test_a_removed_folder_leaves_the_books_and_is_made_again(
    rigs: list[ColdRig], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "kv"
    rigs.append(rig := ColdRig(root))
    turn(rig, PROMPT)
    rig.save()
    rig.flush()
    assert (rig.tiers.used("disk"), len(rig.cold())) == (9 * 8192, 9)
    rig.tiers.journal.take()
    shutil.rmtree(root)
    for _ in range(30):
        rig.now += 1
        rig.tiers.settle()
    assert (rig.tiers.disk.bytes, rig.cold()) == (0, [])
    assert cold_usage(rig.tiers, "disk").used_bytes == 0
    told = [(event.action, event.source, event.blocks, event.bytes) for event in rig.tiers.journal.take()]
    assert told == [("evicted", "disk", 9, 9 * 8192)]
    warned = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert warned == ["the disk tier has lost 72 KiB: its folder was removed"]
    turn(rig, PROMPT)
    rig.save()
    rig.settle()
    rig.close()
    assert files(root) == 9
    assert {path.name for path in root.iterdir()} == {"blocks-1", "sessions", "writes"}
    assert [path.stat().st_mode & 0o777 for path in (root, root / "blocks-1", root / "sessions")] == [0o700] * 3
    assert caplog.records[-1].message == warned[-1], "nothing failed"
    rigs.append(later := ColdRig(root))
    assert len(later.tiers.index.held_by("s")) == 9


def test_a_read_finds_that_the_folder_was_removed(rigs: list[ColdRig], tmp_path: Path) -> None:
    root = tmp_path / "kv"
    rigs.append(rig := ColdRig(root))
    _, more = turn(rig, PROMPT)
    rig.save()
    rig.flush()
    request_id = rig.submit(more, max_tokens=1)
    shutil.rmtree(root)
    rig.run()
    assert rig.sources(request_id) == (0, 0, 0, 37)
    assert (rig.tiers.disk.bytes, rig.cold()) == (0, [])


def test_a_write_finds_that_the_folder_was_removed(rigs: list[ColdRig], tmp_path: Path) -> None:
    root = tmp_path / "kv"
    rigs.append(rig := ColdRig(root))
    turn(rig, PROMPT, "gone")
    rig.save()
    rig.flush()
    follow(rig, [70, *PROMPT[1:]], "other")
    shutil.rmtree(root)
    rig.residency.saver.save()
    rig.settle()
    rig.save()
    assert rig.tiers.index.held_by("gone") == []
    assert rig.tiers.used("disk") == files(root) * 8192 > 0


def test_what_another_model_left_leaves_the_books_too(rigs: list[ColdRig], tmp_path: Path) -> None:
    root = tmp_path / "kv"
    rigs.append(rig := ColdRig(root))
    turn(rig, PROMPT)
    rig.save()
    rig.close()
    (root / "old").mkdir()
    (root / "old" / "block").write_bytes(bytes(100))
    rigs.append(other := ColdRig(root, fingerprint=b"o" * 32))
    assert other.tiers.disk.bytes == 9 * 8192 + 100
    shutil.rmtree(root)
    other.tiers.settle()
    assert other.tiers.disk.bytes == 0


def test_a_chat_deleted_after_the_folder_was_removed_is_gone(rigs: list[ColdRig], tmp_path: Path) -> None:
    root = tmp_path / "kv"
    rigs.append(rig := ColdRig(root))
    turn(rig, PROMPT)
    rig.save()
    shutil.rmtree(root)
    leaving = rig.forget("s")
    while not rig.tiers.holdings.has_gone(leaving):
        rig.note_an_end()
    assert (leaving.whole, rig.tiers.disk.bytes) == (True, 0)


def test_files_and_records_make_their_folders_again_but_not_what_holds_them(tmp_path: Path) -> None:
    root = tmp_path / "data" / "kv"
    blocks, holders, writes = BlockFiles(root), HolderFiles(root), WriteBudget(root / "writes", None)
    write(blocks, 1)
    shutil.rmtree(root)
    assert blocks.was_removed()
    write(blocks, 2)
    assert read(blocks, 2)
    assert blocks.was_removed(), "it is there again, and what was in it is not"
    assert not blocks.was_removed()
    shutil.rmtree(root)
    holders.save(SessionRecord(session_id="s", used_at=1.0))
    assert [record.session_id for record in holders.load_all()] == ["s"]
    shutil.rmtree(root)
    writes.spend(5)
    assert everything(root) == ["writes"]
    shutil.rmtree(tmp_path / "data")
    with pytest.raises(Exception, match="No such file"):
        write(blocks, 3)  # as when the disk is not mounted
    assert not (tmp_path / "data").exists()
