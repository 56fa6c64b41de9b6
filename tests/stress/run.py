"""One run: people at their chats for a while, a look at the laws now and then, rest, a restart, and what it came to."""

from __future__ import annotations

import asyncio
import math
import os
import random
import statistics
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import psutil

from engine.client import EngineClient
from engine.config import CacheConfig, EngineConfig
from tests.stress.chats import Chats
from tests.stress.model import BLOCK, BYTES_PER_TOKEN, Judge, make
from tests.stress.operations import Counts, LawBrokenError, Operations

CHATS, TOKENS = 200, 256  # and about how many tokens each has after a while
SHARE = 0.1  # of the working set that each tier holds
CHECK_EVERY = 50  # operations
LIMIT_S = 60.0  # that an operation may take: what takes longer hangs
WATCH_S = 0.2
WARM, CALM = (
    0.5,
    0.1,
)  # of the time: memory is to be flat from then on; before both ends of that the budgets are at rest
GROWTH = 0.05
# glibc keeps what was freed below 32 MiB, and the pools here are that small; real ones go back to the machine.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
REMEMBERED = 40  # operations, told when something breaks
AFTER_RESTART = 20  # chats that go on then


@dataclass(frozen=True)
class Settings:
    """How long and how hard."""

    seconds: float = 300.0
    seed: int = 0
    people: int = 24
    chats: int = CHATS


@dataclass(frozen=True)
class Memory:
    """The engine process's bytes in memory, and those of them that neither pool nor host tier accounts for."""

    total: float
    rest: float


@dataclass
class Outcome:
    """What it came to; memory in the middle and at the end."""

    counts: Counts
    seconds: float
    steps: int
    working_bytes: int
    budget_bytes: int
    warm: Memory
    end: Memory
    restarted_from_disk: int  # tokens

    @property
    def growth(self) -> float:
        """By how much what no tier accounts for has grown since everything was warm, in parts of all memory then."""
        return (self.end.rest - self.warm.rest) / self.warm.total


class Stress:
    """One engine process and those who use it. `recent` are the operations that were begun last."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings = settings
        self.recent: deque[str] = deque(maxlen=REMEMBERED)
        model = make(folder)
        self._tier = int(settings.chats * TOKENS * BYTES_PER_TOKEN * SHARE)
        self._cache = CacheConfig(device_kv=self._tier, host_kv=self._tier, disk_kv=self._tier)
        self._client = EngineClient(
            EngineConfig(
                cache_dir=str(folder / "models"),
                model=str(model),
                device="cpu",
                dtype="float32",
                cache=self._cache,
                kv_dir=str(folder / "kv"),
                force="load",
                block_size=BLOCK,
                threads=1,
                max_batch_tokens=256,
            )
        )
        self._chats = Chats(settings.chats, random.Random(settings.seed))
        self._operations = Operations(self._client, self._chats, Judge(model), self._cache)
        self._memory: list[tuple[float, int, int]] = []
        self._begun = 0

    async def run(self) -> Outcome:
        """Do it. Raises `LawBrokenError` at the first law that does not hold."""
        try:
            await self._start()
            return await self._run()
        finally:
            await self._client.close()

    async def _start(self) -> None:
        with patch.dict(os.environ, MALLOC):
            await self._client.start()
        await self._client.wait_ready()

    async def _run(self) -> Outcome:
        began = time.monotonic()
        until = began + self.settings.seconds
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch(began, until))
                for number in range(self.settings.people):
                    group.create_task(self._person(number, began, until))
        except* LawBrokenError as broken:
            raise broken.exceptions[0] from None
        await self._operation("configure", self._client.configure(self._cache))
        steps = await self._rest()
        working = self._chats.tokens * BYTES_PER_TOKEN
        warm, end = self._settled(WARM - CALM / 2, WARM), self._settled(1 - CALM / 2, math.inf)
        from_disk = await self._restart()
        return Outcome(
            counts=self._operations.counts,
            seconds=time.monotonic() - began,
            steps=steps,
            working_bytes=working,
            budget_bytes=self._tier,
            warm=warm,
            end=end,
            restarted_from_disk=from_disk,
        )

    def _calm(self, at: float) -> bool:
        """Whether memory is measured now, that many seconds after the start."""
        share = at / self.settings.seconds
        return WARM - CALM <= share < WARM or share >= 1 - CALM

    async def _person(self, number: int, began: float, until: float) -> None:
        rng = random.Random(f"{self.settings.seed}/{number}")
        calm = False
        while (now := time.monotonic()) < until:
            name = self._operations.choose(rng)
            if self._calm(now - began):
                if not calm and number == 0:
                    await self._operation("the first budgets again", self._client.configure(self._cache))
                calm = True
                if name == "configure":
                    continue
            else:
                calm = False
            chat = self._chats.choose(rng)
            self._operations.counts.operations[name] += 1
            self._begun += 1
            check = self._begun % CHECK_EVERY == 0
            await self._operation(f"{name} of {chat.name}", self._operations.every[name][1](chat, rng))
            if check:
                await self._operation("check", self._check())

    async def _operation(self, name: str, work: object) -> None:
        self.recent.append(name)
        try:
            async with asyncio.timeout(LIMIT_S):
                await work  # type: ignore[misc]
        except TimeoutError:
            raise LawBrokenError(f"{name} hangs: it had not ended after {LIMIT_S:.0f} s") from None

    async def _check(self) -> None:
        self._operations.counts.operations["check"] += 1
        if violations := (await self._client.check()).violations:
            raise LawBrokenError(f"violated: {'; '.join(violations)}")
        if failed := self._operations.counts.failed:
            raise LawBrokenError(f"nobody has touched the files, and {'; '.join(failed)}")

    async def _watch(self, began: float, until: float) -> None:
        """Note the memory that no tier accounts for, now and then; the engine must not end."""
        process = psutil.Process(self._client.pid)
        while time.monotonic() < until:
            await asyncio.sleep(WATCH_S)
            if not process.is_running() or self._client.state.phase != "ready":
                raise LawBrokenError(f"the engine is not ready any more: {self._client.state}")
            snapshot = await self._client.snapshot()
            in_host = sum(tier.used_bytes for tier in snapshot.tiers if tier.tier == "host")
            total = process.memory_info().rss
            self._memory.append((time.monotonic() - began, total, total - snapshot.pool_bytes - in_host))

    async def _rest(self) -> int:
        """Wait until nothing moves any more: then nothing may be held; steps since the start."""
        until = time.monotonic() + LIMIT_S
        while True:
            snapshot = await self._client.snapshot()
            busy = snapshot.running or snapshot.waiting or snapshot.saving_blocks or snapshot.loading_blocks
            if not busy and not snapshot.leased_blocks:
                break
            if time.monotonic() > until:
                raise LawBrokenError(f"it does not come to rest: {snapshot}")
            await asyncio.sleep(0.1)
        await self._check()
        for usage in snapshot.tiers:
            if usage.used_bytes > usage.budget_bytes:
                raise LawBrokenError(
                    f"{usage.tier} holds {usage.used_bytes} bytes, and its budget is {usage.budget_bytes}"
                )
        return snapshot.steps

    async def _restart(self) -> int:
        """Start another engine on the same files, and have some chats go on; tokens that came from disk."""
        await self._client.close()
        await self._start()
        rng, tokens = random.Random(self.settings.seed), self._operations.counts.tokens
        before = tokens["disk"]
        for chat in rng.sample(self._chats.all, min(AFTER_RESTART, len(self._chats.all))):
            await self._operation(f"turn of {chat.name} after a restart", self._operations.turn(chat, rng))
        await self._check()
        return tokens["disk"] - before

    def _settled(self, least: float, most: float) -> Memory:
        """The medians between two shares of the time."""
        these = [(total, rest) for at, total, rest in self._memory if least <= at / self.settings.seconds < most]
        return Memory(statistics.median(total for total, _ in these), statistics.median(rest for _, rest in these))
