"""Refuse requests that a foreign web page could make through a visitor's browser: Host and Origin are checked.

A page elsewhere can resolve its own name to 127.0.0.1 (then the Host is wrong) or post to this server directly (then
the Origin is). Plain ASGI, so that streams and disconnects pass through untouched; applies to every route. Knows
nothing of users.
"""

from __future__ import annotations

import ipaddress
from typing import Protocol
from urllib.parse import urlsplit

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from chat.errors import ChatError
from chat.refusals import refusal

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
SHOWN = 200  # characters of a header in a complaint
DEFAULT_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}


class Bound(Protocol):
    """The part of the settings that a guard needs."""

    @property
    def host(self) -> str:
        """The address the server listens on."""


def add_guards(app: FastAPI, settings: Bound) -> None:
    """Put the guard before everything that `app` serves."""
    app.add_middleware(HostGuard, bound_host=settings.host)


class HostGuard:
    """Lets a request through if its Host is this server's and, where it could change something, its Origin agrees.

    Any port is accepted in the Host, because a tunnel or a container may map it; the Origin must name the same one.
    """

    def __init__(self, app: ASGIApp, bound_host: str) -> None:
        self._app = app
        self._bound = bound_host.strip("[]").lower()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        complaint = self._complaint(scope) if scope["type"] in ("http", "websocket") else None
        if complaint is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http" and scope["path"].startswith("/v1/"):
            await refusal(ChatError(complaint, code="foreign_request"))(scope, receive, send)
        elif scope["type"] == "http":
            await PlainTextResponse(complaint + "\n", status_code=403)(scope, receive, send)
        else:
            await receive()  # the connection request; closing before accepting it answers with 403
            await send({"type": "websocket.close", "code": 1008, "reason": "Host or Origin refused"})

    def _complaint(self, scope: Scope) -> str | None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        host = _address(hosts[0], scope["scheme"]) if len(hosts) == 1 else None
        if host is None or not self._is_ours(host[0]):
            shown = ", ".join(hosts)[:SHOWN] or "(none)"
            return f"The Host {shown!r} is not this server's. Open it as http://127.0.0.1 or http://localhost instead."
        origins = headers.getlist("origin")
        unsafe = scope["type"] == "websocket" or scope["method"] not in SAFE_METHODS
        if unsafe and origins and any(_origin_address(origin) != host for origin in origins):
            shown = ", ".join(origins)[:SHOWN]
            return f"The Origin {shown!r} is not this server's ({hosts[0]}). Only its own pages may do this."
        return None

    def _is_ours(self, name: str) -> bool:
        if name in ("localhost", self._bound):
            return True
        try:
            return ipaddress.ip_address(name).is_loopback
        except ValueError:
            return False


def _address(netloc: str, scheme: str) -> tuple[str, int] | None:
    """Name and port of "name", "name:port" or "[v6]:port"; None for anything else."""
    try:
        parts = urlsplit(f"//{netloc}")
        port = parts.port
    except ValueError:
        return None
    if not parts.hostname or parts.netloc != netloc or "@" in netloc or parts.path or parts.query or parts.fragment:
        return None
    return parts.hostname.rstrip("."), DEFAULT_PORTS.get(scheme, 80) if port is None else port


def _origin_address(origin: str) -> tuple[str, int] | None:
    scheme, separator, netloc = origin.partition("://")
    return _address(netloc, scheme.lower()) if separator and scheme.lower() in ("http", "https") else None
