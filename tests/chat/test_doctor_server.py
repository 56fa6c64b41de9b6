"""Asking a server for its figures: whichever address is given, whoever answers, it is figures or one clear line."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from chat import doctor_server
from chat.doctor import DoctorError
from chat.doctor_server import fetch, server_url
from chat.figures import PATH
from chat.instance import NOTE_NAME


@contextmanager
def answering(pages: dict[str, tuple[int, str]]) -> Iterator[str]:
    """A server that has these pages and no others."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = pages.get(self.path, (404, "not found"))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def complaint(url: str) -> str:
    with pytest.raises(DoctorError) as error:
        fetch(url)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("http://127.0.0.1:7860", "http://127.0.0.1:7860"),
        ("http://127.0.0.1:7860/v1/", "http://127.0.0.1:7860"),
        ("127.0.0.1:7860", "http://127.0.0.1:7860"),
        ("localhost", "http://localhost"),
        ("http://[::1]:7860", "http://[::1]:7860"),
    ],
)
def test_an_address_is_taken_as_people_type_it(address: str, url: str, tmp_path: Path) -> None:
    assert server_url(address, tmp_path) == url


@pytest.mark.parametrize("address", ["ftp://127.0.0.1", "http://", "http://127.0.0.1:port", "http://[::1"])
def test_what_is_no_address_is_said_to_be_none(address: str, tmp_path: Path) -> None:
    with pytest.raises(DoctorError, match=r"is not an address: give it like http://127\.0\.0\.1:7860"):
        server_url(address, tmp_path)


def test_without_an_address_it_is_the_server_of_the_data_directory(tmp_path: Path) -> None:
    with pytest.raises(DoctorError) as error:
        server_url("", tmp_path)
    assert str(error.value).startswith(f"no server runs in {tmp_path}: start Keepwarm with `python app.py`")
    (tmp_path / NOTE_NAME).write_text(json.dumps({"url": "http://127.0.0.1:7861", "pid": os.getpid()}))
    assert server_url("", tmp_path) == "http://127.0.0.1:7861"


def test_nobody_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    assert complaint(url).startswith(f"nothing answers at {url} (")


def test_somebody_is_there_and_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_server, "PATIENCE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert complaint(url).startswith(f"{url} did not answer within ")


@pytest.mark.parametrize(
    "pages",
    [
        {},
        {"/readyz": (200, "<html>hello</html>")},
        {"/readyz": (200, "[1, 2]")},
        {"/readyz": (200, '{"ok": true}')},
        {"/readyz": (403, '{"status": "ready"}')},
    ],
)
def test_somebody_else_answers(pages: dict[str, tuple[int, str]]) -> None:
    with answering(pages) as url:
        assert complaint(url).startswith(f"what answers at {url} is not Keepwarm: ")


@pytest.mark.parametrize("figures", [(404, '{"detail": "Not Found"}'), (200, '{"version": "9"}'), (200, "nonsense")])
def test_another_version_answers(figures: tuple[int, str]) -> None:
    with answering({"/readyz": (503, '{"status": "loading"}'), PATH: figures}) as url:
        assert complaint(url).startswith(f"the Keepwarm at {url} does not tell its figures as this version knows them")
