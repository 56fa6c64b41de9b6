"""Which computed tokens can be found again: full blocks by chained hash, part-filled ones through their parent.

It knows nothing of leases, recency or room; it sees a block exactly as far as its `token_ids` go.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.cache import block as naming
from engine.cache.block import Block, common_prefix


class PrefixIndex:
    """A tree of blocks whose links are hashes. Every entry but the root's children has its parent in the tree.

    Two entries never have one hash: an equal block is the same entry, and an unequal one (a collision) stays out.
    """

    def __init__(self, fingerprint: bytes) -> None:
        self.root = naming.root_hash(fingerprint)
        self._by_hash: dict[bytes, Block] = {}
        self._children: dict[bytes, dict[int, Block]] = {}

    def __iter__(self) -> Iterator[Block]:
        for children in self._children.values():
            yield from children.values()

    def children(self, parent_hash: bytes | None) -> list[Block]:
        """The entries that continue `parent_hash`, full or not, in the order in which they came."""
        return list(self._children.get(parent_hash, {}).values()) if parent_hash is not None else []

    def named(self, block_hash: bytes) -> Block | None:
        """The full block of this hash."""
        return self._by_hash.get(block_hash)

    def full(self, parent_hash: bytes, token_ids: Sequence[int], salt: bytes) -> Block | None:
        """The full block that continues `parent_hash` with exactly these ids under this salt; a collision is a miss."""
        found = self._by_hash.get(naming.block_hash(parent_hash, token_ids, salt))
        return found if found is not None and _is(found, parent_hash, token_ids, salt) else None

    def longest(
        self, parent_hash: bytes, token_ids: Sequence[int], salt: bytes, public: int
    ) -> list[tuple[int, Block]]:
        """The entries under `parent_hash` that share leading ids, each with how many it shares.

        Of another salt's, only what lies inside a preset on both sides is shared; `public` leading ids do on this one.
        """
        found = []
        for block in self.children(parent_hash):
            most = len(token_ids) if block.salt == salt else min(public, block.public)
            if count := common_prefix(block.token_ids, token_ids[:most]):
                found.append((count, block))
        return found

    def add(self, block: Block, parent_hash: bytes) -> None:
        """Make `block` visible under its parent; may be repeated as it fills."""
        block.parent_hash = parent_hash
        self._children.setdefault(parent_hash, {})[block.id] = block

    def seal(self, block: Block) -> Block:
        """Name a block that has just become full, and return the entry that now stands for its tokens.

        That is the block itself, or an equal one that was there first. On a collision the block leaves the index and
        is returned without a hash; nothing may then be published under it.
        """
        parent_hash = block.parent_hash
        if parent_hash is None:
            raise RuntimeError(f"block {block.id} was sealed before it was published")
        name = naming.block_hash(parent_hash, block.token_ids, block.salt)
        first = self._by_hash.setdefault(name, block)
        if first is block:
            block.hash = name
            return block
        self.remove(block)
        return first if _is(first, parent_hash, block.token_ids, block.salt) else block

    def remove(self, block: Block) -> None:
        """Take `block` out. Raises `RuntimeError` while something continues it; what is not in is ignored."""
        if self.children(block.hash):
            raise RuntimeError(f"block {block.id} left the index before the blocks that continue it")
        if block.parent_hash is not None:
            siblings = self._children[block.parent_hash]
            del siblings[block.id]
            if not siblings:
                del self._children[block.parent_hash]
        if block.hash is not None:
            del self._by_hash[block.hash]
        block.parent_hash = block.hash = None

    def renumber(self) -> None:
        """Take note of new ids of the blocks, all at once."""
        self._children = {
            parent: {block.id: block for block in children.values()} for parent, children in self._children.items()
        }

    def hashes(self) -> dict[bytes, Block]:
        """A copy of the full blocks by hash."""
        return dict(self._by_hash)


def _is(block: Block, parent_hash: bytes, token_ids: Sequence[int], salt: bytes) -> bool:
    return block.parent_hash == parent_hash and block.salt == salt and block.token_ids == list(token_ids)
