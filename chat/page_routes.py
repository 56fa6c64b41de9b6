"""The page's own routes: its state, asked for every few seconds, the models, and the reply in the making as a stream.

Neither goes through Gradio's queue, which forgets an event that is begun while the stream of an earlier one closes. A
tab holds a connection only while it shows a running reply (browsers allow six per server, for all tabs together).
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from typing import Annotated, Any
from uuid import uuid4

import msgspec
from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from chat.bodies import parsed
from chat.errors import ChatError, SessionNotFound, StorageFailed
from chat.event_stream import unless_gone
from chat.page_html import live_reply
from chat.service import ChatService
from chat.turns import LiveTurn
from chat.views import ModelView
from engine.state import EngineState
from storage.errors import StorageError

GONE = 499  # a status that nobody receives, for the log
PAGE_OF_CHATS, MOST_CHATS = 100, 100_000
TICK_S = 0.07  # between two updates of a growing reply; the first text and the end go out at once


class WantedModel(BaseModel):
    """A model as a person names it."""

    model_config = ConfigDict(strict=True)

    source: str
    adapter: str = ""


class KnownModel(BaseModel):
    """A model by its id."""

    model_config = ConfigDict(strict=True)

    model: str


class KnownChat(BaseModel):
    """A chat by its id."""

    model_config = ConfigDict(strict=True)

    chat: str


class ModelChoice(KnownModel):
    """A chat, and the model that it is to be held with."""

    chat: str


def page_router(service: ChatService) -> APIRouter:
    """GET /page/state and GET /page/turn; and Gradio's queue, which is not there."""
    router = APIRouter(include_in_schema=False)
    server = uuid4().hex

    @router.get("/page/state")
    async def state(has: str = "", limit: Annotated[int, Query(ge=1, le=MOST_CHATS)] = PAGE_OF_CHATS) -> dict[str, Any]:
        """`server` (a name for this run), `engine`, `models`, `loads` (further models on their way), `warming` (recent
        chats), and `chats` unless the tab `has` this version of them already; or `problem`, why it cannot be told."""
        try:
            chats, models = await service.sessions(service.user.id, limit + 1), await service.models()
        except StorageError as error:
            return {"server": server, "problem": StorageFailed(error).message}
        shown = [
            {"id": chat.id, "title": chat.title, "updated": chat.updated_at, "running": chat.running}
            for chat in chats[:limit]
        ]
        version = hashlib.sha256(msgspec.json.encode([shown, len(chats)])).hexdigest()[:16]
        now = service.status()
        answer: dict[str, Any] = {
            "server": server,
            "engine": _engine(now, models),
            "models": [_model(model) for model in models],
            "loads": [asdict(load) for load in now.loads],
            "warming": None if service.cache.warming is None else asdict(service.cache.warming),
            "version": version,
        }
        if version != has:
            answer |= {"chats": shown, "more": len(chats) > limit}
        return answer

    @router.post("/page/models")
    async def load(request: Request) -> dict[str, Any]:
        """Load a model and remember it; answers when it is ready to chat."""
        wanted = await parsed(request, WantedModel)
        return _model(await service.add_model(wanted.source, wanted.adapter))

    @router.post("/page/models/forget")
    async def forget(request: Request) -> dict[str, Any]:
        """Take a model from the list."""
        known = await parsed(request, KnownModel)
        await service.forget_model(known.model)
        return {}

    @router.post("/page/model")
    async def choose(request: Request) -> dict[str, Any]:
        """Hold a chat with this model from its next turn on."""
        choice = await parsed(request, ModelChoice)
        await service.choose_model(service.user.id, choice.chat, choice.model)
        return {}

    @router.get("/page/ready")
    async def ready(chat: str) -> dict[str, float | None]:
        """The seconds that the first word of a chat's next reply would take; null where that is not known."""
        try:
            return {"seconds": (await service.cache.estimate(service.user.id, chat)).seconds}
        except (ChatError, StorageError):
            return {"seconds": None}

    @router.post("/page/warm")
    async def warm(request: Request) -> Response:
        """Bring a chat to the device; answers when it is there. A tab that leaves the chat goes away, which ends it."""
        known = await parsed(request, KnownChat)
        try:
            await unless_gone(service.cache.warm(service.user.id, known.chat), request.receive)
        except ClientDisconnect:
            return Response(status_code=GONE)
        return JSONResponse({})

    @router.get("/page/turn")
    async def turn(chat: str) -> StreamingResponse:
        """The HTML of the reply being written in `chat`, again and again; ends with an event "done"."""
        try:
            live = await service.running_turn(service.user.id, chat)
        except SessionNotFound:
            live = None
        return StreamingResponse(_events(live), media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    @router.api_route("/gradio_api/queue/{rest:path}", methods=["GET", "POST"])
    @router.api_route("/gradio_api/call/{rest:path}", methods=["GET", "POST"])
    async def queue() -> Response:
        """The page does not use it, and Gradio fails with a traceback where a tab asks for what a restart forgot."""
        return PlainTextResponse("Keepwarm does not use Gradio's queue.\n", status_code=404)

    return router


async def _events(turn: LiveTurn | None) -> AsyncIterator[bytes]:
    if turn is not None:
        async for view in turn.watch(TICK_S):
            if view.state != "done":
                yield b"data: " + msgspec.json.encode(live_reply(view)) + b"\n\n"
    yield b"event: done\ndata:\n\n"


def _engine(state: EngineState, models: Sequence[ModelView]) -> dict[str, Any]:
    default = next((model for model in models if model.default), None)
    can = state.capabilities
    return {
        "phase": state.phase, "stage": state.stage, "done": state.done, "total": state.total,
        "message": state.message,
        "model": default.name if default else "", "device": can.device if can else "",
    }  # fmt: skip


def _model(model: ModelView) -> dict[str, Any]:
    return {
        "id": model.id, "name": model.name, "source": model.source, "adapter": model.adapter,
        "default": model.default, "served": model.served,
        "notice": model.notes.notice, "thinking": model.notes.thinking or "",
    }  # fmt: skip
