"""A look at a database says what is there, and changes nothing."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from alembic.script import ScriptDirectory

from storage import DatabaseDamaged, DatabaseTooNew, Store, inspect_database
from storage.database import FILE_NAME
from storage.migrate import SCRIPTS

HEAD = ScriptDirectory(str(SCRIPTS)).get_current_head()
OLD = Path(__file__).parents[1] / "data" / "0001.sqlite3"


def test_a_folder_without_a_database_stays_one(tmp_path: Path) -> None:
    assert inspect_database(tmp_path) is None
    assert inspect_database(tmp_path / "absent") is None
    assert list(tmp_path.iterdir()) == []


async def test_chats_are_counted_by_where_they_come_from(tmp_path: Path) -> None:
    store = await Store.open(tmp_path)
    user = await store.implicit_admin()
    for origin in ("chat", "chat", "api"):
        await store.create_session(user.id, origin=origin)
    report = inspect_database(tmp_path)  # beside an open store
    await store.close()
    assert report is not None
    assert (report.revision, report.newest, report.chats, report.api_chats) == (HEAD, HEAD, 2, 1)
    assert report.size >= (tmp_path / FILE_NAME).stat().st_size
    assert report.backups == ()


async def test_an_old_database_is_told_and_left_old(tmp_path: Path) -> None:
    shutil.copy(OLD, tmp_path / FILE_NAME)
    before = (tmp_path / FILE_NAME).read_bytes()
    report = inspect_database(tmp_path)
    assert report is not None
    assert (report.revision, report.newest) == ("0001", HEAD)
    assert report.chats > 0
    assert (tmp_path / FILE_NAME).read_bytes() == before
    await (await Store.open(tmp_path)).close()
    upgraded = inspect_database(tmp_path)
    assert upgraded is not None
    assert upgraded.revision == HEAD
    assert [backup.name for backup in upgraded.backups] == (["keepwarm-0001.sqlite3"] if HEAD != "0001" else [])


def test_an_empty_file_has_no_revision(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).touch()
    report = inspect_database(tmp_path)
    assert report is not None
    assert (report.revision, report.chats, report.size) == (None, 0, 0)


def test_what_is_no_database_of_ours_is_an_error(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("a diary, " * 1000)
    with pytest.raises(DatabaseDamaged):
        inspect_database(tmp_path)
    (tmp_path / FILE_NAME).unlink()
    shutil.copy(OLD, tmp_path / FILE_NAME)
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.commit()
    with pytest.raises(DatabaseTooNew, match="revision 9999"):
        inspect_database(tmp_path)
