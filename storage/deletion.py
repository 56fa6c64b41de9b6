"""How deleted text leaves every file: the database, its write-ahead log and the backup beside it.

`secure_delete` zeroes what is freed, but when SQLite rebalances a tree it moves live rows between pages and leaves
copies of them in a page's unused part. Only rebuilding the file is sure to remove those. So the transaction that
deletes also marks the file as owing a scrub, and the mark goes once the scrub is done: a process killed in between pays
at its next start.
"""

from __future__ import annotations

import logging
import sqlite3
from contextlib import closing

from sqlalchemy.orm import Session

from storage.backup import backups
from storage.database import Database, connect
from storage.errors import StorageError

SCRUB_DUE = 1
"""The value of SQLite's user_version, which nothing else uses, while a scrub is owed; else it is 0."""

log = logging.getLogger(__name__)


def mark_scrub_due(db: Session) -> None:
    """Note, in the transaction that deletes, that a scrub is owed."""
    db.connection().exec_driver_sql(f"PRAGMA user_version={SCRUB_DUE}")


def scrub_if_due(database: Database) -> None:
    """Finish the deletions that were committed. On the writing thread; about half a second per 100 MB of files.

    A failure (a full disk has no room for the rebuilt copy) is logged and leaves the scrub owed: the next deletion, the
    close and the next start try again.
    """
    try:
        with database.raw() as connection:
            if connection.execute("PRAGMA user_version").fetchone() != (SCRUB_DUE,):
                return
            _scrub_backups(database, [row[0] for row in connection.execute("SELECT id FROM sessions")])
            _scrub(connection)
            connection.execute("PRAGMA user_version=0")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    except StorageError as error:
        log.warning("deleted text may remain in unused parts of the database until the next try: %s", error)


def _scrub(connection: sqlite3.Connection) -> None:
    """Rebuild a file from its live rows and empty its log."""
    connection.execute("PRAGMA temp_store=FILE")  # the copy is as large as the file: not in memory
    try:
        connection.execute("VACUUM")
    finally:
        connection.execute("PRAGMA temp_store=MEMORY")
    (busy, *_) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    if busy:
        raise sqlite3.OperationalError("a reader holds the write-ahead log")


def _scrub_backups(database: Database, live: list[str]) -> None:
    """Delete from the backups every session that is gone from the database; every revision has `sessions(id)`.

    A backup that cannot be edited is removed instead.
    """
    for path in backups(database.path):
        try:
            with closing(connect(path)) as copy:
                copy.execute("CREATE TEMP TABLE live (id TEXT PRIMARY KEY)")
                copy.execute("BEGIN IMMEDIATE")
                copy.executemany("INSERT INTO live VALUES (?)", [(each,) for each in live])
                copy.execute("DELETE FROM sessions WHERE id NOT IN (SELECT id FROM live)")
                copy.execute("COMMIT")
                _scrub(copy)
        except sqlite3.Error as error:
            log.warning("removed the backup %s, for a deleted chat could not be removed from it: %s", path, error)
            path.unlink(missing_ok=True)
