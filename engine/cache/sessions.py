"""Who uses which blocks: each session's last path, when that was, and what a person wishes for it. No torch, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import count

from engine.cache.pins import PINNED_SHARE, protect
from engine.cache.policy import Entry, Value, expires_at

MOST = 20_000  # sessions


@dataclass
class SessionUse:
    """One session. `chain` are the keys of the blocks of its last prompt and reply, first to last, of `tokens` tokens.

    `ttl` in seconds stands for every tier's own. Of two that are pinned, the one with the lower `rank` was so earlier.
    """

    last_used: float
    chain: tuple[bytes, ...] = ()
    live: frozenset[bytes] = frozenset()
    tokens: int = 0
    pinned: bool = False
    rank: int = 0
    ttl: float | None = None


class Sessions:
    """The one owner of what is known of sessions. Of very many, those that were used longest ago are forgotten."""

    def __init__(self) -> None:
        self._uses: dict[str, SessionUse] = {}
        self._wished: dict[str, SessionUse] = {}  # those that are pinned or have a ttl: few, and asked for at each step
        self._ranks = count()

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._uses))

    def get(self, session_id: str) -> SessionUse | None:
        """What is known of a session."""
        return self._uses.get(session_id)

    def used(self, session_id: str, chain: tuple[bytes, ...], tokens: int, now: float) -> None:
        """A session has read and written this path."""
        use = self._uses.pop(session_id, None) or SessionUse(now)
        self._uses[session_id] = use  # the one used last at the end
        use.last_used, use.chain, use.live, use.tokens = now, chain, frozenset(chain), tokens
        if len(self._uses) > MOST:
            self.forget(next((name for name, old in self._uses.items() if not old.pinned), session_id))

    def remember(self, session_id: str, last_used: float) -> None:
        """A session of an earlier run, of which only files are left."""
        self._uses.setdefault(session_id, SessionUse(last_used))

    def wish(self, session_id: str, now: float, *, pinned: bool, ttl: float | None) -> None:
        """Note what a person wishes for a session, used or not."""
        use = self._uses.setdefault(session_id, SessionUse(now))
        if pinned and not use.pinned:
            use.rank = next(self._ranks)
        use.pinned, use.ttl = pinned, ttl
        self._wished.pop(session_id, None)
        if pinned or ttl is not None:
            self._wished[session_id] = use

    def forget(self, session_id: str) -> None:
        """The session is gone, and so are its wishes."""
        self._uses.pop(session_id, None)
        self._wished.pop(session_id, None)

    def shortest_ttl(self) -> float | None:
        """The least of what people wished for their sessions."""
        return min((use.ttl for use in self._wished.values() if use.ttl is not None), default=None)

    def pinned(self, holders: Iterable[str]) -> bool:
        """Whether any of them is pinned."""
        return any(use.pinned for use in self._known(holders))

    def protect(self, entries: Sequence[Entry], whose: Mapping[bytes, Set[str]], budget: int) -> Sequence[Entry]:
        """`entries` with what is pinned, as far as that may take of a tier's `budget`; `whose` says their holders."""
        if not any(use.pinned for use in self._wished.values()):
            return entries
        ranks = {}
        for entry in entries:
            if pins := [use.rank for use in self._known(whose[entry.key]) if use.pinned]:
                ranks[entry.key] = min(pins)
        return protect(entries, ranks, int(budget * PINNED_SHARE))

    def value(self, key: bytes, holders: Iterable[str], *, preset: bool) -> Value:
        """What a block of these holders is worth, pinned or not; `preset`: it lies inside a shared preset."""
        known = self._known(holders)
        if preset or len(known) > 1:
            return Value.SHARED
        return Value.LIVE if any(key in use.live or not use.chain for use in known) else Value.SUPERSEDED

    def expires_at(self, holders: Iterable[str], last_used: float, ttl: float | None) -> float | None:
        """When a block last used then leaves a tier of that `ttl`, pinned or not; None: never.

        The last of its holders counts.
        """
        if ttl is None and not self._wished:
            return None
        uses = [(last_used, use.ttl) for use in self._known(holders)]
        return expires_at(uses or [(last_used, None)], ttl)

    def _known(self, holders: Iterable[str]) -> list[SessionUse]:
        return [self._uses[holder] for holder in holders if holder in self._uses]
