"""Where an engine runs: in a process of its own, or, for tests, in a thread of this one. Both are two pipes.

Knows how to start one and how frames reach it; nothing of what they say, and nothing of restarts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from engine.channel import Channel
from engine.protocol import Shutdown, decode_commands, encode

# Torch's threads spin for a moment, not for ever, while they wait for each other: alone, a step of one token took 26 ms
# where threads that sleep at once took 37; beside a program that wants a core there are fewer of them (engine.threads).
ENGINE_ENVIRONMENT = {"GOMP_SPINCOUNT": "100000"}


def process_channel(
    on_frame: Callable[[bytes], None], on_end: Callable[[], None]
) -> tuple[subprocess.Popen[bytes], Channel]:
    """A new engine process, and our end of its pipes; `on_end` is called when it is gone."""
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, "-m", "engine"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**ENGINE_ENVIRONMENT, **os.environ, "PYTHONPATH": path},
        start_new_session=True,  # a Ctrl-C in the terminal is for the web side, which ends the engine in order
    )
    if process.stdin is None or process.stdout is None:
        raise AssertionError("both pipes were asked for")
    channel = Channel(process.stdout, process.stdin, on_frame, on_end)
    channel.start()
    return process, channel


def thread_channel(on_frame: Callable[[bytes], None], on_end: Callable[[], None]) -> Channel:
    """A new engine thread, and our end of its pipes; `on_end` is called when it has ended."""
    from engine.loop import Engine  # heavy: torch and transformers

    (engine_in, to_engine), (from_engine, engine_out) = os.pipe(), os.pipe()

    def receive(frame: bytes) -> None:
        for command in decode_commands(frame):
            engine.inbox.put(command)

    def serve() -> None:
        try:
            engine.run()
        finally:
            inner.close()

    engine = Engine(lambda events: inner.send(encode(events)))
    inner = Channel(
        os.fdopen(engine_in, "rb"), os.fdopen(engine_out, "wb"), receive, lambda: engine.inbox.put(Shutdown())
    )
    outer = Channel(os.fdopen(from_engine, "rb"), os.fdopen(to_engine, "wb"), on_frame, on_end)
    inner.start()
    outer.start()
    threading.Thread(target=serve, name="engine", daemon=True).start()
    return outer
