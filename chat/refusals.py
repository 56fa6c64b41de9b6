"""One form for whatever is refused over HTTP: OpenAI's error body, on every route.

Knows the errors and what status each has; nothing of what was asked.
"""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from chat.bodies import wrong_value
from chat.errors import ChatError, InvalidRequest, StorageFailed
from storage.errors import StorageError

log = logging.getLogger(__name__)

RETRY_AFTER = "2"  # seconds
MAX_SAID = 2000  # characters of a sentence, which may repeat what was sent
STATUS = {
    "not_ready": 503,
    "engine_died": 503,
    "no_model": 503,
    "model_unavailable": 503,
    "foreign_request": 403,
    "model_not_found": 404,
    "session_not_found": 404,
    "unknown_url": 404,
    "method_not_allowed": 405,
    "pin_refused": 409,
    "upload_too_slow": 408,
    "body_too_large": 413,
    "unsupported_encoding": 415,
    "internal": 500,
    "engine_error": 500,
    "storage_failed": 500,
    "unusable_model": 500,
    "storage_full": 507,
}  # everything else is the client's: 400


def status_of(error: ChatError) -> int:
    """The HTTP status of an error."""
    return STATUS.get(error.code, 400)


def error_body(error: ChatError) -> dict[str, Any]:
    """OpenAI's form of an error; it can always be sent, whatever it repeats."""
    param: str | None = getattr(error, "param", None)
    return {
        "error": {
            "message": _sayable(error.message),
            "type": "server_error" if status_of(error) >= 500 else "invalid_request_error",
            "param": None if param is None else _sayable(param),
            "code": error.code,
        }
    }


def refusal(error: ChatError, **headers: str) -> Response:
    """The answer to a request that is refused; the names of `headers` are spelt with underscores."""
    status = status_of(error)
    if status >= 500 and status != 503:
        log.error("a request failed: %s", _sayable(error.message))
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    if status == 503:
        named["Retry-After"] = RETRY_AFTER
    return JSONResponse(error_body(error), status_code=status, headers=named)


def internal_error() -> ChatError:
    """What is said of a fault of our own; its cause goes to the log."""
    return ChatError("Something went wrong inside Keepwarm; the log has the details.")


def no_such_url(method: str, path: str, there: str = "") -> ChatError:
    """What is said of a path that nothing here has; `there`: what there is instead."""
    return ChatError(f"There is no {method} {path} here{f'; {there}' if there else ''}.", code="unknown_url")


def add_refusals(app: FastAPI) -> None:
    """Give this form to what the routes of `app` raise, and to what the framework refuses by itself."""
    app.add_exception_handler(ChatError, _on_error)
    app.add_exception_handler(StorageError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_error)
    app.add_exception_handler(HTTPException, _on_error)
    app.add_exception_handler(Exception, _on_error)  # logged by the server, with its traceback


async def _on_error(request: Request, error: Exception) -> Response:
    match error:
        case ChatError():
            return refusal(error)
        case StorageError():
            return refusal(StorageFailed(error))
        case RequestValidationError():
            return refusal(wrong_value(error.errors(), ("query", "path", "header", "body")))
        case HTTPException(status_code=405):
            complaint = ChatError(f"{request.scope['path']} takes no {request.method}.", code="method_not_allowed")
            return refusal(complaint, **(error.headers or {}))
        case HTTPException(status_code=401 | 403 | 404):
            return refusal(no_such_url(request.method, request.scope["path"]))
        case HTTPException():
            return refusal(InvalidRequest(str(error.detail)))
    return refusal(internal_error())


def _sayable(text: str) -> str:
    """`text` in one line that can be sent and printed, and not longer than anybody reads."""
    said = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text[:MAX_SAID])
    return said if len(text) <= MAX_SAID else f"{said}..."
