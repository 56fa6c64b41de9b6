"""What a model takes on this machine, in a table: weights, K and V, and how many sessions of a length fit.

Knows numbers and how to put them; they come from `engine.model.sizing` and `chat.doctor_machine`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chat.doctor import Finding, WrongQuestion, count, ok
from chat.doctor_machine import Device
from chat.doctor_text import table
from engine.cache.image import ImageCodec
from engine.config import ColdDtype, EngineConfig
from engine.model.loading import DTYPES
from engine.model.sizing import Sizing
from engine.residents import WEIGHTS_MARGIN
from engine.shares import usual_bytes
from engine.words import size

MIB = 2**20


@dataclass(frozen=True)
class Question:
    """How long sessions may get, in tokens, and how many of them there shall be (None: as many as fit)."""

    context: int
    sessions: int | None

    @classmethod
    def of(cls, sized: Sizing, context: int | None, sessions: int | None) -> Question:
        """The question that was asked, of this model. Raises WrongQuestion for numbers that make no sense."""
        if context is not None and not 1 <= context <= sized.context_length:
            raise WrongQuestion(f"--context {context}: {sized.name} was made for 1 to {sized.context_length} tokens")
        if sessions is not None and sessions < 1:
            raise WrongQuestion(f"--sessions {sessions}: ask for at least 1")
        return cls(context or sized.context_length, sessions)


@dataclass(frozen=True)
class Room:
    """Bytes that there are: budgets as they are set, else by default, and free memory of the device.

    `device_kv` None: the default, which depends on the model. `chosen` names the settings that are set. `disk` is what
    the disk tier could have; `cold_dtype` is how K and V are kept in host and disk.
    """

    device_kv: int | None
    memory: int
    host_kv: int = 0
    disk_kv: int = 0
    disk: int = 0
    cold_dtype: ColdDtype = "auto"
    chosen: tuple[str, ...] = ()

    def how(self, setting: str) -> str:
        """The setting, and where its value comes from."""
        return f"{setting}, {'as set' if setting in self.chosen else 'by default'}"


@dataclass(frozen=True)
class Sizes:
    """The answer in one number format, in bytes and sessions.

    `seen` are the bytes of a session that some layer can still see at its end, `session` those that Keepwarm keeps on
    the device, `cold` those in host and disk.
    """

    dtype: str
    weights: int
    token: int
    session: int
    seen: int
    cold: int
    budget: int
    in_budget: int
    in_memory: int
    in_host: int
    in_disk: int

    @classmethod
    def of(cls, sized: Sizing, dtype: str, question: Question, room: Room) -> Sizes:
        """The sizes of `sized` in this format."""
        kind, block = DTYPES[dtype], EngineConfig(cache_dir="").block_size
        token, weights = sized.kv_bytes(kind), sized.weight_bytes(kind)
        blocks, shape = -(-question.context // block), sized.shape
        session = blocks * block * token
        image = ImageCodec(shape.layers, block, shape.kv_heads, shape.head_dim, kind, room.cold_dtype)
        cold = blocks * image.size
        budget = room.device_kv or usual_bytes(question.context, block, block * token, room.memory - weights)
        return cls(
            dtype=dtype,
            weights=weights,
            token=token,
            session=session,
            seen=sized.seen_bytes(kind, question.context),
            cold=cold,
            budget=budget,
            in_budget=budget // session,
            in_memory=max(0, room.memory - weights - WEIGHTS_MARGIN) // session,
            in_host=room.host_kv // cold,
            in_disk=room.disk_kv // cold,
        )

    @property
    def warm(self) -> int:
        """Sessions that stay warm: what is on the disk is what is above it, saved."""
        return max(self.in_budget + self.in_host, self.in_disk)


def report(sized: Sizing, columns: Sequence[Sizes], question: Question, room: Room, device: Device) -> str:
    """The table for people."""
    long = f"{question.context:,} tokens"
    lossy = room.cold_dtype != "auto"
    rows = [
        ["", *(column.dtype for column in columns)],
        ["weights", *(size(column.weights) for column in columns)],
        ["K and V of one token", *(f"{column.token:,} bytes" for column in columns)],
        [f"a session of {long}", *(size(column.session) for column in columns)],
        *([["  of that within its windows", *(size(c.seen) for c in columns)]] if any(sized.windows) else []),
        *([[f"  the same in {room.cold_dtype}", *(size(c.cold) for c in columns)]] if lossy else []),
        [room.how("device_kv"), *(size(column.budget) for column in columns)],
        ["  sessions in it", *(f"{column.in_budget:,}" for column in columns)],
        [f"  sessions in the {size(room.memory)} available", *(f"{column.in_memory:,}" for column in columns)],
        [room.how("host_kv"), *(size(room.host_kv) for _ in columns)],
        ["  sessions in it", *(f"{column.in_host:,}" for column in columns)],
        [room.how("disk_kv"), *(size(room.disk_kv) for _ in columns)],
        ["  sessions in it", *(f"{column.in_disk:,}" for column in columns)],
    ]
    head = f"{sized.name}: {sized.kind}, {sized.parameters:,} parameters, a context of {sized.context_length:,} tokens"
    return "\n\n".join([head, table(rows), "\n".join(_notes(sized, device))])


def _notes(sized: Sizing, device: Device) -> list[str]:
    notes = [f"Here it would run on {device.name} in {device.dtype}."]
    windows = sorted({window for window in sized.windows if window is not None})
    if windows:
        few = sum(window is not None for window in sized.windows)
        shown = " or ".join(f"{window:,}" for window in windows)
        notes.append(
            f"{few} of {len(sized.windows)} layers see only the last {shown} tokens; there too, Keepwarm keeps the K "
            "and V of all tokens."
        )
    notes.append("What device_kv has no room for goes to host_kv and disk_kv, and comes back from there.")
    return notes


def verdict(here: Sizes, question: Question, room: Room) -> Finding:
    """Whether so many sessions fit in the number format that would be used here, and what to set for them."""
    number = question.sessions or 1
    needed, left = number * here.session, max(0, room.memory - here.weights - WEIGHTS_MARGIN)
    sessions = f"{count(number, 'session')} of {question.context:,} tokens"
    detail = f"{sessions} in {here.dtype} {'takes' if number == 1 else 'take'} {size(needed)} of cache"
    if here.weights + WEIGHTS_MARGIN > room.memory:
        short = f"the weights alone are {size(here.weights)}, and {size(room.memory)} of memory are available"
        fix = "choose a smaller model" + (", or --dtype bfloat16" if here.dtype == "float32" else "")
        return Finding("problem", "fit", short, fix)
    if needed <= here.budget and here.budget <= left:
        return ok("fit", f"{detail}, and device_kv is {size(here.budget)}")
    if here.in_budget > 0 and number <= here.warm and here.budget <= left:
        more = f"device_kv, {size(here.budget)}, holds {here.in_budget:,} of them at a time"
        return ok("fit", f"{detail}; {more}, and the others stay warm in host_kv and disk_kv")
    setting = f"--device-kv {-(-needed // MIB)}MiB"
    if needed <= left:
        more = f"{detail}, and device_kv is {size(here.budget)}"
        return Finding("warn", "fit", more, f"start with {setting}; the memory has room for it")
    block = EngineConfig(cache_dir="").block_size
    length = left // number // (block * here.token) * block
    cold = number * here.cold
    fixes = [f"--disk-kv {-(-cold // MIB)}MiB keeps them all warm"] if cold <= room.disk and here.in_budget else []
    fixes += [f"at most {here.in_memory:,} such sessions"] if here.in_memory else []
    fixes += [f"at most {length:,} tokens each (--context {length})"] if length else []
    fixes += ["--dtype bfloat16"] if here.dtype == "float32" else []
    many = f"{detail}, and beside the weights {size(left)} of memory are available"
    return Finding("problem", "fit", many, ", or ".join([*fixes, "a smaller model"]))
