"""A block manager with no pool under it, and short ways to use and to look at it."""

from __future__ import annotations

from collections import Counter
from typing import Any

from engine.cache import BlockManager, Lease, Scope, violations


class Books:
    """`copies` are the token copies that were asked for, `freed` the blocks that were destroyed, in order."""

    def __init__(self, blocks: int, block_size: int, fingerprint: bytes) -> None:
        self.copies: list[tuple[int, int, int]] = []
        self.freed: list[int] = []
        self.manager = BlockManager(
            blocks,
            block_size,
            fingerprint=fingerprint,
            copy_tokens=lambda source, target, count: self.copies.append((source, target, count)),
            on_free=self.freed.append,
        )

    def take(self, token_ids: list[int], session: str = "s", **scope: Any) -> Lease:
        """A lease with all its tokens computed."""
        lease = self.manager.acquire(Scope(session, **scope), token_ids, spare=0)
        assert lease is not None, "no room"
        self.manager.commit(lease, token_ids[lease.computed :])
        return lease

    def keep(self, token_ids: list[int], session: str = "s", **scope: Any) -> None:
        """Compute and release: the tokens are idle."""
        self.manager.release(self.take(token_ids, session, **scope))

    def found(self, token_ids: list[int], session: str = "s", **scope: Any) -> int:
        """How many of these tokens, followed by one more, would be reused."""
        return self.manager.match(Scope(session, **scope), [*token_ids, -1]).reused

    def order(self) -> list[list[int]]:
        """The tokens of the idle blocks in the order in which they would be evicted."""
        return [block.token_ids for block in self.manager.idle.order()]

    def session_tokens(self) -> dict[str, int]:
        """Tokens of each session that can be found."""
        return session_tokens(self.manager)

    def state(self) -> dict[str, Any]:
        """All that can be told apart, as plain values."""
        manager = self.manager
        return {
            "free": manager.free.ids(),
            "idle": [block.id for block in manager.idle.order()],
            "hashes": {name: block.id for name, block in manager.index.hashes().items()},
            "entries": sorted((block.parent_hash or b"", block.id) for block in manager.index),
            "blocks": {
                block.id: (block.token_ids[:], block.leases, sorted(block.holders), block.salt)
                for block in manager.blocks.values()
            },
            "leases": len(manager.leases),
        }

    def violations(self) -> list[str]:
        return violations(self.manager)


def session_tokens(manager: BlockManager) -> dict[str, int]:
    """Tokens of each session that the pool holds; shared ones count for each of theirs."""
    tokens: Counter[str] = Counter()
    for block in manager.index:
        for session_id in block.holders:
            tokens[session_id] += len(block.token_ids)
    return dict(tokens)
