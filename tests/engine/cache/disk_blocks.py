"""Blocks for the tests of the disk tier, and ways to have files fail."""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import msgspec
import pytest

from engine.cache.block_file import BlockHeader, BlockUnreadable
from engine.cache.disk import BlockFiles

MODEL, OTHER_MODEL = bytes(range(32)), bytes(range(32, 64))
IMAGE_BYTES = 10_000  # no multiple of the alignment


def key_of(number: int) -> bytes:
    return hashlib.blake2b(b"%d" % number, digest_size=16).digest()


def image_of(number: int, size: int = IMAGE_BYTES) -> memoryview:
    """Bytes that look random and are the same in every run."""
    return memoryview(hashlib.shake_128(b"%d" % number).digest(size))


def header_of(number: int, **changes: object) -> BlockHeader:
    header = BlockHeader(
        fingerprint=MODEL,
        key=key_of(number),
        parent=key_of(number - 1),
        token_ids=[5, 127, 128, 49151, 100_000 + number],
        depth=number,
        salted=True,
        full=False,
        lossy=False,
        holders=["7f9c", "ä"],
        image_bytes=IMAGE_BYTES,
    )
    return msgspec.structs.replace(header, **changes)


def write(files: BlockFiles, number: int, **changes: object) -> Path:
    """Write block `number`; its file."""
    header = header_of(number, **changes)
    files.write(header, image_of(number, header.image_bytes))
    return path_of(files.root, header.key, header.fingerprint)


def path_of(root: Path, key: bytes, fingerprint: bytes = MODEL) -> Path:
    return root / "blocks-1" / fingerprint.hex() / key.hex()[:2] / f"{key.hex()}.kv"


def read(files: BlockFiles, number: int, size: int = IMAGE_BYTES) -> tuple[BlockHeader, bytes]:
    memory = bytearray(size)
    header = files.read(MODEL, key_of(number), memoryview(memory))
    return header, bytes(memory)


def fault_of(files: BlockFiles, number: int = 1, size: int = IMAGE_BYTES) -> str:
    """What a read of block `number` says is wrong with it."""
    with pytest.raises(BlockUnreadable) as unreadable:
        read(files, number, size)
    return unreadable.value.fault


def found(files: BlockFiles, fingerprint: bytes = MODEL) -> list[int]:
    """The blocks that a scan finds, by number."""
    return sorted(stored.header.depth for stored in files.scan(fingerprint))


def everything(root: Path) -> list[str]:
    """Every file and link below a folder."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_symlink() or not path.is_dir())


@contextlib.contextmanager
def file_system(place: Path, options: str) -> Iterator[Path]:
    """A file system of its own; skips the test where this user may not mount one."""
    place.mkdir(exist_ok=True)
    mounted = (
        sys.platform == "linux"
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True, check=False
        ).returncode
    )
    if not mounted:
        pytest.skip("needs the right to mount a small file system")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def in_pieces(piece: int) -> type[FileIO]:
    """Files that read and write at most so many bytes at a time, as a system may."""

    class Pieces(FileIO):
        def write(self, data: memoryview) -> int:
            return super().write(data[:piece])

        def readinto(self, into: memoryview) -> int:
            return super().readinto(into[:piece])

    return Pieces


def failing(method: str, error: OSError, after: int = 0) -> type[FileIO]:
    """Files of which a method fails once it was called `after` times."""
    calls = 0

    def fail(self: FileIO, *arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls > after:
            raise error
        return getattr(super(Failing, self), method)(*arguments)

    class Failing(FileIO):
        pass

    setattr(Failing, method, fail)
    return Failing
