"""One tier of a given size under a policy, played over a trace of turns: which tokens it still has when they return.

It holds keys in place of K and V, and asks `engine.cache.policy.decide` as the engine does. It differs from the engine
in that turns come one after another, that a block counts the same whatever its model, and that of a block in which a
prompt goes on differently nothing is reused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from engine.cache.policy import ByScore, Entry, Key, Policy, TierLimits, Value, decide
from engine.config import CacheConfig
from engine.protocol import TurnTrace

KEY = 8  # bytes of each block in a trace
TOKEN_S = 0.002  # that computing a token takes, and so much again for every `DOUBLE` tokens before it
DOUBLE = 4000


@dataclass(frozen=True)
class Found:
    """What one turn found: `reused` of its `prompt` tokens. `returning`: its session has had a turn before."""

    prompt: int
    reused: int
    returning: bool


@dataclass
class _Block:
    parent: Key
    depth: int
    tokens: int
    last_used: float
    holders: set[str] = field(default_factory=set)


class Tier:
    """`budget` in blocks; None holds everything. `most` is how many blocks there were at the same time."""

    def __init__(self, policy: Policy, budget: int | None, block_size: int) -> None:
        self._policy, self._block_size = policy, block_size
        usual = CacheConfig()
        self._limits = None if budget is None else TierLimits(budget, usual.device_high, usual.device_low)
        self._blocks: dict[Key, _Block] = {}
        self._chains: dict[str, list[Key]] = {}  # each session's last
        self._live: dict[str, frozenset[Key]] = {}
        self._seen: set[str] = set()
        self.most = 0

    def turn(self, turn: TurnTrace) -> Found:
        """Look a turn's blocks up, then hold them all."""
        keys, prompt = keys_of(turn), prompt_tokens(turn)
        before = self._chains.get(turn.session_id)
        matched = list(takewhile(self._blocks.__contains__, keys))
        reused = len(matched) * self._block_size
        tail = self._tail(before, matched, keys)
        if tail is not None:
            reused += self._blocks[tail].tokens
        self._hold(turn, keys, matched, tail)
        returning = turn.session_id in self._seen
        self._seen.add(turn.session_id)
        return Found(prompt, max(0, min(reused, prompt - 1)), returning)

    def _tail(self, before: list[Key] | None, matched: list[Key], keys: list[Key]) -> Key | None:
        """The part-filled block that the session's last turn ended in, where this one goes on from it."""
        number = len(matched)
        if before is None or len(before) != number + 1 or before[:-1] != matched or number == len(keys):
            return None
        tail = self._blocks.get(before[-1])
        return before[-1] if tail is not None and tail.tokens < self._block_size else None

    def _hold(self, turn: TurnTrace, keys: list[Key], matched: list[Key], tail: Key | None) -> None:
        if tail is not None:
            del self._blocks[tail]  # it is filled up and becomes another
        new = keys[len(matched) :]
        if not self._make_room(len(new), frozenset(matched), turn.at):
            return
        tokens = prompt_tokens(turn) + max(0, turn.output_tokens - 1)  # the token sampled last was never read
        for depth, key in enumerate(keys):
            block = self._blocks.get(key)
            if block is None:
                parent = keys[depth - 1] if depth else turn.model.encode()
                size = min(self._block_size, tokens - depth * self._block_size)
                block = self._blocks[key] = _Block(parent, depth, size, turn.at)
            block.last_used = turn.at
            block.holders.add(turn.session_id)
        self._chains[turn.session_id], self._live[turn.session_id] = keys, frozenset(keys)
        self.most = max(self.most, len(self._blocks))

    def _make_room(self, needed: int, in_use: frozenset[Key], now: float) -> bool:
        if self._limits is None or self._limits.fits(len(self._blocks) + needed):
            return True
        idle = [self._entry(key, block) for key, block in self._blocks.items() if key not in in_use]
        used = len(self._blocks)
        for move in decide(self._policy, idle, self._limits, now, used=used, below=None, needed=needed):
            del self._blocks[move.key]
        return self._limits.fits(len(self._blocks) + needed)

    def _entry(self, key: Key, block: _Block) -> Entry:
        live = any(key in self._live.get(holder, ()) for holder in block.holders)
        start = block.depth * self._block_size
        return Entry(
            key=key,
            parent=block.parent,
            bytes=1,
            tokens=block.tokens,
            depth=block.depth,
            last_used=block.last_used,
            expires_at=None,
            value=Value.SHARED if len(block.holders) > 1 else Value.LIVE if live else Value.SUPERSEDED,
            recompute_s=TOKEN_S * block.tokens * (1 + (start + block.tokens / 2) / DOUBLE),
        )


def keys_of(turn: TurnTrace) -> list[Key]:
    """The blocks of a turn, first to last."""
    return [turn.blocks[at : at + KEY] for at in range(0, len(turn.blocks), KEY)]


def prompt_tokens(turn: TurnTrace) -> int:
    """The tokens of a turn's prompt."""
    return turn.device_tokens + turn.host_tokens + turn.disk_tokens + turn.computed_tokens


def hindsight(turns: Sequence[TurnTrace]) -> Policy:
    """Who knows the trace: what is used again last goes first. A yardstick, which no policy can follow."""
    uses: dict[Key, list[float]] = defaultdict(list)
    later: dict[str, float] = {}
    for turn in reversed(turns):
        keys = keys_of(turn)
        if keys and turn.session_id in later:
            uses[keys[-1]].append(later[turn.session_id])  # a part-filled block goes on under another key
        for key in keys:
            uses[key].append(turn.at)
        later[turn.session_id] = turn.at

    def score(entry: Entry, now: float) -> tuple[float, ...]:
        times = uses[entry.key]  # the soonest at the end
        while times and times[-1] <= now:
            times.pop()
        return (-times[-1] if times else float("-inf"),)

    return ByScore("hindsight", score)
