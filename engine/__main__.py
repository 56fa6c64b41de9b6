"""`python -m engine`: one engine process. Frames of commands come in on standard input, of events go out on output.

It ends when its input does, so it never outlives whoever started it, however that one ended.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence

from engine.channel import Channel
from engine.protocol import Event, decode_commands, encode


def main() -> None:
    """Serve one peer until it says `Shutdown` or goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the web side ends us in order
    os.environ.setdefault("TQDM_DISABLE", "1")  # progress goes out as events; bars would litter the terminal
    logging.basicConfig(format="engine: %(message)s")
    # A library that prints must not spoil the frames: they get a descriptor of their own, prints go to standard error.
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    from engine.loop import Engine  # heavy: torch and transformers

    def send(events: Sequence[Event]) -> None:
        channel.send(encode(events))

    def receive(frame: bytes) -> None:
        for command in decode_commands(frame):
            engine.inbox.put(command)

    engine = Engine(send, own_process=True)
    channel = Channel(sys.stdin.buffer, output, receive, lambda: os._exit(0))
    channel.start()
    code = 1
    try:
        engine.run()
        code = 0
    except BaseException:
        logging.getLogger("engine").exception("the engine ends on an error")
    channel.close()
    os._exit(code)  # the reading thread still waits on standard input, which an interpreter that winds down aborts on


if __name__ == "__main__":
    main()
