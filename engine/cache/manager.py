"""Who holds which block of the pool: finding, leasing, publishing, forgetting. The one owner of every block.

It knows nothing of tensors, requests or time. "No room" is a return value; a broken invariant raises `RuntimeError`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.cache.below import Below
from engine.cache.block import Block, Lease, Scope
from engine.cache.free import FreeBlocks
from engine.cache.idle import IdleBlocks
from engine.cache.index import PrefixIndex
from engine.cache.match import Match

CopyTokens = Callable[[int, int, int], None]


class BlockManager:
    """Bookkeeping of `total_blocks` blocks of `block_size` tokens; each is free, leased or idle.

    `copy_tokens(source, target, count)` copies K/V between blocks at once; `on_free(block_id)` is told of every block
    that is destroyed. `fingerprint` stands for all that makes K/V comparable: weights, dtype, layout. `below`, where
    there is one, is asked who goes, and offered what goes for lack of room.
    """

    def __init__(
        self,
        total_blocks: int,
        block_size: int,
        *,
        fingerprint: bytes,
        copy_tokens: CopyTokens,
        on_free: Callable[[int], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        below: Below | None = None,
    ) -> None:
        self.total_blocks, self.block_size = total_blocks, block_size
        self.free = FreeBlocks(total_blocks)
        self._below, self._clock = below, clock
        self.idle = self._no_idle_blocks(total_blocks)
        self.index = PrefixIndex(fingerprint)
        self.blocks: dict[int, Block] = {}
        self.leases: set[Lease] = set()
        self.evicted_blocks = 0
        self.reused_tokens = 0
        self._copy_tokens, self._on_free = copy_tokens, on_free

    # --- finding ----------------------------------------------------------------------------------------------------

    #             0             bs            2 bs          3 bs              len - 1
    #   prompt    |-------------|-------------|-------------|------------------|x|     x: the last token is always
    #   index     [    full     ][    full    ][ tail: a b c d … ]                      computed, for its logits
    #   reused    |=============|=============|======|
    #              leased as it is              a b c: copied into a private block, or continued in place where the
    #                                           tail is this session's, idle, and ends where the match ends
    #   computed                                     |------|------------------|-|
    #
    # When the prompt ends with a full cached block, x cuts it: its other tokens are then a tail of bs - 1 and copied.
    def match(self, scope: Scope, token_ids: Sequence[int]) -> Match:
        """What of `token_ids` is there now, at most all but the last. Changes nothing, not even recency."""
        size, limit = self.block_size, max(0, len(token_ids) - 1)
        full: list[Block] = []
        parent = self.index.root
        for start in range(0, limit - size + 1, size):
            block = self.index.full(parent, token_ids[start : start + size], scope.salt_at(len(full), size))
            if block is None or block.hash is None:
                break
            full.append(block)
            parent = block.hash
        start = len(full) * size
        rest = token_ids[start : min(start + size, limit)]
        best = Match(tuple(full), start)
        salt, public = scope.salt_at(len(full), size), scope.public_at(len(full), size)
        for count, block in self.index.longest(parent, rest, salt, public):
            adopt = block.salt == salt and self._can_continue(block, count, scope)
            if (count, adopt) > (best.tail_tokens, best.adopt):
                best = Match(tuple(full), start + count, block, count, adopt)
        return best

    def _can_continue(self, block: Block, count: int, scope: Scope) -> bool:
        whole = block.hash is None and count == len(block.token_ids)
        return whole and block.leases == 0 and block.holders <= {scope.session_id}

    # --- leasing ----------------------------------------------------------------------------------------------------

    def acquire(self, scope: Scope, token_ids: Sequence[int], spare: int = 1) -> Lease | None:
        """A lease with blocks for all of `token_ids`, of which `lease.computed` tokens are there already.

        None when those blocks and `spare` more cannot be had; then nothing has changed. What the lease finds is held
        before anything is evicted.
        """
        match = self.match(scope, token_ids)
        lease = self._lease(scope, match, len(token_ids), spare)
        if lease is None and match.tail is not None:
            lease = self._lease(scope, match.without_copy(), len(token_ids), spare)
        if lease is not None:
            self.reused_tokens += lease.reused
        return lease

    def _lease(self, scope: Scope, match: Match, length: int, spare: int) -> Lease | None:
        found = [*match.full, match.tail] if match.tail is not None else list(match.full)
        kept = found if match.adopt else list(match.full)
        fresh = self.blocks_for(length) - len(kept)
        if fresh + spare > self.room - sum(block.leases == 0 for block in found):
            return None
        source = match.tail if not match.adopt else None
        lease = Lease(scope, kept, match.reused, match.reused)
        self.leases.add(lease)
        for block in kept:
            self._hold(block, scope)
        if source is not None:
            self._hold(source)
        elif match.tail is not None:  # what this lease adds to it may lie beyond its own preset
            match.tail.public = min(match.tail.public, scope.public_at(match.tail.depth, self.block_size))
        try:
            self._grow(lease, fresh)
            if source is not None:
                self._copy(lease, source, match.tail_tokens)
        except BaseException:
            self._let_go([source] if source is not None else [])  # before its parents, like every tail
            self.release(lease)
            raise
        self._let_go([source] if source is not None else [])
        return lease

    def extend(self, lease: Lease, length: int) -> bool:
        """Give the lease blocks for `length` tokens in all; False when there is no room, and nothing has changed."""
        missing = max(0, self.blocks_for(length) - len(lease.blocks))
        if missing > self.room:
            return False
        self._grow(lease, missing)
        return True

    def shrink(self, lease: Lease, length: int) -> None:
        """Free the lease's last blocks, of which `length` tokens in all need none: nothing was published in them."""
        kept = self.blocks_for(length)
        unused, lease.blocks[kept:] = lease.blocks[kept:], []
        self._let_go(unused)

    def commit(self, lease: Lease, token_ids: Sequence[int]) -> None:
        """Publish the K/V of the next `token_ids`, which the forward pass has completed.

        A block that becomes full and is there already gives way to the first one.
        """
        done = 0
        while done < len(token_ids):
            number, filled = divmod(lease.computed, self.block_size)
            block = lease.blocks[number]
            if len(block.token_ids) != filled or block.leases != 1:
                raise RuntimeError(f"block {block.id} is not this lease's to fill at token {lease.computed}")
            part = token_ids[done : done + self.block_size - filled]
            block.token_ids.extend(part)
            done += len(part)
            lease.computed += len(part)
            self._publish(lease, number)

    def release(self, lease: Lease) -> None:
        """End the lease. Its computed tokens stay as idle blocks; blocks that hold nothing to be found are freed."""
        if self._below is not None:
            self._below.released(lease)
        self.leases.remove(lease)
        self._let_go(lease.blocks)

    # --- forgetting -------------------------------------------------------------------------------------------------

    def evict(self, block: Block) -> None:
        """Destroy a block: out of the index, out of the idle ones, its slot free. Everything that ends one calls this.

        Raises `RuntimeError` for a block that is leased or that others continue.
        """
        if block.leases:
            raise RuntimeError(f"block {block.id} is leased and cannot be evicted")
        self.evicted_blocks += block.parent_hash is not None
        self.index.remove(block)
        self.idle.pop(block.id, None)
        del self.blocks[block.id]
        self.free.add(block.id)
        if self._on_free is not None:
            self._on_free(block.id)

    def evict_idle(self, count: int) -> int:
        """Evict up to `count` idle blocks, in the order of the idle ones; how many went."""
        count = max(0, min(count, len(self.idle)))
        for _ in range(count):
            block = self.idle.popitem()[1]
            if self._below is not None:
                self._below.keep(block)
            self.evict(block)
        return count

    def drop(self, session_id: str) -> int:
        """Forget a session, and evict the blocks that only it holds; how many went. It must have no lease."""
        if any(lease.scope.session_id == session_id for lease in self.leases):
            raise RuntimeError(f"session {session_id} was dropped while it runs")
        gone = [block for block in self.idle.oldest_first() if block.holders == {session_id}]
        for block in gone:  # children before parents
            self.evict(block)
        for block in self.blocks.values():
            block.holders.discard(session_id)
        return len(gone)

    # --- changing size ----------------------------------------------------------------------------------------------

    def make_fit(self, total_blocks: int) -> dict[int, int]:
        """Evict idle blocks until `total_blocks` hold the rest; the new id of every block that stays, by its old one.

        Nothing is renumbered yet. Raises `RuntimeError` when the leased blocks alone are more.
        """
        if self.leased_blocks > total_blocks:
            raise RuntimeError(f"{self.leased_blocks} blocks are leased; {total_blocks} cannot hold them")
        self.evict_idle(len(self.blocks) - total_blocks)
        ids = sorted(self.blocks)
        if not ids or ids[-1] < total_blocks:
            return {old: old for old in ids}  # neighbours keep the room that they have to grow
        return {old: new for new, old in enumerate(ids)}

    def renumber(self, total_blocks: int, moved: Mapping[int, int]) -> None:
        """Have `total_blocks` blocks from now on, those in use under the ids that `make_fit` chose for this size."""
        order = self.idle.oldest_first()
        for block in self.blocks.values():
            block.id = moved[block.id]
        self.blocks = {block.id: block for block in self.blocks.values()}
        self.index.renumber()
        self.idle = self._no_idle_blocks(total_blocks)
        for block in order:
            self.idle[block.id] = block
        self.free = FreeBlocks(total_blocks, used=self.blocks)
        self.total_blocks = total_blocks

    # --- counting ---------------------------------------------------------------------------------------------------

    def blocks_for(self, tokens: int) -> int:
        """How many blocks so many tokens take."""
        return -(-tokens // self.block_size)

    @property
    def room(self) -> int:
        """Blocks that can be had: free ones, and idle ones that would go for it."""
        return len(self.free) + len(self.idle)

    @property
    def leased_blocks(self) -> int:
        """Blocks that at least one lease holds."""
        return len(self.blocks) - len(self.idle)

    def counts(self) -> dict[str, Any]:
        """What `protocol.Snapshot` says of blocks."""
        return {
            "total_blocks": self.total_blocks,
            "free_blocks": len(self.free),
            "leased_blocks": self.leased_blocks,
            "idle_blocks": len(self.idle),
            "reused_tokens": self.reused_tokens,
            "evicted_blocks": self.evicted_blocks,
        }

    # --- inside -----------------------------------------------------------------------------------------------------

    def _no_idle_blocks(self, most: int) -> IdleBlocks:
        return IdleBlocks(most, self._below.order if self._below is not None else None)

    def _hold(self, block: Block, scope: Scope | None = None) -> None:
        self.idle.pop(block.id, None)
        block.leases += 1
        if scope is not None:
            block.holders.add(scope.session_id)

    def _let_go(self, chain: Sequence[Block]) -> None:
        for block in chain:
            block.leases -= 1
        unused = [block for block in chain if block.leases == 0]
        for block in unused:
            block.last_used = self._clock()
        self.idle.give_back(block for block in unused if block.parent_hash is not None)
        for block in unused:
            if block.parent_hash is None:
                self.evict(block)

    def _grow(self, lease: Lease, count: int) -> None:
        self.evict_idle(count - len(self.free))
        last = lease.blocks[-1].id if lease.blocks else None
        for block_id in self.free.take(count, after=last):
            depth, scope = len(lease.blocks), lease.scope
            salt, public = scope.salt_at(depth, self.block_size), scope.public_at(depth, self.block_size)
            preset = public == self.block_size
            block = Block(block_id, salt, {scope.session_id}, depth=depth, preset=preset, public=public, leases=1)
            self.blocks[block_id] = block
            lease.blocks.append(block)

    def _copy(self, lease: Lease, source: Block, count: int) -> None:
        number = lease.computed // self.block_size
        target = lease.blocks[number]
        self._copy_tokens(source.id, target.id, count)
        target.token_ids.extend(source.token_ids[:count])
        target.lossy = source.lossy
        self._publish(lease, number)

    def _publish(self, lease: Lease, number: int) -> None:
        block = lease.blocks[number]
        parent_hash = lease.blocks[number - 1].hash if number else self.index.root
        if parent_hash is None:
            return  # behind a hash collision: private, and forgotten with the lease
        self.index.add(block, parent_hash)
        if len(block.token_ids) == self.block_size:
            first = self.index.seal(block)
            if first is not block:
                self._hold(first, lease.scope)
                lease.blocks[number] = first
                block.leases = 0
                self.evict(block)
