"""The files on disk: who may read them, what happens to a bad one, and that deleted text leaves all of them."""

# ruff: noqa: ASYNC240 - a test may wait for its own small files

from __future__ import annotations

import random
import sqlite3
import stat
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from storage import (
    DatabaseDamaged,
    DatabaseFailed,
    DataDirectoryError,
    DiskFull,
    Store,
    UserRecord,
    read_saved_settings,
)
from storage.backup import backups, make_backup
from storage.database import FILE_NAME
from storage.deletion import mark_scrub_due
from storage.sessions import delete_sessions


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def files_with(directory: Path, text: str) -> list[str]:
    return sorted(path.name for path in directory.rglob("*") if path.is_file() and text.encode() in path.read_bytes())


async def test_only_the_owner_may_read(tmp_path: Path) -> None:
    data_dir = tmp_path / "not yet" / "there % #?"
    store = await Store.open(data_dir)
    await store.implicit_admin()
    assert mode(data_dir) == 0o700
    assert {path.name: mode(path) for path in data_dir.iterdir()} == {
        FILE_NAME: 0o600,
        f"{FILE_NAME}-wal": 0o600,
        f"{FILE_NAME}-shm": 0o600,
    }
    await store.close()
    assert [path.name for path in data_dir.iterdir()] == [FILE_NAME]


async def test_a_directory_that_exists_keeps_its_mode_but_not_a_readable_database(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / FILE_NAME).touch(mode=0o644)
    await (await Store.open(tmp_path)).close()
    assert (mode(tmp_path), mode(tmp_path / FILE_NAME)) == (0o755, 0o600)


@pytest.mark.parametrize("where", ["file", "file/below", "directory"])
async def test_an_impossible_place_is_named_with_the_flag(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "directory" / FILE_NAME).mkdir(parents=True)
    with pytest.raises(DataDirectoryError, match="--data-dir") as caught:
        await Store.open(tmp_path / where)
    assert str(tmp_path / where) in str(caught.value)
    assert (tmp_path / "file").read_text() == "mine"


async def test_the_rules_hold_on_every_connection(store: Store) -> None:
    def pragmas(db: Any) -> dict[str, Any]:
        names = ("journal_mode", "foreign_keys", "secure_delete", "synchronous", "busy_timeout", "query_only")
        return {name: db.connection().exec_driver_sql(f"PRAGMA {name}").scalar() for name in names}

    rules = {"journal_mode": "wal", "foreign_keys": 1, "secure_delete": 1, "synchronous": 2, "busy_timeout": 10_000}
    assert store._threads.database.write(pragmas) == rules | {"query_only": 0}
    assert store._threads.database.read(pragmas) == rules | {"query_only": 1}


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def header_gone(data: bytes) -> bytes:
    return bytes(100) + data[100:]


def page_gone(data: bytes) -> bytes:
    return data[: 40 * 4096] + b"\xff" * 4096 + data[41 * 4096 :]


def not_sqlite(_: bytes) -> bytes:
    return b"my shopping list"


@pytest.mark.parametrize("damage", [truncated, header_gone, page_gone, not_sqlite])
async def test_a_damaged_file_is_named_and_left_alone(tmp_path: Path, damage: Any) -> None:
    store = await Store.open(tmp_path)
    user = await store.implicit_admin()
    for _ in range(50):
        await store.create_session(user.id, system_prompt="x" * 1_000)
    await store.close()
    path = tmp_path / FILE_NAME
    path.write_bytes(damaged := damage(path.read_bytes()))
    with pytest.raises(DatabaseDamaged, match="untouched") as caught:
        await Store.open(tmp_path)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == damaged


async def test_another_programs_database_is_left_alone(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as other:
        other.execute("CREATE TABLE songs (name)")
    before = (tmp_path / FILE_NAME).read_bytes()
    with pytest.raises(DatabaseDamaged, match="tables of another program"):
        await Store.open(tmp_path)
    assert (tmp_path / FILE_NAME).read_bytes() == before
    assert read_saved_settings(tmp_path) == {}


def test_reading_settings_of_a_damaged_file_names_it(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"my shopping list")
    with pytest.raises(DatabaseDamaged, match=FILE_NAME):
        read_saved_settings(tmp_path)


async def test_a_full_disk_loses_only_the_refused_call(store: Store, user: UserRecord, say: Any) -> None:
    session = await store.create_session(user.id)
    first = await say(session.id, None, "user", "kept")
    with store._threads.database.raw() as connection:
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count={pages}").fetchone()
    with pytest.raises(DiskFull, match="make room"):
        await say(session.id, first, "assistant", "x" * 1_000_000)
    assert await store.path(session.id) == [first]
    with store._threads.database.raw() as connection:
        connection.execute("PRAGMA max_page_count=1000000").fetchone()
    await say(session.id, first, "assistant", "x" * 1_000_000)
    assert len(await store.path(session.id)) == 2


async def test_nothing_is_stored_in_a_file_that_was_deleted_or_replaced(
    tmp_path: Path, store: Store, user: UserRecord
) -> None:
    path = store._threads.database.path
    kept = await store.create_session(user.id)
    path.rename(tmp_path / "away")
    with pytest.raises(DatabaseFailed, match="it was deleted or replaced; put it back, or start Keepwarm again"):
        await store.create_session(user.id)
    path.write_bytes((tmp_path / "away").read_bytes())
    with pytest.raises(DatabaseFailed, match="deleted or replaced"):
        await store.create_session(user.id)
    (tmp_path / "away").replace(path)
    after = await store.create_session(user.id)
    assert {session.id for session in await store.sessions(user.id)} == {kept.id, after.id}


async def test_errors_do_not_repeat_what_people_wrote(store: Store, user: UserRecord, say: Any) -> None:
    session = await store.create_session(user.id)
    with pytest.raises(Exception, match="refused") as caught:
        await say(session.id, None, "user", "my secret", status="lost")
    assert "my secret" not in f"{caught.value} {caught.value.__cause__}"


async def fill(store: Store, user: UserRecord) -> dict[str, str]:
    """Sessions by their canary, with growing texts of sizes that make SQLite move rows between pages."""
    dice = random.Random(0)
    canaries = {f"canary-{n:02}-": (await store.create_session(user.id, title=f"canary-{n:02}-")).id for n in range(30)}

    def grow(db: Any) -> None:
        sql = db.connection().exec_driver_sql
        for seq in range(1_500):
            canary, session_id = dice.choice(list(canaries.items()))
            message_id = f"{dice.getrandbits(128):032x}"
            sql(
                "INSERT INTO messages (id, session_id, seq, role, status, created_at, path_key, text)"
                " VALUES (?, ?, ?, 'user', 'complete', 0, 'key', '')",
                (message_id, session_id, seq),
            )
            for length in (1, dice.choice([20, 30, 40, 80, 100])):
                sql("UPDATE messages SET text = ? WHERE id = ?", (canary * length, message_id))

    store._threads.database.write(grow)
    return canaries


async def test_deleted_text_leaves_every_file(tmp_path: Path, store: Store, user: UserRecord) -> None:
    canaries = await fill(store, user)
    kept, _ = canaries.popitem()
    make_backup(store._threads.database.path, "0000")
    for canary, session_id in canaries.items():
        assert len(files_with(tmp_path, canary)) >= 2
        assert await store.delete_session(user.id, session_id) is True
        assert files_with(tmp_path, canary) == []
    assert files_with(tmp_path, kept) == ["keepwarm-0000.sqlite3", FILE_NAME]


async def test_a_deletion_cut_short_is_finished_at_the_next_start(
    tmp_path: Path, store: Store, user: UserRecord
) -> None:
    canaries = await fill(store, user)

    def delete_and_die(db: Any, session_id: str) -> None:
        delete_sessions(db, [session_id])
        mark_scrub_due(db)

    remains = ""
    while canaries and not remains:  # SQLite leaves copies behind only now and then
        canary, session_id = canaries.popitem()
        store._threads.database.write(lambda db, gone=session_id: delete_and_die(db, gone))  # type: ignore[misc]
        with store._threads.database.raw() as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        if files_with(tmp_path, canary):
            remains = canary
    assert remains, "secure_delete alone was enough here: this test shows nothing"
    make_backup(store._threads.database.path, "0000")
    store._threads.database.close()
    assert files_with(tmp_path, remains) == ["keepwarm-0000.sqlite3", FILE_NAME]
    again = await Store.open(tmp_path / "data")
    assert files_with(tmp_path, remains) == []
    assert {session.title for session in await again.sessions(user.id)} == set(canaries)
    await again.close()


async def test_a_backup_that_cannot_be_edited_goes(tmp_path: Path, store: Store, user: UserRecord) -> None:
    session = await store.create_session(user.id)
    backup = make_backup(store._threads.database.path, "0000")
    backup.write_bytes(b"rubbish")
    assert await store.delete_session(user.id, session.id)
    assert backups(store._threads.database.path) == []


async def test_a_reader_in_the_way_postpones_the_scrub(
    store: Store, user: UserRecord, caplog: pytest.LogCaptureFixture
) -> None:
    session = await store.create_session(user.id, title="canary")
    with store._threads.database.raw() as connection:
        connection.execute("PRAGMA busy_timeout=0").fetchone()
    with store._threads.database.reader.begin() as reader:
        assert reader.exec_driver_sql("SELECT count(*) FROM sessions").scalar() == 1
        assert await store.delete_session(user.id, session.id) is True
        assert "until the next try" in caplog.text
    assert files_with(store._threads.database.path.parent, "canary") != []
    await store.close()
    assert files_with(store._threads.database.path.parent, "canary") == []
    with closing(sqlite3.connect(store._threads.database.path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (0,)
