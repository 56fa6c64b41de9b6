"""One model's blocks on their way to the device from host and disk: read ahead, copied, published, or given up.

What is worth bringing was decided before. For the engine's thread.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from engine.cache.block import Lease
from engine.cache.cold import ColdBlock, Piece, Space
from engine.cache.image import Tensor
from engine.cache.manager import BlockManager
from engine.cache.segments import HostSlot
from engine.cache.tiers import ColdTiers
from engine.config import Tier

READ_AHEAD = 16  # blocks of one restore that are read at a time
COPY_AT_ONCE = 8  # blocks between two looks at the clock
COPY_UNHURRIED = 64  # the same where nothing else is to run meanwhile: more at once is quicker
PATIENCE_S, PATIENCE = 2.0, 2.0  # seconds without an answer, or times what computing the rest takes


@dataclass(eq=False)
class Restore:
    """The blocks of one sequence that come to the device from below, first to last.

    `ready` are those read from files, by key. `failed` says why the rest was given up. The last came at `moved_at`.
    `reason` is why they come. Up to position `slower_to` more is there, which is quicker to compute.
    """

    pieces: deque[Piece]
    began: float
    moved_at: float
    reason: str
    slower_to: int = 0
    failed: str = ""
    reading: dict[bytes, None] = field(default_factory=dict)
    ready: dict[bytes, HostSlot] = field(default_factory=dict)

    def source(self, piece: Piece) -> Tier | None:
        """Where a piece can be copied from now; None: it is on its way, or gone."""
        if piece.cold.host is not None:
            return "host"
        return "disk" if piece.cold.key in self.ready else None


@dataclass(frozen=True)
class Restored:
    """Tokens `start` … `end - 1` of a sequence came from `tier`."""

    start: int
    end: int
    tier: Tier


class Restores:
    """The one who carries restores on. `data` gives the pool's tensor as it is now, `books` the pool's manager."""

    def __init__(
        self,
        space: Space,
        tiers: ColdTiers,
        data: Callable[[], Tensor],
        books: Callable[[], BlockManager],
        clock: Callable[[], float],
    ) -> None:
        self._space, self._tiers = space, tiers
        self._data, self._books, self._clock = data, books, clock

    def begin(self, pieces: Sequence[Piece], *, reason: str, slower_to: int) -> Restore:
        """Bring these. Their blocks stay where they are until the restore ends, by `advance` or `abandon`."""
        now = self._clock()
        restore = Restore(deque(pieces), now, now, reason, slower_to)
        for piece in pieces:
            piece.cold.reads += 1
        return restore

    def advance(self, restore: Restore, lease: Lease, token_ids: Sequence[int], until: float) -> list[Restored]:
        """Bring what is there by `until` on the clock; what has come. The restore is over when no pieces are left."""
        came: list[Restored] = []
        self._read_ahead(restore)
        while restore.pieces and not (came and self._clock() + self._tiers.copy_times.backlog_s() >= until):
            while restore.pieces and restore.pieces[0].end <= lease.computed:  # another has brought it meanwhile
                self._let_go(restore, restore.pieces.popleft())
            pieces = self._at_hand(restore, COPY_UNHURRIED if until == math.inf else COPY_AT_ONCE)
            if not pieces:
                self._lose_patience(restore, lease, len(token_ids))
                break
            copied = self._copy(restore, pieces, lease, token_ids)
            if not copied:
                self.abandon(restore)
                break
            came += copied
            restore.moved_at = self._clock()
            for _ in pieces:
                self._let_go(restore, restore.pieces.popleft())
            self._read_ahead(restore)
        self._tiers.settle()
        return came

    def abandon(self, restore: Restore) -> None:
        """Bring nothing more."""
        while restore.pieces:
            self._let_go(restore, restore.pieces.popleft())
        self._tiers.settle()

    def _lose_patience(self, restore: Restore, lease: Lease, total: int) -> None:
        """Give up on a disk that takes far longer to answer than computing what is left would."""
        compute_s = self._space.compute_s(lease.computed, total - lease.computed) or 0.0
        if restore.pieces and self._clock() - restore.moved_at > max(PATIENCE_S, PATIENCE * compute_s):
            restore.failed = "the disk did not answer in time"
            self.abandon(restore)

    def _at_hand(self, restore: Restore, most: int) -> list[Piece]:
        """The next pieces that can be copied now, all from one tier. One that never will be ends the restore."""
        pieces: list[Piece] = []
        for piece in islice(restore.pieces, most):
            if restore.source(piece) != restore.source(restore.pieces[0]) or restore.source(piece) is None:
                break
            pieces.append(piece)
        first = restore.pieces[0].cold if restore.pieces else None
        if first is not None and not pieces and not first.disk and not first.writing:
            restore.failed = restore.failed or "its copy is gone"
            self.abandon(restore)
        return pieces

    def _copy(
        self, restore: Restore, pieces: Sequence[Piece], lease: Lease, token_ids: Sequence[int]
    ) -> list[Restored]:
        """Copy pieces to their places, and publish them there."""
        tier = restore.source(pieces[0]) or "host"
        first, began = lease.computed // self._space.block_size, self._clock()
        blocks = lease.blocks[first : first + len(pieces)]
        images = [piece.cold.host or restore.ready[piece.cold.key] for piece in pieces]
        load_many, ids = self._tiers.copies.load_many, [block.id for block in blocks]
        try:
            copied = load_many(self._space.codec, images, self._data(), ids)
        except (MemoryError, RuntimeError) as error:  # torch's out of memory is a RuntimeError
            restore.failed = f"it could not be copied: {error}"
            return []
        amount = len(pieces) * self._space.codec.size
        if tier == "host":
            self._tiers.copy_times.note(amount, began, copied)
        came = []
        for block, piece in zip(blocks, pieces, strict=True):
            block.lossy = block.lossy or piece.cold.lossy
            piece.cold.last_used = began
            came.append(Restored(lease.computed, piece.end, tier))
            self._books().commit(lease, token_ids[lease.computed : piece.end])
            lease.reused = lease.computed
        self._tiers.journal.note(
            "promoted",
            restore.reason,
            size=amount,
            blocks=len(pieces),
            source=tier,
            target="device",
            holders=[lease.scope.session_id],
        )
        return came

    def _read_ahead(self, restore: Restore) -> None:
        for piece in list(restore.pieces)[:READ_AHEAD]:
            cold = piece.cold
            waits = cold.host is None and cold.disk and cold.key not in restore.ready
            if waits and cold.key not in restore.reading:
                if not self._tiers.disk.read(cold, partial(self._was_read, restore, cold)):
                    return
                restore.reading[cold.key] = None

    def _was_read(self, restore: Restore, cold: ColdBlock, slot: HostSlot | None, why: str) -> None:
        restore.reading.pop(cold.key, None)
        if slot is None:
            restore.failed = why
            if cold.disk:  # else its chat has been deleted meanwhile
                self._tiers.holdings.quarantine(cold, why)
        elif all(piece.cold is not cold for piece in restore.pieces):  # given up, or it came from elsewhere
            self._tiers.disk.staging.give_back(slot)
        else:
            restore.ready[cold.key] = slot

    def _let_go(self, restore: Restore, piece: Piece) -> None:
        """It may leave its tier from now on; whoever calls this has the tiers settle afterwards."""
        piece.cold.reads -= 1
        slot = restore.ready.pop(piece.cold.key, None)
        if slot is not None:
            self._tiers.disk.staging.give_back(slot)
