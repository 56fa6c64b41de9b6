"""What the web side remembers of the cache and tells the engine again: pins, deletions, events, recent chats."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import pytest

from chat import cache_log
from chat.errors import InvalidRequest, NotReady, PinRefused, SessionNotFound
from chat.service import ChatService
from chat.views import EstimateView, WarmingView
from chat.warmth import STAND_IN
from engine.protocol import CacheEvent, CacheLog, TurnTrace
from engine.state import EngineState
from storage import KeptSession
from storage.errors import DiskFull
from tests.chat.test_service import ask, eventually, eventually_equal, new_chat

LOADING, DYING = EngineState("loading"), EngineState("restarting", message="it died")


def ready(engine) -> EngineState:
    return EngineState("ready", capabilities=engine.capabilities)


@asynccontextmanager
async def restarted(store, engine):
    """The service of another run of the server, whose engine is still loading."""
    engine.set_state(LOADING)
    again = ChatService(store, engine)
    await again.start()
    yield again
    await again.close()


@pytest.fixture
async def chats(service) -> list[str]:
    """Three chats with a turn each, the last used last."""
    made = [await new_chat(service) for _ in range(3)]
    for number, chat in enumerate(made):
        await ask(service, chat, f"turn {number}")
    return made


# --- pins -------------------------------------------------------------------------------------------------------------


async def test_a_pin_is_told_kept_and_told_again_to_every_engine(service, store, engine, chats):
    user = service.user.id
    await service.cache.pin(user, chats[0], True)
    await service.cache.set_ttl(user, chats[1], 90.0)
    told = [(chats[0], True, None), (chats[1], False, 90.0)]
    assert engine.pins == told
    engine.set_state(DYING)
    await asyncio.sleep(0)
    engine.set_state(ready(engine))
    await eventually(lambda: sorted(engine.pins[2:]) == sorted(told))
    engine.pins.clear()
    await service.close()
    async with restarted(store, engine):
        assert engine.pins == []
        engine.set_state(ready(engine))
        await eventually(lambda: sorted(engine.pins) == sorted(told))


async def test_letting_go_of_a_pin_keeps_the_time_to_live(service, store, engine, chats):
    user = service.user.id
    await service.cache.set_ttl(user, chats[0], 30.5)
    await service.cache.pin(user, chats[0], True)
    await service.cache.pin(user, chats[0], False)
    assert engine.pins == [(chats[0], False, 30.5), (chats[0], True, 30.5), (chats[0], False, 30.5)]
    assert await store.cache.kept_sessions() == [KeptSession(id=chats[0], pinned=False, ttl_s=30.5)]
    await service.cache.set_ttl(user, chats[0], None)
    assert await store.cache.kept_sessions() == []


async def test_a_pin_that_the_engine_refuses_is_said_and_not_kept(service, store, engine, chats):
    engine.pin_refusal = "Its 180 MiB and the 100 MiB that are pinned already are more than the 256 MiB of the device."
    with pytest.raises(PinRefused, match="180 MiB"):
        await service.cache.pin(service.user.id, chats[0], True)
    engine.set_state(LOADING)
    with pytest.raises(NotReady):
        await service.cache.pin(service.user.id, chats[0], True)
    assert await store.cache.kept_sessions() == []


async def test_a_pin_that_was_taken_is_repeated_and_not_asked_for_again(service, store, engine, chats):
    """The chat may have outgrown what an engine would let it pin now."""
    await service.cache.pin(service.user.id, chats[0], True)
    engine.pin_refusal = "It takes too much by now."
    await service.cache.set_ttl(service.user.id, chats[0], 90.0)
    assert engine.pins == [(chats[0], True, None), (chats[0], True, 90.0)]
    engine.pins.clear()
    await service.close()
    async with restarted(store, engine):
        engine.set_state(ready(engine))
        await eventually(lambda: engine.pins == [(chats[0], True, 90.0)])


async def test_a_pin_that_cannot_be_kept_is_taken_back(service, store, engine, chats, monkeypatch):
    async def full(*_, **__):
        raise DiskFull(store._threads.database.path)

    monkeypatch.setattr(store, "update_session", full)
    with pytest.raises(DiskFull):
        await service.cache.pin(service.user.id, chats[0], True)
    assert engine.pins == [(chats[0], True, None), (chats[0], False, None)]


async def test_what_an_engine_need_not_know_now_it_is_told_later(service, store, engine, chats):
    await service.cache.pin(service.user.id, chats[0], True)
    engine.set_state(LOADING)
    await service.cache.pin(service.user.id, chats[0], False)
    await service.cache.set_ttl(service.user.id, chats[0], 60.0)
    engine.set_state(ready(engine))
    await eventually(lambda: engine.pins[-1] == (chats[0], False, 60.0))


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
async def test_a_time_to_live_that_is_none(service, chats, seconds):
    with pytest.raises(InvalidRequest):
        await service.cache.set_ttl(service.user.id, chats[0], seconds)


async def test_nobody_elses_chat_can_be_kept_warmed_or_estimated(service, engine, chats):
    engine.prefetches.clear()
    for asked in (
        service.cache.pin("somebody else", chats[0], True),
        service.cache.set_ttl("somebody else", chats[0], 1.0),
        service.cache.estimate("somebody else", chats[0]),
    ):
        with pytest.raises(SessionNotFound):
            await asked
    await service.cache.warm("somebody else", chats[0])
    assert (engine.pins, engine.prefetches, engine.estimates) == ([], [], [])


# --- deletions --------------------------------------------------------------------------------------------------------


async def test_a_chat_that_is_deleted_is_forgotten_at_once(service, store, engine, chats):
    await service.delete_session(service.user.id, chats[0])
    assert engine.dropped == [chats[0]]
    assert await store.cache.pending_drops() == []


async def test_a_chat_that_is_deleted_while_no_engine_is_there_is_forgotten_later(service, store, engine, chats):
    engine.set_state(DYING)
    await service.delete_session(service.user.id, chats[0])
    assert (engine.dropped, await store.cache.pending_drops()) == ([], [chats[0]])
    await service.close()
    async with restarted(store, engine):
        await asyncio.sleep(0.01)
        assert engine.dropped == []
        engine.set_state(ready(engine))
        await eventually(lambda: engine.dropped == [chats[0]])
        await eventually_equal(store.cache.pending_drops, [])


async def test_a_deletion_that_cannot_be_noted_as_done_is_told_twice_and_is_no_error(
    service, store, engine, chats, monkeypatch
):
    async def full(*_):
        raise DiskFull(store._threads.database.path)

    with monkeypatch.context() as broken:
        broken.setattr(store.cache, "dropped", full)
        await service.delete_session(service.user.id, chats[0])
    engine.set_state(LOADING)
    await asyncio.sleep(0)
    engine.set_state(ready(engine))
    await eventually(lambda: engine.dropped == [chats[0], chats[0]])


# --- events -----------------------------------------------------------------------------------------------------------


def happened(session_id: str, blocks: int = 1) -> CacheEvent:
    return CacheEvent(
        at=5.0, action="expired", session_id=session_id, source="disk", target=None, blocks=blocks, bytes=4096,
        reason="30 days unused", age_s=9.0,
    )  # fmt: skip


def ended(session_id: str, computed: int = 1) -> TurnTrace:
    return TurnTrace(
        at=7.5, session_id=session_id, model="f" * 16, blocks=bytes(range(16)), device_tokens=32, host_tokens=16,
        disk_tokens=8, computed_tokens=computed, output_tokens=5,
    )  # fmt: skip


def told(*events: CacheEvent, turns: list[TurnTrace] | None = None) -> CacheLog:
    return CacheLog(events=list(events), turns=turns or [])


async def test_events_are_remembered_written_and_there_after_a_restart(service, store, engine, chats):
    engine.on_cache_log(told(happened(chats[0], 1), happened("", 2)))
    events = await service.cache.events(10)
    assert [(event.session_id, event.blocks, event.action) for event in events] == [
        (chats[0], 1, "expired"),
        (None, 2, "expired"),
    ]
    assert await service.cache.events(1) == events[1:]
    await eventually_equal(lambda: store.cache.events(10), events)
    engine.on_cache_log(told(happened(chats[1], 3)))
    await service.close()
    assert engine.on_cache_log is None
    async with restarted(store, engine) as again:
        assert [event.blocks for event in await again.cache.events(10)] == [1, 2, 3]


async def test_more_than_is_remembered_is_read_from_the_database(service, engine, chats, monkeypatch):
    monkeypatch.setattr(cache_log, "REMEMBERED", 2)
    engine.on_cache_log(told(*(happened("", number) for number in range(5))))
    assert [event.blocks for event in await service.cache.events(2)] == [3, 4]
    assert [event.blocks for event in await service.cache.events(4)] == [1, 2, 3, 4]


async def test_a_deleted_chat_leaves_no_event(service, store, engine, chats):
    engine.on_cache_log(told(happened(chats[0], 1), happened(chats[1], 2)))
    await service.delete_session(service.user.id, chats[0])
    engine.on_cache_log(told(happened(chats[0], 3)))  # the engine tells what it did with its blocks
    assert [event.blocks for event in await service.cache.events(2000)] == [2]


async def test_a_database_that_takes_no_events_stops_nothing(service, store, engine, chats, monkeypatch):
    async def full(*_):
        raise DiskFull(store._threads.database.path)

    with monkeypatch.context() as broken:
        broken.setattr(store.cache, "add_events", full)
        engine.on_cache_log(told(happened("", 1)))
        await asyncio.sleep(0.01)
    engine.on_cache_log(told(happened("", 2)))
    second = (await service.cache.events(1))[0]
    await eventually_equal(lambda: store.cache.events(5), [second])
    assert [event.blocks for event in await service.cache.events(5)] == [1, 2]


async def test_blocks_that_are_gone_are_counted_by_tier_and_reason(service, engine, chats):
    demoted = msgspec.structs.replace(happened("", 8), action="demoted", target="host")
    saved = msgspec.structs.replace(happened("", 16), action="saved", source=None, target="disk")
    evicted = msgspec.structs.replace(happened("", 4), action="evicted", source="host", reason="it was full")
    engine.on_cache_log(told(happened(chats[0], 1), happened("", 2), demoted, saved))
    engine.on_cache_log(told(evicted))
    assert service.cache.gone == {("disk", "30 days unused"): 3, ("host", "it was full"): 4}


async def test_turns_are_traced_also_those_that_were_told_last(service, store, engine, chats):
    engine.on_cache_log(told(happened(chats[0]), turns=[ended(chats[0], 1), ended(chats[1], 2)]))
    (first, second) = await service.cache.trace(10)
    assert (first.session_id, first.blocks, first.disk_tokens) == (chats[0], bytes(range(16)), 8)
    assert await service.cache.trace(1) == [second]
    engine.on_cache_log(told(turns=[ended(chats[0], 3)]))
    await service.close()
    assert [turn.computed_tokens for turn in await store.cache.trace(10)] == [1, 2, 3]


async def test_a_deleted_chat_leaves_no_turn_in_the_trace(service, store, engine, chats):
    engine.on_cache_log(told(turns=[ended(chats[0], 1), ended(chats[1], 2)]))
    assert len(await service.cache.trace(10)) == 2
    engine.on_cache_log(told(turns=[ended(chats[0], 3), ended("no such session", 4)]))
    await service.delete_session(service.user.id, chats[0])
    engine.on_cache_log(told(turns=[ended(chats[0], 5)]))
    assert [turn.computed_tokens for turn in await service.cache.trace(10)] == [2]


# --- recent chats at the start ----------------------------------------------------------------------------------------


async def test_pinned_and_recent_chats_are_warmed_the_last_used_last(service, store, engine, chats):
    await service.cache.pin(service.user.id, chats[1], True)
    await service.close()
    async with restarted(store, engine) as again:
        engine.prefetches.clear()
        engine.prefetch_gate.clear()
        engine.set_state(ready(engine))
        await eventually(lambda: engine.prefetches)
        assert again.cache.warming == WarmingView(0, 3)
        engine.prefetch_gate.set()
        await eventually(lambda: again.cache.warming is None)
        assert [chat for chat, _ in engine.prefetches] == [chats[1], chats[0], chats[2]]
        ids = [token for message in await store.path(chats[0]) for token in message.token_ids]
        assert engine.prefetches[1][1] == ids


@pytest.mark.parametrize(("blocks", "expected"), [(1000, [1, 0, 2]), (16, [1, 2]), (14, [1]), (1, [])])
async def test_no_more_chats_are_warmed_than_the_device_has_room_for(
    service, store, engine, chats, blocks: int, expected: list[int]
):
    """The one that is pinned comes before the last used, and that before the others; the longest takes 14 blocks."""
    await ask(service, chats[1], "word " * 380)
    await ask(service, chats[2], "hello")
    await service.cache.pin(service.user.id, chats[1], True)
    await service.close()
    engine.capabilities = msgspec.structs.replace(engine.capabilities, total_blocks=blocks)
    async with restarted(store, engine) as again:
        engine.prefetches.clear()
        engine.set_state(ready(engine))
        await eventually(lambda: again.cache._warmth._task is not None and again.cache._warmth._task.done())
        assert [chat for chat, _ in engine.prefetches] == [chats[number] for number in expected]


async def test_warming_stops_when_a_turn_begins(service, store, engine, chats):
    await service.close()
    async with restarted(store, engine) as again:
        engine.prefetches.clear()
        engine.prefetch_gate.clear()
        engine.set_state(ready(engine))
        await eventually(lambda: engine.prefetches)
        await ask(again, chats[2], "hello")
        await eventually(lambda: again.cache.warming is None)
        assert (len(engine.prefetches), engine.left) == (1, [engine.prefetches[0][0]])


async def test_warming_does_not_begin_where_a_turn_was_first(service, store, engine, chats, monkeypatch):
    gate = asyncio.Event()
    kept = store.cache.kept_sessions

    async def slow():
        await gate.wait()
        return await kept()

    monkeypatch.setattr(store.cache, "kept_sessions", slow)
    await service.close()
    async with restarted(store, engine) as again:
        engine.prefetches.clear()
        engine.set_state(ready(engine))
        await asyncio.sleep(0.01)
        await ask(again, chats[2], "hello")
        gate.set()
        await eventually(again.cache._settling.done)
        assert engine.prefetches == []


async def test_an_engine_that_dies_while_chats_are_warmed_is_no_error(service, store, engine, chats):
    await service.close()
    async with restarted(store, engine) as again:
        engine.prefetches.clear()
        engine.prefetch_gate.clear()
        engine.set_state(ready(engine))
        await eventually(lambda: engine.prefetches)
        engine.set_state(DYING)
        await eventually(lambda: again.cache.warming is None)
        engine.prefetch_gate.set()
        engine.set_state(ready(engine))
        await eventually(lambda: len(engine.prefetches) == 4)  # one of the first engine, three of the second


# --- what is about to be asked ----------------------------------------------------------------------------------------


async def test_a_chat_is_warmed_with_all_that_was_said_in_it(service, store, engine, chats):
    engine.prefetches.clear()
    await service.cache.warm(service.user.id, chats[1])
    sent = engine.submits[1].token_ids
    ((chat, ids),) = engine.prefetches
    assert (chat, ids[: len(sent)]) == (chats[1], sent)
    assert len(ids) == len(sent) + 3


async def test_leaving_a_chat_ends_its_prefetch(service, engine, chats):
    engine.prefetch_gate.clear()
    warming = asyncio.create_task(service.cache.warm(service.user.id, chats[1]))
    await eventually(lambda: chats[1] in [chat for chat, _ in engine.prefetches])
    warming.cancel()
    await asyncio.wait([warming])
    assert chats[1] in engine.left


async def test_what_cannot_be_warmed_is_left_out_without_a_word(service, store, engine, chats):
    empty = await new_chat(service)
    engine.prefetches.clear()
    for chat in (empty, "none of that name"):
        await service.cache.warm(service.user.id, chat)
    engine.set_state(DYING)
    await service.cache.warm(service.user.id, chats[0])
    engine.served.clear()
    engine.set_state(ready(engine))
    await service.cache.warm(service.user.id, chats[0])
    assert engine.prefetches == []


async def test_what_a_turn_would_cost(service, engine, template, chats):
    found = await service.cache.estimate(service.user.id, chats[0], "and more")
    turn = await ask(service, chats[0], "and more")
    assert engine.estimates == [engine.submits[-1].token_ids]
    assert found == EstimateView(
        prompt_tokens=turn.figures.prompt_tokens,
        device_tokens=turn.figures.device_tokens,
        host_tokens=0,
        disk_tokens=0,
        computed_tokens=turn.figures.computed_tokens,
        seconds=0.125,
    )


async def test_a_message_that_is_not_written_yet_is_stood_in_for(service, store, engine, template, chats):
    await service.cache.estimate(service.user.id, chats[0])
    text = template.tokenizer.decode(engine.estimates[-1], skip_special_tokens=False)
    assert text.endswith(f"<|im_start|>user\n{STAND_IN}<|im_end|>\n<|im_start|>assistant\n")
    empty = await new_chat(service, "Be brief.")
    await service.cache.estimate(service.user.id, empty)
    text = template.tokenizer.decode(engine.estimates[-1], skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n" + STAND_IN)
    question = (await store.path(chats[0]))[0]
    await store.update_session(service.user.id, chats[0], leaf_id=question.id)  # it waits for a reply: no stand-in
    await service.cache.estimate(service.user.id, chats[0])
    assert engine.estimates[-1] == engine.submits[0].token_ids


async def test_an_estimate_without_an_engine_or_a_model_is_refused(service, store, engine, chats):
    engine.served.clear()
    with pytest.raises(NotReady, match="not loaded"):
        await service.cache.estimate(service.user.id, chats[0])
    engine.served.add(engine.capabilities.fingerprint)
    engine.set_state(replace(DYING))
    with pytest.raises(NotReady, match="restarting"):
        await service.cache.estimate(service.user.id, chats[0])
