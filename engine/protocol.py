"""The messages that the web side and the engine exchange: plain values, encoded as MessagePack over a pipe.

This module knows nothing of tensors, text, SQL or HTTP. A *command* goes to the engine, an *event* comes back. Every
request ends in exactly one `Finished` per sample, or in one `Rejected`. Every call (a command with a `call_id`) ends in
exactly one answer that carries the same `call_id`. Token counts are tokens, sizes bytes, durations seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from engine.config import EngineConfig

type_ = "type"  # the field that names a message's class on the wire

Phase = Literal["loading", "ready", "restarting", "failed", "stopped"]
FinishReason = Literal["stop", "length", "cancelled"]
RejectCode = Literal["invalid", "no_model", "too_long", "never_fits", "engine_died", "not_ready", "internal"]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field=type_):
    """Base of everything that crosses the pipe; immutable, tagged with its class name."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen from the logits. The defaults are greedy and change nothing.

    `temperature` 0 (or less than 0.0001) is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. `repetition_penalty`
    follows transformers (prompt and reply), `presence_penalty` and `frequency_penalty` follow OpenAI (reply only). With
    a `seed`, sample `i` of a request draws the same numbers at the same position whatever else runs; None takes a
    fresh seed.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None


# --- commands -------------------------------------------------------------------------------------------------------


class Start(Message, frozen=True, kw_only=True):
    """The first command to a new process: load this model, then answer with `Loading`… and `Ready` or `LoadFailed`."""

    config: EngineConfig


class Load(Message, frozen=True, kw_only=True):
    """Serve another model beside those that are served already. Answered by `Loaded` or `LoadRefused`.

    `model`, `adapter` and `dtype` are what they are in `EngineConfig`. While it loads, `Loading` with the `call_id`
    tells how far it is; requests to other models go on, but for the seconds in which the weights are read.
    """

    call_id: str
    model: str
    adapter: str | None = None
    dtype: str = "auto"


class Submit(Message, frozen=True, kw_only=True):
    """Read `token_ids` and write up to `max_tokens` more, `n` times.

    The first `shared_len` tokens belong to a preset that all users share; blocks that hold any later token are hashed
    with `salt`. `stop_ids` end a sample; the stopping id is delivered as its last token. Higher `priority` goes first.
    `model` is a served model's fingerprint; "" is the one that the engine started with.
    """

    request_id: str
    model: str = ""
    session_id: str
    token_ids: list[int]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_ids: list[int] = []
    n: int = 1
    salt: bytes = b""
    shared_len: int = 0
    priority: int = 0


class Cancel(Message, frozen=True, kw_only=True):
    """Stop a request within one step: its samples end in `Finished(reason="cancelled")`; unknown ids are ignored.

    With an `index`, only that sample, which must have begun to be written; before that it is ignored.
    """

    request_id: str
    index: int | None = None


class Drop(Message, frozen=True, kw_only=True):
    """Forget every block that only this session holds. Answered by `Dropped`. Running requests are cancelled first."""

    call_id: str
    session_id: str


class Estimate(Message, frozen=True, kw_only=True):
    """Ask what a prompt would find in the cache now. Answered by `Estimated`. Changes nothing, not even recency."""

    call_id: str
    model: str = ""
    token_ids: list[int]
    salt: bytes = b""
    shared_len: int = 0


class GetSnapshot(Message, frozen=True, kw_only=True):
    """Ask for counters and usage. Answered by `Snapshot`."""

    call_id: str


class Check(Message, frozen=True, kw_only=True):
    """Run the conservation law on the live pool and index. Answered by `Checked`."""

    call_id: str


class Shutdown(Message, frozen=True, kw_only=True):
    """Leave the loop and end the process."""


Command = Start | Load | Submit | Cancel | Drop | Estimate | GetSnapshot | Check | Shutdown


# --- events ---------------------------------------------------------------------------------------------------------


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine serves and can do.

    `model_path` is a directory with `tokenizer.json`, `tokenizer_config.json` and `config.json` of the loaded model.
    `eos_ids` end a reply by the model's own account. `commands` names the commands this engine answers. `threads` is
    what torch uses, `attention` the kernel chosen at start.
    """

    model_name: str
    model_path: str
    fingerprint: str
    device: str
    dtype: str
    attention: str
    context_length: int
    vocab_size: int
    eos_ids: list[int]
    block_size: int
    total_blocks: int
    kv_bytes_per_token: int
    threads: int
    commands: list[str]


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


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What one sample cost, counted where the work was done.

    prompt_tokens = device_tokens + computed_tokens. `device_tokens` were found in the pool, `computed_tokens` went
    through the model. `recomputed_tokens` went through it again after a preemption. `output_tokens` were sampled.
    Samples after the first share the first one's prompt: all of theirs counts as found. Times are on the engine's
    clock from the arrival of `Submit`: `queue_s` until admission, `first_token_s` until the first token, `total_s`.
    """

    prompt_tokens: int
    device_tokens: int
    computed_tokens: int
    recomputed_tokens: int
    output_tokens: int
    preemptions: int
    queue_s: float
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
    """Answer to `Drop`: blocks freed, and their bytes."""

    call_id: str
    blocks: int
    bytes: int


class Estimated(Message, frozen=True, kw_only=True):
    """Answer to `Estimate`."""

    call_id: str
    prompt_tokens: int
    device_tokens: int
    computed_tokens: int


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
    take `used_bytes`. `steps` counts forward passes, `forwarded_tokens` the tokens that went through them.
    `session_tokens` maps a session to the tokens of it that the pools hold (shared ones included).
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
    preemptions: int
    evicted_blocks: int
    session_tokens: dict[str, int]


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
    | Snapshot
    | Checked
)

_encoder = msgspec.msgpack.Encoder()
_commands: msgspec.msgpack.Decoder[list[Command]] = msgspec.msgpack.Decoder(list[Command])
_events: msgspec.msgpack.Decoder[list[Event]] = msgspec.msgpack.Decoder(list[Event])


def encode(messages: Sequence[Command] | Sequence[Event]) -> bytes:
    """One frame: messages in order, as MessagePack."""
    return _encoder.encode(messages)


def decode_commands(frame: bytes) -> list[Command]:
    """The commands in a frame; raises `msgspec.ValidationError` when they are none."""
    return _commands.decode(frame)


def decode_events(frame: bytes) -> list[Event]:
    """The events in a frame; raises `msgspec.ValidationError` when they are none."""
    return _events.decode(frame)
