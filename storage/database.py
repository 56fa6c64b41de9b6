"""One SQLite file: its connections and its transactions. Knows no table.

The rules, and why:

- WAL, so that readers never wait for the writer; one writing connection, used by one thread.
- A write begins with BEGIN IMMEDIATE: a transaction that reads first and writes later fails at once, whatever the busy
  timeout, when another connection wrote in between.
- synchronous=FULL: a commit is on the disk before the call returns, so an acknowledged message also survives a power
  cut. (A kill -9 alone would lose nothing under NORMAL either: what a process wrote to a file stays in the operating
  system's cache when the process dies. FULL costs one fsync a commit, on the writer's thread.)
- secure_delete overwrites what is freed with zeros; `storage.deletion` does the rest.
- temp_store=MEMORY keeps text that SQLite sorts out of temporary files.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar, cast

from sqlalchemy import Engine, event
from sqlalchemy import create_engine as sqlalchemy_engine
from sqlalchemy.engine import Connection
from sqlalchemy.orm import Session
from sqlalchemy.pool import QueuePool, StaticPool

from storage.errors import DatabaseFailed, DataDirectoryError, typed_errors

FILE_NAME = "keepwarm.sqlite3"
BUSY_S = 10.0
READERS = 4

T = TypeVar("T")


def prepare(data_dir: Path) -> Path:
    """Make the data directory (0700) and an empty database file (0600) where they are missing; the file's path.

    A directory that exists keeps its mode, since it may be somebody's home. Raises DataDirectoryError.
    """
    path = data_dir.absolute() / FILE_NAME
    try:
        if not path.parent.is_dir():
            path.parent.parent.mkdir(parents=True, exist_ok=True)
            path.parent.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        if not path.is_file():
            raise DataDirectoryError(path.parent, f"{FILE_NAME} in it is not a file")
        path.chmod(0o600)
    except OSError as error:
        raise DataDirectoryError(path.parent, error.strerror or str(error)) from error
    return path


def connect(path: Path, *, read_only: bool = False, foreign_keys: bool = True) -> sqlite3.Connection:
    """A connection under the rules above; never creates the file. Transactions are the caller's."""
    connection = sqlite3.connect(
        f"{path.as_uri()}?mode=rw", uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False
    )
    try:
        connection.execute(f"PRAGMA foreign_keys={'ON' if foreign_keys else 'OFF'}")
        connection.execute("PRAGMA secure_delete=ON").fetchall()
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA temp_store=MEMORY")
        if read_only:
            connection.execute("PRAGMA query_only=ON")
    except BaseException:
        connection.close()
        raise
    return connection


def writing_engine(path: Path, *, foreign_keys: bool = True) -> Engine:
    """An engine of one connection whose transactions begin as writes."""
    engine = sqlalchemy_engine(
        "sqlite://",
        creator=lambda: connect(path, foreign_keys=foreign_keys),
        poolclass=StaticPool,
        hide_parameters=True,  # what people wrote does not go into logs
    )

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def reading_engine(path: Path) -> Engine:
    """An engine of up to READERS connections that cannot write; each transaction sees one moment."""
    engine = sqlalchemy_engine(
        "sqlite://",
        creator=lambda: connect(path, read_only=True),
        poolclass=QueuePool,
        pool_size=READERS,
        max_overflow=0,
        hide_parameters=True,
    )

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    return engine


class Database:
    """The open file. `write`, `raw` and `close` belong to one thread, `read` to any; all of them block."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _identity(path)
        self.writer = writing_engine(path)
        self.reader = reading_engine(path)

    def write(self, work: Callable[[Session], T]) -> T:
        """Run `work` in one transaction; committed when this returns, rolled back when it raises.

        Raises DatabaseFailed when the file was deleted or replaced: SQLite would write on where nobody finds it again.
        """
        if _identity(self.path) != self._file:
            raise DatabaseFailed(self.path, "it was deleted or replaced; put it back, or start Keepwarm again")
        with typed_errors(self.path), Session(self.writer) as db, db.begin():
            return work(db)

    def read(self, work: Callable[[Session], T]) -> T:
        """Run `work` on one snapshot."""
        with typed_errors(self.path), Session(self.reader) as db, db.begin():
            return work(db)

    @contextlib.contextmanager
    def raw(self) -> Iterator[sqlite3.Connection]:
        """The writing connection itself, outside any transaction, for what SQLite does to a whole file."""
        with typed_errors(self.path):
            pooled = self.writer.raw_connection()
            try:
                yield cast(sqlite3.Connection, pooled.driver_connection)
            finally:
                pooled.close()

    def close(self) -> None:
        """Close every connection; the last one to the file empties and removes the WAL."""
        self.reader.dispose()
        self.writer.dispose()


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file is at `path` now, None when there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
