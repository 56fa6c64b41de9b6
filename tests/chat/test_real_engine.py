"""The chat service and its API on the real engine: what is reused is counted where the work is done."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from chat.service import ChatService
from chat.views import TurnOptions
from engine.client import EngineClient
from engine.config import CacheConfig, EngineConfig
from engine.protocol import Sampling
from storage.store import Store
from tests.chat.serving import serving

GREEDY = Sampling()
pytestmark = pytest.mark.timeout(240)


@asynccontextmanager
async def running(
    store: Store, model: Path, cache: Path, *, in_thread: bool = True, **more: Any
) -> AsyncIterator[tuple[ChatService, EngineClient]]:
    tiers = CacheConfig(device_kv=64 * 2**20, host_kv=16 * 2**20, disk_kv=64 * 2**20)
    config = EngineConfig(model=str(model), cache_dir=str(cache), dtype="float32", cache=tiers, threads=1, **more)
    engine = EngineClient(config, in_thread=in_thread)
    await engine.start()
    service = ChatService(store, engine)
    await service.start()
    try:
        await engine.wait_ready()
        yield service, engine
        if engine.state.phase == "ready":
            assert (await engine.check()).violations == []
    finally:
        await service.close()
        await engine.close()


async def ask(service: ChatService, chat: str, text: str, **options):
    turn = await service.send(service.user.id, chat, text, TurnOptions(**options))
    return await turn.finished()


async def test_random_replies_are_reused_whole_by_page_and_api(store, tiny_model, tmp_path):
    """A model that writes nonsense: merged tokens, broken characters and control tokens at every seam."""
    async with running(store, tiny_model, tmp_path) as (service, engine), serving(service) as url:
        chats = [(await service.create_session(service.user.id, "Reference.\nBe brief.")).id for _ in range(3)]
        before: dict[str, int] = {}
        for turn in range(4):
            for number, chat in enumerate(chats):
                options = {"max_tokens": 16, "sampling": Sampling(temperature=1.5, seed=number)}
                done = await ask(service, chat, f"{turn} 👩‍👩‍👧\n\n  x", **options)
                path = await store.path(chat)
                kept = len(path[-1].token_ids)
                assert (await service.session(service.user.id, chat)).messages[-1].text == done.text
                if turn:
                    assert done.figures.reused_tokens >= before[chat]
                # of the reply all but its last token has K and V, and all of it that was delivered is in the ledger
                before[chat] = done.figures.prompt_tokens + min(kept, done.figures.output_tokens - 1)
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            history: list[dict[str, str]] = []
            told, got, had = 0, 0, 0
            for turn in range(5):
                history.append({"role": "user", "content": f"turn {turn}"})
                answer = await client.chat.completions.create(
                    model="default", messages=history, max_tokens=24, temperature=0
                )
                if turn:
                    got += answer.usage.prompt_tokens_details.cached_tokens
                    had += told
                told = answer.usage.prompt_tokens + answer.usage.completion_tokens
                history.append({"role": "assistant", "content": answer.choices[0].message.content})
            assert got / had >= 0.98
        snapshot = await engine.snapshot()
        assert snapshot.leased_blocks == 0


async def test_a_real_model_answers_and_remembers_over_a_restart(store, embedded_model, tmp_path):
    async with running(store, embedded_model, tmp_path) as (service, _):
        chat = (await service.create_session(service.user.id)).id
        first = await ask(service, chat, "What is the capital of France?", sampling=GREEDY, max_tokens=12)
        assert "Paris" in first.text
        second = await ask(service, chat, "And of Italy?", sampling=GREEDY, max_tokens=4)
        total = first.figures.prompt_tokens + first.figures.output_tokens
        assert second.figures.reused_tokens == total - 1
    async with running(store, embedded_model, tmp_path) as (service, _):
        shown = await service.session(service.user.id, chat)
        assert [message.text for message in shown.messages][1::2] == [first.text, second.text]
        again = await (await service.retry(service.user.id, chat, TurnOptions(GREEDY, 4))).finished()
        assert (again.text, again.figures.reused_tokens) == (second.text, 0)


async def test_a_full_context_ends_the_reply_and_says_so(store, tiny_model, tmp_path):
    async with running(store, tiny_model, tmp_path) as (service, _), serving(service) as url:
        body = {"model": "default", "messages": [{"role": "user", "content": "word " * 970}], "temperature": 0}
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            answer = (await http.post("/v1/chat/completions", json=body)).json()
        assert answer["usage"]["total_tokens"] == 1024
        assert answer["choices"][0]["finish_reason"] == "length"
        sentence = "The reply ended early: the context of 1024 tokens is full."
        assert answer["keepwarm"]["finish_details"] == [sentence]
        chat = (await service.create_session(service.user.id)).id
        done = await ask(service, chat, "word " * 970, sampling=GREEDY)
        assert (done.status, done.finish_reason, done.error) == ("complete", "length", sentence)


async def test_stopping_and_dropping_leave_nothing_leased(store, tiny_model, tmp_path):
    async with running(store, tiny_model, tmp_path) as (service, engine), serving(service) as url:
        chat = (await service.create_session(service.user.id)).id
        turn = await service.send(service.user.id, chat, "go", TurnOptions(Sampling(temperature=1.0), 900))
        async for view in turn.watch():
            if view.text:
                break
        await service.stop(service.user.id, chat)
        assert turn.view.status in ("stopped", "complete")
        body = {"model": "default", "messages": [{"role": "user", "content": "go"}], "stream": True, "max_tokens": 900}
        async with (
            httpx.AsyncClient(base_url=url) as http,
            http.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            await anext(response.aiter_lines())
        async with asyncio.timeout(30):
            while (await engine.snapshot()).running:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.01)
        await service.delete_session(service.user.id, chat)
        snapshot = await engine.snapshot()
        assert snapshot.leased_blocks == 0
        assert chat not in snapshot.sessions


async def test_a_killed_engine_fails_the_turn_and_a_retry_succeeds(store, tiny_model, tmp_path):
    async with running(store, tiny_model, tmp_path, in_thread=False) as (service, engine):
        chat = (await service.create_session(service.user.id)).id
        turn = await service.send(service.user.id, chat, "go", TurnOptions(Sampling(temperature=1.0), 900))
        async for view in turn.watch():
            if view.text:
                os.kill(engine.pid, signal.SIGKILL)
                break
        done = await turn.finished()
        assert (done.status, done.retryable) == ("failed", True)
        assert "SIGKILL" in done.error
        assert done.text.startswith(view.text)
        await engine.wait_ready()
        retried = await (await service.retry(service.user.id, chat, TurnOptions(GREEDY, 4))).finished()
        assert retried.status == "complete"
        assert len(await store.children((await store.path(chat))[0].id, chat)) == 2


async def test_a_chat_comes_back_from_disk_after_a_restart_and_a_deleted_one_leaves_it(store, tiny_model, tmp_path):
    kv = tmp_path / "kv"
    disk = {"kv_dir": str(kv), "force": "load"}
    async with running(store, tiny_model, tmp_path, **disk) as (service, engine):
        kept, gone = [(await service.create_session(service.user.id)).id for _ in range(2)]
        for chat in (gone, kept):
            first = await ask(service, chat, f"Words that {chat} alone has. " * 20, sampling=GREEDY, max_tokens=12)
        async with asyncio.timeout(20):
            while (await engine.snapshot()).saving_blocks:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        known = first.figures.prompt_tokens + first.figures.output_tokens - 1
    async with running(store, tiny_model, tmp_path, **disk) as (service, engine):
        async with asyncio.timeout(20):
            while service.cache.warming or not (await engine.snapshot()).sessions:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        again = await ask(service, kept, "And?", sampling=GREEDY, max_tokens=4)
        assert again.figures.reused_tokens == known  # nothing of it was read again
        await service.delete_session(service.user.id, gone)
        assert await store.cache.pending_drops() == []
        assert gone not in (await engine.snapshot()).sessions
        assert {event.session_id for event in await service.cache.events(1000)} <= {kept, None}
