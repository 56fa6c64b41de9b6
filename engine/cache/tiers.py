"""Host and disk, of all models together: what they take in, and what has to leave them.

It decides by the policy and the limits; the slab, the disk tier and the holdings carry it out. For the engine's thread.
A copy that fails is never an error to a chat: the block is not there, and the log says why.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

from engine.cache.block import Block
from engine.cache.cold import ColdBlock, Space
from engine.cache.copies import DONE, PROBE_S, Copied, Copies, CopyTimes, DirectCopies
from engine.cache.disk_tier import DiskTier, Files, Fill, Post
from engine.cache.headers import file_bytes
from engine.cache.holdings import COLD, TIERS, WISHED, Holdings, size
from engine.cache.host import HostSlab
from engine.cache.journal import Journal
from engine.cache.nowhere import nowhere
from engine.cache.pins import OUTGROWN
from engine.cache.policy import Entry, Move, Policy, TierLimits, decide, policy_named
from engine.cache.segments import HostSlot
from engine.cache.sessions import Sessions
from engine.config import CacheConfig, Tier
from engine.errors import EngineError

log = logging.getLogger(__name__)


class ColdTiers:
    """Host and disk. `limits` has every budget filled in; `post` has a call made on the engine's thread."""

    def __init__(
        self,
        limits: CacheConfig,
        files: Files | None,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float] = time.time,
        post: Post,
        copies: Copies | None = None,
    ) -> None:
        self.copies, self.copy_times = copies or DirectCopies(), CopyTimes(clock)
        self.sessions, self.journal = Sessions(), Journal(wall)
        self.host = HostSlab(limits.host_kv or 0, locks=self.copies.page_locks())
        self.disk = DiskTier(files, clock, wall, post, self.journal)
        self.holdings = Holdings(self.sessions, self.journal, self.host, self.disk, clock)
        self.index = self.holdings.index
        self._clock = clock
        self.limits = limits
        self.policy = self._policy_within_limits()
        for session_id, last_used in self.disk.earlier_sessions().items():
            self.sessions.remember(session_id, last_used)

    # --- what a tier may hold ---------------------------------------------------------------------------------------

    def tier_limits(self, tier: Tier) -> TierLimits:
        """The budget and watermarks of a tier now."""
        budget, high, low = (getattr(self.limits, f"{tier}_{name}") for name in ("kv", "high", "low"))
        return TierLimits(self.disk.budget(budget or 0) if tier == "disk" else budget or 0, high, low)

    def configure(self, limits: CacheConfig) -> None:
        """Other limits from now on. Raises `PolicyError` for some that no tier can keep; then nothing has changed."""
        old, self.limits = self.limits, limits
        try:
            self.policy = self._policy_within_limits()
        except EngineError:
            self.limits = old
            raise
        if self.disk.files is not None:
            self.disk.files.writes.bytes_per_day = limits.disk_writes
        self.host.resize(limits.host_kv or 0)
        for tier in COLD:
            self.enforce(tier)
        self.host.compact()

    def _policy_within_limits(self) -> Policy:
        """The policy that the limits name. Raises `PolicyError` where no tier can keep them."""
        for tier in TIERS:
            self.tier_limits(tier)
        return policy_named(self.limits.policy)

    @property
    def has_disk(self) -> bool:
        """Whether blocks are kept in files."""
        return self.disk.files is not None and bool(self.limits.disk_kv)

    def used(self, tier: Tier) -> int:
        """Bytes of blocks in host or on disk."""
        return self.host.used_bytes if tier == "host" else self.disk.bytes - self.disk.leaving_bytes

    def enforce(self, tier: Tier, needed: int = 0, spared: frozenset[bytes] = frozenset()) -> bool:
        """Let go what has expired or is too much, and more until `needed` bytes have room; whether they do.

        What is read or written now stays, and what is `spared`.
        """
        limits = self.tier_limits(tier)
        below: Tier | None = "disk" if tier == "host" and self.has_disk else None
        there = [
            cold
            for cold in self.index
            if size(cold, tier) and not cold.reads and not cold.writing and cold.key not in spared
        ]
        whose = {cold.key: cold.holders for cold in there}
        entries = self.sessions.protect([self._entry(cold, tier) for cold in there], whose, limits.budget)
        if tier == "disk":
            excess = self.used("disk") + needed - limits.high_bytes
            if gone := self.disk.let_earlier_go(excess, self.limits.disk_ttl, self.sessions.pinned):
                self.journal.note("evicted", "of models that are not loaded", size=gone, source="disk")
        used = self.used(tier)
        for move in decide(self.policy, entries, limits, self._clock(), used=used, below=below, needed=needed):
            if not self._leave(tier, move):
                break  # the disk is busy; the others go when it has caught up
        if needed and below == "disk" and not limits.fits(self.used(tier) + needed):
            copied = [entry for entry in entries if (cold := self.index.get(entry.key)) is not None and cold.disk]
            used = self.used(tier)
            for move in decide(self.policy, copied, limits, self._clock(), used=used, below=below, needed=needed):
                self._leave(tier, move)
        if tier == "host" and self.host.held_bytes > limits.budget:
            self.host.compact()
        return limits.fits(self.used(tier) + needed)

    def settle(self) -> None:
        """Let go what is above a limit: it was in use, or pinned, when that fell, or others have filled the disk."""
        self.disk.look_for_removal()
        self.holdings.note_owed()
        for tier in COLD:
            if not self.tier_limits(tier).fits(self.used(tier)):
                self.enforce(tier)

    def _entry(self, cold: ColdBlock, tier: Tier) -> Entry:
        space, tokens = cold.space, len(cold.token_ids)
        return Entry(
            key=cold.key,
            parent=cold.parent,
            bytes=size(cold, tier),
            tokens=tokens,
            depth=cold.depth,
            last_used=cold.last_used,
            expires_at=self.sessions.expires_at(cold.holders, cold.last_used, getattr(self.limits, f"{tier}_ttl")),
            value=self.sessions.value(cold.key, cold.holders, preset=cold.preset),
            recompute_s=space.compute_s(cold.depth * space.block_size, tokens) or 0.0,
        )

    def _leave(self, tier: Tier, move: Move) -> bool:
        """Carry out a move; False: not now, because its file cannot be written yet."""
        cold = self.index.get(move.key)
        if cold is None or not size(cold, tier):
            return True
        outgrown = move.reason != "ttl" and self.sessions.pinned(cold.holders)
        reason = OUTGROWN if outgrown else move.reason
        if tier == "disk":
            self.holdings.take_from_disk(cold, reason)
            return True
        if move.to == "disk" and not self.copy_down(cold) and self.must_wait(cold):
            return False
        self.holdings.take_from_host(cold, reason)
        return True

    def must_wait(self, cold: ColdBlock) -> bool:
        """Whether a block that is not on disk could be, once what is being written has ended."""
        return self.has_disk and not cold.disk and not cold.writing and self.disk.busy

    # --- taking in ----------------------------------------------------------------------------------------------------

    def keep(self, block: Block, space: Space, fill: Fill, reason: str, *, patient: bool = False) -> bool:
        """A block leaves the device: have host hold it, or disk, as far as there is room.

        False, for the `patient`: there will be room once what is being written has ended, and nothing was done.
        """
        cold = self.index.get(block.key or b"") or ColdBlock.of(block, space)
        cold.last_used = max(cold.last_used, block.last_used)
        if cold.host is None and not self._put_in_host(cold, fill):
            self.write(cold, fill)
        target: Tier | None = "host" if cold.host else "disk" if cold.disk or cold.writing else None
        if target is None and patient and self.must_wait(cold):
            return False
        told = partial(
            self.journal.note,
            size=space.block_bytes,
            source="device",
            holders=block.holders,
            age_s=self._clock() - block.last_used,
        )
        if target is None:
            why = f"{reason}{nowhere(self, space.codec.size)}"
            self.journal.bury(cold.key, f"device: {why}", block.holders | cold.holders)
            told("evicted", why)
            return True
        self.holdings.show(cold)
        for session_id in block.holders - cold.holders:
            self.holdings.hold(cold, session_id)
        told("demoted", reason, target=target)
        return True

    def _put_in_host(self, cold: ColdBlock, fill: Fill) -> bool:
        """Have `fill` copy a block to host; False: there is no room, or it cannot be copied."""
        slot, began = self._slot_in_host(cold.space.codec.size), self._clock()
        if slot is None:
            return False
        try:
            copied = fill(slot)
        except (MemoryError, RuntimeError) as error:  # torch's out of memory is a RuntimeError
            log.warning("a block could not be copied to host: %s", error)
            self.host.give_back(slot)
            return False
        self.copy_times.note(cold.space.codec.size, began, copied)
        cold.host = slot
        self.holdings.remove_beginnings(cold)
        return True

    def write(self, cold: ColdBlock, fill: Fill, spared: frozenset[bytes] = frozenset()) -> bool:
        """Begin to write a block's file from what `fill` copies; False: not now, or it is there."""
        amount = cold.space.codec.size
        if not self.has_disk or cold.disk or cold.writing or not self.disk.accepts(amount):
            return False
        taken = file_bytes(amount)
        if not self.tier_limits("disk").fits(self.disk.bytes + taken):
            self.enforce("disk", taken, spared)
            if not self.tier_limits("disk").fits(self.disk.bytes + taken):  # what makes room has not gone yet
                return False
        if not self.disk.write(cold, fill, partial(self._written, cold)):
            return False
        self.holdings.show(cold)
        return True

    def copy_down(self, cold: ColdBlock, spared: frozenset[bytes] = frozenset()) -> bool:
        """Begin to write a block's file from host; False: not now, or it is there."""
        return cold.host is not None and self.write(cold, partial(self._copy_from_host, cold.host), spared)

    def _copy_from_host(self, source: HostSlot, into: HostSlot) -> Copied:
        self.disk.staging.view(into).numpy()[:] = self.host.view(source).numpy()  # torch would wake all of its threads
        return DONE

    def _written(self, cold: ColdBlock, error: EngineError | None) -> None:
        if error is not None:
            self.journal.note("skipped", str(error), size=cold.space.codec.size, target="disk", holders=cold.holders)
            self.holdings.hide_if_nowhere(cold, str(error))
            self.settle()
        elif self.index.get(cold.key) is not cold:  # its owner has deleted it meanwhile
            self.disk.delete(cold)
        else:
            self.journal.note("saved", "a turn ended", size=cold.disk, target="disk", holders=cold.holders)
            self.holdings.remove_beginnings(cold)
            self.settle()

    def _slot_in_host(self, amount: int) -> HostSlot | None:
        """Room for one block in host, whatever has to leave it."""
        limits = self.tier_limits("host")
        if not limits.fits(self.host.used_bytes + amount) and not self.enforce("host", amount):
            return None
        slot = self.host.take(amount)
        if slot is None:  # room in sum, but in segments of other sizes
            self.host.compact()
            slot = self.host.take(amount)
        return slot

    def take_stock(self, space: Space) -> int:
        """Take in what the disk holds of a model from earlier runs; how many blocks."""
        blocks = self.disk.served(space) if self.has_disk else []
        for cold in blocks:
            if self.index.get(cold.key) is None:
                self.index.add(cold)
        if not self.tier_limits("disk").fits(self.disk.bytes):
            self.enforce("disk")
        return len(blocks)

    # --- letting go ---------------------------------------------------------------------------------------------------

    def demote(self, session_id: str, to: Tier | None) -> tuple[int, int, bool]:
        """Take what only this session holds off the tiers above `to`: blocks and bytes that left one; whether all have.

        Those that have not wait for what is being read or written.
        """
        blocks = amount = 0
        own = [cold for cold in self.index.held_by(session_id) if cold.holders == {session_id}]
        done = True
        for cold in sorted(own, key=lambda cold: -cold.depth):
            if to in ("device", "host"):
                break
            if cold.reads or cold.writing or (to == "disk" and cold.host and not self._reaches_disk(cold)):
                done = False
                continue
            if cold.host is not None:
                blocks, amount = blocks + 1, amount + size(cold, "host")
                self.holdings.take_from_host(cold, WISHED)
            if to is None and cold.disk:
                blocks, amount = blocks + 1, amount + cold.disk
                self.holdings.take_from_disk(cold, WISHED)
        return blocks, amount, done

    def _reaches_disk(self, cold: ColdBlock) -> bool:
        return bool(cold.disk) or self.copy_down(cold) or not self.must_wait(cold)

    # --- what can be seen ---------------------------------------------------------------------------------------------

    def load_s(self, tier: Tier, amount: int) -> float | None:
        """How long copying so many bytes from a tier takes; None: nobody has tried lately."""
        if tier == "host":
            return self.copy_times.seconds_for(amount)
        return self.disk.rate.seconds_for(amount) if self._clock() - self.disk.read_at < PROBE_S else None

    def close(self) -> None:
        """Let the copies that were begun end."""
        self.holdings.note_owed(now=True)
        self.disk.close()
