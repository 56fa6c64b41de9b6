"""Hub ids: fetched from a hub (one of our own, over HTTP) into its cache, or one sentence that says why not."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from engine.model import hub, loading, sources
from tests.engine.model.saying import quiet, refusal

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REFUSALS = {"gated": (403, "GatedRepo"), "private": (401, "RepoNotFound"), "gone": (404, "RepoNotFound")}


@dataclass
class Hub:
    """A hub with one model, `owner/tiny`, and `owner/NAME` for each of REFUSALS; it notes what it is asked for."""

    files: dict[str, bytes]
    asked: list[str] = field(default_factory=list)
    agents: set[str] = field(default_factory=set)

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        self.asked.append(path)
        owner_and_name = path.removeprefix("/api/models").split("/")[2]
        if owner_and_name in REFUSALS:
            status, code = REFUSALS[owner_and_name]
            return status, {"X-Error-Code": code}, b""
        if owner_and_name == "broken":
            return 503, {}, b""
        if "/tree/" in path:
            return 200, {}, json.dumps([self.entry(name) for name in self.files]).encode()
        if path.startswith("/api/models/owner/tiny"):
            return 200, {}, json.dumps({"id": "owner/tiny", "sha": COMMIT, "siblings": []}).encode()
        content = self.files.get(path.removeprefix(f"/owner/tiny/resolve/{COMMIT}/"))
        if content is None:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        return 200, {"ETag": f'"{oid(content)}"', "X-Repo-Commit": COMMIT}, content

    def entry(self, name: str) -> dict[str, Any]:
        return {"type": "file", "path": name, "size": len(self.files[name]), "oid": oid(self.files[name])}


def oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@pytest.fixture
def served(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub on this machine, and an empty cache of Hugging Face's."""
    files = {file.name: file.read_bytes() for file in tiny_model.iterdir()}
    unwanted = ("pytorch_model.bin", "consolidated.safetensors", "onnx/model.safetensors", "README.md", "run.py")
    served = Hub({**files, **dict.fromkeys(unwanted, b"unwanted")})

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.agents.add(self.headers["User-Agent"])
            status, headers, body = served.answer(self.path.split("?")[0])
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", constants.ENDPOINT + "/{repo_id}/resolve/{revision}/{filename}"
        )
        yield served
        server.shutdown()
        thread.join()


def test_only_what_is_wanted_is_fetched_once_and_told_in_bytes(
    served: Hub, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, int, int]] = []
    prepared = sources.prepare("owner/tiny", tmp_path, lambda *words: told.append(words))
    wanted = {file.name for file in tiny_model.iterdir()}
    assert {file.name for file in prepared.path.iterdir()} == wanted
    assert prepared.name == "owner/tiny"
    assert prepared.digest == sources.prepare(str(tiny_model), tmp_path, quiet).digest
    loading.load(prepared, "cpu", "float32")
    size = sum(len(served.files[name]) for name in wanted)
    fetched = [(done, total) for stage, done, total in told if stage == "fetching owner/tiny"]
    assert fetched[-1] == (size, size)
    assert fetched == sorted(fetched)
    assert all(asked.startswith(("/api/models/owner/tiny", "/owner/tiny/resolve/")) for asked in served.asked)
    assert not any("session_id" in agent or "torch" in agent for agent in served.agents)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert sources.prepare("owner/tiny", tmp_path, quiet) == prepared
    assert hub.cached("owner/tiny") == prepared.path


def test_an_adapter_is_fetched_without_the_rest(served: Hub) -> None:
    served.files |= {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x", "adapter_model.bin": b"x"}
    folder = hub.fetch("owner/tiny", hub.ADAPTER_FILES, quiet)
    assert {file.name for file in folder.iterdir()} == set(hub.ADAPTER_FILES)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gated", "is given only to those who asked for it: ask at http://127.0.0.1:"),
        ("gated", "then log in with `hf auth login`"),
        ("private", "the hub shows no 'owner/private': check the name, or log in with `hf auth login`"),
        ("gone", "the hub shows no 'owner/gone': check the name, or log in with `hf auth login`"),
        ("broken", "'owner/broken' is not on this machine, and the hub cannot be reached"),
    ],
)
def test_what_the_hub_does_not_give_is_said(name: str, words: str, served: Hub, tmp_path: Path) -> None:
    assert words in refusal(f"owner/{name}", tmp_path)
    assert words in refusal("smollm2", tmp_path, adapter=f"owner/{name}")


def test_a_hub_that_cannot_be_reached_is_said(served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nothing listens
    words = "is not on this machine, and the hub cannot be reached: check the connection, or name a folder"
    assert refusal("owner/tiny", tmp_path) == f"'owner/tiny' {words}"
    assert hub.cached("owner/tiny") is None


def test_what_is_not_here_is_said_when_nothing_may_be_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert constants.HF_HUB_OFFLINE
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    message = refusal("owner/tiny", tmp_path)
    assert message == (
        "'owner/tiny' is not on this machine, and HF_HUB_OFFLINE keeps it off the hub: unset that, or name a folder"
    )


def test_a_disk_without_room_is_said_with_numbers(served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = type("Usage", (), {"free": 2**20})
    monkeypatch.setattr("shutil.disk_usage", lambda _: full)
    words = rf"no room to fetch 'owner/tiny': it takes [\d.]+ MiB in {tmp_path / 'hub'}, where 1 MiB are free"
    assert re.fullmatch(words, refusal("owner/tiny", tmp_path))
    assert list((tmp_path / "hub").rglob("*.safetensors")) == []


def test_a_repository_without_safetensors_is_said_to_be(served: Hub, tmp_path: Path) -> None:
    del served.files["model.safetensors"]
    assert "no model.safetensors in " in refusal("owner/tiny", tmp_path)
