"""Answers from a running server's own figures: is the first token late, are tokens slow, is the memory full?

Each answer is a function of the figures alone, with the numbers that it rests on in its text. Knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from chat.doctor import Finding, ok
from chat.doctor_measures import (
    Waits,
    by_concurrency,
    read_again,
    read_beside,
    reading_speed,
    reuse,
    room,
    together,
    weight_bytes,
)
from chat.doctor_tiers import below, came_from, missed, raised, went
from chat.figures import RecentReply, ServerFigures
from engine.protocol import Snapshot
from engine.words import size

ENOUGH_REPLIES = 3  # below that a median says nothing
FIRST_TOKEN_HIGH_S = 1.0  # people notice that they wait
PER_TOKEN_HIGH_S = 0.15  # hardly faster than people read
LOW_REUSE = 0.5  # of the prompts' tokens
LITTLE_ROOM = 0.1  # of the cache: below that, requests that wait do so for room
MUCH_AGAIN = 0.05  # of the tokens that went through the model
BUSY = 1.5  # threads of the whole machine that want each core
SHARED = 1.5  # replies written at the same time, on average
MUCH_BESIDE = 0.3  # of the time in which replies are written, with others' prompts read meanwhile
FLAT = 1.2  # times as many tokens per second together as alone; below that, more at once brings nothing
ENOUGH_S = 2.0  # of writing, to tell how fast it goes

TTFT, TPOT, MEMORY, THROUGHPUT = "first token (TTFT)", "each token (TPOT)", "memory", "throughput"
FEWER = "send fewer requests at the same time"
CLOSE = "close other programs, or give Keepwarm more cores"
LESS_WORK = "a smaller model, or a GPU (--device), needs less time for the same"
SAME_START = "begin all chats with the same system prompt, and keep what changes, such as a date, out of it"


def answers(figures: ServerFigures) -> list[Finding]:
    """The three questions, the last one in two parts."""
    return [first_token(figures), per_token(figures), memory(figures), throughput(figures)]


# --- is the first token late? -----------------------------------------------------------------------------------------


def first_token(figures: ServerFigures) -> Finding:
    """Does it take too long until a reply begins, and why."""
    replies = [reply for reply in figures.replies if reply.first and reply.ttft_s is not None]
    if len(replies) < ENOUGH_REPLIES:
        return _too_few(TTFT, len(replies), figures)
    times, waits = [reply.ttft_s or 0.0 for reply in replies], Waits.of(replies)
    detail = (
        f"{_spread(times)} over the last {len(replies)} replies: {waits.waiting:.0%} waiting to be let in, "
        f"{waits.reading:.0%} reading, {waits.outside:.0%} outside the engine; {reuse(replies):.0%} of the prompts "
        "were reused"
    )
    if median(times) <= FIRST_TOKEN_HIGH_S:
        return ok(TTFT, detail)
    why, fix = _why_late(figures, replies, waits)
    return Finding("warn", TTFT, f"{detail}. It is late because {why}", fix)


def _why_late(figures: ServerFigures, replies: Sequence[RecentReply], waits: Waits) -> tuple[str, str]:
    """The reason behind the largest share."""
    largest = max(waits.waiting, waits.reading, waits.outside)
    if waits.waiting == largest:
        if _crowded(figures.snapshot):
            return "the cache is full, so that requests wait for each other", _more_memory(figures.snapshot)
        return "the prompts of others are read first", f"{FEWER}, or shorter prompts"
    if busy := _busy(figures):
        return busy, CLOSE
    if waits.outside == largest:
        return (
            "finding the chat, making tokens of it and storing it takes that long",
            "put the data directory on a fast local disk with --data-dir, and close other programs",
        )
    return _why_long(figures, replies)


def _why_long(figures: ServerFigures, replies: Sequence[RecentReply]) -> tuple[str, str]:
    """Why so much is read."""
    count = sum(reply.computed_tokens for reply in replies) / len(replies)
    each = f"{count:,.0f} tokens of each prompt are read at {reading_speed(replies):,.0f} tokens/s"
    if reuse(replies) >= LOW_REUSE:
        return f"{each}, though the rest is reused", LESS_WORK
    if lost := missed(figures, replies):
        why, fix = lost
        return f"{each}; {why}", fix
    return (
        f"{each}, most of it for the first time",
        f"{SAME_START}; `python app.py doctor` says whether the model's template rewrites earlier messages",
    )


# --- are tokens slow? -------------------------------------------------------------------------------------------------


def per_token(figures: ServerFigures) -> Finding:
    """Does each token take too long, and why."""
    replies = [reply for reply in figures.replies if reply.tpot_s is not None]
    if len(replies) < ENOUGH_REPLIES:
        return _too_few(TPOT, len(replies), figures)
    times = [reply.tpot_s or 0.0 for reply in replies]
    detail = f"{_spread(times)} over the last {len(replies)} replies, {together(replies):.1f} at a time on average"
    if (weights := weight_bytes(figures)) and median(times) > 0:
        detail += f"; every step reads {size(weights)} of weights, which makes {size(weights / median(times))}/s"
    if median(times) <= PER_TOKEN_HIGH_S:
        return ok(TPOT, detail)
    why, fix = _why_slow(figures, replies)
    return Finding("warn", TPOT, f"{detail}. It is slow because {why}", fix)


def _why_slow(figures: ServerFigures, replies: Sequence[RecentReply]) -> tuple[str, str]:
    """The first reason that applies, those that are easy to mend first."""
    capabilities, beside = figures.capabilities, read_beside(figures.replies)
    on_cpu = capabilities is not None and capabilities.device == "cpu"
    if read_again(replies) > MUCH_AGAIN:
        again = f"{read_again(replies):.0%} of what the model reads and writes is read again"
        return f"the cache is too small for all replies at once, and {again}", _more_memory(figures.snapshot)
    if busy := _busy(figures):
        return busy, CLOSE
    if on_cpu and capabilities is not None and capabilities.threads < figures.cores:
        return (
            f"the model computes on {capabilities.threads} of {figures.cores} cores",
            "take OMP_NUM_THREADS out of the environment and start again",
        )
    if beside > MUCH_BESIDE:
        return f"others' prompts are read in {beside:.0%} of the time", f"{FEWER}, or shorter prompts"
    if together(replies) > SHARED:
        return f"{together(replies):.1f} replies share every step", FEWER
    if on_cpu and capabilities is not None and capabilities.dtype == "float32":
        fix = f"--dtype bfloat16 halves that where the CPU multiplies it, as `python app.py doctor` tells; {LESS_WORK}"
        return "the weights are read in float32", fix
    return "the model is large for this device", LESS_WORK


# --- is the memory full, or the throughput flat? ----------------------------------------------------------------------


def memory(figures: ServerFigures) -> Finding:
    """Are the tiers too small for what is asked of them."""
    snapshot = figures.snapshot
    if snapshot is None or not snapshot.total_blocks:
        return ok(MEMORY, "not enough data yet: the engine is not ready")
    total, replies = snapshot.total_blocks, [reply for reply in figures.replies if reply.first]
    parts = [
        f"{1 - snapshot.free_blocks / total:.0%} of the device's {size(snapshot.pool_bytes)} holds chats, "
        f"{snapshot.leased_blocks / total:.0%} is held by replies being written",
        below(snapshot),
        f"{snapshot.running} run, {snapshot.waiting} wait",
        came_from(replies),
        f"since the start {snapshot.preemptions:,} replies had to step back",
    ]
    detail = ", ".join(filter(None, ["; ".join(filter(None, parts)), went(figures)]))
    if snapshot.waiting and _crowded(snapshot):
        return Finding("warn", MEMORY, f"{detail}. It is full: requests wait for room", _more_memory(snapshot))
    if snapshot.preemptions:
        return Finding("warn", MEMORY, f"{detail}. It was too small for all replies at once", _more_memory(snapshot))
    if len(replies) >= ENOUGH_REPLIES and (lost := missed(figures, replies)):
        why, fix = lost
        return Finding("warn", MEMORY, f"{detail}. {why}", fix)
    return ok(MEMORY, detail)


def throughput(figures: ServerFigures) -> Finding:
    """Do several replies at once bring more tokens per second than one alone, and if not, why."""
    seen = sorted(by_concurrency(figures.replies).items())
    speeds = {count: tokens / seconds for count, (seconds, tokens) in seen if seconds >= ENOUGH_S}
    more = [speed for count, speed in speeds.items() if count > 1]
    if 1 not in speeds or not more:
        return ok(THROUGHPUT, "not enough data yet: it takes replies alone and replies at the same time to compare")
    detail = "; ".join(f"{count} at a time: {speed:,.0f} tokens/s" for count, speed in speeds.items())
    if max(more) >= FLAT * speeds[1]:
        return ok(THROUGHPUT, detail)
    why, fix = _why_flat(figures)
    return Finding("warn", THROUGHPUT, f"{detail}. More at once hardly brings more because {why}", fix)


def _why_flat(figures: ServerFigures) -> tuple[str, str]:
    snapshot, beside = figures.snapshot, read_beside(figures.replies)
    if snapshot is not None and (snapshot.preemptions or (snapshot.waiting and _crowded(snapshot))):
        return "the cache is full, and replies wait for each other", _more_memory(snapshot)
    if busy := _busy(figures):
        return busy, CLOSE
    if beside > MUCH_BESIDE:
        return f"others' prompts are read in {beside:.0%} of the time", SAME_START
    return "one alone keeps the device busy", LESS_WORK


# --- words ------------------------------------------------------------------------------------------------------------


def _too_few(what: str, count: int, figures: ServerFigures) -> Finding:
    replies = "1 reply" if count == 1 else f"{count or 'no'} replies"
    since = f"since the server started {duration(figures.uptime_s)} ago"
    return ok(what, f"not enough data yet: {replies} {since}, and {ENOUGH_REPLIES} are needed")


def _spread(times: Sequence[float]) -> str:
    late = sorted(times)[min(len(times) - 1, int(0.95 * len(times)))]
    return f"median {seconds(median(times))}, 95% within {seconds(late)}"


def _crowded(snapshot: Snapshot | None) -> bool:
    """Whether replies being written leave hardly any room; what is only kept for later would give way."""
    return snapshot is not None and room(snapshot) < LITTLE_ROOM


def _busy(figures: ServerFigures) -> str:
    if figures.load <= BUSY * figures.cores:
        return ""
    cores = "core" if figures.cores == 1 else "cores"
    return (
        f"the machine is busy: in the last minute {figures.load:.1f} threads wanted {figures.cores} {cores} on average"
    )


def _more_memory(snapshot: Snapshot | None) -> str:
    if snapshot is None:
        return "raise --device-kv"
    return raised("device", {"device": snapshot.budget_bytes})


def seconds(value: float) -> str:
    """A short time for people."""
    return f"{value * 1000:.0f} ms" if value < 0.1 else f"{value:.2f} s" if value < 10 else f"{value:.0f} s"


def duration(value: float) -> str:
    """A long time for people."""
    for unit, length in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if value >= 2 * length:
            return f"{value / length:.0f} {unit}"
    return f"{value:.0f} s"
