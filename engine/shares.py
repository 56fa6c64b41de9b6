"""How models share one budget of KV memory: pure numbers in, numbers out. Knows no pool and no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LEAST_USUAL = 256 * 2**20  # bytes


@dataclass(frozen=True)
class Holding:
    """What a model's pool holds: `used_bytes` in all, of which `leased_bytes` belong to running requests."""

    used_bytes: int
    leased_bytes: int


def split(budget: int, others: Sequence[Holding], needed: int = 0) -> tuple[list[int], int]:
    """What the `others` keep of `budget` bytes, the most recently used first, and what is left for the model in use.

    The others keep what they have used, up to half the budget for all of them together, so that a chat finds its cache
    again after an hour with another model; less where the model in use has `needed` more. Running requests keep what
    they lease whatever that makes.
    """
    spare = max(0, min(budget // 2, budget - needed))
    kept = []
    for holding in others:
        keep = max(holding.leased_bytes, min(holding.used_bytes, spare))
        kept.append(keep)
        spare = max(0, spare - keep)
    return kept, max(0, budget - sum(kept))


def usual_bytes(context_length: int, block_size: int, block_bytes: int, free: int | None = None) -> int:
    """The budget that serves a model well where none is set: two full contexts, and at least `LEAST_USUAL`.

    With `free` bytes of memory, no more than half of them: a model of a very long context gets less than it could use.
    """
    usual = 2 * -(-context_length // block_size) * block_bytes
    return max(usual if free is None else min(usual, free // 2), LEAST_USUAL)
