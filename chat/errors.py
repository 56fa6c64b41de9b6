"""What can go wrong when a person or a program chats, as typed errors whose text is for people.

Knows nothing of HTTP or of pages: `code` is the stable name that each face maps to its own form, `str(error)` the
sentence to show, `retryable` whether the same request may work later without a change.
"""

# ruff: noqa: N818 - the names say what is the matter, as the faces spell it

from __future__ import annotations

from collections.abc import Sequence

from storage.errors import DiskFull


class ChatError(Exception):
    """Base of all errors that a face shows to whoever asked."""

    code = "internal"
    retryable = False

    def __init__(self, message: str, *, code: str | None = None, retryable: bool | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = type(self).code if code is None else code
        self.retryable = type(self).retryable if retryable is None else retryable


class SessionNotFound(ChatError):
    """The chat does not exist, or belongs to another user: the same answer for both.

    `of_api`: it is an API client's, and what was asked for is for the chats of the page.
    """

    code = "session_not_found"

    def __init__(self, session_id: str, *, of_api: bool = False) -> None:
        super().__init__(
            f"{session_id!r} is a chat of an API client; this is for chats of the page alone."
            if of_api
            else f"There is no chat {session_id!r}; it may have been deleted."
        )


class SessionBusy(ChatError):
    """A reply is being written in this chat; one turn at a time."""

    code = "session_busy"
    retryable = True

    def __init__(self) -> None:
        super().__init__("A reply is still being written in this chat; wait for it or stop it first.")


class SystemPromptFixed(ChatError):
    """The system prompt is part of what the model has read once a message was sent."""

    code = "system_prompt_fixed"

    def __init__(self) -> None:
        super().__init__("The system prompt is fixed once a message was sent; start a new chat to use another.")


class EmptyMessage(ChatError):
    """Nothing but white space was sent."""

    code = "empty_message"

    def __init__(self) -> None:
        super().__init__("The message is empty; write something first.")


class NothingToRetry(ChatError):
    """A retry was asked for where no user message is."""

    code = "nothing_to_retry"

    def __init__(self) -> None:
        super().__init__("There is no message to answer again in this chat; send one first.")


class TurnStopped(ChatError):
    """Somebody stopped the turn before it had begun; nothing of it was stored."""

    code = "turn_stopped"
    retryable = True

    def __init__(self) -> None:
        super().__init__("You stopped this message while its model was loading; it was not sent.")


class PromptTooLong(ChatError):
    """The conversation with the new message does not fit the model's context. `prompt_tokens` and `limit` in tokens.

    `so_far`: what comes before the message fills it already, so that the rest was not counted. `at_least`: there are
    surely so many tokens, and they were not counted because of that.
    """

    code = "context_length_exceeded"

    def __init__(self, prompt_tokens: int, limit: int, *, so_far: bool = False, at_least: bool = False) -> None:
        over = prompt_tokens - limit + 1
        least = "at least " if at_least else ""
        room = f"but the model's context holds {limit:,} and a reply needs at least one of them"
        shorten = f"shorten the message by {least}{over:,} {'token' if over == 1 else 'tokens'}"
        super().__init__(
            f"The conversation before this message is at least {prompt_tokens:,} tokens, {room}; start a new chat."
            if so_far
            else f"The conversation with this message is {least}{prompt_tokens:,} tokens, {room}; {shorten} or start a "
            "new chat."
        )
        self.prompt_tokens = prompt_tokens
        self.limit = limit


class NotReady(ChatError):
    """The engine is loading, restarting or has failed; the sentence says which."""

    code = "not_ready"
    retryable = True


class PinRefused(ChatError):
    """The engine cannot keep a chat's cache where it is; the sentence, with the numbers, is the engine's."""

    code = "pin_refused"


class TemplateError(ChatError):
    """The model's chat template refuses these messages (a role it does not know, two user turns in a row, …)."""

    code = "template_error"


class UnusableModel(ChatError):
    """The loaded model cannot chat at all: its tokenizer or chat template is missing, damaged or broken."""

    code = "unusable_model"


class ModelNotFound(ChatError):
    """There is no model of this name or id here; `known` are the names that there are."""

    code = "model_not_found"

    def __init__(self, name: str, known: Sequence[str] = ()) -> None:
        there = f" This server has {', '.join(map(repr, known))}, and 'default'." if known else ""
        super().__init__(f"There is no model {name!r} here.{there}")


class ModelUnavailable(ChatError):
    """A model that is known by name cannot be loaded now; the sentence is the engine's."""

    code = "model_unavailable"


class ModelNotLoadable(ModelUnavailable):
    """What was named as a further model is none, or none that can be served."""

    code = "model_not_loadable"


class InvalidText(ChatError):
    """A text that no file and no tokenizer can hold, such as one with lone surrogates."""

    code = "invalid_text"


class InvalidRequest(ChatError):
    """A value out of its range; `param` names it as the caller spelt it."""

    code = "invalid_value"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class EngineFailed(ChatError):
    """The engine ended the turn with an error of its own; the sentence is the engine's."""

    code = "engine_error"


class StorageFailed(ChatError):
    """The database could not store or read; nothing of the request was stored."""

    code = "storage_failed"
    retryable = True

    def __init__(self, reason: Exception) -> None:
        code = "storage_full" if isinstance(reason, DiskFull) else None
        super().__init__(f"Keepwarm's database failed: {reason}.", code=code)


def check_text(text: str, what: str) -> str:
    """`text` itself; raises InvalidText when it cannot be written as UTF-8. `what` names it ("message", "title")."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidText(
            f"The {what} holds half a character (U+{ord(text[error.start]):04X}) at position {error.start}; "
            "paste it again or remove that character."
        ) from None
    return text
