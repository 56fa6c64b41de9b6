"""Open a data directory's database at this program's revision, or say why not. Knows no table."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import cast

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory

from storage.backup import make_backup
from storage.database import Database, connect, prepare, writing_engine
from storage.deletion import scrub_if_due
from storage.errors import DatabaseDamaged, DatabaseTooNew, DataDirectoryError, MigrationFailed, typed_errors

SCRIPTS = Path(__file__).parent / "migrations"

_one_at_a_time = threading.Lock()  # alembic keeps the running migration in module globals


def open_database(data_dir: Path) -> Database:
    """Make what is missing, upgrade what is older, and finish a deletion that a killed process left unfinished.

    Raises DataDirectoryError and what `migrate` raises.
    """
    path = prepare(data_dir)
    migrate(path)
    database = Database(path)
    scrub_if_due(database)
    return database


def check(path: Path) -> str | None:
    """The revision of the database at `path`, None for an empty file. Writes nothing.

    Raises DatabaseDamaged for a file that is no SQLite database, is damaged, or belongs to another program.
    """
    with typed_errors(path), closing(connect(path, read_only=True)) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not tables:
            return None
        if "alembic_version" not in tables:
            raise DatabaseDamaged(path, "it holds the tables of another program")
        (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise DatabaseDamaged(path, verdict)
        row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        if row is None:
            raise DatabaseDamaged(path, "it does not say its revision")
        return str(row[0])


def migrate(path: Path, scripts: Path = SCRIPTS) -> None:
    """Upgrade the database at `path` to the newest revision in `scripts`: all of it or, when anything fails, nothing.

    A database that holds an older revision is backed up first. Raises DatabaseDamaged, DatabaseTooNew, MigrationFailed,
    DatabaseBusy or DiskFull; whichever it is, the file is as it was.
    """
    found = check(path)
    with _one_at_a_time:
        config = Config()
        config.set_main_option("script_location", str(scripts).replace("%", "%%"))
        directory = ScriptDirectory.from_config(config)
        head = cast(str, directory.get_current_head())
        if found is not None and found not in {script.revision for script in directory.walk_revisions()}:
            raise DatabaseTooNew(path, found, head)
        _use_wal(path)
        if found == head:
            return
        if found is not None:
            _back_up(path, found, head)
        _upgrade(path, found or "empty", head, config)


def _use_wal(path: Path) -> None:
    with typed_errors(path), closing(connect(path)) as connection:
        (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
    if mode != "wal":
        raise DataDirectoryError(path.parent, f"its file system gives SQLite the journal mode {mode!r}, not 'wal'")


def _back_up(path: Path, found: str, head: str) -> None:
    try:
        make_backup(path, found)
    except (sqlite3.Error, OSError) as error:
        raise MigrationFailed(path, found, head, f"no backup could be made first ({error})") from error


def _upgrade(path: Path, found: str, head: str, config: Config) -> None:
    """One transaction around all migrations, with foreign keys off: recreating a parent table with them on would
    delete its children. The check of all references before the commit makes up for it."""
    engine = writing_engine(path, foreign_keys=False)
    try:
        with typed_errors(path), engine.begin() as connection:
            config.attributes["connection"] = connection
            try:
                command.upgrade(config, "head")
            except Exception as error:
                raise MigrationFailed(path, found, head, str(error)) from error
            broken = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
            if broken:
                table, _, parent, _ = broken[0]
                reason = f"{len(broken)} rows refer to nothing, the first from {table} to {parent}"
                raise MigrationFailed(path, found, head, reason)
    finally:
        engine.dispose()
