"""The servers that are compared, and how each is started and stopped for a while. Measures nothing."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

ROOT = Path(__file__).resolve().parent.parent.parent
START_LIMIT = 900.0  # seconds; a first start may compile


class PeerError(Exception):
    """A server that cannot be started here. `str()` says why in one line."""


@dataclass(frozen=True)
class Peer:
    """A server: its name, what it computes with, and its command line."""

    name: str
    weights: str
    command: Callable[[Path, int, Path], list[str]]  # of the model's folder, the port, and a folder for its own files
    ready: str = "/health"  # answers 200 once it is


@dataclass(frozen=True)
class Server:
    """A peer that runs: its address, the model's name there, and the seconds from its start until it was ready."""

    peer: Peer
    url: str
    model: str
    start_s: float
    process: psutil.Process

    def pause(self) -> None:
        """Stop all of its processes, so that it takes nothing from the one that is measured."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let them run."""
        self._signal(signal.SIGCONT)

    def rss(self) -> int:
        """Bytes of memory of all its processes; what they share counts once."""
        return sum(process.memory_full_info().pss for process in self._processes())

    def _signal(self, number: int) -> None:
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _processes(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]


@contextlib.contextmanager
def running(peer: Peer, model_folder: Path, scratch: Path) -> Iterator[Server]:
    """The peer's server, ready, until the block ends; its output is in `scratch`. Raises `PeerError`."""
    port, log = _free_port(), scratch / f"{peer.name}.log"
    command, environment = peer.command(model_folder, port, scratch), {**os.environ, "HF_HUB_OFFLINE": "1"}
    url, began = f"http://127.0.0.1:{port}/v1", time.perf_counter()
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    server: Server | None = None
    try:
        model = _wait_ready(process, url, peer.ready, log)
        server = Server(peer, url, model, time.perf_counter() - began, psutil.Process(process.pid))
        yield server
    finally:
        if server is not None:
            server.go_on()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)


def _model(url: str) -> str:
    name: str = httpx.get(f"{url}/models", timeout=30).json()["data"][0]["id"]
    return name


def _wait_ready(process: subprocess.Popen[bytes], url: str, ready: str, log: Path) -> str:
    """The name of the model, once the server answers for it."""
    until = time.monotonic() + START_LIMIT
    while time.monotonic() < until:
        if process.poll() is not None:
            raise PeerError(f"it ended with {process.returncode}: {_last_line(log)}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url.removesuffix('/v1')}{ready}", timeout=5).status_code == httpx.codes.OK:
                return _model(url)
        time.sleep(0.05)
    raise PeerError(f"it was not ready after {START_LIMIT:.0f} s: {_last_line(log)}")


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    return re.sub(r"\x1b\[[0-9;]*m", "", lines[-1])[:200] if lines else "it said nothing"


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


# --- who they are -----------------------------------------------------------------------------------------------------


def _keepwarm(model: Path, port: int, scratch: Path) -> list[str]:
    data = scratch / "keepwarm"
    return [
        sys.executable, "app.py", "--no-browser", "--port", str(port), "--data-dir", str(data), "--model", str(model),
        "--dtype", "bfloat16",
    ]  # fmt: skip


def _generate(model: Path, port: int, _: Path) -> list[str]:
    return [sys.executable, "-m", "tests.bench.generate_server", str(model), str(port)]


PEERS = (
    Peer("keepwarm", "bfloat16", _keepwarm, ready="/readyz"),
    Peer("generate", "bfloat16", _generate, ready="/v1/models"),
)
