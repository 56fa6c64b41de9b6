"""How much of a tier pinned sessions keep from others, in the order in which it goes."""

from __future__ import annotations

from engine.cache.pins import protect
from engine.cache.policy import Entry, TierLimits, Value, decide, policy_named

ROOT = b"root"


def chain(name: str, length: int, value: Value = Value.LIVE, size: int = 10) -> list[Entry]:
    """Blocks `name`0, `name`1, …, each after the one before it; all expire at 100."""
    keys = [ROOT, *(f"{name}{number}".encode() for number in range(length))]
    return [
        Entry(key, keys[depth], size, 32, depth, 1.0, 100.0, value, 0.1) for depth, key in enumerate(keys[1:])
    ]  # fmt: skip


def names(entries: list[Entry]) -> str:
    """The protected ones."""
    return " ".join(entry.key.decode() for entry in entries if entry.value is Value.PINNED)


def ranks(*chains: list[Entry]) -> dict[bytes, int]:
    return {entry.key: rank for rank, entries in enumerate(chains) for entry in entries}


def test_all_that_is_pinned_is_protected_as_far_as_the_share_goes():
    first, second, other = chain("a", 2), chain("b", 2), chain("o", 1)
    for most, kept in ((40, "a0 a1 b0 b1"), (39, "a0 a1 b0"), (20, "a0 a1"), (19, "a0"), (9, ""), (0, "")):
        assert names(protect([*other, *second, *first], ranks(first, second), most)).split() == sorted(
            kept.split(), key=lambda name: (name[0] == "a", name)
        )


def test_what_is_protected_does_not_expire_and_the_rest_is_what_it_is_without_a_pin():
    kept, beyond = protect(chain("a", 2), {b"a0": 0, b"a1": 0}, 10)
    assert (kept.value, kept.expires_at) == (Value.PINNED, None)
    assert beyond == chain("a", 2)[1]


def test_an_abandoned_branch_is_the_first_to_go_unprotected():
    trunk, branch = chain("t", 3), chain("b", 2, Value.SUPERSEDED)
    assert names(protect([*branch, *trunk], ranks([*trunk, *branch]), 40)) == "b0 t0 t1 t2"


def test_what_is_too_large_ends_the_share_though_something_smaller_would_fit():
    """Else what continues it would be kept without it."""
    large = chain("a", 1, size=30)
    assert names(protect([*large, *chain("b", 1)], {b"a0": 0, b"b0": 1}, 20)) == ""


def test_what_leads_to_a_pinned_block_counts_with_it():
    trunk = chain("t", 3)
    for most, kept in ((29, ""), (30, "t0 t1 t2")):
        assert names(protect(trunk, {b"t2": 0}, most)) == kept


def test_what_is_beyond_the_share_goes_by_age_as_all_else_does():
    pinned, other = chain("p", 4), chain("o", 2)
    entries = protect([*pinned, *other], ranks(pinned), 20)
    moves = decide(policy_named("lru"), entries, TierLimits(40, 1.0, 1.0), 50.0, used=60, below=None)
    assert [move.key.decode() for move in moves] == ["p3", "p2"]
    moves = decide(policy_named("lru"), entries, TierLimits(40, 1.0, 1.0), 100.0, used=60, below=None)
    assert sorted(move.key.decode() for move in moves) == ["o0", "o1", "p2", "p3"]
