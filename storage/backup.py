"""The copy of the database that is made before a migration.

One is kept: the newest, `backups/keepwarm-<revision>.sqlite3` in the data directory.
"""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

from storage.database import connect

DIRECTORY = "backups"


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
    for other in backups(path):
        if other != target:
            other.unlink()
    return target


def backups(path: Path) -> list[Path]:
    """The backups of the database at `path`, also one left unfinished by a killed process."""
    return sorted((path.parent / DIRECTORY).glob("keepwarm-*"))
