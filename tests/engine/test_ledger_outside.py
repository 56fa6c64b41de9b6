"""The memory ledger has no line for the rest: what it says of a tier is what the machine says of process and disk.

An engine process is measured from outside while its tiers are filled and emptied with blocks of 4 MiB.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest
import pytest_asyncio

from engine.config import CacheConfig
from tests.engine.tiered import KIB, MIB, Driven, engine, model, settings, until

WIDE: dict[str, Any] = {
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "max_position_embeddings": 1024,
}
BLOCK_MIB, TOKENS = 4, 32  # of a block
SMALL = CacheConfig(device_kv=64 * MIB, host_kv=0, disk_kv=0)
STAGING_MIB, SEGMENT_MIB = 64, 16
SLACK = 0.05

outside = pytest.mark.asyncio(loop_scope="module")
linux = pytest.mark.skipif(sys.platform != "linux", reason="what RSS and du say elsewhere was not looked into")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def process(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Driven]:
    """An engine process that has computed, moved and saved before, so that its libraries have what they need.

    Its allocator gives back at once what computing took: else up to 64 MiB come and go by chance beside the tiers.
    """
    root = tmp_path_factory.mktemp("ledger")
    config = settings(
        model(root / "wide", **WIDE), root, device_kv=64 * MIB, host_kv=16 * MIB, disk_kv=64 * MIB, block_size=TOKENS
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
            patch.setenv(name, str(64 * KIB))
        async with engine(config, in_thread=False) as driven:
            await chats(driven, 2, blocks=16)
            await driven.leave("1", "host")
            await empty(driven)
            yield driven


@pytest_asyncio.fixture(loop_scope="module")
async def wide(process: Driven) -> AsyncIterator[Driven]:
    """That process with nothing in any tier but a small pool."""
    await process.client.configure(SMALL)
    yield process
    await empty(process)


async def chats(driven: Driven, count: int, *, blocks: int, first: int = 0) -> None:
    """So many sessions, named by number, of so many blocks of their own."""
    for number in range(first, first + count):
        ids = [3 + number, *[5 + i % 80 for i in range(blocks * TOKENS - 1)]]
        assert (await driven.turn(ids, str(number), new=1)).sources.computed == len(ids)


async def at_rest(driven: Driven) -> float:
    """MiB of the process in RAM with nothing in its tiers, after a turn: libraries keep some of what one takes."""
    await chats(driven, 1, blocks=15)
    await empty(driven)
    return rss(driven)


async def empty(driven: Driven) -> None:
    """Delete every chat."""
    for session in (await driven.client.snapshot()).sessions:
        await driven.drop(session)


def rss(driven: Driven) -> float:
    """MiB of the process that are in RAM."""
    assert driven.client.pid is not None
    return psutil.Process(driven.client.pid).memory_info().rss / MIB


def du(driven: Driven) -> float:
    """MiB of the folder of blocks, as du says; it complains of what goes while it looks."""
    done = subprocess.run(["du", "-sk", str(driven.client.config.kv_dir)], capture_output=True, text=True, check=False)
    return int(done.stdout.split()[0]) / KIB


def about(mib: float) -> object:
    return pytest.approx(mib, rel=SLACK)


@outside
@linux
async def test_the_pool_takes_what_it_says_and_gives_it_back(wide: Driven) -> None:
    before = await at_rest(wide)
    await wide.client.configure(CacheConfig(device_kv=320 * MIB, host_kv=0, disk_kv=0))
    assert rss(wide) - before == about(256)
    assert (await wide.tier("device")).held_bytes == 320 * MIB
    await chats(wide, 4, blocks=16)
    device = await wide.tier("device")
    assert (device.used_bytes, device.held_bytes, device.blocks) == (256 * MIB, 320 * MIB, 64)
    assert rss(wide) - before == about(256), "all of the pool was counted before it was used"
    await empty(wide)
    assert (await wide.tier("device")).used_bytes == 0
    await wide.client.configure(SMALL)
    assert (await wide.tier("device")).held_bytes == 64 * MIB
    assert abs(rss(wide) - before) < 256 * SLACK


@outside
@linux
async def test_a_pool_that_shrinks_with_what_is_in_it_gives_the_rest_back(wide: Driven) -> None:
    before = await at_rest(wide)
    await wide.client.configure(CacheConfig(device_kv=320 * MIB, host_kv=0, disk_kv=0))
    await chats(wide, 4, blocks=16)
    await wide.client.configure(SMALL)
    device = await wide.tier("device")
    assert device.used_bytes <= device.held_bytes == 64 * MIB
    assert abs(rss(wide) - before) < 256 * SLACK


@outside
@linux
async def test_host_takes_what_it_says_and_gives_it_back(wide: Driven) -> None:
    before = await at_rest(wide)
    await wide.client.configure(CacheConfig(device_kv=64 * MIB, host_kv=256 * MIB, disk_kv=0))
    assert abs(rss(wide) - before) < 256 * SLACK, "a budget alone takes nothing"
    for number in range(4):
        await chats(wide, 1, blocks=16, first=number)
        await wide.leave(str(number), "host")
    host = await wide.tier("host")
    assert (host.used_bytes, host.held_bytes, host.blocks) == (256 * MIB, 256 * MIB, 64)
    assert rss(wide) - before == about(256)
    await wide.leave("0", "none")
    assert rss(wide) - before == about(192)
    await wide.drop("1")
    assert rss(wide) - before == about(128)
    await wide.client.configure(CacheConfig(device_kv=64 * MIB, host_kv=64 * MIB, disk_kv=0, host_low=0.875))
    host = await wide.tier("host")
    assert (host.budget_bytes, host.used_bytes, host.held_bytes) == (64 * MIB, 56 * MIB, 56 * MIB)
    assert abs(rss(wide) - before - 56) < 256 * SLACK
    await empty(wide)
    assert abs(rss(wide) - before) < 256 * SLACK


@outside
@linux
async def test_disk_takes_what_it_says_and_gives_it_back(wide: Driven) -> None:
    before = du(wide)
    await wide.client.configure(CacheConfig(device_kv=64 * MIB, host_kv=0, disk_kv=256 * MIB))
    for number in range(4):
        await chats(wide, 1, blocks=12, first=number)
        await wide.saved()
    disk = await wide.tier("disk")
    assert disk.blocks == 48
    assert disk.used_bytes == disk.held_bytes == 48 * (BLOCK_MIB * MIB + 4096), "the header takes a page"
    assert du(wide) - before == about(192)
    await wide.drop("0")
    assert du(wide) - before == about(144)
    await wide.leave("1", "none")
    await until(lambda: du(wide) - before == about(96))  # files go by a worker, soon after
    await wide.client.configure(CacheConfig(device_kv=64 * MIB, host_kv=0, disk_kv=56 * MIB, disk_low=1.0))
    disk = await wide.tier("disk")
    assert disk.used_bytes == 13 * (BLOCK_MIB * MIB + 4096)
    await until(lambda: du(wide) - before == about(52))
    await empty(wide)
    assert abs(du(wide) - before) < 192 * SLACK


@outside
@linux
async def test_no_budget_is_exceeded_while_chats_come_and_go(wide: Driven) -> None:
    before, on_disk = await at_rest(wide), du(wide)
    budgets = CacheConfig(device_kv=64 * MIB, host_kv=48 * MIB, disk_kv=80 * MIB)
    await wide.client.configure(budgets)
    most = {"ram": 0.0, "disk": 0.0, "host": 0.0}

    def look() -> None:
        most["ram"] = max(most["ram"], rss(wide) - before)
        most["disk"] = max(most["disk"], du(wide) - on_disk)

    async def watch() -> None:
        while True:
            await asyncio.to_thread(look)
            await asyncio.sleep(0.02)

    watching = asyncio.create_task(watch())
    for number in range(30):
        await chats(wide, 1, blocks=3, first=number)
        if number % 3 == 0:
            await wide.leave(str(number), "host")
        if number % 7 == 0:
            await wide.drop(str(number))
        for usage in (await wide.client.snapshot()).tiers:
            assert usage.used_bytes <= usage.budget_bytes and usage.held_bytes <= usage.budget_bytes
        most["host"] = max(most["host"], (await wide.tier("host")).used_bytes / MIB)
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching
    assert most["host"] >= 40, "chats did come to host"
    # Blocks travel through a bounded buffer; a slab that moves its slots may hold a segment more for a moment.
    assert 40 * (1 - SLACK) < most["ram"] <= 48 + STAGING_MIB + SEGMENT_MIB
    assert 68 < most["disk"] <= 80 + 2 * BLOCK_MIB, "du counts what goes and what comes while it looks"
