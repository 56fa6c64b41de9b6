"""One model's blocks across the tiers: what a prompt finds where, how it comes to the device, and what is kept of it.

It stands between the device's books and the cold tiers. For the engine's thread; it moves bytes, and decides nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

from engine.cache.block import Block, Lease, Scope
from engine.cache.cold import ColdBlock, Piece, Space, chain_hash
from engine.cache.disk_tier import Fill
from engine.cache.host import HostSlot
from engine.cache.image import Tensor
from engine.cache.manager import BlockManager
from engine.cache.policy import Entry, decide
from engine.cache.rates import Run, how_many_to_load
from engine.cache.saver import Saver
from engine.cache.tiers import WHY, WISHED, ColdTiers
from engine.config import Force, Tier
from engine.events import Miss, MissCause, Usage

READ_AHEAD = 16  # blocks of one restore that are read at a time
COPY_AT_ONCE = 8  # blocks between two looks at the clock
PATIENCE_S, PATIENCE = 2.0, 2.0  # seconds without an answer, or times what computing the rest takes


@dataclass(eq=False)
class Restore:
    """The blocks of one sequence that come to the device from below, first to last.

    `ready` are those read from files, by key. `failed` says why the rest was given up. The last came at `moved_at`.
    """

    pieces: deque[Piece]
    began: float
    moved_at: float
    slower: bool = False
    failed: str = ""
    reading: dict[bytes, None] = field(default_factory=dict)
    ready: dict[bytes, HostSlot] = field(default_factory=dict)


@dataclass(frozen=True)
class Restored:
    """Tokens `start` … `end - 1` of a sequence came from `tier`."""

    start: int
    end: int
    tier: Tier


@dataclass(frozen=True)
class Cost:
    """Tokens of a prompt by the tier that has them, and seconds to its first token; None: nothing was measured yet."""

    device_tokens: int
    host_tokens: int
    disk_tokens: int
    seconds: float | None


class Residency:
    """The tiers below one model's pool. `data` gives the pool's tensor, which changes when the pool changes size."""

    def __init__(
        self,
        space: Space,
        tiers: ColdTiers,
        data: Callable[[], Tensor],
        clock: Callable[[], float],
        force: Force | None = None,
    ) -> None:
        self.space, self.tiers, self.force = space, tiers, force
        self._data, self._clock = data, clock
        self.saver = Saver(tiers, space.root, self._save_block, clock)
        self.manager: BlockManager | None = None

    @property
    def _books(self) -> BlockManager:
        if self.manager is None:
            raise RuntimeError("this residency serves no manager yet")
        return self.manager

    # --- what the block manager asks ----------------------------------------------------------------------------------

    def order(self, idle: list[Block]) -> list[Block]:
        """Idle blocks with the first to go first."""
        by_key = _by_key(idle)
        entries = [self._entry(key, same[0]) for key, same in by_key.items()]
        return [block for entry in self.tiers.policy.order(entries, self._clock()) for block in by_key[entry.key]]

    def keep(self, block: Block, reason: str = WHY["pressure"]) -> None:
        """A block is about to leave the device: offer it to the tiers below."""
        if block.key is not None:
            self.tiers.keep(block, self.space, self._copy_of(block), reason)

    def _demote(self, block: Block, reason: str) -> bool:
        """Have a block leave the device though its room is not needed yet; False: not now."""
        if not self.tiers.keep(block, self.space, self._copy_of(block), reason, patient=True):
            return False
        self._books.evict(block)
        return True

    def ended(self, lease: Lease, usage: Usage) -> None:
        """A turn ends, and cost so much; its lease is still held."""
        keys = [block.key for block in lease.blocks if block.token_ids]
        model = self.space.fingerprint.hex()
        self.tiers.journal.turn(lease.scope.session_id, model, [key for key in keys if key is not None], usage)

    def released(self, lease: Lease) -> None:
        """A turn, or a part of one, ends: note what it used, and that it is to be saved."""
        keys = [block.key for block in lease.blocks if block.token_ids]
        chain = tuple(key for key in keys if key is not None)
        session_id, now = lease.scope.session_id, self._clock()
        if not chain or not lease.counts:
            return
        self.tiers.sessions.used(session_id, chain, lease.computed, now)
        for key in chain:
            if (cold := self.tiers.index.get(key)) is not None:
                self.tiers.hold(cold, session_id)
        self.saver.add(session_id, chain)

    def forget(self, session_id: str) -> None:
        """Nothing of this session is to be saved, or known."""
        self.saver.forget(session_id)
        self.tiers.sessions.forget(session_id)
        self.tiers.journal.forget(session_id)

    def _save_block(self, parent: bytes, key: bytes, spared: frozenset[bytes]) -> bool:
        """Begin to write one block from wherever it is; False: not now, or it is nowhere.

        The `spared` blocks do not go for it.
        """
        block = next((block for block in self._books.index.children(parent) if block.key == key), None)
        cold = self.tiers.index.get(key)
        if block is None:
            return cold is not None and self.tiers.copy_down(cold, spared)
        return self.tiers.write(cold or ColdBlock.of(block, self.space), self._copy_of(block), spared)

    def _copy_of(self, block: Block) -> Fill:
        """What copies a block's own tokens to an image; its other slots may hold what was another chat's."""
        return partial(self.space.codec.store, self._data(), block.id, tokens=len(block.token_ids))

    def blocks(self) -> list[Block]:
        """Every block of the pool that is in use."""
        return list(self._books.blocks.values())

    def reconsider(self) -> None:
        """What decides who goes first may have changed."""
        self._books.idle.reconsider()

    def relieve(self, until: float, *, expired: bool) -> None:
        """Demote what is above the device's high watermark, and what has `expired`, as far as the time goes."""
        books, size, limits = self._books, self.space.block_bytes, self.tiers.tier_limits("device")
        limits = replace(limits, budget=books.total_blocks * size)
        used = len(books.blocks) * size
        if limits.fits(used) and not expired:
            return
        by_key = _by_key(books.idle.oldest_first())
        entries = [self._entry(key, same[0]) for key, same in by_key.items()]
        for move in decide(self.tiers.policy, entries, limits, self._clock(), used=used, below="host"):
            if self._clock() >= until or not all(self._demote(block, WHY[move.reason]) for block in by_key[move.key]):
                return

    def demote(self, session_id: str, to: Tier | None) -> tuple[int, bool]:
        """Take a session's own idle blocks off the device: how many went, and whether all have."""
        own = [block for block in self._books.idle.oldest_first() if block.holders == {session_id} and block.key]
        for count, block in enumerate(own):
            if to is not None:
                if not self._demote(block, WISHED):
                    return count, False
                continue
            self.tiers.journal.bury(block.key or b"", WISHED)
            self.tiers.journal.note(
                "evicted", WISHED, size=self.space.block_bytes, source="device", holders=[session_id]
            )
            self._books.evict(block)
        return len(own), True

    def _entry(self, key: bytes, block: Block) -> Entry:
        sessions, tokens = self.tiers.sessions, len(block.token_ids)
        return Entry(
            key=key,
            parent=block.parent_hash or self.space.root,
            bytes=self.space.block_bytes,
            tokens=tokens,
            depth=block.depth,
            last_used=block.last_used,
            expires_at=sessions.expires_at(block.holders, block.last_used, self.tiers.limits.device_ttl),
            value=sessions.value(key, block.holders, preset=block.preset),
            recompute_s=self.space.compute_s(block.depth * self.space.block_size, tokens) or 0.0,
        )

    # --- what a sequence asks -----------------------------------------------------------------------------------------

    def find(self, scope: Scope, token_ids: Sequence[int]) -> Restore | None:
        """What is worth bringing for these tokens beyond what the device holds; None: nothing.

        Its blocks stay where they are until the restore ends, by `advance` or `abandon`.
        """
        start = self._books.match(scope, token_ids).reused
        pieces = self.tiers.index.find(self.space, scope, token_ids, start)
        if not pieces:
            return None
        worth = self._worth(pieces, start, len(token_ids))
        now = self._clock()
        restore = Restore(deque(pieces[:worth]), now, now, slower=worth < len(pieces))
        for piece in restore.pieces:
            piece.cold.reads += 1
        return restore

    def advance(self, restore: Restore, lease: Lease, token_ids: Sequence[int], until: float) -> list[Restored]:
        """Bring what is there by `until` on the clock; what has come. The restore is over when no pieces are left."""
        came: list[Restored] = []
        self._read_ahead(restore)
        while restore.pieces and not (came and self._clock() >= until):
            while restore.pieces and restore.pieces[0].end <= lease.computed:  # another has brought it meanwhile
                self._let_go(restore, restore.pieces.popleft())
            pieces = self._at_hand(restore)
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
        return came

    def abandon(self, restore: Restore) -> None:
        """Bring nothing more."""
        while restore.pieces:
            self._let_go(restore, restore.pieces.popleft())

    def _lose_patience(self, restore: Restore, lease: Lease, total: int) -> None:
        """Give up on a disk that takes far longer to answer than computing what is left would."""
        compute_s = self.space.compute_s(lease.computed, total - lease.computed) or 0.0
        if restore.pieces and self._clock() - restore.moved_at > max(PATIENCE_S, PATIENCE * compute_s):
            restore.failed = "the disk did not answer in time"
            self.abandon(restore)

    def _at_hand(self, restore: Restore) -> list[Piece]:
        """The next pieces that can be copied now, all from one tier. One that never will be ends the restore."""
        pieces: list[Piece] = []
        for piece in islice(restore.pieces, COPY_AT_ONCE):
            if _tier(restore, piece) != _tier(restore, restore.pieces[0]) or _tier(restore, piece) is None:
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
        tier = _tier(restore, pieces[0]) or "host"
        first, began = lease.computed // self.space.block_size, self._clock()
        blocks = lease.blocks[first : first + len(pieces)]
        images = [self._image(restore, piece) for piece in pieces]
        try:
            self.space.codec.load_many(images, self._data(), [block.id for block in blocks])
        except (MemoryError, RuntimeError) as error:  # torch's out of memory is a RuntimeError
            restore.failed = f"it could not be copied: {error}"
            return []
        amount = len(pieces) * self.space.codec.size
        if tier == "host":
            self.tiers.copied(amount, began)
        came = []
        for block, piece in zip(blocks, pieces, strict=True):
            block.lossy = block.lossy or piece.cold.lossy
            piece.cold.last_used = began
            came.append(Restored(lease.computed, piece.end, tier))
            self._books.commit(lease, token_ids[lease.computed : piece.end])
            lease.reused = lease.computed
        self.tiers.journal.note(
            "promoted",
            "a chat goes on",
            size=amount,
            blocks=len(pieces),
            source=tier,
            target="device",
            holders=[lease.scope.session_id],
        )
        return came

    def _image(self, restore: Restore, piece: Piece) -> Tensor:
        if piece.cold.host is not None:
            return self.tiers.host.view(piece.cold.host)
        return self.tiers.disk.staging.view(restore.ready[piece.cold.key])

    def _read_ahead(self, restore: Restore) -> None:
        for piece in list(restore.pieces)[:READ_AHEAD]:
            cold = piece.cold
            waits = cold.host is None and cold.disk and cold.key not in restore.ready
            if waits and cold.key not in restore.reading:
                if not self.tiers.disk.read(cold, partial(self._was_read, restore, cold)):
                    return
                restore.reading[cold.key] = None

    def _was_read(self, restore: Restore, cold: ColdBlock, slot: HostSlot | None, why: str) -> None:
        restore.reading.pop(cold.key, None)
        if slot is None:
            restore.failed = why
            if cold.disk:  # else its chat has been deleted meanwhile
                self.tiers.quarantine(cold, why)
        elif all(piece.cold is not cold for piece in restore.pieces):  # given up, or it came from elsewhere
            self.tiers.disk.staging.give_back(slot)
        else:
            restore.ready[cold.key] = slot

    def _let_go(self, restore: Restore, piece: Piece) -> None:
        piece.cold.reads -= 1
        slot = restore.ready.pop(piece.cold.key, None)
        if slot is not None:
            self.tiers.disk.staging.give_back(slot)

    def _worth(self, pieces: Sequence[Piece], start: int, total: int) -> int:
        """How many of these blocks to load; computing the others is quicker."""
        size = self.space.codec.size
        runs: list[Run] = []
        for piece in pieces:
            tier: Tier = "host" if piece.cold.host is not None else "disk"
            seconds = self.tiers.load_s(tier, size)
            runs.append(Run(tier, 1, seconds))
        positions = [start, *(piece.end for piece in pieces)]
        return how_many_to_load(
            runs, lambda done, _: self.space.compute_s(positions[done], total - positions[done]), self.force
        )

    # --- what it would cost -------------------------------------------------------------------------------------------

    def estimate(self, scope: Scope, token_ids: Sequence[int]) -> Cost:
        """What a prompt would find where, and how long its first token would take. Changes nothing."""
        start = self._books.match(scope, token_ids).reused
        pieces = self.tiers.index.find(self.space, scope, token_ids, start)
        pieces = pieces[: self._worth(pieces, start, len(token_ids))] if pieces else []
        counts: dict[Tier, int] = {"host": 0, "disk": 0}
        seconds: float | None = 0.0
        position = start
        for piece in pieces:
            tier: Tier = "host" if piece.cold.host is not None else "disk"
            counts[tier] += piece.end - position
            position = piece.end
            load_s = self.tiers.load_s(tier, self.space.codec.size)
            seconds = None if seconds is None or load_s is None else seconds + load_s
        compute_s = self.space.compute_s(position, len(token_ids) - position)
        total = None if seconds is None or compute_s is None else seconds + compute_s
        return Cost(start, counts["host"], counts["disk"], total)

    # --- why it missed ------------------------------------------------------------------------------------------------

    def miss(self, scope: Scope, token_ids: Sequence[int], position: int, restore: Restore | None) -> Miss | None:
        """Why nothing was found beyond the first `position` tokens; None: nothing more was wanted."""
        if position >= len(token_ids) - 1:
            return None
        if restore is not None and restore.failed:
            return Miss(position=position, cause="unreadable", detail=restore.failed)
        if restore is not None and restore.slower:
            return Miss(position=position, cause="slower", detail="loading it would have taken longer")
        size, number = self.space.block_size, position // self.space.block_size
        use = self.tiers.sessions.get(scope.session_id)
        before = use.chain[number] if use is not None and number < len(use.chain) else None
        wanted = chain_hash(self.space, scope, token_ids, number + 1) if (number + 1) * size <= len(token_ids) else None
        for key in (wanted, before):
            fate = self.tiers.journal.fate(key) if key is not None else None
            if fate is not None and (key == wanted or position % size == 0):
                cause: MissCause = "unreadable" if fate.startswith("unreadable") else "evicted"
                return Miss(position=position, cause=cause, detail=fate)
        if use is not None and position < use.tokens:
            return Miss(position=position, cause="diverged")
        return Miss(position=position, cause="new")


def _by_key(blocks: list[Block]) -> dict[bytes, list[Block]]:
    """Blocks by key: several tails may hold the same tokens, of samples or tries that agreed."""
    by_key: dict[bytes, list[Block]] = {}
    for block in blocks:
        by_key.setdefault(block.key or b"", []).append(block)
    return by_key


def _tier(restore: Restore, piece: Piece) -> Tier | None:
    """Where a piece can be copied from now; None: it is on its way, or gone."""
    if piece.cold.host is not None:
        return "host"
    return "disk" if piece.cold.key in restore.ready else None
