"""Guessed tokens: how many to have checked in a step, so that replies come sooner and never later.

A guess is checked by forwarding it behind the token that was sampled last. That costs a little, and is worth it as far
as it saves more steps than it makes longer; both are measured. It takes only what nobody else needs: tokens that a
step has left, and blocks that are free.
"""

from __future__ import annotations

import math
from collections import deque

from engine.cache.manager import BlockManager
from engine.step import Part, Step

MOST = 8  # tokens of a guess, where that is left to us
FEW = 4  # running sequences: with more, a step has enough to do
_SAMPLES = 5  # measured steps of one size that are kept
_STALE = 256  # steps after which a size is measured anew when it next seems worth it
_WORTH = 1.02  # times as many tokens a second: less is within what measuring errs


class StepCosts:
    """How long steps of few tokens take, by rows and tokens, from those that were measured lately.

    A model's own times, unlike `StepTimes`: one row, few and many are computed by different kernels, so that a
    straight line through all of them is right for none.
    """

    def __init__(self) -> None:
        self._measured: dict[int, dict[int, deque[float]]] = {}
        self._last: dict[tuple[int, int], int] = {}
        self._steps = 0

    def observe(self, rows: int, tokens: int, seconds: float) -> None:
        """A step of `rows` sequences that write took so long; what no clock can have measured is ignored."""
        if not 0 < seconds < math.inf:
            return
        self._steps += 1
        cells = self._measured.setdefault(rows, {})
        cells.setdefault(tokens, deque(maxlen=_SAMPLES)).append(seconds)
        self._last[rows, tokens] = self._steps
        for size in [size for size in cells if self._last[rows, size] <= self._steps - _STALE]:
            del cells[size]

    def seconds(self, rows: int, tokens: int) -> float:
        """How long such a step would take: between two measured ones on the line through them.

        Beyond the largest as long as that, so that it is tried; 0: nothing was measured.
        """
        cells = self._measured.get(rows, {})
        if tokens in cells:
            return _middle(cells[tokens])
        below = max((size for size in cells if size < tokens), default=None)
        above = min((size for size in cells if size > tokens), default=None)
        if below is None or above is None:
            near = below if above is None else above
            return 0.0 if near is None else _middle(cells[near])
        low, high = _middle(cells[below]), _middle(cells[above])
        return low + (high - low) * (tokens - below) / (above - below)


class Speculation:
    """The one owner of drafts: what is guessed, how much of it is checked, and how much was right.

    `most` is how many tokens a guess may have, 0 for none at all; None leaves it to what is measured, up to `MOST`.
    """

    def __init__(self, most: int | None, manager: BlockManager) -> None:
        if most is not None and most < 0:
            raise ValueError(f"speculate is {most}; it must be at least 0")
        self._measures = most is None
        self._most = MOST if most is None else most
        self._manager = manager
        self._costs = StepCosts()
        self.drafted_tokens = self.accepted_tokens = 0

    def draft(self, step: Step) -> None:
        """Have guesses checked in a step that is planned otherwise, as far as it has room for them and they pay."""
        if not self._most or (self._measures and len(step.parts) > FEW):
            return
        expected, reads = 0.0, any(not part.writes for part in step.parts)
        for part in step.parts:
            if not part.writes:
                continue
            expected += 1
            sequence = part.sequence
            most = min(self._most, step.budget, sequence.tokens_left - 1)
            if most < 1:
                continue
            guess = part.guess = sequence.lookup.guess(sequence.token_ids, most, sequence.request.stop_ids)
            if guess is None:
                continue
            count = len(guess.token_ids)
            if self._measures and not reads:
                count = self._worth(step, expected, sequence.lookup.share(guess.matched), count)
            count = min(count, self._room(part))
            if count and self._manager.extend(sequence.held, len(sequence.token_ids) + count):
                part.draft = guess.token_ids[:count]
                step.budget -= count
                expected += sum(sequence.lookup.share(guess.matched) ** index for index in range(1, count + 1))

    def checked(self, part: Part, sampled: list[int]) -> list[int]:
        """What a part's sampled ids say of its guess; those that count. Not yet in the sequence."""
        confirmed = part.confirmed(sampled)
        right = len(confirmed) - 1
        if part.draft:
            self.drafted_tokens += len(part.draft)
            self.accepted_tokens += right
            part.sequence.checked(len(part.draft), right)
        if part.guess is not None:  # one that was not tried is looked at all the same: it may become worth it
            tried = len(part.draft)
            right = right if tried else int(part.guess.token_ids[0] == sampled[0])
            part.sequence.lookup.learn(part.guess.matched, right, missed=right < max(tried, 1))
        return confirmed

    def took(self, step: Step, seconds: float) -> None:
        """A step took so long."""
        if self._measures and len(step.parts) <= FEW and all(part.writes for part in step.parts):
            self._costs.observe(len(step.parts), _tokens(step), seconds)

    def _room(self, part: Part) -> int:
        """How many tokens more a part has blocks for, its own and free ones: nothing is evicted for a guess."""
        blocks = len(part.sequence.held.blocks) + len(self._manager.free)
        return blocks * self._manager.block_size - len(part.sequence.token_ids)

    def _worth(self, step: Step, expected: float, share: float, most: int) -> int:
        """The length of a guess that gives most tokens a second, where the step gives `expected` without it."""
        rows, tokens = len(step.parts), _tokens(step)
        plain_s = self._costs.seconds(rows, tokens)
        best, most_worth, gain = 0, _WORTH, expected
        for count in range(1, most + 1):
            gain += share**count
            slower = self._costs.seconds(rows, tokens + count) / plain_s if plain_s else 1.0
            worth = gain / expected / slower
            if worth > most_worth:
                best, most_worth = count, worth
        return best


def _tokens(step: Step) -> int:
    return sum(len(part.token_ids) + len(part.draft) for part in step.parts)


def _middle(samples: deque[float]) -> float:
    return sorted(samples)[(len(samples) - 1) // 2]
