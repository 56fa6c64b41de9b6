"""What the engine tells the web side: plain values, each an *event*. Knows nothing of pipes, tensors or text.

Every request ends in exactly one `Finished` per sample, or in one `Rejected`. Every call (a command with a `call_id`)
ends in exactly one answer that carries the same `call_id`. Token counts are tokens, sizes bytes, durations seconds.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.commands import Message
from engine.config import CacheConfig, Tier

Phase = Literal["loading", "ready", "restarting", "failed", "stopped"]
FinishReason = Literal["stop", "length", "cancelled"]
MissCause = Literal["new", "diverged", "evicted", "unreadable", "slower"]
CacheAction = Literal["saved", "demoted", "promoted", "expired", "evicted", "quarantined", "skipped", "set_aside"]
RejectCode = Literal["invalid", "no_model", "too_long", "never_fits", "engine_died", "not_ready", "internal"]


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine serves and can do.

    `model_path` is a directory with `tokenizer.json`, `tokenizer_config.json` and `config.json` of the loaded model.
    `eos_ids` end a reply by the model's own account. `weights` is what most of those are: int4, int8, bf16, or as the
    dtype says. `commands` names the commands this engine answers. `threads` is what torch uses, `attention` the kernel
    chosen at start.
    """

    model_name: str
    model_path: str
    fingerprint: str
    device: str
    dtype: str
    weights: str
    attention: str
    context_length: int
    vocab_size: int
    eos_ids: list[int]
    block_size: int
    total_blocks: int
    kv_bytes_per_token: int
    threads: int
    commands: list[str]

    @property
    def room(self) -> int:
        """Tokens that a chat can have: as many as the model was made for, and the pool can hold."""
        return min(self.context_length, self.total_blocks * self.block_size)


class Loading(Message, frozen=True, kw_only=True):
    """Progress of a load; `total` 0 means unknown. `stage` is a short phrase for people ("converting weights").

    `call_id` names the `Load` it belongs to; "" is the start.
    """

    call_id: str = ""
    stage: str
    done: int = 0
    total: int = 0


class LoadFailed(Message, frozen=True, kw_only=True):
    """The engine cannot start; `message` names the value and the fix. The process ends after this."""

    message: str


class Ready(Message, frozen=True, kw_only=True):
    """The model is loaded, checked and warmed up."""

    capabilities: Capabilities


class Loaded(Message, frozen=True, kw_only=True):
    """Answer to `Load`: the model is served from now on."""

    call_id: str
    capabilities: Capabilities


class LoadRefused(Message, frozen=True, kw_only=True):
    """Answer to `Load`: it cannot be served; `message` names the value and the fix. All else goes on."""

    call_id: str
    message: str


class Progress(Message, frozen=True, kw_only=True):
    """A request's place: waiting for room, or reading its prompt: `reused + read` of `total` tokens are there."""

    request_id: str
    state: Literal["waiting", "reading"]
    reused: int
    read: int
    total: int


class Tokens(Message, frozen=True, kw_only=True):
    """New tokens of sample `index`, in order, each sent in the step that sampled it."""

    request_id: str
    index: int
    token_ids: list[int]


class Miss(msgspec.Struct, frozen=True, kw_only=True):
    """Why a prompt was not found beyond its first `position` tokens.

    `cause` new: nobody has computed what follows; diverged: this session went on differently from there; evicted: it
    was there, and `detail` says in which tier it ended and why; unreadable: its copy failed the check; slower: loading
    it would have taken longer than computing it.
    """

    position: int
    cause: MissCause
    detail: str = ""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What one sample cost, counted where the work was done.

    prompt_tokens = device_tokens + host_tokens + disk_tokens + computed_tokens. `device_tokens` were found in the pool,
    `host_tokens` and `disk_tokens` were copied into it from there, `computed_tokens` went through the model.
    `recomputed_tokens` went through it again after a preemption. `output_tokens` were sampled; `drafted_tokens` were
    guessed and checked, and the `accepted_tokens` of them are part of the output. `restore_s` was spent waiting for
    copies. `miss` says why the rest was not found; None: nothing but the last token had to be computed.
    Samples after the first share the first one's prompt: all of theirs counts as found. Times are on the engine's
    clock from the arrival of `Submit`: `queue_s` until admission, `first_token_s` until the first token, `total_s`.
    """

    prompt_tokens: int
    device_tokens: int
    host_tokens: int = 0
    disk_tokens: int = 0
    computed_tokens: int
    recomputed_tokens: int
    output_tokens: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int
    queue_s: float
    restore_s: float = 0.0
    miss: Miss | None = None
    first_token_s: float | None
    total_s: float


class Finished(Message, frozen=True, kw_only=True):
    """Sample `index` ended. `detail` says more where the reason alone would puzzle a person (pool or context full)."""

    request_id: str
    index: int
    reason: FinishReason
    usage: Usage
    detail: str = ""


class Rejected(Message, frozen=True, kw_only=True):
    """The whole request ended in an error; no `Finished` follows. `message` is for people and names the numbers."""

    request_id: str
    code: RejectCode
    message: str
    retryable: bool = False


class Dropped(Message, frozen=True, kw_only=True):
    """Answer to `Drop`: blocks freed, and their bytes. Not `complete`: a file could not be deleted; drop it again."""

    call_id: str
    blocks: int
    bytes: int
    complete: bool = True


class Estimated(Message, frozen=True, kw_only=True):
    """Answer to `Estimate`: where the prompt's tokens would come from, and how long its first token would take.

    `seconds` is what was measured so far applied to this prompt, with nobody else waiting; None: nothing was measured.
    `refused` is what `Submit` would be answered: the prompt is too long to run at all.
    """

    call_id: str
    prompt_tokens: int
    device_tokens: int
    host_tokens: int = 0
    disk_tokens: int = 0
    computed_tokens: int
    seconds: float | None = None
    refused: Rejected | None = None


class Prefetched(Message, frozen=True, kw_only=True):
    """Answer to `Prefetch`: tokens of the prompt that are on the device now, and how many came from where."""

    call_id: str
    device_tokens: int
    host_tokens: int
    disk_tokens: int


class Pinned(Message, frozen=True, kw_only=True):
    """Answer to `Pin`: what holds now; `message` says why a pin was refused, with the numbers."""

    call_id: str
    pinned: bool
    message: str = ""


class Demoted(Message, frozen=True, kw_only=True):
    """Answer to `Demote`: blocks that left a tier, and their bytes there."""

    call_id: str
    blocks: int
    bytes: int


class Configured(Message, frozen=True, kw_only=True):
    """Answer to `Configure`: what holds now, with every None that the engine decides filled in; or why not."""

    call_id: str
    cache: CacheConfig
    message: str = ""


class CacheEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened to blocks, counted together where they are of one session, cause and moment.

    `at` is Unix time. `session_id` is the session that used them last, "" for a preset of many. `source` and `target`
    are the tiers that they left and came to. `reason` is for people. `age_s` is the time since their last use.
    """

    at: float
    action: CacheAction
    session_id: str
    source: Tier | None
    target: Tier | None
    blocks: int
    bytes: int
    reason: str
    age_s: float


class TurnTrace(msgspec.Struct, frozen=True, kw_only=True):
    """A turn as a policy sees it, without its text: what the simulator of policies replays.

    `at` is Unix time, `model` a fingerprint. `blocks` are the first eight bytes of each block's key, first to last, of
    the prompt and the reply; the counts are tokens of the prompt by source, and of the reply.
    """

    at: float
    session_id: str
    model: str
    blocks: bytes
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    computed_tokens: int
    output_tokens: int


class CacheLog(Message, frozen=True, kw_only=True):
    """What happened to the cache, and the turns that ended, since the last one; it comes at most once a second."""

    events: list[CacheEvent]
    turns: list[TurnTrace] = msgspec.field(default_factory=list)


class TierUsage(msgspec.Struct, frozen=True, kw_only=True):
    """One tier's memory: `used_bytes` of blocks (shared ones once), in `held_bytes` taken from the machine.

    `pinned_bytes` belong to sessions that are pinned; `page_locked_bytes` are host memory that the GPU reads directly.
    """

    tier: Tier
    budget_bytes: int
    held_bytes: int
    used_bytes: int
    pinned_bytes: int
    page_locked_bytes: int = 0
    blocks: int


class Residency(msgspec.Struct, frozen=True, kw_only=True):
    """Where one session's blocks are: tokens by the best tier that holds them, and bytes in every tier.

    Shared blocks count for each of their sessions. `evicted_tokens` of its last prompt and reply are in no tier.
    """

    device_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    evicted_tokens: int = 0
    device_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    pinned: bool = False
    idle_s: float = 0.0


class ModelUsage(msgspec.Struct, frozen=True, kw_only=True):
    """One served model's memory. free + leased + idle = total blocks, each of `block_bytes`.

    `weights_loaded` false: its weights gave way to another's and come back with its next request.
    """

    name: str
    fingerprint: str
    weights_loaded: bool
    weight_bytes: int
    block_bytes: int
    total_blocks: int
    free_blocks: int
    leased_blocks: int
    idle_blocks: int


class Snapshot(Message, frozen=True, kw_only=True):
    """Answer to `GetSnapshot`: gauges now, counters since the start of the process, over all `models`.

    free + leased + idle = total blocks; `pool_bytes` of the `budget_bytes` for KV are given to pools, and blocks in use
    take `used_bytes`. `steps` counts forward passes, `forwarded_tokens` the tokens that went through them, among them
    `drafted_tokens` that were guessed, of which `accepted_tokens` came true.
    `tiers` are the ledger of memory, `sessions` where each session's blocks are. `staging_bytes` are buffers in which
    blocks travel between tiers, `saving_blocks` wait to be written, `loading_blocks` to be read.
    """

    call_id: str
    models: list[ModelUsage]
    budget_bytes: int
    pool_bytes: int
    used_bytes: int
    total_blocks: int
    free_blocks: int
    leased_blocks: int
    idle_blocks: int
    running: int
    waiting: int
    steps: int
    forwarded_tokens: int
    reused_tokens: int
    sampled_tokens: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int
    evicted_blocks: int
    tiers: list[TierUsage] = msgspec.field(default_factory=list)
    sessions: dict[str, Residency] = msgspec.field(default_factory=dict)
    staging_bytes: int = 0
    saving_blocks: int = 0
    loading_blocks: int = 0


class Checked(Message, frozen=True, kw_only=True):
    """Answer to `Check`: every violated law as a sentence; empty when all hold."""

    call_id: str
    violations: list[str]


Event = (
    Loading
    | LoadFailed
    | Ready
    | Loaded
    | LoadRefused
    | Progress
    | Tokens
    | Finished
    | Rejected
    | Dropped
    | Estimated
    | Prefetched
    | Pinned
    | Demoted
    | Configured
    | CacheLog
    | Snapshot
    | Checked
)
