"""The models that one engine serves, and how they share its memory: one budget for all their KV, and room for weights.

It knows how a model comes and goes, and nothing of requests, pipes or the order of steps. A model's weights leave when
another's need the room; its KV stays, so that a chat which comes back to it finds its cache.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.errors import ModelLoadError
from engine.model import loading, memory, sources
from engine.model.choices import recorded_dtype
from engine.served import Measures, ServedModel, contents
from engine.shares import split, usual_bytes
from engine.words import size

MIN_BLOCKS = 2
WEIGHTS_MARGIN = 256 * 2**20  # beside the weights themselves: activations, and what other programs need meanwhile

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """What a person asked to load: a model as they name it, an adapter for it, and a dtype or "auto"."""

    model: str
    adapter: str | None
    dtype: str


@dataclass(frozen=True)
class Found:
    """The same as files, ready to be loaded as `dtype` on the engine's device."""

    prepared: sources.PreparedModel
    dtype: str


class Residents:
    """The one owner of the served models, in the order of their last use; all but `find` is for the engine's thread."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._models: dict[str, ServedModel] = {}  # the one used last at the end
        self._auto_budget = 0
        self._first = ""

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(list(self._models.values()))

    @property
    def budget(self) -> int:
        """Bytes of KV that all models may have together: as configured, else what the most demanding of them needs."""
        return self._config.device_kv or self._auto_budget

    def get(self, fingerprint: str) -> ServedModel | None:
        """A served model; "" is the first one. None: it is not served, or no longer."""
        return self._models.get(fingerprint or self._first)

    # --- coming -----------------------------------------------------------------------------------------------------

    def find(self, wanted: Wanted, progress: sources.Progress) -> Found:
        """The model's files, converted where needed. May take minutes; touches no state, and may run on any thread.

        Raises `ModelLoadError`.
        """
        cache_dir = Path(self._config.cache_dir)
        dtype = recorded_dtype(cache_dir, wanted.model, self._config.device, wanted.dtype)
        _, kind = loading.choose(self._config.device, dtype)
        prepared = sources.prepare(wanted.model, cache_dir, progress, adapter=wanted.adapter, dtype=kind)
        return Found(prepared, dtype)

    def bring(self, found: Found, progress: sources.Progress) -> ServedModel:
        """Load it, check it and give it its share; or find it here already. Raises `ModelLoadError`."""
        served = self._same(found)
        if served is None:
            loaded = self._load(found, progress)
            progress("checking attention", 0, 0)
            measures = Measures.of(loaded, self._config.block_size)
            served = self._models.get(measures.fingerprint)
            if served is not None:  # other files, the same contents
                served.attach(loaded)
            else:
                served = self._admit(loaded, measures)
        self.use(served, progress)
        return served

    def use(self, served: ServedModel, progress: sources.Progress) -> None:
        """Make it the one used last: with its weights in memory, and at least half of the budget if it had less.

        Raises `ModelLoadError` when its weights cannot be read again.
        """
        if not served.has_weights:
            served.attach(self._load(Found(served.loaded.prepared, _name(served.loaded.dtype)), progress))
        if next(reversed(self._models), None) == served.fingerprint:
            return
        self._models[served.fingerprint] = self._models.pop(served.fingerprint)
        if served.pool_bytes < self.budget // 2:
            self._rebalance(served)

    # --- room -------------------------------------------------------------------------------------------------------

    def violations(self) -> list[str]:
        """What is wrong with the shares; empty when nothing is."""
        total = sum(served.pool_bytes for served in self)
        return [f"the pools take {total} bytes of a budget of {self.budget}"] if total > self.budget else []

    def _same(self, found: Found) -> ServedModel | None:
        """The served model of the same files' contents in the same dtype: its weights need not be read to know it."""
        _, kind = loading.choose(self._config.device, found.dtype)
        for served in self:
            if served.loaded.dtype == kind and served.contents == contents(found.prepared):
                return served
        return None

    def _load(self, found: Found, progress: sources.Progress) -> loading.LoadedModel:
        target, kind = loading.choose(self._config.device, found.dtype)
        self._make_room_for_weights(found.prepared, kind, target)
        progress("loading weights", 0, 0)
        return loading.load(found.prepared, self._config.device, found.dtype, self._config.context)

    def _make_room_for_weights(self, prepared: sources.PreparedModel, dtype: torch.dtype, device: torch.device) -> None:
        """Unload who is idle, the least recently used first, until there is room. Raises `ModelLoadError`."""
        needed = sources.weight_bytes(prepared, dtype) + WEIGHTS_MARGIN
        for served in [s for s in self if s.has_weights and s.scheduler.idle]:
            if memory.available(device) >= needed:
                return
            served.unload()
            release_memory(device)
        if (free := memory.available(device)) < needed:
            raise ModelLoadError(
                f"{prepared.name} needs {size(needed)} of memory for its weights in {_name(dtype)}, and "
                f"{size(free)} are free on {device}: close other programs, or choose a smaller model"
            )

    def _admit(self, loaded: loading.LoadedModel, measures: Measures) -> ServedModel:
        """A newcomer: the others shrink, and it gets the rest. Raises `ModelLoadError`."""
        if self._config.device_kv is None:
            free = memory.available(loaded.device)
            usual = usual_bytes(measures.context_length, self._config.block_size, measures.block_bytes, free)
            self._auto_budget = max(self._auto_budget, usual)
        least = MIN_BLOCKS * measures.block_bytes
        if self.budget < least:
            raise ModelLoadError(
                f"device_kv of {size(self.budget)} is too small for {loaded.prepared.name}, which needs at least "
                f"{size(least)}: choose a larger device_kv"
            )
        share = self._shrink_others(None)
        if share < least:
            raise ModelLoadError(
                f"the replies being written leave {loaded.prepared.name} no room in the cache of "
                f"{size(self.budget)}: wait for them, or choose a larger device_kv"
            )
        served = ServedModel(loaded, measures, share // measures.block_bytes, self._config, self._clock)
        self._first = self._first or served.fingerprint
        self._models = {served.fingerprint: served, **self._models}  # `use` makes it the last one
        return served

    def _rebalance(self, served: ServedModel) -> None:
        """Give `served` what the others can spare; where memory is short just now, it goes on with what it has."""
        share = self._shrink_others(served)
        if share > served.pool_bytes:
            try:
                served.resize(share // served.measures.block_bytes)
            except (MemoryError, RuntimeError) as error:
                log.warning("the cache of %s could not grow: %s", served.loaded.prepared.name, error)

    def _shrink_others(self, active: ServedModel | None) -> int:
        """Take from all but `active` what is not theirs to keep; the bytes of the budget that are then left."""
        others = [served for served in reversed(list(self)) if served is not active]
        kept, _ = split(self.budget, [served.holding for served in others])
        for served, keep in zip(others, kept, strict=True):
            if keep < served.pool_bytes:
                served.resize(keep // served.measures.block_bytes)
        return self.budget - sum(served.pool_bytes for served in others)


def release_memory(device: torch.device) -> None:
    """Have what nobody holds any more given back to the machine."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
