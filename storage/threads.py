"""Where the database's work is done: one writing thread and a few reading ones, seen from one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from sqlalchemy.orm import Session

from storage.database import READERS, Database
from storage.deletion import scrub_if_due
from storage.errors import StoreClosed
from storage.migrate import open_database

T = TypeVar("T")


class Threads:
    """An open database and its threads. A cancelled write that had begun is still carried out."""

    def __init__(self, database: Database, writer: ThreadPoolExecutor) -> None:
        self.database = database
        self._writer = writer
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="keepwarm-reader")
        self._closed = False

    @classmethod
    async def open(cls, data_dir: Path) -> Threads:
        """Open the database of `data_dir` on its writing thread. Raises as `open_database`."""
        writer = ThreadPoolExecutor(1, thread_name_prefix="keepwarm-writer")
        try:
            database = await asyncio.get_running_loop().run_in_executor(writer, open_database, data_dir)
        except BaseException:
            writer.shutdown(wait=False)
            raise
        return cls(database, writer)

    async def close(self) -> None:
        """Finish the writes that were asked for, then close the file. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        await asyncio.to_thread(self._readers.shutdown)
        await asyncio.get_running_loop().run_in_executor(self._writer, self._close_database)
        self._writer.shutdown(wait=False)

    async def write(self, work: Callable[[Session], T]) -> T:
        """Run `work` in a transaction of its own; committed on return."""
        if self._closed:
            raise StoreClosed
        return await asyncio.get_running_loop().run_in_executor(self._writer, self.database.write, work)

    async def read(self, work: Callable[[Session], T]) -> T:
        """Run `work` on one snapshot."""
        if self._closed:
            raise StoreClosed
        return await asyncio.get_running_loop().run_in_executor(self._readers, self.database.read, work)

    async def scrub(self) -> None:
        """Take what was deleted out of every file; a job of its own, so that deletions that came together share it."""
        await asyncio.get_running_loop().run_in_executor(self._writer, scrub_if_due, self.database)

    def _close_database(self) -> None:
        scrub_if_due(self.database)
        self.database.close()
