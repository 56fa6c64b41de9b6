"""What another model, dtype, layout or format has kept is never taken for one's own; its files go like any others.

Each test saves a chat, starts another engine on the same folder with one thing changed, and asks for the same chat.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine.config import EngineConfig
from tests.engine.model.test_adapters import tune
from tests.engine.model.tiny import prompt
from tests.engine.tiered import NEW, Sources, engine, model, settings, until

PROMPT = prompt(45)
Change = Callable[[EngineConfig, pytest.MonkeyPatch], dict[str, Any]]


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    return settings(model(tmp_path / "llama"), tmp_path)


def kv_bytes(root: Path) -> int:
    """Bytes of all files of blocks, as the file system says."""
    return sum(path.stat().st_size for path in (root / "kv").rglob("*.kv"))


def edit(config: EngineConfig, **values: Any) -> None:
    """Change a model's configuration, and leave its weights and its name."""
    path = Path(config.model) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


# --- what may change --------------------------------------------------------------------------------------------------


def other_weights(config: EngineConfig, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    model(Path(config.model), initializer_range=0.5)  # which seeds the weights
    return {}


def other_adapter(config: EngineConfig, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"adapter": str(tune(Path(config.model), Path(config.model).parent / "tune"))}


def other_positions(config: EngineConfig, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    edit(config, rope_parameters={"rope_type": "default", "rope_theta": 500_000.0})
    return {}


def other_norms(config: EngineConfig, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    edit(config, rms_norm_eps=1e-3)
    return {}


def other_format(config: EngineConfig, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    for module in ("engine.cache.block_file", "engine.cache.disk", "engine.served"):
        patch.setattr(f"{module}.FORMAT_VERSION", 99)
    return {}


CHANGES: dict[str, Change] = {
    "weights": other_weights,
    "adapter": other_adapter,
    "rope": other_positions,
    "configuration": other_norms,
    "dtype": lambda *_: {"dtype": "bfloat16"},
    "block size": lambda *_: {"block_size": 16},
    "cold dtype": lambda *_: {"cold_kv_dtype": "int8"},
    "format": other_format,
}


@pytest.mark.parametrize("change", CHANGES)
async def test_another_finds_nothing(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    async with engine(config) as driven:
        turn = await driven.turn(PROMPT)
        await driven.saved()
    before = kv_bytes(tmp_path)
    assert before > 0
    other = replace(config, **CHANGES[change](config, monkeypatch))
    async with engine(other) as driven:
        again = await driven.turn([*turn.known, 3])
        assert again.sources == Sources(0, 0, 0, len(turn.known) + 1)
        assert kv_bytes(tmp_path) >= before, "what it cannot use it leaves alone"
        await driven.saved()
        disk = (await driven.client.snapshot()).tiers[2]
        if change != "format":  # whose files were set aside
            assert disk.used_bytes == kv_bytes(tmp_path) > before, "and counts"


async def test_the_same_again_finds_everything(config: EngineConfig, tmp_path: Path) -> None:
    """What the test above would say if nothing were saved at all."""
    async with engine(config) as driven:
        turn = await driven.turn(PROMPT)
        await driven.saved()
    async with engine(config) as driven:
        again = await driven.turn([*turn.known, 3])
        assert again.sources == Sources(0, 0, len(PROMPT) + NEW - 1, 2)


async def test_there_and_back_again(config: EngineConfig, tmp_path: Path) -> None:
    async with engine(config) as driven:
        turn = await driven.turn(PROMPT)
        await driven.saved()
    async with engine(replace(config, cold_kv_dtype="int8")) as driven:
        await driven.turn(PROMPT)
        await driven.saved()
    async with engine(config) as driven:
        assert (await driven.turn([*turn.known, 3])).sources.disk == len(PROMPT) + NEW - 1


async def test_what_is_of_no_more_use_makes_room(config: EngineConfig, tmp_path: Path) -> None:
    """The files of another model are the oldest: they go before any of a chat that can still use its own."""
    async with engine(config) as driven:
        await driven.turn(PROMPT, "old")
        await driven.saved()
    old = set((tmp_path / "kv").rglob("*.kv"))
    budget = 2 * kv_bytes(tmp_path)
    other = settings(Path(config.model), tmp_path, disk_kv=budget, disk_low=1.0, dtype="bfloat16")
    async with engine(other) as driven:
        first = await driven.turn(PROMPT, "first")
        await driven.saved()
        await driven.turn([90, *PROMPT[1:]], "second")
        await driven.saved()
        assert kv_bytes(tmp_path) <= budget
        assert not old & set((tmp_path / "kv").rglob("*.kv"))
        await driven.leave("first", "disk")
        assert (await driven.turn([*first.known, 3], "first")).sources.disk == len(PROMPT) + NEW - 1


async def test_what_is_of_no_more_use_expires(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.keeper.GRACE_S", 0.0)
    async with engine(config) as driven:
        await driven.turn(PROMPT, "old")
        await driven.saved()
    old = set((tmp_path / "kv").rglob("*.kv"))
    async with engine(settings(Path(config.model), tmp_path, disk_ttl=1.0, dtype="bfloat16")):
        await until(lambda: not any(path.exists() for path in old))


# --- old formats ------------------------------------------------------------------------------------------------------


async def test_an_old_format_is_set_aside_and_told(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.keeper.LOG_SECONDS", 0.02)
    async with engine(config) as driven:
        turn = await driven.turn(PROMPT)
        await driven.saved()
    kv = tmp_path / "kv"
    (blocks,) = kv.glob("blocks-*")
    files = {path.relative_to(blocks): path.read_bytes() for path in blocks.rglob("*.kv")}
    blocks.rename(kv / "blocks-0")
    async with engine(config) as driven:
        again = await driven.turn([*turn.known, 3])
        assert again.sources == Sources(0, 0, 0, len(turn.known) + 1)
        await until(lambda: any(event.action == "set_aside" for event in driven.told))
        told = [event for event in driven.told if event.action == "set_aside"]
        assert [(event.blocks, event.bytes) for event in told] == [(len(files), sum(map(len, files.values())))]
        assert "another format" in told[0].reason
        old = kv / "old" / "blocks-0"
        assert {path.relative_to(old): path.read_bytes() for path in old.rglob("*.kv")} == files
    async with engine(config) as driven:
        await driven.turn(PROMPT, "other")
        await asyncio.sleep(0.3)  # many times what the log takes
        assert "set_aside" not in [event.action for event in driven.told], "once"


async def test_an_old_format_takes_no_more_than_the_budget(config: EngineConfig, tmp_path: Path) -> None:
    async with engine(config) as driven:
        await driven.turn(PROMPT)
        await driven.saved()
    budget = kv_bytes(tmp_path)  # which the old files take whole
    (blocks,) = (tmp_path / "kv").glob("blocks-*")
    blocks.rename(tmp_path / "kv" / "blocks-0")
    async with engine(settings(Path(config.model), tmp_path, disk_kv=budget)) as driven:
        await driven.turn(PROMPT)
        await driven.saved()
        assert kv_bytes(tmp_path) <= budget
