"""Several models in one engine: each answers as it would alone, their caches share one budget, weights come and go."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.client import EngineClient
from engine.errors import EngineUnavailable, ModelLoadError
from engine.model import memory
from engine.protocol import Capabilities, Rejected, Submit, Tokens
from engine.shares import Holding, split
from tests.engine.test_client import collect, config, submit

MIB = 2**20
PROMPT = list(range(3, 103))


@pytest.fixture(scope="session")
def other_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another random model, with K and V of another shape."""
    folder = tmp_path_factory.mktemp("other") / "other-llama"
    shutil.copytree(tiny_model, folder)
    torch.manual_seed(5)
    settings = AutoConfig.from_pretrained(tiny_model)
    settings.num_hidden_layers, settings.num_key_value_heads = 3, 4
    settings.tie_word_embeddings = False
    module = AutoModelForCausalLM.from_config(settings)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)  # as it comes, a random model only repeats the last token
    module.save_pretrained(folder)
    return folder


@pytest.fixture
async def client(tiny_model: Path, tmp_path: Path) -> AsyncIterator[EngineClient]:
    client = EngineClient(config(tiny_model, tmp_path, device_kv=2 * MIB), in_thread=True)
    await client.start()
    await client.wait_ready()
    yield client
    if client.state.phase == "ready":
        assert (await client.check()).violations == []
    await client.close()


def ask(model: Capabilities | None, ids: list[int], session: str = "s", new: int = 8) -> Submit:
    request = submit(ids, new, model=model.fingerprint if model else "")
    return Submit(**{name: getattr(request, name) for name in request.__struct_fields__} | {"session_id": session})


async def alone(model: Path, tmp_path: Path, ids: list[int], new: int = 8) -> list[int]:
    client = EngineClient(config(model, tmp_path), in_thread=True)
    await client.start()
    await client.wait_ready()
    tokens, _ = await collect(client, submit(ids, new))
    await client.close()
    return tokens


async def weights(client: EngineClient) -> dict[str, bool]:
    return {model.name: model.weights_loaded for model in (await client.snapshot()).models}


async def test_each_answers_as_it_would_alone_and_finds_its_cache_again(
    client: EngineClient, tiny_model: Path, other_model: Path, tmp_path: Path
) -> None:
    first, (end,) = await collect(client, ask(None, PROMPT))
    assert first == await alone(tiny_model, tmp_path, PROMPT)
    other = await client.load(str(other_model), dtype="float32")
    assert (other.model_name, client.serves(other.fingerprint)) == ("other-llama", True)
    second, (end,) = await collect(client, ask(other, PROMPT))
    assert second == await alone(other_model, tmp_path, PROMPT) != first
    assert end.usage.device_tokens == 0, "one model's cache is not the other's"
    again, (end,) = await collect(client, ask(None, [*PROMPT, *first, 9]))
    assert end.usage.device_tokens == len(PROMPT) + len(first) - 1
    assert again == await alone(tiny_model, tmp_path, [*PROMPT, *first, 9])
    _, (end,) = await collect(client, ask(other, [*PROMPT, *second, 9]))
    assert end.usage.device_tokens == len(PROMPT) + len(second) - 1


async def test_their_pools_share_one_budget(client: EngineClient, other_model: Path) -> None:
    await collect(client, ask(None, PROMPT))
    before = await client.snapshot()
    assert before.pool_bytes <= before.budget_bytes == 2 * MIB
    other = await client.load(str(other_model), dtype="float32")
    shared = await client.snapshot()
    assert shared.pool_bytes <= shared.budget_bytes == 2 * MIB
    assert shared.used_bytes == before.used_bytes, "what was warm stays warm"
    newcomer = next(model for model in shared.models if model.fingerprint == other.fingerprint)
    assert newcomer.total_blocks * newcomer.block_bytes >= MIB
    for number in range(40):  # more than half of the budget holds
        await collect(client, ask(other, [number + 1] * 90, f"other-{number}", 1))
    after = await client.snapshot()
    assert (await client.estimate([*PROMPT, 1])).device_tokens == len(PROMPT), "full pools evict their own"
    assert after.pool_bytes <= 2 * MIB
    assert after.evicted_blocks > 0


async def test_who_comes_back_gets_half_of_the_budget_again(client: EngineClient, other_model: Path) -> None:
    other = await client.load(str(other_model), dtype="float32")
    pools = {model.name: model.total_blocks * model.block_bytes for model in (await client.snapshot()).models}
    assert pools["tiny-llama"] == 0, "it had nothing to keep"
    assert pools["other-llama"] == 2 * MIB - 2 * MIB % (other.kv_bytes_per_token * other.block_size)
    tokens, _ = await collect(client, ask(None, PROMPT))
    assert len(tokens) == 8
    pools = {model.name: model.total_blocks * model.block_bytes for model in (await client.snapshot()).models}
    assert pools == {"tiny-llama": 2 * MIB, "other-llama": 0}


async def test_a_load_leaves_a_running_reply_as_it_is(
    client: EngineClient, tiny_model: Path, other_model: Path, tmp_path: Path
) -> None:
    tokens: list[int] = []
    loading: asyncio.Task[Capabilities] | None = None
    async for event in client.stream(ask(None, PROMPT, new=300)):
        if isinstance(event, Tokens):
            tokens += event.token_ids
            loading = loading or asyncio.create_task(client.load(str(other_model), dtype="float32"))
    assert loading is not None
    other = await loading
    assert tokens == await alone(tiny_model, tmp_path, PROMPT, 300)
    one, two = await asyncio.gather(collect(client, ask(None, PROMPT)), collect(client, ask(other, PROMPT)))
    assert one[0] == tokens[:8]
    assert two[0] == await alone(other_model, tmp_path, PROMPT)


async def test_weights_give_way_and_the_cache_stays(
    client: EngineClient, other_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = await collect(client, ask(None, PROMPT))
    free = iter([0])  # what is free at the first look, and then as much as there is
    real = memory.available
    monkeypatch.setattr(memory, "available", lambda device: real(device) if next(free, None) is None else 0)
    other = await client.load(str(other_model), dtype="float32")
    assert await weights(client) == {"tiny-llama": False, "other-llama": True}
    free = iter([0])
    _, (end,) = await collect(client, ask(None, [*PROMPT, *first, 9]))
    assert end.usage.device_tokens == len(PROMPT) + len(first) - 1
    assert await weights(client) == {"tiny-llama": True, "other-llama": False}
    tokens, _ = await collect(client, ask(other, PROMPT))
    assert len(tokens) == 8


async def test_a_model_too_large_for_the_memory_is_refused_with_the_numbers(
    client: EngineClient, other_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available", lambda device: 10 * MIB)
    with pytest.raises(ModelLoadError, match=r"other-llama needs 2\d\d MiB of memory .* 10 MiB are free on cpu"):
        await client.load(str(other_model), dtype="float32")
    monkeypatch.undo()
    tokens, _ = await collect(client, ask(None, PROMPT))
    assert len(tokens) == 8


async def test_what_cannot_be_loaded_is_named_and_harms_nobody(client: EngineClient, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="nowhere"):
        await client.load(str(tmp_path / "nowhere"), dtype="float32")
    assert client.state.phase == "ready"
    assert client.state.loads == ()
    tokens, _ = await collect(client, ask(None, PROMPT))
    assert len(tokens) == 8


async def test_the_same_contents_are_the_same_model(client: EngineClient, tiny_model: Path, tmp_path: Path) -> None:
    first, _ = await collect(client, ask(None, PROMPT))
    copy = tmp_path / "copy"
    shutil.copytree(tiny_model, copy)
    served = await client.load(str(copy), dtype="float32")
    assert client.state.capabilities is not None
    assert served.fingerprint == client.state.capabilities.fingerprint
    assert len((await client.snapshot()).models) == 1
    _, (end,) = await collect(client, ask(served, [*PROMPT, *first, 9]))
    assert end.usage.device_tokens == len(PROMPT) + len(first) - 1


async def test_new_weights_under_the_old_name_are_another_model(
    client: EngineClient, tiny_model: Path, other_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    old = await client.load(str(folder), dtype="float32")
    first, _ = await collect(client, ask(old, PROMPT))
    shutil.rmtree(folder)
    shutil.copytree(other_model, folder)
    new = await client.load(str(folder), dtype="float32")
    assert new.fingerprint != old.fingerprint
    second, (end,) = await collect(client, ask(new, PROMPT))
    assert end.usage.device_tokens == 0
    assert second == await alone(other_model, tmp_path, PROMPT) != first
    settings = folder / "config.json"
    settings.write_text(settings.read_text().replace('"rope_theta": 10000.0', '"rope_theta": 500000.0'))
    changed = await client.load(str(folder), dtype="float32")
    assert changed.fingerprint not in (old.fingerprint, new.fingerprint), "the same weights, other positions"


async def test_a_model_that_is_not_served_is_refused(client: EngineClient) -> None:
    request = submit(PROMPT, model="0" * 64)
    _, (end,) = await collect(client, request)
    assert isinstance(end, Rejected)
    assert (end.code, end.retryable) == ("no_model", True)


async def test_how_far_a_load_is_can_be_watched(client: EngineClient, other_model: Path) -> None:
    stages: list[str] = []

    async def watch() -> None:
        async for state in client.watch():
            stages.extend(load.stage for load in state.loads)

    watching = asyncio.create_task(watch())
    await client.load(str(other_model), dtype="float32")
    watching.cancel()
    assert "loading weights" in stages


async def test_a_restarted_engine_serves_what_it_started_with(
    tiny_model: Path, other_model: Path, tmp_path: Path
) -> None:
    client = EngineClient(config(tiny_model, tmp_path))
    await client.start()
    first = await client.wait_ready()
    other = await client.load(str(other_model), dtype="float32")
    assert client.serves(first.fingerprint) and client.serves(other.fingerprint)
    loading = asyncio.create_task(client.load(str(other_model), dtype="float32"))
    await asyncio.sleep(0)
    assert client.pid is not None

    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(EngineUnavailable):
        await loading
    await client.wait_ready()
    assert client.serves(first.fingerprint)
    assert not client.serves(other.fingerprint)
    await client.close()


async def test_a_dropped_session_leaves_every_model(client: EngineClient, other_model: Path) -> None:
    await collect(client, ask(None, PROMPT))
    other = await client.load(str(other_model), dtype="float32")
    await collect(client, ask(other, PROMPT))
    assert (await client.snapshot()).sessions["s"].device_tokens == 2 * (len(PROMPT) + 7)
    dropped = await client.drop("s")
    assert dropped.bytes > 0
    after = await client.snapshot()
    assert (after.sessions, after.used_bytes) == ({}, 0)


async def test_auto_means_the_same_dtype_at_the_next_start(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.model import loading
    from engine.model.choices import recorded_dtype

    cache = tmp_path / "models"
    monkeypatch.setattr(loading, "_cpu_multiplies_bf16", lambda: True)
    assert recorded_dtype(cache, "tiny", "cpu", "auto") == "bfloat16"
    monkeypatch.setattr(loading, "_cpu_multiplies_bf16", lambda: False)
    assert recorded_dtype(cache, "tiny", "cpu", "auto") == "bfloat16"
    assert recorded_dtype(cache, "other", "cpu", "auto") == "float32"
    assert recorded_dtype(cache, "tiny", "cpu", "float32") == "float32"
    assert recorded_dtype(cache, "tiny", "cpu", "auto") == "bfloat16"
    (cache / "dtypes.json").write_text("[]")
    assert recorded_dtype(cache, "tiny", "cpu", "auto") == "float32"


@pytest.mark.parametrize(
    ("budget", "others", "kept", "left"),
    [
        (100, [], [], 100),
        (100, [(20, 0)], [20], 80),
        (100, [(80, 0)], [50], 50),
        (100, [(30, 0), (40, 0), (10, 0)], [30, 20, 0], 50),
        (100, [(80, 70), (10, 5)], [70, 5], 25),
        (100, [(90, 90), (20, 20)], [90, 20], 0),
        (0, [(0, 0)], [0], 0),
    ],
)
def test_shares(budget: int, others: list[tuple[int, int]], kept: list[int], left: int) -> None:
    assert split(budget, [Holding(*other) for other in others]) == (kept, left)
