"""A connection to one engine: it starts the process, carries commands and events, and restarts it when it dies.

It knows the protocol, and nothing of what is asked; every wait ends, whatever the engine does.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import signal
import subprocess
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import TypeVar

from engine.channel import Channel
from engine.config import EngineConfig
from engine.errors import EngineUnavailable, ModelLoadError
from engine.hosting import process_channel, thread_channel
from engine.protocol import (
    CacheLog,
    Capabilities,
    Check,
    Checked,
    Command,
    Configure,
    Configured,
    Demote,
    Demoted,
    Drop,
    Dropped,
    Estimate,
    Estimated,
    Event,
    Finished,
    GetSnapshot,
    Load,
    Loaded,
    LoadFailed,
    Loading,
    LoadRefused,
    Phase,
    Pin,
    Pinned,
    Prefetch,
    Prefetched,
    Progress,
    Ready,
    Rejected,
    Shutdown,
    Snapshot,
    Start,
    Tokens,
    decode_events,
    encode,
)
from engine.state import EngineState, LoadState

log = logging.getLogger(__name__)

CLOSE_SECONDS = 1.0  # how long the engine may take to end by itself
CRASHES, CRASH_WINDOW_S = 3, 120.0  # that many deaths in that time, and it is not started again

StreamEvent = Progress | Tokens | Finished | Rejected
Call = Load | Drop | Estimate | Prefetch | Pin | Demote | Configure | GetSnapshot | Check
Answer = Loaded | LoadRefused | Dropped | Estimated | Prefetched | Pinned | Demoted | Configured | Snapshot | Checked
A = TypeVar("A", Loaded, Dropped, Estimated, Prefetched, Pinned, Demoted, Configured, Snapshot, Checked)


class EngineConnection:
    """One engine: its life, its streams and the calls that wait. Made for one asyncio loop and thread.

    With `in_thread`, the engine runs in a thread of this process: for tests that want to look inside or save time.
    """

    def __init__(
        self, config: EngineConfig, *, in_thread: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.on_cache_log: Callable[[CacheLog], None] | None = None  # told what happens to the cache
        self.started_at = 0.0  # Unix time at which the engine was started last; what it has forgotten is from before
        self._config = config
        self._in_thread = in_thread
        self._clock = clock
        self._state = EngineState("stopped")
        self._changed = asyncio.Event()
        self._streams: dict[str, asyncio.Queue[StreamEvent]] = {}
        self._calls: dict[str, asyncio.Future[Answer]] = {}
        self._loads: dict[str, LoadState] = {}
        self._serves: set[str] = set()
        self._numbers = itertools.count()
        self._crashes: deque[float] = deque(maxlen=CRASHES)
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._ended = asyncio.Event()
        self._closing = False

    # --- life -------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        """The state now; `watch` follows it."""
        return self._state

    @property
    def config(self) -> EngineConfig:
        """What the engine is started with."""
        return self._config

    def serves(self, fingerprint: str) -> bool:
        """Whether this model is served now; a restarted engine serves only the one that it starts with."""
        return fingerprint in self._serves

    @property
    def pid(self) -> int | None:
        """The engine's process id, if it is a process and has been started."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the engine and return at once; `wait_ready` or `watch` tell the rest."""
        self._closing = False
        self._spawn("loading", "")

    async def close(self) -> None:
        """End the engine, by force after a second. Streams and calls that still wait end as if it had died."""
        self._closing = True
        if self._channel is not None:
            if self._state.phase == "ready":  # while it loads it cannot listen, and has nothing to save
                self._channel.send(encode([Shutdown()]))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ended.wait(), CLOSE_SECONDS)
            self._channel.close(timeout=0.1)
        if self._process is not None:
            if self._process.poll() is None and not self._ended.is_set():
                self._process.kill()
            await asyncio.to_thread(self._process.wait)
        self._abandon("The engine was stopped")
        self._set(EngineState("stopped"))

    async def wait_ready(self) -> Capabilities:
        """The capabilities, once the engine is ready. Raises `EngineUnavailable` when it failed or was stopped."""
        async for state in self.watch():
            if state.capabilities is not None and state.phase == "ready":
                return state.capabilities
            if state.phase in ("failed", "stopped"):
                raise EngineUnavailable(state.message or "the engine is stopped")
        raise AssertionError("watch never ends")

    async def watch(self) -> AsyncIterator[EngineState]:
        """The state now, then each change. A slow reader may miss states in between, never the latest."""
        seen: EngineState | None = None
        while True:
            changed = self._changed
            if seen is not self._state:
                seen = self._state
                yield seen
            else:
                await changed.wait()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _call_id(self) -> str:
        return f"call-{next(self._numbers)}"

    async def _call(self, command: Call, answer: type[A]) -> A:
        if self._state.phase != "ready":
            raise EngineUnavailable(self._not_ready("").message)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._calls[command.call_id] = future
        if isinstance(command, Load):
            self._note_load(command.call_id, LoadState(command.model))
        try:
            self._send(command)
            result = await future
        finally:
            del self._calls[command.call_id]
        if isinstance(result, LoadRefused):
            raise ModelLoadError(result.message)
        if not isinstance(result, answer):
            raise TypeError(f"{type(command).__name__} was answered by {type(result).__name__}")
        return result

    def _send(self, command: Command) -> None:
        if self._channel is not None:
            self._channel.send(encode([command]))

    def _not_ready(self, request_id: str) -> Rejected:
        state = self._state
        why = {"loading": f"the model is still loading ({state.stage})", "restarting": state.message}
        message = why.get(state.phase) or state.message or f"the engine is {state.phase}"
        return Rejected(request_id=request_id, code="not_ready", message=message, retryable=True)

    def _note_load(self, call_id: str, load: LoadState | None) -> None:
        """How far a load is; None: it is over."""
        if load is not None:
            self._loads[call_id] = load
        else:
            self._loads.pop(call_id, None)
        self._set(self._state)

    def _set(self, state: EngineState) -> None:
        self._state = replace(state, loads=tuple(self._loads.values()))
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _spawn(self, phase: Phase, message: str) -> None:
        self._serves, self.started_at = set(), time.time()
        self._set(EngineState(phase, stage="starting the engine" if phase == "loading" else "", message=message))
        loop, generation = asyncio.get_running_loop(), object()
        self._ended = ended = asyncio.Event()
        self._generation = generation

        def on_frame(frame: bytes) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                loop.call_soon_threadsafe(self._on_frame, generation, frame)

        def on_end() -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._on_end, generation, ended)

        if self._in_thread:
            self._channel = thread_channel(on_frame, on_end)
        else:
            self._process, self._channel = process_channel(on_frame, on_end)
        self._send(Start(config=self._config))

    def _on_frame(self, generation: object, frame: bytes) -> None:
        if generation is not self._generation:
            return
        for event in decode_events(frame):
            self._on_event(event)

    def _on_event(self, event: Event) -> None:
        match event:
            case Loading() if event.call_id in self._loads:
                load = self._loads[event.call_id]
                self._note_load(event.call_id, LoadState(load.model, event.stage, event.done, event.total))
            case Loading() if event.call_id:
                pass  # whoever asked went away
            case Loading():
                self._set(replace(self._state, stage=event.stage, done=event.done, total=event.total))
            case Ready():
                self._serves.add(event.capabilities.fingerprint)
                self._set(EngineState("ready", capabilities=event.capabilities))
            case LoadFailed():
                self._set(EngineState("failed", message=event.message))
            case CacheLog():
                if self.on_cache_log is not None:
                    self.on_cache_log(event)
            case Progress() | Tokens() | Finished() | Rejected():
                stream = self._streams.get(event.request_id)
                if stream is not None:
                    stream.put_nowait(event)
            case _:
                if isinstance(event, Loaded):
                    self._serves.add(event.capabilities.fingerprint)
                future = self._calls.get(event.call_id)
                if future is not None and not future.done():
                    future.set_result(event)

    def _on_end(self, generation: object, ended: asyncio.Event) -> None:
        ended.set()
        if generation is not self._generation or self._closing or self._state.phase == "failed":
            return
        reason = f"The engine stopped unexpectedly{self._exit_words()}"
        log.warning("%s", reason)
        self._abandon(reason)
        now = self._clock()
        self._crashes.append(now)
        if len(self._crashes) == CRASHES and now - self._crashes[0] < CRASH_WINDOW_S:
            self._set(EngineState("failed", message=f"{reason}, {CRASHES} times in a row; see the log, then restart"))
        else:
            self._spawn("restarting", f"{reason}; it is being restarted")

    def _exit_words(self) -> str:
        if self._process is None:
            return ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(timeout=0.2)
            with contextlib.suppress(ValueError):
                return f" ({signal.Signals(-code).name})" if code < 0 else f" (exit code {code})"
        return ""

    def _abandon(self, reason: str) -> None:
        cut = f"{reason}, and this reply was cut off."
        for request_id, stream in self._streams.items():
            stream.put_nowait(Rejected(request_id=request_id, code="engine_died", message=cut, retryable=True))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineUnavailable(reason))
