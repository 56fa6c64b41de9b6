"""The engine's one thread: drain the inbox → schedule → run → commit → send.

It owns the models and whatever belongs to them, so none of that needs a lock. Knows commands and events; nothing of
pipes, processes or text. Whoever hosts it (a process, or a thread in tests) puts frames in and takes events out.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.cache.cold_laws import cold_violations
from engine.config import EngineConfig
from engine.errors import ModelLoadError
from engine.keeper import Keeper
from engine.model.sources import Progress
from engine.protocol import (
    Cancel,
    Check,
    Checked,
    Command,
    Configure,
    Demote,
    Drop,
    Estimate,
    Event,
    GetSnapshot,
    Load,
    Loaded,
    LoadFailed,
    Loading,
    LoadRefused,
    Pin,
    Prefetch,
    Prefetched,
    Ready,
    Rejected,
    Shutdown,
    Start,
    Submit,
)
from engine.residents import Found, Residents, Wanted
from engine.threads import Threads

COMMANDS = [
    command.__name__
    for command in (Load, Submit, Cancel, Drop, Estimate, Prefetch, Pin, Demote, Configure, GetSnapshot, Check)
]
STUCK_SECONDS = 0.02  # until requests that wait for others look again

log = logging.getLogger(__name__)
Send = Callable[[Sequence[Event]], None]


@dataclass(frozen=True)
class _Call:
    """A message of the engine to itself: a worker has ended, and this notes it."""

    note: Callable[[], None]


@dataclass(frozen=True)
class _Prepared:
    """A message of the engine to itself: the files of this `Load` are there, or why not."""

    load: Load
    result: Found | ModelLoadError


class Engine:
    """One engine. `inbox` takes commands from any thread; `run` is the loop, and returns after `Shutdown`.

    `begin`, `round` and `close` are what it is made of. In its `own_process` it minds what others leave of the cores.
    """

    def __init__(self, send: Send, clock: Callable[[], float] = time.monotonic, *, own_process: bool = False) -> None:
        self.inbox: queue.SimpleQueue[Command | _Prepared | _Call] = queue.SimpleQueue()
        self._send = send
        self._clock = clock
        self._own_process = own_process  # nothing else computes with torch's threads then
        self._threads: Threads | None = None
        self._stopping = False
        self._stuck = False  # requests wait for others that hold the room they need
        self._finding = threading.Lock()  # one model's files at a time: two loads of one model convert it once

    def run(self) -> None:
        """Wait for `Start`, load, then serve until `Shutdown`."""
        command = self.inbox.get()
        if isinstance(command, Start) and self.begin(command.config):
            while not self._stopping:
                self.round()
            self.close()

    def begin(self, config: EngineConfig) -> bool:
        """Load; whether it can serve. `Ready` or `LoadFailed` has been said then."""
        try:
            self._start(config)
        except ModelLoadError as error:
            self._send([LoadFailed(message=str(error))])
            return False
        except Exception as error:
            self._send([LoadFailed(message=str(_unexpected(config.model, error)))])
            return False
        return True

    def round(self) -> None:
        """Handle what has come, or wait for it; one step of every model that has work; some housekeeping."""
        self._drain()
        if self._threads is not None:
            self._threads.adapt()
        began = self._clock()
        self._step()
        self._send_some(self._keeper.tend(self._clock() - began))

    def close(self) -> None:
        """Save what a moment allows, and end the workers."""
        self._keeper.close()

    # --- loading ----------------------------------------------------------------------------------------------------

    def _start(self, config: EngineConfig) -> None:
        logging.getLogger().setLevel(config.log_level.upper())
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        elif self._own_process:
            self._threads = Threads()
        self._residents = Residents(config, self._clock, lambda note: self.inbox.put(_Call(note)))
        self._keeper = Keeper(self._residents, self._clock)
        progress = self._progress("")
        found = self._residents.find(Wanted(config.model, config.adapter, config.dtype, config.weights), progress)
        served = self._residents.bring(found, progress)
        self._send([Ready(capabilities=served.capabilities(found.prepared, COMMANDS))])

    def _progress(self, call_id: str, *, elsewhere: bool = False) -> Progress:
        """Tells how far something is; `elsewhere`: on another thread than the engine's."""

        def tell(stage: str, done: int, total: int) -> None:
            if self._threads is not None and not elsewhere:
                self._threads.adapt()  # so that a start beside other programs is not slower than it must be
            self._send([Loading(call_id=call_id, stage=stage, done=done, total=total)])

        return tell

    def _find(self, load: Load) -> None:
        """On a thread of its own, because fetching and converting take minutes in which others chat."""
        result: Found | ModelLoadError
        try:
            with self._finding:
                wanted = Wanted(load.model, load.adapter, load.dtype, load.weights)
                result = self._residents.find(wanted, self._progress(load.call_id, elsewhere=True))
        except ModelLoadError as error:
            result = error
        except Exception as error:
            result = _unexpected(load.model, error)
        self.inbox.put(_Prepared(load, result))

    def _bring(self, prepared: _Prepared) -> Event:
        call_id = prepared.load.call_id
        try:
            if isinstance(prepared.result, ModelLoadError):
                raise prepared.result
            served = self._residents.bring(prepared.result, self._progress(call_id))
        except ModelLoadError as error:
            return LoadRefused(call_id=call_id, message=str(error))
        except Exception as error:
            return LoadRefused(call_id=call_id, message=str(_unexpected(prepared.load.model, error)))
        return Loaded(call_id=call_id, capabilities=served.capabilities(prepared.result.prepared, COMMANDS))

    # --- serving ----------------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Handle every command that has arrived; wait for one only when there is nothing to run."""
        if all(served.scheduler.idle for served in self._residents):
            seconds = self._keeper.rest_seconds()
            block = seconds is None or seconds > 0
        else:
            seconds, block = STUCK_SECONDS, self._stuck
        while not self._stopping:
            try:
                command = self.inbox.get(block, seconds)
            except queue.Empty:
                return
            block = False
            events = self._handle(command)
            for served in self._residents:  # another's coming may have cost it something
                events += served.scheduler.take_events()
            self._send_some(events)

    def _send_some(self, events: Sequence[Event]) -> None:
        if events:
            self._send(events)

    def _step(self) -> None:
        """One pass of every model that has work, each with what the others can spare where it has not enough."""
        self._stuck = True
        for served in self._residents:
            if self._stopping or served.scheduler.idle:
                continue
            if served.needed_bytes > served.pool_bytes:
                self._residents.settle(served)
            events = served.step()
            self._stuck = self._stuck and events is None
            self._send_some(events or [])

    def _handle(self, command: Command | _Prepared | _Call) -> list[Event]:
        match command:
            case Submit():
                return self._submit(command)
            case Cancel():
                return [
                    event
                    for served in self._residents
                    for event in served.scheduler.cancel(command.request_id, command.index)
                ]
            case Load():
                threading.Thread(target=self._find, args=(command,), name="find-model", daemon=True).start()
                return []
            case _Prepared():
                return [self._bring(command)]
            case _Call():
                command.note()
                return []
            case Prefetch():
                served = self._residents.get(command.model)
                if served is None:
                    return [Prefetched(call_id=command.call_id, device_tokens=0, host_tokens=0, disk_tokens=0)]
                return served.scheduler.prefetch(command)
            case Drop() | Pin() | Demote() | Configure() | Estimate() | GetSnapshot():
                return self._keeper.handle(command)
            case Check():
                broken = [violation for served in self._residents for violation in served.scheduler.violations()]
                broken += [*self._residents.violations(), *cold_violations(self._residents.tiers)]
                return [Checked(call_id=command.call_id, violations=broken)]
            case Shutdown():
                self._stopping = True
                return []
            case Start():
                raise AssertionError("Start came twice")

    def _submit(self, submit: Submit) -> list[Event]:
        served = self._residents.get(submit.model)
        if served is None:
            message = "the model of this chat is not loaded; load it and try again"
            return [Rejected(request_id=submit.request_id, code="no_model", message=message, retryable=True)]
        try:
            self._residents.use(served, lambda *_: None)
        except Exception as error:
            told = error if isinstance(error, ModelLoadError) else _unexpected(served.loaded.prepared.name, error)
            return [Rejected(request_id=submit.request_id, code="no_model", message=str(told), retryable=True)]
        return served.scheduler.submit(submit)


def _unexpected(model: str, error: Exception) -> ModelLoadError:
    log.error("loading failed", exc_info=error)
    return ModelLoadError(f"loading {model} failed: {type(error).__name__}: {error}")
