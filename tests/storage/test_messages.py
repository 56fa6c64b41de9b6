"""Messages: the tree, growing replies, exact token ids, turns, and what happens to impossible values."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage import InvalidText, InvalidValue, Store, TurnRecord, UnknownMessage, UnknownSession, UserRecord
from storage.tokens import pack_ids, unpack_ids
from tests.storage.conftest import Clock, recorded_sql


def turn_of(message_id: str, **more: Any) -> TurnRecord:
    figures: dict[str, Any] = {
        "prompt_tokens": 50,
        "device_tokens": 40,
        "computed_tokens": 10,
        "recomputed_tokens": 3,
        "output_tokens": 7,
        "ttft_s": 0.25,
        "tpot_s": 0.125,
        "total_s": 1.0,
        "finish_reason": "stop",
    }
    return TurnRecord(message_id=message_id, **(figures | more))


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_ids_round_trip(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == tuple(ids)


def test_ids_are_little_endian_four_bytes_each() -> None:
    assert pack_ids([1, 0x01020304]) == bytes.fromhex("01000000 04030201")


@pytest.mark.parametrize("wrong", [-1, 2**32, 1.5])
def test_an_impossible_id_is_named(wrong: Any) -> None:
    with pytest.raises(InvalidValue, match=f"token id {wrong}"):
        pack_ids([5, wrong])


async def test_adding_moves_the_leaf_and_touches(store: Store, user: UserRecord, clock: Clock, say: Any) -> None:
    session = await store.create_session(user.id)
    clock.now = 2_000.0
    question = await say(session.id, None, "user", "Why?", token_ids=[3, 2**32 - 1])
    assert (question.status, question.created_at, question.token_ids) == ("complete", 2_000.0, (3, 2**32 - 1))
    reply = await say(session.id, question, "assistant", "", status="streaming", token_ids=())
    now = await store.session(user.id, session.id)
    assert now is not None
    assert (now.leaf_id, now.updated_at) == (reply.id, 2_000.0)
    assert await store.path(session.id) == [question, reply]


EXACT = [
    "",
    " \n\t ",
    "  two  spaces\n\n",
    "a\x00b\x00",
    "\x00",
    "你好，世界",
    "👩\u200d👧 e\u0301",
    "\r\n",
    "\ufeffx",
    "\uffff",
]


@pytest.mark.parametrize("text", EXACT)
async def test_text_comes_back_exactly(store: Store, user: UserRecord, say: Any, text: str) -> None:
    session = await store.create_session(user.id, title=text, system_prompt=text)
    message = await say(session.id, None, "user", text)
    await store.update_message(message.id, text=text, error=text)
    (read,) = await store.path(session.id)
    found = await store.session(user.id, session.id)
    assert found is not None
    assert [read.text, read.error, found.title, found.system_prompt] == [text] * 4


async def test_branches(store: Store, user: UserRecord, clock: Clock, say: Any) -> None:
    session = await store.create_session(user.id)
    root = await say(session.id, None, "user", "root")
    clock.now -= 500  # a clock that jumps back does not reorder
    left = await say(session.id, root, "assistant", "left")
    clock.now -= 500
    right = await say(session.id, root, "assistant", "right")
    deep = await say(session.id, left, "user", "deep")
    second_root = await say(session.id, None, "user", "root, edited")

    def texts(records: list[Any]) -> list[str]:
        return [record.text for record in records]

    assert texts(await store.children(root.id, session.id)) == ["left", "right"]
    assert texts(await store.children(None, session.id)) == ["root", "root, edited"]
    assert texts(await store.children(deep.id, session.id)) == []
    assert texts(await store.path(session.id)) == ["root, edited"]
    assert texts(await store.path(session.id, deep.id)) == ["root", "left", "deep"]
    assert texts(await store.path(session.id, right.id)) == ["root", "right"]
    assert (await store.path(session.id, second_root.id))[0].token_ids == tuple(map(ord, "root, edited"))


async def test_an_empty_session_has_an_empty_path(store: Store, user: UserRecord) -> None:
    session = await store.create_session(user.id)
    assert await store.path(session.id) == []
    assert await store.children(None, session.id) == []
    assert await store.turns(session.id) == {}
    assert await store.path("nonsense") == []


async def test_messages_stay_within_their_session(store: Store, user: UserRecord, say: Any) -> None:
    one, two = await store.create_session(user.id), await store.create_session(user.id)
    message = await say(one.id, None, "user", "x")
    with pytest.raises(UnknownMessage, match=message.id):
        await say(two.id, message, "assistant", "y")
    with pytest.raises(UnknownMessage, match=message.id):
        await store.path(two.id, message.id)
    assert await store.children(message.id, two.id) == []
    with pytest.raises(UnknownSession, match="nowhere"):
        await say("nowhere", None, "user", "z")
    assert await store.path(two.id) == []


async def test_what_no_column_allows_is_refused_whole(store: Store, user: UserRecord, say: Any) -> None:
    session = await store.create_session(user.id)
    for more in ({"role": "robot"}, {"status": "lost"}, {"token_ids": [-1]}):
        values: dict[str, Any] = {"role": "user"} | more
        with pytest.raises(InvalidValue):
            await say(session.id, None, values.pop("role"), "x", **values)
    with pytest.raises(InvalidText, match=r"U\+D800 at character 1"):
        await say(session.id, None, "user", "x\ud800", token_ids=())
    assert await store.session(user.id, session.id) == session
    assert await store.path(session.id) == []


async def test_a_refused_update_keeps_the_old_reply(store: Store, user: UserRecord, say: Any) -> None:
    session = await store.create_session(user.id)
    message = await say(session.id, None, "assistant", "old")
    for change in ({"text": "n\udc00"}, {"status": "lost"}, {"token_ids": [2**32]}):
        with pytest.raises((InvalidText, InvalidValue)):
            await store.update_message(message.id, **({"text": "new"} | change))
    assert await store.path(session.id) == [message]


async def test_a_growing_reply(store: Store, user: UserRecord, say: Any) -> None:
    session = await store.create_session(user.id)
    question = await say(session.id, None, "user", "count")
    reply = await say(session.id, question, "assistant", "", status="streaming", token_ids=())
    for text, ids in (("one", [1]), ("one two", [1, 2])):
        with recorded_sql(store._threads.database.writer) as seen:
            assert await store.update_message(reply.id, text=text, token_ids=ids) is True
        writes = [statement for statement, _ in seen if statement.startswith(("UPDATE", "INSERT", "DELETE"))]
        assert [statement.split()[1] for statement in writes] == ["messages", "message_tokens"]
        read = (await store.path(session.id))[-1]
        assert (read.text, read.token_ids, read.status) == (text, tuple(ids), "streaming")
    await store.update_message(reply.id, status="complete", finish_reason="length")
    read = (await store.path(session.id))[-1]
    assert (read.text, read.status, read.finish_reason, read.error) == ("one two", "complete", "length", None)
    await store.update_message(reply.id, finish_reason=None, error="engine died", status="failed")
    read = (await store.path(session.id))[-1]
    assert (read.finish_reason, read.error, read.tokenizer) == (None, "engine died", "test")
    await store.update_message(reply.id, token_ids=[9], tokenizer="other")
    read = (await store.path(session.id))[-1]
    assert (read.token_ids, read.tokenizer, read.text) == ((9,), "other", "one two")


async def test_updating_what_is_gone_is_false(store: Store, user: UserRecord, say: Any) -> None:
    session = await store.create_session(user.id)
    message = await say(session.id, None, "user", "x")
    await store.delete_session(user.id, session.id)
    assert await store.update_message(message.id, text="y", token_ids=[1]) is False


async def test_a_dead_servers_replies_are_interrupted(store: Store, user: UserRecord, say: Any) -> None:
    session = await store.create_session(user.id)
    done = await say(session.id, None, "user", "q")
    half = await say(session.id, done, "assistant", "half a rep", status="streaming")
    await say(session.id, done, "assistant", "", status="stopped")
    with recorded_sql(store._threads.database.writer) as seen:
        assert await store.interrupt_streaming() == 1
    query = next(statement for statement, _ in seen if statement.startswith("SELECT"))
    plan = store._threads.database.read(lambda db: db.connection().exec_driver_sql(f"EXPLAIN QUERY PLAN {query}").all())
    assert "ix_messages_streaming" in plan[0].detail
    assert await store.interrupt_streaming() == 0
    (_, read) = await store.path(session.id, half.id)
    assert (read.status, read.text) == ("interrupted", "half a rep")
    assert {each.status for each in await store.children(done.id, session.id)} == {"interrupted", "stopped"}


async def test_turns(store: Store, user: UserRecord, clock: Clock, say: Any) -> None:
    session, other = await store.create_session(user.id), await store.create_session(user.id)
    message = await say(session.id, None, "assistant", "a")
    elsewhere = await say(other.id, None, "assistant", "b")
    await store.add_turn(turn_of(message.id, created_at=1.0))
    newest = await store.add_turn(turn_of(message.id, ttft_s=None, tpot_s=None, output_tokens=0))
    await store.add_turn(turn_of(elsewhere.id))
    assert newest.created_at == clock.now
    assert await store.turns(session.id) == {message.id: newest}
    with pytest.raises(UnknownMessage, match="nothing"):
        await store.add_turn(turn_of("nothing"))
    with pytest.raises(InvalidValue, match="tokens"):
        await store.add_turn(turn_of(message.id, computed_tokens=-1))


async def test_a_very_long_chat_is_read_and_deleted_whole(store: Store, user: UserRecord) -> None:
    """SQLite stops cascades at 1,000 nested triggers, and Python recursion at about as many calls."""
    session = await store.create_session(user.id)
    rows = [(f"m{i:04}", session.id, f"m{i - 1:04}" if i else None, i + 1, f"k{i}", f"text {i}") for i in range(3_000)]
    store._threads.database.write(
        lambda db: db.connection().exec_driver_sql(
            "INSERT INTO messages (id, session_id, parent_id, seq, role, status, created_at, path_key, text)"
            " VALUES (?, ?, ?, ?, 'user', 'complete', 0, ?, ?)",
            rows,
        )
    )
    path = await store.path(session.id, "m2999")
    assert [message.text for message in path] == [f"text {i}" for i in range(3_000)]
    assert await store.delete_session(user.id, session.id) is True
    assert await store.children(None, session.id) == []
    left = store._threads.database.read(
        lambda db: db.connection().exec_driver_sql("SELECT count(*) FROM messages").scalar()
    )
    assert left == 0
