"""What host and disk hold, as entries: one per key, with its copies. Knows nothing of how bytes are kept or moved."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.cache import block as naming
from engine.cache.block import Block, Scope, common_prefix

if TYPE_CHECKING:  # they need torch
    from engine.cache.image import ImageCodec
    from engine.cache.segments import HostSlot


@dataclass(frozen=True, eq=False)
class Space:
    """What all blocks of one model share: the root of its chains, how an image is laid out, tokens in a block.

    `fingerprint` stands for everything that makes images comparable, the cold dtype and the format included.
    `block_bytes` are those of a block in the pool. `compute_s(start, count)` is about how many seconds the model takes
    for so many tokens; None: nobody knows yet.
    """

    fingerprint: bytes
    root: bytes
    codec: ImageCodec
    block_size: int
    block_bytes: int
    compute_s: Callable[[int, int], float | None]


@dataclass(eq=False)
class ColdBlock:
    """A block below the device, under its key. `host` is its slot there, `disk` the bytes of its file (0: none).

    `reads` transfers use its copies now, and keep them from going; `writing`: its file is on the way.
    """

    key: bytes
    parent: bytes
    token_ids: array[int]
    depth: int
    space: Space
    holders: set[str]
    last_used: float
    preset: bool = False
    lossy: bool = False
    host: HostSlot | None = None
    disk: int = 0
    reads: int = 0
    writing: bool = False

    @property
    def full(self) -> bool:
        """Whether more blocks can continue it."""
        return len(self.token_ids) == self.space.block_size

    @classmethod
    def of(cls, block: Block, space: Space) -> ColdBlock:
        """The entry for a block of the device that can be found."""
        if block.key is None or block.parent_hash is None:
            raise RuntimeError(f"block {block.id} cannot be found and so not be kept")
        return cls(
            key=block.key,
            parent=block.parent_hash,
            token_ids=array("q", block.token_ids),
            depth=block.depth,
            space=space,
            holders=set(block.holders),
            last_used=block.last_used,
            preset=block.preset,
            lossy=block.lossy or space.codec.lossy,
        )


@dataclass(frozen=True)
class Piece:
    """What a cold block gives to a prompt: its tokens up to position `end`."""

    cold: ColdBlock
    end: int


@dataclass
class ColdIndex:
    """Cold blocks by key, by what they continue, and by who holds them."""

    _by_key: dict[bytes, ColdBlock] = field(default_factory=dict)
    _children: dict[bytes, dict[bytes, ColdBlock]] = field(default_factory=dict)
    _held: dict[str, dict[bytes, ColdBlock]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[ColdBlock]:
        return iter(list(self._by_key.values()))

    def __len__(self) -> int:
        return len(self._by_key)

    def get(self, key: bytes) -> ColdBlock | None:
        """The entry of this key."""
        return self._by_key.get(key)

    def children(self, parent: bytes) -> list[ColdBlock]:
        """The entries that continue `parent`."""
        return list(self._children.get(parent, {}).values())

    def held_by(self, session_id: str) -> list[ColdBlock]:
        """The entries that a session holds."""
        return list(self._held.get(session_id, {}).values())

    def holders(self) -> list[str]:
        """Every session that holds anything."""
        return list(self._held)

    def add(self, cold: ColdBlock) -> None:
        """Make an entry visible."""
        self._by_key[cold.key] = cold
        self._children.setdefault(cold.parent, {})[cold.key] = cold
        for session_id in cold.holders:
            self._held.setdefault(session_id, {})[cold.key] = cold

    def remove(self, cold: ColdBlock) -> None:
        """Take an entry out."""
        del self._by_key[cold.key]
        _take(self._children, cold.parent, cold.key)
        for session_id in cold.holders:
            _take(self._held, session_id, cold.key)

    def hold(self, cold: ColdBlock, session_id: str) -> bool:
        """Note one more holder; whether it is new."""
        if session_id in cold.holders:
            return False
        cold.holders.add(session_id)
        self._held.setdefault(session_id, {})[cold.key] = cold
        return True

    def let_go(self, cold: ColdBlock, session_id: str) -> None:
        """Note one holder less."""
        cold.holders.discard(session_id)
        _take(self._held, session_id, cold.key)

    def find(self, space: Space, scope: Scope, token_ids: Sequence[int], start: int) -> list[Piece]:
        """What continues the first `start` tokens, at most all but the last; the ids of every entry are compared.

        `start` may lie inside a block; then the first piece holds all of that block.
        """
        size, limit = space.block_size, max(0, len(token_ids) - 1)
        pieces: list[Piece] = []
        parent = chain_hash(space, scope, token_ids, start // size)
        position = start // size * size
        while position < limit:
            number = position // size
            salt = scope.salt_at(number, size)
            ids = token_ids[position : position + size]
            if position + size <= limit:
                key = naming.block_hash(parent, ids, salt)
                cold = self._by_key.get(key)
                if cold is not None and list(cold.token_ids) == list(ids) and cold.parent == parent:
                    pieces.append(Piece(cold, position + size))
                    position, parent = position + size, key
                    continue
            best = self._longest(parent, token_ids[position : min(position + size, limit)], salt, scope.session_id)
            if best is not None and position + best.end > start:
                pieces.append(Piece(best.cold, position + best.end))
            break
        return pieces

    def _longest(self, parent: bytes, ids: Sequence[int], salt: bytes, session_id: str) -> Piece | None:
        """The entry under `parent` that shares most leading ids and that this salt, or this session, may see."""
        best: Piece | None = None
        for cold in self._children.get(parent, {}).values():
            count = common_prefix(cold.token_ids, ids)
            if count > (best.end if best is not None else 0) and _is_named(cold, salt, session_id):
                best = Piece(cold, count)
        return best


def chain_hash(space: Space, scope: Scope, token_ids: Sequence[int], blocks: int) -> bytes:
    """The hash that the first `blocks` full blocks of these tokens end in."""
    name = space.root
    for number in range(blocks):
        ids = token_ids[number * space.block_size : (number + 1) * space.block_size]
        name = naming.block_hash(name, ids, scope.salt_at(number, space.block_size))
    return name


def _is_named(cold: ColdBlock, salt: bytes, session_id: str) -> bool:
    """Whether this salt (and, for a tail, session) made the key: an entry does not say whose it is."""
    if cold.full:
        return cold.key == naming.block_hash(cold.parent, cold.token_ids, salt)
    return cold.key == naming.tail_key(cold.parent, cold.token_ids, salt, session_id)


def _take(books: dict[Any, dict[bytes, ColdBlock]], name: str | bytes, key: bytes) -> None:
    entries = books.get(name, {})
    entries.pop(key, None)
    if not entries:
        books.pop(name, None)
