"""The copy of the database that is made before a migration, and how deletions reach it too.

One backup is kept: the newest, `backups/keepwarm-<revision>.sqlite3` in the data directory.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from storage.database import connect, scrub

DIRECTORY = "backups"

log = logging.getLogger(__name__)


def make_backup(path: Path, revision: str) -> Path:
    """Copy the database at `path`, complete and self-contained, with SQLite's backup API; the copy's path.

    It takes its name only when it is whole, and then replaces older backups. Raises sqlite3.Error or OSError.
    """
    directory = path.parent / DIRECTORY
    directory.mkdir(mode=0o700, exist_ok=True)
    target = directory / f"keepwarm-{revision}.sqlite3"
    partial = target.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    with closing(connect(path, read_only=True)) as source, closing(connect(partial)) as copy:
        source.backup(copy)
        copy.execute("PRAGMA journal_mode=DELETE").fetchall()
    partial.replace(target)
    for other in directory.glob("keepwarm-*.sqlite3"):
        if other != target:
            other.unlink()
    return target


def forget_in_backups(path: Path, session_ids: Sequence[str]) -> None:
    """Delete these sessions from the backups beside the database at `path`, for deleting means everywhere.

    Every revision has `sessions(id)` and cascades from it. A backup that cannot be edited is removed instead.
    """
    for backup in sorted((path.parent / DIRECTORY).glob("keepwarm-*")):
        try:
            with closing(connect(backup)) as copy:
                copy.execute("BEGIN IMMEDIATE")
                copy.executemany("DELETE FROM sessions WHERE id = ?", [(each,) for each in session_ids])
                copy.execute("COMMIT")
                scrub(copy)
        except sqlite3.Error as error:
            log.warning("removed the backup %s, for a deleted chat could not be removed from it: %s", backup, error)
            backup.unlink(missing_ok=True)
