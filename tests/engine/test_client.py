"""The engine as a process of its own: ready, streaming, cancelled, killed, restarted, never in anybody's way.

Those who leave it as they found it share one process, and what they leave is looked at; others have their own.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from engine.client import EngineClient, new_request_id
from engine.config import CacheConfig, EngineConfig
from engine.errors import EngineUnavailable
from engine.protocol import Finished, Progress, Rejected, Sampling, Submit, Tokens
from engine.state import EngineState


def config(model: Path | str, cache: Path, **kwargs) -> EngineConfig:
    tiers = {name: kwargs.pop(name) for name in CacheConfig.__struct_fields__ if name in kwargs}
    limits = CacheConfig(**{"host_kv": 0, **tiers})
    return EngineConfig(model=str(model), cache_dir=str(cache), device="cpu", dtype="float32", cache=limits, **kwargs)


together = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def process(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineClient]:
    client = EngineClient(config(tiny_model, tmp_path_factory.mktemp("process")))
    await client.start()
    await client.wait_ready()
    yield client
    await client.close()


@pytest_asyncio.fixture(loop_scope="module")
async def client(process: EngineClient) -> AsyncIterator[EngineClient]:
    """The shared process, whose only session "s" is gone before and after each test."""
    assert (await process.snapshot()).sessions == {}
    yield process
    assert (await process.check()).violations == []
    await process.drop("s")
    snapshot = await process.snapshot()
    assert (snapshot.sessions, snapshot.free_blocks) == ({}, snapshot.total_blocks)


@pytest.fixture
async def own_client(tiny_model: Path, tmp_path: Path) -> AsyncIterator[EngineClient]:
    """A process that may be killed."""
    client = EngineClient(config(tiny_model, tmp_path))
    await client.start()
    await client.wait_ready()
    yield client
    assert (await client.check()).violations == []
    await client.close()


def submit(ids: list[int], max_tokens: int = 8, **kwargs) -> Submit:
    return Submit(request_id=new_request_id(), session_id="s", token_ids=ids, max_tokens=max_tokens, **kwargs)


async def collect(client: EngineClient, request: Submit) -> tuple[list[int], list]:
    tokens, ends = [], []
    async for event in client.stream(request):
        if isinstance(event, Tokens):
            tokens += event.token_ids
        elif isinstance(event, Finished | Rejected):
            ends.append(event)
    return tokens, ends


@together
async def test_a_second_turn_reuses_the_first(client: EngineClient) -> None:
    before = (await client.snapshot()).forwarded_tokens
    first, (end,) = await collect(client, submit([5, 6, 7, 8]))
    assert len(first) == 8
    assert end.reason == "length"
    assert end.usage.computed_tokens == 4
    prompt = [5, 6, 7, 8, *first, 9]
    assert (await client.estimate(prompt)).device_tokens == 11
    _, (end,) = await collect(client, submit(prompt))
    assert (end.usage.device_tokens, end.usage.computed_tokens) == (11, 2)
    snapshot = await client.snapshot()
    wrong = snapshot.drafted_tokens - snapshot.accepted_tokens
    assert snapshot.forwarded_tokens - before == 4 + 7 + 2 + 7 + wrong
    assert snapshot.free_blocks + snapshot.leased_blocks + snapshot.idle_blocks == snapshot.total_blocks
    assert (await client.drop("s")).blocks > 0
    assert (await client.estimate(prompt)).device_tokens == 0


async def test_ready_means_that_it_was_warmed_up_and_left_nothing_behind(tiny_model: Path, tmp_path: Path) -> None:
    client = EngineClient(config(tiny_model, tmp_path), in_thread=True)
    await client.start()
    capabilities = await client.wait_ready()
    assert capabilities == client.state.capabilities
    assert (capabilities.context_length, capabilities.dtype, capabilities.device) == (1024, "float32", "cpu")
    assert capabilities.total_blocks * capabilities.block_size >= 2 * 1024
    snapshot = await client.snapshot()
    assert snapshot.free_blocks == snapshot.total_blocks
    assert (snapshot.forwarded_tokens, snapshot.steps, snapshot.sessions) == (0, 0, {})
    assert (await client.check()).violations == []
    await client.close()


@together
async def test_closing_a_stream_cancels_within_a_step(client: EngineClient) -> None:
    before = (await client.snapshot()).sampled_tokens
    request = submit([1, 2, 3], max_tokens=1000)
    async for event in client.stream(request):
        if isinstance(event, Tokens):
            break
    while (await client.snapshot()).running:
        pass
    assert (await client.snapshot()).sampled_tokens - before < 900


@together
async def test_cancel_ends_the_stream_with_its_figures(client: EngineClient) -> None:
    request = submit([1, 2, 3], max_tokens=1000)
    tokens, ends = 0, []
    async for event in client.stream(request):
        if isinstance(event, Tokens):
            tokens += len(event.token_ids)
            await client.cancel(request.request_id)
        if isinstance(event, Finished):
            ends.append(event)
    assert [end.reason for end in ends] == ["cancelled"]
    assert ends[0].usage.output_tokens == tokens < 1000


@together
async def test_a_consumer_that_sleeps_holds_nobody_up(client: EngineClient) -> None:
    slow = client.stream(submit([1, 2, 3], max_tokens=200))
    await anext(slow)
    tokens, _ = await collect(client, submit([4, 5, 6], max_tokens=200))
    assert len(tokens) == 200
    late = [event async for event in slow]
    assert sum(len(event.token_ids) for event in late if isinstance(event, Tokens)) == 200


async def test_a_long_prompt_reports_how_far_it_is_read(tiny_model: Path, tmp_path: Path) -> None:
    client = EngineClient(config(tiny_model, tmp_path, max_batch_tokens=64), in_thread=True)
    await client.start()
    await client.wait_ready()
    progress = [e async for e in client.stream(submit(list(range(1, 301)))) if isinstance(e, Progress)]
    await client.close()
    assert [event.read for event in progress if event.state == "reading"] == [0, 64, 128, 192, 256, 300]
    assert {event.total for event in progress} == {300}


async def test_a_killed_engine_is_restarted_and_waiting_turns_are_told_why(own_client: EngineClient) -> None:
    client = own_client
    old = client.pid
    assert old is not None
    ends: list = []
    async for event in client.stream(submit([1, 2, 3], max_tokens=1000)):
        if isinstance(event, Tokens) and not ends:
            os.kill(old, signal.SIGKILL)
        if isinstance(event, Rejected):
            ends.append(event)
    assert [(end.code, end.retryable) for end in ends] == [("engine_died", True)]
    assert "SIGKILL" in ends[0].message
    assert client.state.phase == "restarting"
    _, (refused,) = await collect(client, submit([1, 2, 3]))
    assert (refused.code, refused.retryable) == ("not_ready", True)
    await client.wait_ready()
    assert client.pid != old
    tokens, _ = await collect(client, submit([1, 2, 3]))
    assert len(tokens) == 8


async def test_an_engine_that_keeps_dying_is_given_up(tiny_model: Path, tmp_path: Path) -> None:
    client = EngineClient(config(tiny_model, tmp_path))
    await client.start()
    states: list[EngineState] = []
    killed = set()
    async for state in client.watch():
        states.append(state)
        if state.phase == "failed":
            break
        if client.pid is not None and client.pid not in killed:
            killed.add(client.pid)
            os.kill(client.pid, signal.SIGKILL)
    assert len(killed) == 3
    assert "3 times" in states[-1].message
    with pytest.raises(EngineUnavailable, match="3 times"):
        await client.snapshot()
    await client.close()


async def test_a_model_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    client = EngineClient(config(tmp_path / "nowhere", tmp_path), in_thread=True)
    await client.start()
    with pytest.raises(EngineUnavailable, match="nowhere"):
        await client.wait_ready()
    assert client.state.phase == "failed"
    await client.close()


async def test_close_while_it_loads_leaves_no_process(tiny_model: Path, tmp_path: Path) -> None:
    client = EngineClient(config(tiny_model, tmp_path))
    await client.start()
    pid = client.pid
    await asyncio.wait_for(client.close(), 3)
    assert pid is not None
    assert not psutil.pid_exists(pid)


@together
async def test_seeded_samples_repeat_and_differ(client: EngineClient) -> None:
    sampling = Sampling(temperature=1.0, seed=11)

    async def samples(n: int) -> list[list[int]]:
        out: list[list[int]] = [[] for _ in range(n)]
        async for event in client.stream(submit([1, 2, 3, 4], 12, n=n, sampling=sampling)):
            if isinstance(event, Tokens):
                out[event.index] += event.token_ids
        return out

    first, again = await samples(3), await samples(3)
    assert first == again
    assert len({tuple(sample) for sample in first}) == 3
    assert (await samples(1))[0] == first[0]
