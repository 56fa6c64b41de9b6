"""Who leaves a tier, whereto and why: pure decisions over plain values. Knows no tensor, no file and no clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import IntEnum
from operator import attrgetter
from typing import Any, Literal, Protocol

from engine.config import Tier
from engine.errors import EngineError

Key = bytes  # what a block is called in every tier
Reason = Literal["ttl", "watermark", "pressure"]

GRACE_S = 60.0  # idle times that differ by less than this hardly count in "cost": a person reads and types


class PolicyError(EngineError):
    """No such policy, or limits that no tier can keep; the message names the value and what would do."""


class Value(IntEnum):
    """What a block is worth, whatever its age: all blocks of a lower class go before any of a higher one."""

    SUPERSEDED = 0  # of a branch that was edited, regenerated or abandoned
    LIVE = 1
    SHARED = 2  # of a prefix that several sessions begin with
    PINNED = 3  # stays until it is unpinned


@dataclass(frozen=True, slots=True)
class Entry:
    """What a policy sees of one idle block in one tier.

    `parent` is the key of the block before it (the root's for the first), `depth` how many blocks come before it in
    its chain. `bytes` are what it takes in this tier. `last_used` and `expires_at` are on the clock of `now`;
    `expires_at` is for this tier, None is never. `recompute_s` estimates what computing its tokens again would take.
    """

    key: Key
    parent: Key
    bytes: int
    tokens: int
    depth: int
    last_used: float
    expires_at: float | None
    value: Value
    recompute_s: float


@dataclass(frozen=True)
class TierLimits:
    """A tier's budget in bytes. Above the share `high` of it, the tier is brought to the share `low`."""

    budget: int
    high: float
    low: float

    def __post_init__(self) -> None:
        if self.budget < 0:
            raise PolicyError(f"a budget of {self.budget} bytes is less than nothing; 0 turns a tier off")
        if not 0 < self.low <= self.high <= 1:
            raise PolicyError(f"low {self.low} and high {self.high} do not fit: 0 < low <= high <= 1 is needed")

    @property
    def high_bytes(self) -> int:
        """The most that the tier holds at rest."""
        return round(self.budget * self.high)

    @property
    def low_bytes(self) -> int:
        """What it is brought to once it holds more."""
        return round(self.budget * self.low)

    def fits(self, size: int) -> bool:
        """Does something of so many bytes have a place in this tier at all, even if all else went?"""
        return size <= self.high_bytes


@dataclass(frozen=True, slots=True)
class Move:
    """A block leaves its tier: `to` takes it, None evicts it."""

    key: Key
    to: Tier | None
    reason: Reason


# --- policies ---------------------------------------------------------------------------------------------------------


class Policy(Protocol):
    """An order of going. It depends on the entries and `now` alone, and not on the order they come in.

    A chain's end goes before its beginning: no entry before another whose `parent` is its key. All entries of a lower
    `value` go first, but for those that an entry of a higher one continues.
    """

    @property
    def name(self) -> str:
        """What the setting `policy` calls it."""

    def order(self, entries: Iterable[Entry], now: float) -> list[Entry]:
        """All entries, the first to go first."""


@dataclass(frozen=True)
class ByScore:
    """A policy that gives every entry a score, a tuple that can be compared; the lowest goes first.

    An entry counts as much as the best that continues it. Of equal ones the deepest goes first, then the lowest key.
    """

    name: str
    score: Callable[[Entry, float], tuple[float, ...]]

    def order(self, entries: Iterable[Entry], now: float) -> list[Entry]:
        """All entries, the lowest score first."""
        ordered = _deepest_first(entries)
        scores = _lifted(ordered, {entry.key: self.score(entry, now) for entry in ordered})
        ordered.sort(key=lambda entry: scores[entry.key])  # stable: equal ones stay deepest first
        return ordered


def _deepest_first(entries: Iterable[Entry]) -> list[Entry]:
    ordered = sorted(entries, key=attrgetter("key"))
    ordered.sort(key=attrgetter("depth"), reverse=True)  # stable, and much quicker than one sort by pairs
    return ordered


def _lifted(deepest_first: Sequence[Entry], scores: dict[Key, Any]) -> dict[Key, Any]:
    """`scores`, raised so that none is lower than that of an entry that continues it."""
    for entry in deepest_first:
        score, above = scores[entry.key], scores.get(entry.parent)
        if above is not None and above < score:
            scores[entry.parent] = score
    return scores


def _lru(entry: Entry, now: float) -> tuple[float, ...]:
    """The class, then the last use."""
    return entry.value, entry.last_used


def _cost(entry: Entry, now: float) -> tuple[float, ...]:
    """The class, then what a byte saves in computing, divided by how long nobody has used it.

    This is hyperbolic caching (Blankstein et al., 2017), GreedyDual's cost / size with a discount that needs no state
    and no time constant to tune: how soon a chat goes on falls about as 1 / idle time, so a byte that saves twice as
    much is kept for about twice as long. Where costs are equal or unknown (0) it is LRU.
    """
    idle = max(0.0, now - entry.last_used)
    return entry.value, entry.recompute_s / max(1, entry.bytes) / (GRACE_S + idle), entry.last_used


_policies: dict[str, Policy] = {}


def register(policy: Policy) -> None:
    """Make a policy known by its name. Raises `PolicyError` when another has that name."""
    if _policies.setdefault(policy.name, policy) is not policy:
        raise PolicyError(f"there is another policy {policy.name!r}; choose another name")


def policy_named(name: str) -> Policy:
    """The policy of that name. Raises `PolicyError` when there is none."""
    if name not in _policies:
        raise PolicyError(f"there is no policy {name!r}; known are {', '.join(policy_names())}")
    return _policies[name]


def policy_names() -> list[str]:
    """All names that `policy_named` knows, sorted."""
    return sorted(_policies)


register(ByScore("lru", _lru))
register(ByScore("cost", _cost))


# --- decisions --------------------------------------------------------------------------------------------------------


def expires_at(uses: Iterable[tuple[float, float | None]], ttl: float | None) -> float | None:
    """When a block leaves a tier whose own `ttl` is this many seconds (None: for ever); None: never.

    `uses` are the last use and the own ttl (None: the tier's, inf: pinned) of each session that holds it: it goes with
    the last of them. A block without holders does not expire: the watermarks get it.
    """
    latest = -math.inf
    for last_used, own in uses:
        lasts = ttl if own is None else own
        latest = max(latest, math.inf if lasts is None else last_used + lasts)
    return latest if math.isfinite(latest) else None


#     0                       low           high   budget
#     |------------------------|--------------|------|
#                              |   nothing    |  used + needed here: the first in order go, until low is reached
#
def decide(
    policy: Policy,
    entries: Collection[Entry],
    limits: TierLimits,
    now: float,
    *,
    used: int,
    below: Tier | None,
    needed: int = 0,
) -> list[Move]:
    """Which blocks of a tier go to the tier `below` (None: are evicted), in the order in which they are to go.

    `entries` are the idle blocks, `used` the tier's bytes, those of leased blocks too. `needed` bytes are about to be
    added, all of them or none: where they would not fit even if all went, nobody goes for them. What has expired goes
    in any case, but a block stays as long as one that continues it: where that one makes room, both are gone after the
    next decision. Pinned blocks, and what leads to them, stay.
    """
    due = {entry.key for entry in entries if entry.expires_at is not None and entry.expires_at <= now}
    if not due and limits.fits(used + needed):
        return []  # as nearly always: without sorting anything
    chains = {entry.key: entry for entry in entries}
    pinned = _leading_to((entry for entry in entries if entry.value is Value.PINNED), chains)
    lasting = _leading_to((entry for entry in entries if entry.key not in due), chains) if due else chains.keys()
    expired = [entry for entry in entries if entry.key not in lasting and entry.key not in pinned]
    moves = [Move(entry.key, below, "ttl") for entry in policy.order(expired, now)]

    rest = [entry for entry in entries if entry.key in lasting and entry.key not in pinned]
    used -= sum(entry.bytes for entry in expired)
    firm = max(0, used - sum(entry.bytes for entry in rest))
    if not limits.fits(firm + needed):
        needed = 0
    if limits.fits(used + needed):
        return moves
    reason: Reason = "pressure" if limits.fits(used) else "watermark"
    excess = used + needed - limits.low_bytes
    for entry in policy.order(rest, now):
        if excess <= 0:
            break
        moves.append(Move(entry.key, below, reason))
        excess -= entry.bytes
    return moves


def _leading_to(ends: Iterable[Entry], chains: Mapping[Key, Entry]) -> Set[Key]:
    """The keys of these entries and of all that come before them in their chains."""
    keys: set[Key] = set()
    for end in ends:
        entry: Entry | None = end
        while entry is not None and entry.key not in keys:
            keys.add(entry.key)
            entry = chains.get(entry.parent)
    return keys
