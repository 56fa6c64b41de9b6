"""Where an engine is, as the web side shows it. Values only; `engine.client` makes them."""

from __future__ import annotations

from dataclasses import dataclass

from engine.protocol import Capabilities, Phase


@dataclass(frozen=True)
class LoadState:
    """How far another model's load has come; `model` is what was asked for, `total` 0 means unknown."""

    model: str
    stage: str = ""
    done: int = 0
    total: int = 0


@dataclass(frozen=True)
class EngineState:
    """Where the engine is. `stage` with `done` of `total` says how far a load has come (total 0: unknown).

    `message` says why it failed or restarts; `capabilities`, of the model that it started with, are there once it is
    ready. `loads` are further models on their way.
    """

    phase: Phase
    stage: str = ""
    done: int = 0
    total: int = 0
    message: str = ""
    capabilities: Capabilities | None = None
    loads: tuple[LoadState, ...] = ()
