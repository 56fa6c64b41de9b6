"""What storage hands out: frozen values, never ORM objects, safe to pass between threads and to keep.

Ids are opaque strings. Times are seconds since the epoch, durations are seconds; both are floats.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Literal

UserRole = Literal["admin", "user"]
Origin = Literal["chat", "api"]
Role = Literal["system", "user", "assistant"]
Status = Literal["complete", "streaming", "interrupted", "stopped", "failed"]


class Keep(Enum):
    """The type of `KEEP`, the default of every "leave this as it is" argument (None is a value of its own)."""

    KEEP = "keep"


KEEP: Final = Keep.KEEP


def new_id() -> str:
    """A fresh opaque id: 32 hexadecimal digits."""
    return uuid.uuid4().hex


@dataclass(frozen=True, kw_only=True)
class UserRecord:
    """A person. `salt` is the 16-byte secret in the block hashes of their own tokens."""

    id: str
    name: str
    role: UserRole
    salt: bytes = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class ModelRecord:
    """A model that was loaded once. `source` and `adapter` ("": none) are what was named, `name` is unique."""

    id: str
    name: str
    source: str
    adapter: str
    created_at: float
    used_at: float


@dataclass(frozen=True, kw_only=True)
class SessionSummary:
    """A session as a list shows it: no system prompt and no message text was read for it."""

    id: str
    user_id: str
    title: str
    origin: Origin
    created_at: float
    updated_at: float
    leaf_id: str | None
    """The message the conversation stands at; None while there is none."""
    expires_at: float | None
    """When `delete_expired` removes it; None: never."""


@dataclass(frozen=True, kw_only=True)
class SessionRecord(SessionSummary):
    """A session in full. `model_id` None: it has not chatted with any, or that one was forgotten."""

    system_prompt: str
    model_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class MessageRecord:
    """One message of a session's tree.

    `token_ids` and `tokenizer` (which one the ids belong to) are filled by `Store.path` and `Store.add_message`; other
    reads leave them empty. `path_key` is `storage.keys.path_key` over the whole path from the root to this message.
    """

    id: str
    session_id: str
    parent_id: str | None
    role: Role
    text: str
    status: Status
    finish_reason: str | None
    error: str | None
    created_at: float
    path_key: str
    token_ids: tuple[int, ...] = field(default=(), repr=False)
    tokenizer: str = ""


@dataclass(frozen=True, kw_only=True)
class TurnRecord:
    """The figures of one reply, counted where the work was done.

    `prompt_tokens` = `device_tokens` (reused) + `computed_tokens`; `recomputed_tokens` are those forwarded again
    after a preemption. A duration is None where there is none (no first token, a single token).
    """

    message_id: str
    prompt_tokens: int
    device_tokens: int
    computed_tokens: int
    recomputed_tokens: int
    output_tokens: int
    ttft_s: float | None
    tpot_s: float | None
    total_s: float
    finish_reason: str
    created_at: float | None = None
    """None: `Store.add_turn` writes the time of the call."""
    id: str = field(default_factory=new_id)
