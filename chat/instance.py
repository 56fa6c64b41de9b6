"""One server per data directory: a lock that dies with its process, and a note that says where the server listens.

This module knows nothing of what the server serves.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

LOCK_NAME = "keepwarm.lock"
NOTE_NAME = "server.json"
PATIENCE = 5.0  # seconds a second start waits for a holder that says nothing
PAUSE = 0.1  # seconds between two looks

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Running:
    """A server that holds a data directory: the page's address and the process id."""

    url: str
    pid: int


class DataDirError(Exception):
    """A data directory that cannot be used. `str()` is one line for people."""


class AlreadyRunning(Exception):  # noqa: N818 - a state, not a failure
    """Another server holds the data directory; `running` is None when it never said where."""

    def __init__(self, running: Running | None) -> None:
        super().__init__("another Keepwarm uses this data directory")
        self.running = running


class Instance:
    """This process's hold on a data directory, from `acquire` to `close`. A killed process lets go by dying."""

    def __init__(self, data_dir: Path, lock: FileLock) -> None:
        self.data_dir = data_dir
        self._lock = lock

    @classmethod
    def acquire(cls, data_dir: Path, sleep: Callable[[float], None] = time.sleep) -> Instance:
        """Make the directory (mode 0700) and take it. Raises AlreadyRunning, or DataDirError with the fix.

        A holder that has no note is starting or ending: it gets `PATIENCE` seconds to write one or to let go.
        """
        try:
            make_private(data_dir)
            lock = FileLock(data_dir / LOCK_NAME, mode=0o600)
            for _ in range(int(PATIENCE / PAUSE)):
                with suppress(Timeout):
                    lock.acquire(timeout=0)
                    break
                if running := read_note(data_dir):
                    raise AlreadyRunning(running)
                sleep(PAUSE)
            else:
                raise AlreadyRunning(None)
            instance = cls(data_dir, lock)
            instance.withdraw()  # what a killed server left behind
        except (OSError, NotImplementedError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise DataDirError(f"cannot write to {data_dir} ({reason}); choose another with --data-dir") from error
        return instance

    def announce(self, url: str) -> None:
        """Tell later starts where this server listens; where that cannot be written, they will not know."""
        note = self.data_dir / NOTE_NAME
        fresh = note.with_suffix(".new")
        try:
            fresh.write_text(json.dumps(asdict(Running(url, os.getpid()))), encoding="utf-8")
            fresh.replace(note)
        except OSError as error:
            log.warning("a second start will not find this server: %s", error)

    def withdraw(self) -> None:
        """Stop telling: this server is ending, and nobody should be sent to it."""
        (self.data_dir / NOTE_NAME).unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the directory."""
        self.withdraw()
        self._lock.release()


def make_private(data_dir: Path) -> None:
    """Create `data_dir` for its owner alone; one that others can enter is closed to them if it is empty or ours."""
    if not data_dir.is_dir():
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    elif stat.S_IMODE(data_dir.stat().st_mode) & 0o077 and (
        (data_dir / LOCK_NAME).exists() or not any(data_dir.iterdir())
    ):
        data_dir.chmod(0o700)


def read_note(data_dir: Path) -> Running | None:
    """Where the server of `data_dir` says it listens; None when no living one said anything readable."""
    try:
        running = Running(**json.loads((data_dir / NOTE_NAME).read_text(encoding="utf-8")))
        return running if psutil.pid_exists(running.pid) else None
    except (OSError, ValueError, TypeError):
        return None
