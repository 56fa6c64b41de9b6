"""Several models and hardly any memory: nobody is cut short or refused for another's sake, and nothing dies."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.cache.pool import KVPool
from engine.client import EngineClient
from engine.errors import EngineUnavailable, ModelLoadError
from engine.model import memory
from engine.protocol import Rejected, Tokens
from tests.engine.test_client import collect, config
from tests.engine.test_several_models import PROMPT, alone, ask, other_model, weights

__all__ = ["other_model"]
KIB = 2**10
SMALL = 256 * KIB  # 32 blocks of the first model: one context


@pytest.fixture
async def client(tiny_model: Path, tmp_path: Path) -> AsyncIterator[EngineClient]:
    client = EngineClient(config(tiny_model, tmp_path, device_kv=SMALL), in_thread=True)
    await client.start()
    await client.wait_ready()
    yield client
    assert client.state.phase == "ready"
    assert (await client.check()).violations == []
    await client.close()


def reasons(ends: list[Any]) -> list[str]:
    return [end.code if isinstance(end, Rejected) else f"{end.reason} {end.detail}".strip() for end in ends]


def no_memory(*_: Any) -> None:
    raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")


@pytest.fixture
def no_room_for_weights(monkeypatch: pytest.MonkeyPatch):
    """Makes the next look at the memory find none, so that whoever is idle has to give way."""
    looks: list[int] = []
    real = memory.available
    monkeypatch.setattr(memory, "available", lambda device: looks.pop() if looks else real(device))
    return lambda: looks.append(0)


async def test_a_reply_is_not_cut_because_another_model_comes(
    client: EngineClient, tiny_model: Path, other_model: Path, tmp_path: Path
) -> None:
    tokens: list[int] = []
    ends: list[Any] = []
    loading: asyncio.Task[Any] | None = None
    async for event in client.stream(ask(None, PROMPT, new=900)):
        if isinstance(event, Tokens):
            tokens += event.token_ids
            loading = loading or asyncio.create_task(client.load(str(other_model), dtype="float32"))
        elif not hasattr(event, "state"):
            ends.append(event)
    assert reasons(ends) == ["length"]
    assert len(tokens) == 900
    assert loading is not None
    await loading
    again, ends = await collect(client, ask(None, [5] * 900, new=4))
    assert (reasons(ends), len(again)) == (["length"], 4)


async def test_requests_that_do_not_fit_beside_each_other_wait_for_each_other(
    client: EngineClient, tiny_model: Path, other_model: Path, tmp_path: Path
) -> None:
    other = await client.load(str(other_model), dtype="float32")
    asked = [ask(None, [5] * 900, "a", 4), ask(other, [3] * 50, "b", 4), ask(None, [6] * 700, "c", 4)]
    asked += [ask(other, [7] * 150, "d", 40), ask(None, [8] * 40, "e", 60)]
    results = await asyncio.wait_for(asyncio.gather(*(collect(client, request) for request in asked)), 120)
    assert [reasons(ends) for _, ends in results] == [["length"]] * 5
    for request, (tokens, _) in zip(asked, results, strict=True):
        assert tokens == await alone(
            other_model if request.model else tiny_model, tmp_path, request.token_ids, request.max_tokens
        )


async def test_replies_that_outgrow_the_budget_together_wait_for_each_other(
    client: EngineClient, other_model: Path
) -> None:
    other = await client.load(str(other_model), dtype="float32")
    asked = [ask(None, PROMPT, "a", 500), ask(other, [3] * 50, "b", 110)]  # 152 and 120 KiB in the end
    results = await asyncio.wait_for(asyncio.gather(*(collect(client, request) for request in asked)), 120)
    assert [(len(tokens), reasons(ends)) for tokens, ends in results] == [(500, ["length"]), (110, ["length"])]


async def test_a_refused_load_takes_nothing_from_who_is_served(
    client: EngineClient, other_model: Path, tmp_path: Path
) -> None:
    await collect(client, ask(None, PROMPT))
    before = await client.snapshot()
    broken = tmp_path / "broken"
    shutil.copytree(other_model, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["lm_head.weight"] = torch.full_like(tensors["lm_head.weight"], float("nan"))
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match="broken"):
        await client.load(str(broken), dtype="float32")
    after = await client.snapshot()
    assert (after.pool_bytes, after.used_bytes) == (before.pool_bytes, before.used_bytes)
    tokens, ends = await collect(client, ask(None, [5] * 900, new=4))
    assert (reasons(ends), len(tokens)) == (["length"], 4)


async def test_a_model_of_large_blocks_gets_them_from_caches_that_idle(
    tiny_model: Path, other_model: Path, tmp_path: Path
) -> None:
    block = 3 * 2 * 4 * 8 * 4 * 32  # bytes of the other model's
    client = EngineClient(config(tiny_model, tmp_path, device_kv=block * 22 // 10), in_thread=True)
    await client.start()
    await client.wait_ready()
    await collect(client, ask(None, [5] * 150, new=4))
    other = await client.load(str(other_model), dtype="float32")
    for _ in range(2):
        tokens, ends = await collect(client, ask(other, [3] * 40, new=8))
        assert (reasons(ends), len(tokens)) == (["length"], 8)
        tokens, ends = await collect(client, ask(None, [6] * 150, new=4))
        assert (reasons(ends), len(tokens)) == (["length"], 4)
    assert (await client.check()).violations == []
    await client.close()


async def test_weights_that_are_not_the_same_any_more_are_refused(
    client: EngineClient, tiny_model: Path, other_model: Path, tmp_path: Path, no_room_for_weights
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(other_model, folder)
    served = await client.load(str(folder), dtype="float32")
    await collect(client, ask(served, PROMPT))
    await collect(client, ask(None, PROMPT))  # so that the other is the one to go
    no_room_for_weights()
    copy = tmp_path / "copy"
    shutil.copytree(tiny_model, copy)
    await client.load(str(copy), dtype="float32")
    assert (await weights(client))["model"] is False
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = -tensors["lm_head.weight"]
    save_file(tensors, folder / "new", {"format": "pt"})
    (folder / "new").rename(folder / "model.safetensors")
    _, (end,) = await collect(client, ask(served, PROMPT))
    assert isinstance(end, Rejected)
    assert (end.code, "have changed" in end.message) == ("no_model", True)
    shutil.rmtree(folder)
    _, (end,) = await collect(client, ask(served, PROMPT))
    assert isinstance(end, Rejected)
    assert end.code == "no_model"
    tokens, _ = await collect(client, ask(None, PROMPT))
    assert len(tokens) == 8


async def test_the_same_weights_with_another_template_are_read_from_their_own_folder(
    client: EngineClient, tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "another template"
    shutil.copytree(tiny_model, folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    served = await client.load(str(folder), dtype="float32")
    assert client.state.capabilities is not None
    assert served.fingerprint == client.state.capabilities.fingerprint
    assert (served.model_name, served.model_path) == ("another template", str(folder))


async def test_a_bound_on_the_context_bounds_shorter_models_no_further(
    tiny_model: Path, other_model: Path, tmp_path: Path
) -> None:
    client = EngineClient(config(tiny_model, tmp_path, context=512), in_thread=True)
    await client.start()
    assert (await client.wait_ready()).context_length == 512
    short = tmp_path / "short"
    shutil.copytree(other_model, short)
    settings = (short / "config.json").read_text()
    (short / "config.json").write_text(
        settings.replace('"max_position_embeddings": 1024', '"max_position_embeddings": 256')
    )
    assert (await client.load(str(short), dtype="float32")).context_length == 256
    await client.close()


async def test_a_cache_that_the_memory_cannot_hold_is_refused_before_it_fills(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available", lambda device: 2 * 2**30)
    client = EngineClient(config(tiny_model, tmp_path, device_kv=3 * 2**30), in_thread=True)
    await client.start()
    with pytest.raises(EngineUnavailable, match="cpu has no 3 GiB for the KV pool: choose a smaller device_kv"):
        await client.wait_ready()
    await client.close()


async def test_no_memory_to_change_a_pool_harms_nobody(
    client: EngineClient, other_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KVPool, "resize", no_memory)
    with pytest.raises(ModelLoadError, match="no room in the cache"):
        await client.load(str(other_model), dtype="float32")
    tokens, _ = await collect(client, ask(None, PROMPT))
    assert len(tokens) == 8


async def test_a_larger_cache_that_the_memory_cannot_hold_is_refused_while_it_runs(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = client.config.cache
    monkeypatch.setattr(memory, "available", lambda device: 2 * 2**30)
    answer = await client.configure(msgspec.structs.replace(before, device_kv=300 * 2**30))
    assert answer.message == "cpu has no 300 GiB for the KV pool: choose a smaller device_kv"
    assert (answer.cache.device_kv, client.config.cache) == (SMALL, before)
    snapshot = await client.snapshot()
    assert (snapshot.budget_bytes, snapshot.pool_bytes) == (SMALL, SMALL)
    monkeypatch.setattr(memory, "available", lambda device: 2 * SMALL)
    assert (await client.configure(msgspec.structs.replace(before, device_kv=2 * SMALL))).message == ""
    assert (await client.snapshot()).pool_bytes == 2 * SMALL


@pytest.mark.parametrize("how", ["torch says so", "nothing says so in time"])
async def test_a_pool_that_cannot_grow_bounds_its_requests_and_is_told_of_once(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """The memory is there when it is asked for, and gone when it is to be taken."""
    small = msgspec.structs.replace(client.config.cache, device_kv=SMALL // 2)
    assert (await client.configure(small)).message == ""
    with monkeypatch.context() as patch:
        if how == "torch says so":
            patch.setattr(KVPool, "resize", no_memory)
        else:
            patch.setattr(memory, "require", no_memory)
        await client.configure(msgspec.structs.replace(small, device_kv=SMALL))
        asked = [ask(None, [5] * 900, "large", 4), ask(None, PROMPT, "small", 4)]
        results = await asyncio.wait_for(asyncio.gather(*(collect(client, request) for request in asked)), 20)
        assert [reasons(ends) for _, ends in results] == [["never_fits"], ["length"]]
        assert results[0][1][0].message == (
            "the prompt has 900 tokens and needs 29 blocks; the pool holds 16 (512 tokens). Shorten the prompt or "
            "close other programs"
        )
        tokens, (end,) = await asyncio.wait_for(collect(client, ask(None, PROMPT, "long", 900)), 60)
        assert (end.reason, end.detail) == ("length", "the pool of 16 blocks (512 tokens) is full")
        assert len([record for record in caplog.records if "stays as it is" in record.message]) == 1
    tokens, ends = await collect(client, ask(None, [5] * 900, "large", 4))
    assert (reasons(ends), len(tokens)) == (["length"], 4), "once there is memory again"


async def test_what_waits_for_a_larger_pool_is_refused_when_it_cannot_grow(
    client: EngineClient, other_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another model runs, its end may make room; it is refused after that."""
    await collect(client, ask(None, [7] * 20, "c", 40))  # two blocks, which it keeps
    other = await client.load(str(other_model), dtype="float32")
    await collect(client, ask(other, [3] * 100, "b", 4))
    monkeypatch.setattr(KVPool, "resize", no_memory)
    asked = [ask(other, [3] * 50, "b", 60), ask(None, [5] * 900, "a", 4), ask(None, [7] * 20, "c", 4)]
    results = await asyncio.wait_for(asyncio.gather(*(collect(client, request) for request in asked)), 60)
    assert [reasons(ends) for _, ends in results] == [["length"], ["never_fits"], ["length"]]
