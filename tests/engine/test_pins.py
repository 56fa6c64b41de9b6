"""Pins through the engine: taken or refused, outgrown, and repeated after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import EngineConfig
from tests.engine.model.tiny import prompt
from tests.engine.tiered import KIB, MIB, engine, model, settings


@pytest.fixture
def small_disk(tmp_path: Path) -> EngineConfig:
    """25 blocks have room on disk, far more elsewhere."""
    return settings(model(tmp_path / "llama"), tmp_path, disk_kv=200 * KIB, device_kv=2 * MIB)


async def test_a_chat_that_takes_more_than_the_share_is_not_pinned(small_disk: EngineConfig) -> None:
    async with engine(small_disk) as driven:
        await driven.turn(prompt(160))
        await driven.saved()
        answer = await driven.client.pin("s", True)
        assert not answer.pinned
        assert answer.message == (
            "this chat takes 176 KiB of disk and pinned chats 0 bytes already; they may take 100 KiB of 200 KiB. "
            "Unpin another, or raise disk_kv"
        )
        assert not (await driven.client.snapshot()).sessions["s"].pinned


async def test_a_pin_that_was_taken_stays_though_the_chat_outgrows_it(small_disk: EngineConfig) -> None:
    async with engine(small_disk) as driven:
        assert (await driven.client.pin("s", True)).pinned
        await driven.turn(prompt(160))
        await driven.saved()
        assert (await driven.client.pin("s", True, ttl=50.0)).message == "", "it is pinned already"
        assert (await driven.client.snapshot()).sessions["s"].pinned
    async with engine(small_disk) as driven:
        assert (await driven.client.snapshot()).sessions["s"].disk_bytes == 176 * KIB
        assert not (await driven.client.pin("s", True)).pinned, "for this engine it is a new pin"
        answer = await driven.client.pin("s", True, again=True)
        assert (answer.pinned, answer.message) == (True, "")
        assert (await driven.client.snapshot()).sessions["s"].pinned


async def test_a_pinned_chat_that_grows_leaves_others_their_part_of_the_disk(small_disk: EngineConfig) -> None:
    async with engine(small_disk) as driven:
        await driven.client.pin("s", True)
        await driven.turn(prompt(180))
        await driven.saved()
        assert (await driven.tier("disk")).used_bytes == 192 * KIB
        for number in range(3):
            await driven.turn(prompt(90, 3 + number), f"other {number}")
            await driven.saved()
            sessions = (await driven.client.snapshot()).sessions
            assert sessions[f"other {number}"].disk_bytes == 104 * KIB
        assert sessions["s"].disk_bytes >= 88 * KIB
