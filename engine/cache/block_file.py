"""One block as a file that describes itself: who it is, what it holds, and checksums over every byte that is read.

    0   magic, format version, length of the header, CRC-32 of the image, CRC-32 of all before the image but itself
    24  the header, as msgpack
    …   zeros up to a multiple of 4096
    n   the image, and zeros up to a multiple of 4096

The file's size is thus what it takes on disk, and the image can be read directly into aligned memory.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from isal.isal_zlib import crc32  # zlib's own takes 0.2 ms for an image of 737,280 bytes, this 0.01

from engine.cache.files import is_of_the_file, open_private, write_whole
from engine.errors import EngineError

FORMAT_VERSION = 1
KEY_BYTES = 16
ALIGNMENT = 4096
MAX_HEAD = 1 << 20  # bytes before the image
_MAGIC = b"KEEPWARM"
_PREFIX = struct.Struct("<8sIIII")
_CRC = struct.Struct("<I")

Fault = Literal["missing", "short", "damaged", "foreign", "old_format", "io_error"]


class BlockWriteFailed(EngineError):  # noqa: N818 - what happened, as for the errors of the engine
    """A block could not be written, and nothing of it was left behind; or it could not be deleted."""


class DiskFull(BlockWriteFailed):
    """There is no room on the file system, or no quota left."""


class BlockUnreadable(EngineError):  # noqa: N818
    """A block's file cannot be used; `fault` says why.

    "missing": it was deleted; "short", "damaged": it is not as it was written; "foreign": it is another block's or no
    file; "old_format": another version wrote it; "io_error": it could not be read now, and perhaps later.
    """

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault: Fault = fault


class BlockHeader(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a block's file says of itself.

    `fingerprint` stands for the model and all that makes images comparable. `key` and `parent` are 16 bytes, `depth`
    the blocks before it in its chain. `salted`: its key was made with a user's salt; `full`: others can continue it;
    `lossy`: the image is not exactly what was computed. `holders` are the sessions that held it when it was written.
    """

    fingerprint: bytes
    key: bytes
    parent: bytes
    token_ids: list[int]
    depth: int
    salted: bool
    full: bool
    lossy: bool
    holders: list[str]
    image_bytes: int


class Head(NamedTuple):
    """What stands before the image; `size` are the bytes of the whole file."""

    header: BlockHeader
    image_crc: int
    size: int


def write_block(path: Path, header: BlockHeader, image: memoryview) -> int:
    """Write a block's file in one go; its bytes on disk.

    Raises `DiskFull` or `BlockWriteFailed`, and `ValueError` for an image that is not of `header.image_bytes`.
    """
    image = image.cast("B")
    if len(image) != header.image_bytes:
        raise ValueError(f"the image has {len(image)} bytes, and its header says {header.image_bytes}")
    packed = msgspec.msgpack.encode(header)
    start = _aligned(_PREFIX.size + len(packed))
    if start > MAX_HEAD:
        raise BlockWriteFailed(f"cannot write {path.name}: its header of {len(packed):,} bytes is too long")
    prefix = _PREFIX.pack(_MAGIC, FORMAT_VERSION, len(packed), crc32(image), 0)[: -_CRC.size]
    rest = packed.ljust(start - _PREFIX.size, b"\0")
    with writing(path):
        return write_whole(
            path, (prefix + _CRC.pack(crc32(rest, crc32(prefix))) + rest, image, bytes(-len(image) % ALIGNMENT))
        )


def read_block(path: Path, fingerprint: bytes, key: bytes, into: memoryview) -> BlockHeader:
    """Read a block's image into memory of exactly its size, and check all of it. Raises `BlockUnreadable`.

    Then the memory may hold anything.
    """
    into = into.cast("B")
    with reading(path), open_private(path, "rb") as file:
        head = _read_head(file, path, fingerprint, key)
        if head.header.image_bytes != len(into):
            raise BlockUnreadable("foreign", f"{path.name} has {head.header.image_bytes} bytes, not {len(into)}")
        done = 0
        while done < len(into):
            count = file.readinto(into[done:])
            if not count:
                raise BlockUnreadable("short", f"{path.name} ended while it was read")
            done += count
    if crc32(into) != head.image_crc:
        raise BlockUnreadable("damaged", f"the image in {path.name} fails its checksum")
    return head.header


def read_head(path: Path, fingerprint: bytes, key: bytes) -> Head:
    """Read and check all but the image. Raises `BlockUnreadable`."""
    with reading(path), open_private(path, "rb") as file:
        return _read_head(file, path, fingerprint, key)


def _read_head(file: FileIO, path: Path, fingerprint: bytes, key: bytes) -> Head:
    """The same, and `file` stands at the image."""
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        raise BlockUnreadable("foreign", f"{path.name} is no file")
    head = file.read(ALIGNMENT)
    if len(head) < ALIGNMENT:
        raise BlockUnreadable("short", f"{path.name} has {len(head)} bytes")
    magic, version, length, image_crc, head_crc = _PREFIX.unpack_from(head)
    if magic != _MAGIC:
        raise BlockUnreadable("foreign", f"{path.name} is no block")
    if version != FORMAT_VERSION:
        raise BlockUnreadable("old_format", f"{path.name} has format {version}, not {FORMAT_VERSION}")
    start = _aligned(_PREFIX.size + length)
    if start > MAX_HEAD:
        raise BlockUnreadable("damaged", f"the header in {path.name} has an impossible length")
    if start > len(head):
        head += file.read(start - len(head))
    if len(head) < start:
        raise BlockUnreadable("short", f"{path.name} ends in its header")
    if crc32(head[_PREFIX.size :], crc32(head[: _PREFIX.size - _CRC.size])) != head_crc:
        raise BlockUnreadable("damaged", f"the header in {path.name} fails its checksum")
    try:
        header = msgspec.msgpack.decode(head[_PREFIX.size : _PREFIX.size + length], type=BlockHeader)
    except msgspec.MsgspecError as error:
        raise BlockUnreadable("foreign", f"the header in {path.name} is none of ours: {error}") from error
    if (header.fingerprint, header.key) != (fingerprint, key):
        raise BlockUnreadable("foreign", f"{path.name} holds another block or another model's")
    size = start + _aligned(header.image_bytes)
    if status.st_size != size:
        fault: Fault = "short" if status.st_size < size else "damaged"
        raise BlockUnreadable(fault, f"{path.name} has {status.st_size:,} bytes, not {size:,}")
    return Head(header, image_crc, size)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@contextmanager
def writing(path: Path, verb: str = "write") -> Iterator[None]:
    """Raise `DiskFull` or `BlockWriteFailed` for an `OSError`."""
    try:
        yield
    except OSError as error:
        full = error.errno in {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}
        raise (DiskFull if full else BlockWriteFailed)(f"cannot {verb} {path} ({error.strerror or error})") from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise `BlockUnreadable` for an `OSError`."""
    try:
        yield
    except OSError as error:
        raise BlockUnreadable(_fault(error), f"cannot read {path} ({error.strerror or error})") from error


def _fault(error: OSError) -> Fault:
    if error.errno == errno.ENOENT:
        return "missing"
    if error.errno == errno.EIO:
        return "damaged"
    return "foreign" if is_of_the_file(error) else "io_error"
