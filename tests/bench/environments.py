"""Environments of their own for the servers that are compared: made once, with venv and pip. Starts no server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
ENVIRONMENTS = Path(os.environ.get("BENCH_PEERS", ROOT / ".cache" / "peers"))
MADE = "complete"  # a file that is there once everything is installed
SHOWN = 300  # characters of why something failed
TELL = "import sys, importlib.metadata as m; print(*(f'{name} {m.version(name)}' for name in sys.argv[1:]), sep=', ')"


class PeerError(Exception):
    """A server that cannot be set up or started here. `str()` says why in one line."""


@dataclass(frozen=True)
class Environment:
    """What pip installs for a server, apart from ours, and whose versions are told.

    `steps` are the arguments of one `pip install` each, in order; `build` are variables that they are run with.
    """

    name: str
    steps: tuple[tuple[str, ...], ...]
    packages: tuple[str, ...]
    build: Mapping[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Where it is; in `bin` are its programs."""
        return ENVIRONMENTS / self.name

    def make(self) -> None:
        """Install it, where that has not been done. Raises `PeerError`."""
        if (self.folder / MADE).exists():
            return
        print(f"{self.name}: setting up {self.folder}, once; it may take half an hour", flush=True)
        _run([sys.executable, "-m", "venv", "--clear", str(self.folder)], {})
        for step in self.steps:
            pip = [str(self.folder / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
            _run([*pip, "--quiet", *step], self.build)
        (self.folder / MADE).touch()

    def versions(self) -> str:
        """Those of `packages`, with their names. Raises `PeerError` where one is not there."""
        return _run([str(self.folder / "bin" / "python"), "-c", TELL, *self.packages], {})


def last_line(text: str) -> str:
    """The last line that says something, of a program's output; where pip speaks of errors, the last of those."""
    lines = [line.strip() for line in text.splitlines() if any(sign.isalnum() for sign in line)]
    errors = [line for line in lines if line.startswith("ERROR: ")]
    return [*lines, *errors][-1][:SHOWN] if lines else "it said nothing"


def _run(command: list[str], variables: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(
            command, env={**os.environ, **variables}, capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as error:
        raise PeerError(f"{command[0]}: {error.strerror}") from error
    if done.returncode:
        raise PeerError(f"`{' '.join(command[1:4])} …` ended with {done.returncode}: {last_line(done.stderr)}")
    return done.stdout.strip()
