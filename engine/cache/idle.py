"""The blocks that nobody leases but that are still worth finding; the one owner of recency."""

from __future__ import annotations

from collections.abc import Iterable

from cachetools import Cache, LRUCache

from engine.cache.block import Block


class IdleBlocks(LRUCache[int, Block]):
    """Idle blocks by id, oldest first. `popitem` is the one place that chooses what goes next.

    A chain is given back tail first, so that plain LRU order takes its end before its beginning: a block is leased
    whenever a child of it is, and so is never given back before one. Looking at an entry is not a use of it.
    """

    def __getitem__(self, block_id: int) -> Block:
        block: Block = Cache.__getitem__(self, block_id)
        return block

    def give_back(self, chain: Iterable[Block]) -> None:
        """Put in the blocks of a chain, tail first; `chain` runs from head to tail."""
        for block in reversed(list(chain)):
            self[block.id] = block

    def order(self) -> list[Block]:
        """All blocks in the order in which `popitem` would take them."""
        return list(self.values())
