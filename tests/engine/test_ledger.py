"""The lines of the memory ledger add up by tier and session: what is shared, what is nothing, what is on its way."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from engine.cache.disk import BlockFiles
from engine.protocol import Residency
from tests.engine.model.tiny import prompt
from tests.engine.tiered import KIB, MIB, NEW, PATIENCE_S, Sources, engine, model, settings

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
        usage, sessions = await driven.tier(name), (await driven.client.snapshot()).sessions
        assert (usage.blocks, usage.used_bytes) == (blocks, blocks * kept)
        assert [getattr(sessions[who], f"{name}_bytes") for who in ("alice", "bob")] == [each * kept] * 2
        await driven.client.pin("alice", True)
        assert (await driven.tier(name)).pinned_bytes == each * kept


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


@pytest.mark.parametrize(
    "delete_s",
    [
        0.0,
        0.1,
    ],
)
async def test_files_never_take_more_than_their_budget(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delete_s: float
) -> None:
    budget, alone, most = 100 * KIB, threading.Lock(), [0]
    write, delete = BlockFiles.write, BlockFiles.delete

    def measured(files: BlockFiles, *args: object) -> int:
        with alone:
            written = write(files, *args)  # type: ignore[arg-type]
            there = [path for path in files.root.rglob("*") if path.suffix == ".kv" or path.name.startswith(".tmp-")]
            most.append(sum(path.stat().st_size for path in there if path.exists()))
        return written

    def slow(files: BlockFiles, *args: object) -> None:
        time.sleep(delete_s)
        delete(files, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(BlockFiles, "write", measured)
    monkeypatch.setattr(BlockFiles, "delete", slow)
    async with engine(settings(llama, tmp_path, disk_kv=budget)) as driven:
        for number in range(10):
            await driven.turn([3 + number, *PROMPT], str(number), new=1)
            await driven.saved()
    assert budget * 0.8 < max(most) <= budget


@pytest.mark.parametrize("to", ["disk", "none"])
async def test_a_chat_is_taken_off_a_tier_while_it_is_saved(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    write = BlockFiles.write

    def slow(*args: object) -> int:
        time.sleep(0.05)
        return write(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(BlockFiles, "write", slow)
    async with engine(settings(llama, tmp_path)) as driven:
        await driven.turn(PROMPT)
        await driven.client.demote("s", "host")
        await driven.client.demote("s", "disk" if to == "disk" else None)
        wanted, end = (0, 0, 7 * 8 * KIB if to == "disk" else 0), time.monotonic() + PATIENCE_S
        while True:
            snapshot = await driven.client.snapshot()
            used = tuple(tier.used_bytes for tier in snapshot.tiers)
            # A look may come between a block's last byte and the housekeeping that takes it away.
            if not snapshot.saving_blocks and used == wanted:
                break
            assert time.monotonic() < end, used
