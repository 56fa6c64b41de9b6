"""The OpenAI-compatible API and the health checks, as routes over the chat service.

Knows HTTP and OpenAI's forms; what a turn is, the service knows. Beside OpenAI's fields an answer carries one object,
`keepwarm`, in the last chunk when streamed:

    tokens              where the tokens came from: {"device": found in the pool, "computed": read by the model,
                        "recomputed": read again because the pool was full meanwhile, "output": written}
    matched_messages    how many of the request's messages were found in storage, so that their exact ids were used
    ttft_s, tpot_s      seconds to the first text, and per output token after the first
    total_s             seconds of the whole turn
    ignored_parameters  parameters of the request that this server does not know

With several choices (`n`), tokens of the prompt are those of the first, output tokens are summed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from chat.completion import ApiTurn
from chat.errors import ChatError, InvalidRequest, NotReady
from chat.generation import Piece
from chat.model import not_ready_sentence
from chat.openai_types import ALIAS, ChatRequest, error_body, finish_reason, parse_request, status_of
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
            answer = _Answer(turn, chat, capabilities)
            if chat.stream:
                if not await _unless_gone(turn.accepted(), request.receive):
                    return _gone(turn)
                return _EventStream(turn, answer.chunks())
            if not await _unless_gone(turn.finished(), request.receive):
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
            card["keepwarm"] = {
                "model": capabilities.model_name,
                "context_length": capabilities.context_length,
                "device": capabilities.device,
                "dtype": capabilities.dtype,
            }
        return card


@dataclass
class _Answer:
    """A turn in OpenAI's form."""

    turn: ApiTurn
    chat: ChatRequest
    capabilities: Capabilities

    def __post_init__(self) -> None:
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self.capabilities.model_name,
            "system_fingerprint": self.capabilities.fingerprint,
        }

    def whole(self) -> dict[str, Any]:
        """The answer when it is not streamed."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": reply.content.text, "refusal": None},
                "logprobs": None,
                "finish_reason": finish_reason(reply.finish_reason),
            }
            for index, reply in enumerate(self.turn.replies)
        ]
        body = {"object": "chat.completion", **self._head, "choices": choices}
        return {**body, "usage": self._usage(), "keepwarm": self._extension()}

    async def chunks(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events; an error in the middle is the last event."""
        count = len(self.turn.replies)
        for index in range(count):
            yield self._chunk(index, {"role": "assistant", "content": ""})
        ended = 0
        async for event in self.turn.events():
            if isinstance(event, Piece):
                yield self._chunk(event.index, {"content": event.text})
                continue
            ended += 1
            reason = finish_reason(self.turn.replies[event.index].finish_reason)
            last = ended == count and not self.chat.include_usage
            yield self._chunk(event.index, {}, reason, {"keepwarm": self._extension()} if last else {})
        if ended < count:
            error = self.turn.error or NotReady("The server is shutting down; the reply is cut here.")
            yield _event(error_body(error))
            return
        if self.chat.include_usage:
            tail = {"choices": [], "usage": self._usage(), "keepwarm": self._extension()}
            yield _event({"object": "chat.completion.chunk", **self._head, **tail})
        yield b"data: [DONE]\n\n"

    def _chunk(
        self, index: int, delta: dict[str, str], reason: str | None = None, extra: dict[str, Any] | None = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        body: dict[str, Any] = {"object": "chat.completion.chunk", **self._head, "choices": [choice]}
        if self.chat.include_usage:
            body["usage"] = None
        return _event({**body, **(extra or {})})

    def _usage(self) -> dict[str, Any]:
        first = self.turn.replies[0].figures(self.turn.started)
        prompt = self.turn.prompt_tokens
        output = sum(reply.content.sampled for reply in self.turn.replies)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": first.reused_tokens if first else 0},
        }

    def _extension(self) -> dict[str, Any]:
        first = self.turn.replies[0].figures(self.turn.started)
        return {
            "tokens": {
                "device": first.reused_tokens if first else 0,
                "computed": first.computed_tokens if first else 0,
                "recomputed": first.recomputed_tokens if first else 0,
                "output": sum(reply.content.sampled for reply in self.turn.replies),
            },
            "matched_messages": self.turn.matched_messages,
            "ttft_s": first.ttft_s if first else None,
            "tpot_s": first.tpot_s if first else None,
            "total_s": self.turn.total_s(),
            "ignored_parameters": self.chat.ignored,
        }


class _EventStream(Response):
    """Sends the chunks; when the client goes away, its turn is stopped."""

    def __init__(self, turn: ApiTurn, chunks: AsyncIterator[bytes]) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        del self.headers["content-length"]
        self._turn = turn
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_client_gone(receive))
        gone.add_done_callback(lambda _: self._turn.abandon())
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for chunk in self._chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            gone.cancel()  # and so the turn is abandoned, which does nothing to one that is over


async def _unless_gone(work: Awaitable[None], receive: Receive) -> bool:
    """Wait for `work`, or for the client to go away: then False."""
    task, gone = asyncio.ensure_future(work), asyncio.create_task(_client_gone(receive))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
            return True
        return False
    finally:
        task.cancel()
        gone.cancel()


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


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


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
