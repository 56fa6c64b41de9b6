"""Users, sessions and settings: what a call stores, who sees it, and what a list costs."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from storage import InvalidText, InvalidValue, Store, StoreClosed, UnknownMessage, UserRecord, read_saved_settings
from tests.storage.conftest import Clock, add_other_user, recorded_sql


async def test_the_implicit_admin_is_made_once_and_keeps_its_salt(tmp_path: Path, store: Store) -> None:
    admin = await store.implicit_admin()
    assert (admin.name, admin.role, len(admin.salt)) == ("local", "admin", 16)
    assert await store.implicit_admin() == admin
    other = await Store.open(tmp_path / "elsewhere")
    assert (await other.implicit_admin()).salt != admin.salt
    await other.close()


async def test_the_salt_is_not_in_a_printed_record(user: UserRecord) -> None:
    assert str(user.salt) not in repr(user)


async def test_everything_survives_a_restart(tmp_path: Path, store: Store, user: UserRecord, say: Any) -> None:
    session = await store.create_session(user.id, title="Été 🌞", system_prompt=" be\n\tbrief ")
    await say(session.id, None, "user", "你好")
    stored, path = await store.session(user.id, session.id), await store.path(session.id)
    assert stored is not None
    assert (stored.title, stored.system_prompt, stored.leaf_id) == ("Été 🌞", " be\n\tbrief ", path[0].id)
    await store.close()
    again = await Store.open(tmp_path / "data")
    assert await again.implicit_admin() == user
    assert await again.session(user.id, session.id) == stored
    assert await again.path(session.id) == path
    await again.close()


async def test_records_are_frozen(store: Store, user: UserRecord) -> None:
    session = await store.create_session(user.id)
    with pytest.raises(FrozenInstanceError):
        session.title = "x"  # type: ignore[misc]


async def test_sessions_come_newest_first_page_by_page(store: Store, user: UserRecord, clock: Clock) -> None:
    names = {}
    for name, now in (("a", 1.0), ("b", 2.0), ("c", 3.0), ("d", 3.0), ("e", 4.0)):
        clock.now = now
        names[(await store.create_session(user.id, title=name)).id] = name
    tied = sorted("cd", key={name: key for key, name in names.items()}.__getitem__, reverse=True)

    page = await store.sessions(user.id, limit=2)
    assert [each.title for each in page] == ["e", tied[0]]
    page = await store.sessions(user.id, limit=2, before=page[-1])
    assert [each.title for each in page] == [tied[1], "b"]
    assert [each.title for each in await store.sessions(user.id, before=2.0)] == ["a"]


async def test_updates_touch_unless_told_not_to(store: Store, user: UserRecord, clock: Clock) -> None:
    first, second = await store.create_session(user.id, title="1"), await store.create_session(user.id, title="2")
    clock.now += 1
    renamed = await store.update_session(user.id, first.id, title="one", expires_at=9.0, touch=False)
    assert renamed is not None
    assert (renamed.title, renamed.expires_at, renamed.updated_at) == ("one", 9.0, 1_000.0)
    await store.update_session(user.id, second.id)
    assert [each.title for each in await store.sessions(user.id)] == ["2", "one"]
    cleared = await store.update_session(user.id, first.id, expires_at=None)
    assert cleared is not None
    assert (cleared.title, cleared.expires_at, cleared.updated_at) == ("one", None, 1_001.0)


async def test_a_leaf_must_be_a_message_of_the_session(store: Store, user: UserRecord, say: Any) -> None:
    mine, other = await store.create_session(user.id), await store.create_session(user.id)
    first = await say(mine.id, None, "user", "a")
    await say(mine.id, first, "assistant", "b")
    foreign = await say(other.id, None, "user", "c")
    for leaf_id in (foreign.id, "nonsense"):
        with pytest.raises(UnknownMessage, match=leaf_id):
            await store.update_session(user.id, mine.id, leaf_id=leaf_id, title="changed")
    moved = await store.update_session(user.id, mine.id, leaf_id=first.id)
    assert moved is not None
    assert (moved.leaf_id, moved.title) == (first.id, "")
    assert [each.text for each in await store.path(mine.id)] == ["a"]


async def test_other_users_see_and_touch_nothing(store: Store, user: UserRecord, say: Any) -> None:
    other = add_other_user(store)
    session = await store.create_session(user.id, title="mine")
    message = await say(session.id, None, "user", "secret")
    assert await store.session(other, session.id) is None
    assert await store.sessions(other) == []
    assert await store.find_paths(other, message.path_key) == []
    assert await store.update_session(other, session.id, title="stolen") is None
    assert await store.delete_session(other, session.id) is False
    kept = await store.session(user.id, session.id)
    assert kept is not None
    assert kept.title == "mine"


async def test_api_chats_are_listed_apart_and_expire(store: Store, user: UserRecord, say: Any) -> None:
    await store.create_session(user.id, title="chat")
    late = await store.create_session(user.id, title="late", origin="api", expires_at=20.0)
    soon = await store.create_session(user.id, title="soon", origin="api", expires_at=10.0)
    message = await say(soon.id, None, "user", "hello")
    assert [each.title for each in await store.sessions(user.id)] == ["chat"]
    assert {each.title for each in await store.sessions(user.id, origin="api")} == {"late", "soon"}
    assert await store.delete_expired(9.9) == []
    assert await store.delete_expired(10.0) == [soon.id]
    assert await store.find_paths(user.id, message.path_key) == []
    assert await store.delete_expired(1e9) == [late.id]
    assert [each.title for each in await store.sessions(user.id)] == ["chat"]


async def test_a_list_of_5000_chats_reads_no_body(store: Store, user: UserRecord) -> None:
    body = "a long body " * 50
    rows = [(f"s{i:04}", user.id, float(i), f"chat {i}", body) for i in range(5_000)]
    messages = [(f"m{i:04}", f"s{i:04}", "k", body) for i in range(5_000)]

    def fill(db: Any) -> None:
        sql = db.connection().exec_driver_sql
        sql(
            "INSERT INTO sessions (id, user_id, origin, created_at, updated_at, title, system_prompt)"
            " VALUES (?, ?, 'chat', 0, ?, ?, ?)",
            rows,
        )
        sql(
            "INSERT INTO messages (id, session_id, seq, role, status, created_at, path_key, text)"
            " VALUES (?, ?, 1, 'user', 'complete', 0, ?, ?)",
            messages,
        )

    store._threads.database.write(fill)
    with recorded_sql(store._threads.database.reader) as seen:
        listed = await store.sessions(user.id)
    assert [each.title for each in listed[:2]] == ["chat 4999", "chat 4998"]
    assert len(listed) == 200

    (begin, _), (statement, parameters) = seen
    assert begin == "BEGIN"
    for word in ("messages", "message_tokens", "turns", "system_prompt"):
        assert word not in statement
    plan = store._threads.database.read(
        lambda db: db.connection().exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all()
    )
    assert [row.detail for row in plan] == ["SEARCH sessions USING INDEX ix_sessions_list (user_id=? AND origin=?)"]


async def test_a_lone_surrogate_is_refused_by_name_and_changes_nothing(store: Store, user: UserRecord) -> None:
    session = await store.create_session(user.id, title="kept")
    for change in ({"title": "ab\ud83d"}, {"system_prompt": "ab\ud83d"}):
        with pytest.raises(InvalidText, match=r"lone surrogate U\+D83D at character 2"):
            await store.update_session(user.id, session.id, **change)  # type: ignore[arg-type]
    with pytest.raises(InvalidText):
        await store.save_setting("theme", "\udc00")
    with pytest.raises(InvalidText):
        await store.create_session(user.id, title="\udfff")
    assert await store.session(user.id, session.id) == session
    assert await store.saved_settings() == {}


async def test_settings_are_saved_replaced_and_forgotten(tmp_path: Path, store: Store) -> None:
    data_dir = tmp_path / "data"
    assert read_saved_settings(tmp_path / "nowhere") == {}
    assert not (tmp_path / "nowhere").exists()
    assert read_saved_settings(data_dir) == {}
    await store.save_setting("device_kv", "256MiB")
    await store.save_setting("device_kv", "512MiB")
    await store.save_setting("theme", "dark \x00 🌙")
    expected = {"device_kv": "512MiB", "theme": "dark \x00 🌙"}
    assert await store.saved_settings() == read_saved_settings(data_dir) == expected
    assert await store.forget_setting("device_kv") is True
    assert await store.forget_setting("device_kv") is False
    await store.close()
    assert read_saved_settings(data_dir) == {"theme": "dark \x00 🌙"}


async def test_a_closed_store_says_so(store: Store, user: UserRecord) -> None:
    await store.close()
    await store.close()
    with pytest.raises(StoreClosed, match="closed"):
        await store.sessions(user.id)
    with pytest.raises(StoreClosed):
        await store.save_setting("a", "b")


async def test_an_unknown_user_cannot_own_a_session(store: Store) -> None:
    with pytest.raises(InvalidValue, match="FOREIGN KEY"):
        await store.create_session("nobody")
