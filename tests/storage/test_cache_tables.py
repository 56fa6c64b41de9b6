"""What the cache leaves in the database: events that are capped, deletions still owed, and sessions that are kept."""

from __future__ import annotations

import pytest

from storage import CacheEventRecord, KeptSession, Store, TraceRecord, UserRecord, cache_tables
from tests.storage.conftest import add_other_user


def event(session_id: str | None, number: int = 0, **more) -> CacheEventRecord:
    given = {
        "at": 1000.0 + number, "action": "demoted", "source": "device", "target": "host", "blocks": number,
        "bytes": 2**33, "age_s": 0.5, "reason": "device above 100%",
    }  # fmt: skip
    return CacheEventRecord(session_id=session_id, **(given | more))


async def test_events_come_back_as_they_were_the_newest_last(store: Store, user: UserRecord) -> None:
    chat = (await store.create_session(user.id)).id
    told = [event(chat, 1), event(None, 2, action="set_aside", source=None, target=None), event(chat, 3, source="disk")]
    await store.cache.add_events(told[:2])
    await store.cache.add_events(told[2:])
    assert await store.cache.events(10) == told
    assert await store.cache.events(2) == told[1:]


async def test_only_the_last_events_are_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_tables, "MOST_EVENTS", 10)
    for first in range(0, 40, 8):
        await store.cache.add_events([event(None, first + number) for number in range(8)])
    assert [each.blocks for each in await store.cache.events(100)] == list(range(30, 40))


async def test_a_deleted_session_takes_its_events_with_it_and_gets_no_new_ones(store: Store, user: UserRecord) -> None:
    one, other = [(await store.create_session(user.id)).id for _ in range(2)]
    await store.cache.add_events([event(one, 1), event(other, 2), event(None, 3)])
    await store.delete_session(user.id, one)
    await store.cache.add_events([event(one, 4), event(other, 5)])
    assert [each.blocks for each in await store.cache.events(10)] == [2, 3, 5]
    await store.cache.add_events([event(one, 6)])  # none of them is left: no statement without rows
    await store.cache.add_events([])


def turn(session_id: str, number: int = 0) -> TraceRecord:
    return TraceRecord(
        at=1000.5 + number, session_id=session_id, model="f" * 32, blocks=b"\0\xff" * 8, device_tokens=number,
        host_tokens=2, disk_tokens=3, computed_tokens=4, output_tokens=5,
    )  # fmt: skip


async def test_a_trace_comes_back_as_it_was_and_only_the_last_turns_are_kept(
    store: Store, user: UserRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = (await store.create_session(user.id)).id
    turns = [turn(chat, number) for number in range(15)]
    await store.cache.add_turns(turns[:5])
    assert await store.cache.trace(3) == turns[2:5]
    monkeypatch.setattr(cache_tables, "MOST_TURNS", 10)
    await store.cache.add_turns(turns[5:])
    assert await store.cache.trace(100) == turns[5:]


async def test_a_deleted_session_takes_its_turns_with_it_and_gets_no_new_ones(store: Store, user: UserRecord) -> None:
    one, other = [(await store.create_session(user.id)).id for _ in range(2)]
    await store.cache.add_turns([turn(one, 1), turn(other, 2)])
    await store.delete_session(user.id, one)
    await store.cache.add_turns([turn(one, 3), turn(other, 4), turn("none", 5)])
    assert await store.cache.trace(10) == [turn(other, 2), turn(other, 4)]


async def test_what_is_deleted_is_owed_to_the_engine_until_it_has_forgotten_it(store: Store, user: UserRecord) -> None:
    chats = [(await store.create_session(user.id)).id for _ in range(3)]
    late = await store.create_session(user.id, expires_at=1.0)
    await store.delete_session(user.id, chats[0])
    await store.delete_session("somebody else", chats[1])
    await store.delete_expired(2.0)
    assert sorted(await store.cache.pending_drops()) == sorted([chats[0], late.id])
    await store.cache.dropped([late.id, "unknown"])
    assert await store.cache.pending_drops() == [chats[0]]


async def test_the_sessions_that_are_kept_are_told(store: Store, user: UserRecord) -> None:
    plain, pinned, brief = [(await store.create_session(user.id)).id for _ in range(3)]
    assert await store.cache.kept_sessions() == []
    changed = await store.update_session(user.id, pinned, pinned=True, touch=False)
    assert changed is not None
    assert (changed.pinned, changed.ttl_s) == (True, None)
    await store.update_session(user.id, brief, ttl_s=90.5, touch=False)
    assert await store.update_session(add_other_user(store), brief, pinned=True) is None
    kept = [KeptSession(id=pinned, pinned=True, ttl_s=None), KeptSession(id=brief, pinned=False, ttl_s=90.5)]
    assert await store.cache.kept_sessions() == sorted(kept, key=lambda each: each.id)
    listed = {each.id: (each.pinned, each.ttl_s) for each in await store.sessions(user.id)}
    assert listed == {plain: (False, None), pinned: (True, None), brief: (False, 90.5)}
    await store.update_session(user.id, pinned, pinned=False)
    await store.update_session(user.id, brief, ttl_s=None)
    assert await store.cache.kept_sessions() == []
