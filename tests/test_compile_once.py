"""The compiler of the tests compiles what is new, and nothing else."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

COMPILER = Path(__file__).with_name("compile_once")
FAKE = """#!/bin/sh
[ "$1" != --version ] || { echo 1; exit; }
echo "$*" >> calls
while [ "$1" != -o ]; do shift; done
cat code/* > "$2"
! grep -q mistake code/a.c
"""

pytestmark = pytest.mark.skipif(os.name != "posix", reason="it is a shell script")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Something to compile, and a compiler that notes when it is called."""
    (tmp_path / "code").mkdir()
    for name in ("a.c", "b.h"):
        (tmp_path / "code" / name).write_text(f"{name}\n")
    (tmp_path / "cc").write_text(FAKE)
    (tmp_path / "cc").chmod(0o755)
    return tmp_path


def compiled(folder: Path, *options: str) -> tuple[int, str, int]:
    """Exit status, what was made, and how often the compiler has been called by now."""
    made, calls = folder / "made.so", folder / "calls"
    made.unlink(missing_ok=True)
    there = {"TEST_CC": str(folder / "cc"), "TEST_COMPILED": str(folder / "kept")}
    command = [str(COMPILER), *options, str(folder / "code" / "a.c"), "-o", str(made), "-lm"]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **there}, capture_output=True, check=False)
    return done.returncode, made.read_text() if made.exists() else "", len(calls.read_text().splitlines())


def test_the_same_is_compiled_once(folder: Path) -> None:
    assert [compiled(folder, "-O3") for _ in range(2)] == [(0, "a.c\nb.h\n", 1)] * 2


def test_other_code_headers_and_options_are_compiled(folder: Path) -> None:
    compiled(folder)
    for number, name in enumerate(("a.c", "b.h"), start=2):
        (folder / "code" / name).write_text("other\n")
        status, made, calls = compiled(folder)
        assert (status, "other" in made, calls) == (0, True, number)
    assert compiled(folder, "-DBFLOAT16")[2] == 4


def test_what_cannot_be_compiled_is_not_kept(folder: Path) -> None:
    (folder / "code" / "a.c").write_text("mistake\n")
    assert [compiled(folder)[::2] for _ in range(2)] == [(1, 1), (1, 2)]
