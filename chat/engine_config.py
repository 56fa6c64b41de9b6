"""What the engine is started with, from the settings. Knows what both sides call a setting, and nothing of either.

Shares of what is free are settled here, once, at the start: what is free changes with every chat.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from chat.amounts import Bytes, Duration, Share
from chat.machine import NVIDIA, gpu_memory
from chat.settings import Settings
from engine.budgets import disk_room, fill_in
from engine.config import CacheConfig, EngineConfig
from engine.room import free_memory

GAPS = {"device": 0.05, "host": 0.1, "disk": 0.1}  # between the two levels of a tier, where the lower is not set


def engine_config(settings: Settings) -> EngineConfig:
    """The engine's share of the settings. May take seconds: where a GPU's free memory has to be asked for."""
    return EngineConfig(
        cache_dir=str(settings.data_dir / "models"),
        model=settings.model,
        adapter=settings.adapter,
        device=settings.device,
        dtype=settings.dtype,
        weights=settings.weights,
        context=settings.context,
        cache=cache_config(settings),
        kv_dir=str(kv_dir(settings.data_dir)),
        cold_kv_dtype=settings.cold_kv_dtype,
        speculate=None if settings.speculate == "auto" else 0,
        log_level=settings.log_level,
    )


def kv_dir(data_dir: Path) -> Path:
    """Where the disk tier keeps its files."""
    return data_dir / "kv"


def cache_config(settings: Settings) -> CacheConfig:
    """What each tier may hold and for how long; what is not set is left to the engine."""
    return CacheConfig(
        device_kv=budget(settings.device_kv, lambda: _device_free(settings.device)),
        host_kv=budget(settings.host_kv, free_memory),
        disk_kv=budget(settings.disk_kv, lambda: disk_room(kv_dir(settings.data_dir))),
        device_ttl=seconds(settings.device_ttl),
        host_ttl=seconds(settings.host_ttl),
        disk_ttl=seconds(settings.disk_ttl),
        **{f"{tier}_high": float(getattr(settings, f"{tier}_high")) for tier in GAPS},
        **{f"{tier}_low": low_level(settings, tier) for tier in GAPS},
        policy=settings.policy,
        disk_writes=None if settings.disk_writes is None else int(settings.disk_writes),
    )


def cold_budgets(settings: Settings, *, on_cpu: bool) -> CacheConfig:
    """What host and disk may hold, as a start would settle it now: as they are set, else by what the machine has."""
    folder = kv_dir(settings.data_dir)
    host, disk = budget(settings.host_kv, free_memory), budget(settings.disk_kv, lambda: disk_room(folder))
    return fill_in(CacheConfig(host_kv=host, disk_kv=disk), str(folder), on_cpu=on_cpu)


def budget(size: Bytes | Share | None, free: Callable[[], int]) -> int | None:
    """A tier's size in bytes; `free` tells what a share is of."""
    return size.of(free()) if isinstance(size, Share) else None if size is None else int(size)


def low_level(settings: Settings, tier: str) -> float:
    """How full a tier is once room was made in it."""
    low: Share | None = getattr(settings, f"{tier}_low")
    high = getattr(settings, f"{tier}_high")
    return float(low) if low is not None else max(high - GAPS[tier], high / 2)


def seconds(ttl: Duration) -> float | None:
    """A duration as the engine takes it; None: for ever."""
    return None if math.isinf(ttl) else float(ttl)


def _device_free(device: str) -> int:
    """Bytes free where the model will compute, before it is loaded."""
    gpu = gpu_memory() if device == "cuda" or (device == "auto" and NVIDIA.exists()) else None
    return free_memory() if gpu is None else gpu
