"""One model's blocks across the tiers: what its pool gives down, what is kept and saved of it, and what comes back.

It stands between the device's books and the cold tiers. For the engine's thread; it moves bytes, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from engine.cache.block import Block, Lease, Scope
from engine.cache.cold import ColdBlock, Space
from engine.cache.disk_tier import Fill
from engine.cache.holdings import AHEAD, GOES_ON, WHY, WISHED
from engine.cache.image import Tensor
from engine.cache.manager import BlockManager
from engine.cache.outlook import Outlook
from engine.cache.policy import Entry, decide
from engine.cache.restores import Restore, Restores
from engine.cache.saver import Saver
from engine.cache.tiers import ColdTiers
from engine.config import Force, Tier
from engine.events import Usage


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
        self.space, self.tiers = space, tiers
        self._data, self._clock = data, clock
        self.saver = Saver(tiers, space.root, self._save_block, clock)
        self.outlook = Outlook(space, tiers, lambda: self._books, force)
        self.restores = Restores(space, tiers, data, lambda: self._books, clock)
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
        entries = self._entries(by_key)
        return [block for entry in self.tiers.policy.order(entries, self._clock()) for block in by_key[entry.key]]

    def keep(self, block: Block, reason: str = WHY["pressure"]) -> None:
        """A block is about to leave the device: offer it to the tiers below."""
        if block.key is not None:
            self.tiers.keep(block, self.space, self._copy_of(block), reason)

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
                cold.last_used = now
                self.tiers.holdings.hold(cold, session_id)
        self.saver.add(session_id, chain)

    # --- what a sequence asks -----------------------------------------------------------------------------------------

    def find(self, scope: Scope, token_ids: Sequence[int], *, ahead: bool = False) -> Restore | None:
        """Begin to bring what is worth it for these tokens beyond what the device holds; None: nothing is there.

        `ahead` of a turn that nobody waits for yet.
        """
        found = self.outlook.find(scope, token_ids)
        if not found.pieces and not found.slower_to:
            return None
        return self.restores.begin(found.pieces, reason=AHEAD if ahead else GOES_ON, slower_to=found.slower_to)

    def ended(self, lease: Lease, usage: Usage) -> None:
        """A turn ends, and cost so much; its lease is still held."""
        keys = [block.key for block in lease.blocks if block.token_ids]
        model = self.space.fingerprint.hex()
        self.tiers.journal.turn(lease.scope.session_id, model, [key for key in keys if key is not None], usage)

    # --- what the keeper and the ledger ask ---------------------------------------------------------------------------

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
        entries = self._entries(by_key)
        for move in decide(self.tiers.policy, entries, limits, self._clock(), used=used, below="host"):
            now = self._clock() + self.tiers.copy_times.backlog_s()
            if now >= until or not all(self._demote(block, WHY[move.reason]) for block in by_key[move.key]):
                return

    def demote(self, session_id: str, to: Tier | None) -> tuple[int, bool]:
        """Take a session's own idle blocks off the device: how many went, and whether all have."""
        own = [block for block in self._books.idle.oldest_first() if block.holders == {session_id} and block.key]
        for count, block in enumerate(own):
            if to is not None:
                if not self._demote(block, WISHED):
                    return count, False
                continue
            self.tiers.journal.bury(block.key or b"", WISHED, [session_id])
            self.tiers.journal.note(
                "evicted", WISHED, size=self.space.block_bytes, source="device", holders=[session_id]
            )
            self._books.evict(block)
        return len(own), True

    def forget(self, session_id: str) -> None:
        """Nothing of this session is to be saved, or known."""
        self.saver.forget(session_id)
        self.tiers.sessions.forget(session_id)
        self.tiers.journal.forget(session_id)

    # --- one block ----------------------------------------------------------------------------------------------------

    def _demote(self, block: Block, reason: str) -> bool:
        """Have a block leave the device though its room is not needed yet; False: not now."""
        if not self.tiers.keep(block, self.space, self._copy_of(block), reason, patient=True):
            return False
        self._books.evict(block)
        return True

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
        store, codec = self.tiers.copies.store, self.space.codec
        return partial(store, codec, self._data(), block.id, tokens=len(block.token_ids))

    def _entries(self, by_key: dict[bytes, list[Block]]) -> Sequence[Entry]:
        """Idle blocks as a policy sees them; of what is pinned, the share of this pool."""
        costs: dict[tuple[int, int], float] = {}  # by depth and tokens, which many blocks have alike
        entries = [self._entry(key, same[0], costs) for key, same in by_key.items()]
        whose = {key: same[0].holders for key, same in by_key.items()}
        return self.tiers.sessions.protect(entries, whose, self._books.total_blocks * self.space.block_bytes)

    def _entry(self, key: bytes, block: Block, costs: dict[tuple[int, int], float]) -> Entry:
        sessions, tokens = self.tiers.sessions, len(block.token_ids)
        cost = costs.get((block.depth, tokens))
        if cost is None:
            cost = self.space.compute_s(block.depth * self.space.block_size, tokens) or 0.0
            costs[block.depth, tokens] = cost
        return Entry(
            key=key,
            parent=block.parent_hash or self.space.root,
            bytes=self.space.block_bytes,
            tokens=tokens,
            depth=block.depth,
            last_used=block.last_used,
            expires_at=sessions.expires_at(block.holders, block.last_used, self.tiers.limits.device_ttl),
            value=sessions.value(key, block.holders, preset=block.preset),
            recompute_s=cost,
        )


def _by_key(blocks: list[Block]) -> dict[bytes, list[Block]]:
    """Blocks by key: several tails may hold the same tokens, of samples or tries that agreed."""
    by_key: dict[bytes, list[Block]] = {}
    for block in blocks:
        by_key.setdefault(block.key or b"", []).append(block)
    return by_key
