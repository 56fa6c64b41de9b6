"""Who has said what, and so may hold which block: counted from the requests alone, without a cache."""

from __future__ import annotations

from engine.cache.block import Scope, block_hash, common_prefix, tail_key


class Said:
    """The paths of every session, one a request; `keys` are those of all blocks that a session's tokens can make."""

    def __init__(self, root: bytes, block_size: int) -> None:
        self._root, self._block_size = root, block_size
        self._paths: dict[str, dict[str, tuple[Scope, list[int]]]] = {}
        self._keys: dict[str, set[bytes]] = {}

    def add(self, request: str, scope: Scope, path: list[int]) -> None:
        """So far, a request has this path."""
        paths = self._paths.setdefault(scope.session_id, {})
        if len(path) > len(paths.get(request, (scope, []))[1]):
            paths[request] = (scope, list(path))
            self._keys.setdefault(scope.session_id, set()).update(self._named(scope, path))

    def forget(self, session: str) -> None:
        """The session is deleted."""
        self._paths.pop(session, None)
        self._keys.pop(session, None)

    def may_hold(self, session: str, key: bytes) -> bool:
        """Whether a session's tokens make a block of this key."""
        return key in self._keys.get(session, set())

    def most(self, request: str, scope: Scope, prompt: list[int]) -> int:
        """How many tokens of a prompt can be found: what its user has said in other requests, or all of the preset."""
        limit, found = len(prompt) - 1, 0
        for paths in self._paths.values():
            for other, (theirs, path) in paths.items():
                if other != request:
                    count = common_prefix(prompt, path)
                    own = theirs.salt == scope.salt
                    found = max(found, min(limit, count if own else min(count, scope.shared_len, theirs.shared_len)))
        return found

    def _named(self, scope: Scope, path: list[int]) -> set[bytes]:
        keys, parent, size = set(), self._root, self._block_size
        for start in range(0, len(path), size):
            ids, salt = path[start : start + size], scope.salt_at(start // size, size)
            tails = range(1, min(size - 1, len(ids)) + 1)
            keys |= {tail_key(parent, ids[:count], salt, scope.session_id) for count in tails}
            if len(ids) == size:
                parent = block_hash(parent, ids, salt)
                keys.add(parent)
        return keys
