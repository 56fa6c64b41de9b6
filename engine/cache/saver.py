"""What the last turns left behind goes to disk, session by session, while there is time. It decides when, not where."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from engine.cache.disk_space import PAUSE_S
from engine.cache.tiers import ColdTiers

TRIES = 7  # for a turn while writes fail, each after twice the wait of the one before: that takes an hour

# A block by its parent's key and its own, and blocks that must not go for it; False: not now, or not at all.
SaveBlock = Callable[[bytes, bytes, frozenset[bytes]], bool]


@dataclass
class _Turn:
    """The keys of its path. Those `begun` were so in this try: none is written twice in one."""

    chain: tuple[bytes, ...]
    begun: set[bytes] = field(default_factory=set)
    failed: int = 0  # tries
    from_: float = -math.inf  # when the next one may begin, on the clock


class Saver:
    """The one owner of what is still to be saved of one model: each session's last path, the oldest first."""

    def __init__(self, tiers: ColdTiers, root: bytes, save_block: SaveBlock, clock: Callable[[], float]) -> None:
        self._tiers, self._root, self._save_block, self._clock = tiers, root, save_block, clock
        self._unsaved: dict[str, _Turn] = {}

    @property
    def unsaved(self) -> int:
        """Sessions whose last turn is not all on disk, and is still to be."""
        return len(self._unsaved)

    def add(self, session_id: str, chain: tuple[bytes, ...]) -> None:
        """These blocks, first to last, are a session's last turn."""
        self.forget(session_id)
        self._unsaved[session_id] = _Turn(chain)

    def forget(self, session_id: str) -> None:
        """Nothing of this session is to be saved."""
        self._unsaved.pop(session_id, None)

    def save(self, until: float = math.inf) -> bool:
        """Begin to write by `until` on the clock; whether more could be begun at once, without waiting for an end."""
        if not self._tiers.has_disk:
            self._unsaved.clear()
        if self._tiers.disk.paused:
            self._put_off()
            return False
        for session_id, turn in list(self._unsaved.items()):
            if self._clock() < turn.from_:
                continue
            on_the_way = False
            for parent, key in pairwise((self._root, *turn.chain)):
                if self._clock() >= until:
                    return True
                cold = self._tiers.index.get(key)
                begun = cold is not None and cold.writing
                if not begun and (cold is None or not cold.disk):
                    if key in turn.begun:
                        break  # it has had to go again
                    begun = self._save_block(parent, key, frozenset(turn.chain))
                    if not begun and self._tiers.disk.busy:
                        return False  # the end of a write makes room for this one
                    if not begun:
                        break  # what follows would be of no use
                if begun:
                    turn.begun.add(key)
                on_the_way = on_the_way or begun
            if on_the_way:
                return False
            self._end(session_id)
        return False

    def _put_off(self) -> None:
        """Writes fail: what was begun is tried again some other time, and what is on disk already is noted now."""
        for session_id, turn in list(self._unsaved.items()):
            if turn.begun:
                turn.begun.clear()
                turn.from_ = self._clock() + PAUSE_S * 2**turn.failed
                turn.failed += 1
            if turn.failed >= TRIES:
                self._end(session_id)
            else:
                self._tiers.holdings.note_changes(session_id)

    def _end(self, session_id: str) -> None:
        self.forget(session_id)
        self._tiers.holdings.note(session_id)
