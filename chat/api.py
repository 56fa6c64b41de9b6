"""The OpenAI-compatible API and the health checks, as routes over the chat service.

Knows HTTP; what a turn is, the service knows, and how OpenAI spells it, `openai_types` and `openai_answers`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.routing import compile_path

from chat.bodies import body_of
from chat.completion import ApiTurn
from chat.errors import ChatError, NotReady, StorageFailed
from chat.event_stream import EventStream, unless_gone
from chat.model import not_ready_sentence
from chat.openai_answers import Answer
from chat.openai_types import ALIAS, parse_request
from chat.openapi import description
from chat.refusals import RETRY_AFTER, internal_error, no_such_url, refusal
from chat.service import ChatService
from engine.protocol import Capabilities
from storage.errors import StorageError

log = logging.getLogger(__name__)

READING = ["GET", "HEAD"]
EVERY_METHOD = [*READING, "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"]
GONE = 499  # a status that nobody receives, for the log


def api_router(service: ChatService) -> APIRouter:
    """The routes /v1/..., /healthz and /readyz."""
    router = APIRouter()
    api = _Api(service)
    for path, (endpoint, methods) in api.routes.items():
        router.add_api_route(path, endpoint, methods=methods, response_model=None)
    router.add_api_route("/healthz", api.health, methods=READING, response_model=None)
    router.add_api_route("/readyz", api.ready, methods=READING, response_model=None)
    for path in ("/v1", "/v1/{path:path}"):
        router.add_api_route(path, api.unknown, methods=EVERY_METHOD, response_model=None)
    return router


class _Api:
    def __init__(self, service: ChatService) -> None:
        self._service = service
        self._created = int(time.time())
        self.routes: dict[str, tuple[Callable[..., Awaitable[Response]], list[str]]] = {
            "/v1/chat/completions": (self.complete, ["POST"]),
            "/v1/models": (self.models, READING),
            "/v1/models/{name:path}": (self.model, READING),
            "/v1/openapi.json": (self.described, READING),
        }

    async def complete(self, request: Request) -> Response:
        try:
            chat = parse_request(await body_of(request))
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
            return refusal(error)
        except StorageError as error:
            log.error("a completion failed: %s", error)
            return refusal(StorageFailed(error))
        except ClientDisconnect:
            return Response(status_code=GONE)
        except Exception:
            log.exception("a completion failed")
            return refusal(internal_error())

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
            return refusal(error)
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

    async def described(self) -> Response:
        return JSONResponse(description())

    async def unknown(self, request: Request) -> Response:
        path = request.scope["path"]
        for known, (_, methods) in self.routes.items():
            if compile_path(known)[0].match(path):
                allowed = ", ".join(methods)
                complaint = f"{path} takes {allowed}, not {request.method}."
                return refusal(ChatError(complaint, code="method_not_allowed"), Allow=allowed)
        there = "this server has POST /v1/chat/completions and GET /v1/models"
        return refusal(no_such_url(request.method, path, there))

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


def _check_model(name: str, capabilities: Capabilities) -> None:
    if name not in (capabilities.model_name, ALIAS):
        raise ChatError(
            f"There is no model {name!r} here; this server has {capabilities.model_name!r}, also as {ALIAS!r}.",
            code="model_not_found",
        )
