"""Turns of people's chats on a real database: what is sent, what is kept, and what survives."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest

from chat.conversation import title_of
from chat.errors import (
    EmptyMessage,
    InvalidText,
    NothingToRetry,
    NotReady,
    PromptTooLong,
    SessionBusy,
    SessionNotFound,
    StorageFailed,
    SystemPromptFixed,
)
from chat.model import DEFAULT_MAX_TOKENS
from chat.service import ChatService
from chat.views import TurnOptions
from engine.protocol import Rejected, Sampling
from engine.state import EngineState
from storage.errors import DiskFull
from tests.chat.fake_engine import END


async def ask(service: ChatService, chat: str, text: str, **options):
    turn = await service.send(service.user.id, chat, text, TurnOptions(**options))
    return await turn.finished()


async def new_chat(service: ChatService, system: str | None = None) -> str:
    return (await service.create_session(service.user.id, system)).id


async def detail(service: ChatService, chat: str):
    return await service.session(service.user.id, chat)


async def until_text(turn, text: str) -> None:
    async for view in turn.watch(interval=0):
        if view.text == text:
            return
    raise AssertionError(f"the turn ended without showing {text!r}")


async def eventually(look):
    async with asyncio.timeout(10):
        while not (found := look()):  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
    return found


async def eventually_equal(read, value):
    """Until `await read()` is `value`."""
    async with asyncio.timeout(10):
        while (found := await read()) != value:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
    return found


async def test_a_turn_is_answered_stored_and_measured(service, engine, template):
    chat = await new_chat(service)
    done = await ask(service, chat, "  hello \n\n there\t")
    assert (done.state, done.text, done.status, done.finish_reason) == ("done", "Fine.", "complete", "stop")
    shown = await detail(service, chat)
    assert [(m.role, m.text, m.status) for m in shown.messages] == [
        ("user", "  hello \n\n there\t", "complete"),
        ("assistant", "Fine.", "complete"),
    ]
    assert shown.title == "hello"
    figures = shown.messages[1].figures
    assert figures == done.figures
    assert figures.reused_tokens + figures.computed_tokens == figures.prompt_tokens == len(engine.submits[0].token_ids)
    assert figures.output_tokens == len(template.encode_text("Fine.")) + 1
    assert figures.ttft_s > 0
    assert shown.context_tokens == figures.prompt_tokens + figures.output_tokens
    assert "  hello \n\n there\t<|im_end|>" in template.tokenizer.decode(
        engine.submits[0].token_ids, skip_special_tokens=False
    )


async def test_the_second_turn_reuses_all_of_the_first_but_its_last_token(service, engine):
    chat = await new_chat(service)
    first = await ask(service, chat, "one")
    second = await ask(service, chat, "two")
    assert second.figures.reused_tokens == first.figures.prompt_tokens + first.figures.output_tokens - 1
    assert engine.submits[1].session_id == engine.submits[0].session_id == chat


async def test_a_reply_that_tokenises_otherwise_stays_as_it_was_sampled(service, engine, template, replies):
    odd = [*template.encode_text("hel"), *template.encode_text("lo"), END]
    assert odd[:-1] != template.encode_text("hello")
    replies["one"] = odd
    chat = await new_chat(service)
    assert (await ask(service, chat, "one")).text == "hello"
    await ask(service, chat, "two")
    first, second = (submit.token_ids for submit in engine.submits)
    assert second[: len(first) + len(odd)] == [*first, *odd]


async def test_the_ledger_survives_a_restart(service, store, engine, template):
    chat = await new_chat(service, "Be brief.")
    first = await ask(service, chat, "one")
    await service.close()
    again = ChatService(store, engine)
    await again.start()
    second = await ask(again, chat, "two")
    assert second.figures.reused_tokens == first.figures.prompt_tokens + first.figures.output_tokens - 1
    await again.close()


async def test_a_typed_system_prompt_is_sent_and_is_not_shared(service, engine, template):
    chat = await new_chat(service, "Answer in French.")
    await ask(service, chat, "one")
    text = template.tokenizer.decode(engine.submits[0].token_ids, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nAnswer in French.<|im_end|>\n<|im_start|>user\none")
    assert engine.submits[0].shared_len == 0
    shown = await detail(service, chat)
    assert shown.system_prompt == "Answer in French."
    assert [m.role for m in shown.messages] == ["user", "assistant"]


async def test_the_templates_own_preset_is_shared_and_users_have_a_salt(service, engine):
    await ask(service, await new_chat(service), "one")
    assert engine.submits[0].shared_len > 0
    assert len(engine.submits[0].salt) == 16


async def test_the_system_prompt_is_fixed_by_the_first_message(service):
    chat = await new_chat(service, "a")
    await service.set_system_prompt(service.user.id, chat, "b")
    assert (await detail(service, chat)).system_prompt == "b"
    await ask(service, chat, "one")
    with pytest.raises(SystemPromptFixed):
        await service.set_system_prompt(service.user.id, chat, "c")


async def test_options_reach_the_engine(service, engine):
    chat = await new_chat(service)
    await ask(service, chat, "one", sampling=Sampling(temperature=0.5, seed=7), max_tokens=9)
    assert (engine.submits[0].sampling, engine.submits[0].max_tokens) == (Sampling(temperature=0.5, seed=7), 9)
    await ask(service, chat, "two")
    assert engine.submits[1].max_tokens == DEFAULT_MAX_TOKENS
    assert engine.submits[1].sampling == Sampling(temperature=0.2, top_p=0.9)  # SmolLM2's own model card


async def test_a_reply_at_its_limit_says_so(service):
    done = await ask(service, await new_chat(service), "one", max_tokens=1)
    assert (done.status, done.finish_reason, done.text) == ("complete", "length", "Fine")


async def test_a_stop_string_ends_the_reply_and_the_request(service, engine, template, replies):
    replies["one"] = [*template.encode_text("Yes, and then it goes on for long."), END]
    chat = await new_chat(service)
    done = await ask(service, chat, "one", stop=("then",))
    assert (done.text, done.status, done.finish_reason) == ("Yes, and ", "complete", "stop")
    assert engine.cancelled == [engine.submits[0].request_id]
    path = await service._store.path(chat)
    assert template.decode(path[-1].token_ids) == "Yes, and "


async def test_stop_keeps_what_was_written(service, engine, store, template, replies):
    replies["one"] = [*template.encode_text("one two three"), END]
    chat = await new_chat(service)
    engine.tokens_until_pause = 2
    turn = await service.send(service.user.id, chat, "one")
    await until_text(turn, "one two")
    assert service.live_turn(chat) is turn
    assert (await service.sessions(service.user.id))[0].running
    await service.stop(service.user.id, chat)
    assert service.live_turn(chat) is None
    assert (turn.view.status, turn.view.finish_reason, turn.view.retryable) == ("stopped", "cancelled", True)
    shown = await detail(service, chat)
    assert (shown.messages[-1].status, shown.messages[-1].text) == ("stopped", "one two")
    assert shown.can_retry
    await service.stop(service.user.id, chat)  # nothing runs: nothing happens


async def test_one_turn_at_a_time(service, engine):
    chat = await new_chat(service)
    engine.gate.clear()
    turn = await service.send(service.user.id, chat, "one")
    with pytest.raises(SessionBusy):
        await service.send(service.user.id, chat, "two")
    with pytest.raises(SessionBusy):
        await service.retry(service.user.id, chat)
    engine.gate.set()
    await turn.finished()
    both = await asyncio.gather(
        service.send(service.user.id, chat, "three"),
        service.send(service.user.id, chat, "four"),
        return_exceptions=True,
    )
    assert sorted(type(outcome).__name__ for outcome in both) == ["LiveTurn", "SessionBusy"]


async def test_the_turn_belongs_to_the_server_and_any_tab_may_watch_it(service, engine, replies, template):
    replies["one"] = [*template.encode_text("a b c"), END]
    chat = await new_chat(service)
    engine.gate.clear()
    sending = asyncio.create_task(service.send(service.user.id, chat, "one"))
    await asyncio.sleep(0)
    sending.cancel()  # the tab is closed while its message is being sent
    with pytest.raises(asyncio.CancelledError):
        await sending
    turn = await eventually(lambda: service.live_turn(chat))
    tabs = [asyncio.create_task(collect(turn)) for _ in range(3)]
    await asyncio.sleep(0)
    tabs[0].cancel()
    engine.gate.set()
    for tab in tabs[1:]:
        views = await tab
        assert (views[-1].state, views[-1].text) == ("done", "a b c")
        assert all(a.text == b.text[: len(a.text)] for a, b in pairwise(views))
    assert (await detail(service, chat)).messages[-1].text == "a b c"


async def collect(turn):
    return [view async for view in turn.watch(interval=0)]


async def test_watching_is_throttled_but_the_first_text_and_the_end_come_at_once(service, engine, replies, template):
    replies["one"] = [*template.encode_text(" ".join("abcdefgh")), END]
    turn = await service.send(service.user.id, await new_chat(service), "one")
    views = [view async for view in turn.watch(interval=3600)]
    assert [bool(view.text) for view in views if view.state != "done"].count(True) <= 1
    assert views[-1].text == " ".join("abcdefgh")
    assert [view async for view in turn.watch()] == [views[-1]]  # watching a finished turn


async def test_progress_is_shown_while_the_prompt_is_read(service, engine):
    engine.gate.clear()
    turn = await service.send(service.user.id, await new_chat(service), "one")
    async for view in turn.watch(interval=0):
        if view.state == "reading":
            break
    assert view.reused + view.read == view.total == len(engine.submits[0].token_ids)
    engine.gate.set()
    await turn.finished()


async def test_a_growing_reply_is_saved_while_it_grows(store, engine, template, replies):
    service = ChatService(store, engine, save_seconds=0.0)
    await service.start()
    ids = [*template.encode_text("one two three"), END]
    replies["one"] = ids
    chat = await new_chat(service)
    engine.tokens_until_pause = 2
    turn = await service.send(service.user.id, chat, "one")
    await until_text(turn, "one two")
    async with asyncio.timeout(10):
        while (saved := (await store.path(chat))[-1]).text != turn.view.text:  # noqa: ASYNC110 - another's write
            await asyncio.sleep(0)
    assert saved.status == "streaming"
    assert template.decode(saved.token_ids) == saved.text
    assert await store.interrupt_streaming() == 1  # what a start after kill -9 does
    shown = (await store.path(chat))[-1]
    assert (shown.status, shown.text) == ("interrupted", saved.text)
    engine.gate.set()
    await service.close()


async def test_closing_the_server_keeps_the_reply_so_far(store, engine, replies, template):
    service = ChatService(store, engine)
    await service.start()
    replies["one"] = [*template.encode_text("one two three"), END]
    chat = await new_chat(service)
    engine.tokens_until_pause = 2
    turn = await service.send(service.user.id, chat, "one")
    await until_text(turn, "one two")
    await service.close()
    assert (turn.view.status, turn.view.retryable) == ("interrupted", True)
    saved = (await store.path(chat))[-1]
    assert (saved.status, saved.text) == ("interrupted", "one two")


async def test_a_dead_engine_fails_the_turn_keeps_its_text_and_a_retry_is_a_sibling(service, engine, store):
    chat = await new_chat(service)
    engine.tokens_until_death = 1
    done = await ask(service, chat, "one")
    assert (done.status, done.text, done.retryable) == ("failed", "Fine", True)
    assert "stopped unexpectedly" in done.error
    failed = (await detail(service, chat)).messages[-1]
    assert (failed.status, failed.text, failed.error) == ("failed", "Fine", done.error)
    engine.tokens_until_death = None
    again = await (await service.retry(service.user.id, chat)).finished()
    assert again.status == "complete"
    shown = await detail(service, chat)
    assert [(m.role, m.text) for m in shown.messages] == [("user", "one"), ("assistant", "Fine.")]
    user_id = shown.messages[0].id
    assert [m.status for m in await store.children(user_id, chat)] == ["failed", "complete"]
    assert engine.submits[0].token_ids == engine.submits[1].token_ids


async def test_a_chat_goes_on_after_a_reply_without_text(service, engine, template):
    chat = await new_chat(service)
    engine.tokens_until_death = 0
    assert (await ask(service, chat, "one")).text == ""
    engine.tokens_until_death = None
    done = await ask(service, chat, "two")
    assert done.status == "complete"
    text = template.tokenizer.decode(engine.submits[1].token_ids, skip_special_tokens=False)
    assert text.endswith("assistant\n<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n")


async def test_a_message_that_never_got_a_reply_is_followed_by_the_next(service, store, engine, template):
    """The server was killed between storing a message and its reply."""
    chat = await new_chat(service)
    (segment,) = template.fill([_user("one")])
    await store.add_message(
        chat, parent_id=None, role="user", text="one", token_ids=segment, tokenizer=template.identity
    )
    assert (await detail(service, chat)).can_retry
    first = await ask(service, chat, "two")
    text = template.tokenizer.decode(engine.submits[0].token_ids, skip_special_tokens=False)
    assert text.endswith("user\none<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n")
    second = await ask(service, chat, "three")
    assert second.figures.reused_tokens == first.figures.prompt_tokens + first.figures.output_tokens - 1


def _user(text: str):
    from chat.templates import Entry

    return Entry("user", text)


async def test_an_engines_refusal_is_shown(service, engine):
    engine.reject = Rejected(request_id="", code="never_fits", message="needs 90 blocks, there are 64")
    done = await ask(service, await new_chat(service), "one")
    assert (done.status, done.error, done.retryable) == ("failed", "needs 90 blocks, there are 64", False)


async def test_bad_messages_are_refused_and_leave_no_trace(service, engine, store):
    chat = await new_chat(service)
    for text, error in (("  \n\t", EmptyMessage), ("half \ud83d", InvalidText)):
        with pytest.raises(error):
            await service.send(service.user.id, chat, text)
    with pytest.raises(PromptTooLong, match=r"8,192"):
        await service.send(service.user.id, chat, "word " * 9000)
    with pytest.raises(InvalidText, match=r"U\+D83D"):
        await service.create_session(service.user.id, "\ud83d")
    with pytest.raises(NothingToRetry):
        await service.retry(service.user.id, chat)
    assert await store.path(chat) == []
    assert engine.submits == []
    assert (await ask(service, chat, "fine now")).status == "complete"


async def test_a_full_disk_refuses_the_message_and_takes_the_request_back(service, engine, store, monkeypatch):
    chat = await new_chat(service)

    async def full(*_, **__):
        raise DiskFull(Path("/data/keepwarm.sqlite3"))

    engine.gate.clear()
    with monkeypatch.context() as patch:
        patch.setattr(store, "add_message", full)
        with pytest.raises(StorageFailed, match=r"disk .* is full"):
            await service.send(service.user.id, chat, "one")
    assert service.live_turn(chat) is None
    assert engine.closed == [submit.request_id for submit in engine.submits]
    engine.gate.set()
    assert (await ask(service, chat, "one")).status == "complete"


async def test_a_full_disk_at_the_end_is_said_and_the_text_stays_in_view(service, store, monkeypatch):
    chat = await new_chat(service)

    async def full(*_, **__):
        raise DiskFull(Path("/data/keepwarm.sqlite3"))

    monkeypatch.setattr(store, "update_message", full)
    done = await ask(service, chat, "one")
    assert (done.text, done.status) == ("Fine.", "complete")
    assert "could not be saved" in done.error
    assert (await detail(service, chat)).messages[-1].status == "interrupted"  # what a reload can still know
    assert service.live_turn(chat) is None


async def test_an_engine_that_is_not_ready_says_why(service, engine):
    chat = await new_chat(service)
    engine.set_state(EngineState("loading", stage="converting weights", done=1, total=3))
    with pytest.raises(NotReady, match="converting weights"):
        await service.send(service.user.id, chat, "one")
    assert (await detail(service, chat)).messages == ()
    engine.set_state(EngineState("ready", capabilities=engine.capabilities))
    assert (await ask(service, chat, "one")).status == "complete"


async def test_chats_that_are_not_there(service):
    me = service.user.id
    for call in (
        service.session(me, "nope"),
        service.send(me, "nope", "hi"),
        service.retry(me, "nope"),
        service.stop(me, "nope"),
        service.rename(me, "nope", "x"),
        service.delete_session(me, "nope"),
    ):
        with pytest.raises(SessionNotFound):
            await call
    chat = await new_chat(service)
    with pytest.raises(SessionNotFound):
        await service.session("somebody else", chat)


async def test_deleting_ends_the_turn_and_forgets_the_blocks(service, engine, store):
    chat = await new_chat(service)
    engine.gate.clear()
    turn = await service.send(service.user.id, chat, "one")
    await service.delete_session(service.user.id, chat)
    assert turn.view.state == "done"
    assert engine.dropped == [chat]
    assert await service.sessions(service.user.id) == []
    with pytest.raises(SessionNotFound):
        await service.session(service.user.id, chat)


async def test_titles(service):
    chat = await new_chat(service)
    await ask(service, chat, "one")
    await service.rename(service.user.id, chat, "  Mine ")
    await ask(service, chat, "two")
    assert (await detail(service, chat)).title == "Mine"
    long = "What would a traveller from the thirteenth century say about " + "x" * 100
    assert title_of("\n\n  Trip\tto Lyon \nmore") == "Trip to Lyon"
    assert title_of(long) == "What would a traveller from the thirteenth century say…"
    assert len(title_of("y" * 100)) == 60
    assert title_of(" \n") == ""


async def test_two_chats_run_at_once_and_keep_apart(service, replies, template):
    replies["one"] = [*template.encode_text("first"), END]
    replies["two"] = [*template.encode_text("second"), END]
    chats = [await new_chat(service) for _ in range(2)]
    done = await asyncio.gather(ask(service, chats[0], "one"), ask(service, chats[1], "two"))
    assert [view.text for view in done] == ["first", "second"]
    assert [(await detail(service, chat)).messages[1].text for chat in chats] == ["first", "second"]


async def test_a_message_of_another_tokenizer_is_encoded_anew(service, store, engine, template):
    chat = await new_chat(service)
    user = await store.add_message(
        chat, parent_id=None, role="user", text="old", token_ids=(9, 9, 9), tokenizer="another"
    )
    await store.add_message(
        chat, parent_id=user.id, role="assistant", text="reply", token_ids=(8, 8), tokenizer="another"
    )
    await ask(service, chat, "new")
    text = template.tokenizer.decode(engine.submits[0].token_ids, skip_special_tokens=False)
    assert text.endswith(
        "<|im_start|>user\nold<|im_end|>\n<|im_start|>assistant\nreply<|im_end|>\n"
        "<|im_start|>user\nnew<|im_end|>\n<|im_start|>assistant\n"
    )
