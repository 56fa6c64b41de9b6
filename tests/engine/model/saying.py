"""What preparing and starting a model says: its progress, and the one sentence that refuses it."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import ModelLoadError
from engine.loop import Engine
from engine.model import loading, sources
from engine.protocol import Event, LoadFailed, Loading, Shutdown, Start


def quiet(*_: object) -> None:
    pass


def start(model: Path | str, cache_dir: Path, **kwargs) -> list[Event]:
    """What an engine says of a model, without its progress."""
    events: list[Event] = []
    engine = Engine(events.extend)
    engine.inbox.put(
        Start(config=EngineConfig(model=str(model), cache_dir=str(cache_dir), device="cpu", dtype="float32", **kwargs))
    )
    engine.inbox.put(Shutdown())
    engine.run()
    return [event for event in events if not isinstance(event, Loading)]


def why(model: Path | str, cache_dir: Path, **kwargs) -> str:
    """Why an engine does not start with a model."""
    (event,) = start(model, cache_dir, **kwargs)
    assert isinstance(event, LoadFailed)
    assert "\n" not in event.message
    return event.message


def refusal(model: Path | str, cache: Path, *, adapter: Path | str | None = None, load: bool = False) -> str:
    """Why a model cannot be prepared, or, with `load`, cannot be loaded."""
    with pytest.raises(ModelLoadError) as refused:
        prepared = sources.prepare(str(model), cache, quiet, adapter=None if adapter is None else str(adapter))
        if load:
            loading.load(prepared, "cpu", "float32")
    assert "\n" not in str(refused.value)
    return str(refused.value)
