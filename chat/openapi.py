"""The public HTTP surface in OpenAPI's words, for clients that make themselves from it and for tests that fuzz it.

What a request may hold comes from the very model that reads it. Knows no service.
"""

from __future__ import annotations

from typing import Any, get_args

from chat.openai_types import ChatRequest
from chat.settings import VERSION
from chat.views import MissCause

COMPONENTS = "#/components/schemas"
TEXT, NUMBER, COUNT, NOTHING = (
    {"type": "string"},
    {"type": "number"},
    {"type": "integer", "minimum": 0},
    {"type": "null"},
)


def description() -> dict[str, Any]:
    """An OpenAPI 3.1 document of the routes that programs use."""
    asked = ChatRequest.model_json_schema(ref_template=f"{COMPONENTS}/{{model}}")
    schemas = {**asked.pop("$defs"), "ChatRequest": asked, **_answers()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Keepwarm", "version": VERSION},
        "paths": {
            "/v1/chat/completions": {"post": _completion()},
            "/v1/chat/completions/estimate": {"post": _estimate()},
            "/v1/models": {"get": _get("The models that may be named.", "Models")},
            "/v1/models/{name}": {"get": _model()},
            "/healthz": {"get": _get("Whether the server runs.", "Health")},
            "/readyz": {"get": _get("Whether the model answers.", "Ready", "503")},
        },
        "components": {"schemas": schemas},
    }


def _completion() -> dict[str, Any]:
    reply: dict[str, Any] = _answered("A reply, whole or streamed.", "Completion")
    reply["content"]["text/event-stream"] = {"schema": TEXT}
    return _asked("Write a reply.", reply)


def _estimate() -> dict[str, Any]:
    words = "Say what a reply would cost: its tokens by source, and the seconds to its first. Nothing is stored."
    return _asked(words, _answered("What it would cost.", "Estimate"))


def _asked(summary: str, answer: dict[str, Any]) -> dict[str, Any]:
    """A POST of a chat that is answered so."""
    hint = "Your name for this chat: of several equal ones it chooses the one last used under it."
    return {
        "summary": summary,
        "parameters": [{"name": "X-Session-Id", "in": "header", "schema": TEXT, "description": hint}],
        "requestBody": {"required": True, "content": _json("ChatRequest")},
        "responses": {"200": answer, "4XX": _refused(), "5XX": _refused()},
    }


def _model() -> dict[str, Any]:
    name = {"name": "name", "in": "path", "required": True, "schema": TEXT}
    return {**_get("One model.", "Model"), "parameters": [name]}


def _get(summary: str, answer: str, *other: str) -> dict[str, Any]:
    """A GET that is answered by `answer`, also with the status codes `other`."""
    good = {code: _answered(summary, answer) for code in ("200", *other)}
    return {"summary": summary, "responses": {**good, "4XX": _refused(), "5XX": _refused()}}


def _answered(words: str, schema: str) -> dict[str, Any]:
    return {"description": words, "content": _json(schema)}


def _refused() -> dict[str, Any]:
    return _answered("Why not.", "Error")


def _json(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"{COMPONENTS}/{schema}"}}}


def _answers() -> dict[str, Any]:
    """The schemas of what is answered."""
    model = _object(id=TEXT, object={"const": "model"}, created=COUNT, owned_by=TEXT)
    message = _object(role={"const": "assistant"}, content=TEXT)
    choice = _object(index=COUNT, message=message, finish_reason={"enum": ["stop", "length"]})
    usage = _object(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT)
    error = _object(
        message=TEXT, type={"enum": ["invalid_request_error", "server_error"]}, param=_or_null(TEXT), code=TEXT
    )
    return {
        "Model": model,
        "Models": _object(object={"const": "list"}, data=_list({"$ref": f"{COMPONENTS}/Model"})),
        "Completion": _object(
            id=TEXT, object={"const": "chat.completion"}, created=COUNT, model=TEXT, choices=_list(choice), usage=usage,
            keepwarm=_extension(),
        ),
        "Estimate": _object(
            prompt_tokens=COUNT, tokens=_object(device=COUNT, host=COUNT, disk=COUNT, computed=COUNT),
            seconds=_or_null(NUMBER),
        ),
        "Health": _object(status={"const": "ok"}),
        "Ready": _object(status={"enum": ["ready", "loading", "restarting", "failed", "stopped"]}),
        "Error": _object(error=error),
    }  # fmt: skip


def _extension() -> dict[str, Any]:
    return _object(
        tokens=_object(
            device=COUNT,
            host=COUNT,
            disk=COUNT,
            computed=COUNT,
            recomputed=COUNT,
            drafted=COUNT,
            accepted=COUNT,
            output=COUNT,
        ),
        restore_s=NUMBER, miss=_or_null(_miss()),
        matched_messages=COUNT, ttft_s=_or_null(NUMBER), tpot_s=_or_null(NUMBER), total_s=NUMBER,
        finish_details=_list(_or_null(TEXT)), ignored_parameters=_list(TEXT),
    )  # fmt: skip


def _miss() -> dict[str, Any]:
    causes = [cause for kind in get_args(MissCause) for cause in (get_args(kind) or (kind,))]
    return _object(position=COUNT, message_index=_or_null(COUNT), cause={"enum": causes}, detail=TEXT)


def _object(**properties: Any) -> dict[str, Any]:
    """An object that has all of these, and may have more."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _or_null(schema: Any) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}
