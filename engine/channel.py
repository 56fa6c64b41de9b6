"""Frames of bytes between two processes, over two file objects, without ever making the owner wait.

A frame is a 4-byte little-endian length and that many bytes. Knows nothing of what a frame means.

Frames are read by a thread. They are written at once, as far as the pipe takes them, because handing them to a thread
makes them wait until the owner lets it run; what the pipe does not take is written by a thread, so a slow or dead peer
costs the owner nothing.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import struct
import threading
from collections.abc import Callable
from typing import IO

_LENGTH = struct.Struct("<I")
_AT_ONCE = os.name == "posix"  # elsewhere nobody can say whether a pipe takes more


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
        self._lock = threading.Lock()
        self._left = 0  # pieces that the thread has yet to write, before anything else may be
        self._gone = False  # nobody reads any more
        if _AT_ONCE:
            os.set_blocking(writer.fileno(), False)
        self._threads = [
            threading.Thread(target=self._read, name="channel-read", daemon=True),
            threading.Thread(target=self._write, name="channel-write", daemon=True),
        ]

    def start(self) -> None:
        """Begin to read and write."""
        for thread in self._threads:
            thread.start()

    def send(self, frame: bytes) -> None:
        """Write a frame, or queue it, and return at once. Frames to a peer that is gone are dropped."""
        data = _LENGTH.pack(len(frame)) + frame
        with self._lock:
            if _AT_ONCE and not self._left and not self._gone:
                data = data[self._write_some(data) :]
            if data and not self._gone:
                self._left += 1
                self._outbox.put(data)

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
        while (data := self._outbox.get()) is not None:
            while data and not self._gone:
                self._wait()
                data = data[self._write_some(data) :]
            with self._lock:
                self._left -= 1
        with self._lock, contextlib.suppress(OSError):
            self._gone = True
            self._writer.close()

    def _wait(self) -> None:
        """Until the pipe takes more, or nobody reads it any more."""
        if _AT_ONCE:
            poll = select.poll()
            poll.register(self._writer, select.POLLOUT)
            poll.poll()

    def _write_some(self, data: bytes) -> int:
        """Write as much as the pipe takes; how many bytes of `data` are done with."""
        try:
            return os.write(self._writer.fileno(), data)
        except BlockingIOError:
            return 0
        except (OSError, ValueError):  # the peer is gone, or this end is closed
            self._gone = True
            return len(data)
