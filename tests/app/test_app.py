"""`python app.py` as a person meets it: real processes, a real model, real signals."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from chat.settings import VERSION
from storage import Store
from tests.app.running import App, ask, chats, hold_tab

ROOT = Path(__file__).resolve().parents[2]
STORY = "Write a long story about a ship and the sea."


def complain(*flags: str, **variables: str) -> tuple[int, str]:
    """Exit code and error line of a start that cannot succeed."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "app.py"), "--no-browser", *flags],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("keepwarm: ")
    return done.returncode, lines[0].removeprefix("keepwarm: ")


# --- what was typed wrongly -------------------------------------------------------------------------------------------


def test_version() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "app.py"), "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"keepwarm {VERSION}\n"


def test_an_unknown_flag_variable_or_key_is_one_line(tmp_path: Path) -> None:
    assert complain("--prot", "1") == (2, "unknown flag --prot; the nearest known one is --port")
    assert complain(KEEPWARM_MODLE="x") == (
        2,
        "unknown variable KEEPWARM_MODLE; the nearest known one is KEEPWARM_MODEL",
    )
    file = tmp_path / "k.toml"
    file.write_text("devicekv = 1\n")
    assert complain("--config", str(file)) == (
        2,
        f"unknown key 'devicekv' in {file}; the nearest known one is 'device_kv'",
    )


def test_a_bad_value_is_one_line(tmp_path: Path) -> None:
    assert complain("--port", "http") == (
        2, "port = 'http' (from --port): not a port; give a whole number from 0 to 65535",
    )  # fmt: skip
    assert complain("--host", "0.0.0.0")[0] == 2
    assert complain("--port") == (2, "Option '--port' requires an argument.")
    assert complain("chat") == (2, "No such command 'chat'.")


async def test_a_bad_saved_value_is_one_line(tmp_path: Path) -> None:
    store = await Store.open(tmp_path)
    await store.save_setting("device", "gpu")
    await store.close()
    code, line = complain("--data-dir", str(tmp_path))
    assert code == 2
    assert line.startswith("device = 'gpu' (from the value saved in the app): not one of auto, cpu, cuda, mps;")


def test_a_port_in_use_names_the_port_and_the_fix(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, line = complain("--port", str(port), "--data-dir", str(tmp_path))
    assert code == 1
    assert line.startswith(f"port {port} is in use by another program; choose another with --port ")


def test_a_data_directory_that_cannot_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "readonly"
    folder.mkdir(mode=0o500)
    inside = Path("/proc/keepwarm") if os.name == "posix" and os.geteuid() == 0 else folder / "data"  # root may write
    code, line = complain("--data-dir", str(inside))
    assert code == 1
    assert line.startswith(f"cannot write to {inside} (")
    assert line.endswith("choose another with --data-dir")


def test_a_database_that_is_none_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "keepwarm.sqlite3").write_text("a diary, " * 1000)
    code, line = complain("--data-dir", str(tmp_path), "--port", "0")
    assert code == 1
    assert "keepwarm.sqlite3 is not a sound Keepwarm database" in line
    assert (tmp_path / "keepwarm.sqlite3").read_text() == "a diary, " * 1000


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    absent = tmp_path / "absent.gguf"
    code, line = complain("--data-dir", str(tmp_path / "data"), "--port", "0", "--model", str(absent))
    assert code == 1
    assert str(absent) in line


# --- a server from start to end ---------------------------------------------------------------------------------------


@pytest.fixture
def data_dir(tmp_path: Path, embedded_model: Path, model_cache: Path) -> Path:
    """A fresh data directory whose converted model is there already."""
    folder = tmp_path / "data"
    folder.mkdir(mode=0o700)
    (folder / "models").symlink_to(model_cache)
    return folder


def test_from_the_first_line_to_ctrl_c_while_a_reply_runs_and_a_tab_is_open(data_dir: Path) -> None:
    with App(data_dir, "--device-kv", "256MiB") as app:
        assert app.line_with("starts at").startswith(f"Keepwarm {VERSION} starts at {app.url}")
        app.line_with("Ready at")
        app.line_with("A chat can have 5,824 of the model's 8,192 tokens: --device-kv has no room for more.")
        assert httpx.get(f"{app.url}/readyz").status_code == 200
        assert "/page/assets/page.js" in httpx.get(app.url).text

        (model, *_) = httpx.get(f"{app.url}/v1/models").json()["data"]
        assert model["keepwarm"]["dtype"] == "float32"

        second = subprocess.run(app.command, capture_output=True, text=True, check=False, timeout=60)
        assert (second.returncode, second.stderr) == (0, "")
        assert second.stdout == f"Keepwarm is already running at {app.url} (process {app.process.pid}).\n"

        opened = data_dir.with_suffix(".opened")
        browser = {
            **os.environ,
            "BROWSER": f"{sys.executable} -c 'import sys; open(sys.argv[2], \"w\").write(sys.argv[1])' %s {opened}",
        }
        subprocess.run([word for word in app.command if word != "--no-browser"], env=browser, check=True, timeout=60)
        assert opened.read_text() == app.url

        with hold_tab(app.url), ask(app.url, STORY) as stream:
            heard = "".join(next(stream) for _ in range(8))
            assert app.interrupt() < 10
        assert app.process.returncode == 0
        assert app.errors() == ""
        assert app.engine_is_gone(within=1)
    ((user, reply),) = chats(data_dir)
    assert user == ("user", "complete", STORY)
    assert reply[:2] == ("assistant", "interrupted")
    assert reply[2].startswith(heard)
    assert not (data_dir / "server.json").exists()
    if os.name == "posix":
        private = [path for path in data_dir.iterdir() if not path.is_symlink()]
        assert [path for path in private if stat.S_IMODE(path.stat().st_mode) & 0o077] == []


def test_kill_9_takes_the_engine_along_and_leaves_a_directory_that_starts(data_dir: Path) -> None:
    with App(data_dir) as app:
        app.line_with("Ready at")
        with ask(app.url, "Say hello.", max_tokens=4) as stream:
            first = "".join(stream)
        with ask(app.url, STORY) as stream:
            next(stream)
            app.kill()
        assert app.engine_is_gone(within=5)
    assert (data_dir / "server.json").exists()
    with App(data_dir) as app:
        app.line_with("Ready at")
        with ask(app.url, "Say hello.", max_tokens=4) as stream:
            assert "".join(stream) == first
        assert app.interrupt() < 10
    hello = [("user", "complete", "Say hello."), ("assistant", "complete", first)]
    assert hello in chats(data_dir)
    assert any(chat[0] == ("user", "complete", STORY) for chat in chats(data_dir))


def test_ctrl_c_while_the_model_loads(data_dir: Path) -> None:
    with App(data_dir) as app:
        app.line_with(" ...")  # the engine runs, and loads
        assert app.interrupt() < 10
        assert app.process.returncode == 0
        assert app.errors() == ""
        assert app.engine_is_gone(within=1)


def test_a_polite_kill_is_like_ctrl_c(data_dir: Path) -> None:
    with App(data_dir) as app:
        app.line_with(" ...")
        assert app.interrupt(signal.SIGTERM) < 10
        assert app.process.returncode == 0


@pytest.mark.parametrize("wait_s", [0.0, 0.02, 0.05, 0.1, 0.25])  # closing takes 10 ms; Python's own end took 400 more
def test_a_second_ctrl_c_does_not_wait(data_dir: Path, wait_s: float) -> None:
    with App(data_dir) as app:
        app.line_with(" ...")
        app.process.send_signal(signal.SIGINT)
        app.line_with("Ending")
        time.sleep(wait_s)
        app.process.send_signal(signal.SIGINT)
        assert app.process.wait(timeout=3) in {0, 130}
        assert app.errors() == ""


def test_no_ctrl_c_kills_a_process_that_has_closed_everything() -> None:
    """An object that Python would take down last, when it no longer catches signals, sends one."""
    late = (
        "import os, runpy, sys\n"
        "class Late:\n"
        f"    def __del__(self, kill=os.kill, process=os.getpid()): kill(process, {int(signal.SIGINT)})\n"
        "sys.late, sys.argv = Late(), ['app.py', '--version']\n"
        f"runpy.run_path({str(ROOT / 'app.py')!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", late], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"keepwarm {VERSION}\n", "")
