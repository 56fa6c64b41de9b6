"""A real `python app.py` for tests: started, listened to, interrupted, killed; and a client that streams from it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue
from types import TracebackType

import httpx
import psutil

from storage import Store

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT = 120.0  # seconds that a busy machine may take for a start


class App:
    """One server process in a process group of its own, so that an interrupt reaches what Ctrl-C would reach."""

    def __init__(self, data_dir: Path, *flags: str) -> None:
        self.command = [
            sys.executable, str(ROOT / "app.py"), "--no-browser", "--port", "0", "--data-dir", str(data_dir),
            "--device", "cpu", "--dtype", "float32", *flags,
        ]  # fmt: skip
        self._errors = data_dir.with_suffix(".stderr")
        with self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                self.command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
            )
        self.url = ""
        self._lines: Queue[str] = Queue()
        self._children: list[psutil.Process] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> App:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.kill()
        for child in self._children:
            if child.is_running():
                child.kill()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))

    def line_with(self, words: str) -> str:
        """The next line that holds `words`."""
        end = time.monotonic() + START_LIMIT
        while time.monotonic() < end:
            try:
                line = self._lines.get(timeout=0.2)
            except Empty:
                assert self.process.poll() is None, f"it ended with {self.process.returncode}: {self.errors()}"
                continue
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                self.url = found[0]
            if words in line:
                return line
        raise AssertionError(f"no line with {words!r} within {START_LIMIT} s: {self.errors()}")

    def errors(self) -> str:
        """What it wrote to the error stream so far."""
        return self._errors.read_text()

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> float:
        """Ctrl-C; returns the seconds that it took to end."""
        self._remember_children()
        begun = time.monotonic()
        os.killpg(self.process.pid, number)
        self.process.wait(timeout=30)
        return time.monotonic() - begun

    def kill(self) -> None:
        """Kill the server itself with no warning, and nothing else."""
        self._remember_children()
        self.process.kill()
        self.process.wait(timeout=30)

    def _remember_children(self) -> None:
        self._children = psutil.Process(self.process.pid).children(recursive=True)

    def engine_is_gone(self, within: float) -> bool:
        """Whether there was an engine process, and none is left `within` seconds."""
        _, alive = psutil.wait_procs(self._children, timeout=within)
        return bool(self._children) and not alive


@contextmanager
def ask(url: str, text: str, max_tokens: int = 2000) -> Iterator[Iterator[str]]:
    """Ask over the API with a stream; the iterator gives the pieces of the reply until they end or are cut off."""
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": text}],
        "stream": True,
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as response:
        assert response.status_code == 200, response.read()
        yield pieces(response)


def pieces(response: httpx.Response) -> Iterator[str]:
    """The texts in a streamed reply."""
    for line in response.iter_lines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: ")).get("choices", []):
                if text := choice["delta"].get("content"):
                    yield text


@contextmanager
def hold_tab(url: str) -> Iterator[None]:
    """Hold open the stream that every tab holds for as long as it lives."""
    with httpx.stream("GET", f"{url}/gradio_api/heartbeat/test", timeout=60) as response:
        assert response.status_code == 200
        next(response.iter_raw())
        yield


def chats(data_dir: Path) -> list[list[tuple[str, str, str]]]:
    """Every chat as (role, status, text) from root to leaf, read from the database of a server that has ended."""

    async def read() -> list[list[tuple[str, str, str]]]:
        store = await Store.open(data_dir)
        try:
            user = await store.implicit_admin()
            sessions = await store.sessions(user.id, origin="api")
            paths = [await store.path(session.id) for session in sessions]
        finally:
            await store.close()
        return [[(message.role, message.status, message.text) for message in path] for path in paths]

    return asyncio.run(read())
