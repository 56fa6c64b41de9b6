"""A small value in a file of its own, with a checksum: what is damaged is told from what is there."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import TypeVar

import msgspec

from engine.cache.files import open_private, write_whole

T = TypeVar("T")

_PREFIX = struct.Struct("<8sI")
_MAGIC = b"KEEPREC1"  # the format's version is its last byte


def write_record(path: Path, record: object, *, durable: bool = True) -> None:
    """Write it in one go. Raises `OSError`; then what was there before still is. `durable`: as in `write_whole`."""
    packed = msgspec.msgpack.encode(record)
    write_whole(path, (_PREFIX.pack(_MAGIC, zlib.crc32(packed)), packed), durable=durable)


def read_record(path: Path, kind: type[T]) -> T:
    """Read it again. Raises `OSError`, and `ValueError` for what is damaged or was not written like this."""
    with open_private(path, "rb") as file:
        data = file.readall()
    if len(data) < _PREFIX.size or data[: len(_MAGIC)] != _MAGIC:
        raise ValueError(f"{path.name} is no record of this format")
    packed = data[_PREFIX.size :]
    if zlib.crc32(packed) != _PREFIX.unpack_from(data)[1]:
        raise ValueError(f"{path.name} fails its checksum")
    try:
        return msgspec.msgpack.decode(packed, type=kind)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path.name} is another record: {error}") from error
