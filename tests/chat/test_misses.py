"""Why a turn had to read what it read, as the ledger knows it: on a real database, with an engine that keeps books."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from chat.misses import Misses
from chat.model import Composed
from chat.templates import Entry
from chat.views import MissView
from engine.protocol import Miss
from storage.errors import DatabaseFailed
from tests.chat.fake_engine import END
from tests.chat.test_service import ask, detail, new_chat


async def last(service, chat: str) -> MissView | None:
    """The miss of the last reply, as it is stored."""
    shown = (await detail(service, chat)).messages[-1]
    assert shown.figures is not None
    return shown.figures.miss


async def test_a_new_message_is_new_text_in_that_very_message(service, engine):
    chat = await new_chat(service, "Be brief.")
    done = await ask(service, chat, "one")
    assert done.figures.miss == MissView(0, 0, "system", "new")
    done = await ask(service, chat, "two")
    assert done.figures.miss == await last(service, chat)
    miss = done.figures.miss
    assert (miss.message_index, miss.role, miss.cause, miss.detail) == (3, "user", "new", "")
    assert miss.position == done.figures.reused_tokens


async def test_where_nothing_is_missed_nothing_is_said(service, engine):
    chat = await new_chat(service)
    await ask(service, chat, "one")
    turn = await service.retry(service.user.id, chat)
    assert (await turn.finished()).figures.miss is None
    assert await last(service, chat) is None


async def test_tokens_and_times_by_tier_are_counted_kept_and_told(service, store, engine):
    chat = await new_chat(service)
    await ask(service, chat, "one")
    engine.cold = (5, 7)
    figures = (await ask(service, chat, "two")).figures
    assert (figures.host_tokens, figures.disk_tokens, figures.restore_s) == (5, 7, 0.25)
    assert figures.device_tokens == figures.reused_tokens - 12
    assert figures.reused_tokens + figures.computed_tokens == figures.prompt_tokens
    assert (await detail(service, chat)).messages[-1].figures == figures
    reply = service.recent.all()[-1]
    assert (reply.host_tokens, reply.disk_tokens, reply.restore_s) == (5, 7, 0.25)


async def test_the_engines_own_reasons_are_kept_with_their_message(service, engine, template):
    chat = await new_chat(service)
    await ask(service, chat, "one")
    for cause in ("evicted", "unreadable", "slower"):
        engine.miss = Miss(position=3, cause=cause, detail="disk: 30 days unused")
        assert (await ask(service, chat, "two")).figures.miss == MissView(3, 0, "user", cause, "disk: 30 days unused")


async def test_an_edited_message_is_told_from_one_that_is_new(service, store, engine):
    chat = await new_chat(service)
    await ask(service, chat, "one")
    (_, reply) = await store.path(chat)
    await ask(service, chat, "two")
    await store.update_session(service.user.id, chat, leaf_id=reply.id)
    miss = (await ask(service, chat, "three")).figures.miss
    assert (miss.message_index, miss.role, miss.cause) == (2, "user", "edited")
    await ask(service, chat, "more")
    await store.update_session(service.user.id, chat, leaf_id=None)
    miss = (await ask(service, chat, "uno")).figures.miss
    assert (miss.message_index, miss.role, miss.cause) == (0, "user", "edited")


async def test_going_on_from_another_reply_is_told(service, store, engine, replies, template):
    chat = await new_chat(service)
    await ask(service, chat, "one")
    first = (await store.path(chat))[-1]
    replies["one"] = [*template.encode_text("Quite otherwise."), END]
    await (await service.retry(service.user.id, chat)).finished()
    await ask(service, chat, "two")
    engine._known = [known for known in engine._known if first.token_ids[0] not in known[2]]  # the first reply is gone
    await store.update_session(service.user.id, chat, leaf_id=first.id)
    miss = (await ask(service, chat, "three")).figures.miss
    assert (miss.message_index, miss.role, miss.cause) == (1, "assistant", "edited")
    assert miss.detail == "it goes on from another reply"


async def test_another_models_reply_is_a_reason(service, store, engine):
    chat = await new_chat(service)
    await ask(service, chat, "one")
    engine.capabilities = replace_fingerprint(engine, "e" * 16)
    miss = (await ask(service, chat, "two")).figures.miss
    assert (miss.position, miss.message_index, miss.cause) == (0, 0, "other_model")
    miss = (await ask(service, chat, "three")).figures.miss
    assert (miss.message_index, miss.cause) == (4, "new")


def replace_fingerprint(engine, fingerprint: str):
    """The same model with other weights."""
    import msgspec

    from engine.state import EngineState

    changed = msgspec.structs.replace(engine.capabilities, fingerprint=fingerprint)
    engine.served = {fingerprint}
    engine.set_state(EngineState("ready", capabilities=changed))
    return changed


async def test_what_was_read_and_is_in_no_tier_is_gone_and_not_new(service, engine):
    chat = await new_chat(service)
    await ask(service, chat, "one")
    engine._known.clear()  # as after a restart without a disk tier
    miss = (await ask(service, chat, "two")).figures.miss
    assert miss == MissView(0, 0, "user", "evicted", "read before, and in no tier any more")


async def test_what_was_read_before_the_engine_was_started_anew_did_not_make_room(service, engine):
    chat = await new_chat(service)
    await ask(service, chat, "one")
    engine._known.clear()
    engine.started_at = time.time()
    miss = (await ask(service, chat, "two")).figures.miss
    assert (miss.cause, miss.detail) == ("lost", "read before the engine was started, and not kept in any tier")
    engine._known.clear()
    assert (await ask(service, chat, "three")).figures.miss.cause == "evicted", "the last turn was after that"


async def test_a_message_that_is_written_anew_is_the_templates_doing(service, store, engine):
    chat = await new_chat(service)
    await ask(service, chat, "one")
    (question, _) = await store.path(chat)
    await store.update_message(question.id, token_ids=(5, 6, 7), tokenizer="another template")
    engine.miss = Miss(position=1, cause="diverged")
    miss = (await ask(service, chat, "two")).figures.miss
    assert (miss.message_index, miss.cause) == (0, "template")


COMPOSED = Composed(
    entries=(Entry("user", "a"), Entry("assistant", "b"), Entry("user", "c")),
    segments=((1, 2, 3), (4, 5), (6, 7)),
    prompt=[1, 2, 3, 4, 5, 6, 7],
    shared_len=0,
    starts=(0, 3, 5),
)


@pytest.mark.parametrize(
    ("position", "message"),
    [(0, 0), (2, 0), (3, 1), (4, 2), (5, 2), (6, 2)],  # 4 is the reply's last token, which no model has read
)
async def test_a_token_belongs_to_the_message_that_it_was_read_with(store, position, message):
    misses = Misses(store, None, "f", COMPOSED, ())
    assert (await misses.explain(Miss(position=position, cause="new"))).message_index == message


async def test_of_messages_without_tokens_of_their_own_the_last_is_meant(store):
    merged = replace(COMPOSED, starts=(0, 0, 5))
    miss = await Misses(store, None, "f", merged, ()).explain(Miss(position=0, cause="new"))
    assert (miss.message_index, miss.role) == (1, "assistant")


async def test_a_chat_that_is_rendered_anew_names_no_message(service, store, engine):
    chat = await new_chat(service)
    await ask(service, chat, "one")
    path = await store.path(chat)
    anew = replace(COMPOSED, starts=None)
    miss = await Misses(store, chat, "f" * 16, anew, path).explain(Miss(position=1, cause="diverged"))
    assert miss == MissView(1, None, None, "template")


async def test_a_database_that_fails_costs_the_reason_and_nothing_else(service, store, engine, monkeypatch):
    chat = await new_chat(service)
    await ask(service, chat, "one")
    engine._known.clear()

    async def fails(*_):
        raise DatabaseFailed(store._threads.database.path, "no")

    monkeypatch.setattr(store, "turns", fails)
    done = await ask(service, chat, "two")
    assert (done.status, done.figures.miss.cause) == ("complete", "new")


async def test_an_api_client_learns_where_and_why(service, engine):
    messages = [Entry("system", "Be brief."), Entry("user", "one")]
    first = await service.complete(service.user.id, messages)
    await first.finished()
    engine.cold = (3, 0)
    turn = await service.complete(service.user.id, [*messages, Entry("assistant", "Fine."), Entry("user", "two")])
    await turn.finished()
    figures = turn.replies[0].figures(turn.started)
    assert (figures.miss.message_index, figures.miss.role, figures.miss.cause) == (3, "user", "new")
    assert figures.host_tokens == 3
    other = [*messages, Entry("assistant", "Fine."), Entry("user", "another")]
    turn = await service.complete(service.user.id, other)
    await turn.finished()
    assert turn.replies[0].figures(turn.started).miss.cause == "edited"
