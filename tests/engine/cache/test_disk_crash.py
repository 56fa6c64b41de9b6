"""A process that is killed at any step of a write leaves the whole block or nothing, and never what it began."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine.cache.disk import BlockFiles
from engine.cache.store import Stored
from tests.engine.cache.disk_blocks import MODEL, everything, found, header_of, image_of, read, write

ROOT = Path(__file__).resolve().parents[3]

KILLED = """
import io, os, signal, sys
from pathlib import Path
from engine.cache import files
from engine.cache.disk import BlockFiles
from tests.engine.cache.disk_blocks import header_of, image_of

root, step, number = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
opened = BlockFiles(root)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

class Dying(io.FileIO):
    written = 0
    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        if step == "open":
            die()
    def write(self, part):
        if step == "half the image" and self.written:
            super().write(part[: len(part) // 2])
            die()
        self.written += 1
        done = super().write(part)
        if step == "header" or (step == "image" and self.written == 2):
            die()
        return done

def fsync(descriptor, real=os.fsync):
    if step == "before fsync":
        die()
    real(descriptor)
    if step == "after fsync":
        die()

def replace(self, target, real=Path.replace):
    if step == "before rename":
        die()
    real(self, target)
    die()

files.FileIO, os.fsync, Path.replace = Dying, fsync, replace
opened.write(header_of(number, holders=["new"]), image_of(7))
"""
STEPS = ["open", "header", "half the image", "image", "before fsync", "after fsync", "before rename", "after rename"]


@pytest.mark.parametrize("number", [1, 2], ids=["a block that was there", "a new block"])
@pytest.mark.parametrize("step", STEPS)
def test_a_killed_write(tmp_path: Path, step: str, number: int) -> None:
    write(BlockFiles(tmp_path), 1)
    command = [sys.executable, "-c", KILLED, str(tmp_path), step, str(number)]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    assert len(everything(tmp_path)) == (number if step == "after rename" else 2)

    files = BlockFiles(tmp_path)
    old, new = (header_of(1), bytes(image_of(1))), (header_of(number, holders=["new"]), bytes(image_of(7)))
    expected = {1: old} | ({number: new} if step == "after rename" else {})
    assert found(files) == sorted(expected)
    assert {block: read(files, block) for block in expected} == expected
    assert files.leftovers == (step != "after rename") and files.quarantined == 0
    assert files.usage() == {MODEL: Stored(len(expected), 16384 * len(expected))}
    write(files, number)
    assert read(files, number) == (header_of(number), bytes(image_of(number)))
