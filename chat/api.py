"""The OpenAI-compatible API and the health checks, as routes over the chat service.

Knows HTTP; what a turn is, the service knows, and how OpenAI spells it, `openai_types` and `openai_answers`.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from chat.completion import ApiTurn
from chat.errors import ChatError, InvalidRequest, NotReady
from chat.event_stream import EventStream, unless_gone
from chat.model import not_ready_sentence
from chat.openai_answers import Answer
from chat.openai_types import ALIAS, error_body, parse_request, status_of
from chat.service import ChatService
from engine.protocol import Capabilities

log = logging.getLogger(__name__)

MAX_BODY = 32 * 1024 * 1024  # bytes; the longest context is far below it
RETRY_AFTER = "2"  # seconds
GONE = 499  # a status that nobody receives, for the log


def api_router(service: ChatService) -> APIRouter:
    """The routes /v1/..., /healthz and /readyz."""
    router = APIRouter()
    api = _Api(service)
    router.add_api_route("/v1/chat/completions", api.complete, methods=["POST"], response_model=None)
    router.add_api_route("/v1/models", api.models, methods=["GET"], response_model=None)
    router.add_api_route("/v1/models/{name:path}", api.model, methods=["GET"], response_model=None)
    router.add_api_route("/healthz", api.health, methods=["GET", "HEAD"], response_model=None)
    router.add_api_route("/readyz", api.ready, methods=["GET", "HEAD"], response_model=None)
    every = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
    router.add_api_route("/v1/{path:path}", api.unknown, methods=every, response_model=None)
    return router


class _Api:
    def __init__(self, service: ChatService) -> None:
        self._service = service
        self._created = int(time.time())

    async def complete(self, request: Request) -> Response:
        try:
            chat = parse_request(await _body(request))
            capabilities = self._capabilities()
            _check_model(chat.model, capabilities)
            turn = await self._service.complete(
                self._service.user.id, chat.entries(), chat.options(), chat.n or 1, request.headers.get("x-session-id")
            )
            answer = Answer(turn, chat, capabilities)
            if chat.stream:
                if not await unless_gone(turn.accepted(), request.receive):
                    return _gone(turn)
                return EventStream(answer.chunks(), turn.abandon)
            if not await unless_gone(turn.finished(), request.receive):
                return _gone(turn)
            return JSONResponse(answer.whole())
        except ChatError as error:
            return _refusal(error)
        except ClientDisconnect:
            return Response(status_code=GONE)
        except Exception:
            log.exception("a completion failed")
            return _refusal(ChatError("Something went wrong inside Keepwarm; the log has the details."))

    async def models(self) -> Response:
        state = self._service.status()
        capabilities = state.capabilities
        names = [capabilities.model_name, ALIAS] if capabilities else [ALIAS]
        return JSONResponse({"object": "list", "data": [self._card(name, capabilities) for name in names]})

    async def model(self, name: str) -> Response:
        capabilities = self._service.status().capabilities
        try:
            if name != ALIAS or capabilities is not None:
                _check_model(name, self._capabilities())
        except ChatError as error:
            return _refusal(error)
        return JSONResponse(self._card(name, capabilities))

    async def health(self) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self) -> Response:
        state, problem = self._service.status(), self._service.model_problem()
        if state.phase == "ready" and not problem:
            return JSONResponse({"status": "ready"})
        body = {
            "status": "failed" if problem else state.phase,
            "stage": state.stage,
            "done": state.done,
            "total": state.total,
            "message": problem or state.message,
        }
        return JSONResponse(body, status_code=503, headers={"Retry-After": RETRY_AFTER})

    async def unknown(self, request: Request) -> Response:
        error = ChatError(
            f"There is no {request.method} {request.url.path} here; this server has POST /v1/chat/completions and "
            "GET /v1/models.",
            code="unknown_url",
        )
        return JSONResponse(error_body(error), status_code=404)

    def _capabilities(self) -> Capabilities:
        state = self._service.status()
        if state.phase != "ready" or state.capabilities is None:
            raise NotReady(not_ready_sentence(state.phase, state.stage, state.message))
        return state.capabilities

    def _card(self, name: str, capabilities: Capabilities | None) -> dict[str, Any]:
        card: dict[str, Any] = {"id": name, "object": "model", "created": self._created, "owned_by": "keepwarm"}
        if capabilities is not None:
            notes = self._service.model_notes()
            card["keepwarm"] = {
                "model": capabilities.model_name,
                "context_length": capabilities.context_length,
                "device": capabilities.device,
                "dtype": capabilities.dtype,
                "notice": notes.notice or None,
                "thinking": notes.thinking,
            }
        return card


def _gone(turn: ApiTurn) -> Response:
    turn.abandon()
    return Response(status_code=GONE)


async def _body(request: Request) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY:
            raise InvalidRequest(f"The body is larger than {MAX_BODY // 2**20} MiB.")
        parts.append(part)
    return b"".join(parts)


def _check_model(name: str, capabilities: Capabilities) -> None:
    if name not in (capabilities.model_name, ALIAS):
        raise ChatError(
            f"There is no model {name!r} here; this server has {capabilities.model_name!r}, also as {ALIAS!r}.",
            code="model_not_found",
        )


def _refusal(error: ChatError) -> Response:
    status = status_of(error)
    headers = {"Retry-After": RETRY_AFTER} if status == 503 else None
    return JSONResponse(error_body(error), status_code=status, headers=headers)
