"""The folder of the disk tier: one clear sentence where it cannot be used, and what other versions left there."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.cache.block_file import BlockWriteFailed
from engine.cache.disk import BlockFiles
from engine.cache.files import DiskUnusable
from engine.cache.holders import HolderFiles
from engine.cache.store import Stored
from tests.engine.cache.disk_blocks import MODEL, everything, file_system, found, key_of, write

FIX = "make it a folder that can be written to, choose another, or turn the disk tier off"


@pytest.mark.parametrize(("opened", "inside"), [(BlockFiles, "blocks-1"), (HolderFiles, "sessions")])
def test_a_file_or_a_link_where_a_folder_should_be(
    tmp_path: Path, opened: Callable[[Path], object], inside: str
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / inside).write_text("mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / inside).symlink_to(tmp_path / "kv")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for root, named, reason in (
        ("file", "file", "File exists"),
        ("file/below", "file/below", "Not a directory"),
        ("kv", f"kv/{inside}", "Not a directory"),
        ("other", f"other/{inside}", "Not a directory"),
        ("dangling", "dangling", "File exists"),
    ):
        with pytest.raises(DiskUnusable) as unusable:
            opened(tmp_path / root)
        assert str(unusable.value) == f"cannot keep KV blocks in {tmp_path / named} ({reason}): {FIX}"
    assert (tmp_path / "file").read_text() == (tmp_path / "kv" / inside).read_text() == "mine"


@pytest.mark.parametrize("opened", [BlockFiles, HolderFiles])
def test_a_folder_that_cannot_be_written_to(tmp_path: Path, opened: Callable[[Path], object]) -> None:
    with file_system(tmp_path / "disk", "ro") as disk, pytest.raises(DiskUnusable, match=r"\(Read-only file system\)"):
        opened(disk / "kv")
    with file_system(tmp_path / "disk", "size=64k") as disk:
        opened(disk)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(DiskUnusable, match=r"(blocks-1|sessions) \(Permission denied\)"):
            opened(disk)


def test_a_full_disk_is_opened_to_be_read_and_emptied(tmp_path: Path) -> None:
    with file_system(tmp_path / "disk", "size=64k") as disk:
        write(BlockFiles(disk), 1)
        with (disk / "filler").open("wb") as filler, pytest.raises(OSError, match="No space"):
            filler.write(bytes(1 << 20))
            filler.flush()
        files = BlockFiles(disk)
        assert found(files) == [1]
        files.delete(MODEL, key_of(1))
        (disk / "filler").unlink()


def test_folders_that_others_could_enter_are_closed_to_them(tmp_path: Path) -> None:
    folder = tmp_path / "kv" / "blocks-1" / MODEL.hex()
    folder.mkdir(parents=True)
    folder.parent.chmod(0o755)
    folder.chmod(0o777)
    write(BlockFiles(tmp_path / "kv"), 1)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder.parent)] == [0o700, 0o700]


def test_the_root_may_be_a_link_to_a_larger_disk(tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    (tmp_path / "kv").symlink_to(tmp_path / "large")
    write(BlockFiles(tmp_path / "kv"), 1)
    assert found(BlockFiles(tmp_path / "large")) == [1]


# --- other formats ----------------------------------------------------------------------------------------------------


def test_blocks_of_other_formats_are_set_aside_and_discarded(tmp_path: Path) -> None:
    files = BlockFiles(tmp_path)
    write(files, 1)
    assert files.set_aside() is None and files.old_usage() == Stored(0, 0)
    for version, size in ((0, 100), (2, 1000)):
        folder = tmp_path / f"blocks-{version}" / "model" / "ab"
        folder.mkdir(parents=True)
        (folder / "block").write_bytes(bytes(size))
    (tmp_path / "blocks-notes.txt").write_text("mine")
    (tmp_path / "blocks-3").symlink_to(tmp_path / "blocks-1")
    assert files.set_aside() == Stored(2, 1100) == files.old_usage()
    assert files.set_aside() is None and found(files) == [1] and files.usage() == {MODEL: Stored(1, 16384)}
    assert {"old/blocks-0/model/ab/block", "old/blocks-2/model/ab/block"} < set(everything(tmp_path))

    (tmp_path / "blocks-0").mkdir()  # an older program ran in between
    (tmp_path / "blocks-0" / "block").write_bytes(b"again")
    assert files.set_aside() == Stored(1, 5)
    assert files.old_usage() == files.discard_old() == Stored(3, 1105)
    assert files.discard_old() == Stored(0, 0) and not (tmp_path / "old").exists() and found(files) == [1]


def test_what_was_set_aside_but_cannot_be_deleted_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = BlockFiles(tmp_path)
    (tmp_path / "blocks-0").mkdir()
    (tmp_path / "blocks-0" / "block").write_text("x")
    files.set_aside()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(BlockWriteFailed, match=r"cannot delete .*old \(Read-only file system\)"):
        files.discard_old()
    assert files.old_usage() == Stored(1, 1)


def test_old_blocks_that_cannot_be_set_aside_are_told(tmp_path: Path) -> None:
    files = BlockFiles(tmp_path)
    (tmp_path / "blocks-0").mkdir()
    (tmp_path / "old").write_text("mine")
    with pytest.raises(DiskUnusable, match=r"old \(Not a directory\)"):
        files.set_aside()
    assert (tmp_path / "old").read_text() == "mine"
