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
from starlette.types import Receive, Scope, Send

from chat.bodies import body_of
from chat.errors import ChatError, ModelNotFound, StorageFailed
from chat.event_stream import EventStream, unless_gone
from chat.models import DEFAULT
from chat.openai_answers import Answer, estimate_body
from chat.openai_types import parse_request
from chat.openapi import description
from chat.refusals import RETRY_AFTER, internal_error, no_such_url, refusal
from chat.service import ChatService
from chat.views import ModelView
from storage.errors import StorageError

log = logging.getLogger(__name__)

READING = ["GET", "HEAD"]
GONE = 499  # a status that nobody receives, for the log


def api_router(service: ChatService) -> APIRouter:
    """The routes /v1/..., /healthz and /readyz."""
    router = APIRouter()
    api = _Api(service)
    for path, (endpoint, methods) in api.routes.items():
        if path in api.turns:  # as Starlette's: every turn waits for what FastAPI does about arguments and answers
            router.add_route(path, endpoint, methods=methods)
        else:
            router.add_api_route(path, endpoint, methods=methods, response_model=None)
    for path in (*api.routes, "/v1", "/v1/{path:path}"):
        router.add_route(path, _Otherwise(api.unknown))  # type: ignore[arg-type]  # a function takes GET alone
    return router


class _Otherwise:
    """Answers what no route before it has taken, whatever its method."""

    def __init__(self, answer: Callable[[Request], Awaitable[Response]]) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._answer(Request(scope, receive))
        await response(scope, receive, send)


async def _answered(answer: Awaitable[Response]) -> Response:
    """An answer, or in OpenAI's form why there is none."""
    try:
        return await answer
    except ChatError as error:
        return refusal(error)
    except StorageError as error:
        return refusal(StorageFailed(error))
    except ClientDisconnect:
        return Response(status_code=GONE)
    except Exception:
        log.exception("a request failed")
        return refusal(internal_error())


class _Api:
    def __init__(self, service: ChatService) -> None:
        self._service = service
        self._created = int(time.time())
        self.turns = ("/v1/chat/completions", "/v1/chat/completions/estimate")
        self.routes: dict[str, tuple[Callable[..., Awaitable[Response]], list[str]]] = {
            "/v1/chat/completions": (self.complete, ["POST"]),
            "/v1/chat/completions/estimate": (self.estimate, ["POST"]),
            "/v1/models": (self.models, READING),
            "/v1/models/{name:path}": (self.model, READING),
            "/v1/openapi.json": (self.described, READING),
            "/healthz": (self.health, READING),
            "/readyz": (self.ready, READING),
        }

    async def complete(self, request: Request) -> Response:
        return await _answered(self._complete(request))

    async def _complete(self, request: Request) -> Response:
        chat = parse_request(await body_of(request))
        hint = request.headers.get("x-session-id")
        beginning = self._service.complete(
            self._service.user.id, chat.entries(), chat.options(), chat.n or 1, session_hint=hint, model=chat.model
        )
        turn = await unless_gone(beginning, request.receive)
        answer = Answer(turn, chat)
        try:
            if chat.stream:
                await unless_gone(turn.accepted(), request.receive)
                return EventStream(answer.chunks(), turn.abandon)
            await unless_gone(turn.finished(), request.receive)
        except ClientDisconnect:
            turn.abandon()
            raise
        return JSONResponse(answer.whole())

    async def estimate(self, request: Request) -> Response:
        return await _answered(self._estimate(request))

    async def _estimate(self, request: Request) -> Response:
        chat = parse_request(await body_of(request))
        hint = request.headers.get("x-session-id")
        found = self._service.estimate(self._service.user.id, chat.entries(), session_hint=hint, model=chat.model)
        return JSONResponse(estimate_body(await unless_gone(found, request.receive)))

    async def models(self) -> Response:
        models = await self._service.models()
        cards = [self._card(model.name, model) for model in models]
        alias = self._card(DEFAULT, next((model for model in models if model.default), None))
        return JSONResponse({"object": "list", "data": [*cards, alias]})

    async def model(self, name: str) -> Response:
        try:
            return JSONResponse(self._card(name, await self._service.model(name)))
        except ModelNotFound as error:
            return JSONResponse(self._card(name, None)) if name == DEFAULT else refusal(error)

    async def health(self) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self) -> Response:
        state = self._service.status()
        if state.phase == "ready":
            return JSONResponse({"status": "ready"})
        body = {
            "status": state.phase,
            "stage": state.stage,
            "done": state.done,
            "total": state.total,
            "message": state.message,
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

    def _card(self, name: str, model: ModelView | None) -> dict[str, Any]:
        card: dict[str, Any] = {"id": name, "object": "model", "created": self._created, "owned_by": "keepwarm"}
        if model is not None:
            card["keepwarm"] = {
                "model": model.name,
                "default": model.default,
                "served": model.served,
                "context_length": model.context_length or None,
                "device": model.device or None,
                "dtype": model.dtype or None,
                "weights": model.weights or None,
                "notice": model.notes.notice or None,
                "thinking": model.notes.thinking,
            }
        return card
