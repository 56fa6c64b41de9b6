"""Every database that was ever released still opens, and still holds what it held."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from storage import Store
from storage.database import FILE_NAME
from storage.keys import path_keys
from storage.migrate import check
from tests.data import make_database
from tests.storage.test_migrations import HEAD

DATABASES = sorted(make_database.HERE.glob("*.sqlite3"))


@pytest.fixture(params=DATABASES, ids=lambda path: path.stem)
def committed(request: pytest.FixtureRequest) -> Path:
    return request.param  # type: ignore[no-any-return]


async def opened(committed: Path, data_dir: Path) -> Store:
    shutil.copyfile(committed, data_dir / FILE_NAME)
    return await Store.open(data_dir)


def assert_holds(now: Any, then: Any, where: str = "") -> None:
    """`now` says all that `then` said; later versions may say more."""
    if isinstance(then, dict):
        for key, value in then.items():
            assert_holds(now[key], value, f"{where}/{key}")
    elif isinstance(then, list):
        assert len(now) == len(then), where
        for number, value in enumerate(then):
            assert_holds(now[number], value, f"{where}/{number}")
    else:
        assert now == then, where


def test_the_newest_revision_has_one() -> None:
    assert HEAD in {path.stem for path in DATABASES}


def test_the_file_is_of_the_revision_that_it_is_named_for(committed: Path, tmp_path: Path) -> None:
    shutil.copyfile(committed, tmp_path / "copy")
    assert check(tmp_path / "copy") == committed.stem


async def test_it_still_holds_its_contents(committed: Path, tmp_path: Path) -> None:
    store = await opened(committed, tmp_path)
    then = json.loads(committed.with_suffix(".json").read_text(encoding="utf-8"))
    assert_holds(await make_database.describe(store), then)
    await store.close()
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    assert check(tmp_path / FILE_NAME) == HEAD


async def test_what_people_see(committed: Path, tmp_path: Path) -> None:
    """The same contents, told once more by hand."""
    store = await opened(committed, tmp_path)
    user = await store.implicit_admin()
    untitled, short, trip = await store.sessions(user.id)
    assert [untitled.title, short.title, trip.title] == ["", "SQL question", "里昂之行 🚄"]
    assert [message.text for message in await store.path(trip.id)] == ["去里昂怎么走？", "坐高铁，两小时。"]
    roots = await store.children(None, trip.id)
    assert [root.text for root in roots] == ["去里昂怎么走？", make_database.GRID]
    (family,) = await store.children(roots[1].id, trip.id)
    assert family.text == make_database.FAMILY
    assert (await store.path(trip.id, family.id))[-1].token_ids == make_database.ids(make_database.FAMILY)
    assert [message.status for message in await store.path(short.id)] == [
        "complete",
        "stopped",
        "complete",
        "interrupted",
    ]
    assert len(await store.turns(trip.id)) == 2
    keys = path_keys([("system", "You are terse.\n"), ("user", "Ping\x00pong?"), ("assistant", " Pong.")])
    (pong,) = await store.find_paths(user.id, keys[-1])
    assert (pong.text, pong.finish_reason) == ("Pong.", "stop")
    assert await store.saved_settings() == {"device_kv": "256MiB", "theme": "dark 🌙"}
    await store.close()


async def test_it_can_be_written_to_and_deleted_from(committed: Path, tmp_path: Path) -> None:
    store = await opened(committed, tmp_path)
    user = await store.implicit_admin()
    for session in [*await store.sessions(user.id), *await store.sessions(user.id, origin="api")]:
        added = await store.add_message(
            session.id, parent_id=session.leaf_id, role="user", text="more", token_ids=[1], tokenizer="smollm2"
        )
        assert (await store.path(session.id))[-1] == added
        assert await store.delete_session(user.id, session.id)
    assert await store.sessions(user.id) == []
    await store.close()
    assert "里昂".encode() not in (tmp_path / FILE_NAME).read_bytes()
