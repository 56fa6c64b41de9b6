"""Why a block that left the device is nowhere: a miss and the log say what is true of host and of the disk."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from engine.cache.block_file import BlockWriteFailed
from engine.cache.disk import BlockFiles
from tests.engine.cold_rig import ColdRig
from tests.engine.test_tiers import PROMPT, follow, turn

LITTLE = 100  # bytes: less than a block


def gone(rig: ColdRig, more: list[int]) -> str:
    """Why what the chat had read is gone, once the device has no room for it: as a miss and the log say it."""
    rig.flush()
    told = [event.reason for event in rig.tiers.journal.take() if event.action == "evicted"]
    miss = rig.finished[follow(rig, more)][0].usage.miss
    assert miss is not None
    assert miss.cause == "evicted"
    (said,) = {reason for reason in told if f"device: {reason}" == miss.detail}
    return said


def test_both_are_off(rigs: list[ColdRig]) -> None:
    rigs.append(rig := ColdRig())
    assert gone(rig, turn(rig, PROMPT)[1]) == "it had no room; host and disk are off"


def test_both_have_no_room(rigs: list[ColdRig], tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path, host_kv=LITTLE, disk_kv=LITTLE))
    assert gone(rig, turn(rig, PROMPT)[1]) == "it had no room, and host and disk had no room"


def test_the_disk_is_off(rigs: list[ColdRig]) -> None:
    rigs.append(rig := ColdRig(host_kv=LITTLE))
    assert gone(rig, turn(rig, PROMPT)[1]) == "it had no room; host had no room, and the disk is off"


def test_what_may_be_written_in_a_day_is_used_up(rigs: list[ColdRig], tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    assert rig.tiers.disk.files is not None
    rig.tiers.disk.files.writes.bytes_per_day = LITTLE
    said = "it had no room; host is off, and the disk may write no more today (disk_writes)"
    assert gone(rig, turn(rig, PROMPT)[1]) == said


def test_the_disk_cannot_be_written_to(rigs: list[ColdRig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise BlockWriteFailed("the file system is read-only")

    rigs.append(rig := ColdRig(tmp_path))
    monkeypatch.setattr(BlockFiles, "write", fail)
    _, more = turn(rig, PROMPT)
    rig.save()
    assert gone(rig, more) == "it had no room; host is off, and the disk cannot be written to now"


def test_the_disk_is_busy(rigs: list[ColdRig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, go_on = BlockFiles.write, threading.Event()

    def slow(*args: object) -> int:
        assert go_on.wait(10)
        return write(*args)  # type: ignore[arg-type]

    rigs.append(rig := ColdRig(tmp_path, disk_blocks=2))
    monkeypatch.setattr(BlockFiles, "write", slow)
    turn(rig, PROMPT)
    rig.flush()
    reasons = {event.reason for event in rig.tiers.journal.take() if event.action == "evicted"}
    go_on.set()
    assert reasons == {"it had no room; host is off, and the disk is busy"}


def test_a_copy_that_fails_is_not_called_a_lack_of_room(rigs: list[ColdRig], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    rigs.append(rig := ColdRig(host_blocks=64))
    _, more = turn(rig, PROMPT)
    with monkeypatch.context() as failing:
        failing.setattr(rig.tiers.copies, "store", fail)
        assert gone(rig, more) == "it had no room; host could not take it, and the disk is off"
