"""Convert a model's files once, in a process of its own, into a directory that is there whole or not at all.

What the process needs is given back when it ends, and memory that runs out ends it and nothing else. This module
knows how to run it and keep what it made; what it does is in `engine.model.convert`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from engine.errors import ModelLoadError
from engine.model.files import Progress
from engine.words import size

ROOT = Path(__file__).resolve().parents[2]
MARGIN = 64 * 2**20  # bytes on the disk for what is not weights


@dataclass(frozen=True)
class Conversion:
    """One thing to make: `target`, by the converter's `arguments`; `subject` is the file that sentences name.

    `size` are the bytes that the result takes, on the disk and, while it is made, in memory.
    """

    target: Path
    arguments: tuple[str, ...]
    subject: Path
    size: int
    stage: str


def converted(job: Conversion, progress: Progress) -> Path:
    """The job's target, made now if it is not there. Raises `ModelLoadError` when it cannot be."""
    if job.target.is_dir():
        return job.target
    folder = job.target.parent
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _alone(folder / "conversion.lock", progress):
            if not job.target.is_dir():  # another process may have made it meanwhile
                _make(job, progress)
    except OSError as error:
        raise ModelLoadError(f"cannot keep what is made of {job.subject} in {folder}: {error.strerror}") from error
    return job.target


def _make(job: Conversion, progress: Progress) -> None:
    folder = job.target.parent
    for left_over in folder.glob("*.partial*"):
        shutil.rmtree(left_over, ignore_errors=True)
    needed, free = job.size + MARGIN, shutil.disk_usage(folder).free
    if free < needed:
        raise ModelLoadError(
            f"no room to convert {job.subject}: it takes {size(needed)} in {folder}, where {size(free)} are free"
        )
    partial = job.target.with_name(f"{job.target.name}.partial")
    try:
        _run(job, partial, progress)
        partial.rename(job.target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _alone(path: Path, progress: Progress) -> Iterator[None]:
    """One conversion at a time, also beside other processes that share the directory."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress("waiting for another conversion", 0, 0)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _run(job: Conversion, partial: Path, progress: Progress) -> None:
    """Run the converter, hand on its progress, and raise `ModelLoadError` for whatever keeps it from its end."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryFile() as complaints:
        process = subprocess.Popen(
            [sys.executable, "-m", "engine.model.convert", *job.arguments, str(partial)],
            stdin=subprocess.PIPE,  # ends with this process, and the converter with it
            stdout=subprocess.PIPE,
            stderr=complaints,
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        )
        try:
            done = _listen(process, job.stage, progress)
            code = process.wait() if done is None else 0
        finally:
            process.kill()
            process.communicate()
        if done is None:
            raise _broken_off(job, code, complaints)
    if error := done.get("error"):
        raise ModelLoadError(str(error))
    if done.get("memory"):
        raise _no_memory(job)


def _listen(process: subprocess.Popen[bytes], stage: str, progress: Progress) -> dict[str, Any] | None:
    """The converter's last word; None when it ended without one."""
    for line in process.stdout or ():
        try:
            said = json.loads(line)
        except ValueError:  # it was ended in the middle of a line
            return None
        if "total" not in said:
            return dict(said)
        progress(stage, said["done"], said["total"])
    return None


def _broken_off(job: Conversion, code: int, complaints: IO[bytes]) -> ModelLoadError:
    if code == -9:  # nobody else ends it this way
        return _no_memory(job)
    complaints.seek(0)
    words = complaints.read()[-1000:].decode("utf-8", "replace").strip().splitlines()
    why = words[-1] if words else "it gave no reason"
    return ModelLoadError(f"converting {job.subject} broke off (exit code {code}): {why}")


def _no_memory(job: Conversion) -> ModelLoadError:
    return ModelLoadError(
        f"memory ran out while {job.subject} was converted: it takes about {size(job.size)}; close other programs, or "
        "choose a smaller model"
    )
