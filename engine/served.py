"""One model with all that serves it: its weights, which may be away, and its pool, books and requests, which stay.

It knows nothing of other models, of where models come from, and of pipes.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from engine import words
from engine.batch import Batch
from engine.cache.block import root_hash
from engine.cache.block_file import FORMAT_VERSION
from engine.cache.cold import Space
from engine.cache.image import ImageCodec
from engine.cache.manager import BlockManager
from engine.cache.pool import KVPool
from engine.cache.rates import StepTimes, context_tokens
from engine.cache.residency import Residency
from engine.cache.tiers import ColdTiers
from engine.config import EngineConfig
from engine.errors import EngineError, ModelLoadError
from engine.limits import CLOSE_OTHERS, RAISE_IT
from engine.model import loading, selfcheck
from engine.model.attention import KERNEL
from engine.model.loading import LoadedModel
from engine.model.runner import ModelRunner
from engine.model.sources import PreparedModel
from engine.protocol import Capabilities, Event, ModelUsage, Rejected, Submit
from engine.scheduler import Scheduler
from engine.shares import Holding

MIN_BLOCKS = 2
COUNTED = ("total_blocks", "free_blocks", "leased_blocks", "idle_blocks")
WARM_UP_TOKENS = 64
MEMORY_ERRORS = (MemoryError, torch.OutOfMemoryError)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Measures:
    """What a loaded model needs and allows, in tokens and bytes."""

    shape: selfcheck.KVShape
    fingerprint: str
    context_length: int
    vocab_size: int
    block_bytes: int
    weight_bytes: int
    weights: str

    @classmethod
    def of(cls, loaded: LoadedModel, block_size: int) -> Measures:
        """Measure it. Raises `ModelLoadError` for a model that cannot be served."""
        shape = selfcheck.probe(loaded)
        return cls(
            shape=shape,
            fingerprint=loading.fingerprint(loaded, block_size),
            context_length=loaded.context,
            vocab_size=loaded.module.get_input_embeddings().num_embeddings,
            block_bytes=shape.bytes_per_token(loaded.dtype) * block_size,
            weight_bytes=sum(parameter.nbytes for parameter in loaded.module.parameters()),
            weights=loading.weights_of(loaded),
        )


class ServedModel:
    """A model and its requests. Made with weights, checked and warmed up; `unload` and `attach` take and bring them."""

    def __init__(  # noqa: PLR0917 - what it is made of
        self,
        loaded: LoadedModel,
        measures: Measures,
        blocks: int,
        config: EngineConfig,
        clock: Callable[[], float],
        tiers: ColdTiers,
    ) -> None:
        self.measures = measures
        self._clock, self._chunk = clock, config.max_batch_tokens
        self.times = StepTimes()
        self.loaded = loaded
        self.contents = contents(loaded.prepared)
        self._pool = _make_pool(loaded, measures.shape, blocks, config.block_size)
        selfcheck.check(loaded, self._pool)
        self.runner = ModelRunner(loaded, self._pool, tiers.copies)
        self.residency = Residency(self._space(config), tiers, lambda: self._pool.data, clock, config.force)
        manager = BlockManager(
            total_blocks=blocks,
            block_size=config.block_size,
            fingerprint=self.residency.space.fingerprint,
            copy_tokens=self.runner.copy_tokens,
            on_free=partial(tiers.copies.freed, self.residency.space.codec),
            clock=clock,
            below=self.residency,
        )
        self._manager = self.residency.manager = manager
        self.most_blocks = blocks
        self.scheduler = Scheduler(
            manager,
            context_length=measures.context_length,
            vocab_size=measures.vocab_size,
            max_batch_tokens=config.max_batch_tokens,
            clock=clock,
            residency=self.residency,
            speculate=config.speculate,
        )
        self._warm_up()

    # --- what it is -------------------------------------------------------------------------------------------------

    @property
    def fingerprint(self) -> str:
        """What names it: everything that decides its K and V."""
        return self.measures.fingerprint

    @property
    def pool_bytes(self) -> int:
        """Bytes that its pool has been given."""
        return self._manager.total_blocks * self.measures.block_bytes

    @property
    def needed_bytes(self) -> int:
        """Bytes of the pool that it takes to get on with its requests."""
        return max(MIN_BLOCKS, self.scheduler.needed_blocks) * self.measures.block_bytes

    @property
    def holding(self) -> Holding:
        """Bytes of its blocks in use, and of those that requests lease; while it works, it uses all that it has."""
        leased = self._manager.leased_blocks
        used = self._manager.total_blocks if leased else len(self._manager.blocks)
        return Holding(used * self.measures.block_bytes, leased * self.measures.block_bytes)

    def capabilities(self, prepared: PreparedModel, commands: list[str]) -> Capabilities:
        """What the web side is told of it, under the name and with the tokenizer of `prepared`."""
        loaded, measures = self.loaded, self.measures
        return Capabilities(
            model_name=prepared.name,
            model_path=str(prepared.path),
            fingerprint=measures.fingerprint,
            device=str(loaded.device),
            dtype=str(loaded.dtype).removeprefix("torch."),
            weights=measures.weights,
            attention=f"{KERNEL} with {self.runner.kernels.name} kernels",
            context_length=measures.context_length,
            vocab_size=measures.vocab_size,
            eos_ids=loading.eos_ids(loaded),
            block_size=self._pool.block_size,
            total_blocks=self.most_blocks,
            kv_bytes_per_token=measures.shape.bytes_per_token(loaded.dtype),
            threads=torch.get_num_threads(),
            commands=commands,
        )

    def usage(self) -> ModelUsage:
        """Where its memory is and what it does now."""
        return ModelUsage(
            name=self.loaded.prepared.name,
            fingerprint=self.fingerprint,
            weights_loaded=self.has_weights,
            weight_bytes=self.measures.weight_bytes,
            block_bytes=self.measures.block_bytes,
            **{name: number for name, number in self._manager.counts().items() if name in COUNTED},
        )

    # --- weights and room -------------------------------------------------------------------------------------------

    @property
    def has_weights(self) -> bool:
        """Whether it can compute now."""
        return self.runner.module is not None

    def unload(self) -> None:
        """Give the weights' memory back; the cache stays. Not while requests run."""
        self.loaded = replace(self.loaded, module=None)
        self.runner.module = None

    def attach(self, loaded: LoadedModel) -> None:
        """Bring the weights back: the same ones, as the fingerprint says."""
        self.loaded = loaded
        self.runner.module = loaded.module

    def allow(self, budget: int, *, short: bool = False) -> None:
        """All models may have `budget` bytes together; `short`: there is no memory for more than its pool has now."""
        self.most_blocks = budget // self.measures.block_bytes
        most, remedy = (self._manager.total_blocks, CLOSE_OTHERS) if short else (self.most_blocks, RAISE_IT)
        self.scheduler.allow(most, remedy)

    def resize(self, blocks: int) -> None:
        """Another size of the pool, with what is in it as far as that fits. Raises what torch raises for memory."""
        if blocks != self._manager.total_blocks:
            self.scheduler.resize(blocks, self.runner.resize)

    def drop(self, session_id: str) -> tuple[int, list[Event]]:
        """Forget a session on the device: how many blocks that freed, and the events of ending what it runs."""
        dropped = self.scheduler.drop(session_id)
        self.residency.forget(session_id)
        return dropped

    # --- work -------------------------------------------------------------------------------------------------------

    def step(self) -> list[Event] | None:
        """One forward pass, and what came of it; None when nothing can run. Raises when the books are wrong."""
        try:
            batch = self.scheduler.schedule()
            sampled = self._run(batch) if batch is not None else []
        except (EngineError, MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
            log.exception("a step failed")
            events = self.scheduler.fail(_sentence(error))
            if not any(isinstance(event, Rejected) for event in events):
                raise  # no request can be blamed, so the books are wrong: start again with new ones
            return events
        if batch is not None:
            return self.scheduler.commit(batch, sampled)
        return self.scheduler.take_events() or None

    def _run(self, batch: Batch) -> list[list[int]]:
        """Forward it, and learn how long that takes."""
        began = self._clock()
        sampled = self.runner.run(batch)
        context = sum(context_tokens(row.start, len(row.token_ids)) for row in batch.rows)
        self.times.observe(batch.tokens, context, len(batch.rows), self._clock() - began)
        return sampled

    def _space(self, config: EngineConfig) -> Space:
        """What names and lays out its blocks in every tier."""
        shape, fingerprint = self.measures.shape, cache_fingerprint(self.measures.fingerprint, config.cold_kv_dtype)
        codec = ImageCodec(
            layers=shape.layers,
            block_size=config.block_size,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=self.loaded.dtype,
            cold_dtype=config.cold_kv_dtype,
        )
        return Space(
            fingerprint, root_hash(fingerprint), codec, config.block_size, self.measures.block_bytes, self._compute_s
        )

    def _compute_s(self, start: int, tokens: int) -> float | None:
        return self.times.prefill_seconds(start, tokens, self._chunk)

    def _warm_up(self) -> None:
        """A real request through every part, so that no person pays for the first one; it leaves nothing behind.

        Twice: the first passes are slower than any later one, and from the second ones estimates can be made.
        """
        count = min(WARM_UP_TOKENS, self.scheduler.context_length - 2)
        ids = [(31 * i + 5) % self.measures.vocab_size for i in range(count)]
        for run in (self.runner.run, self._run):
            self.scheduler.submit(Submit(request_id="warm-up", session_id="warm-up", token_ids=ids, max_tokens=2))
            while not self.scheduler.idle:
                batch = self.scheduler.schedule()
                if batch is None:
                    break
                self.scheduler.commit(batch, run(batch))
            self.drop("warm-up")
        self.runner.steps = self.runner.forwarded_tokens = 0
        self.scheduler.reset_counters()


def cache_fingerprint(model: str, cold_dtype: str) -> bytes:
    """What names a model's blocks in every tier: all that decides its K and V, and how they are kept."""
    return hashlib.sha256(f"{model}/{cold_dtype}/{FORMAT_VERSION}".encode()).digest()


def contents(prepared: PreparedModel) -> tuple[str, bytes]:
    """What tells two prepared models apart without loading them: the digest of the weights, and the configuration."""
    return prepared.digest, (prepared.path / "config.json").read_bytes()


def lacks_memory(error: BaseException) -> bool:
    """Whether an error of torch's, of whatever type, says that there is no memory."""
    said = str(error)
    return isinstance(error, MEMORY_ERRORS) or "not enough memory" in said or "can't allocate memory" in said


def _sentence(error: Exception) -> str:
    """Why a step failed, for people."""
    if lacks_memory(error):
        return (
            "there was not enough memory to compute this reply. Close other programs or choose a smaller device_kv, "
            "then try again"
        )
    return f"the model failed while computing this reply: {error}"


def _make_pool(loaded: LoadedModel, shape: selfcheck.KVShape, blocks: int, block_size: int) -> KVPool:
    """The pool. Raises `ModelLoadError` when there is not that much memory."""
    try:
        return shape.pool(blocks, block_size, loaded.dtype, loaded.device)
    except (MemoryError, RuntimeError) as error:  # torch's out of memory is a RuntimeError
        raise no_room_for_pool(loaded.device, shape.bytes_per_token(loaded.dtype) * block_size * blocks) from error


def no_room_for_pool(device: torch.device, size: int) -> ModelLoadError:
    """The error for a pool of so many bytes that there is no memory for."""
    return ModelLoadError(f"{device} has no {words.size(size)} for the KV pool: choose a smaller device_kv")
