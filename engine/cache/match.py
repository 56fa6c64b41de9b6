"""What was found of a prompt on the device. Plain values."""

from __future__ import annotations

from dataclasses import dataclass

from engine.cache.block import Block


@dataclass(frozen=True)
class Match:
    """What the index holds of a prompt: `full` blocks from the start, then `tail_tokens` leading tokens of `tail`.

    `adopt`: the tail can be continued in place; otherwise its tokens are copied. `reused` counts all of them.
    """

    full: tuple[Block, ...]
    reused: int
    tail: Block | None = None
    tail_tokens: int = 0
    adopt: bool = False

    def without_copy(self) -> Match:
        """The same without the copied tokens: a copy needs a block more than it saves."""
        return self if self.adopt else Match(self.full, self.reused - self.tail_tokens)
