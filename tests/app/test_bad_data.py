"""What goes wrong under a running server: a full disk, a database or a model that is damaged; it lives, and says so."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from storage.database import FILE_NAME
from tests.app.running import App, chats
from tests.app.test_bad_start import small_disk


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A model to be damaged."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def ask(app: App, text: str, **options: Any) -> httpx.Response:
    body = {"model": "default", "messages": [{"role": "user", "content": text}], "max_tokens": 2, **options}
    return httpx.post(f"{app.url}/v1/chat/completions", json=body, timeout=60)


def refused(answer: httpx.Response) -> tuple[int, str, str]:
    """Status, code and sentence of a refusal."""
    error = answer.json()["error"]
    assert error["type"] == "server_error"
    return answer.status_code, error["code"], error["message"]


def fill(disk: Path) -> Path:
    """A file that takes all the room that is left."""
    file = disk / "filler"
    number = os.open(file, os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(number, b"\0" * 4096)
    except OSError:
        return file
    finally:
        os.close(number)


def test_a_disk_that_fills_up_and_has_room_again(tmp_path: Path, tiny_model: Path) -> None:
    with small_disk(tmp_path / "disk", 2048) as disk:
        data_dir = disk / "data"
        with App(data_dir, "--model", str(tiny_model), "--device-kv", "32MiB") as app:
            app.line_with("Ready at")
            assert ask(app, "before").status_code == 200
            filler = fill(disk)
            status, code, sentence = refused(ask(app, "meanwhile " * 100))
            assert (status, code) == (507, "storage_full")
            assert sentence.startswith(
                f"Keepwarm's database failed: the disk that holds {data_dir / FILE_NAME} is full"
            )
            assert httpx.get(f"{app.url}/page/state").status_code == 200
            assert refused(ask(app, "meanwhile " * 100, stream=True))[0] == 507
            filler.unlink()
            assert ask(app, "after").status_code == 200
            app.interrupt()
            assert app.process.returncode == 0
        asked = [chat[0][2] for chat in chats(data_dir)]
        assert sorted(asked) == ["after", "before"]


def test_a_database_and_a_model_that_are_damaged_under_a_running_server(tmp_path: Path, model: Path) -> None:
    data_dir = tmp_path / "data"
    database = data_dir / FILE_NAME
    with App(data_dir, "--model", str(model), "--device-kv", "32MiB") as app:
        app.line_with("Ready at")
        assert ask(app, "before").status_code == 200

        files = [data_dir / f"{FILE_NAME}{end}" for end in ("", "-wal", "-shm")]
        (tmp_path / "away").mkdir()
        for file in files:
            file.rename(tmp_path / "away" / file.name)
        status, code, sentence = refused(ask(app, "meanwhile"))
        assert (status, code) == (500, "storage_failed")
        assert sentence.endswith(f"{database}: it was deleted or replaced; put it back, or start Keepwarm again.")
        for file in files:
            (tmp_path / "away" / file.name).rename(file)
        assert ask(app, "after").status_code == 200

        weights = model / "model.safetensors"
        whole = weights.read_bytes()
        weights.write_bytes(whole[: len(whole) // 2])
        engine(app).kill()
        sentence = failure(app)
        assert str(weights) in sentence
        assert refused(ask(app, "without a model")) == (503, "not_ready", sentence)
        state = httpx.get(f"{app.url}/page/state").json()["engine"]
        assert (state["phase"], state["message"]) == ("failed", sentence)

        with database.open("r+b") as file:
            file.truncate(100)
        assert httpx.get(f"{app.url}/healthz").status_code == 200
        app.interrupt()
        assert app.process.returncode == 0
        assert "Traceback" not in app.errors()


def engine(app: App) -> psutil.Process:
    """The engine's process."""
    children = psutil.Process(app.process.pid).children()
    return next(child for child in children if "engine" in child.cmdline())


def failure(app: App) -> str:
    """What /readyz says once the engine has failed for good; until its death is noticed, it says other things."""
    while True:
        ready = httpx.get(f"{app.url}/readyz", timeout=60)
        if ready.json()["status"] == "failed":
            assert ready.status_code == 503
            return str(ready.json()["message"])
