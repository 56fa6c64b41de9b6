"""What the open page asks for every few seconds: how the engine is, and which chats there are.

A plain GET outside Gradio's queue, so that a tab notices a restarted server, a loading model, a chat made in another
tab or a reply that ended in the background, without holding a connection open (browsers allow six per server, for all
tabs together).
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any
from uuid import uuid4

import msgspec
from fastapi import APIRouter, Query

from chat.service import ChatService

PAGE_OF_CHATS, MOST_CHATS = 100, 100_000


def page_router(service: ChatService) -> APIRouter:
    """GET /page/state: `server` (a name for this run), `engine`, and `chats` unless the tab `has` them already."""
    router = APIRouter(include_in_schema=False)
    server = uuid4().hex

    @router.get("/page/state")
    async def state(
        has: str = "", limit: Annotated[int, Query(ge=1, le=MOST_CHATS)] = PAGE_OF_CHATS
    ) -> dict[str, Any]:
        chats = await service.sessions(service.user.id, limit + 1)
        shown = [
            {"id": chat.id, "title": chat.title, "updated": chat.updated_at, "running": chat.running}
            for chat in chats[:limit]
        ]
        version = hashlib.sha256(msgspec.json.encode([shown, len(chats)])).hexdigest()[:16]
        answer = {"server": server, "engine": _engine(service), "version": version}
        if version != has:
            answer |= {"chats": shown, "more": len(chats) > limit}
        return answer

    return router


def _engine(service: ChatService) -> dict[str, Any]:
    state = service.status()
    can = state.capabilities
    return {
        "phase": state.phase, "stage": state.stage, "done": state.done, "total": state.total,
        "message": state.message, "model": can.model_name if can else "", "device": can.device if can else "",
        "context": can.context_length if can else 0,
    }  # fmt: skip
