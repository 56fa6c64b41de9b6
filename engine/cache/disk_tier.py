"""The disk tier at work: blocks go to files and come back by workers, and the engine's thread waits for neither.

The one owner of what is on disk: of each block's `disk` and `writing`, and of how much that is in all. It decides
nothing. A worker's end comes back through `post`, which has a call made on the engine's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from engine.cache.block_file import BlockUnreadable
from engine.cache.clerk import Clerk
from engine.cache.cold import ColdBlock, Space
from engine.cache.copies import Copied
from engine.cache.disk import BlockFiles
from engine.cache.disk_space import DiskSpace
from engine.cache.earlier import Earlier, Stays
from engine.cache.headers import cold_of, file_bytes, header_of
from engine.cache.holders import HolderFiles, SessionRecord
from engine.cache.host import HostSlab
from engine.cache.journal import Journal
from engine.cache.rates import MovingRate
from engine.cache.segments import HostSlot
from engine.cache.write_budget import WriteBudget
from engine.errors import EngineError

STAGING_BYTES = 64 * 2**20  # of blocks on their way
STAGED = 4  # blocks that can be on their way at least, however large they are
WORKERS = 2

log = logging.getLogger(__name__)
Clock = Callable[[], float]
Post = Callable[[Callable[[], None]], None]
Fill = Callable[[HostSlot], Copied]


@dataclass(frozen=True)
class Files:
    """What lies in the disk tier's folder."""

    blocks: BlockFiles
    holders: HolderFiles
    writes: WriteBudget


class DiskTier:
    """`bytes` are of all files, those on their way and those of models that are not served included."""

    def __init__(self, files: Files | None, clock: Clock, wall: Clock, post: Post, journal: Journal) -> None:
        # Staging is not page-locked: its segments come and go too often for that.
        self.files, self.staging, self.rate = files, HostSlab(STAGING_BYTES), MovingRate()
        self.clerk = Clerk(files.blocks, files.holders, post) if files is not None else None
        self._space = DiskSpace(files.blocks.root if files is not None else None, clock, journal)
        self.on_removal: Callable[[], None] = lambda: None  # has `leave_missing` called
        self.on_unnoted: Callable[[str], None] = lambda _: None  # what a session holds could not be written down
        self.earlier: Earlier | None = None
        self._old_bytes = self.bytes = 0
        self._unheld: set[bytes] = set()  # keys of files that were nobody's at the start, and whose cannot be told
        if files is not None:
            self.earlier = Earlier.found(files.blocks, files.holders, wall(), self._unlink)
            self._old_bytes = files.blocks.old_usage().bytes
            self.bytes = self.earlier.size + self._old_bytes
            self._unheld = self.earlier.drop_unheld()
        self.saving = self.loading = 0  # blocks on their way
        self._writing: dict[bytes, int] = {}  # bytes by key; one file of a key at a time, also of a deleted chat's
        self._landed: set[bytes] = set()  # those of them whose file is there, which a worker says at once
        self.read_at = 0.0  # when a read ended last
        self._clock, self._wall, self._post = clock, wall, post
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="disk-tier")
        for session_id in self.earlier.unnoted if self.earlier is not None else ():
            self.note(session_id, clock(), [])  # of some there is no more than a damaged record

    @property
    def deleting(self) -> set[bytes]:
        """The keys whose files are about to go."""
        return self.clerk.keys if self.clerk is not None else set()

    @property
    def paused(self) -> bool:
        """Whether a write failed so lately that none is tried."""
        return self._space.paused

    @property
    def busy(self) -> bool:
        """Whether a write may be possible a little later that is not now."""
        return self.saving > 0 or self.leaving_bytes > 0

    @property
    def leaving_bytes(self) -> int:
        """As many of `bytes` are about to go."""
        return self.clerk.bytes if self.clerk is not None else 0

    @property
    def writing_bytes(self) -> int:
        """As many of `bytes` are being written."""
        return sum(self._writing.values())

    # --- the folder ---------------------------------------------------------------------------------------------------

    def budget(self, wanted: int) -> int:
        """How many bytes all files may have: as many as `wanted`, or fewer where the file system has no room."""
        return self._space.most(wanted, self._there())

    def _there(self) -> int:
        """As many of `bytes` are on disk already."""
        return self.bytes - sum(size for key, size in self._writing.items() if key not in self._landed)

    def look_for_removal(self) -> None:
        """Find out whether somebody removed the folder, which is allowed at any time."""
        if self.files is not None and self.bytes and self.files.blocks.was_removed():
            self.on_removal()

    def leave_missing(self, blocks: Iterable[ColdBlock]) -> tuple[list[ColdBlock], int]:
        """Take out of the books what has no file any more: which of `blocks`, and the bytes of all that."""
        if self.files is None or self.earlier is None:
            return [], 0
        before, has = self.bytes, self.files.blocks.has
        lost = [cold for cold in blocks if cold.disk and not has(cold.space.fingerprint, cold.key)]
        for cold in lost:
            self.bytes -= cold.disk
            cold.disk = 0
        self.bytes -= self.earlier.leave_missing(has)
        if self._old_bytes and not self.files.blocks.old_usage().files:
            self.bytes -= self._old_bytes
            self._old_bytes = 0
        return lost, before - self.bytes

    # --- blocks -------------------------------------------------------------------------------------------------------

    def accepts(self, size: int) -> bool:
        """Whether a block of so many bytes could be written now; there may be no room for it all the same."""
        return self.files is not None and not self.paused and self.files.writes.allows(size)

    def write(self, cold: ColdBlock, fill: Fill, done: Callable[[EngineError | None], None]) -> bool:
        """Begin to write what `fill` copies; `done` is told how it ended. False: not now."""
        size = cold.space.codec.size
        if cold.key in self.deleting or cold.key in self._writing or not self.accepts(size):
            return False
        if self.files is None or self.clerk is None or (slot := self.staging.take(size)) is None:
            return False
        try:
            copied = fill(slot)
        except (MemoryError, RuntimeError) as error:  # torch's out of memory is a RuntimeError
            log.warning("a block could not be copied for its file: %s", error)
            self.staging.give_back(slot)
            return False
        self.files.writes.count(file_bytes(size))
        cold.writing = True
        self._writing[cold.key] = file_bytes(size)
        self.saving += 1
        self.bytes += file_bytes(size)  # counted before it is there
        header, image, files, space = header_of(cold), slot.memory, self.files, self._space
        self.clerk.introduce(header.holders)

        def work() -> None:
            result: int | Exception
            try:
                copied.wait()
                space.require(file_bytes(size))
                files.writes.keep()
                result = files.blocks.write(header, image)
                self._landed.add(cold.key)
            except Exception as error:
                result = error
            self._post(lambda: finish(result))

        def finish(result: int | Exception) -> None:
            self.staging.give_back(slot)
            self.saving -= 1
            self.bytes -= file_bytes(size)
            cold.writing = False
            del self._writing[cold.key]
            self._landed.discard(cold.key)
            if isinstance(result, int):
                cold.disk = result
                self.bytes += result
                done(None)
                return
            done(space.failed(result, file_bytes(size), self._there()))

        self._workers.submit(work)
        return True

    def read(self, cold: ColdBlock, done: Callable[[HostSlot | None, str], None]) -> bool:
        """Begin to read a block; `done` gets its place in `staging`, to be given back, or None and why not.

        False: there is no room to read into now.
        """
        size = cold.space.codec.size
        if self.files is None or (slot := self.staging.take(size)) is None:
            return False
        image, before, blocks, began = slot.memory, slot.copied, self.files.blocks, self._clock()
        self.loading += 1

        def work() -> None:
            try:
                before.wait()
                header = blocks.read(cold.space.fingerprint, cold.key, image)
                why = "" if header.token_ids == list(cold.token_ids) else "its file holds other tokens"
            except BlockUnreadable as error:
                why = str(error)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
            self._post(lambda: finish(why))

        def finish(why: str) -> None:
            self.loading -= 1
            if why:
                self.staging.give_back(slot)
                self.look_for_removal()
                done(None, why)
            else:
                self.read_at = self._clock()
                self.rate.observe(size, (self.read_at - began) / WORKERS)
                done(slot, "")

        self._workers.submit(work)
        return True

    def delete(self, cold: ColdBlock) -> None:
        """Have a block's file deleted. One that is being written has none yet."""
        if cold.disk:
            self._unlink(cold.space.fingerprint, cold.key, cold.disk)
        cold.disk = 0

    def _unlink(self, fingerprint: bytes, key: bytes, size: int) -> None:
        """Its bytes count until it has gone, and nothing is written in its place before."""
        if self.clerk is not None:
            self.clerk.delete(fingerprint, key, size, self._gone)

    def _gone(self, size: int) -> None:
        self.bytes -= size

    def quarantine(self, cold: ColdBlock, why: str) -> None:
        """Have a file that cannot be trusted never read again."""
        if self.files is not None and cold.disk:
            self.files.blocks.quarantine(cold.space.fingerprint, cold.key, why)
        self.bytes -= cold.disk
        cold.disk = 0

    def served(self, space: Space) -> list[ColdBlock]:
        """A model is served from now on: what earlier runs have kept of it."""
        self.staging.resize(max(self.staging.budget, STAGED * space.codec.size))
        blocks = self.earlier.take(space.fingerprint) if self.earlier is not None else []
        return [cold_of(block, space, self._on_clock(block.used_at)) for block in blocks]

    def earlier_sessions(self) -> dict[str, float]:
        """The sessions of earlier runs, and when each was used last, on the clock."""
        sessions = self.earlier.sessions if self.earlier is not None else {}
        return {session_id: self._on_clock(used_at) for session_id, used_at in sessions.items()}

    def let_earlier_go(self, wanted: int, ttl: float | None, stays: Stays) -> int:
        """Delete blocks of models that are not served: those older than `ttl` seconds, then until `wanted` bytes went.

        Files of other formats go before them, and what `stays` for its holders does not go. The bytes that will go.
        """
        if self.earlier is None:
            return 0
        gone = self.earlier.expire(self._wall() - ttl, stays) if ttl is not None else 0
        if wanted > gone:
            gone += self._discard_old()
        gone += self.earlier.give_way(wanted - gone, stays) if wanted > gone else 0
        return gone

    def _discard_old(self) -> int:
        old, self._old_bytes = self._old_bytes, 0
        if old and self.clerk is not None:
            self.clerk.discard_old(old, self._gone)
        return old

    def _on_clock(self, used_at: float) -> float:
        """A Unix time as one of the engine's clock; one in the future is now."""
        return self._clock() - max(0.0, self._wall() - used_at)

    # --- sessions -----------------------------------------------------------------------------------------------------

    def note(self, session_id: str, last_used: float, blocks: list[ColdBlock]) -> None:
        """Write down what a session holds on disk, so that it is known after a restart; not at once."""
        if self.clerk is None:
            return
        keys = self.earlier.keys(session_id) if self.earlier is not None else {}
        for cold in blocks:
            if cold.disk or cold.writing:  # a file names those who held it when it was begun
                keys.setdefault(cold.space.fingerprint, []).append(cold.key)
        used_at = self._wall() - max(0.0, self._clock() - last_used)
        record = SessionRecord(session_id=session_id, used_at=used_at, keys=keys)
        self.clerk.note(record, lambda: self.on_unnoted(session_id))

    def forget(self, session_id: str, keys: set[bytes], done: Callable[[bool], None]) -> None:
        """Delete what is written down of a session, and files of other formats, which may be its own.

        `keys` are those of its blocks that were to be deleted just now. `done` is told, when all of that has ended,
        whether nothing is left of it, nor of what was nobody's and may have been its own.
        """
        if self.clerk is None or self.earlier is None:
            done(True)
            return
        keys |= self.earlier.drop(session_id) | self._unheld
        self._discard_old()
        self.clerk.forget(session_id, keys, done)

    def close(self) -> None:
        """Let what was begun end; nothing more is begun."""
        self._workers.shutdown(wait=True)
        if self.clerk is not None:
            self.clerk.close()
