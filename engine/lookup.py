"""What may come next in a text that repeats itself: its last tokens are looked up where they came before.

A guess is worth a try because it can be checked in the pass that samples the next token anyway. Knows token ids, and
how often it was right; nothing of models, blocks or time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

LENGTHS = (4, 3, 2)  # of the runs of tokens that are looked up: the longer, the more likely what followed follows again
_PIECE = 1024  # tokens that are noted at a time, so that a long prompt holds up no step
_KEEP = 0.9  # what earlier guesses count for once another was checked


@dataclass(frozen=True)
class Guess:
    """What may come next, and how many of the last tokens were found before it."""

    token_ids: list[int]
    matched: int


class Lookup:
    """One sequence's runs of tokens by where they ended last, and the share of guesses that came true by their length.

    It grows with the sequence, whose tokens never change; about half a kilobyte a token.
    """

    def __init__(self) -> None:
        self._ends: dict[int, dict[tuple[int, ...], int]] = {length: {} for length in LENGTHS}
        self._noted = 0  # the runs that end at positions up to this one are noted
        self._right = dict.fromkeys(LENGTHS, 1.0)  # tokens guessed right, the latest counting most
        self._tried = dict.fromkeys(LENGTHS, 2.0)

    def guess(self, token_ids: Sequence[int], most: int, stop_ids: Collection[int] = ()) -> Guess | None:
        """Up to `most` tokens that may follow `token_ids`, none of them one of `stop_ids`; None: nothing is known.

        `token_ids` continues what was given the last time. Where what followed reaches the end, it goes on from its
        own beginning.
        """
        self._note(token_ids)
        for length in LENGTHS:
            end = self._ends[length].get(tuple(token_ids[-length:]))
            if end is None:
                continue
            found = list(token_ids[end : end + most])
            for index in range(len(found), most):
                found.append(found[index - (len(token_ids) - end)])
            cut = next((index for index, token in enumerate(found) if token in stop_ids), most)
            return Guess(found[:cut], length) if cut else None
        return None

    def share(self, matched: int) -> float:
        """How likely each further token of a guess is right, where `matched` tokens were found before it."""
        return self._right[matched] / self._tried[matched]

    def learn(self, matched: int, right: int, *, missed: bool) -> None:
        """So many tokens of a guess came true; `missed`: and then one did not."""
        self._right[matched] = self._right[matched] * _KEEP + right
        self._tried[matched] = self._tried[matched] * _KEEP + right + missed

    def _note(self, token_ids: Sequence[int]) -> None:
        first, last = self._noted + 1, min(len(token_ids) - 1, self._noted + _PIECE)
        for length, ends in self._ends.items():
            if last < max(first, length):
                continue
            low = max(first, length) - length
            runs = zip(*(token_ids[low + i : last - length + 1 + i] for i in range(length)), strict=True)
            ends.update(zip(runs, range(low + length, last + 1), strict=True))
        self._noted = max(self._noted, last)
