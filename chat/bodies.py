"""Read what a client sends: a body within limits of size and time, a JSON object in it, and what is wrong with that.

Knows nothing of what the object means.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from chat.errors import ChatError, InvalidRequest, check_text

MAX_BODY = 8 * 2**20  # bytes; the longest context is far below it, and while a body is parsed everybody waits
MAX_FIELDS = 256  # of the object
UPLOAD_SECONDS = 60.0  # that a client may take to send its body
M = TypeVar("M", bound=BaseModel)
KINDS = ("str", "list[TextPart]", "list[str]")  # pydantic's names for the kinds that one value may be of


async def body_of(request: Request) -> bytes:
    """The body. Raises ChatError for one that is compressed, too large or too slow, and Starlette's ClientDisconnect.

    One that is too large is read to its end, because a client that still sends would not hear the answer.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise ChatError(f"The body is encoded as {encoding!r}; send it plain.", code="unsupported_encoding")
    body = bytearray()
    size = 0
    try:
        async with asyncio.timeout(UPLOAD_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size <= MAX_BODY:
                    body += part
    except TimeoutError:
        limit = f"{UPLOAD_SECONDS:.0f} seconds"
        raise ChatError(f"The body did not arrive within {limit}; send it again.", code="upload_too_slow") from None
    if size > MAX_BODY:
        raise ChatError(f"The body is larger than {MAX_BODY // 2**20} MiB.", code="body_too_large")
    return bytes(body)


async def parsed(request: Request, model: type[M]) -> M:
    """The body as such a model, all of whose texts are whole. Raises as `body_of` and `json_object`."""
    data = json_object(await body_of(request))
    for name, value in data.items():
        if isinstance(value, str):
            check_text(value, f"text of {name}")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise wrong_value(error.errors(include_url=False)) from None


def json_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Raises InvalidRequest, and InvalidText for a name that is no text."""
    if not body:
        raise InvalidRequest("The body is empty; send a JSON object.")
    try:
        data = json.loads(body.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise InvalidRequest(f"The body is not UTF-8: byte {error.start} is 0x{byte:02X}.") from None
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"The body is not JSON: {error}.") from None
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.") from None
    except ValueError:  # Python limits the digits that it reads
        raise InvalidRequest("The body holds a number with too many digits.") from None
    if not isinstance(data, dict):
        raise InvalidRequest(f"The body must be a JSON object, not {shown(data)}.")
    if len(data) > MAX_FIELDS:
        raise InvalidRequest(f"The body has {len(data):,} fields; at most {MAX_FIELDS} are allowed.")
    for name in data:
        check_text(name, "name of a field")
    return data


def wrong_value(details: Sequence[Any], without: Sequence[str] = ()) -> InvalidRequest:
    """What pydantic's errors say: the first thing that is wrong, of a value of several kinds what is deepest inside it.

    `without`: parts of a location that are no part of the parameter's name.
    """
    found = [(_spelt([part for part in detail["loc"] if part not in without]), detail) for detail in details]
    name = max((name for name, _ in found if name.startswith(found[0][0])), key=len)
    same = [detail for other, detail in found if other == name]
    words = " or ".join(dict.fromkeys(_words(detail["type"], detail["msg"]) for detail in same))
    words = words.replace(" or must be ", " or ")
    told = same[0]["type"] in ("missing", "too_short", "too_long")
    got = "" if told else f" (got {shown(same[0]['input'])})"
    return InvalidRequest(f"{name} {words}{got}.", name)


def shown(value: object) -> str:
    """A JSON value in a sentence, and of a large one no more than its kind."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value[:60] if isinstance(value, str) else value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _words(kind: str, message: str) -> str:
    """Pydantic's words, to go on from the name of a parameter."""
    if kind in ("missing", "model_type"):
        return "is missing" if kind == "missing" else "must be an object"
    start, _, rest = message.replace(" after validation", "").partition(" should ")
    return f"must {rest}" if start in ("Input", "List", "String") else message


def _spelt(parts: Sequence[int | str]) -> str:
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts if part not in KINDS)
    return name.removeprefix(".")
