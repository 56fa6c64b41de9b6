"""The whole web application, as other pages in the person's browser and tabs of an earlier run meet it."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import httpx
import pytest

from chat.quick_gradio import gr, no_stubs
from chat.settings import Settings
from chat.web import build_app

OWN, FOREIGN = "http://localhost:7860", "http://localhost:9999"


@pytest.fixture
async def http(service, tmp_path: Path):
    app = build_app(service, Settings(data_dir=tmp_path))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url=OWN) as made:
        yield made


@pytest.mark.parametrize("path", ["/", "/config", "/gradio_api/info", "/gradio_api/app_id", "/theme.css", "/v1/models"])
async def test_no_answer_invites_another_origin(http, path):
    for origin in (FOREIGN, OWN, "http://127.0.0.1:1", "null"):
        answer = await http.get(path, headers={"Origin": origin})
        assert answer.status_code == 200
        assert not [name for name in answer.headers if name.startswith("access-control-")]
        assert answer.headers["content-security-policy"]


async def test_a_preflight_of_another_origin_is_told_nothing(http):
    headers = {"Origin": FOREIGN, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-a"}
    for path in ("/gradio_api/run/send", "/v1/chat/completions"):
        answer = await http.options(path, headers=headers)
        assert not [name for name in answer.headers if name.startswith("access-control-")]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/gradio_api/queue/data?session_hash=unknown"),
        ("POST", "/gradio_api/queue/join"),
        ("GET", "/gradio_api/call/send/unknown"),
        ("GET", "/gradio_api/call/v2/send/unknown"),
    ],
)
async def test_a_tab_of_an_earlier_run_is_told_quietly_that_there_is_no_queue(http, caplog, method, path):
    with caplog.at_level(logging.WARNING):
        answer = await http.request(method, path)
    assert (answer.status_code, answer.text) == (404, "Keepwarm does not use Gradio's queue.\n")
    assert caplog.records == []


def test_gradio_was_imported_without_writing_stubs():
    meta = sys.modules["gradio.component_meta"]
    assert meta.create_or_modify_pyi is no_stubs
    assert gr.Textbox.__name__ == "Textbox"
