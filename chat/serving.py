"""How the page is put on a port of this machine: the socket, uvicorn, the signals, the browser, the terminal.

This module knows nothing of what is served.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from chat.settings import Settings

MOST_CONNECTIONS, BACKLOG = 2048, 2048
OTHER_FILES = 256  # the database's, the engine's pipes, what the page is made of
HEAD_SECONDS = 30.0  # that a client may take to say what it wants

T = TypeVar("T")


class ListenError(Exception):
    """The port cannot be had. `str()` is one line that names it and the fix."""


def listen(host: str, port: int) -> socket.socket:
    """The listening socket, open from the first moment on: a page that comes early waits instead of failing.

    Port 0 takes a free one. Raises ListenError.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            other = port + 1 if port < 65535 else 7860
            fix = f"choose another with --port {other}, or --port 0 for a free one"
            raise ListenError(f"port {port} is in use by another program; {fix}") from error
        denied = error.errno == errno.EACCES
        fix = "choose a port from 1024 on, such as --port 7860" if denied else "choose another with --host 127.0.0.1"
        reason = os.strerror(error.errno) if error.errno and error.errno in errno.errorcode else error.strerror
        raise ListenError(f"cannot listen on {host} port {port} ({reason}); {fix}") from error
    # Accepted connections inherit it. asyncio would set it only where the socket was made with the protocol's number,
    # and without it the second part of every answer waits for the client's delayed acknowledgement, 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def page_url(settings: Settings) -> str:
    """The page's address, as a person types it."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{settings.port}"


class Connection(H11Protocol):
    """A client's connection; ended when there are too many of them, or when a request does not begin in time.

    asyncio would otherwise run out of files and do nothing but complain, and a client may begin and never go on.
    """

    _impatience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request, or refuse."""
        super().connection_made(transport)
        if len(self.connections) > (self.limit_concurrency or MOST_CONNECTIONS):
            transport.write(b"HTTP/1.1 503 Too Many Connections\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            transport.close()
        else:
            self._be_patient()

    def data_received(self, data: bytes) -> None:
        """Go on waiting where the head of a request is not complete."""
        super().data_received(data)
        self._be_patient()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        if self._impatience is not None:
            self._impatience.cancel()
        super().connection_lost(exc)

    def _be_patient(self) -> None:
        waits = self.conn.their_state is h11.IDLE
        if waits and self._impatience is None:
            self._impatience = self.loop.call_later(HEAD_SECONDS, self.transport.close)
        elif not waits and self._impatience is not None:
            self._impatience.cancel()
            self._impatience = None


class Server(uvicorn.Server):
    """uvicorn with our logging, ended by its owner instead of by its own signal handlers.

    Once told to exit it waits a second at most for open streams: a tab keeps one open for as long as it lives.
    """

    def __init__(self, web: FastAPI) -> None:
        connections, backlog = room_for_connections()
        super().__init__(
            uvicorn.Config(
                web,
                http=Connection,
                ws="none",
                log_config=None,
                access_log=logging.getLogger().isEnabledFor(logging.DEBUG),
                limit_concurrency=connections,
                backlog=backlog,  # asyncio takes as many at once, whatever there is room for
                timeout_graceful_shutdown=1,
            )
        )

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave the signals to `catch_signals`, which also ends what uvicorn does not know."""
        yield


def room_for_connections() -> tuple[int, int]:
    """How many connections may be open at once, and how many more may come in at a time.

    First lets this process have as many files as that takes, if it may.
    """
    files = MOST_CONNECTIONS + BACKLOG + OTHER_FILES
    if sys.platform != "win32":
        import resource

        soft, hard = (
            files if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
        )
        if soft < files:
            with suppress(ValueError, OSError):
                resource.setrlimit(
                    resource.RLIMIT_NOFILE, (min(files, hard), resource.getrlimit(resource.RLIMIT_NOFILE)[1])
                )
                soft = min(files, hard)
        files = min(files, soft)
    spare = max(2, files - OTHER_FILES)
    connections = min(MOST_CONNECTIONS, spare // 2)
    return connections, min(BACKLOG, spare - connections)


def catch_signals() -> asyncio.Event:
    """An event that the first Ctrl-C (or a polite kill) sets; the second Ctrl-C ends the process at once."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    seen: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        if seen and number == signal.SIGINT:
            os._exit(130)
        seen.append(number)
        with suppress(RuntimeError):  # the loop has ended already
            loop.call_soon_threadsafe(stop.set)

    for name in ("SIGINT", "SIGTERM", "SIGBREAK", "SIGHUP"):
        if hasattr(signal, name) and not (name == "SIGHUP" and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN):
            signal.signal(getattr(signal, name), on_signal)
    return stop


async def in_thread(function: Callable[[], T]) -> T:
    """Run `function` in a thread that, unlike asyncio's own, does not keep a process that wants to end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(setter: Callable[[Any], None], value: object) -> None:
        if not future.done():
            setter(value)

    def work() -> None:
        try:
            outcome: tuple[Callable[[Any], None], object] = (future.set_result, function())
        except Exception as error:
            outcome = (future.set_exception, error)
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=work, daemon=True).start()
    return await future


def open_page(url: str) -> threading.Thread:
    """Open a browser, in a thread because some wait until it closes; failing to is worth a word and no more."""

    def work() -> None:
        screen = any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
        opened = False
        if screen or not sys.platform.startswith("linux"):  # a text browser would take the terminal over
            with suppress(webbrowser.Error, OSError):
                opened = webbrowser.open(url)
        if not opened:
            say(f"No browser could be opened here; go to {url} yourself.")

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def say(line: str) -> None:
    """A line for the person at the terminal, who may have closed it."""
    with suppress(OSError, ValueError):
        print(line, flush=True)
