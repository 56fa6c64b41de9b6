"""Sessions' records: as they were saved, or not there; and never another's."""

from __future__ import annotations

import errno
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.cache import files as whole
from engine.cache import records
from engine.cache.block_file import BlockWriteFailed, DiskFull
from engine.cache.holders import HolderFiles, SessionRecord
from engine.cache.records import read_record, write_record
from tests.engine.cache.disk_blocks import MODEL, OTHER_MODEL, everything, failing, file_system, key_of


def record_of(number: int, used_at: float = 1_700_000_000.25) -> SessionRecord:
    keys = {MODEL: [key_of(number), key_of(number + 1)], OTHER_MODEL: [key_of(number)]}
    return SessionRecord(session_id=f"session {number}", used_at=used_at, keys=keys)


def only_file(root: Path) -> Path:
    (path,) = (root / "sessions").iterdir()
    return path


@pytest.fixture
def holders(tmp_path: Path) -> HolderFiles:
    return HolderFiles(tmp_path)


def test_records_are_loaded_as_they_were_saved(tmp_path: Path, holders: HolderFiles) -> None:
    for number in range(5):
        holders.save(record_of(number))
    holders.save(record_of(3, used_at=2.0))
    holders.save(SessionRecord(session_id="", used_at=0.0))
    loaded = {record.session_id: record for record in HolderFiles(tmp_path).load_all()}
    assert loaded == {f"session {number}": record_of(number) for number in (0, 1, 2, 4)} | {
        "session 3": record_of(3, used_at=2.0),
        "": SessionRecord(session_id="", used_at=0.0, keys={}),
    }


def test_a_record_is_deleted_for_good(tmp_path: Path, holders: HolderFiles) -> None:
    holders.save(record_of(1))
    holders.save(record_of(2))
    holders.delete("session 1")
    holders.delete("session 1")
    holders.delete("never there")
    assert holders.load_all() == [record_of(2)] and len(everything(tmp_path)) == 1


def test_a_use_is_noted_and_nothing_else_changes(holders: HolderFiles) -> None:
    holders.save(record_of(1))
    assert holders.touch("session 1", 5.5) and not holders.touch("session 2", 5.5)
    assert holders.load_all() == [record_of(1, used_at=5.5)]
    holders.delete("session 1")
    assert not holders.touch("session 1", 6.5) and holders.load_all() == []


def test_a_session_lives_as_long_as_its_record(tmp_path: Path, holders: HolderFiles) -> None:
    assert not holders.lives("session 1")
    holders.introduce("session 1")
    assert holders.load_all() == [SessionRecord(session_id="session 1", used_at=0.0, keys={})]
    holders.save(record_of(1))
    holders.introduce("session 1")
    assert holders.load_all() == [record_of(1)], "what is known stays"
    only_file(tmp_path).write_bytes(b"x")
    assert holders.lives("session 1") and holders.load_all() == [] and holders.lives("session 1")
    holders.delete("session 1")
    assert not holders.lives("session 1")


def test_no_id_becomes_a_path_and_only_the_owner_reads(tmp_path: Path, holders: HolderFiles) -> None:
    for session_id in ("../../escaped", "/etc/passwd", "a\0b", "x" * 5000, "ä"):
        holders.save(SessionRecord(session_id=session_id, used_at=1.0))
        path = only_file(tmp_path)
        assert len(path.name) == 32 + len(".msgpack") and not set(path.stem) - set("0123456789abcdef")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        holders.delete(session_id)
    assert stat.S_IMODE((tmp_path / "sessions").stat().st_mode) == 0o700


# --- faults -----------------------------------------------------------------------------------------------------------


def test_every_cut_and_every_flipped_bit_is_found(tmp_path: Path) -> None:
    path = tmp_path / "record"
    write_record(path, record_of(1))
    data = path.read_bytes()
    changed = [data[:size] for size in range(len(data))] + [data + b"\0"]
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        changed.append(bytes(flipped))
    for content in changed:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"^record (is no record of this format|fails its checksum)$"):
            read_record(path, SessionRecord)
    path.write_bytes(data)
    assert read_record(path, SessionRecord) == record_of(1)
    with pytest.raises(ValueError, match=r"^record is another record: "):
        read_record(path, dict[int, int])


def test_damaged_records_are_removed_and_the_others_loaded(tmp_path: Path) -> None:
    holders = HolderFiles(tmp_path)
    paths = []
    for number in range(7):
        before = set((tmp_path / "sessions").iterdir())
        holders.save(record_of(number))
        paths += set((tmp_path / "sessions").iterdir()) - before
    paths[0].write_bytes(b"")
    paths[1].write_bytes(paths[2].read_bytes())  # another session's, under this one's name
    target = paths[3].rename(tmp_path / "elsewhere")
    paths[3].symlink_to(target)
    paths[4].unlink()
    paths[4].mkdir()
    (paths[4] / "below").write_text("x")
    write_record(paths[5], {"session_id": 1})
    assert sorted(record.session_id for record in holders.load_all()) == ["session 2", "session 6"]
    assert holders.damaged == 5 and target.exists()
    assert set((tmp_path / "sessions").iterdir()) == {paths[2], paths[6]}
    assert len(holders.load_all()) == 2 and holders.damaged == 5


def test_a_damaged_record_is_not_touched_but_removed(tmp_path: Path, holders: HolderFiles) -> None:
    holders.save(record_of(1))
    only_file(tmp_path).write_bytes(b"x" * 100)
    assert not holders.touch("session 1", 2.0)
    assert holders.damaged == 1 and everything(tmp_path) == []


def test_what_cannot_be_read_now_is_left_out_and_left_alone(
    holders: HolderFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    holders.save(record_of(1))
    with monkeypatch.context() as patch:
        patch.setattr(whole, "FileIO", failing("readall", OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))))
        assert holders.load_all() == []
        with pytest.raises(BlockWriteFailed, match="Cannot allocate memory"):
            holders.touch("session 1", 2.0)
    assert holders.load_all() == [record_of(1)] and holders.damaged == 0


@pytest.mark.parametrize("step", ["write", "fsync", "rename"])
def test_a_save_that_fails_changes_nothing(
    tmp_path: Path, holders: HolderFiles, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    holders.save(record_of(1))
    error = OSError(errno.EIO, os.strerror(errno.EIO))

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        if step == "write":
            patch.setattr(whole, "FileIO", failing("write", error, after=1))
        else:
            patch.setattr(*((os, "fsync", fail) if step == "fsync" else (Path, "replace", fail)))
        with pytest.raises(BlockWriteFailed, match="Input/output error"):
            holders.save(record_of(1, used_at=2.0))
    assert holders.load_all() == [record_of(1)] and len(everything(tmp_path)) == 1


def test_a_full_disk(tmp_path: Path) -> None:
    with file_system(tmp_path / "disk", "size=64k") as disk:
        holders = HolderFiles(disk)
        with pytest.raises(DiskFull, match="No space left on device"):
            for number in range(100):
                holders.save(record_of(number))
        assert len(holders.load_all()) == len(everything(disk)) >= 10
        holders.delete("session 0")
        holders.save(record_of(100))


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holders = HolderFiles(tmp_path)
    holders.save(record_of(1))
    (tmp_path / "sessions" / ".tmp-0123").write_bytes(b"half")
    assert HolderFiles(tmp_path).load_all() == [record_of(1)] and len(everything(tmp_path)) == 1


def test_a_folder_that_vanished_is_made_again_by_the_next_record(tmp_path: Path, holders: HolderFiles) -> None:
    holders.save(record_of(1))
    whole.remove(tmp_path / "sessions")
    assert holders.load_all() == [] and not holders.touch("session 1", 2.0)
    holders.delete("session 1")
    holders.save(record_of(1))
    assert holders.load_all() == [record_of(1)]


def test_nothing_brings_a_deleted_session_back(holders: HolderFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """A delete that comes while a use is noted waits for it."""
    holders.save(record_of(1))
    real = records.write_whole
    with ThreadPoolExecutor(1) as threads:

        def slowly(*arguments: object, **named: object) -> int:
            deleted.append(threads.submit(holders.delete, "session 1"))
            with pytest.raises(TimeoutError):
                deleted[0].result(timeout=0.05)
            return real(*arguments, **named)

        deleted: list = []
        monkeypatch.setattr(records, "write_whole", slowly)
        assert holders.touch("session 1", 2.0)
        deleted[0].result()
    assert holders.load_all() == []
