"""What the engine is started with, from the settings. Knows what both sides call a setting, and nothing of either."""

from __future__ import annotations

from chat.settings import Settings
from engine.config import EngineConfig


def engine_config(settings: Settings) -> EngineConfig:
    """The engine's share of the settings; the converted weights belong in `models` in the data directory."""
    return EngineConfig(
        cache_dir=str(settings.data_dir / "models"),
        model=settings.model,
        adapter=settings.adapter,
        device=settings.device,
        dtype=settings.dtype,
        context=settings.context,
        device_kv=None if settings.device_kv is None else int(settings.device_kv),
        log_level=settings.log_level,
    )
