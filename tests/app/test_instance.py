"""One server per data directory: taken, told, let go, and left behind by a process that was killed."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from chat.instance import AlreadyRunning, DataDirError, Instance, Running, read_note

HOLD = """
import sys
from pathlib import Path
from chat.instance import Instance
held = Instance.acquire(Path(sys.argv[1]))
held.announce("http://127.0.0.1:1")
print("held", flush=True)
sys.stdin.read()
"""


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_second_start_learns_where_the_first_one_is(tmp_path: Path) -> None:
    first = Instance.acquire(tmp_path / "data")
    first.announce("http://127.0.0.1:7860")
    with pytest.raises(AlreadyRunning) as held:
        Instance.acquire(tmp_path / "data")
    assert held.value.running == Running("http://127.0.0.1:7860", os.getpid())
    first.close()
    Instance.acquire(tmp_path / "data").close()
    assert read_note(tmp_path / "data") is None


def test_a_start_waits_for_one_that_is_just_ending(tmp_path: Path) -> None:
    first = Instance.acquire(tmp_path)
    first.announce("http://127.0.0.1:7860")
    first.withdraw()
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            first.close()

    Instance.acquire(tmp_path, nap).close()
    assert len(naps) == 3


def test_a_holder_that_never_says_where_it_is(tmp_path: Path) -> None:
    first = Instance.acquire(tmp_path)
    naps: list[float] = []
    with pytest.raises(AlreadyRunning) as held:
        Instance.acquire(tmp_path, naps.append)
    assert held.value.running is None
    assert sum(naps) == pytest.approx(5.0)
    first.close()


def test_what_a_killed_server_leaves_is_no_obstacle(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(AlreadyRunning) as held:
        Instance.acquire(tmp_path)
    assert held.value.running == Running("http://127.0.0.1:1", holder.pid)
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert (tmp_path / "server.json").exists()
    instance = Instance.acquire(tmp_path)
    assert read_note(tmp_path) is None
    instance.close()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"url": "x"}', '{"url": "x", "pid": "y"}'])
def test_a_note_that_makes_no_sense_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "server.json").write_text(text)
    assert read_note(tmp_path) is None


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_the_directory_is_for_its_owner_alone(tmp_path: Path) -> None:
    Instance.acquire(tmp_path / "new" / "data").close()
    assert mode(tmp_path / "new" / "data") == 0o700
    ours = tmp_path / "new" / "data"
    ours.chmod(0o755)
    Instance.acquire(ours).close()
    assert mode(ours) == 0o700


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_a_folder_that_holds_other_things_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "somebody's file").touch()
    tmp_path.chmod(0o755)
    Instance.acquire(tmp_path).close()
    assert mode(tmp_path) == 0o755


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataDirError, match=r"cannot write to .*file/data \(.+\); choose another with --data-dir"):
        Instance.acquire(tmp_path / "file" / "data")
    with pytest.raises(DataDirError, match="choose another with --data-dir"):
        Instance.acquire(tmp_path / "file")
