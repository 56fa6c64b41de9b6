"""Starts that cannot succeed: whatever is wrong with files, memory or arguments is one line and an exit code."""

from __future__ import annotations

import os
import pickle
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from storage import DiskFull, Store
from storage.database import FILE_NAME
from tests.app.test_app import ROOT, complain

LINUX = sys.platform.startswith("linux")


@contextmanager
def small_disk(place: Path, kib: int) -> Iterator[Path]:
    """A file system of its own with that much room; skips the test where this user may not mount one."""
    place.mkdir()
    made = LINUX and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(place)], capture_output=True, check=False
    )
    if not made or made.returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


# --- the data directory -----------------------------------------------------------------------------------------------


def test_a_file_where_the_data_directory_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for where in (tmp_path / "file", tmp_path / "file" / "below"):
        code, line = complain("--data-dir", str(where), "--port", "0")
        assert code == 1
        assert line.startswith(f"cannot write to {where} (")
        assert line.endswith("choose another with --data-dir")
    assert (tmp_path / "file").read_text() == "mine"


def test_folders_in_the_way_of_the_lock_and_the_note(tmp_path: Path) -> None:
    for name in ("keepwarm.lock", "server.json"):
        (tmp_path / name / name).mkdir(parents=True)
        code, line = complain("--data-dir", str(tmp_path / name), "--port", "0")
        assert (code, line.startswith(f"cannot write to {tmp_path / name} (Is a directory)")) == (1, True)


async def test_a_disk_without_room_for_a_database(tmp_path: Path) -> None:
    full = r"^the disk that holds .* is full; .* make room and try again$"
    with small_disk(tmp_path / "disk", 16) as disk, pytest.raises(DiskFull, match=full):
        await Store.open(disk)


# --- the database -----------------------------------------------------------------------------------------------------


async def test_a_database_of_a_newer_version_is_left_alone(tmp_path: Path, tiny_model: Path) -> None:
    await (await Store.open(tmp_path)).close()
    with sqlite3.connect(tmp_path / FILE_NAME) as newer:
        newer.execute("UPDATE alembic_version SET version_num = '9999'")
    newer.close()
    before = (tmp_path / FILE_NAME).read_bytes()
    code, line = complain("--data-dir", str(tmp_path), "--port", "0", "--model", str(tiny_model))
    assert code == 1
    assert line.startswith(f"{tmp_path / FILE_NAME} is at revision 9999, but this program knows revisions only up to ")
    assert (tmp_path / FILE_NAME).read_bytes() == before


async def test_half_a_database_is_named_and_left_alone(tmp_path: Path) -> None:
    await (await Store.open(tmp_path)).close()
    path = tmp_path / FILE_NAME
    half = path.read_bytes()[: path.stat().st_size // 2]
    path.write_bytes(half)
    code, line = complain("--data-dir", str(tmp_path), "--port", "0")
    assert (code, line.startswith(f"{path} is not a sound Keepwarm database (")) == (1, True)
    assert path.read_bytes() == half


# --- the model and its memory -----------------------------------------------------------------------------------------


class Harm:
    """What a malicious pickle does when it is opened."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._mark),)


def test_a_malicious_model_is_one_line_and_stays_closed(tmp_path: Path, tiny_model: Path) -> None:
    model, mark = tmp_path / "model", tmp_path / "harmed"
    shutil.copytree(tiny_model, model)
    (model / "model.safetensors").write_bytes(pickle.dumps(Harm(mark)))
    code, line = complain("--data-dir", str(tmp_path / "data"), "--port", "0", "--model", str(model))
    assert (code, str(model / "model.safetensors") in line) == (1, True)
    assert not mark.exists()


def test_a_cache_that_no_memory_holds_is_named_with_its_setting(tmp_path: Path, tiny_model: Path) -> None:
    wanted = ("--model", str(tiny_model), "--device", "cpu", "--device-kv", "1000000TiB")
    code, line = complain("--data-dir", str(tmp_path), "--port", "0", *wanted)
    assert code == 1
    assert line.startswith("cpu has no ")
    assert line.endswith("choose a smaller device_kv")


# --- arguments, and an early end --------------------------------------------------------------------------------------


@pytest.mark.skipif(os.name == "nt", reason="arguments are text there")
def test_arguments_that_are_no_text(tmp_path: Path) -> None:
    for flag in ("--model", "--adapter", "--device", "--port"):
        command = [sys.executable, str(ROOT / "app.py"), "--data-dir", str(tmp_path), flag, b"\xff\xfe"]
        done = subprocess.run(command, capture_output=True, check=False, timeout=120)
        assert done.returncode == 2
        assert done.stderr.count(b"\n") == 1
        assert done.stderr.startswith(f"keepwarm: {flag[2:]} = '\\udcff\\udcfe' (from {flag}): not ".encode())


@pytest.mark.skipif(os.name == "nt", reason="there is no such signal there")
@pytest.mark.parametrize("module", ["asyncio", "typer", "platformdirs", "filelock"])
def test_ctrl_c_while_python_still_imports_ends_it_without_a_word(tmp_path: Path, module: str) -> None:
    (tmp_path / f"{module}.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, str(ROOT / "app.py"), "--data-dir", str(tmp_path / "data")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
