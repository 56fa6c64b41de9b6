"""What the engine is told of the settings: shares of what is free are settled, and what is not set is left to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from chat import engine_config, machine
from chat.engine_config import cache_config
from chat.settings import load_settings
from engine import budgets
from engine.cache.policy import TierLimits
from engine.config import CacheConfig
from engine.protocol import Start, decode_commands, encode

GIB = 2**30


def configured(**flags: str) -> CacheConfig:
    return cache_config(load_settings(flags))


def test_what_is_not_set_is_left_to_the_engine(home: Path) -> None:
    assert configured() == CacheConfig(
        device_kv=None,
        host_kv=None,
        disk_kv=None,
        device_ttl=None,
        host_ttl=None,
        disk_ttl=2_592_000.0,
        device_high=1.0,
        device_low=0.95,
        host_high=1.0,
        host_low=0.9,
        disk_high=1.0,
        disk_low=0.9,
        policy="lru",
        disk_writes=100_000_000_000,
    )
    whole = engine_config.engine_config(load_settings({}))
    (sent,) = decode_commands(encode([Start(config=whole)]))
    assert sent == Start(config=whole)
    assert whole.speculate is None
    assert engine_config.engine_config(load_settings({"speculate": "off"})).speculate == 0
    assert (whole.kv_dir, whole.cold_kv_dtype) == (str(load_settings({}).data_dir / "kv"), "auto")


def test_what_is_set_reaches_it() -> None:
    cache = configured(
        device_kv="64MiB", host_kv="0", disk_kv="1GB", device_ttl="30m", disk_ttl="never", host_high="80%",
        host_low="60%", device_high="50%", disk_high="4%", policy="cost", disk_writes="unlimited",
    )  # fmt: skip
    assert (cache.device_kv, cache.host_kv, cache.disk_kv) == (64 * 2**20, 0, 10**9)
    assert (cache.device_ttl, cache.host_ttl, cache.disk_ttl) == (1800.0, None, None)
    assert (cache.host_high, cache.host_low) == (0.8, 0.6)
    assert (cache.device_high, cache.device_low) == (0.5, pytest.approx(0.45))
    assert (cache.disk_high, cache.disk_low) == (0.04, 0.02)
    assert (cache.policy, cache.disk_writes) == ("cost", None)


@pytest.mark.parametrize("high", ["0.01%", "5%", "10%", "100%"])
def test_levels_that_are_not_set_can_be_kept_whatever_is(high: str) -> None:
    cache = configured(device_high=high, host_high=high, disk_high=high)
    for tier in ("device", "host", "disk"):
        TierLimits(1000, getattr(cache, f"{tier}_high"), getattr(cache, f"{tier}_low"))  # it refuses what it cannot


def test_a_share_is_of_what_is_free_where_the_tier_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(engine_config, "free_memory", lambda: 8 * GIB)
    monkeypatch.setattr(budgets, "free_disk", lambda _: 96 * GIB)
    monkeypatch.setattr(budgets, "used_disk", lambda folder: 4 * GIB if folder == tmp_path / "kv" else 0)
    monkeypatch.setattr(engine_config, "gpu_memory", lambda: 40 * GIB)
    shares = {"device_kv": "25%", "host_kv": "50%", "disk_kv": "10%", "data_dir": str(tmp_path)}
    cache = configured(device="cpu", **shares)
    assert (cache.device_kv, cache.host_kv, cache.disk_kv) == (2 * GIB, 4 * GIB, 10 * GIB)
    assert configured(device="cuda", **shares).device_kv == 10 * GIB
    monkeypatch.setattr(engine_config, "NVIDIA", tmp_path / "none")
    assert configured(device="auto", **shares).device_kv == 2 * GIB
    monkeypatch.setattr(engine_config, "NVIDIA", tmp_path)  # there is a driver, and torch is asked
    assert configured(device="auto", **shares).device_kv == 10 * GIB
    monkeypatch.setattr(engine_config, "gpu_memory", lambda: None)
    assert configured(device="auto", **shares).device_kv == 2 * GIB


def test_what_host_and_disk_get_is_what_is_set_else_what_the_machine_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in (engine_config, budgets):
        monkeypatch.setattr(module, "free_memory", lambda: 8 * GIB)
    monkeypatch.setattr(budgets, "free_disk", lambda _: 30 * GIB)

    def settled(on_cpu: bool, **flags: str) -> tuple[int | None, int | None]:
        cold = engine_config.cold_budgets(load_settings({"data_dir": str(tmp_path), **flags}), on_cpu=on_cpu)
        return cold.host_kv, cold.disk_kv

    assert settled(True) == (8 * GIB // 20, 3 * GIB)
    assert settled(False) == (2 * GIB, 3 * GIB)
    assert settled(True, host_kv="50%", disk_kv="0") == (4 * GIB, 0)


def test_the_gpus_memory_is_told_by_torch_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "ASK_GPU", "print(12345)")
    assert machine.gpu_memory() == 12345
    for other in ("print()", "raise SystemExit(1)"):
        monkeypatch.setattr(machine, "ASK_GPU", other)
        assert machine.gpu_memory() is None
