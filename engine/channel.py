"""Frames of bytes between two processes, over two file objects, without ever making the owner wait.

A frame is a 4-byte little-endian length and that many bytes. One thread reads, one writes, so a slow or dead peer
costs the owner nothing. Knows nothing of what a frame means.
"""

from __future__ import annotations

import contextlib
import queue
import struct
import threading
from collections.abc import Callable
from typing import IO

_LENGTH = struct.Struct("<I")


class Channel:
    """One end of a pair of pipes.

    `on_frame` and `on_end` are called on the reading thread: `on_end` once, after the last frame, when the peer has
    closed its end or is gone.
    """

    def __init__(
        self,
        reader: IO[bytes],
        writer: IO[bytes],
        on_frame: Callable[[bytes], None],
        on_end: Callable[[], None],
    ) -> None:
        self._reader, self._writer = reader, writer
        self._on_frame, self._on_end = on_frame, on_end
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._read, name="channel-read", daemon=True),
            threading.Thread(target=self._write, name="channel-write", daemon=True),
        ]

    def start(self) -> None:
        """Begin to read and write."""
        for thread in self._threads:
            thread.start()

    def send(self, frame: bytes) -> None:
        """Queue a frame and return at once. Frames to a peer that is gone are dropped."""
        self._outbox.put(frame)

    def close(self, timeout: float = 1.0) -> None:
        """Write what is queued, then close the writing end; waits at most `timeout` seconds."""
        self._outbox.put(None)
        self._threads[1].join(timeout)

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while header := self._exactly(_LENGTH.size):
                frame = self._exactly(_LENGTH.unpack(header)[0])
                if not frame:
                    break
                self._on_frame(frame)
        with contextlib.suppress(OSError):
            self._reader.close()
        self._on_end()

    def _exactly(self, count: int) -> bytes:
        """`count` bytes, or b"" when the stream ends first."""
        data = bytearray()
        while len(data) < count:
            chunk = self._reader.read(count - len(data))
            if not chunk:
                return b""
            data += chunk
        return bytes(data)

    def _write(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while (frame := self._outbox.get()) is not None:
                self._writer.write(_LENGTH.pack(len(frame)) + frame)
                self._writer.flush()
        with contextlib.suppress(OSError):
            self._writer.close()
