"""Migrations: they make what the models say, all or nothing, with a backup, and never touch a newer database."""

# ruff: noqa: ASYNC240 - a test may wait for its own small files

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, inspect

from storage import DatabaseTooNew, MigrationFailed, Store
from storage.backup import backups
from storage.database import FILE_NAME, prepare, writing_engine
from storage.migrate import SCRIPTS, check, migrate
from storage.models import Base

HEAD = ScriptDirectory(str(SCRIPTS)).get_current_head()


def rows(path: Path, query: str) -> list[Any]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(query).fetchall()


def scripts_with(tmp_path: Path, *upgrades: str) -> Path:
    """Our revisions, and after them one for each of `upgrades` (the body of its function)."""
    scripts = tmp_path / "scripts %"
    shutil.copytree(SCRIPTS, scripts, ignore=shutil.ignore_patterns("__pycache__"))
    before = HEAD
    for number, body in enumerate(upgrades, 9001):
        text = (
            f"from alembic import op\nrevision = '{number}'\ndown_revision = '{before}'\n\ndef upgrade():\n    {body}\n"
        )
        (scripts / "versions" / f"{number}.py").write_text(text)
        before = str(number)
    return scripts


@pytest.fixture
async def populated(tmp_path: Path) -> Path:
    store = await Store.open(tmp_path / "data")
    session = await store.create_session((await store.implicit_admin()).id, title="kept")
    await store.add_message(session.id, parent_id=None, role="user", text="hello", token_ids=[1], tokenizer="t")
    await store.close()
    return tmp_path / "data" / FILE_NAME


def test_models_and_migrations_agree(tmp_path: Path) -> None:
    path = prepare(tmp_path / "migrated")
    migrate(path)
    migrated = writing_engine(path)
    with migrated.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, Base.metadata) == []

    modelled = create_engine(f"sqlite:///{tmp_path / 'modelled.sqlite3'}")
    Base.metadata.create_all(modelled)
    ours, theirs = inspect(migrated), inspect(modelled)
    names = sorted(set(ours.get_table_names()) - {"alembic_version"})
    assert names == [
        "cache_events", "message_tokens", "messages", "models", "pending_drops", "sessions", "settings", "trace",
        "turns", "users",
    ]  # fmt: skip
    for name in names:  # what compare_metadata does not compare
        for part in ("get_check_constraints", "get_foreign_keys", "get_unique_constraints", "get_pk_constraint"):
            key = str
            mine, other = getattr(ours, part)(name), getattr(theirs, part)(name)
            if isinstance(mine, list):
                mine, other = sorted(mine, key=key), sorted(other, key=key)
            assert mine == other, (name, part)
        assert [column["name"] for column in ours.get_columns(name)] == [
            column["name"] for column in theirs.get_columns(name)
        ]
    migrated.dispose()
    modelled.dispose()


def test_an_empty_file_is_upgraded_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = prepare(Path("relative"))
    assert check(path) is None
    migrate(path)
    assert check(path) == HEAD
    migrate(path)
    assert backups(path) == []


def test_an_older_database_is_backed_up_then_upgraded(tmp_path: Path, populated: Path) -> None:
    migrate(populated, scripts_with(tmp_path, "op.execute(\"UPDATE sessions SET title = 'changed'\")"))
    assert rows(populated, "SELECT title FROM sessions") == [("changed",)]
    assert check(populated) == "9001"
    (backup,) = backups(populated)
    assert (backup.name, oct(backup.stat().st_mode)[-3:]) == (f"keepwarm-{HEAD}.sqlite3", "600")
    assert backup.parent.stat().st_mode & 0o777 == 0o700
    assert rows(backup, "SELECT title, text FROM sessions JOIN messages ON session_id = sessions.id") == [
        ("kept", "hello")
    ]
    assert check(backup) == HEAD


def test_one_backup_is_kept(tmp_path: Path, populated: Path) -> None:
    migrate(populated, scripts_with(tmp_path / "1", "pass"))
    migrate(populated, scripts_with(tmp_path / "2", "pass", "pass"))
    assert [backup.name for backup in backups(populated)] == ["keepwarm-9001.sqlite3"]


def test_recreating_a_parent_table_keeps_its_children(tmp_path: Path, populated: Path) -> None:
    body = (
        "import sqlalchemy as sa\n"
        "    with op.batch_alter_table('sessions', recreate='always') as batch:\n"
        "        batch.add_column(sa.Column('starred', sa.Boolean(), nullable=False, server_default='0'))"
    )
    migrate(populated, scripts_with(tmp_path, body))
    assert rows(populated, "SELECT starred, text FROM sessions JOIN messages ON session_id = sessions.id") == [
        (0, "hello")
    ]
    assert rows(populated, "SELECT ids FROM message_tokens") == [(b"\x01\x00\x00\x00",)]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("op.execute('DELETE FROM messages'); raise RuntimeError('power cut')", "power cut"),
        ("op.execute('CREATE TABLE x (y)'); op.execute('nonsense')", "syntax error"),
        ("op.execute('DELETE FROM users')", "1 rows refer to nothing, the first from sessions to users"),
    ],
)
def test_a_failed_upgrade_changes_nothing(tmp_path: Path, populated: Path, body: str, reason: str) -> None:
    everything = "SELECT name FROM sqlite_master UNION ALL SELECT text FROM messages UNION ALL SELECT name FROM users"
    before = rows(populated, everything)
    with pytest.raises(MigrationFailed, match=reason) as caught:
        migrate(populated, scripts_with(tmp_path, "op.execute('CREATE TABLE half (x)')", body))
    assert (caught.value.found, caught.value.known) == (HEAD, "9002")
    assert rows(populated, everything) == before
    assert check(populated) == HEAD


def test_no_backup_no_upgrade(tmp_path: Path, populated: Path) -> None:
    (populated.parent / "backups").write_text("a file is in the way")
    with pytest.raises(MigrationFailed, match="no backup could be made first"):
        migrate(populated, scripts_with(tmp_path, "op.execute('DELETE FROM messages')"))
    assert rows(populated, "SELECT text FROM messages") == [("hello",)]


async def test_a_newer_database_is_refused_with_both_revisions(tmp_path: Path, populated: Path) -> None:
    migrate(populated, scripts_with(tmp_path, "pass"))
    before = populated.read_bytes()
    with pytest.raises(DatabaseTooNew, match=f"revision 9001.*up to {HEAD}") as caught:
        await Store.open(populated.parent)
    assert (caught.value.found, caught.value.known) == ("9001", HEAD)
    assert populated.read_bytes() == before
