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
    pinned: bool = False
    """Whether its cache is to stay where it is."""
    ttl_s: float | None = None
    """How long its unused cache stays in a tier, in seconds; None: as long as everybody's."""


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


@dataclass(frozen=True)
class StoredPath:
    """Messages from a root on, with token ids; `key` is the last one's path key."""

    key: str
    session: SessionRecord
    messages: tuple[MessageRecord, ...]


@dataclass(frozen=True, kw_only=True)
class TurnRecord:
    """The figures of one reply, counted where the work was done.

    `prompt_tokens` = `device_tokens` + `host_tokens` + `disk_tokens` (reused, by the tier that had them) +
    `computed_tokens`; `recomputed_tokens` are those forwarded again after a preemption. A duration is None where there
    is none (no first token, a single token). `restore_s` was spent bringing tokens back. `fingerprint` is that of the
    model that wrote the reply, "" where it was not recorded.

    Why the tokens after the first `miss_position` were not found: `miss_cause` and `miss_detail`; they begin in message
    number `miss_message` of the prompt, of role `miss_role` (None: that cannot be said). All None: nothing was missed.
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
    host_tokens: int = 0
    disk_tokens: int = 0
    restore_s: float = 0.0
    fingerprint: str = ""
    miss_position: int | None = None
    miss_message: int | None = None
    miss_role: str | None = None
    miss_cause: str | None = None
    miss_detail: str | None = None
    created_at: float | None = None
    """None: `Store.add_turn` writes the time of the call."""
    id: str = field(default_factory=new_id)


@dataclass(frozen=True, kw_only=True)
class CacheEventRecord:
    """One thing that happened to the cache: `blocks` of `bytes` left `source` and came to `target` (None: nowhere).

    `session_id` None: they were nobody's alone. `age_s` is the time since their last use, `reason` is for people.
    """

    at: float
    action: str
    session_id: str | None
    source: str | None
    target: str | None
    blocks: int
    bytes: int
    age_s: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class TraceRecord:
    """A turn as a cache policy sees it: the tokens of its prompt by source, and those of its reply.

    `blocks` are eight bytes for each block of prompt and reply, first to last, equal where blocks are. `model` is a
    fingerprint.
    """

    at: float
    session_id: str
    model: str
    blocks: bytes = field(repr=False)
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    computed_tokens: int
    output_tokens: int


@dataclass(frozen=True, kw_only=True)
class KeptSession:
    """A session whose cache is pinned, or has a time to live of its own in seconds."""

    id: str
    pinned: bool
    ttl_s: float | None
