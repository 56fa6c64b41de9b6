"""Servers that run: started, stopped for a while, their memory, and ended. Knows none of them by name."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from tests.bench.environments import ROOT, PeerError, last_line

START_LIMIT = 900.0  # seconds; a first start may compile
END_LIMIT = 20.0


@dataclass(frozen=True)
class Launch:
    """A command line, variables beside those of the bench, and the path that answers 200 once the server is ready."""

    command: list[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    ready: str = "/health"


@dataclass(frozen=True)
class Server:
    """One that runs: its address, the model's name there, and `time.perf_counter()` of when it was started."""

    url: str
    model: str
    began: float
    process: psutil.Process

    def pause(self) -> None:
        """Stop all of its processes, so that it takes nothing from the one that is measured."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let them run."""
        self._signal(signal.SIGCONT)

    def memory(self) -> int:
        """Bytes of main memory of all its processes as if nothing else ran: what they share with each other counts
        once, and what they share with another server in full. (PSS would divide libraries among the servers.)"""
        own, shared = 0, defaultdict[str, int](int)
        for process in self._processes():
            for part in process.memory_maps(grouped=True):
                own += part.private_clean + part.private_dirty
                shared[part.path] = max(shared[part.path], part.shared_clean + part.shared_dirty)
        return own + sum(shared.values())

    def _signal(self, number: int) -> None:
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _processes(self) -> list[psutil.Process]:
        return _family(self.process.pid)


@contextlib.contextmanager
def running(launch: Launch, port: int, log: Path) -> Iterator[Server]:
    """The server, ready, until the block ends; its output goes to `log`. Raises `PeerError`."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **launch.variables}
    url, began = f"http://127.0.0.1:{port}/v1", time.perf_counter()
    with log.open("w") as output:
        try:
            process = subprocess.Popen(
                launch.command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,  # an interrupt from the keyboard is for the bench, which ends it in order
            )  # fmt: skip
        except OSError as error:
            raise PeerError(f"{launch.command[0]}: {error.strerror}") from error
    try:
        model = _wait_ready(process, url, launch.ready, log)
        yield Server(url, model, began, psutil.Process(process.pid))
    finally:
        _end(process)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def _family(pid: int) -> list[psutil.Process]:
    """A process and all that it has started, those in sessions of their own too; none where it is gone."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask a server to end, stopped or not, and see that nothing is left of it."""
    family = _family(process.pid)
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.send_signal(signal.SIGCONT)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=END_LIMIT)
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    with contextlib.suppress(ProcessLookupError):  # where it ended by itself, and left some behind
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait_ready(process: subprocess.Popen[bytes], url: str, ready: str, log: Path) -> str:
    """The name of the model, once the server answers for it."""
    until = time.monotonic() + START_LIMIT
    while time.monotonic() < until:
        if process.poll() is not None:
            raise PeerError(f"it ended with {process.returncode}: {_said(log)}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url.removesuffix('/v1')}{ready}", timeout=5).status_code == httpx.codes.OK:
                name: str = httpx.get(f"{url}/models", timeout=30).json()["data"][0]["id"]
                return name
        time.sleep(0.05)
    raise PeerError(f"it was not ready after {START_LIMIT:.0f} s: {_said(log)}")


def _said(log: Path) -> str:
    return last_line(re.sub(r"\x1b\[[0-9;]*m", "", log.read_text("utf-8", errors="replace")))
