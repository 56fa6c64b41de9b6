"""Start and end the real application as a person does: `app.py` in a process of its own, with its engine in another."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 150.0  # on a machine that is busy otherwise


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def new_data_dir(folder: Path, models: Path) -> Path:
    """A data directory whose model is converted already (a link to the kept weights), so that starts take seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "models").symlink_to(models, target_is_directory=True)
    return folder


class Server:
    """One running `app.py`. Leaving the context ends it; `output()` is what it printed."""

    def __init__(self, data_dir: Path, *flags: str, port: int | None = None) -> None:
        self.data_dir = data_dir
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}/"
        self._flags = flags
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `stop`
        self._process: subprocess.Popen[bytes] | None = None

    def flags(self, *flags: str) -> Server:
        """Add flags for the next start."""
        self._flags += flags
        return self

    def start(self) -> Server:
        """Start the process; returns at once."""
        command = [
            sys.executable, str(ROOT / "app.py"), "--no-browser", "--port", str(self.port),
            "--data-dir", str(self.data_dir), *self._flags,
        ]  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KEEPWARM_")}
        self._process = subprocess.Popen(
            command, cwd=self.data_dir, env=environment, stdout=self._log, stderr=subprocess.STDOUT
        )
        return self

    def wait_for_page(self) -> Server:
        """Wait until the page can be opened; the model may still be loading."""
        self._wait("the page", lambda: self._ask("healthz").status_code == httpx.codes.OK)
        return self

    def wait_until_ready(self) -> Server:
        """Wait until the model answers."""
        self._wait("the model", lambda: self._ask("readyz").status_code == httpx.codes.OK)
        return self

    def engine(self) -> psutil.Process:
        """The engine's process."""
        assert self._process is not None
        return self._wait("the engine's process", lambda: next(self._engines(), None))

    def stop(self) -> None:
        """End the process as Ctrl-C does, or by force if it does not end."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()
            self._process = None

    def kill(self) -> None:
        """End the process and its children with no chance to say goodbye."""
        assert self._process is not None
        children = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        self._process.wait(10)
        for child in children:
            if child.is_running():
                child.kill()
        self._process = None

    def output(self) -> str:
        """What the process printed so far."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _engines(self) -> Iterator[psutil.Process]:
        assert self._process is not None
        for child in psutil.Process(self._process.pid).children():
            if any(part.startswith("engine") for part in child.cmdline()):
                yield child

    def _ask(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=5)

    def _wait(self, what: str, ask):  # type: ignore[no-untyped-def]
        due = time.monotonic() + START_SECONDS
        while time.monotonic() < due:
            assert self._process is None or self._process.poll() is None, f"the server ended: {self.output()}"
            try:
                if answer := ask():
                    return answer
            except (httpx.TransportError, psutil.Error):
                pass
            time.sleep(0.1)
        raise AssertionError(f"no sign of {what} after {START_SECONDS:.0f} s: {self.output()}")


@contextmanager
def frozen(process: psutil.Process) -> Iterator[None]:
    """Hold a process still, and let it go on afterwards."""
    process.suspend()
    try:
        yield
    finally:
        process.resume()
