"""What of Gradio a browser may reach: what the page asks for, with values that the page can have sent.

Gradio has many more routes, for uploads, icons, streams and a cloud of its own: some fail on odd input with a
traceback, and an icon may be asked for in a size that takes all memory. Plain ASGI around Gradio's application. Knows
the page's events and their inputs; nothing of chats.
"""

from __future__ import annotations

import math
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chat.bodies import body_of, json_object
from chat.errors import ChatError
from chat.quick_gradio import gr
from chat.refusals import no_such_url, refusal, status_of

RUN = "/gradio_api/run/predict"
FILES = {"/", "/config", "/theme.css", "/favicon.ico", "/robots.txt", "/gradio_api/info", "/gradio_api/app_id"}
FOLDERS = ("/assets/", "/static/", "/svelte/", "/gradio_api/heartbeat/")
LONGEST_NAME = 200  # bytes of a part of a path; file systems refuse 256
NOT_THERE = (403, 404, 405)  # what Gradio answers, in a form of its own, where a file is not or not to be had
# What an event of the page's script carries, each a text; "chat" and "current" are ids and come back in the answer.
EVENTS = {
    "open": {"chat"},
    "retry": {"chat"},
    "stop": {"chat"},
    "rename": {"chat", "title", "current"},
    "remove": {"chat", "current"},
}
MISFIT = "This page does not fit the Keepwarm that runs now; load it again."


class _Run(BaseModel):
    """What the page sends to run one of its functions."""

    model_config = ConfigDict(strict=True)

    data: list[Any]
    fn_index: int
    event_data: Any = None
    session_hash: str | None = None
    trigger_id: int | None = None


class PageGate:
    """Refuses every other request, in the form of all refusals; a call of the page's functions in Gradio's form."""

    def __init__(self, app: ASGIApp, blocks: gr.Blocks) -> None:
        self._app = app
        self._blocks = blocks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method, path = scope["method"], scope["path"]
        if method == "POST" and path == RUN:
            await self._run(scope, receive, send)
        elif method in ("GET", "HEAD") and _may_be_there(path):
            await self._get(scope, receive, send)
        else:
            await refusal(no_such_url(method, path))(scope, receive, send)

    async def _get(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = False

        async def in_our_form(message: Message) -> None:
            nonlocal refused
            if message["type"] == "http.response.start" and message["status"] in NOT_THERE:
                refused = True
                await refusal(no_such_url(scope["method"], scope["path"]))(scope, receive, send)
            elif not refused:
                await send(message)

        # No part of the page depends on a query, and Gradio takes files and views from it.
        await self._app({**scope, "query_string": b""}, receive, in_our_form)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await body_of(Request(scope, receive))
            fits = self._fits(_Run.model_validate(json_object(body)))
        except ClientDisconnect:
            return
        except ChatError as error:
            await JSONResponse({"error": error.message}, status_of(error))(scope, receive, send)
            return
        except ValidationError:
            fits = False
        if fits:
            await self._app(scope, _again(body, receive), send)
        else:
            await JSONResponse({"error": MISFIT}, 400)(scope, receive, send)

    def _fits(self, run: _Run) -> bool:
        """Whether there is this function, and its inputs take these values."""
        function = self._blocks.fns.get(run.fn_index)
        if function is None or function.fn is None or len(run.data) != len(function.inputs):
            return False
        needed: set[str] = set().union(*(EVENTS.get(event, set()) for _, event in function.targets))
        return (
            all(map(_takes, function.inputs, run.data))
            and (run.session_hash or "").isascii()
            and (not needed or _carries(run.event_data, needed))
        )


def _may_be_there(path: str) -> bool:
    short = all(len(part.encode()) <= LONGEST_NAME for part in path.split("/"))
    return short and (path in FILES or path.startswith(FOLDERS))


def _takes(component: Any, value: object) -> bool:
    """Whether a component of the page can have this value."""
    if isinstance(component, gr.Slider):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return False
    elif not isinstance(value, str | None):
        return False
    try:
        component.preprocess(value)
    except Exception:  # out of its range, or none of its choices
        return False
    return True


def _carries(data: object, needed: set[str]) -> bool:
    if not isinstance(data, dict) or not all(isinstance(data.get(name), str) for name in needed):
        return False
    return all(data[name].isascii() for name in needed - {"title"})


def _again(body: bytes, receive: Receive) -> Receive:
    """A `receive` that tells the body once more, and then what comes after it."""
    told = False

    async def tell() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return tell
