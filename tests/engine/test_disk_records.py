"""What is written down of chats on disk decides whose a block is; and what cannot be written for a while is later."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from engine.cache import holders
from engine.cache.block_file import BlockWriteFailed, DiskFull
from engine.cache.disk import BlockFiles
from engine.cache.holders import HolderFiles
from engine.errors import EngineError
from tests.engine.cold_rig import ColdRig
from tests.engine.test_tiers import PROMPT, follow, turn


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def files(folder: Path) -> int:
    return len(list(folder.rglob("*.kv")))


def records(folder: Path) -> list[Path]:
    return list((folder / "sessions").iterdir())


def at_once(rig: ColdRig) -> ColdRig:
    """What is to be written down is, before the call returns."""
    assert rig.tiers.disk.clerk is not None
    rig.tiers.disk.clerk.close()
    return rig


def holders_of(rig: ColdRig) -> set[str]:
    return {holder for cold in rig.cold() for holder in cold.holders}


# --- headers of deleted chats -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["unwritten", "cut", "flipped", "lost"])
def test_a_deleted_chat_stays_deleted_whatever_becomes_of_another_s_record(
    rigs: list[ColdRig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The files of what they share name the first alone."""
    rigs.append(rig := ColdRig(tmp_path))
    follow(rig, PROMPT, "first")
    rig.save()
    with monkeypatch.context() as broken:
        if fault == "unwritten":
            broken.setattr(holders, "write_record", full)
        follow(rig, [*PROMPT, *range(40, 50)], "second")
        rig.save()
        leaving = rig.forget("first")
        while not rig.tiers.holdings.has_gone(leaving):
            rig.note_an_end()
        assert leaving.whole is True
        rig.settle()  # and then it is killed
    assert len(records(tmp_path)) == (fault != "unwritten")
    for record in records(tmp_path):
        content = bytearray(record.read_bytes())
        content[-1] ^= fault == "flipped"
        record.write_bytes(content[: 10 if fault == "cut" else None])
        if fault == "lost":
            record.unlink()
    rigs.append(later := ColdRig(tmp_path))
    assert set(later.tiers.disk.earlier_sessions()) <= {"second"}
    assert holders_of(later) <= {"second"}
    later.delete("second")
    later.settle()
    assert (files(tmp_path), later.tiers.disk.bytes, records(tmp_path)) == (0, 0, [])


def test_a_chat_whose_record_is_damaged_keeps_what_names_it(rigs: list[ColdRig], tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    _, more = turn(rig, PROMPT)
    rig.save()
    rig.close()
    (record,) = records(tmp_path)
    record.write_bytes(b"")
    for _ in range(2):  # it is written again at once
        rigs.append(later := ColdRig(tmp_path))
        assert (len(later.cold()), holders_of(later)) == (9, {"s"})
        later.close()
    rigs.append(later := ColdRig(tmp_path))
    assert later.sources(follow(later, more)) == (0, 0, 33, 4)


def test_a_chat_that_was_killed_before_it_was_noted_keeps_what_names_it(rigs: list[ColdRig], tmp_path: Path) -> None:
    rigs.append(rig := at_once(ColdRig(tmp_path)))
    _, more = turn(rig, PROMPT)
    rig.residency.saver.save()
    (record,) = HolderFiles(tmp_path).load_all()
    assert record.keys == {}, "all that is known is that it is there"
    while rig.tiers.disk.saving:
        rig.note_an_end()
    rigs.append(later := ColdRig(tmp_path))
    assert later.sources(follow(later, more)) == (0, 0, 33, 4)
    later.delete("s")
    assert (files(tmp_path), records(tmp_path)) == (0, [])


def test_no_deletion_is_whole_while_a_file_of_nobody_s_cannot_be_deleted(
    rigs: list[ColdRig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise BlockWriteFailed("cannot delete: the file system is read-only")

    rigs.append(rig := ColdRig(tmp_path))
    follow(rig, PROMPT)
    rig.save()
    rig.close()
    records(tmp_path)[0].unlink()
    with monkeypatch.context() as broken:
        broken.setattr(BlockFiles, "delete", fail)
        rigs.append(later := at_once(ColdRig(tmp_path)))
        later.settle()
        assert (later.cold(), files(tmp_path)) == ([], 9)
        assert later.forget("s").whole is None
        later.note_ends()
        leaving = later.forget("s")
        later.note_ends()
        assert leaving.whole is False, "so it is asked for again"
    rigs.append(last := ColdRig(tmp_path))
    last.settle()
    leaving = last.forget("s")
    while not last.tiers.holdings.has_gone(leaving):
        last.note_an_end()
    assert (leaving.whole, files(tmp_path)) == (True, 0)


@pytest.mark.parametrize("how", ["later", "closed"])
def test_what_could_not_be_written_down_is_tried_again(
    rigs: list[ColdRig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    rigs.append(rig := at_once(ColdRig(tmp_path)))
    tried = []
    with monkeypatch.context() as broken:
        broken.setattr(holders, "write_record", lambda *_: (tried.append(1), full()))
        follow(rig, PROMPT)
        rig.save()
        rig.settle()
        before = len(tried)
        for _ in range(50):
            rig.now += 1
            rig.tiers.settle()
            rig.note_ends()
        assert (len(tried), records(tmp_path)) == (before, []), "nor is it tried all the time"
    if how == "closed":
        rig.close()
    else:
        rig.now += 11
        rig.tiers.settle()
    (record,) = HolderFiles(tmp_path).load_all()
    assert (record.session_id, sum(map(len, record.keys.values()))) == ("s", 9)


@pytest.mark.parametrize("amid", [False, True])
def test_a_record_that_names_a_block_leaves_nobody_out(rigs: list[ColdRig], tmp_path: Path, amid: bool) -> None:
    """What went to disk for lack of room is noted for one of its holders, and then it is killed."""
    rigs.append(rig := ColdRig(tmp_path))
    for session, salt in (("alice", b"a" * 16), ("bob", b"b" * 16), ("carol", b"c" * 16)):
        follow(rig, PROMPT, session, salt=salt, shared_len=12)
    rig.flush()
    if amid:
        rig.tiers.holdings.note("bob")
    rig.settle()
    rig.tiers.holdings.note("carol")
    rig.delete("alice")  # has the others noted who are not yet
    rig.settle()
    rigs.append(later := ColdRig(tmp_path))
    assert [cold.holders for cold in later.cold() if cold.depth < 3] == [{"bob", "carol"}] * 3


# --- writes that fail for a while -------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [DiskFull("no space left"), BlockWriteFailed("Input/output error")])
@pytest.mark.parametrize(("depths", "rounds"), [(range(9), 0), (range(9), 5), ([4], 0)])
def test_a_turn_whose_writes_fail_for_a_moment_is_saved_later(
    rigs: list[ColdRig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: EngineError,
    depths: list[int],
    rounds: int,
) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    real, tried = BlockFiles.write, []

    def fail(self: BlockFiles, header, image) -> int:  # type: ignore[no-untyped-def]
        tried.append(header.depth)
        if header.depth in depths:
            raise error
        return real(self, header, image)

    with monkeypatch.context() as broken:
        broken.setattr(BlockFiles, "write", fail)
        _, more = turn(rig, PROMPT)
        rig.save()
        rig.settle()
        assert sorted(tried) == list(range(9))
        assert files(tmp_path) <= 9 - len(depths), "a full disk is given some room beside"
        for _ in range(59):
            rig.now += 1
            assert rig.residency.saver.save() is False, "nothing can be begun at once"
            assert (rig.tiers.disk.saving, rig.residency.saver.unsaved, len(tried)) == (0, 1, 9)
        for number in range(rounds):
            rig.now += 60 * 2**number
            rig.save()
            assert (rig.residency.saver.unsaved, len(tried)) == (1, 9 * (number + 2))
            rig.residency.saver.save()
    rig.now += 60 * 2**rounds
    rig.save()
    assert (files(tmp_path), rig.residency.saver.unsaved) == (9, 0)
    rig.close()
    rigs.append(later := ColdRig(tmp_path))
    assert later.sources(follow(later, more)) == (0, 0, 33, 4)


def test_a_disk_that_takes_a_part_whatever_it_says_is_not_written_to_for_ever(
    rigs: list[ColdRig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    real, tried = BlockFiles.write, []

    def some(self: BlockFiles, header, image) -> int:  # type: ignore[no-untyped-def]
        tried.append(header.depth)
        if files(tmp_path) >= 4:
            raise DiskFull("no space left")
        return real(self, header, image)

    monkeypatch.setattr(BlockFiles, "write", some)
    follow(rig, PROMPT)
    for _ in range(120):
        rig.save()
        rig.settle()
        rig.now += 61
    assert rig.residency.saver.unsaved == 0, "it is left alone after an hour"
    assert files(tmp_path) <= 4
    assert len(tried) <= 7 * 9


def test_a_turn_that_can_never_be_written_does_not_keep_others_waiting(
    rigs: list[ColdRig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    real, tried = BlockFiles.write, []

    def write(self: BlockFiles, header, image) -> int:  # type: ignore[no-untyped-def]
        if "never" in header.holders:
            tried.append(rig.now)
            raise BlockWriteFailed("its header is too long")
        return real(self, header, image)

    monkeypatch.setattr(BlockFiles, "write", write)
    follow(rig, [50, *PROMPT[1:4]], "never")
    follow(rig, PROMPT, "s")
    for _ in range(130):
        rig.save()
        rig.settle()
        rig.now += 30
    assert (files(tmp_path), rig.residency.saver.unsaved) == (9, 0)
    assert sorted({time - tried[0] for time in tried}) == [0, 60, 180, 420, 900, 1860, 3780]


def test_what_is_held_is_written_down_while_writes_pause(
    rigs: list[ColdRig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    follow(rig, PROMPT, "first")
    rig.save()
    files = rig.tiers.disk.files
    assert files is not None
    monkeypatch.setattr(files.blocks, "write", full)
    follow(rig, [*PROMPT, *range(40, 50)], "second")
    rig.save()
    rig.residency.saver.save()
    rig.close()
    held = {record.session_id: sum(map(len, record.keys.values())) for record in HolderFiles(tmp_path).load_all()}
    assert held["second"] >= 7, "the prompt that both begin with"
