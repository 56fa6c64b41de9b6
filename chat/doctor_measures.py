"""Numbers that follow from a server's figures: where the time goes, how many replies run at once, what is reused.

Knows no threshold and no sentence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from chat.figures import RecentReply, ServerFigures
from engine.protocol import Snapshot


@dataclass(frozen=True)
class Waits:
    """Where the time to the first token goes, in shares of it: waiting, reading, and outside the engine."""

    waiting: float
    reading: float
    outside: float

    @classmethod
    def of(cls, replies: Sequence[RecentReply]) -> Waits:
        """The shares over all of `replies` together."""
        waiting = sum(reply.queue_s for reply in replies)
        reading = sum(reply.read_s or 0.0 for reply in replies)
        outside = sum(max(0.0, (reply.ttft_s or 0.0) - reply.queue_s - (reply.read_s or 0.0)) for reply in replies)
        total = waiting + reading + outside or 1.0
        return cls(waiting / total, reading / total, outside / total)


def reuse(replies: Sequence[RecentReply]) -> float:
    """The share of the prompts' tokens that was found in the cache."""
    prompts = sum(reply.prompt_tokens for reply in replies)
    return sum(reply.reused_tokens for reply in replies) / prompts if prompts else 0.0


def reading_speed(replies: Sequence[RecentReply]) -> float:
    """Tokens read per second while a prompt was read; 0 where none was."""
    read_s = sum(reply.read_s or 0.0 for reply in replies)
    return sum(reply.computed_tokens for reply in replies) / read_s if read_s else 0.0


def read_again(replies: Sequence[RecentReply]) -> float:
    """The share of all that went through the model that had to go through it again."""
    again = sum(reply.recomputed_tokens for reply in replies)
    return again / (again + sum(reply.computed_tokens + reply.output_tokens for reply in replies) or 1)


def by_concurrency(replies: Sequence[RecentReply]) -> dict[int, tuple[float, float]]:
    """Seconds during which so many replies were written at the same time, and the tokens written in them.

    A reply is taken to be written evenly from its first text to its end.
    """
    changes: list[tuple[float, int, float]] = []
    for reply in replies:
        begun, ended = _written(reply)
        if ended > begun:
            rate = (reply.output_tokens - 1) / (ended - begun)
            changes += [(begun, 1, rate), (ended, -1, -rate)]
    found: defaultdict[int, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    count, rate, before = 0, 0.0, 0.0
    for at, more, change in sorted(changes):
        if count:
            seconds, tokens = found[count]
            found[count] = (seconds + at - before, tokens + rate * (at - before))
        count, rate, before = count + more, rate + change, at
    return {count: seen for count, seen in found.items() if seen[0] > 0}


def together(replies: Sequence[RecentReply]) -> float:
    """How many replies were written at the same time, on average while any was."""
    seen = by_concurrency(replies)
    total = sum(seconds for seconds, _ in seen.values())
    return sum(count * seconds for count, (seconds, _) in seen.items()) / total if total else 1.0


def read_beside(replies: Sequence[RecentReply]) -> float:
    """The share of the time in which replies are written that somebody else's prompt is read in."""
    written = beside = 0.0
    for reply in replies:
        begun, ended = _written(reply)
        written += ended - begun
        counted = begun  # so that two who read at the same time count once
        for first, last in sorted(_read(other) for other in replies if other is not reply):
            overlap = min(last, ended) - max(first, counted)
            if overlap > 0:
                beside, counted = beside + overlap, min(last, ended)
    return beside / written if written else 0.0


def room(snapshot: Snapshot) -> float:
    """The share of a model's blocks that no running reply holds, for the model that has the least."""
    shares = [(model.free_blocks + model.idle_blocks) / (model.total_blocks or 1) for model in snapshot.models]
    return min(shares, default=1.0)


def weight_bytes(figures: ServerFigures) -> int:
    """Bytes of the weights, where one model is all there is; else 0."""
    models = figures.snapshot.models if figures.snapshot is not None else []
    return models[0].weight_bytes if len(models) == 1 else 0


def _written(reply: RecentReply) -> tuple[float, float]:
    """When the reply was written, from its first text on; nothing where there was only one token."""
    if reply.ttft_s is None or reply.output_tokens < 2:
        return reply.ended_at, reply.ended_at
    return reply.ended_at - reply.total_s + reply.ttft_s, reply.ended_at


def _read(reply: RecentReply) -> tuple[float, float]:
    """When the prompt was read."""
    begun = reply.ended_at - reply.total_s + reply.queue_s
    return begun, begun + (reply.read_s or 0.0)
