"""What people wish for their sessions, as long as they wish it."""

from __future__ import annotations

import pytest

from engine.cache import sessions
from engine.cache.policy import Entry, Value
from engine.cache.sessions import Sessions


def entry(key: bytes) -> Entry:
    return Entry(
        key=key,
        parent=b"",
        bytes=10,
        tokens=1,
        depth=0,
        last_used=0.0,
        expires_at=None,
        value=Value.LIVE,
        recompute_s=0.0,
    )


def test_the_shortest_ttl_is_that_of_wishes_that_still_hold() -> None:
    known = Sessions()
    known.used("plain", (b"a",), 1, 1.0)
    assert known.shortest_ttl() is None
    known.wish("slow", 1.0, pinned=False, ttl=60.0)
    known.wish("quick", 1.0, pinned=True, ttl=5.0)
    known.used("quick", (b"b",), 1, 2.0)
    assert known.shortest_ttl() == 5.0
    known.wish("quick", 2.0, pinned=True, ttl=None)
    assert known.shortest_ttl() == 60.0
    known.forget("slow")
    assert known.shortest_ttl() is None


def test_a_pin_protects_until_it_is_taken_back_or_its_session_goes() -> None:
    known, entries, whose = Sessions(), [entry(b"a"), entry(b"b")], {b"a": {"one"}, b"b": {"two"}}

    def pinned() -> list[bytes]:
        return [each.key for each in known.protect(entries, whose, 1000) if each.value is Value.PINNED]

    assert pinned() == []
    known.wish("one", 1.0, pinned=True, ttl=None)
    known.wish("two", 1.0, pinned=True, ttl=None)
    assert pinned() == [b"a", b"b"]
    known.wish("one", 2.0, pinned=False, ttl=None)
    assert pinned() == [b"b"]
    known.forget("two")
    assert pinned() == []


def test_of_too_many_sessions_the_one_used_longest_ago_goes_with_its_ttl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MOST", 2)
    known = Sessions()
    known.wish("first", 1.0, pinned=False, ttl=7.0)
    for number, name in enumerate(("second", "third")):
        known.used(name, (name.encode(),), 1, 2.0 + number)
    assert list(known) == ["second", "third"]
    assert known.shortest_ttl() is None
