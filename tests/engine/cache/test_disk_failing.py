"""Disks that are full or fail, for a moment or for good: what is there stays whole, and each error is of one block."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.cache import block_file, disk
from engine.cache import files as whole
from engine.cache.block_file import BlockWriteFailed, DiskFull
from engine.cache.disk import BlockFiles
from tests.engine.cache.disk_blocks import (
    MODEL,
    everything,
    failing,
    fault_of,
    file_system,
    found,
    header_of,
    image_of,
    in_pieces,
    key_of,
    read,
    write,
)

SIZE = 16384  # of the file


@pytest.fixture
def files(tmp_path: Path) -> BlockFiles:
    return BlockFiles(tmp_path / "kv")


def test_a_full_disk_loses_nothing_and_has_room_again_after_a_delete(tmp_path: Path) -> None:
    with file_system(tmp_path / "disk", "size=256k") as disk:
        files = BlockFiles(disk / "kv")
        written = []
        with pytest.raises(DiskFull, match=r"cannot write .*\.kv \(No space left on device\)"):
            for number in range(100):
                write(files, number)
                written.append(number)
        assert 5 < len(written) <= 16 and found(files) == written
        assert len(everything(files.root)) == len(written)
        assert all(read(files, number)[1] == bytes(image_of(number)) for number in written)
        for number in (written[0], written[1]):
            files.delete(MODEL, key_of(number))
        write(files, written[0])
        assert read(BlockFiles(disk / "kv"), written[0])[1] == bytes(image_of(written[0]))


STEPS: dict[str, Callable[[pytest.MonkeyPatch, OSError], None]] = {
    "open": lambda patch, error: patch.setattr(whole, "open_private", lambda *_: _raise(error)),
    "header": lambda patch, error: patch.setattr(whole, "FileIO", failing("write", error)),
    "image": lambda patch, error: patch.setattr(whole, "FileIO", failing("write", error, after=1)),
    "padding": lambda patch, error: patch.setattr(whole, "FileIO", failing("write", error, after=2)),
    "fsync": lambda patch, error: patch.setattr(os, "fsync", lambda _: _raise(error)),
    "rename": lambda patch, error: patch.setattr(Path, "replace", lambda *_: _raise(error)),
}


def _raise(error: OSError) -> object:
    raise error


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("step", STEPS)
def test_a_write_that_fails_leaves_what_was_there(
    files: BlockFiles, monkeypatch: pytest.MonkeyPatch, step: str, code: int
) -> None:
    write(files, 1)
    for number in (1, 2):
        with monkeypatch.context() as patch, pytest.raises(BlockWriteFailed) as failed:
            STEPS[step](patch, OSError(code, os.strerror(code)))
            files.write(header_of(number, holders=[]), image_of(3))
        assert isinstance(failed.value, DiskFull) == (code in {errno.ENOSPC, errno.EDQUOT})
        assert str(failed.value).startswith("cannot write ") and os.strerror(code) in str(failed.value)
    assert read(files, 1) == (header_of(1), bytes(image_of(1)))
    assert len(everything(files.root)) == 1


def test_a_write_that_makes_no_progress_fails(files: BlockFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "FileIO", in_pieces(0))
    with pytest.raises(BlockWriteFailed, match="nothing could be written"):
        write(files, 1)
    assert everything(files.root) == []


def test_a_system_that_reads_and_writes_in_pieces(files: BlockFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "FileIO", in_pieces(777))
    path = write(files, 1)
    assert path.stat().st_size == SIZE
    assert read(files, 1) == (header_of(1), bytes(image_of(1)))


@pytest.mark.parametrize(("method", "after"), [("read", 0), ("readinto", 0)])
@pytest.mark.parametrize(("code", "fault"), [(errno.EIO, "damaged"), (errno.ENOMEM, "io_error")])
def test_a_read_that_fails(
    files: BlockFiles, monkeypatch: pytest.MonkeyPatch, method: str, after: int, code: int, fault: str
) -> None:
    write(files, 1)
    with monkeypatch.context() as patch:
        patch.setattr(whole, "FileIO", failing(method, OSError(code, os.strerror(code)), after))
        assert fault_of(files) == fault
    assert read(files, 1)[1] == bytes(image_of(1))


def test_a_scan_removes_what_the_disk_cannot_read_and_keeps_what_it_cannot_read_now(
    files: BlockFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(files, 1)
    for code, left in ((errno.EMFILE, True), (errno.EACCES, True), (errno.EIO, False)):
        with monkeypatch.context() as patch:
            patch.setattr(block_file, "open_private", lambda *_, code=code: _raise(OSError(code, os.strerror(code))))
            assert found(files) == []
        assert path.exists() == left
    assert files.quarantined == 1


def test_a_delete_that_fails_says_so_and_a_quarantine_does_not_raise(
    files: BlockFiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(files, 1)
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: _raise(OSError(errno.EROFS, os.strerror(errno.EROFS))))
    for delete in (lambda: files.delete(MODEL, key_of(1)), lambda: files.forget(MODEL)):
        with pytest.raises(BlockWriteFailed, match=r"cannot delete .* \(Read-only file system\)"):
            delete()
    files.quarantine(MODEL, key_of(1), "its checksum failed")
    assert path.exists() and files.quarantined == 1
    assert f"block {key_of(1).hex()} is removed: its checksum failed" in caplog.text


def test_folders_that_vanish_are_made_again_by_the_next_write(files: BlockFiles) -> None:
    path = write(files, 1)
    files.forget(MODEL)
    write(files, 1)
    assert path.exists()
    for folder in (path.parent, path.parent.parent, files.root):
        whole.remove(folder)
        assert fault_of(files) == "missing" and found(files) == []
        files.delete(MODEL, key_of(1))
        files.sync()
        write(files, 1)
        assert read(files, 1)[1] == bytes(image_of(1))


def test_a_block_that_is_deleted_during_a_scan_is_no_fault(files: BlockFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    write(files, 1)
    real = disk.read_head

    def late(path: Path, *arguments: bytes) -> object:
        path.unlink()
        return real(path, *arguments)

    monkeypatch.setattr(disk, "read_head", late)
    assert found(files) == [] and files.quarantined == 0
