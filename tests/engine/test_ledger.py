"""The memory ledger has no line for the rest: what it says of a tier is what the machine says of process and disk.

The first part measures an engine process from outside, with blocks of 4 MiB; the second compares the ledger's lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from engine.cache.disk import BlockFiles
from engine.config import CacheConfig
from engine.protocol import Residency, TierUsage
from tests.engine.model.tiny import prompt
from tests.engine.tiered import KIB, MIB, NEW, Driven, Sources, engine, model, settings

WIDE = {
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


async def tier(driven: Driven, name: str) -> TierUsage:
    return next(usage for usage in (await driven.client.snapshot()).tiers if usage.tier == name)


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


# --- from outside -----------------------------------------------------------------------------------------------------


@outside
@linux
async def test_the_pool_takes_what_it_says_and_gives_it_back(wide: Driven) -> None:
    before = await at_rest(wide)
    await wide.client.configure(CacheConfig(device_kv=320 * MIB, host_kv=0, disk_kv=0))
    assert rss(wide) - before == about(256)
    assert (await tier(wide, "device")).held_bytes == 320 * MIB
    await chats(wide, 4, blocks=16)
    device = await tier(wide, "device")
    assert (device.used_bytes, device.held_bytes, device.blocks) == (256 * MIB, 320 * MIB, 64)
    assert rss(wide) - before == about(256), "all of the pool was counted before it was used"
    await empty(wide)
    assert (await tier(wide, "device")).used_bytes == 0
    await wide.client.configure(SMALL)
    assert (await tier(wide, "device")).held_bytes == 64 * MIB
    assert abs(rss(wide) - before) < 256 * SLACK


@outside
@linux
async def test_a_pool_that_shrinks_with_what_is_in_it_gives_the_rest_back(wide: Driven) -> None:
    before = await at_rest(wide)
    await wide.client.configure(CacheConfig(device_kv=320 * MIB, host_kv=0, disk_kv=0))
    await chats(wide, 4, blocks=16)
    await wide.client.configure(SMALL)
    device = await tier(wide, "device")
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
    host = await tier(wide, "host")
    assert (host.used_bytes, host.held_bytes, host.blocks) == (256 * MIB, 256 * MIB, 64)
    assert rss(wide) - before == about(256)
    await wide.leave("0", "none")
    assert rss(wide) - before == about(192)
    await wide.drop("1")
    assert rss(wide) - before == about(128)
    await wide.client.configure(CacheConfig(device_kv=64 * MIB, host_kv=64 * MIB, disk_kv=0, host_low=0.875))
    host = await tier(wide, "host")
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
    disk = await tier(wide, "disk")
    assert disk.blocks == 48
    assert disk.used_bytes == disk.held_bytes == 48 * (BLOCK_MIB * MIB + 4096), "the header takes a page"
    assert du(wide) - before == about(192)
    await wide.drop("0")
    assert du(wide) - before == about(144)
    await wide.leave("1", "none")
    assert du(wide) - before == about(96)
    await wide.client.configure(CacheConfig(device_kv=64 * MIB, host_kv=0, disk_kv=56 * MIB, disk_low=1.0))
    disk = await tier(wide, "disk")
    assert disk.used_bytes == 13 * (BLOCK_MIB * MIB + 4096)
    assert du(wide) - before == about(52)
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
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    for number in range(30):
        await chats(wide, 1, blocks=3, first=number)
        if number % 3 == 0:
            await wide.leave(str(number), "host")
        if number % 7 == 0:
            await wide.drop(str(number))
        for usage in (await wide.client.snapshot()).tiers:
            assert usage.used_bytes <= usage.budget_bytes and usage.held_bytes <= usage.budget_bytes
        most["host"] = max(most["host"], (await tier(wide, "host")).used_bytes / MIB)
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching
    assert most["host"] >= 40, "chats did come to host"
    # Blocks travel through a bounded buffer; a slab that moves its slots may hold a segment more for a moment.
    assert 40 * (1 - SLACK) < most["ram"] <= 48 + STAGING_MIB + SEGMENT_MIB
    assert 68 < most["disk"] <= 80 + 2 * BLOCK_MIB, "du counts what goes and what comes while it looks"


# --- line by line -----------------------------------------------------------------------------------------------------

PROMPT = prompt(45)  # six blocks of 3 KiB
ALICE, BOB = b"a" * 16, b"b" * 16


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("models") / "llama")


async def test_nothing_is_nothing(llama: Path, tmp_path: Path) -> None:
    async with engine(settings(llama, tmp_path)) as driven:
        snapshot = await driven.client.snapshot()
        assert snapshot.sessions == {}
        assert [(tier.tier, tier.used_bytes, tier.pinned_bytes, tier.blocks) for tier in snapshot.tiers] == [
            ("device", 0, 0, 0),
            ("host", 0, 0, 0),
            ("disk", 0, 0, 0),
        ]
        assert (snapshot.staging_bytes, snapshot.saving_blocks, snapshot.loading_blocks) == (0, 0, 0)
        assert (await driven.client.pin("nobody", True)).pinned
        assert (await driven.client.snapshot()).sessions["nobody"].pinned
        assert (await driven.client.demote("nobody", None)).bytes == 0
        assert (await driven.client.estimate([1], session_id="nobody")).computed_tokens == 1
        assert (await driven.drop("nobody")).bytes == 0
        assert (await driven.client.snapshot()).sessions == {}


@pytest.mark.parametrize("kv_dir", [True, False])
async def test_budgets_of_nothing_hold_nothing(llama: Path, tmp_path: Path, kv_dir: bool) -> None:
    config = settings(llama, tmp_path, host_kv=0, disk_kv=0, **({} if kv_dir else {"kv_dir": None}))
    async with engine(config) as driven:
        turn = await driven.turn(PROMPT)
        await driven.client.demote("s", "disk")
        snapshot = await driven.client.snapshot()
        assert [tier.budget_bytes for tier in snapshot.tiers] == [2 * MIB, 0, 0]
        assert [tier.used_bytes for tier in snapshot.tiers] == [0, 0, 0]
        left = snapshot.sessions["s"]
        assert (left.device_tokens, left.host_tokens, left.disk_tokens) == (0, 0, 0)
        assert left.evicted_tokens == len(PROMPT) + NEW - 1
        again = await driven.turn([*turn.known, 3])
        assert again.sources == Sources(0, 0, 0, len(turn.known) + 1)
        assert again.usage.miss is not None
        assert again.usage.miss.cause == "evicted"
        assert list((tmp_path / "kv").rglob("*.kv")) == []


@pytest.mark.parametrize(
    ("name", "kept", "blocks", "each"),
    [
        ("device", 3 * KIB, 7, 6),
        ("host", 3 * KIB, 2, 1),  # what others hold too is not demoted for one of them
        ("disk", 8 * KIB, 7, 6),  # a page for the header, and one that the image fills to three quarters
    ],
)
async def test_what_is_shared_counts_once_and_for_each(
    llama: Path, tmp_path: Path, name: str, kept: int, blocks: int, each: int
) -> None:
    async with engine(settings(llama, tmp_path)) as driven:
        for session, salt in (("alice", ALICE), ("bob", BOB)):
            await driven.turn(PROMPT, session, new=1, salt=salt, shared_len=40)
        await driven.saved()
        if name == "host":
            for session in ("alice", "bob"):
                await driven.leave(session, "host")
        usage, sessions = await tier(driven, name), (await driven.client.snapshot()).sessions
        assert (usage.blocks, usage.used_bytes) == (blocks, blocks * kept)
        assert [getattr(sessions[who], f"{name}_bytes") for who in ("alice", "bob")] == [each * kept] * 2
        await driven.client.pin("alice", True)
        assert (await tier(driven, name)).pinned_bytes == each * kept


async def test_a_sessions_tokens_add_up_wherever_they_are(llama: Path, tmp_path: Path) -> None:
    async with engine(settings(llama, tmp_path, host_kv=9 * KIB, host_low=1.0)) as driven:
        await driven.turn(PROMPT, new=1)
        await driven.leave("s", "device")
        await driven.saved()
        total = len(PROMPT)

        async def where() -> Residency:
            return (await driven.client.snapshot()).sessions["s"]

        now = await where()
        assert (now.device_tokens, now.host_tokens, now.disk_tokens, now.evicted_tokens) == (total, 0, 0, 0)
        assert (now.device_bytes, now.host_bytes, now.disk_bytes) == (18 * KIB, 0, 48 * KIB)
        await driven.client.demote("s", "host")
        now = await where()
        assert (now.device_tokens, now.host_tokens, now.disk_tokens, now.evicted_tokens) == (0, 24, 21, 0)
        assert (now.device_bytes, now.host_bytes, now.disk_bytes) == (0, 9 * KIB, 48 * KIB), "the chain's head stays"
        await driven.client.demote("s", None)
        now = await where()
        assert (now.device_tokens, now.host_tokens, now.disk_tokens, now.evicted_tokens) == (0, 0, 0, total)


async def test_files_never_take_more_than_their_budget(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget, write, alone, most = 100 * KIB, BlockFiles.write, threading.Lock(), [0]

    def measured(files: BlockFiles, *args: object) -> int:
        with alone:
            written = write(files, *args)  # type: ignore[arg-type]
            there = [path for path in files.root.rglob("*") if path.suffix == ".kv" or path.name.startswith(".tmp-")]
            most.append(sum(path.stat().st_size for path in there if path.exists()))
        return written

    monkeypatch.setattr(BlockFiles, "write", measured)
    async with engine(settings(llama, tmp_path, disk_kv=budget)) as driven:
        for number in range(10):
            await driven.turn([3 + number, *PROMPT], str(number), new=1)
            await driven.saved()
    assert budget * 0.8 < max(most) <= budget
