"""`python app.py doctor` as a person meets it: real processes, real models, a real server."""

from __future__ import annotations

import asyncio
import functools
import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

import app
from chat import doctor_load
from engine.client import EngineClient
from storage import Store
from tests.app.running import ROOT, App, ask

pytestmark = pytest.mark.timeout(300)


def doctor(*flags: str, before: tuple[str, ...] = ()) -> tuple[int, str, str]:
    """Exit code, output and error stream of the doctor, in this process; `before` are flags before its name."""
    output, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        code = app.main([*before, "doctor", *flags])
    return code, output.getvalue(), errors.getvalue()


def told(*flags: str, before: tuple[str, ...] = ()) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code and findings, the worst of each kind."""
    code, output, errors = doctor(*flags, "--json", before=before)
    assert errors == ""
    levels = ["ok", "warn", "problem"]
    findings = sorted(json.loads(output)["findings"], key=lambda finding: levels.index(finding["level"]))
    return code, {finding["what"]: finding for finding in findings}


def complaint(*flags: str, before: tuple[str, ...] = ()) -> tuple[int, str]:
    """Exit code and the one line on the error stream."""
    code, output, errors = doctor(*flags, before=before)
    assert output == ""
    assert errors.startswith("keepwarm: ")
    assert errors.count("\n") == 1
    return code, errors.removeprefix("keepwarm: ").rstrip("\n")


# --- without a server -------------------------------------------------------------------------------------------------


def test_a_fresh_machine_is_looked_at_and_left_as_it_was(tmp_path: Path, tiny_model: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "app.py"),
            "doctor",
            "--data-dir",
            str(tmp_path / "data"),
            "--model",
            str(tiny_model),
        ],
        env={**os.environ, "COLUMNS": "100", "KEEPWARM_PORT": "0"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    output = done.stdout
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "data").exists()
    assert "\x1b" not in output
    names = [line[6:22].strip() for line in output.splitlines() if line[:4].strip() in {"ok", "warn"}]
    assert names == [
        "versions", "machine", "memory", "settings", "data directory", "host tier", "disk tier", "server", "port",
        "database", "device", "number format", "bits of weights", "model", "architecture", "weights",
        "cache", "tokenizer", "chat template",
    ]  # fmt: skip
    assert all(len(line) <= 100 for line in output.splitlines() if str(tmp_path) not in line)


def test_each_problem_has_its_fix_and_makes_the_exit_code_one(tmp_path: Path) -> None:
    (tmp_path / "keepwarm.sqlite3").write_text("a diary, " * 1000)
    code, found = told("--data-dir", str(tmp_path), "--model", "/nowhere", "--port", "0")
    assert code == 1
    problems = {what: finding for what, finding in found.items() if finding["level"] == "problem"}
    assert set(problems) == {"database", "model"}
    assert all(finding["fix"] for finding in found.values() if finding["level"] != "ok")
    assert (tmp_path / "keepwarm.sqlite3").read_text() == "a diary, " * 1000


async def save(data_dir: Path, **settings: str) -> None:
    store = await Store.open(data_dir)
    for key, value in settings.items():
        await store.save_setting(key, value)
    await store.close()


def test_flags_variables_file_and_saved_values_count_as_they_do_for_a_start(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(save(tmp_path / "data", port="0", dtype="float16"))
    monkeypatch.setenv("KEEPWARM_DTYPE", "float32")
    (tmp_path / "k.toml").write_text(f'dtype = "bfloat16"\ncontext = 512\ndata_dir = "{tmp_path / "data"}"\n')
    config = str(tmp_path / "k.toml")
    before = ("--config", config, "--device", "cpu", "--model", "/nowhere")
    _, found = told("--model", str(tiny_model), before=before)
    settings = found["settings"]["detail"]
    for words in (
        f"model = {tiny_model} (from --model)",
        "device = cpu (from --device)",
        "dtype = float32 (from KEEPWARM_DTYPE)",
        f"context = 512 (from {config})",
        "port = 0 (from the value saved in the app)",
    ):
        assert words in settings
    assert found["number format"]["detail"] == "float32, as set with dtype = float32"
    assert found["cache"]["detail"].startswith("256 MiB, the default, hold ")
    assert found["database"]["detail"].endswith("no chats, no API chats, no backups")


def test_what_is_typed_wrongly_is_one_line(tmp_path: Path) -> None:
    assert complaint("--modle", "x") == (2, "unknown flag --modle; the nearest known one is --model")
    assert complaint("--port", "http")[0] == 2
    assert complaint("--size", "smollm2", "--url") == (
        2, "--size, --url and --load are three questions: ask one at a time",
    )  # fmt: skip
    assert complaint("--sessions", "4") == (2, "--sessions belongs to --size MODEL: name the model")
    assert complaint("--url", "--data-dir", str(tmp_path))[1].startswith(f"no server runs in {tmp_path}: ")


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_the_size_of_the_embedded_model(tmp_path: Path) -> None:
    flags = ("--size", "smollm2", "--data-dir", str(tmp_path / "data"), "--device", "cpu")
    code, output, errors = doctor(
        *flags, "--dtype", "bfloat16", "--device-kv", "1GiB", "--context", "1000", "--sessions", "4"
    )
    assert (code, errors) == (0, "")
    assert output.startswith("SmolLM2-135M-Instruct.Q4_1: llama, 134,515,008 parameters, a context of 8,192 tokens\n\n")
    words = " ".join(output.split())
    assert "K and V of one token 23,040 bytes a session of 1,000 tokens 22 MiB device_kv, as set 1 GiB" in words
    assert "ok fit 4 sessions of 1,000 tokens in bfloat16 take 90 MiB of cache, and device_kv is 1 GiB" in words
    code, output, errors = doctor(*flags, "--sessions", "1000000", "--json")
    assert (code, errors) == (1, "")
    answer = json.loads(output)
    assert {sizes["dtype"]: sizes["token"] for sizes in answer["sizes"]} == {"float32": 46_080, "bfloat16": 23_040}
    assert (answer["fit"]["level"], answer["model"]["parameters"]) == ("problem", 134_515_008)
    assert not (tmp_path / "data").exists()


def test_a_model_that_cannot_be_sized_is_one_line(tmp_path: Path) -> None:
    assert complaint("--size", "/nowhere")[1].startswith("no model '/nowhere'")
    assert complaint("--size", str(tmp_path))[1].startswith(f"no config.json in {tmp_path}")
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    assert "it is an encoder-decoder model (t5)" in complaint("--size", str(tmp_path))[1]


# --- with a server, and with the model --------------------------------------------------------------------------------


def test_a_running_server_answers_for_itself(tmp_path: Path, tiny_model: Path) -> None:
    data = ("--data-dir", str(tmp_path / "data"))
    with App(tmp_path / "data", "--model", str(tiny_model), "--device-kv", "8MiB") as server:
        server.line_with("Ready at")
        _, found = told("--url", *data)
        assert found["first token (TTFT)"]["detail"].startswith("not enough data yet: no replies since the server")
        for number in range(3):
            with ask(server.url, f"Number {number}, please.", max_tokens=8) as stream:
                "".join(stream)
        code, output, errors = doctor("--url", server.url)
        assert (code, errors) == (0, "")
        assert f"Keepwarm 0.1.0 at {server.url}, process {server.process.pid}" in " ".join(output.split())
        _, found = told("--url", *data)
        assert "over the last 3 replies: " in found["first token (TTFT)"]["detail"]
        assert "over the last 3 replies, " in found["each token (TPOT)"]["detail"]
        assert "of the device's 8 MiB holds chats" in found["memory"]["detail"]
        assert found["throughput"]["detail"].startswith("not enough data yet")

        _, found = told(*data, "--model", str(tiny_model), "--port", server.url.rpartition(":")[2])
        assert found["server"]["detail"].startswith(f"runs at {server.url} (process {server.process.pid})")
        assert found["port"]["detail"].endswith(f"taken by the server that runs (process {server.process.pid})")
        assert "3 API chats" in found["database"]["detail"]
        assert server.errors() == ""


def test_loading_measures_the_real_thing(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor_load, "EngineClient", functools.partial(EngineClient, in_thread=True)
    )  # it starts sooner
    flags = ("--data-dir", str(tmp_path / "data"), "--port", "0", "--device", "cpu", "--dtype", "float32", "--load")
    code, found = told(*flags, "--model", str(tiny_model))
    assert code == 0
    assert "paged SDPA with native kernels agrees with the model's own attention" in found["load"]["detail"]
    assert found["speed"]["detail"].startswith("reads ")
    code, found = told(*flags, "--model", "/nowhere")
    assert code == 1
    assert found["load"]["detail"].startswith("no model '/nowhere'")
