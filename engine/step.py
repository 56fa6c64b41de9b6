"""One forward pass in the making: which tokens of which sequences, as far as the budget goes. It decides no order."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.batch import Batch, Row
from engine.lookup import Guess
from engine.sequence import Sequence


@dataclass
class Part:
    """A running sequence's tokens in a step, and the `draft` that is to be checked behind them.

    `guess` is what was looked up, whether or not it became the draft.
    """

    sequence: Sequence
    start: int
    token_ids: list[int]
    draft: list[int] = field(default_factory=list)
    guess: Guess | None = None

    @property
    def writes(self) -> bool:
        """Whether it goes on with a reply: its one token is the one that was sampled last."""
        return not self.sequence.reading

    def row(self, block_size: int) -> Row:
        """What the runner gets. The draft's blocks must be there."""
        sequence, token_ids = self.sequence, [*self.token_ids, *self.draft]
        end = self.start + len(self.token_ids)
        drawing = sequence.request.drawing(sequence) if end == len(sequence.token_ids) else []
        draws = [sample.draw() for sample in drawing]
        draws += [sequence.draw(self.draft[: index + 1]) for index in range(len(self.draft))]
        blocks = sequence.held.block_ids(end + len(self.draft), block_size)
        return Row(token_ids, self.start, blocks, draws, len(self.draft))

    def confirmed(self, sampled: list[int]) -> list[int]:
        """Of the ids sampled at each of its tokens, those that plain decoding would have sampled too.

        Each was sampled behind the draft's tokens before it, so the first that is not the draft's is the last.
        """
        right = 0
        while right < len(self.draft) and self.draft[right] == sampled[right]:
            right += 1
        return sampled[: right + 1]


class Step:
    """The parts of a step, in order, and how many tokens it has left."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.parts: list[Part] = []

    def add(self, sequence: Sequence) -> None:
        """As many of the sequence's next tokens as the budget allows."""
        start = sequence.held.computed
        token_ids = sequence.token_ids[start : start + self.budget]
        self.parts.append(Part(sequence, start, token_ids))
        self.budget -= len(token_ids)

    def batch(self, block_size: int) -> Batch | None:
        """What the runner gets; None when there is nothing to run."""
        return Batch([part.row(block_size) for part in self.parts]) if self.parts else None
