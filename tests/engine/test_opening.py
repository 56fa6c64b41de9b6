"""What keeps the tiers from being opened as they are asked for, and what becomes of the engine then."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from engine.errors import EngineUnavailable
from tests.engine.tiered import engine, model, settings


@pytest.mark.parametrize(
    "levels", [{"host_high": 0.1, "host_low": 0.0}, {"device_low": 0.9, "device_high": 0.5}, {"disk_high": 0.0}]
)
async def test_levels_that_no_tier_can_keep_are_said_at_the_start(tmp_path: Path, levels: dict[str, float]) -> None:
    with pytest.raises(EngineUnavailable, match="0 < low <= high <= 1 is needed"):
        async with engine(settings(model(tmp_path / "m"), tmp_path, **levels)):
            pass


@pytest.mark.parametrize("link", [False, True])
async def test_blocks_of_another_format_that_cannot_be_set_aside_turn_the_disk_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, link: bool
) -> None:
    other = tmp_path / "kv" / "blocks-0"
    other.mkdir(parents=True)
    (other / "block").write_bytes(b"of another format")
    old = tmp_path / "kv" / "old"
    old.symlink_to(tmp_path) if link else old.write_text("a note of somebody's")
    async with engine(settings(model(tmp_path / "m"), tmp_path)) as driven:
        await driven.turn([5] * 40)
        snapshot = await driven.client.snapshot()
    assert [tier.used_bytes for tier in snapshot.tiers if tier.tier == "disk"] == [0]
    assert [each.message for each in caplog.records if each.levelno >= logging.WARNING] == [
        f"blocks are not kept on disk: cannot keep KV blocks in {old} (Not a directory): make it a folder that can be "
        "written to, choose another, or turn the disk tier off"
    ]
    assert (other / "block").read_bytes() == b"of another format"
