"""What a prompt finds below the device, what its first token costs, and why no more was found. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.cache.block import Scope
from engine.cache.cold import Piece, Space, chain_hash
from engine.cache.manager import BlockManager
from engine.cache.rates import Run, how_many_to_load
from engine.cache.restores import Restore
from engine.cache.tiers import ColdTiers
from engine.config import Force, Tier
from engine.events import Miss, MissCause


@dataclass(frozen=True)
class Found:
    """What is worth loading for a prompt whose first `start` tokens are on the device.

    Up to position `slower_to` more is there, and computing it is quicker.
    """

    start: int
    pieces: list[Piece]
    slower_to: int


@dataclass(frozen=True)
class Cost:
    """Tokens of a prompt by the tier that has them, and seconds to its first token; None: nothing was measured yet."""

    device_tokens: int
    host_tokens: int
    disk_tokens: int
    seconds: float | None


class Outlook:
    """What the tiers hold for one model's prompts. `books` is its pool's manager; `force` leaves no choice."""

    def __init__(
        self, space: Space, tiers: ColdTiers, books: Callable[[], BlockManager], force: Force | None = None
    ) -> None:
        self._space, self._tiers, self._books, self._force = space, tiers, books, force

    def find(self, scope: Scope, token_ids: Sequence[int]) -> Found:
        """What host and disk have for these tokens beyond what the device holds."""
        start = self._books().match(scope, token_ids).reused
        pieces = self._tiers.index.find(self._space, scope, token_ids, start)
        worth = self._worth(pieces, start, len(token_ids)) if pieces else 0
        return Found(start, pieces[:worth], slower_to=pieces[-1].end if worth < len(pieces) else 0)

    def estimate(self, scope: Scope, token_ids: Sequence[int]) -> Cost:
        """What a prompt would find where, and how long its first token would take."""
        found = self.find(scope, token_ids)
        counts: dict[Tier, int] = {"host": 0, "disk": 0}
        seconds: float | None = 0.0
        position = found.start
        for piece in found.pieces:
            counts[_tier(piece)] += piece.end - position
            position = piece.end
            load_s = self._load_s(piece)
            seconds = None if seconds is None or load_s is None else seconds + load_s
        compute_s = self._space.compute_s(position, len(token_ids) - position)
        total = None if seconds is None or compute_s is None else seconds + compute_s
        return Cost(found.start, counts["host"], counts["disk"], total)

    def miss(self, scope: Scope, token_ids: Sequence[int], position: int, restore: Restore | None) -> Miss | None:
        """Why nothing was found beyond the first `position` tokens; None: nothing more was wanted."""
        if position >= len(token_ids) - 1:
            return None
        if restore is not None and restore.failed:
            return Miss(position=position, cause="unreadable", detail=restore.failed)
        if restore is not None and restore.slower_to > position:
            if restore.slower_to - position >= len(token_ids) - restore.slower_to:
                return Miss(position=position, cause="slower", detail="loading it would have taken longer")
            position = restore.slower_to  # what is missing from there on costs more
        size, number = self._space.block_size, position // self._space.block_size
        use = self._tiers.sessions.get(scope.session_id)
        before = use.chain[number] if use is not None and number < len(use.chain) else None
        end = (number + 1) * size
        wanted = chain_hash(self._space, scope, token_ids, number + 1) if end <= len(token_ids) else None
        for key in (wanted, before):
            fate = self._tiers.journal.fate(key) if key is not None else None
            if fate is not None and (key == wanted or position % size == 0):
                cause: MissCause = "unreadable" if fate.startswith("unreadable") else "evicted"
                return Miss(position=position, cause=cause, detail=fate)
        if use is not None and position < use.tokens:
            return Miss(position=position, cause="diverged")
        return Miss(position=position, cause="new")

    def _worth(self, pieces: Sequence[Piece], start: int, total: int) -> int:
        """How many of these blocks to load; computing the others is quicker."""
        runs = [Run(_tier(piece), 1, self._load_s(piece)) for piece in pieces]
        positions = [start, *(piece.end for piece in pieces)]
        return how_many_to_load(
            runs, lambda done, _: self._space.compute_s(positions[done], total - positions[done]), self._force
        )

    def _load_s(self, piece: Piece) -> float | None:
        return self._tiers.load_s(_tier(piece), self._space.codec.size)


def _tier(piece: Piece) -> Tier:
    """Where a piece would be copied from."""
    return "host" if piece.cold.host is not None else "disk"
