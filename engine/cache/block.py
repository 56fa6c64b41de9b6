"""What a block is: who it belongs to, which tokens it holds, and the hash that names it. Knows nothing of tensors."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

HASH_BYTES = 16


def root_hash(fingerprint: bytes) -> bytes:
    """Where every chain starts: another model, dtype or layout has another root, and so shares no hash."""
    return hashlib.blake2b(fingerprint, digest_size=HASH_BYTES, person=b"keepwarm-root").digest()


def block_hash(parent: bytes, token_ids: Sequence[int], salt: bytes) -> bytes:
    """The chained name of a full block: blake2b-128 over its parent's hash, its salt and its token ids."""
    head = struct.pack(f"<{len(parent)}sI{len(salt)}s", parent, len(salt), salt)
    return hashlib.blake2b(head + struct.pack(f"<{len(token_ids)}q", *token_ids), digest_size=HASH_BYTES).digest()


def tail_key(parent: bytes, token_ids: Sequence[int], salt: bytes, session_id: str) -> bytes:
    """The name of a part-filled block in the tiers: like `block_hash`, and of one session only."""
    whose = session_id.encode()
    head = struct.pack(f"<{len(parent)}sI{len(salt)}sI{len(whose)}s", parent, len(salt), salt, len(whose), whose)
    body = head + struct.pack(f"<{len(token_ids)}q", *token_ids)
    return hashlib.blake2b(body, digest_size=HASH_BYTES, person=b"keepwarm-tail").digest()


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many leading ids two sequences share."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


@dataclass(frozen=True)
class Scope:
    """Who asks: a session, its user's salt, and how many leading tokens are a preset that all users share."""

    session_id: str
    salt: bytes = b""
    shared_len: int = 0

    def salt_at(self, index: int, block_size: int) -> bytes:
        """The salt of block `index`: none where the whole block lies inside the shared preset."""
        return b"" if self.shares(index, block_size) else self.salt

    def shares(self, index: int, block_size: int) -> bool:
        """Whether block `index` lies inside the preset."""
        return self.public_at(index, block_size) == block_size

    def public_at(self, index: int, block_size: int) -> int:
        """How many leading tokens of block `index` lie inside the preset."""
        return min(max(0, self.shared_len - index * block_size), block_size)

    def reach(self, other: Scope, block_size: int) -> int | None:
        """Up to which position the two could share blocks if their tokens agreed; None: without limit."""
        mine, theirs = self._unsalted(block_size), other._unsalted(block_size)
        if mine == theirs and self.salt == other.salt:
            return None
        limits = [length for length in (mine, theirs) if length is not None]
        return min(limits, default=None)

    def _unsalted(self, block_size: int) -> int | None:
        """How many leading tokens lie in blocks without salt; None: all."""
        return self.shared_len // block_size * block_size if self.salt else None


@dataclass(eq=False)
class Block:
    """A slot of the pool in use. Identity is the object; the manager is the one owner of all of them.

    `token_ids` are exactly the tokens whose K/V the slot holds. `hash` names a full, published block and is None
    before; `parent_hash` is set while the block is published. `holders` are the sessions that have read it. `depth`
    blocks come before it. `public` of its leading tokens may lie inside a shared preset; `preset` ones lie there whole.
    `lossy` ones came from rounded copies.
    `last_used` is when its last lease ended.
    """

    id: int
    salt: bytes
    holders: set[str]
    depth: int = 0
    preset: bool = False
    public: int = 0
    lossy: bool = False
    last_used: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    parent_hash: bytes | None = None
    hash: bytes | None = None
    leases: int = 0

    @property
    def key(self) -> bytes | None:
        """What names its tokens in every tier; None while it cannot be found."""
        if self.hash is not None or self.parent_hash is None:
            return self.hash
        return tail_key(self.parent_hash, self.token_ids, self.salt, min(self.holders))


@dataclass(eq=False)
class Lease:
    """A running sequence's hold on its blocks, first to last; none of them is evicted or reused while it lasts.

    `computed` tokens have their K/V in the blocks; `reused` of them were found there when the lease was made, or came
    from a tier below. One that does not `count` as a use of its session leaves what is known of that alone.
    """

    scope: Scope
    blocks: list[Block]
    computed: int = 0
    reused: int = 0
    counts: bool = True

    def block_ids(self, length: int, block_size: int) -> tuple[int, ...]:
        """The block table for positions 0 … length - 1."""
        return tuple(block.id for block in self.blocks[: -(-length // block_size)])
