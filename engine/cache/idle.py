"""The blocks that nobody leases but that are still worth finding; the one owner of recency."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from cachetools import Cache, LRUCache

from engine.cache.block import Block

Order = Callable[[list[Block]], list[Block]]


class IdleBlocks(LRUCache[int, Block]):
    """Idle blocks by id, oldest first. `popitem` is the one place that chooses what goes next.

    It asks `order`, which is handed the blocks oldest first and returns them with the first to go first; without one
    the oldest goes. A chain is given back tail first, so that plain LRU order takes its end before its beginning: a
    block is leased whenever a child of it is, and so is never given back before one. Looking at an entry is no use.
    """

    def __init__(self, maxsize: int, order: Order | None = None) -> None:
        super().__init__(maxsize=maxsize)
        self._order = order
        self._queue: deque[Block] = deque()  # what `order` said last, while nothing has come since

    def __setitem__(self, block_id: int, block: Block) -> None:
        self.reconsider()
        super().__setitem__(block_id, block)

    def __getitem__(self, block_id: int) -> Block:
        block: Block = Cache.__getitem__(self, block_id)
        return block

    def give_back(self, chain: Iterable[Block]) -> None:
        """Put in the blocks of a chain, tail first; `chain` runs from head to tail."""
        for block in reversed(list(chain)):
            self[block.id] = block

    def popitem(self) -> tuple[int, Block]:
        """Take out the block that goes first. Raises `KeyError` when there is none."""
        if self._order is None or not self:
            return super().popitem()
        while True:
            if not self._queue:
                self._queue.extend(self.order())
            block = self._queue.popleft()
            if self.pop(block.id, None) is block:
                return block.id, block

    def reconsider(self) -> None:
        """What decides the order may have changed."""
        self._queue.clear()

    def order(self) -> list[Block]:
        """All blocks in the order in which `popitem` would take them."""
        blocks = self.oldest_first()
        return blocks if self._order is None else self._order(blocks)

    def oldest_first(self) -> list[Block]:
        """All blocks by when they were given back, each after those that continue it."""
        return list(self.values())
