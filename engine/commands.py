"""What the web side may ask of the engine: plain values, each a *command*. Knows nothing of pipes, tensors or text.

Token counts are tokens, sizes bytes, durations seconds.
"""

from __future__ import annotations

import msgspec

from engine.config import CacheConfig, EngineConfig, Tier

type_ = "type"  # the field that names a message's class on the wire


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


class Start(Message, frozen=True, kw_only=True):
    """The first command to a new process: load this model, then answer with `Loading`… and `Ready` or `LoadFailed`."""

    config: EngineConfig


class Load(Message, frozen=True, kw_only=True):
    """Serve another model beside those that are served already. Answered by `Loaded` or `LoadRefused`.

    `model`, `adapter`, `dtype` and `weights` are what they are in `EngineConfig`. While it loads, `Loading` with the
    `call_id` tells how far it is; requests to other models go on, but for the seconds in which the weights are read.
    """

    call_id: str
    model: str
    adapter: str | None = None
    dtype: str = "auto"
    weights: str = "auto"


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
    session_id: str = ""
    token_ids: list[int]
    salt: bytes = b""
    shared_len: int = 0


class Prefetch(Message, frozen=True, kw_only=True):
    """Bring what host and disk hold of a prompt to the device, before it is asked for. Answered by `Prefetched`.

    It waits for nobody, takes no room from requests, and ends early by `Cancel` with its `call_id`. The fields are
    those of `Submit`.
    """

    call_id: str
    model: str = ""
    session_id: str
    token_ids: list[int]
    salt: bytes = b""
    shared_len: int = 0


class Pin(Message, frozen=True, kw_only=True):
    """Have a session's blocks stay where they are, or no longer; answered by `Pinned`, which may refuse.

    A pin that is taken stays; of what pinned sessions hold beyond their share of a tier, nothing is kept for them.
    `again` repeats one that was taken before, by an engine that is gone: it is not refused. `ttl` stands for every
    tier's own while the session is not pinned: seconds after its last use; None: the tiers'.
    """

    call_id: str
    session_id: str
    pinned: bool
    again: bool = False
    ttl: float | None = None


class Demote(Message, frozen=True, kw_only=True):
    """Take a session's idle blocks off the tiers above `to`; None: out of all. Answered by `Demoted`.

    Blocks that others hold too stay. What `to` has no room for is evicted.
    """

    call_id: str
    session_id: str
    to: Tier | None


class Configure(Message, frozen=True, kw_only=True):
    """Change what the tiers may hold, while running. Answered by `Configured`, which may refuse."""

    call_id: str
    cache: CacheConfig


class GetSnapshot(Message, frozen=True, kw_only=True):
    """Ask for counters and usage. Answered by `Snapshot`."""

    call_id: str


class Check(Message, frozen=True, kw_only=True):
    """Run the conservation law on the live pool and index. Answered by `Checked`."""

    call_id: str


class Shutdown(Message, frozen=True, kw_only=True):
    """Leave the loop and end the process."""


Command = (
    Start
    | Load
    | Submit
    | Cancel
    | Drop
    | Estimate
    | Prefetch
    | Pin
    | Demote
    | Configure
    | GetSnapshot
    | Check
    | Shutdown
)
