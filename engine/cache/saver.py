"""What the last turns left behind goes to disk, session by session, while there is time. It decides when, not where."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

from engine.cache.tiers import ColdTiers

# A block by its parent's key and its own, and blocks that must not go for it; False: not now, or not at all.
SaveBlock = Callable[[bytes, bytes, frozenset[bytes]], bool]


class Saver:
    """The one owner of what is still to be saved of one model: each session's last path, the oldest first."""

    def __init__(self, tiers: ColdTiers, root: bytes, save_block: SaveBlock, clock: Callable[[], float]) -> None:
        self._tiers, self._root, self._save_block, self._clock = tiers, root, save_block, clock
        self._unsaved: dict[str, tuple[bytes, ...]] = {}
        self._begun: set[bytes] = set()  # blocks of the oldest that were begun: none is written twice for one turn

    @property
    def unsaved(self) -> int:
        """Sessions whose last turn is not all on disk."""
        return len(self._unsaved)

    def add(self, session_id: str, chain: tuple[bytes, ...]) -> None:
        """These blocks, first to last, are a session's last turn."""
        self.forget(session_id)
        self._unsaved[session_id] = chain

    def forget(self, session_id: str) -> None:
        """Nothing of this session is to be saved."""
        if next(iter(self._unsaved), None) == session_id:
            self._begun.clear()
        self._unsaved.pop(session_id, None)

    def save(self, until: float = math.inf) -> bool:
        """Begin to write by `until` on the clock; whether more could be begun at once, without waiting for an end."""
        if not self._tiers.has_disk:
            self._unsaved.clear()
        while self._unsaved:
            session_id, chain = next(iter(self._unsaved.items()))
            on_the_way = False
            for parent, key in pairwise((self._root, *chain)):
                if self._clock() >= until:
                    return True
                cold = self._tiers.index.get(key)
                begun = cold is not None and cold.writing
                if not begun and (cold is None or not cold.disk):
                    if key in self._begun:
                        break  # it has had to go again
                    begun = self._save_block(parent, key, frozenset(chain))
                    if not begun and self._tiers.disk.busy:
                        return False  # the end of a write makes room for this one
                    if not begun:
                        break  # what follows would be of no use
                if begun:
                    self._begun.add(key)
                on_the_way = on_the_way or begun
            if on_the_way:
                return False
            self.forget(session_id)
            self._tiers.holdings.note(session_id)
        return False
