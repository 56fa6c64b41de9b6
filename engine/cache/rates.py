"""How long forward steps and copies take, learned from those that were measured; and what to load by that.

Knows no clock: all durations are passed in, in seconds. What no clock can have measured (nothing, less, no number) is
ignored.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from engine.config import Tier

Vector = tuple[float, float, float, float]

_SAMPLES = 5  # that a cell keeps
_CELLS = 64
_HALF_LIFE = 300  # steps after which a sample counts half
_LEAST = 0.001  # what it counts at least, so that hours of decoding do not unlearn prefill
_REFIT = 32  # steps at most until what they showed is used; a step of a new size is used at once
_RIDGE = 1e-5  # of a feature's own size: decides between features that nothing measured tells apart
_SLOWEST = 4.0  # times the expected duration: a copy that took longer was interrupted


def context_tokens(start: int, tokens: int) -> int:
    """How many positions so many tokens at positions `start` … read in all, each its own and those before it."""
    return tokens * start + tokens * (tokens + 1) // 2


@dataclass(frozen=True, slots=True)
class _Sample:
    number: int
    features: Vector
    seconds: float


def _middle(samples: Iterable[_Sample], rates: Vector) -> _Sample:
    """The one in the middle by its time relative to what `rates` foretell: a pause or a first step is none.

    Of two it is the quicker: what disturbs a step makes it longer.
    """
    order = sorted(samples, key=lambda sample: sample.seconds / (_dot(rates, sample.features) or 1.0))
    return order[(len(order) - 1) // 2]


class StepTimes:
    """How long a forward step takes: seconds = a + b tokens + c context tokens + d rows, none of them negative.

    Context tokens are the positions that each token reads, summed over the step's tokens (`context_tokens`); rows are
    its sequences. Measured steps are kept in cells by size, a few each. The one in the middle of its cell counts,
    exponentially less as it ages but never nothing: else prefill would be unlearned while only decode steps are
    measured. The fit weighs relative errors, so that a decode step counts as much as a long chunk.
    """

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int, int], deque[_Sample]] = {}
        self._steps = 0
        self._rates: Vector = (0.0, 0.0, 0.0, 0.0)
        self._refit_at = 0  # steps; a fit takes half a millisecond, too much for every step

    def observe(self, tokens: int, context_tokens: int, rows: int, seconds: float) -> None:
        """A step was measured."""
        if tokens <= 0 or not 0 < seconds < math.inf:
            return
        self._steps += 1
        name = (tokens.bit_length(), (context_tokens // tokens).bit_length() // 2, rows.bit_length())
        if name not in self._cells:
            if len(self._cells) >= _CELLS:
                del self._cells[min(self._cells, key=lambda known: self._cells[known][-1].number)]
            self._cells[name] = deque(maxlen=_SAMPLES)
            self._refit_at = 0
        features = (1.0, float(tokens), float(context_tokens), float(rows))
        self._cells[name].append(_Sample(self._steps, features, seconds))

    def seconds(self, tokens: int, context_tokens: int, rows: int) -> float | None:
        """How long such a step would take; None: nothing was measured."""
        return self._predict((1.0, float(tokens), float(context_tokens), float(rows)))

    def prefill_seconds(self, start: int, tokens: int, chunk: int) -> float | None:
        """How long one sequence's tokens at positions `start` … take, in steps of at most `chunk` tokens."""
        if tokens <= 0:
            return 0.0
        steps = -(-tokens // max(1, chunk))
        return self._predict((float(steps), float(tokens), float(context_tokens(start, tokens)), float(steps)))

    def _predict(self, features: Vector) -> float | None:
        if not self._cells:
            return None
        if self._steps >= self._refit_at:
            self._rates = self._fit()
            self._refit_at = self._steps + min(_REFIT, 1 + self._steps // 8)
        return _dot(self._rates, features)

    def _fit(self) -> Vector:
        points, weights = [], []
        for cell in self._cells.values():
            sample = _middle(cell, self._rates)
            points.append([value / sample.seconds for value in sample.features])
            age = self._steps - sample.number
            weights.append(len(cell) / _SAMPLES * max(_LEAST, 0.5 ** (age / _HALF_LIFE)))
        return _non_negative_fit(points, weights)


class MovingRate:
    """An amount (bytes, tokens) per second, over the latest measurements; each counts by its amount."""

    def __init__(self, keep: float = 0.9) -> None:
        """Each measurement counts `keep` times as much once another has come."""
        self._keep = keep
        self._amount = 0.0
        self._seconds = 0.0

    def observe(self, amount: float, seconds: float) -> None:
        """So much was done in so long."""
        if not (amount > 0 and 0 < seconds < math.inf):
            return
        expected = self.seconds_for(amount)
        if expected is not None:
            seconds = min(seconds, expected * _SLOWEST)
        self._amount = self._amount * self._keep + amount
        self._seconds = self._seconds * self._keep + seconds

    def seconds_for(self, amount: float) -> float | None:
        """How long so much would take; None: nothing was measured."""
        return amount * self._seconds / self._amount if self._amount else None


@dataclass(frozen=True)
class Run:
    """Consecutive blocks of a chain that lie in one tier, and how long loading them all takes; None: unknown."""

    tier: Tier
    blocks: int
    load_s: float | None


def how_many_to_load(
    runs: Sequence[Run],
    compute_seconds: Callable[[int, int], float | None],
    force: Literal["load", "recompute"] | None = None,
) -> int:
    """How many leading blocks of the `runs` to load, so that this and computing the other blocks takes least.

    `compute_seconds(first, blocks)` says how long computing so many blocks takes, counted from the runs' first block;
    None: unknown. What is unknown is loaded, and so measured; of equals, more is loaded. Only the ends of runs are
    tried: within one, each block takes as long to load and longer to compute than the one before it, so that its middle
    is never the best. `force` leaves no choice.
    """
    total = sum(run.blocks for run in runs)
    if force is not None:
        return total if force == "load" else 0
    best, best_s = 0, compute_seconds(0, total)
    loaded, load_s = 0, 0.0
    for run in runs:
        loaded += run.blocks
        compute_s = compute_seconds(loaded, total - loaded)
        if run.load_s is None or compute_s is None or best_s is None:
            return total
        load_s += run.load_s
        if load_s + compute_s <= best_s:
            best, best_s = loaded, load_s + compute_s
    return best


# --- least squares ----------------------------------------------------------------------------------------------------


def _non_negative_fit(points: Sequence[Sequence[float]], weights: Sequence[float]) -> Vector:
    """The non-negative rates for which `points @ rates` is closest to 1, by weighted squares.

    Of every choice of features the best fit is solved for, and the best that has no negative rate is taken: with four
    features that is exact, and quicker than an iteration.
    """
    size = range(4)
    gram = [[sum(w * p[i] * p[j] for p, w in zip(points, weights, strict=True)) for j in size] for i in size]
    wanted = [sum(w * p[i] for p, w in zip(points, weights, strict=True)) for i in size]
    for i in size:
        gram[i][i] *= 1 + _RIDGE
    best, most = [0.0] * 4, 0.0
    for count in (4, 3, 2, 1):
        for chosen in combinations([i for i in size if gram[i][i] > 0], count):
            part = _solve([[gram[i][j] for j in chosen] for i in chosen], [wanted[i] for i in chosen])
            explained = sum(value * wanted[i] for i, value in zip(chosen, part, strict=True))
            if min(part) >= 0 and explained > most:
                best, most = [0.0] * 4, explained
                for i, value in zip(chosen, part, strict=True):
                    best[i] = value
    return best[0], best[1], best[2], best[3]


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """The x of matrix @ x = right, for a positive definite matrix."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i, pivot in enumerate(rows):
        for row in rows[i + 1 :]:
            factor = row[i] / pivot[i]
            row[i:] = [a - factor * b for a, b in zip(row[i:], pivot[i:], strict=True)]
    found: list[float] = []
    for i in reversed(range(len(rows))):
        known = _dot(rows[i][i + 1 : -1], found)
        found.insert(0, (rows[i][-1] - known) / rows[i][i])
    return found
