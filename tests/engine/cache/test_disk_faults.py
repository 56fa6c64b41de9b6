"""Files that are not as they were written: each is a miss that says why, is removed, and harms no other."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from engine.cache import block_file
from engine.cache import files as whole
from engine.cache.block_file import BlockUnreadable, BlockWriteFailed
from engine.cache.disk import BlockFiles
from tests.engine.cache.disk_blocks import (
    IMAGE_BYTES,
    MODEL,
    OTHER_MODEL,
    everything,
    fault_of,
    found,
    header_of,
    image_of,
    key_of,
    path_of,
    read,
    write,
)

SIZE = 16384  # of the file
HEADER = len(msgspec.msgpack.encode(header_of(1)))


@pytest.fixture
def files(tmp_path: Path) -> BlockFiles:
    return BlockFiles(tmp_path / "kv")


def gone_after_a_scan(files: BlockFiles, path: Path) -> bool:
    """A scan neither finds nor keeps block 1, and finds block 2."""
    files.quarantined = 0
    write(files, 2)
    return found(files) == [2] and files.quarantined == 1 and not os.path.lexists(path)


# --- damaged ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size",
    [0, 1, 7, 8, 12, 19, 20, 23, 24, 25, 23 + HEADER, 24 + HEADER, 4095, 4096, 4097, 8192, 4096 + IMAGE_BYTES, 16383],
)
def test_a_file_that_was_cut_is_short(files: BlockFiles, size: int) -> None:
    path = write(files, 1)
    os.truncate(path, size)
    assert fault_of(files) == "short"
    assert gone_after_a_scan(files, path)


@pytest.mark.parametrize("size", [SIZE + 1, SIZE + 4096])
def test_a_file_that_is_too_long_is_damaged(files: BlockFiles, size: int) -> None:
    path = write(files, 1)
    os.truncate(path, size)
    assert fault_of(files) == "damaged"
    assert gone_after_a_scan(files, path)


def test_a_file_that_is_cut_while_it_is_read(files: BlockFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    write(files, 1)

    class Ending(whole.FileIO):
        def readinto(self, into: memoryview) -> int:
            return super().readinto(into[: len(into) // 2]) if len(into) > 1000 else 0

    monkeypatch.setattr(whole, "FileIO", Ending)
    assert fault_of(files) == "short"


def test_a_long_header_that_was_cut(files: BlockFiles) -> None:
    path = write(files, 1, holders=["x" * 5000])
    os.truncate(path, 5000)
    assert fault_of(files) == "short"


def test_every_flipped_bit_before_the_image_is_found(files: BlockFiles) -> None:
    path = write(files, 1)
    memory = memoryview(bytearray(IMAGE_BYTES))
    faults = set()
    with path.open("r+b", buffering=0) as file:
        data = file.read()
        positions = [*range(24 + HEADER), *range(24 + HEADER, 4096, 97), 4095]
        for bit in (8 * byte + bit for byte in positions for bit in range(8)):
            byte = data[bit // 8]
            os.pwrite(file.fileno(), bytes([byte ^ 1 << bit % 8]), bit // 8)
            for check in (
                lambda: files.read(MODEL, key_of(1), memory),
                lambda: block_file.read_head(path, MODEL, key_of(1)),
            ):
                with pytest.raises(BlockUnreadable) as unreadable:
                    check()
                faults.add(unreadable.value.fault)
            os.pwrite(file.fileno(), bytes([byte]), bit // 8)
    assert faults == {"foreign", "old_format", "short", "damaged"}
    assert read(files, 1)[1] == bytes(image_of(1))


def test_flipped_bits_of_the_image_are_found(files: BlockFiles) -> None:
    path = write(files, 1)
    data = path.read_bytes()
    for byte in [0, 1, *range(2, IMAGE_BYTES, 611), IMAGE_BYTES - 1]:
        changed = bytearray(data)
        changed[4096 + byte] ^= 1 << byte % 8
        path.write_bytes(changed)
        assert fault_of(files) == "damaged"
    path.write_bytes(data)
    assert read(files, 1)[1] == bytes(image_of(1))


def test_a_header_of_other_content_with_a_right_checksum(files: BlockFiles) -> None:
    path = write(files, 1)
    for content in (b"\xc0", msgspec.msgpack.encode({"key": 1}), msgspec.msgpack.encode([b"", b""]), b"\xc1"):
        rest = content.ljust(4096 - 24, b"\0")
        prefix = b"KEEPWARM" + (1).to_bytes(4, "little") + len(content).to_bytes(4, "little") + bytes(4)
        head = prefix + zlib.crc32(prefix + rest).to_bytes(4, "little") + rest
        path.write_bytes(head + bytes(SIZE - 4096))
        assert fault_of(files) == "foreign"
    assert gone_after_a_scan(files, path)


# --- foreign ----------------------------------------------------------------------------------------------------------


def test_another_models_block(files: BlockFiles) -> None:
    path = write(files, 1)
    write(files, 1, fingerprint=OTHER_MODEL).replace(path)
    assert fault_of(files) == "foreign"
    assert gone_after_a_scan(files, path)


def test_another_block_under_this_ones_name(files: BlockFiles) -> None:
    path = write(files, 1)
    write(files, 3).replace(path)
    assert fault_of(files) == "foreign"
    assert gone_after_a_scan(files, path)


def test_an_image_of_another_size_than_asked_for(files: BlockFiles) -> None:
    write(files, 1)
    assert {fault_of(files, size=size) for size in (0, IMAGE_BYTES - 1, IMAGE_BYTES + 1)} == {"foreign"}
    assert read(files, 1)[1] == bytes(image_of(1))


def test_a_block_of_another_format(files: BlockFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(block_file, "FORMAT_VERSION", 2)
        path = write(files, 1)
    assert fault_of(files) == "old_format"
    assert gone_after_a_scan(files, path)


def a_folder(path: Path) -> None:
    path.mkdir()
    (path / "below").write_text("x")


@pytest.mark.parametrize("make", [a_folder, os.mkfifo, lambda path: path.write_bytes(b"x" * SIZE)])
def test_something_else_under_the_files_name(files: BlockFiles, make: Callable[[Path], object]) -> None:
    path = write(files, 1)
    path.unlink()
    make(path)
    assert fault_of(files) == "foreign"
    files.quarantine(MODEL, key_of(1), "foreign")
    assert fault_of(files) == "missing"
    make(path)
    assert gone_after_a_scan(files, path)


def test_a_link_is_not_followed_even_to_the_right_block(files: BlockFiles, tmp_path: Path) -> None:
    path = write(files, 1)
    target = path.rename(tmp_path / "elsewhere")
    path.symlink_to(target)
    assert fault_of(files) == "foreign"
    assert gone_after_a_scan(files, path) and target.stat().st_size == SIZE
    path.symlink_to(target)
    write(files, 1)
    assert not path.is_symlink() and read(files, 1)[1] == bytes(image_of(1)) and target.stat().st_size == SIZE


@pytest.mark.parametrize("level", [0, 1])
def test_linked_folders_are_not_entered(files: BlockFiles, tmp_path: Path, level: int) -> None:
    folder = write(files, 1).parents[level]
    target = folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(target)
    before = everything(target)
    assert fault_of(files) == "foreign" and found(files) == []
    with pytest.raises(BlockWriteFailed, match="Not a directory"):
        write(files, 1)
    with pytest.raises(BlockWriteFailed, match=r"cannot delete .* \(Not a directory\)"):
        files.delete(MODEL, key_of(1))
    files.quarantine(MODEL, key_of(1), "foreign")
    files.forget(MODEL)
    assert everything(target) == before


def test_an_unreadable_block_leaves_others_alone(files: BlockFiles) -> None:
    path = write(files, 1)
    write(files, 2)
    path.write_bytes(b"")
    assert fault_of(files) == "short"
    files.quarantine(MODEL, key_of(1), "short")
    assert everything(files.root) == [str(path_of(files.root, key_of(2)).relative_to(files.root))]
    assert read(files, 2)[1] == bytes(image_of(2))
