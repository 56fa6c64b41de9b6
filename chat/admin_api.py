"""The administrator's routes: what happened to the cache, a trace of turns, pins, what a turn would cost.

Knows HTTP and the service. Like all routes they stand behind `chat.guard`; their errors have the form of all refusals.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response, StreamingResponse

from chat.bodies import parsed
from chat.openai_answers import estimate_body
from chat.service import ChatService
from storage.cache_tables import MOST_EVENTS, MOST_TURNS
from storage.records import TraceRecord


class PinBody(BaseModel):
    """Whether a chat's cache is to stay where it is."""

    model_config = ConfigDict(strict=True)

    pinned: bool


class TtlBody(BaseModel):
    """How long a chat's unused cache stays in a tier, in seconds; None: as long as everybody's."""

    model_config = ConfigDict(strict=True)

    ttl: float | None


class EstimateBody(BaseModel):
    """A chat, and the message that it might get; "": a short one."""

    model_config = ConfigDict(strict=True)

    chat: str
    text: str = ""


def admin_router(service: ChatService) -> APIRouter:
    """GET /api/admin/events and /trace; POST /api/admin/sessions/{id}/pin and /ttl, and /api/admin/estimate."""
    router = APIRouter(prefix="/api/admin", include_in_schema=False)

    @router.get("/events")
    async def events(limit: Annotated[int, Query(ge=1, le=MOST_EVENTS)] = 100) -> dict[str, Any]:
        """The last things that happened to the cache, the newest last. They hold no text."""
        return {"events": [asdict(event) for event in await service.cache.events(limit)]}

    @router.get("/trace")
    async def trace(limit: Annotated[int, Query(ge=1, le=MOST_TURNS)] = 1000) -> Response:
        """The last turns as a cache policy sees them, the last to end last: a line of JSON each, without text."""
        turns = await service.cache.trace(limit)
        return StreamingResponse((_line(turn) for turn in turns), media_type="application/x-ndjson")

    @router.post("/sessions/{session_id}/pin")
    async def pin(session_id: str, request: Request) -> dict[str, Any]:
        """Pin a chat, or let it go; 409 when the tiers have no room for the pin."""
        body = await parsed(request, PinBody)
        await service.cache.pin(service.user.id, session_id, body.pinned)
        return {"id": session_id, "pinned": body.pinned}

    @router.post("/sessions/{session_id}/ttl")
    async def ttl(session_id: str, request: Request) -> dict[str, Any]:
        """Give a chat a time to live of its own."""
        body = await parsed(request, TtlBody)
        await service.cache.set_ttl(service.user.id, session_id, body.ttl)
        return {"id": session_id, "ttl": body.ttl}

    @router.post("/estimate")
    async def estimate(request: Request) -> dict[str, Any]:
        """Where the tokens of a chat's next turn would come from, and how long its first token would take."""
        body = await parsed(request, EstimateBody)
        found = await service.cache.estimate(service.user.id, body.chat, body.text)
        return estimate_body(found)

    return router


def _line(turn: TraceRecord) -> str:
    """A turn as a line of JSON; each block is 16 hexadecimal digits of `blocks`."""
    return json.dumps(asdict(turn) | {"blocks": turn.blocks.hex()}) + "\n"
