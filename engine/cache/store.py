"""What the disk tier needs of whatever keeps its blocks. Knows nothing of files."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from engine.cache.block_file import BlockHeader

Progress = Callable[[int, int], None]


class Stored(NamedTuple):
    """Blocks and what else lies with them: files, and their bytes."""

    files: int
    bytes: int


class StoredBlock(NamedTuple):
    """A block that was found, by its header alone, and its bytes on disk."""

    header: BlockHeader
    bytes: int


class BlockStore(Protocol):
    """Keeps blocks by fingerprint and key, whole and checked. `BlockFiles` says what each method does and raises.

    All of it may be called from several threads.
    """

    def write(self, header: BlockHeader, image: memoryview) -> int: ...
    def read(self, fingerprint: bytes, key: bytes, into: memoryview) -> BlockHeader: ...
    def delete(self, fingerprint: bytes, key: bytes) -> None: ...
    def quarantine(self, fingerprint: bytes, key: bytes, reason: str) -> None: ...
    def scan(self, fingerprint: bytes, progress: Progress | None = None) -> list[StoredBlock]: ...
    def forget(self, fingerprint: bytes) -> Stored: ...
    def usage(self) -> dict[bytes, Stored]: ...
    def sync(self) -> None: ...
    def set_aside(self) -> Stored | None: ...
    def old_usage(self) -> Stored: ...
    def discard_old(self) -> Stored: ...
