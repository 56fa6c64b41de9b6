"""Path keys: a stateless client's list finds the stored path it continues, and nothing else."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from storage import Store, UserRecord
from storage.keys import ROOT, path_key, path_keys
from tests.storage.conftest import Clock, recorded_sql

pairs = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text(max_size=5)), max_size=4)


@given(pairs, pairs)
def test_keys_are_equal_exactly_for_equal_lists(one: list[tuple[str, str]], two: list[tuple[str, str]]) -> None:
    def stripped(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
        return [(role, text.strip()) for role, text in pairs]

    if one and two:
        assert (path_keys(one)[-1] == path_keys(two)[-1]) == (stripped(one) == stripped(two))


def test_the_key_is_fixed() -> None:
    """Stored keys must mean the same in every later version; a change here needs a migration."""
    assert path_key(ROOT, "user", " hi\n") == "4c56a58b78a4a283f12c3f2f92d9453a"


def test_any_string_has_a_key() -> None:
    assert len(path_key(ROOT, "user", "\ud800\x00")) == 32


async def test_a_clients_list_finds_its_path(store: Store, user: UserRecord, clock: Clock, say: Any) -> None:
    old = await store.create_session(user.id, origin="api")
    system = await say(old.id, None, "system", "Be brief.")
    question = await say(old.id, system, "user", "  What is 2+2?\n")
    await say(old.id, question, "assistant", "4")
    clock.now += 1
    new = await store.create_session(user.id)
    other_system = await say(new.id, None, "system", "Be brief.\n")
    again = await say(new.id, other_system, "user", "What is 2+2?")
    await say(new.id, again, "assistant", "Four.")

    keys = path_keys([("system", "Be brief."), ("user", "What is 2+2?"), ("assistant", "4\n"), ("user", "And 3+3?")])
    found = [await store.find_paths(user.id, key) for key in keys]
    assert [[message.text for message in each] for each in found] == [
        ["Be brief.\n", "Be brief."],
        ["What is 2+2?", "  What is 2+2?\n"],
        ["4"],
        [],
    ]
    assert [message.session_id for message in await store.find_paths(user.id, keys[1], limit=1)] == [new.id]
    without_system = path_keys([("user", "What is 2+2?")])
    assert await store.find_paths(user.id, without_system[0]) == []


async def test_keys_follow_growing_and_edited_texts(store: Store, user: UserRecord, say: Any) -> None:
    session = await store.create_session(user.id)
    question = await say(session.id, None, "user", "a")
    reply = await say(session.id, question, "assistant", "", status="streaming")
    await store.update_message(reply.id, text="b")
    more = await say(session.id, reply, "user", "c")
    last = await say(session.id, more, "assistant", "d")

    async def ends(*texts: str) -> list[str]:
        roles = ["user", "assistant"] * 2
        return [each.id for each in await store.find_paths(user.id, path_keys(zip(roles, texts, strict=False))[-1])]

    assert await ends("a", "b") == [reply.id]
    assert await ends("a", "b", "c", "d") == [last.id]
    await store.update_message(question.id, text="A")
    assert await ends("a", "b", "c", "d") == []
    assert await ends("A", "b", "c", "d") == [last.id]
    assert await ends("A", "b", "c") == [more.id]
    await store.update_message(question.id, status="complete")
    assert await ends("A") == [question.id]


async def test_a_system_prompt_beside_the_messages_counts_as_the_first(
    store: Store, user: UserRecord, say: Any
) -> None:
    beside = await store.create_session(user.id, system_prompt="Be brief.")
    one = await say(beside.id, None, "user", "hi")
    reply = await say(beside.id, one, "assistant", "hello")
    both = await store.create_session(user.id, system_prompt="Be brief.")
    system = await say(both.id, None, "system", "Be brief.")
    two = await say(both.id, system, "user", "hi")

    async def found(*pairs: tuple[str, str]) -> set[str]:
        return {each.id for each in await store.find_paths(user.id, path_keys(pairs)[-1])}

    assert await found(("system", "Be brief."), ("user", "hi")) == {one.id, two.id}
    assert await found(("user", "hi")) == set()
    await store.update_session(user.id, beside.id, system_prompt="")
    assert await found(("user", "hi")) == {one.id}
    assert await found(("user", "hi"), ("assistant", "hello")) == {reply.id}
    assert await found(("system", "Be brief."), ("user", "hi")) == {two.id}


async def test_matching_is_by_index(store: Store, user: UserRecord, say: Any) -> None:
    session = await store.create_session(user.id)
    message = await say(session.id, None, "user", "x")
    with recorded_sql(store._threads.database.reader) as seen:
        await store.find_paths(user.id, message.path_key)
        await store.path(session.id)
        await store.children(message.id, session.id)
        await store.turns(session.id)
    for statement, parameters in seen:
        if statement != "BEGIN":
            rows = store._threads.database.read(
                lambda db, s=statement, p=parameters: (  # type: ignore[misc]
                    db.connection().exec_driver_sql(f"EXPLAIN QUERY PLAN {s}", p).all()
                )
            )
            scans = [row.detail for row in rows if row.detail.startswith("SCAN") and row.detail != "SCAN climb"]
            assert scans == []
