"""The port, the address and the thread that a serving process uses; its signals are tested on real processes."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from fastapi import FastAPI

from chat import serving
from chat.serving import ListenError, Server, in_thread, listen, open_page, page_url
from chat.settings import load_settings

ROOT = Path(__file__).resolve().parents[2]


def test_port_0_takes_a_free_one() -> None:
    with listen("127.0.0.1", 0) as first, listen("localhost", 0) as second:
        ports = {first.getsockname()[1], second.getsockname()[1]}
        assert len(ports) == 2
        assert 0 not in ports


def test_a_connection_is_taken_before_anything_serves_it() -> None:
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname(), timeout=5) as early:
        assert early.getpeername() == listener.getsockname()


def test_no_answer_waits_for_an_acknowledgement() -> None:
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname(), timeout=5):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_port_in_use_and_an_address_that_is_not_here() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ListenError, match=f"port {port} is in use by another program; choose another with --port"):
            listen("127.0.0.1", port)
    with pytest.raises(ListenError, match=r"cannot listen on 203\.0\.113\.1 port 7860 .* --host 127\.0\.0\.1"):
        listen("203.0.113.1", 7860)


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv, to give up the right to low ports")
def test_a_port_that_only_an_administrator_may_take() -> None:
    if int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text()) <= 80:
        pytest.skip("anybody may take port 80 here")
    code = (
        "from chat.serving import ListenError, listen\ntry: listen('127.0.0.1', 80)\nexcept ListenError as e: print(e)"
    )
    command = ["setpriv", "--bounding-set=-net_bind_service", sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"setpriv cannot do that here: {done.stderr.strip()}")
    assert done.stdout == (
        "cannot listen on 127.0.0.1 port 80 (Permission denied); choose a port from 1024 on, such as --port 7860\n"
    )


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:80"), ("::1", "http://[::1]:80"), ("localhost", "http://localhost:80")],
)
def test_the_address_as_a_person_types_it(host: str, url: str) -> None:
    assert page_url(load_settings({"host": host, "port": "80"})) == url


async def test_a_thread_hands_back_what_it_returns_or_raises() -> None:
    assert await in_thread(threading.current_thread) is not threading.current_thread()
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0)


async def test_a_thread_does_not_keep_who_no_longer_waits() -> None:
    go_on = threading.Event()
    waiting = asyncio.create_task(in_thread(go_on.wait))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    go_on.set()


@asynccontextmanager
async def served() -> AsyncIterator[int]:
    """The port of a server that answers nothing."""
    with listen("127.0.0.1", 0) as listener:
        server = Server(FastAPI())
        task = asyncio.create_task(server.serve([listener]))
        yield listener.getsockname()[1]
        server.should_exit = True
        await task


async def status(port: int, request: bytes = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n") -> bytes:
    """The first line of the answer; empty when there is none."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    line = await reader.readline()
    writer.close()
    return line


async def test_connections_beyond_what_there_is_room_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "room_for_connections", lambda: (20, 20))
    async with served() as port:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        assert (await status(port)).startswith(b"HTTP/1.1 503 ")
        for _, writer in held:
            writer.close()
        async with asyncio.timeout(20):
            while not (await status(port)).startswith(b"HTTP/1.1 404 "):
                pass


async def test_a_client_that_never_says_what_it_wants_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "HEAD_SECONDS", 0.05)
    async with served() as port:
        for half in (b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(half)
            async with asyncio.timeout(20):
                await reader.read()  # to its end
            writer.close()
        assert (await status(port)).startswith(b"HTTP/1.1 404 ")


@pytest.mark.skipif(os.name == "nt", reason="there is no such limit there")
def test_as_many_files_as_connections_need_are_allowed() -> None:
    code = (
        "import resource; from chat.serving import room_for_connections as room; files = resource.RLIMIT_NOFILE\n"
        "hard = resource.getrlimit(files)[1]; resource.setrlimit(files, (300, hard)); print(*room())\n"
        "print(resource.getrlimit(files)[0]); resource.setrlimit(files, (300, 300)); print(*room())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    raised, files, held = done.stdout.splitlines()
    assert sum(map(int, raised.split())) <= int(files) - 256
    assert int(files) > 300
    assert held == "22 22"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only there a screen may be missing")
def test_without_a_screen_no_browser_is_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    open_page("http://127.0.0.1:1").join(5)
    assert capsys.readouterr().out == "No browser could be opened here; go to http://127.0.0.1:1 yourself.\n"


@pytest.mark.skipif(os.name == "nt", reason="needs a shell script as the browser")
def test_the_persons_own_browser_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    browser, opened = tmp_path / "browser", tmp_path / "opened"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(0o700)
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    monkeypatch.setattr("webbrowser._tryorder", None)  # read the variable anew
    open_page("http://127.0.0.1:1").join(5)
    assert opened.read_text() == "http://127.0.0.1:1\n"
