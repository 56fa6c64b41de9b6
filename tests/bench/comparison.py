"""Figures of several servers beside each other: tables, ratios, and which goals they meet. It measures nothing."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.bench.cache_report import Goal
from tests.bench.peers import OURS, OURS_INT4

Found = dict[str, dict[str, list[float]]]  # server → figure → its rounds

CONTEXTS, PROMPTS = (64, 512, 2048), (512, 2048)
P50, P95 = "replay: returning TTFT p50, s", "replay: returning TTFT p95, s"
CROWD_P50, CROWD_P95 = "64 chats at 10%: returning TTFT p50, s", "64 chats at 10%: returning TTFT p95, s"
COLD, MEMORY = "start to first token, s", "memory after the replay, MiB"
SECONDS, BYTES = ", s", ", MiB"  # ends of the names of figures that are better when they are less


@dataclass(frozen=True)
class Aim:
    """A ratio that is wanted: `ours` of one of our servers to `theirs` of a peer, at most or at least `limit`."""

    name: str
    server: str
    ours: str
    peer: str
    theirs: str
    limit: float
    at_most: bool

    def of(self, found: Found) -> Goal | str:
        """The goal with what was found, or a sentence that says why there is none."""
        ours, theirs = found.get(self.server, {}).get(self.ours), found.get(self.peer, {}).get(self.theirs)
        for name, values in ((self.server, ours), (self.peer, theirs)):
            if not values:
                return f"{self.name}: not measured, there is no figure of {name}"
        assert ours is not None and theirs is not None
        return Goal(self.name, statistics.median(ours) / statistics.median(theirs), self.limit, self.at_most)


def _more(server: str, figure: str, peer: str, limit: float) -> Aim:
    return Aim(f"{figure.rsplit(',', 1)[0]}: {server} / {peer}", server, figure, peer, figure, limit, at_most=False)


def _less(ours: str, theirs: str, limit: float) -> Aim:
    name = ours.rsplit(",", 1)[0] + f": {OURS} / vllm" + ("" if ours == theirs else ", all resident")
    return Aim(name, OURS, ours, "vllm", theirs, limit, at_most=True)


AIMS = (
    *(_more(OURS_INT4, f"decode at {context}, tok/s", "llama.cpp", 1.0) for context in CONTEXTS),
    *(_more(OURS, f"decode at {context}, tok/s", "vllm", 1.5) for context in CONTEXTS),
    *(_more(OURS, f"prefill of {length}, tok/s", "vllm", 0.9) for length in PROMPTS),
    _more(OURS, "16 at once, tok/s", "vllm", 1.1),
    _less(P50, P50, 0.75),
    _less(P95, P95, 0.75),
    _less(CROWD_P50, P50, 1.0),
    _less(CROWD_P95, P95, 1.0),
    _less(COLD, COLD, 0.2),
    _less(MEMORY, MEMORY, 1.0),
)


def judge(found: Found) -> tuple[list[Goal], list[str]]:
    """Goals for which there are both figures, and a sentence for each of the others."""
    judged = [aim.of(found) for aim in AIMS]
    return [goal for goal in judged if isinstance(goal, Goal)], [goal for goal in judged if isinstance(goal, str)]


def times_better(figure: str, ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """How many times better the median of ours is; None where theirs or ours is nothing."""
    mine, other = statistics.median(ours), statistics.median(theirs)
    if not mine or not other:
        return None
    return other / mine if figure.endswith((SECONDS, BYTES)) else mine / other


def spread(values: Sequence[float]) -> str:
    """The median, and with more than one value the least and the greatest."""
    middle = _short(statistics.median(values))
    return f"{middle} ({_short(min(values))}–{_short(max(values))})" if len(values) > 1 else middle


def rows(found: Found, names: Sequence[str]) -> list[list[str]]:
    """A row per figure, in the order in which they were found: its name, and median and spread of each server."""
    table = []
    for figure in _figures(found, names):
        cells = [found[name].get(figure) for name in names]
        table.append([figure, *(spread(values) if values else "" for values in cells)])
    return table


def ratios(found: Found, names: Sequence[str], ours: str) -> list[list[str]]:
    """A row per figure that ours has: how many times better it is than each of the others'."""
    table = []
    for figure in _figures(found, [ours]):
        cells = []
        for name in names:
            theirs = found[name].get(figure)
            ratio = times_better(figure, found[ours][figure], theirs) if theirs and "," in figure else None
            cells.append("" if ratio is None else f"{ratio:.2f}x")
        if any(cells):
            table.append([figure.rsplit(",", 1)[0], *cells])
    return table


def _figures(found: Found, names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(figure for name in names for figure in found.get(name, {})))


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
