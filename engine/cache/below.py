"""What a block manager needs of whatever lies below its pool. Knows nothing of host, disk or policies."""

from __future__ import annotations

from typing import Protocol

from engine.cache.block import Block, Lease


class Below(Protocol):
    """What lies below the pool, and decides who leaves it."""

    def order(self, idle: list[Block]) -> list[Block]:
        """The idle blocks, which come oldest first, with the first to go first; children before their parents."""

    def keep(self, block: Block) -> None:
        """Take a copy of a block, if that is worth it: its slot is about to be reused."""

    def released(self, lease: Lease) -> None:
        """A lease ends; its blocks still say all that they hold."""
