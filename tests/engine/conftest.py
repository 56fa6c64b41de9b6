"""Fixtures for the engine's tests that need no model; each checks the conservation law when the test has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from tests.engine.cache.books import Books

if TYPE_CHECKING:
    from tests.engine.cold_rig import ColdRig
    from tests.engine.rig import Rig


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    """Makes rigs: a scheduler over a fake model."""
    from tests.engine.rig import Rig  # imports torch, which the books do without

    rigs: list[Rig] = []

    def make(**sizes: int) -> Rig:
        rigs.append(Rig(**sizes))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.check()


@pytest.fixture
def rigs() -> Iterator[list[ColdRig]]:
    """Rigs with tiers, closed and checked at the end."""
    made: list[ColdRig] = []
    yield made
    for rig in made:
        rig.close()
        rig.check()


@pytest.fixture(params=["at once", "late"])
def copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rig with tiers copies blocks at once, or as late as the fences allow."""
    from tests.engine.cold_rig import ColdRig

    monkeypatch.setattr(ColdRig, "late", request.param == "late")


@pytest.fixture
def make_books() -> Iterator[Callable[..., Books]]:
    """Makes managers without a pool."""
    made: list[Books] = []

    def make(blocks: int = 8, block_size: int = 4, fingerprint: bytes = b"test") -> Books:
        made.append(Books(blocks, block_size, fingerprint))
        return made[-1]

    yield make
    for books in made:
        assert books.violations() == []
