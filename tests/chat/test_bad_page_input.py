"""What a browser can send that the page would not: foreign values for its functions, and the rest of Gradio."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from chat.bodies import MAX_BODY
from chat.page import ChatPage
from chat.page_gate import EVENTS, MISFIT, RUN
from chat.quick_gradio import gr
from chat.service import ChatService
from storage.store import Store
from tests.chat.whole import whole


@pytest.fixture
async def http(service: ChatService) -> AsyncIterator[httpx.AsyncClient]:
    async with whole(service) as url, httpx.AsyncClient(base_url=url, timeout=60) as made:
        made.headers["Content-Type"] = "application/json"
        yield made
        assert (await made.get("/")).status_code == 200


@pytest.fixture
def page(service: ChatService) -> gr.Blocks:
    """The page's functions by their numbers, the same in every build."""
    return ChatPage(service).blocks


def number_of(page: gr.Blocks, name: str) -> int:
    """The number under which the page calls its function for an event."""
    return next(key for key, fn in page.fns.items() if fn.fn and fn.targets and fn.targets[0][1] == name)


def place(page: gr.Blocks, name: str) -> int:
    """Where a value of the button's function is, by the name of the component that has it."""
    inputs = page.fns[number_of(page, "click")].inputs
    return next(index for index, component in enumerate(inputs) if component.elem_id == name)


def sending(page: gr.Blocks, values: dict[str, object] | None = None, **changes: object) -> dict[str, Any]:
    """What the page sends with the button, but for the `values` of some components, and for `changes`."""
    number = number_of(page, "click")
    data = [component.value for component in page.fns[number].inputs]
    for name, value in {"kw-chat": "new-1", "kw-box": "one", **(values or {})}.items():
        data[place(page, name)] = value
    return {"fn_index": number, "data": data, "event_data": None, "session_hash": "abc", "trigger_id": 1, **changes}


async def test_what_the_page_sends_passes(http: httpx.AsyncClient, page: gr.Blocks, service: ChatService) -> None:
    answer = await http.post(RUN, json=sending(page))
    assert answer.status_code == 200
    (chat,) = await service.sessions(service.user.id)
    opening = {"fn_index": number_of(page, "open"), "data": [], "event_data": {"chat": chat.id}, "session_hash": "abc"}
    answer = await http.post(RUN, json=opening)
    assert answer.status_code == 200
    assert "one" in answer.text


async def test_what_it_cannot_have_sent_is_refused_without_a_word_in_the_log(
    http: httpx.AsyncClient, page: gr.Blocks, service: ChatService, caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    values = sending(page)["data"]
    inputs = page.fns[number_of(page, "click")].inputs
    slider = next(index for index, component in enumerate(inputs) if isinstance(component, gr.Slider))

    def with_slider(value: object) -> dict[str, Any]:
        return sending(page, data=[*values[:slider], value, *values[slider + 1 :]])

    wrong = [
        {},
        {"data": []},
        {"data": None, "fn_index": 0},
        sending(page, fn_index=None),
        sending(page, fn_index=-1),
        sending(page, fn_index=10**30),
        sending(page, fn_index="0"),
        sending(page, fn_index=True),
        sending(page, data={}),
        sending(page, data=values[:-1]),
        sending(page, data=[*values, 1]),
        sending(page, session_hash=7),
        *(sending(page, {"kw-box": value}) for value in (7, [], {}, True)),
        *(with_slider(value) for value in (None, "hot", True, 1e300, float("nan"), -1)),
        sending(page, {"kw-mode": "no such choice"}),
        *(
            {"fn_index": number_of(page, event), "data": [], "event_data": data, "session_hash": "abc"}
            for event in ("open", "stop", "rename", "remove")
            for data in (None, 5, [], {}, {"chat": None}, {"chat": {"a": 1}}, {"chat": "\ud800", "title": "x"})
        ),
    ]
    with caplog.at_level(logging.WARNING):
        for body in wrong:
            answer = await http.post(RUN, content=json.dumps(body))
            assert (answer.status_code, answer.json()) == (400, {"error": MISFIT}), body
        for body, said in (
            (b"", "The body is empty"),
            (b"\xff", "The body is not UTF-8"),
            (b"[" * 100_000, "The body is nested too deeply"),
            (b"[]", "The body must be a JSON object"),
        ):
            answer = await http.post(RUN, content=body)
            assert answer.status_code == 400
            assert answer.json()["error"].startswith(said)
        assert (await http.post(RUN, content=b"x" * (MAX_BODY + 1))).status_code == 413
    assert caplog.records == []
    assert capfd.readouterr().err == ""
    assert await service.sessions(service.user.id) == []


def test_every_function_that_reads_an_event_says_what_it_reads(page: gr.Blocks) -> None:
    reading = [fn for fn in page.fns.values() if fn.fn and "event" in inspect.signature(fn.fn).parameters]
    assert {fn.targets[0][1] for fn in reading} == set(EVENTS)
    for fn in reading:
        used = {name for name in ("chat", "title", "current", "model") if f"event.{name}" in inspect.getsource(fn.fn)}
        assert used == EVENTS[fn.targets[0][1]]


async def test_bad_messages_are_told_in_the_page_and_stored_nowhere(
    http: httpx.AsyncClient, page: gr.Blocks, service: ChatService
) -> None:
    for text, said in (
        ("", "The message is empty"),
        (" \n ", "The message is empty"),
        ("x" * 1_000_000, "shorten the message by"),
        ("half \ud83d", "half a character (U+D83D)"),
    ):
        answer = await http.post(RUN, content=json.dumps(sending(page, {"kw-box": text})))
        assert answer.status_code == 200
        assert said in answer.text
    prompt = json.dumps(sending(page, {"kw-prompt": "half \ud83d"}))
    assert "half a character" in (await http.post(RUN, content=prompt)).text
    assert await service.sessions(service.user.id) == []


async def test_a_full_disk_is_told_in_the_page(
    http: httpx.AsyncClient, page: gr.Blocks, service: ChatService, store: Store
) -> None:
    def limit(pages: int) -> None:
        with store._threads.database.raw() as connection:
            (there,) = connection.execute("PRAGMA page_count").fetchone()
            connection.execute(f"PRAGMA max_page_count={there + pages}").fetchone()

    message = json.dumps(sending(page, {"kw-prompt": "word " * 100_000}))
    limit(0)
    answer = await http.post(RUN, content=message)
    assert answer.status_code == 200
    assert re.search(r"Keepwarm&#x27;s database failed: the disk that holds .* is full", answer.text)
    assert '"sent":true' not in answer.text
    assert await service.sessions(service.user.id) == []
    limit(1_000_000)
    assert '"sent":true' in (await http.post(RUN, content=json.dumps(sending(page)))).text


async def test_a_damaged_database_is_told_where_the_chats_are_listed(http: httpx.AsyncClient, store: Store) -> None:
    before = (await http.get("/page/state")).json()
    assert before["chats"] == []
    with store._threads.database.raw() as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    os.truncate(store._threads.database.path, 0)
    store._threads.database.reader.dispose()
    answer = await http.get("/page/state")
    assert answer.status_code == 200
    state = answer.json()
    assert (set(state), state["server"]) == ({"server", "problem"}, before["server"])
    assert state["problem"].startswith("Keepwarm's database failed: ")
    assert (await http.get("/healthz")).status_code == 200


async def test_what_is_no_choice_of_a_model_is_refused(http: httpx.AsyncClient) -> None:
    for path, body, said in (
        ("/page/models", b"", "The body is empty"),
        ("/page/models", b"{", "The body is not JSON"),
        ("/page/models", b"{}", "source is missing"),
        ("/page/models", b'{"source": 5}', "source must be a valid string (got 5)"),
        ("/page/models", b'{"source": "a\\ud83d"}', "The text of source holds half a character"),
        ("/page/models/forget", b'{"model": null}', "model must be a valid string (got null)"),
        ("/page/models/forget", b'{"model": "unknown"}', ""),
        ("/page/model", b'{"model": "unknown"}', "chat is missing"),
        ("/page/model", b'{"model": "unknown", "chat": "unknown"}', ""),
    ):
        answer = await http.post(path, content=body)
        assert 400 <= answer.status_code < 500, body
        assert answer.json()["error"]["message"].startswith(said)
    assert (await http.post("/page/models", content=b"x" * (MAX_BODY + 1))).status_code == 413


async def test_the_page_cannot_be_asked_with_odd_queries(http: httpx.AsyncClient) -> None:
    for path, status, words in (
        ("/page/state?limit=x", 400, "limit must be a valid integer"),
        ("/page/state?limit=0", 400, "limit must be greater than or equal to 1"),
        ("/page/state?limit=99999999999999999999", 400, "limit must be less than or equal to"),
        ("/page/turn", 400, "chat is missing"),
        ("/page/turn?chat=%ed%a0%bd", 200, "event: done"),
        ("/page/state?has=%ff", 200, '"engine"'),
        ("/?deep_link=%00&view=x", 200, "<html"),
    ):
        answer = await http.get(path)
        assert (answer.status_code, words in answer.text) == (status, True), path


async def test_of_gradio_there_is_only_what_the_page_uses(http: httpx.AsyncClient) -> None:
    for method, path in (
        ("GET", "/pwa_icon/2048"),  # a larger one would take all memory
        ("GET", "/pwa_icon/0"),
        ("GET", "/manifest.json"),
        ("POST", "/gradio_api/upload"),
        ("GET", "/gradio_api/file=/etc/passwd"),
        ("GET", "/gradio_api/proxy=http://elsewhere.example/"),
        ("GET", "/gradio_api/stream/a/b/1/playlist.m3u8"),
        ("POST", "/gradio_api/run/send"),
        ("POST", "/gradio_api/api/predict"),
        ("POST", "/gradio_api/component_server"),
        ("POST", "/gradio_api/reset"),
        ("GET", "/gradio_api/run-history/buckets"),
        ("POST", "/login"),
        ("GET", "/logout"),
        ("GET", "/monitoring"),
        ("GET", "/static/" + "a" * 4000),
        ("GET", "/assets/none.js"),
        ("GET", "/static/..%2f..%2fpyproject.toml"),
        ("GET", "/assets/%00"),
    ):
        answer = await http.request(method, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url"), path


async def test_what_is_no_http_is_refused_and_the_server_goes_on(http: httpx.AsyncClient) -> None:
    upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n"
    for request, first in (
        (b"GET /healthz HTTP/1.1\r\n\r\n", "400"),
        (b"GET /healthz HTTP/1.0\r\n\r\n", "403"),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", "400"),
        (b"GET /healthz HTTP/1.1\r\nHost: \xff\xfe\r\n\r\n", "403"),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 200_000 + b"\r\n\r\n", "400"),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 2000 + b"\r\n", "200"),
        (b"GET /healthz HTTP/1.1\r\nHost: " + b"h" * 10_000 + b"\r\n\r\n", "403"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n", "400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)), "400"),
        (f"GET /healthz HTTP/1.1\r\nHost: localhost\r\n{upgrade}\r\n".encode(), "200"),
        (f"GET /nothing HTTP/1.1\r\nHost: localhost\r\n{upgrade}\r\n".encode(), "404"),
    ):
        reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
        writer.write(request)
        line = (await reader.readline()).decode()
        assert line.startswith(f"HTTP/1.1 {first} "), (request[:60], line)
        assert len(await reader.read(100_000)) < 10_000
        writer.close()
