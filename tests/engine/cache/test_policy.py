"""Orders and decisions as literal lists. Keys are one letter for the chain and one for the place in it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from engine.cache import policy
from engine.cache.policy import (
    ByScore,
    Entry,
    Move,
    PolicyError,
    TierLimits,
    Value,
    decide,
    expires_at,
    policy_named,
    policy_names,
    register,
)
from engine.errors import EngineError

LRU, COST = policy_named("lru"), policy_named("cost")


def chain(
    name: str,
    blocks: int,
    last_used: float = 0.0,
    value: Value = Value.LIVE,
    *,
    after: Entry | None = None,
    expires: float | None = None,
    recompute_s: float = 1.0,
    size: int = 10,
) -> list[Entry]:
    """The blocks of a chain, first to last, that begins anywhere or after another's block."""
    entries: list[Entry] = []
    for number in range(blocks):
        key = f"{name}{number}".encode()
        above = entries[-1] if entries else after
        parent, depth = (above.key, above.depth + 1) if above else (b"root", 0)
        entries.append(Entry(key, parent, size, 32, depth, last_used, expires, value, recompute_s))
    return entries


def names(entries: list[Entry]) -> str:
    return " ".join(entry.key.decode() for entry in entries)


def gone(moves: list[Move]) -> str:
    return " ".join(move.key.decode() for move in moves)


# --- orders -----------------------------------------------------------------------------------------------------------


def test_lru_takes_the_oldest_chain_from_its_end():
    entries = [*chain("a", 3, 20.0), *chain("b", 2, 10.0), *chain("c", 1, 30.0)]
    assert names(LRU.order(entries, 40.0)) == "b1 b0 a2 a1 a0 c0"


def test_lru_takes_classes_first_to_last_whatever_their_age():
    old_pin = chain("p", 1, 1.0, Value.PINNED)
    preset = chain("s", 2, 2.0, Value.SHARED)
    live = chain("l", 2, 3.0, Value.LIVE)
    edited = chain("e", 2, 4.0, Value.SUPERSEDED)
    assert names(LRU.order([*old_pin, *preset, *live, *edited], 5.0)) == "e1 e0 l1 l0 s1 s0 p0"


def test_a_beginning_counts_as_much_as_the_best_that_continues_it():
    preset = chain("s", 2, 5.0, Value.SUPERSEDED)  # worth nothing by itself
    young = chain("y", 2, 30.0, after=preset[1])
    old = chain("o", 2, 10.0, after=preset[1])
    other = chain("x", 1, 20.0)
    assert names(LRU.order([*preset, *young, *old, *other], 40.0)) == "o1 o0 x0 y1 y0 s1 s0"


def test_a_branch_that_was_edited_goes_and_what_it_shares_with_the_new_one_stays():
    trunk = chain("t", 2, 10.0)
    edited = chain("e", 2, 50.0, Value.SUPERSEDED, after=trunk[1])
    new = chain("n", 1, 60.0, after=trunk[1])
    other = chain("x", 1, 20.0)
    assert names(LRU.order([*trunk, *edited, *new, *other], 70.0)) == "e1 e0 x0 n0 t1 t0"


def test_equal_blocks_go_deepest_first_and_then_by_key():
    assert names(LRU.order([*chain("b", 2), *chain("a", 2), *chain("c", 1)], 9.0)) == "a1 b1 a0 b0 c0"
    assert names(COST.order([*chain("b", 2), *chain("a", 2), *chain("c", 1)], 9.0)) == "a1 b1 a0 b0 c0"


def test_cost_keeps_what_is_dear_to_compute_for_longer():
    cheap = chain("c", 2, 100.0, recompute_s=1.0)
    dear, older = chain("d", 2, 41.0, recompute_s=2.0), chain("o", 2, 39.0, recompute_s=2.0)
    entries = [*cheap, *dear, *older]
    assert names(LRU.order(entries, 100.0)) == "o1 o0 d1 d0 c1 c0"
    assert names(COST.order(entries, 100.0)) == "o1 o0 c1 c0 d1 d0"  # 2 / (60 + 61), 1 / 60, 2 / (60 + 59)


def test_cost_counts_by_the_byte():
    small, large = chain("s", 1, 10.0, recompute_s=2.0, size=10), chain("l", 1, 11.0, recompute_s=3.0, size=20)
    assert names(COST.order([*small, *large], 20.0)) == "l0 s0"


def test_cost_never_lets_a_dear_block_of_a_lower_class_stay_longer():
    edited, live = chain("e", 1, 9.0, Value.SUPERSEDED, recompute_s=99.0), chain("l", 1, 0.0, recompute_s=0.0)
    assert names(COST.order([*edited, *live], 9.0)) == "e0 l0"


def test_cost_is_lru_while_nothing_was_measured():
    entries = [*chain("a", 2, 20.0, recompute_s=0.0), *chain("b", 2, 10.0, recompute_s=0.0)]
    assert names(COST.order(entries, 40.0)) == names(LRU.order(entries, 40.0)) == "b1 b0 a1 a0"


def test_a_clock_that_went_back_breaks_no_order():
    entries = [*chain("a", 2, 1e6), *chain("b", 1, 0.0)]
    assert names(COST.order(entries, -1e6)) == "b0 a1 a0"
    assert names(COST.order(entries, 1e6 - 60)) == "b0 a1 a0"  # a minute back
    assert names(COST.order(entries, 1e6 - 61)) == "b0 a1 a0"
    assert names(LRU.order(entries, -1e6)) == "b0 a1 a0"


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_policy_is_found_by_its_name(monkeypatch):
    monkeypatch.setattr(policy, "_policies", dict(policy._policies))
    youngest = ByScore("youngest", lambda entry, now: (entry.value, -entry.last_used))
    register(youngest)
    register(youngest)
    assert policy_named("youngest") is youngest
    assert policy_names() == ["cost", "lru", "youngest"]
    with pytest.raises(PolicyError, match="another policy 'lru'"):
        register(replace(youngest, name="lru"))
    assert policy_named("lru") is LRU


def test_a_name_that_nobody_knows_is_told_with_those_that_are_known():
    with pytest.raises(EngineError, match="no policy 'lfu'; known are cost, lru"):
        policy_named("lfu")


# --- time -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uses", "ttl", "expected"),
    [
        ([(10.0, None)], 60.0, 70.0),
        ([(10.0, None), (50.0, None), (20.0, None)], 60.0, 110.0),  # with its last holder
        ([(50.0, 5.0), (10.0, None)], 60.0, 70.0),  # not the last use, but the last to expire
        ([(10.0, 0.0)], 60.0, 10.0),  # at once is not "the tier's own"
        ([(10.0, 5.0)], None, 15.0),
        ([(10.0, 5.0), (10.0, None)], None, None),
        ([(10.0, math.inf), (90.0, None)], 60.0, None),  # pinned
        ([(10.0, None)], None, None),
        ([], 60.0, None),
    ],
)
def test_a_shared_block_expires_with_its_last_holder(uses, ttl, expected):
    assert expires_at(uses, ttl) == expected
    assert expires_at(reversed(uses), ttl) == expected


ROOMY = TierLimits(1000, 1.0, 0.9)


def test_what_has_expired_goes_from_its_end_at_its_very_moment():
    entries = [*chain("a", 2, 1.0, expires=10.0), *chain("b", 1, 2.0, expires=20.0), *chain("c", 1)]
    assert decide(LRU, entries, ROOMY, 9.9, used=40, below="host") == []
    assert decide(LRU, entries, ROOMY, 10.0, used=40, below="host") == [
        Move(b"a1", "host", "ttl"),
        Move(b"a0", "host", "ttl"),
    ]
    assert gone(decide(LRU, entries, ROOMY, 20.0, used=40, below="host")) == "a1 a0 b0"


@pytest.mark.parametrize("later", [15.0, None])
def test_an_expired_block_stays_as_long_as_one_that_continues_it(later):
    trunk = chain("t", 2, expires=10.0)
    entries = [*trunk, *chain("y", 1, expires=later, after=trunk[0]), *chain("o", 2, expires=5.0, after=trunk[1])]
    assert gone(decide(LRU, entries, ROOMY, 12.0, used=50, below=None)) == "o1 o0 t1"
    rest = "" if later is None else "y0 t0"
    left = [entry for entry in entries if entry.key in (b"t0", b"y0")]
    assert gone(decide(LRU, left, ROOMY, 15.0, used=20, below=None)) == rest


def test_what_leads_to_a_pinned_block_stays_with_it_and_nothing_else_does():
    trunk = chain("t", 2, expires=1.0)
    pin = chain("p", 1, value=Value.PINNED, expires=1.0, after=trunk[0])
    entries = [*trunk, *pin, *chain("a", 1, expires=1.0)]
    assert gone(decide(LRU, entries, ROOMY, 99.0, used=40, below=None)) == "t1 a0"
    assert gone(decide(LRU, entries, TierLimits(20, 0.5, 0.1), 0.0, used=40, below=None)) == "t1 a0"


# --- room -------------------------------------------------------------------------------------------------------------


def test_hysteresis_nothing_between_low_and_high_and_down_to_low_above():
    entries = chain("a", 10)  # 100 bytes
    limits = TierLimits(125, 0.8, 0.4)
    assert decide(LRU, entries, limits, 0.0, used=100, below="disk") == []
    moves = decide(LRU, entries, limits, 0.0, used=101, below="disk")
    assert moves == [Move(f"a{n}".encode(), "disk", "watermark") for n in (9, 8, 7, 6, 5, 4)]


def test_leased_bytes_count_though_nobody_can_take_them():
    limits = TierLimits(100, 1.0, 0.9)
    assert gone(decide(LRU, chain("a", 3), limits, 0.0, used=101, below=None)) == "a2 a1"
    assert gone(decide(LRU, chain("a", 3), limits, 0.0, used=500, below=None)) == "a2 a1 a0"


def test_pressure_is_what_only_the_needed_bytes_force():
    limits = TierLimits(100, 1.0, 0.8)
    entries = [*chain("a", 5, 1.0), *chain("b", 5, 2.0)]
    assert decide(LRU, entries, limits, 5.0, used=100, below="host") == []
    moves = decide(LRU, entries, limits, 5.0, used=100, below="host", needed=5)
    assert moves == [Move(b"a4", "host", "pressure"), Move(b"a3", "host", "pressure"), Move(b"a2", "host", "pressure")]
    moves = decide(LRU, entries, limits, 5.0, used=101, below="host", needed=5)
    assert {move.reason for move in moves} == {"watermark"}


def test_what_expires_makes_room_for_what_is_needed():
    entries = [*chain("a", 5, 9.0, expires=1.0), *chain("b", 5, 2.0)]
    moves = decide(LRU, entries, TierLimits(100, 1.0, 0.8), 1.0, used=100, below=None, needed=50)
    assert moves == [Move(f"a{n}".encode(), None, "ttl") for n in (4, 3, 2, 1, 0)]
    moves = decide(LRU, entries, TierLimits(100, 1.0, 0.8), 1.0, used=100, below=None, needed=51)
    assert gone(moves) == "a4 a3 a2 a1 a0 b4 b3 b2"


def test_what_can_never_fit_makes_nobody_go():
    limits = TierLimits(100, 0.9, 0.5)
    assert [limits.fits(size) for size in (0, 90, 91, 101)] == [True, True, False, False]
    entries = chain("a", 5)
    assert decide(LRU, entries, limits, 0.0, used=50, below=None, needed=101) == []
    assert gone(decide(LRU, entries, limits, 0.0, used=50, below=None, needed=90)) == "a4 a3 a2 a1 a0"
    assert decide(LRU, entries, limits, 0.0, used=60, below=None, needed=81) == []  # 10 are leased
    pinned = chain("p", 1, value=Value.PINNED)
    assert decide(LRU, [*entries, *pinned], limits, 0.0, used=60, below=None, needed=81) == []


def test_what_can_never_fit_does_not_stop_what_is_due_anyway():
    entries = [*chain("a", 2, 1.0, expires=1.0), *chain("b", 10, 2.0)]
    moves = decide(LRU, entries, TierLimits(90, 1.0, 0.9), 5.0, used=120, below="disk", needed=1000)
    assert [(move.key, move.reason) for move in moves] == [
        (b"a1", "ttl"),
        (b"a0", "ttl"),
        (b"b9", "watermark"),
        (b"b8", "watermark"),
    ]


@pytest.mark.parametrize(
    ("budget", "high", "low"),
    [(-1, 1.0, 0.9), (1, 1.1, 0.9), (1, 0.8, 0.9), (1, 1.0, 0.0), (1, math.nan, 0.5), (1, 0.5, math.nan)],
)
def test_limits_that_cannot_be_kept_are_refused(budget, high, low):
    with pytest.raises(PolicyError, match="0"):
        TierLimits(budget, high, low)


def test_limits_are_whole_bytes():
    assert TierLimits(100, 0.29, 0.07).high_bytes == 29  # 0.29 * 100 is a hair less
    assert TierLimits(100, 0.29, 0.07).low_bytes == 7
    assert TierLimits(2**50 + 1, 1.0, 1.0).high_bytes == 2**50 + 1
