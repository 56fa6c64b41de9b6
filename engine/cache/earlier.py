"""Blocks that earlier runs left on disk, of models that are not served yet: whose they are, and how they go.

Their headers and the sessions' records say all that is known of them. The one owner of it until a model is served.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.cache.disk import BlockFiles
from engine.cache.holders import HolderFiles
from engine.cache.store import StoredBlock

Stays = Callable[[set[str]], bool]
Delete = Callable[[bytes, bytes, int], None]  # of a fingerprint and a key, and the bytes of the file; not at once


@dataclass
class EarlierBlock:
    """A block's file, who holds it, and the Unix time of its last use."""

    stored: StoredBlock
    holders: set[str]
    used_at: float


@dataclass
class Earlier:
    """Blocks by model and key. `sessions` are those that hold any, with the Unix time of their last use.

    Of what the `unnoted` hold, no record tells.
    """

    delete: Delete
    models: dict[bytes, dict[bytes, EarlierBlock]] = field(default_factory=dict)
    sessions: dict[str, float] = field(default_factory=dict)
    unnoted: set[str] = field(default_factory=set)

    @classmethod
    def found(cls, files: BlockFiles, records: HolderFiles, now: float, delete: Delete) -> Earlier:
        """Read what is there; `now` is Unix time.

        A record says who holds a block. Where none names it, those of its own header do that live: they were about to
        be noted when the engine ended. Others were deleted.
        """
        earlier = cls(delete)
        holders: dict[bytes, dict[str, float]] = {}
        for record in records.load_all():
            earlier.sessions[record.session_id] = record.used_at
            for keys in record.keys.values():
                for key in keys:
                    holders.setdefault(key, {})[record.session_id] = record.used_at
        for fingerprint in files.usage():
            blocks = earlier.models[fingerprint] = {}
            for stored in files.scan(fingerprint):
                whose = holders.get(stored.header.key)
                if whose is None:
                    whose = dict.fromkeys(filter(records.lives, stored.header.holders), now)
                    earlier.unnoted |= whose.keys()
                    earlier.sessions |= whose
                used_at = max(whose.values(), default=now)
                blocks[stored.header.key] = EarlierBlock(stored, set(whose), used_at)
        return earlier

    @property
    def size(self) -> int:
        """Bytes of all of it."""
        return sum(block.stored.bytes for blocks in self.models.values() for block in blocks.values())

    def take(self, fingerprint: bytes) -> list[EarlierBlock]:
        """A model is served from now on: what there is of it."""
        return list(self.models.pop(fingerprint, {}).values())

    def keys(self, session_id: str) -> dict[bytes, list[bytes]]:
        """What a session holds here, by model."""
        held = {
            fingerprint: [key for key, block in blocks.items() if session_id in block.holders]
            for fingerprint, blocks in self.models.items()
        }
        return {fingerprint: keys for fingerprint, keys in held.items() if keys}

    def drop(self, session_id: str) -> set[bytes]:
        """Forget a session and delete what only it holds; the keys of that."""
        gone = set()
        self.sessions.pop(session_id, None)
        for fingerprint, blocks in self.models.items():
            for key, block in list(blocks.items()):
                block.holders.discard(session_id)
                if not block.holders:
                    self._delete(fingerprint, key)
                    gone.add(key)
        return gone

    def drop_unheld(self) -> set[bytes]:
        """Delete what nobody holds, since nobody could ever have it deleted; the keys of that."""
        gone = set()
        for fingerprint, blocks in self.models.items():
            for key in [key for key, block in blocks.items() if not block.holders]:
                self._delete(fingerprint, key)
                gone.add(key)
        return gone

    def expire(self, before: float, stays: Stays) -> int:
        """Delete what was last used before this Unix time, unless it `stays` for its holders; the bytes that went."""
        gone = 0
        for fingerprint, blocks in self.models.items():
            for key, block in list(blocks.items()):
                if block.used_at < before and not stays(block.holders):
                    gone += self._delete(fingerprint, key)
        return gone

    def give_way(self, wanted: int, stays: Stays) -> int:
        """Delete the blocks that were used longest ago until so many bytes have gone; how many went."""
        oldest = sorted(
            (block.used_at, -block.stored.header.depth, fingerprint, key)
            for fingerprint, blocks in self.models.items()
            for key, block in blocks.items()
            if not stays(block.holders)
        )
        gone = 0
        for _, _, fingerprint, key in oldest:
            if gone >= wanted:
                break
            gone += self._delete(fingerprint, key)
        return gone

    def leave_missing(self, has: Callable[[bytes, bytes], bool]) -> int:
        """Forget the blocks whose files are gone; the bytes of those."""
        gone = 0
        for fingerprint, blocks in self.models.items():
            for key in [key for key in blocks if not has(fingerprint, key)]:
                gone += blocks.pop(key).stored.bytes
        return gone

    def _delete(self, fingerprint: bytes, key: bytes) -> int:
        size = self.models[fingerprint].pop(key).stored.bytes
        self.delete(fingerprint, key, size)
        return size
