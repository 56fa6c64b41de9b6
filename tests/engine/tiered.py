"""An engine with all its tiers over a real, tiny and random model: turns through its client, and where they came from.

The models' weights are so large that windows, caps, sinks and positions change the reply; the vocabulary is small.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from engine.cache.holders import SessionRecord
from engine.cache.records import read_record
from engine.client import EngineClient, new_request_id
from engine.config import CacheConfig, EngineConfig
from engine.protocol import CacheEvent, Dropped, Finished, FinishReason, Rejected, Submit, TierUsage, Tokens, Usage
from tests.engine.model.tiny import config_of, save

BLOCK, NEW, CONTEXT = 8, 10, 512  # tokens: of a block, of a reply
KIB, MIB = 2**10, 2**20
PATIENCE_S = 60.0


class Sources(NamedTuple):
    """A prompt's tokens by where they came from."""

    device: int
    host: int
    disk: int
    computed: int


class Turn(NamedTuple):
    """One request to its end. `known` is the conversation so far, all of whose K and V but the last are there."""

    reply: list[int]
    known: list[int]
    sources: Sources
    usage: Usage
    reason: FinishReason


def model(folder: Path, name: str = "llama", **changes: Any) -> Path:
    """A random model as a folder that an engine loads, with a tokenizer of no words."""
    save(config_of(name, **{"max_position_embeddings": CONTEXT, **changes}), folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def settings(model: Path, root: Path, **changes: Any) -> EngineConfig:
    """An engine that loads whatever a tier holds; files are kept under `root`. `changes` may be of its cache too."""
    tiers = {name: changes.pop(name) for name in CacheConfig.__struct_fields__ if name in changes}
    cache = CacheConfig(**{"device_kv": 2 * MIB, "host_kv": 2 * MIB, "disk_kv": 64 * MIB, **tiers})
    usual = {"device": "cpu", "dtype": "float32", "block_size": BLOCK, "force": "load", "kv_dir": str(root / "kv")}
    return EngineConfig(model=str(model), cache_dir=str(root / "models"), cache=cache, **{**usual, **changes})


class Driven:
    """An engine as its client sees it. `told` is the log of its cache."""

    def __init__(self, config: EngineConfig, *, in_thread: bool = True) -> None:
        self.client = EngineClient(config, in_thread=in_thread)
        self.told: list[CacheEvent] = []
        self.client.on_cache_log = lambda log: self.told.extend(log.events)
        self._used: dict[str, float] = {}

    async def turn(self, ids: list[int], session: str = "s", new: int = NEW, **fields: Any) -> Turn:
        """Read `ids` and write `new` tokens."""
        self._used[session] = time.time()
        request = Submit(
            request_id=new_request_id(), session_id=session, token_ids=ids, max_tokens=new, **fields
        )  # fmt: skip
        reply: list[int] = []
        async for event in self.client.stream(request):
            if isinstance(event, Tokens):
                reply += event.token_ids
            assert not isinstance(event, Rejected), event
            if isinstance(event, Finished):
                end = event
        usage = end.usage
        found = Sources(usage.device_tokens, usage.host_tokens, usage.disk_tokens, usage.computed_tokens)
        assert sum(found) == usage.prompt_tokens
        assert usage.prompt_tokens == len(ids) or end.reason == "cancelled"
        return Turn(reply, [*ids, *reply], found, usage, end.reason)

    async def saved(self) -> None:
        """Wait until the last turn of every session is on disk, and noted as its own."""
        folder = Path(str(self.client.config.kv_dir)) / "sessions"

        def noted() -> dict[str, float]:
            records = [read_record(path, SessionRecord) for path in folder.glob("[!.]*.msgpack")]
            return {record.session_id: record.used_at for record in records}

        await until(lambda: all(noted().get(name, 0.0) >= used for name, used in self._used.items()))

    async def running(self) -> None:
        """Wait until a request runs."""
        while not (await self.client.snapshot()).running:
            pass

    async def drop(self, session: str) -> Dropped:
        """Delete a chat."""
        self._used.pop(session, None)
        return await self.client.drop(session)

    async def tier(self, name: str) -> TierUsage:
        """The ledger's line of a tier."""
        return next(usage for usage in (await self.client.snapshot()).tiers if usage.tier == name)

    async def leave(self, session: str, tier: str) -> None:
        """Have a session's blocks lie in this tier alone: "device", "host", "disk", or "none"."""
        if tier == "disk":
            await self.saved()
        if tier != "device":
            await self.client.demote(session, None if tier == "none" else tier)  # type: ignore[arg-type]


@asynccontextmanager
async def engine(config: EngineConfig, *, in_thread: bool = True) -> AsyncIterator[Driven]:
    """An engine that is ready; its books are in order when it ends."""
    driven = Driven(config, in_thread=in_thread)
    await driven.client.start()
    try:
        await driven.client.wait_ready()
        yield driven
        assert (await driven.client.check()).violations == []
    finally:
        await driven.client.close()


async def until(holds: Callable[[], bool]) -> None:
    """Wait for something that another thread or process brings about."""
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, "it does not come"
        await asyncio.sleep(0.01)


def greedy(model: Path) -> Callable[[list[int]], list[int]]:
    """The reply of transformers' own eager model, which knows no cache and none of our code."""
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()

    @torch.inference_mode()
    def reply(ids: list[int], new: int = NEW) -> list[int]:
        known = list(ids)
        for _ in range(new):
            known.append(int(module(input_ids=torch.tensor([known]), use_cache=False).logits[0, -1].argmax()))
        return known[len(ids) :]

    return reply
