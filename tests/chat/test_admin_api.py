"""The administrator's routes and the page's about the cache, over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from engine.protocol import Rejected
from tests.chat.serving import serving
from tests.chat.test_cache_service import DYING, ended, happened, told
from tests.chat.test_service import ask, eventually, new_chat


@pytest.fixture
async def http(service) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(service) as url, httpx.AsyncClient(base_url=url, timeout=30) as client:
        yield client


@pytest.fixture
async def chat(service) -> str:
    made = await new_chat(service)
    await ask(service, made, "one")
    return made


async def test_events(http, engine, chat):
    engine.on_cache_log(told(*(happened(chat, number) for number in range(3))))
    answer = (await http.get("/api/admin/events", params={"limit": 2})).json()
    assert [event["blocks"] for event in answer["events"]] == [1, 2]
    assert answer["events"][0] == {
        "at": 5.0, "action": "expired", "session_id": chat, "source": "disk", "target": None, "blocks": 1,
        "bytes": 4096, "age_s": 9.0, "reason": "30 days unused",
    }  # fmt: skip
    assert len((await http.get("/api/admin/events")).json()["events"]) == 3
    for limit in ("0", "-1", "20001", "many"):
        assert (await http.get("/api/admin/events", params={"limit": limit})).status_code == 400


async def test_the_trace(http, engine, chat):
    engine.on_cache_log(told(turns=[ended(chat, number) for number in range(3)]))
    answer = await http.get("/api/admin/trace", params={"limit": 2})
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert [line["computed_tokens"] for line in lines] == [1, 2]
    assert lines[1] == {
        "at": 7.5, "session_id": chat, "model": "f" * 16, "blocks": "000102030405060708090a0b0c0d0e0f",
        "device_tokens": 32, "host_tokens": 16, "disk_tokens": 8, "computed_tokens": 2, "output_tokens": 5,
    }  # fmt: skip
    assert len((await http.get("/api/admin/trace")).text.splitlines()) == 3
    for limit in ("0", "20001", "many"):
        assert (await http.get("/api/admin/trace", params={"limit": limit})).status_code == 400


async def test_pins_and_times_to_live(http, service, store, engine, chat):
    path = f"/api/admin/sessions/{chat}"
    assert (await http.post(f"{path}/pin", json={"pinned": True})).json() == {"id": chat, "pinned": True}
    assert (await http.post(f"{path}/ttl", json={"ttl": 90})).json() == {"id": chat, "ttl": 90}
    (kept,) = await store.cache.kept_sessions()
    assert (kept.pinned, kept.ttl_s) == (True, 90.0)
    assert (await http.post(f"{path}/ttl", json={"ttl": None})).json() == {"id": chat, "ttl": None}
    engine.pin_refusal = "There is no room."
    refused = await http.post(f"{path}/pin", json={"pinned": True})
    assert (refused.status_code, refused.json()["error"]["message"]) == (409, "There is no room.")
    engine.set_state(DYING)
    assert (await http.post(f"{path}/pin", json={"pinned": True})).status_code == 503


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("sessions/none/pin", {"pinned": True}),
        ("sessions/none/ttl", {"ttl": 5}),
        ("estimate", {"chat": "none"}),
    ],
)
async def test_a_chat_that_is_not_there(http, path, body):
    answer = await http.post(f"/api/admin/{path}", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "session_not_found")


async def test_a_chat_of_an_api_client_is_not_called_deleted(http, service, store):
    made = await store.create_session(service.user.id, origin="api")
    answer = await http.post(f"/api/admin/sessions/{made.id}/pin", json={"pinned": True})
    said = f"{made.id!r} is a chat of an API client; this is for chats of the page alone."
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, said)
    assert answer.json()["error"]["code"] == "session_not_found"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("pin", {}),
        ("pin", {"pinned": "yes"}),
        ("pin", {"pinned": 1}),
        ("ttl", {"ttl": "30m"}),
        ("ttl", {"ttl": 0}),
        ("ttl", {"ttl": 1e300}),
        ("ttl", {}),
    ],
)
async def test_what_is_no_wish_is_named(http, chat, path, body):
    answer = await http.post(f"/api/admin/sessions/{chat}/{path}", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "pinned" if path == "pin" else "ttl")


async def test_another_sites_page_may_do_none_of_it(http, engine, chat):
    evil = {"Origin": "http://evil.example"}
    for path, body in ((f"sessions/{chat}/pin", {"pinned": True}), ("estimate", {"chat": chat})):
        assert (await http.post(f"/api/admin/{path}", json=body, headers=evil)).status_code == 403
    for path in ("events", "trace"):
        assert (await http.get(f"/api/admin/{path}", headers={"Host": "evil.example"})).status_code == 403
    assert engine.pins == []


async def test_an_estimate(http, engine, chat):
    answer = (await http.post("/api/admin/estimate", json={"chat": chat, "text": "two"})).json()
    assert answer["seconds"] == 0.125
    assert sum(answer["tokens"].values()) == answer["prompt_tokens"] == len(engine.estimates[-1])
    engine.set_state(DYING)
    assert (await http.post("/api/admin/estimate", json={"chat": chat})).status_code == 503


async def test_an_estimate_of_what_the_pool_never_holds_is_a_refusal(http, engine, chat):
    engine.reject = Rejected(request_id="", code="never_fits", message="needs 14 blocks; the pool holds 11")
    answer = await http.post("/api/admin/estimate", json={"chat": chat, "text": "two"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["message"]) == (400, "never_fits", engine.reject.message)
    assert (await http.get("/page/ready", params={"chat": chat})).json() == {"seconds": None}


async def test_the_page_is_told_how_ready_a_chat_is_or_nothing(http, engine, chat):
    assert (await http.get("/page/ready", params={"chat": chat})).json() == {"seconds": 0.125}
    assert (await http.get("/page/ready", params={"chat": "none"})).json() == {"seconds": None}
    engine.estimated_s = None
    assert (await http.get("/page/ready", params={"chat": chat})).json() == {"seconds": None}
    engine.set_state(DYING)
    assert (await http.get("/page/ready", params={"chat": chat})).json() == {"seconds": None}


async def test_a_tab_that_goes_away_ends_the_prefetch_that_it_asked_for(http, service, engine, chat):
    engine.prefetches.clear()
    assert (await http.post("/page/warm", json={"chat": chat})).status_code == 200
    assert [warmed for warmed, _ in engine.prefetches] == [chat]
    engine.prefetch_gate.clear()
    asking = asyncio.create_task(http.post("/page/warm", json={"chat": chat}))
    await eventually(lambda: len(engine.prefetches) == 2)
    asking.cancel()
    await asyncio.wait([asking])
    async with asyncio.timeout(10):
        while engine.left != [chat]:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.001)
    assert (await http.post("/page/warm", json={"chat": "none"})).status_code == 200
    assert (await http.post("/page/warm", json={})).status_code == 400


async def test_the_page_sees_how_far_the_warming_of_recent_chats_is(http, service, engine, chat):
    assert (await http.get("/page/state")).json()["warming"] is None
    engine.prefetch_gate.clear()
    engine.prefetches.clear()
    service.cache._warmth.warm_recent(service.user, [])
    await eventually(lambda: engine.prefetches)
    assert (await http.get("/page/state")).json()["warming"] == {"done": 0, "total": 1}
