"""One step's work as plain values: what the scheduler hands to a runner, and what it wants back.

This module knows nothing of requests, the prefix index or tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.protocol import Sampling


@dataclass(frozen=True)
class Draw:
    """One token to be sampled from a row's logits.

    `seed` is fixed for each sample when its request arrives; `(seed, position)` keys the random numbers, so that a
    sample draws the same ones whatever else runs. `position` is the index in the sequence of the token to be drawn.
    `prompt_ids` and `reply_ids` (with what is guessed before this position) are what the penalties look at; both may be
    live and must be read before the commit.
    """

    sampling: Sampling
    seed: int
    position: int
    prompt_ids: Sequence[int]
    reply_ids: Sequence[int]


@dataclass(frozen=True)
class Row:
    """A run of one sequence's tokens in one forward pass: `token_ids` at positions `start`, `start + 1`, …

    `block_ids` covers positions 0 … start + len(token_ids) - 1: position p lies in block `block_ids[p // block_size]`
    at slot `p % block_size`. No draws: no logits are wanted. Several: the step ends the prompt of a request with
    several samples, and all are sampled from the last logits. Or the last `guessed` tokens are a draft that was not
    sampled yet: then there is a draw after each of them and one before them, in this order.
    """

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    draws: Sequence[Draw]
    guessed: int = 0

    @property
    def draws_each(self) -> list[int]:
        """How many draws there are at each of the row's last tokens whose logits are wanted."""
        if not self.draws:
            return []
        return [1] * len(self.draws) if self.guessed else [len(self.draws)]


@dataclass(frozen=True)
class Batch:
    """The rows of one forward pass, packed in this order."""

    rows: Sequence[Row]

    @property
    def tokens(self) -> int:
        """Tokens that go through the model in this pass."""
        return sum(len(row.token_ids) for row in self.rows)


class Runner(Protocol):
    """What computes: the model with its pool."""

    def run(self, batch: Batch) -> list[list[int]]:
        """Sampled ids for each row, one for each draw. The K/V of all rows are in the pool when this returns."""

    def copy_tokens(self, source: int, target: int, count: int) -> None:
        """Copy the K/V of the first `count` tokens, all layers, from block `source` to block `target`."""
