"""Time told by parts, one inside another counted once; and an engine in this thread, whose rounds are taken by hand.

It knows what an engine is made of, and nothing of how figures are shown.
"""

from __future__ import annotations

import itertools
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any

from msgspec.structs import replace

from engine.channel import Channel
from engine.config import EngineConfig
from engine.loop import Engine
from engine.model import runner
from engine.protocol import (
    Cancel,
    Event,
    Finished,
    GetSnapshot,
    LoadFailed,
    Rejected,
    Sampling,
    Submit,
    Tokens,
    encode,
)
from engine.served import ServedModel

FORWARD = "forward pass"
PARTS = {
    "what has come": ("engine", "_drain"),
    "schedule": ("scheduler", "schedule"),
    FORWARD: ("runner", "logits"),
    "sampling": ("sampling", "sample"),
    "rows and draws": ("runner", "run"),
    "commit, events": ("scheduler", "commit"),
    "housekeeping": ("keeper", "tend"),
}
SEND, REST = "encode, send", "the rest of the loop"
GREEDY = Sampling()


class Stopwatch:
    """Seconds by part since they were cleared. What is a part itself is taken out of the one around it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def timed(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """`work`, with its time told as `part`."""

        def run(*args: Any, **more: Any) -> Any:
            self._inner.append(0.0)
            began = time.perf_counter()
            try:
                return work(*args, **more)
            finally:
                took = time.perf_counter() - began
                self.seconds[part] += took - self._inner.pop()
                self._inner[-1] += took

        return run


class ByHand:
    """A real engine, and a pipe to a process that reads all it says. `round` does one of its rounds.

    Raises `RuntimeError` when it cannot load.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.watch = Stopwatch()
        self._numbers = itertools.count()
        self._running: set[str] = set()
        self._writing: set[str] = set()
        self._refused = ""
        self._listener = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert self._listener.stdin is not None
        self._channel = Channel(BytesIO(), self._listener.stdin, lambda _: None, lambda: None)
        self._channel.start()
        self._engine = Engine(self.watch.timed(SEND, self._send))
        if not self._engine.begin(replace(config, speculate=0)):  # a step is a token, so that steps can be compared
            self._channel.close()
            raise RuntimeError(self._refused)
        self.served: ServedModel = next(iter(self._engine._residents))
        owners = {
            "engine": self._engine,
            "scheduler": self.served.scheduler,
            "runner": self.served.runner,
            "keeper": self._engine._keeper,
            "sampling": runner,
        }
        for part, (owner, name) in PARTS.items():
            setattr(owners[owner], name, self.watch.timed(part, getattr(owners[owner], name)))
        self.round = self.watch.timed(REST, self._engine.round)

    def close(self) -> None:
        """End the engine and whoever listens to it."""
        self._engine.close()
        self._channel.close()
        self._listener.wait()

    def submit(self, session_id: str, ids: Sequence[int], tokens: int, sampling: Sampling = GREEDY) -> None:
        """Ask for so many tokens."""
        request_id = f"request-{next(self._numbers)}"
        self._running.add(request_id)
        self._engine.inbox.put(
            Submit(
                request_id=request_id, session_id=session_id, token_ids=list(ids), max_tokens=tokens, sampling=sampling
            )
        )

    def until_all_write(self) -> None:
        """Go on until every request has its first token."""
        while self._writing < self._running:
            self.round()

    def finish(self) -> None:
        """Go on until all requests have ended and what they leave is on disk."""
        while self._running:
            self.round()
        while self.served.residency.saver.unsaved:
            self._engine._keeper.tend(0.0)
            self._engine.inbox.put(GetSnapshot(call_id=""))
            self._engine._drain()

    def stop(self) -> None:
        """End all requests where they are."""
        for request_id in list(self._running):
            self._engine.inbox.put(Cancel(request_id=request_id))
        self.finish()

    def _send(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case Tokens():
                    self._writing.add(event.request_id)
                case Finished():
                    self._running.discard(event.request_id)
                    self._writing.discard(event.request_id)
                case Rejected():
                    raise RuntimeError(event.message)
                case LoadFailed():
                    self._refused = event.message
        self._channel.send(encode(events))
