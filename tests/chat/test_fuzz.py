"""Whatever is sent over HTTP, no answer is a fault of the server's and none is late: fuzzed on a real model."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import unsupported_method

from chat.openapi import description
from chat.page_gate import RUN
from storage import Store
from tests.chat.test_real_engine import running
from tests.chat.whole import whole

POSTS = ["/v1/chat/completions", RUN, "/page/model", "/page/models", "/page/models/forget"]
LATE = 60.0  # seconds, on a machine that is busy otherwise
TEXT = {"type": "string"}
PAGE = {
    "/page/state": {"has": TEXT, "limit": {"type": "integer", "minimum": 1, "maximum": 100_000}},
    "/page/turn": {"chat": TEXT},
    "/page/assets/{name}": {"name": TEXT},
    "/{name}": {"name": TEXT},
}


def described(path: str, parameters: dict[str, Any], refused: Any) -> dict[str, Any]:
    """A GET of the page's own, in OpenAPI's words."""
    places = {name: "path" if f"{{{name}}}" in path else "query" for name in parameters}
    listed = [
        {"name": name, "in": places[name], "schema": schema, "required": places[name] == "path" or name == "chat"}
        for name, schema in parameters.items()
    ]
    return {"get": {"parameters": listed, "responses": {"200": {"description": "what the page needs"}, "4XX": refused}}}


OURS = description()
REFUSED = OURS["paths"]["/healthz"]["get"]["responses"]["4XX"]
PATHS = {**OURS["paths"], **{path: described(path, parameters, REFUSED) for path, parameters in PAGE.items()}}
CONFIG = SchemathesisConfig.from_dict({"checks": {"positive_data_acceptance": {"enabled": False}}})
surface = schemathesis.openapi.from_dict({**OURS, "paths": PATHS}, config=CONFIG)
quick = settings(suppress_health_check=list(HealthCheck), phases=(Phase.explicit, Phase.generate), max_examples=40)


@pytest.fixture(scope="module")
def url(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The whole application with a real model, in a thread of its own, because the fuzzers here are not async."""
    folder = tmp_path_factory.mktemp("fuzz")
    addresses: Queue[str] = Queue()
    end = threading.Event()

    async def serve() -> None:
        store = await Store.open(folder)
        async with running(store, tiny_model, folder) as (service, engine), whole(service) as base:
            addresses.put(base)
            await asyncio.to_thread(end.wait)
            assert (await engine.snapshot()).steps > 10, "hardly anything that was tried reached the model"
        await store.close()

    with ThreadPoolExecutor(1) as elsewhere:
        served = elsewhere.submit(asyncio.run, serve())
        try:
            yield addresses.get(timeout=LATE)
        finally:
            end.set()
            served.result()


@surface.hook
def map_body(context: schemathesis.HookContext, body: Any) -> Any:
    """What no schema can say is put right, so that the model is reached, and replies are short; other faults stay."""
    del context
    if not isinstance(body, dict):
        return body
    body = {**body}
    if isinstance(body.get("model"), str):
        body["model"] = "default"
    for name, most in (("max_tokens", 2), ("max_completion_tokens", 2), ("n", 3)):
        value = body.get(name)
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > most):
            body[name] = most
    if isinstance(body.get("messages"), list):
        body["messages"] = [*map(with_text, body["messages"]), {"role": "user", "content": "one"}]
    if isinstance(body.get("stop"), str | list):
        body["stop"] = body["stop"][:16] or "."
    return body


def with_text(message: Any) -> Any:
    """A message that a schema allows to have no content, with a text."""
    if isinstance(message, dict) and message.get("content", 0) is None:
        return {**message, "content": "text"}
    return message


@surface.parametrize()
@quick
def test_the_described_surface(case: schemathesis.Case, url: str) -> None:
    other_methods = [unsupported_method] if case.path in PAGE else []
    case.call_and_validate(base_url=url, timeout=LATE, excluded_checks=other_methods)


@given(body=st.binary(max_size=200), path=st.sampled_from(POSTS))
@quick
def test_bytes_for_bodies(url: str, body: bytes, path: str) -> None:
    assert post(url, path, body) in (400, 415)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None), max_size=20)
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner))
TEXTS = st.lists(st.text(st.characters(codec="utf-8"), max_size=20), max_size=3)
LIKELY = {
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(-1, 2**31),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0, 10),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "seed": st.integers(-(2**63), 2**63),
    "stop": TEXTS,
    "n": st.integers(0, 4),
    "stream": st.booleans(),
}


@given(
    messages=TEXTS,
    wanted=st.fixed_dictionaries({}, optional=LIKELY),
    odd=st.dictionaries(st.sampled_from([*LIKELY, "messages", "tools", "\ud800"]), JSON, max_size=1),
)
@quick
def test_requests_of_likely_and_of_odd_values(
    url: str, messages: list[str], wanted: dict[str, Any], odd: dict[str, Any]
) -> None:
    chat = [{"role": "user", "content": text} for text in (*messages, "one")]
    body = {"model": "default", "max_tokens": 2, "messages": chat, **wanted, **odd}
    assert post(url, "/v1/chat/completions", json.dumps(body).encode()) in (200, 400)


@given(
    data=st.lists(JSON, max_size=9) | JSON,
    fn_index=st.integers(-1, 12) | JSON,
    event_data=st.dictionaries(st.sampled_from(["chat", "title", "current"]), JSON) | JSON,
)
@quick
def test_calls_of_the_pages_functions(url: str, data: object, fn_index: object, event_data: object) -> None:
    body = {"data": data, "fn_index": fn_index, "event_data": event_data, "session_hash": "fuzz"}
    assert post(url, RUN, json.dumps(body).encode()) in (200, 400)


@given(path=st.sampled_from(["/page/model", "/page/models/forget"]), chat=JSON, model=JSON)
@quick
def test_choices_of_models(url: str, path: str, chat: object, model: object) -> None:
    assert 400 <= post(url, path, json.dumps({"chat": chat, "model": model}).encode()) < 500


def post(url: str, path: str, body: bytes) -> int:
    """The status of the answer, which comes in time and whole."""
    answer = httpx.post(url + path, content=body, headers={"Content-Type": "application/json"}, timeout=LATE)
    return answer.status_code
