"""Memory that runs out in the middle of a step: its requests are told so, the others go on, and later it works."""

from __future__ import annotations

import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from engine.client import EngineClient, new_request_id
from engine.config import CacheConfig, EngineConfig
from engine.protocol import Finished, Rejected, Submit, Tokens

PROMPT = [(7 * i + 3) % 250 for i in range(500)]
MODEST = [1, 2, 3]


@pytest.fixture(scope="module")
def wide_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer that needs 32 MiB at a time for 512 tokens, which no allocator keeps in store."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("wide") / "wide-llama"
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=64,
        intermediate_size=16_896,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for file in tiny_model.glob("*token*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture
async def client(wide_model: Path, tmp_path: Path) -> AsyncIterator[EngineClient]:
    config = EngineConfig(
        model=str(wide_model),
        cache_dir=str(tmp_path),
        device="cpu",
        dtype="float32",
        cache=CacheConfig(device_kv=32 * 2**20),
        threads=1,
    )
    client = EngineClient(config)
    await client.start()
    await client.wait_ready()
    yield client
    await client.close()


@contextmanager
def no_more_memory(pid: int, spare: int = 8 * 2**20) -> Iterator[None]:
    """A process that gets no more than `spare` bytes of address space beside what it has."""
    process = psutil.Process(pid)
    before = process.rlimit(psutil.RLIMIT_AS)
    process.rlimit(psutil.RLIMIT_AS, (process.memory_info().vms + spare, before[1]))
    try:
        yield
    finally:
        process.rlimit(psutil.RLIMIT_AS, before)


async def ask(client: EngineClient, prompt: list[int], session: str) -> tuple[list[int], Finished | Rejected]:
    request = Submit(request_id=new_request_id(), session_id=session, token_ids=prompt, max_tokens=6)
    tokens: list[int] = []
    async for event in client.stream(request):
        if isinstance(event, Tokens):
            tokens += event.token_ids
        elif isinstance(event, Finished | Rejected):
            end = event
    return tokens, end


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only there a running process can be limited")
async def test_a_step_without_memory_ends_its_requests_alone(client: EngineClient) -> None:
    expected, end = await ask(client, PROMPT, "first")
    assert isinstance(end, Finished)
    await client.drop("first")
    pid = client.pid
    assert pid is not None
    with no_more_memory(pid):
        tokens, end = await ask(client, PROMPT, "second")
        assert tokens == []
        assert isinstance(end, Rejected)
        assert end.retryable
        assert end.message.startswith("there was not enough memory to compute this reply.")
        modest, end = await ask(client, MODEST, "third")
        assert (len(modest), isinstance(end, Finished)) == (6, True)
        assert (await client.check()).violations == []
    assert (await ask(client, PROMPT, "second"))[0] == expected
    assert client.pid == pid
    assert (await client.check()).violations == []
