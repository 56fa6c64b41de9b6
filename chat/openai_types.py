"""OpenAI's chat completions as this server speaks them: what a request may hold, and what answers look like.

Knows no service and no HTTP framework. A parameter that would change the reply and that is not supported is refused;
any other unknown parameter is ignored, and named in the answer.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from chat.bodies import json_object, wrong_value
from chat.errors import EmptyMessage, InvalidRequest, check_text
from chat.templates import Entry
from chat.views import Role, TurnOptions
from engine.protocol import Sampling

MAX_STOPS = 16
MAX_MESSAGES, MAX_PARTS = 8192, 1024  # of a request, and of a message; while they are checked everybody waits
ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
UNSUPPORTED = ("tools", "functions", "tool_choice", "function_call", "logprobs", "top_logprobs", "logit_bias", "audio")
HARMLESS = {"none", "auto", "text", "", False, None}


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)


class TextPart(_Strict):
    """One part of a message's content."""

    type: str
    text: str | None = None


class ChatMessage(_Strict):
    """One message of a request."""

    role: Annotated[str, Field(json_schema_extra={"enum": list(ROLES)})]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS)] | None = None


class StreamOptions(_Strict):
    """How a stream ends."""

    include_usage: bool | None = None


class ChatRequest(_Strict):
    """The body of a request; None is OpenAI's default. Sampling beyond OpenAI's follows vLLM's names."""

    model: str
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | list[str] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def ignored(self) -> list[str]:
        """Parameters that nobody here knows."""
        return sorted(self.model_extra or {})

    def entries(self) -> list[Entry]:
        """The messages for the ledger.

        Raises InvalidRequest for roles and contents that a text model cannot read, EmptyMessage where nothing is asked.
        """
        entries = [Entry(_role(message, index), _text(message, index)) for index, message in enumerate(self.messages)]
        if entries[-1].role == "user" and not entries[-1].text.strip():
            raise EmptyMessage
        return entries

    def options(self) -> TurnOptions:
        """How the reply is to be made. Raises InvalidRequest and InvalidText."""
        given = {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "seed": None if self.seed is None else self.seed % 2**63,
        }
        sampling = Sampling(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MAX_STOPS:
            raise InvalidRequest(f"stop holds {len(stops)} strings; at most {MAX_STOPS} are allowed.", "stop")
        if not all(stops):
            raise InvalidRequest("stop holds an empty string, which would end every reply at once.", "stop")
        for stop in stops:
            check_text(stop, "stop string")
        return TurnOptions(sampling, self.max_completion_tokens or self.max_tokens, tuple(stops))


def parse_request(body: bytes) -> ChatRequest:
    """The request in `body`. Raises InvalidRequest naming the parameter, the value and what is allowed."""
    data = json_object(body)
    for name in UNSUPPORTED:
        if not _is_harmless(data.get(name)):
            raise InvalidRequest(f"{name} is not supported by this server; leave it out.", name)
    response_format = data.get("response_format")
    if response_format is not None and response_format != {"type": "text"}:
        raise InvalidRequest("response_format can only be text; leave it out.", "response_format")
    try:
        return ChatRequest.model_validate(data)
    except ValidationError as error:
        raise wrong_value(error.errors(include_url=False)) from None


def finish_reason(reason: str | None) -> Literal["stop", "length"]:
    """OpenAI's word for why a reply ended."""
    return "length" if reason == "length" else "stop"


def _role(message: ChatMessage, index: int) -> Role:
    role = ROLES.get(message.role)
    if role is None:
        known = ", ".join(ROLES)
        raise InvalidRequest(
            f"messages[{index}].role: {message.role!r} is not supported; use one of {known}.", f"messages[{index}].role"
        )
    return role


def _text(message: ChatMessage, index: int) -> str:
    if isinstance(message.content, str):
        return message.content
    param = f"messages[{index}].content"
    if message.content is None:
        raise InvalidRequest(f"{param} is missing; give a text.", param)
    for number, part in enumerate(message.content):
        if part.type != "text" or part.text is None:
            raise InvalidRequest(f"{param}[{number}]: this model reads text, not {part.type!r} parts.", param)
    return "".join(part.text or "" for part in message.content)


def _is_harmless(value: object) -> bool:
    return value in ([], {}) or (isinstance(value, str | bool | int | None) and value in HARMLESS)
