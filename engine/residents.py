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

from engine.budgets import fill_in
from engine.cache.disk_tier import Post
from engine.config import CacheConfig, EngineConfig
from engine.errors import EngineError, ModelLoadError
from engine.model import kinds, loading, memory, sources
from engine.model.choices import recorded_dtype
from engine.model.folders import read_configuration
from engine.opening import open_tiers
from engine.served import MIN_BLOCKS, Measures, ServedModel, contents, lacks_memory, no_room_for_pool
from engine.shares import split, usual_bytes
from engine.words import size

WEIGHTS_MARGIN = 256 * 2**20  # beside the weights themselves: activations, and what other programs need meanwhile

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """What a person asked to load: a model as they name it, an adapter for it, a dtype and weights, or "auto"."""

    model: str
    adapter: str | None
    dtype: str
    weights: str


@dataclass(frozen=True)
class Found:
    """What was `wanted` as files, ready to be loaded as `dtype` on the engine's device."""

    wanted: Wanted
    prepared: sources.PreparedModel
    dtype: str


class Residents:
    """The one owner of the served models, in the order of their last use; all but `find` is for the engine's thread."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float], post: Post) -> None:
        self._config = config
        self._clock = clock
        device, _ = loading.choose(config.device, config.dtype)
        self._cache, self.tiers = open_tiers(config, device, clock, post)
        self._models: dict[str, ServedModel] = {}  # the one used last at the end
        self._found: dict[str, Found] = {}  # where the weights of each are read again
        self._auto_budget = 0
        self._short: set[str] = set()  # whose pools there was no memory to change; the log has said so
        self._first = ""

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(list(self._models.values()))

    @property
    def budget(self) -> int:
        """Bytes of KV that all models may have together: as configured, else what the most demanding of them needs."""
        return self._cache.device_kv or self._auto_budget

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
        target, kind = loading.choose(self._config.device, dtype)
        loading.choose_weights(wanted.weights, target, kind)
        prepared = sources.prepare(wanted.model, cache_dir, progress, adapter=wanted.adapter, dtype=kind)
        return Found(wanted, prepared, dtype)

    def bring(self, found: Found, progress: sources.Progress) -> ServedModel:
        """Load it, check it and give it its share; or find it here already. Raises `ModelLoadError`."""
        served = self._same(found)
        if served is None:
            loaded = self._load(found, progress)
            progress("checking attention", 0, 0)
            measures = Measures.of(loaded, self._config.block_size)
            served = self._models.get(measures.fingerprint)
            if served is not None:  # another folder with the same weights
                served.attach(loaded)
            else:
                served = self._admit(loaded, measures)
        self._found[served.fingerprint] = found
        self.use(served, progress)
        return served

    def use(self, served: ServedModel, progress: sources.Progress) -> None:
        """Make it the one used last, with its weights in memory and its share of the budget.

        Raises `ModelLoadError` when its weights cannot be read again, or are no longer the same.
        """
        if not served.has_weights:
            served.attach(self._load(self._found[served.fingerprint], progress))
        self._models[served.fingerprint] = self._models.pop(served.fingerprint)
        self.settle(served)

    # --- room -------------------------------------------------------------------------------------------------------

    def violations(self) -> list[str]:
        """What is wrong with the shares; empty when nothing is."""
        total = sum(served.pool_bytes for served in self)
        return [f"the pools take {total} bytes of a budget of {self.budget}"] if total > self.budget else []

    def configure(self, cache: CacheConfig) -> None:
        """Other budgets and rules from now on. Raises `EngineError` for what cannot be; then nothing has changed."""
        models = list(self)
        on_cpu = models[0].loaded.device.type == "cpu"
        limits = fill_in(cache, self._config.kv_dir, on_cpu=on_cpu)
        wanted = limits.device_kv or self._auto_budget
        leased = sum(served.holding.leased_bytes for served in models)
        least = max([leased, *(MIN_BLOCKS * served.measures.block_bytes for served in models)])
        if wanted < least:
            raise EngineError(
                f"device_kv of {size(wanted)} is too small now, {size(least)} are in use: wait, or raise it"
            )
        last = models[-1]
        old, self._cache = self._cache, limits
        try:
            share = self._shares(last, last.needed_bytes)[1]
            if share > last.pool_bytes and not _has_memory(last.loaded.device, share):
                raise no_room_for_pool(last.loaded.device, wanted)
            self.tiers.configure(limits)
        except EngineError:
            self._cache = old
            raise
        for served in models:
            served.allow(self.budget)
        self._give(last)

    def settle(self, served: ServedModel) -> None:
        """Give `served` what the others can spare now; where memory is short, it goes on with what it has."""
        self._give(served, only_more=True)

    def _give(self, served: ServedModel, *, only_more: bool = False) -> None:
        """Have its pool be its share. Where there is no memory for that, the pool as it is bounds its requests.

        It does so until this is tried again, at the next request; while others run, there may be memory when they end.
        """
        needed, block = served.needed_bytes, served.measures.block_bytes
        share = self._shares(served, needed)[1]
        if share - served.pool_bytes >= block or not only_more:
            self._resize(served, self._take_back(served, needed))
        short = share - served.pool_bytes >= block
        others_run = any(other.holding.leased_bytes for other in self if other is not served)
        served.allow(self.budget, short=short and not others_run)

    def _shares(self, active: ServedModel | None, needed: int) -> tuple[list[tuple[ServedModel, int]], int]:
        """What all but `active` keep, in bytes, when it has `needed` itself, and what is then left for it."""
        others = [served for served in reversed(list(self)) if served is not active]
        kept, left = split(self.budget, [other.holding for other in others], needed)
        return list(zip(others, kept, strict=True)), left

    def _take_back(self, active: ServedModel | None, needed: int) -> int:
        """Shrink all but `active` to what they keep; the bytes of the budget that they leave."""
        shares, _ = self._shares(active, needed)
        for other, keep in shares:
            self._resize(other, min(keep, other.pool_bytes))
        return self.budget - sum(other.pool_bytes for other, _ in shares)

    def _resize(self, served: ServedModel, size: int) -> None:
        """Another size of its pool; where there is no memory for it, the log says so once, and it stays as it is."""
        try:
            if size > served.pool_bytes and served.loaded.device.type == "cpu":  # no allocation fails there in time
                memory.require(served.loaded.device, size)
            served.resize(size // served.measures.block_bytes)
        except (MemoryError, RuntimeError) as error:
            if not lacks_memory(error):
                raise
            if served.fingerprint not in self._short:
                log.warning("the cache of %s stays as it is: %s", served.loaded.prepared.name, error)
            self._short.add(served.fingerprint)
        else:
            self._short.discard(served.fingerprint)

    def _same(self, found: Found) -> ServedModel | None:
        """The served model of these very files, whose contents are as they were: they need not be read to know it."""
        _, kind = loading.choose(self._config.device, found.dtype)
        for served in self:
            loaded = served.loaded
            known = (loaded.prepared, loaded.dtype, loaded.weights, served.contents)
            if known == (found.prepared, kind, found.wanted.weights, contents(found.prepared)):
                return served
        return None

    def _load(self, found: Found, progress: sources.Progress) -> loading.LoadedModel:
        """The weights that were found, and no others that have come in their place meanwhile."""
        prepared = found.prepared
        target, kind = loading.choose(self._config.device, found.dtype)
        self._make_room_for_weights(prepared, kind, target)
        progress("loading weights", 0, 0)
        context = self._config.context
        if context is not None and self._models:  # the setting is for the model that it was chosen for
            config = kinds.text_config(read_configuration(prepared.path))
            context = min(context, loading.longest_context(prepared.name, config))
        weights, kernels_dir = found.wanted.weights, Path(self._config.cache_dir)
        loaded = loading.load(prepared, self._config.device, found.dtype, context, weights, kernels_dir=kernels_dir)
        of_the_hub = sources.locate(found.wanted.model).path is None  # a fetched version never changes
        if not of_the_hub and self.find(found.wanted, lambda *_: None).prepared.digest != prepared.digest:
            raise ModelLoadError(f"the files of {prepared.name} have changed since they were looked at: load it again")
        return loaded

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
        """A newcomer: the others shrink, and it gets the rest. Raises `ModelLoadError`; then they have it back."""
        if self._cache.device_kv is None:
            free = memory.available(loaded.device)
            usual = usual_bytes(measures.context_length, self._config.block_size, measures.block_bytes, free)
            self._auto_budget = max(self._auto_budget, usual)
        least = MIN_BLOCKS * measures.block_bytes
        if self.budget < least:
            raise ModelLoadError(
                f"device_kv of {size(self.budget)} is too small for {loaded.prepared.name}, which needs at least "
                f"{size(least)}: choose a larger device_kv"
            )
        last = next(reversed(self._models.values()), None)
        share = self._take_back(None, least)
        if last is None and share > memory.available(loaded.device):  # taken as it fills, which no allocation notices
            raise no_room_for_pool(loaded.device, share)
        try:
            if share < least:
                raise ModelLoadError(
                    f"the replies being written leave {loaded.prepared.name} no room in the cache of "
                    f"{size(self.budget)}: wait for them, or choose a larger device_kv"
                )
            blocks = share // measures.block_bytes
            served = ServedModel(loaded, measures, blocks, self._config, self._clock, self.tiers)
            self.tiers.take_stock(served.residency.space)
        except BaseException:
            if last is not None:
                self.settle(last)
            raise
        self._first = self._first or served.fingerprint
        self._models[served.fingerprint] = served
        for each in self:
            each.allow(self.budget)
        return served


def release_memory(device: torch.device) -> None:
    """Have what nobody holds any more given back to the machine."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _has_memory(device: torch.device, needed: int) -> bool:
    """Whether so many bytes can be had, also of what nobody holds any more."""
    if memory.available(device) < needed:
        release_memory(device)
    return memory.available(device) >= needed


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
