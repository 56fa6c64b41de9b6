"""The engine's one thread: drain the inbox → schedule → run → commit → send.

It owns the model, the pool and the scheduler, so none of them needs a lock. Knows commands and events; nothing of
pipes, processes or text. Whoever hosts it (a process, or a thread in tests) puts frames in and takes events out.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from engine.cache.manager import BlockManager
from engine.cache.pool import KVPool
from engine.config import EngineConfig
from engine.errors import EngineError, ModelLoadError
from engine.model import loading, selfcheck, sources
from engine.model.runner import ModelRunner
from engine.protocol import (
    Cancel,
    Capabilities,
    Check,
    Checked,
    Command,
    Drop,
    Dropped,
    Estimate,
    Estimated,
    Event,
    GetSnapshot,
    LoadFailed,
    Loading,
    Ready,
    Rejected,
    Shutdown,
    Snapshot,
    Start,
    Submit,
)
from engine.scheduler import Scheduler

MIN_POOL_BYTES = 256 * 2**20
WARM_UP_TOKENS = 64

log = logging.getLogger(__name__)
Send = Callable[[Sequence[Event]], None]


class Engine:
    """One engine. `inbox` takes commands from any thread; `run` is the loop, and returns after `Shutdown`."""

    def __init__(self, send: Send, clock: Callable[[], float] = time.monotonic) -> None:
        self.inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._send = send
        self._clock = clock
        self._stopping = False

    def run(self) -> None:
        """Wait for `Start`, load, then serve until `Shutdown`."""
        command = self.inbox.get()
        if not isinstance(command, Start):
            return
        try:
            self._load(command.config)
        except ModelLoadError as error:
            self._send([LoadFailed(message=str(error))])
            return
        except Exception as error:
            log.exception("loading failed")
            self._send([LoadFailed(message=f"loading {command.config.model} failed: {type(error).__name__}: {error}")])
            return
        while not self._stopping:
            self._drain()
            self._step()

    # --- start ------------------------------------------------------------------------------------------------------

    def _load(self, config: EngineConfig) -> None:
        logging.getLogger().setLevel(config.log_level.upper())
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        loading.choose(config.device, config.dtype)  # a wrong name is said before the weights are converted
        prepared = sources.prepare(config.model, Path(config.cache_dir), self._progress)
        self._progress("loading weights")
        loaded = loading.load(prepared, config.device, config.dtype)
        shape = selfcheck.probe(loaded)
        context = loading.context_length(loaded)
        block_bytes = shape.bytes_per_token(loaded.dtype) * config.block_size
        pool = _make_pool(loaded, shape, _pool_blocks(config, context, block_bytes), config.block_size)
        self._progress("checking attention")
        selfcheck.check(loaded, pool)
        fingerprint = loading.fingerprint(loaded, config.block_size)
        self._runner = ModelRunner(loaded, pool)
        self._manager = BlockManager(
            total_blocks=pool.blocks,
            block_size=pool.block_size,
            fingerprint=bytes.fromhex(fingerprint),
            copy_tokens=self._runner.copy_tokens,
        )
        self._block_bytes = block_bytes
        vocabulary = loaded.module.get_input_embeddings().num_embeddings
        self._scheduler = Scheduler(
            self._manager,
            context_length=context,
            vocab_size=vocabulary,
            max_batch_tokens=config.max_batch_tokens,
            clock=self._clock,
        )
        self._progress("warming up")
        self._warm_up(vocabulary)
        self._send(
            [
                Ready(
                    capabilities=Capabilities(
                        model_name=prepared.name,
                        model_path=str(prepared.path),
                        fingerprint=fingerprint,
                        device=str(loaded.device),
                        dtype=str(loaded.dtype).removeprefix("torch."),
                        attention="paged SDPA",
                        context_length=context,
                        vocab_size=vocabulary,
                        eos_ids=loading.eos_ids(loaded),
                        block_size=pool.block_size,
                        total_blocks=pool.blocks,
                        kv_bytes_per_token=shape.bytes_per_token(loaded.dtype),
                        threads=torch.get_num_threads(),
                        commands=[c.__name__ for c in (Submit, Cancel, Drop, Estimate, GetSnapshot, Check)],
                    )
                )
            ]
        )

    def _progress(self, stage: str, done: int = 0, total: int = 0) -> None:
        self._send([Loading(stage=stage, done=done, total=total)])

    def _warm_up(self, vocabulary: int) -> None:
        """A real request through every part, so that no person pays for the first one; it leaves nothing behind."""
        ids = [(31 * i + 5) % vocabulary for i in range(min(WARM_UP_TOKENS, self._scheduler.context_length - 2))]
        self._scheduler.submit(Submit(request_id="warm-up", session_id="warm-up", token_ids=ids, max_tokens=2))
        while not self._scheduler.idle:
            batch = self._scheduler.schedule()
            if batch is None:
                break
            self._scheduler.commit(batch, self._runner.run(batch))
        self._scheduler.drop("warm-up")
        self._runner.steps = self._runner.forwarded_tokens = 0
        self._scheduler.reset_counters()

    # --- serving ----------------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Handle every command that has arrived; wait for one only when there is nothing to run."""
        block = self._scheduler.idle
        while not self._stopping:
            try:
                command = self.inbox.get(block=block)
            except queue.Empty:
                return
            block = False
            events = self._handle(command)
            if events:
                self._send(events)

    def _step(self) -> None:
        if self._stopping:
            return
        try:
            batch = self._scheduler.schedule()
            sampled = self._runner.run(batch) if batch is not None else []
        except (EngineError, MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
            log.exception("a step failed")
            events = self._scheduler.fail(f"the model failed while computing this reply: {error}")
            if not any(isinstance(event, Rejected) for event in events):
                raise  # no request can be blamed, so the books are wrong: start again with new ones
        else:
            events = self._scheduler.commit(batch, sampled) if batch is not None else self._scheduler.take_events()
        if events:
            self._send(events)

    def _handle(self, command: Command) -> list[Event]:
        match command:
            case Submit():
                return self._scheduler.submit(command)
            case Cancel():
                return self._scheduler.cancel(command.request_id, command.index)
            case Drop():
                blocks, events = self._scheduler.drop(command.session_id)
                freed = Dropped(call_id=command.call_id, blocks=blocks, bytes=blocks * self._block_bytes)
                return [*events, freed]
            case Estimate():
                found = self._scheduler.estimate(command.token_ids, command.salt, command.shared_len)
                total = len(command.token_ids)
                return [
                    Estimated(
                        call_id=command.call_id, prompt_tokens=total, device_tokens=found, computed_tokens=total - found
                    )
                ]
            case GetSnapshot():
                return [self._snapshot(command.call_id)]
            case Check():
                return [Checked(call_id=command.call_id, violations=self._scheduler.violations())]
            case Shutdown():
                self._stopping = True
                return []
            case Start():
                raise AssertionError("Start came twice")

    def _snapshot(self, call_id: str) -> Snapshot:
        return Snapshot(
            call_id=call_id,
            block_bytes=self._block_bytes,
            steps=self._runner.steps,
            forwarded_tokens=self._runner.forwarded_tokens,
            **self._scheduler.snapshot_fields(),
        )


def _make_pool(loaded: loading.LoadedModel, shape: selfcheck.KVShape, blocks: int, block_size: int) -> KVPool:
    """The pool. Raises `ModelLoadError` when there is not that much memory."""
    try:
        return KVPool(
            layers=shape.layers,
            blocks=blocks,
            block_size=block_size,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=loaded.dtype,
            device=loaded.device,
        )
    except (MemoryError, RuntimeError) as error:  # torch's out of memory is a RuntimeError
        size = shape.bytes_per_token(loaded.dtype) * block_size * blocks
        raise ModelLoadError(
            f"{loaded.device} has no {size} bytes for the KV pool: choose a smaller device_kv"
        ) from error


def _pool_blocks(config: EngineConfig, context: int, block_bytes: int) -> int:
    """Blocks that the budget buys. Raises `ModelLoadError` when it buys fewer than two."""
    if config.device_kv is None:
        contexts = 2 * -(-context // config.block_size)
        return max(contexts, MIN_POOL_BYTES // block_bytes)
    blocks = config.device_kv // block_bytes
    if blocks < 2:
        raise ModelLoadError(
            f"device_kv of {config.device_kv} bytes holds {blocks} blocks; this model needs at least two, "
            f"{2 * block_bytes} bytes"
        )
    return blocks
