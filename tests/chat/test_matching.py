"""Which stored path a client's list of messages is taken to be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chat.matching import RecentPaths, longest_match
from chat.templates import Entry


@pytest.fixture
async def me(store):
    return (await store.implicit_admin()).id


async def stored(store, template, me, *messages, origin="api", tokenizer=None, status="complete"):
    """Store a path of (role, text); the ids of replies are those of their text."""
    session = await store.create_session(me, origin=origin)
    entries = [Entry(role, text) for role, text in messages]
    parent = None
    for entry, segment in zip(entries, template.fill(entries), strict=True):
        message = await store.add_message(
            session.id,
            parent_id=parent,
            role=entry.role,
            text=entry.text,
            token_ids=segment,
            tokenizer=tokenizer or template.rendering,
            status=status if entry.role == "assistant" else "complete",
        )
        parent = message.id
    return session.id


async def match(store, template, user, *messages, prefer=None):
    found = await longest_match(store, user, [Entry(*message) for message in messages], template, prefer)
    return found and (found.session.id, len(found.path))


ONE, REPLY, TWO, OTHER = ("user", "one"), ("assistant", "reply"), ("user", "two"), ("user", "other")


async def test_the_longest_stored_path_is_found(store, template, me):
    short = await stored(store, template, me, ONE, REPLY)
    long = await stored(store, template, me, ONE, REPLY, TWO, REPLY)
    assert await match(store, template, me, ONE, REPLY, OTHER) in ((short, 2), (long, 2))
    assert await match(store, template, me, ONE, REPLY, TWO, REPLY, OTHER) == (long, 4)
    assert await match(store, template, me, OTHER, REPLY, TWO) is None


async def test_white_space_around_texts_does_not_matter_and_inside_does(store, template, me):
    session = await stored(store, template, me, ONE, ("assistant", " a\n b \n"))
    assert await match(store, template, me, ("user", "one\n"), ("assistant", "a\n b"), TWO) == (session, 2)
    assert await match(store, template, me, ONE, ("assistant", "a b"), TWO) is None


async def test_a_change_anywhere_above_is_no_match(store, template, me):
    await stored(store, template, me, ("system", "A"), ONE, REPLY)
    assert await match(store, template, me, ("system", "B"), ONE, REPLY, TWO) is None
    assert await match(store, template, me, ONE, REPLY, TWO) is None
    assert await match(store, template, me, ("user", "A"), ONE, REPLY, TWO) is None


async def test_another_users_path_is_never_found(store, template, me):
    await stored(store, template, me, ONE, REPLY)
    assert await match(store, template, me, ONE, REPLY, TWO) is not None
    assert await match(store, template, "somebody else", ONE, REPLY, TWO) is None


async def test_ids_of_another_tokenizer_do_not_count(store, template, me):
    await stored(store, template, me, ONE, REPLY, tokenizer="another")
    assert await match(store, template, me, ONE, REPLY, TWO) is None


async def test_a_reply_that_still_grows_does_not_count(store, template, me):
    await stored(store, template, me, ONE, REPLY, status="streaming")
    assert await match(store, template, me, ONE, REPLY, TWO) is None


async def test_of_equal_paths_the_newest_counts_unless_one_is_preferred(store, template, me):
    first = await stored(store, template, me, ONE, REPLY)
    second = await stored(store, template, me, ONE, REPLY)
    assert await match(store, template, me, ONE, REPLY, TWO) == (second, 2)
    assert await match(store, template, me, ONE, REPLY, TWO, prefer=first) == (first, 2)
    assert await match(store, template, me, ONE, REPLY, TWO, prefer="no such session") == (second, 2)


async def test_api_chats_come_before_chats_of_the_page(store, template, me):
    page = await stored(store, template, me, ONE, REPLY, origin="chat")
    assert await match(store, template, me, ONE, REPLY, TWO) == (page, 2)
    api = await stored(store, template, me, ONE, REPLY)
    await stored(store, template, me, ONE, REPLY, origin="chat")
    assert await match(store, template, me, ONE, REPLY, TWO) == (api, 2)


async def test_a_question_is_found_only_if_its_ids_ask_for_a_reply(store, template, me):
    await stored(store, template, me, ONE, TWO, REPLY)
    assert await match(store, template, me, ONE) is None  # stored without a generation prompt
    assert (await match(store, template, me, ONE, TWO))[1] == 2


async def test_what_was_stored_last_is_found_without_storage(store, template, me):
    session = await store.session(me, await stored(store, template, me, ONE, REPLY))
    path = await store.path(session.id)
    now = 0.0
    recent = RecentPaths(lambda: now, most=2)
    recent.note(me, session, path[:1])
    recent.note(me, session, path)

    async def found(*messages, user=me, there=None):
        entries = [Entry(*message) for message in messages]
        match = await longest_match(there, user, entries, template, recent=recent)
        return match and (match.session, match.path)

    assert await found(ONE, REPLY, TWO) == (session, tuple(path))
    assert await found(ONE) == (session, tuple(path[:1]))
    assert await found(ONE, REPLY, TWO, REPLY, OTHER, there=store) == (session, tuple(path))  # more may be stored
    assert await found(ONE, REPLY, TWO, user="somebody else", there=store) is None
    now += 3601
    with pytest.raises(AttributeError):
        await found(ONE, REPLY, TWO)  # storage is asked, and there is none here
    recent.note(me, session, path)
    for key in "ab":
        recent.note(me, session, [replace(path[0], path_key=key)])
    with pytest.raises(AttributeError):
        await found(ONE, REPLY, TWO)  # others came since


async def test_what_was_stored_last_is_used_only_with_ids_of_this_vocabulary_and_if_none_is_preferred(
    store, template, me
):
    session = await store.session(me, await stored(store, template, me, ONE, REPLY, tokenizer="another"))
    recent = RecentPaths()
    recent.note(me, session, await store.path(session.id))
    messages = [Entry(*message) for message in (ONE, REPLY, TWO)]
    assert await longest_match(store, me, messages, template, recent=recent) is None
    first = await store.session(me, await stored(store, template, me, ONE, REPLY))
    second = await store.session(me, await stored(store, template, me, ONE, REPLY))
    recent.note(me, second, await store.path(second.id))
    assert (await longest_match(store, me, messages, template, first.id, recent=recent)).session.id == first.id


async def test_a_question_that_is_followed_by_another_one_is_no_path_to_go_on_with(store, template, me):
    session = await store.session(me, await stored(store, template, me, ONE))
    recent = RecentPaths()
    recent.note(me, session, await store.path(session.id))
    for messages in ((ONE, TWO), (ONE, TWO, REPLY)):
        entries = [Entry(*message) for message in messages]
        assert await longest_match(store, me, entries, template, recent=recent) is None
    assert await longest_match(store, me, [Entry(*ONE)], template, recent=recent) is not None
