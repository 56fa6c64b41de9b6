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

import uvicorn
from fastapi import FastAPI

from chat.settings import Settings

T = TypeVar("T")


class ListenError(Exception):
    """The port cannot be had. `str()` is one line that names it and the fix."""


def listen(host: str, port: int) -> socket.socket:
    """The listening socket, open from the first moment on: a page that comes early waits instead of failing.

    Port 0 takes a free one. Raises ListenError.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        fix = f"choose another with --port {port + 1 if port < 65535 else 7860}, or --port 0 for a free one"
        if error.errno == errno.EADDRINUSE:
            raise ListenError(f"port {port} is in use by another program; {fix}") from error
        if error.errno != errno.EACCES:
            fix = "choose another address with --host 127.0.0.1"
        raise ListenError(f"cannot listen on {host} port {port} ({error.strerror}); {fix}") from error
    # Accepted connections inherit it. asyncio would set it only where the socket was made with the protocol's number,
    # and without it the second part of every answer waits for the client's delayed acknowledgement, 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def page_url(settings: Settings) -> str:
    """The page's address, as a person types it."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{settings.port}"


class Server(uvicorn.Server):
    """uvicorn with our logging, ended by its owner instead of by its own signal handlers.

    Once told to exit it waits a second at most for open streams: a tab keeps one open for as long as it lives.
    """

    def __init__(self, web: FastAPI) -> None:
        debug = logging.getLogger().isEnabledFor(logging.DEBUG)
        super().__init__(uvicorn.Config(web, log_config=None, access_log=debug, timeout_graceful_shutdown=1, ws="none"))

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave the signals to `catch_signals`, which also ends what uvicorn does not know."""
        yield


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
