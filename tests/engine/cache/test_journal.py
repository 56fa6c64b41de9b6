"""What is remembered of blocks that are gone, and for how long."""

from __future__ import annotations

import pytest

from engine.cache import journal as journals
from engine.cache.journal import Journal


@pytest.fixture
def journal() -> Journal:
    return Journal(lambda: 0.0)


def test_a_block_that_is_gone_is_forgotten_with_the_last_session_that_held_it(journal: Journal) -> None:
    journal.bury(b"own", "it was full", {"a"})
    journal.bury(b"shared", "it was full", {"a", "b"})
    journal.forget("a")
    assert (journal.fate(b"own"), journal.fate(b"shared")) == (None, "it was full")
    journal.forget("b")
    assert journal.fate(b"shared") is None


def test_who_held_it_before_still_does(journal: Journal) -> None:
    journal.bury(b"key", "first", {"a"})
    journal.bury(b"key", "then", {"b"})
    journal.forget("b")
    assert journal.fate(b"key") == "then"
    journal.forget("a")
    assert journal.fate(b"key") is None


def test_what_nobody_holds_is_not_remembered(journal: Journal) -> None:
    journal.bury(b"key", "it was full", ())
    assert journal.fate(b"key") is None


def test_what_is_there_again_is_no_longer_gone(journal: Journal) -> None:
    journal.bury(b"key", "it was full", {"a", "b"})
    journal.revive(b"key")
    journal.revive(b"key")
    journal.forget("a")
    assert journal.fate(b"key") is None
    journal.bury(b"key", "it was full again", {"c"})
    journal.forget("b")
    assert journal.fate(b"key") == "it was full again"


def test_no_more_are_remembered_than_there_is_room_for(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "GHOSTS", 2)
    for key in (b"1", b"2", b"1", b"3"):
        journal.bury(key, "it was full", {"a"})
    assert [journal.fate(key) for key in (b"1", b"2", b"3")] == ["it was full", None, "it was full"]
    journal.forget("a")
    assert [journal.fate(key) for key in (b"1", b"2", b"3")] == [None, None, None]
