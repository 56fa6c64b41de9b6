"""The messages that the web side and the engine exchange, as one list, and how they are encoded for the pipe.

`engine.commands` and `engine.events` say what each one means. This module knows nothing of tensors, text, SQL or HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.commands import (
    Cancel,
    Check,
    Command,
    Configure,
    Demote,
    Drop,
    Estimate,
    GetSnapshot,
    Load,
    Message,
    Pin,
    Prefetch,
    Sampling,
    Shutdown,
    Start,
    Submit,
)
from engine.events import (
    CacheAction,
    CacheEvent,
    CacheLog,
    Capabilities,
    Checked,
    Configured,
    Demoted,
    Dropped,
    Estimated,
    Event,
    Finished,
    FinishReason,
    Loaded,
    LoadFailed,
    Loading,
    LoadRefused,
    Miss,
    MissCause,
    ModelUsage,
    Phase,
    Pinned,
    Prefetched,
    Progress,
    Ready,
    RejectCode,
    Rejected,
    Residency,
    Snapshot,
    TierUsage,
    Tokens,
    TurnTrace,
    Usage,
)

__all__ = [
    "CacheAction",
    "CacheEvent",
    "CacheLog",
    "Cancel",
    "Capabilities",
    "Check",
    "Checked",
    "Command",
    "Configure",
    "Configured",
    "Demote",
    "Demoted",
    "Drop",
    "Dropped",
    "Estimate",
    "Estimated",
    "Event",
    "FinishReason",
    "Finished",
    "GetSnapshot",
    "Load",
    "LoadFailed",
    "LoadRefused",
    "Loaded",
    "Loading",
    "Message",
    "Miss",
    "MissCause",
    "ModelUsage",
    "Phase",
    "Pin",
    "Pinned",
    "Prefetch",
    "Prefetched",
    "Progress",
    "Ready",
    "RejectCode",
    "Rejected",
    "Residency",
    "Sampling",
    "Shutdown",
    "Snapshot",
    "Start",
    "Submit",
    "TierUsage",
    "Tokens",
    "TurnTrace",
    "Usage",
    "decode_commands",
    "decode_events",
    "encode",
]

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
