"""What holds for every registered policy, and for what is decided by it, over random forests of blocks."""

from __future__ import annotations

import math
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.policy import Entry, Move, Policy, TierLimits, Value, decide, policy_named, policy_names

every_policy = pytest.mark.parametrize("policy", [policy_named(name) for name in policy_names()], ids=policy_names())
moments = st.integers(0, 9).map(float)


@st.composite
def forests(draw: st.DrawFn) -> list[Entry]:
    """Chains that branch, with ties everywhere, in any order; some continue a block that is not in the tier."""
    entries: list[Entry] = []
    for number in range(draw(st.integers(0, 12))):
        above = draw(st.sampled_from([None, *entries]))
        entries.append(
            Entry(
                key=b"%02d" % draw(st.integers(0, 9)) + b"%02d" % number,
                parent=above.key if above else draw(st.sampled_from([b"root", b"gone"])),
                bytes=draw(st.integers(1, 4)),
                tokens=32,
                depth=above.depth + 1 if above else draw(st.integers(0, 1)),
                last_used=draw(moments),
                expires_at=draw(st.none() | moments),
                value=draw(st.sampled_from(Value)),
                recompute_s=float(draw(st.integers(0, 2))),
            )
        )
    return draw(st.permutations(entries))


def descendants(entries: list[Entry], of: Entry) -> list[Entry]:
    found, todo = [], deque([of])
    while todo:
        above = todo.popleft()
        below = [entry for entry in entries if entry.parent == above.key]
        found += below
        todo += below
    return found


def free(entries: list[Entry]) -> list[Entry]:
    """Those that neither are pinned nor lead to one that is."""
    return [
        entry
        for entry in entries
        if Value.PINNED not in [other.value for other in [entry, *descendants(entries, entry)]]
    ]


def expired(entries: list[Entry], now: float) -> list[Entry]:
    """Those that may go at `now`, and so may all that continue them."""

    def due(entry: Entry) -> bool:
        return entry.expires_at is not None and entry.expires_at <= now

    return [entry for entry in free(entries) if all(map(due, [entry, *descendants(entries, entry)]))]


def children_first(keys: list[bytes], entries: list[Entry]) -> bool:
    """Nobody goes while one that continues it stays or goes later."""
    place = {key: number for number, key in enumerate(keys)}
    return all(place.get(entry.key, math.inf) < place[entry.parent] for entry in entries if entry.parent in place)


@every_policy
@given(entries=forests(), now=moments)
def test_an_order_names_everybody_once_and_children_before_their_parents(policy: Policy, entries, now):
    order = policy.order(entries, now)
    assert sorted(entry.key for entry in order) == sorted(entry.key for entry in entries)
    assert children_first([entry.key for entry in order], entries)


@every_policy
@given(entries=forests(), now=moments, data=st.data())
def test_the_order_depends_on_what_the_entries_are_and_not_on_how_they_come(policy: Policy, entries, now, data):
    order = policy.order(entries, now)
    assert policy.order(data.draw(st.permutations(entries)), now) == order
    assert policy.order(iter(entries), now) == order
    limits = TierLimits(10, 0.5, 0.25)
    moves = decide(policy, entries, limits, now, used=40, below="disk")
    assert decide(policy, data.draw(st.permutations(entries)), limits, now, used=40, below="disk") == moves


@every_policy
@given(entries=forests(), now=moments)
def test_a_lower_class_goes_before_a_higher_one(policy: Policy, entries, now):
    order = policy.order(entries, now)
    worth = [max(other.value for other in [entry, *descendants(entries, entry)]) for entry in order]
    assert worth == sorted(worth)


@every_policy
@given(entries=forests(), now=moments, budget=st.integers(0, 40), leased=st.integers(0, 9), needed=st.integers(0, 20))
def test_what_is_decided_is_allowed_enough_and_no_more_than_needed(
    policy: Policy, entries, now, budget, leased, needed
):
    limits = TierLimits(budget, 0.8, 0.5)
    used = leased + sum(entry.bytes for entry in entries)
    moves = decide(policy, entries, limits, now, used=used, below="host", needed=needed)
    known = {entry.key: entry for entry in entries}
    keys = [move.key for move in moves]

    assert len(set(keys)) == len(keys)
    assert set(keys) <= {entry.key for entry in free(entries)}
    assert children_first(keys, entries)
    assert {move.to for move in moves} <= {"host"}
    old = [move.key for move in moves if move.reason == "ttl"]
    assert set(old) == {entry.key for entry in expired(entries, now)} and keys[: len(old)] == old

    left = used - sum(known[key].bytes for key in old)
    rest = [entry for entry in free(entries) if entry.key not in old]
    forced = keys[len(old) :]
    firm = left - sum(entry.bytes for entry in rest)
    asked = needed if firm + needed <= limits.high_bytes else 0
    assert {move.reason for move in moves} <= {"ttl", "pressure" if left <= limits.high_bytes else "watermark"}
    assert forced == [entry.key for entry in policy.order(rest, now)][: len(forced)]
    if left + asked <= limits.high_bytes:
        assert forced == []
    else:
        after = left + asked - sum(known[key].bytes for key in forced)
        assert after <= limits.low_bytes or len(forced) == len(rest)
        assert not forced or after + known[forced[-1]].bytes > limits.low_bytes
        assert asked == 0 or after <= limits.high_bytes


@every_policy
@given(entries=forests(), now=moments, budget=st.integers(1, 40))
def test_what_was_decided_leaves_only_what_it_set_free(policy: Policy, entries, now, budget):
    """A block that had expired, but was held by one that made room, goes the next time; then there is no more."""
    limits = TierLimits(budget, 0.8, 0.5)
    reasons: list[set[str]] = []
    for _ in range(3):
        used = sum(entry.bytes for entry in entries)
        moves = decide(policy, entries, limits, now, used=used, below=None)
        gone = {move.key for move in moves}
        entries = [entry for entry in entries if entry.key not in gone]
        reasons.append({move.reason for move in moves})
    assert reasons[1] <= {"ttl"} and reasons[2] == set()


@every_policy
def test_thirty_thousand_blocks_that_are_one_chain_or_no_chain(policy: Policy):
    def entries(parent_of) -> list[Entry]:
        return [Entry(b"%05d" % n, parent_of(n), 1, 32, n, float(n % 7), None, Value.LIVE, 0.1) for n in range(30_000)]

    limits = TierLimits(30_000, 0.9, 0.5)
    chain = decide(policy, entries(lambda n: b"%05d" % (n - 1)), limits, 10.0, used=30_000, below="disk")
    assert [move.key for move in chain] == [b"%05d" % n for n in range(29_999, 14_999, -1)]
    assert len(decide(policy, entries(lambda n: b"root"), limits, 10.0, used=30_000, below="disk")) == 15_000


@every_policy
def test_nothing_of_nothing(policy: Policy):
    limits = TierLimits(0, 1.0, 0.9)
    entry = Entry(b"a", b"root", 0, 0, 0, 5.0, None, Value.LIVE, 0.0)
    assert policy.order([], 0.0) == []
    assert policy.order([entry], 0.0) == [entry]  # no bytes, and a use that is still to come
    assert decide(policy, [], limits, 0.0, used=0, below=None) == []
    assert decide(policy, [], limits, 0.0, used=0, below=None, needed=1) == []
    assert decide(policy, [entry], limits, 0.0, used=0, below=None) == []
    assert decide(policy, [], limits, 0.0, used=7, below=None, needed=1) == []  # all of it leased


@every_policy
def test_a_tier_that_is_turned_off_keeps_what_is_pinned(policy: Policy):
    live = Entry(b"live", b"root", 3, 32, 0, 0.0, None, Value.LIVE, 0.1)
    pinned = Entry(b"kept", b"root", 3, 32, 0, 0.0, None, Value.PINNED, 0.1)
    moves = decide(policy, [live, pinned], TierLimits(0, 1.0, 0.9), 0.0, used=6, below="disk")
    assert moves == [Move(b"live", "disk", "watermark")]
