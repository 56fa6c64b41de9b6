"""Deletes files and writes records, one after the other and off the engine's thread: both take milliseconds.

The one owner of what is about to be deleted. Its ends come back through `post`, which has a call made on the engine's
thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from engine.cache.disk import BlockFiles
from engine.cache.holders import HolderFiles, SessionRecord
from engine.errors import EngineError

log = logging.getLogger(__name__)


class Clerk:
    """`keys` have files that are about to go, and `bytes` are about to come back."""

    def __init__(self, blocks: BlockFiles, holders: HolderFiles, post: Callable[[Callable[[], None]], None]) -> None:
        self.keys: set[bytes] = set()
        self.bytes = 0
        self._undeleted: set[bytes] = set()  # touched by the thread alone, as the next
        self._introduced: set[str] = set()
        self._blocks, self._holders, self._post = blocks, holders, post
        self._thread: ThreadPoolExecutor | None = ThreadPoolExecutor(1, thread_name_prefix="disk-tier-records")

    def delete(self, fingerprint: bytes, key: bytes, size: int, gone: Callable[[int], None]) -> None:
        """Delete a block's file of so many bytes, then tell `gone`: of none, when it could not be deleted."""
        self.keys.add(key)
        self.bytes += size

        def work() -> None:
            freed = size
            try:
                self._blocks.delete(fingerprint, key)
            except EngineError as error:
                log.error("a block's file could not be deleted: %s", error)
                self._undeleted.add(key)
                freed = 0
            self._post(lambda: end(freed))

        def end(freed: int) -> None:
            self.keys.discard(key)
            self.bytes -= size
            gone(freed)

        self._do(work)

    def discard_old(self, size: int, gone: Callable[[int], None]) -> None:
        """Delete the files of other formats, which take so many bytes, then tell `gone`."""
        self.bytes += size

        def work() -> None:
            freed = size
            try:
                self._blocks.discard_old()
            except EngineError as error:
                log.error("files of another format could not be deleted: %s", error)
                freed = 0
            self._post(lambda: end(freed))

        def end(freed: int) -> None:
            self.bytes -= size
            gone(freed)

        self._do(work)

    def introduce(self, session_ids: list[str]) -> None:
        """A block's file is about to name these sessions: without any record of them it would be nobody's."""

        def work() -> None:
            for session_id in session_ids:
                if session_id in self._introduced:
                    continue
                try:
                    self._holders.introduce(session_id)
                    self._introduced.add(session_id)
                except EngineError as error:  # what it holds is noted later, and that is tried again
                    log.warning("a chat on disk could not be noted: %s", error)

        self._do(work)

    def note(self, record: SessionRecord, failed: Callable[[], None]) -> None:
        """Write down what a session holds; `failed` is called where that was not possible."""

        def work() -> None:
            try:
                self._holders.save(record)
                self._blocks.sync()
            except EngineError as error:
                log.warning("what a chat holds on disk could not be noted: %s", error)
                self._post(failed)

        self._do(work)

    def forget(self, session_id: str, keys: set[bytes], done: Callable[[bool], None]) -> None:
        """Delete what is written down of a session; `done` is told whether nothing of it is left.

        Where one of its files could not be deleted, the record stays, so that it is still known whose that is.
        """

        def work() -> None:
            whole = not keys & self._undeleted
            self._introduced.discard(session_id)
            try:
                if whole:
                    self._holders.delete(session_id)
                self._blocks.sync()
            except EngineError as error:
                log.error("what is noted of a deleted chat could not be deleted: %s", error)
                whole = False
            self._post(lambda: done(whole))

        self._do(work)

    def _do(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            work()
        else:
            self._thread.submit(work)

    def close(self) -> None:
        """Do what was asked for; what is asked for from now on is done at once."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(wait=True)
