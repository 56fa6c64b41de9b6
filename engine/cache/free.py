"""Which slots of the pool are unused, and which of them to take next. Knows nothing of what blocks hold."""

from __future__ import annotations

import re
from collections.abc import Iterable

_RUN = re.compile(b"\x01+")


class FreeBlocks:
    """The free slots of 0 … total - 1, kept as a byte map (1 is free) so that runs are found at C speed."""

    def __init__(self, total: int, used: Iterable[int] = ()) -> None:
        self._map = bytearray(b"\x01" * total)
        for block in used:
            self._map[block] = 0
        self._count = self._map.count(1)

    def __len__(self) -> int:
        return self._count

    def ids(self) -> list[int]:
        """The free slots, ascending."""
        return [index for index, free in enumerate(self._map) if free]

    def add(self, block: int) -> None:
        """Give a slot back."""
        if self._map[block]:
            raise RuntimeError(f"block {block} was freed twice")
        self._map[block] = 1
        self._count += 1

    def take(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` slots, so that sequences tend to lie in consecutive ones.

        The neighbours of slot `after` go first. A new run starts in the middle of the largest free run (neither its
        own growth nor that of the sequence before it is then in the way), and several runs are joined if none is
        large enough. Raises `RuntimeError` when fewer are free: the caller makes room first.
        """
        if count > self._count:
            raise RuntimeError(f"{count} blocks wanted, {self._count} free")
        taken: list[int] = []
        while after is not None and len(taken) < count and after + 1 < len(self._map) and self._map[after + 1]:
            after += 1
            taken.append(self._pick(after))
        while len(taken) < count:
            runs = [run.span() for run in _RUN.finditer(self._map)]
            start, end = max(runs, key=lambda run: run[1] - run[0])
            wanted = min(count - len(taken), end - start)
            start += (end - start - wanted) // 2
            taken += [self._pick(block) for block in range(start, start + wanted)]
        return taken

    def _pick(self, block: int) -> int:
        self._map[block] = 0
        self._count -= 1
        return block
