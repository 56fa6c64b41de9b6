"""What a foreign page could do through a visitor's browser is refused, on every route."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI, WebSocket
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from chat.guard import add_guards
from tests.chat.serving import Bound, serving


def app(bound: str = "127.0.0.1") -> FastAPI:
    made = FastAPI()
    add_guards(made, Bound(bound))

    @made.get("/x")
    @made.post("/x")
    async def x() -> str:
        return "in"

    @made.websocket("/ws")
    async def ws(socket: WebSocket) -> None:
        await socket.accept()
        await socket.close()

    return made


GOOD_HOSTS = ["localhost", "localhost:7860", "LOCALHOST:1", "127.0.0.1:7860", "127.9.9.9", "[::1]:7860", "[::1]"]
BAD_HOSTS = [
    "evil.example",
    "evil.example:7860",
    "localhost.evil.example",
    "127.0.0.1.nip.io",
    "192.168.1.5:7860",
    "0.0.0.0",
    "localhost:port",
    "user@localhost",
    "localhost/x",
    "",
]


@pytest.mark.parametrize("host", GOOD_HOSTS)
def test_own_hosts(host):
    assert TestClient(app()).get("/x", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", BAD_HOSTS)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_foreign_hosts(host, method):
    response = TestClient(app()).request(method, "/x", headers={"Host": host})
    assert response.status_code == 403
    assert "Host" in response.text
    assert response.headers["content-type"].startswith("text/plain")


def test_the_bound_name_is_its_own():
    assert TestClient(app("keepwarm.lan")).get("/x", headers={"Host": "keepwarm.lan:80"}).status_code == 200
    assert TestClient(app("::1")).get("/x", headers={"Host": "[::1]:7860"}).status_code == 200


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("localhost:7860", None, 200),
        ("localhost:7860", "http://localhost:7860", 200),
        ("localhost:7860", "HTTP://LOCALHOST:7860", 200),
        ("localhost", "http://localhost:80", 200),
        ("127.0.0.1:7860", "http://evil.example", 403),
        ("127.0.0.1:7860", "http://127.0.0.1:3000", 403),
        ("127.0.0.1:7860", "http://localhost:7860", 403),
        ("127.0.0.1:7860", "null", 403),
        ("127.0.0.1:7860", "file://", 403),
        ("127.0.0.1:7860", "", 403),
    ],
)
def test_origins_of_what_changes_something(host, origin, status):
    headers = {"Host": host} | ({} if origin is None else {"Origin": origin})
    client = TestClient(app())
    assert client.post("/x", headers=headers).status_code == status
    assert client.get("/x", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("headers", "let_in"),
    [
        ({"Host": "localhost:1"}, True),
        ({"Host": "localhost:1", "Origin": "http://localhost:1"}, True),
        ({"Host": "localhost:1", "Origin": "http://evil.example"}, False),
        ({"Host": "evil.example"}, False),
    ],
)
def test_websockets(headers, let_in):
    client = TestClient(app())
    if let_in:
        with client.websocket_connect("/ws", headers=headers):
            return
    with pytest.raises(WebSocketDisconnect) as raised, client.websocket_connect("/ws", headers=headers):
        pass
    assert raised.value.code == 1008


async def test_every_route_of_the_real_server_is_guarded(service):
    async with serving(service) as url, httpx.AsyncClient(base_url=url) as http:
        for path in ("/healthz", "/readyz", "/v1/models", "/nothing"):
            assert (await http.get(path, headers={"Host": "evil.example"})).status_code == 403
        body = {"model": "default", "messages": [{"role": "user", "content": "hi"}]}
        foreign = {"Origin": "http://evil.example", "Content-Type": "text/plain"}
        response = await http.post("/v1/chat/completions", json=body, headers=foreign)
        assert response.status_code == 403
        assert "Origin" in response.text
        assert response.json()["error"]["code"] == "foreign_request"
        long = await http.get("/healthz", headers={"Host": "h" * 5000})
        assert (long.status_code, len(long.text) < 400) == (403, True)
