"""The values that the chat service hands to its faces: frozen, complete in themselves, safe to keep.

Knows nothing of where they come from. Token counts are tokens, durations seconds, times seconds since the epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from chat.thinking import Policy
from engine.protocol import FinishReason, Sampling
from engine.protocol import MissCause as EngineCause

Role = Literal["system", "user", "assistant"]
Status = Literal["complete", "streaming", "interrupted", "stopped", "failed"]
MissCause = EngineCause | Literal["edited", "template", "other_model", "lost"]
TurnState = Literal["waiting", "reading", "writing", "done"]

RETRYABLE_STATUSES: frozenset[Status] = frozenset({"interrupted", "stopped", "failed"})


@dataclass(frozen=True)
class ModelNotes:
    """What a person should know of the loaded model: a sentence ("": nothing), and what becomes of its reasoning.

    `thinking` None: the model does not mark any reasoning.
    """

    notice: str = ""
    thinking: Policy | None = None


@dataclass(frozen=True)
class ModelView:
    """A model that a chat can be held with. `source` and `adapter` ("": none) are what was named when it was loaded.

    `default`: the one that the server started with. `served`: the engine knows it now, so that it answers at once;
    `context_length` (tokens, else 0), `device`, `dtype`, `weights` and `notes` are known only then.
    """

    id: str
    name: str
    source: str
    adapter: str = ""
    default: bool = False
    served: bool = False
    context_length: int = 0
    device: str = ""
    dtype: str = ""
    weights: str = ""
    notes: ModelNotes = ModelNotes()


@dataclass(frozen=True)
class TurnOptions:
    """How one reply is to be made.

    `sampling` None: what the model itself recommends. `max_tokens` None: what the context leaves, at most
    `DEFAULT_MAX_TOKENS` of the service. `stop`: the reply ends before the first of these strings.
    """

    sampling: Sampling | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class MissView:
    """Why a prompt was not found beyond its first `position` tokens.

    What follows begins in message number `message_index` of the prompt, of that `role` (None: that cannot be said).
    `cause` new: nobody had read it; diverged: the chat went on otherwise before; edited: the message took the place of
    another; template: the message is written otherwise than it was; other_model: another model wrote the last reply;
    evicted: it was there and is gone; lost: the engine was started anew and had it in no tier; unreadable: its copy
    failed the check; slower: reading was quicker than loading. `detail` says more, for people, or is "".
    """

    position: int
    message_index: int | None
    role: Role | None
    cause: MissCause
    detail: str = ""

    def because(self, cause: MissCause, detail: str = "") -> MissView:
        """The same miss with a better reason."""
        return replace(self, cause=cause, detail=detail)


@dataclass(frozen=True)
class Figures:
    """What one reply cost. `prompt_tokens` = `reused_tokens` + `computed_tokens`.

    Of the reused tokens, `host_tokens` and `disk_tokens` came from there, which took `restore_s`; the others were on
    the device. `miss` says why the rest had to be computed; None: it was but the last token. `ttft_s` runs from `send`
    to the first text, `tpot_s` is the mean time per output token after the first; None when there was no text, or only
    one token. `recomputed_tokens` were read again because the pool was full meanwhile. `drafted_tokens` were guessed,
    and `accepted_tokens` of them came true; both are known of a reply until the server ends.
    """

    prompt_tokens: int
    reused_tokens: int
    computed_tokens: int
    output_tokens: int
    ttft_s: float | None
    tpot_s: float | None
    recomputed_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    restore_s: float = 0.0
    miss: MissView | None = None

    @property
    def device_tokens(self) -> int:
        """Reused tokens that were on the device already."""
        return self.reused_tokens - self.host_tokens - self.disk_tokens

    @property
    def tokens_per_s(self) -> float | None:
        """Output tokens a second after the first one; None when it cannot be said."""
        return 1.0 / self.tpot_s if self.tpot_s else None


@dataclass(frozen=True)
class EstimateView:
    """Where the tokens of a prompt would come from now, and how long its first token would take.

    `seconds` None: nothing was measured yet.
    """

    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    computed_tokens: int
    seconds: float | None


@dataclass(frozen=True)
class WarmingView:
    """Recent chats are brought back to the device: `done` of `total` are there."""

    done: int
    total: int


@dataclass(frozen=True)
class SessionView:
    """One line of the list of chats. `title` is "" until the first message is sent; `running`: a reply is coming."""

    id: str
    title: str
    updated_at: float
    running: bool = False


@dataclass(frozen=True)
class MessageView:
    """One message as it is shown. `error` is a sentence for people, `figures` None for messages that are no replies."""

    id: str
    role: Role
    text: str
    status: Status = "complete"
    finish_reason: FinishReason | None = None
    error: str | None = None
    figures: Figures | None = None
    created_at: float = 0.0


@dataclass(frozen=True)
class SessionDetail:
    """A whole chat along its current path; `messages` has no system message, that text is `system_prompt`.

    `context_tokens` is what the path's messages fill of the `context_length` tokens that the model and the device tier
    have room for (0: not known yet).
    `model_id` None: the default model. `system_prompt` "" is the model's own default. It can be changed until the first
    message is sent (`system_prompt_fixed`).
    """

    id: str
    title: str
    updated_at: float
    running: bool
    system_prompt: str
    messages: tuple[MessageView, ...]
    model_id: str | None = None
    context_tokens: int = 0
    context_length: int = 0

    @property
    def system_prompt_fixed(self) -> bool:
        """Whether messages were sent already, so that the system prompt belongs to what the model has read."""
        return bool(self.messages)

    @property
    def can_retry(self) -> bool:
        """Whether the last message waits for a reply, or has one that did not complete; never while one is coming."""
        if not self.messages or self.running:
            return False
        last = self.messages[-1]
        return last.role == "user" or last.status in RETRYABLE_STATUSES


@dataclass(frozen=True)
class TurnView:
    """A reply in the making. `text` is all of it so far; `status` is None until `state` is "done".

    While "reading", `reused + read` of `total` prompt tokens are there. `retryable` says whether `retry` may help.
    """

    session_id: str
    message_id: str
    state: TurnState = "waiting"
    text: str = ""
    reused: int = 0
    read: int = 0
    total: int = 0
    status: Status | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    retryable: bool = False
    figures: Figures | None = None
