"""Look at a database without opening a store: what is there, how old it is, whether it is sound. Changes nothing."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from alembic.script import ScriptDirectory

from storage.backup import backups
from storage.database import FILE_NAME, connect
from storage.errors import DatabaseTooNew, typed_errors
from storage.migrate import SCRIPTS, check

SQLITE = sqlite3.sqlite_version


@dataclass(frozen=True)
class DatabaseReport:
    """A sound database. `revision` None: it is empty; one that is not `newest` is upgraded at the next start.

    `chats` are those of the page, `api_chats` those of API clients. `size` is in bytes, with what SQLite keeps beside
    the file; `backups` were made before upgrades.
    """

    path: Path
    revision: str | None
    newest: str
    chats: int
    api_chats: int
    size: int
    backups: tuple[Path, ...]


def inspect_database(data_dir: Path) -> DatabaseReport | None:
    """What `data_dir` holds; None when there is no database yet.

    Raises DatabaseDamaged (it fails `PRAGMA quick_check`), DatabaseTooNew, DatabaseBusy or DatabaseFailed.
    """
    path = data_dir.absolute() / FILE_NAME
    if not path.is_file():
        return None
    scripts = ScriptDirectory(str(SCRIPTS))
    newest = scripts.get_current_head() or ""
    revision = check(path)
    if revision is not None and revision not in {script.revision for script in scripts.walk_revisions()}:
        raise DatabaseTooNew(path, revision, newest)
    counts = {} if revision is None else _count_chats(path)
    return DatabaseReport(
        path=path,
        revision=revision,
        newest=newest,
        chats=counts.get("chat", 0),
        api_chats=counts.get("api", 0),
        size=sum(file.stat().st_size for file in data_dir.glob(f"{FILE_NAME}*")),
        backups=tuple(backups(path)),
    )


def _count_chats(path: Path) -> dict[str, int]:
    with typed_errors(path), closing(connect(path, read_only=True)) as connection:
        return dict(connection.execute("SELECT origin, count(*) FROM sessions GROUP BY origin"))
