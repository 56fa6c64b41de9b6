"""Copies to and from the device that come as late as the fences allow, and models that compute meanwhile.

Chats over host and disk run with such copies too: see the fixture `copies`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from engine import opening, served
from engine.batch import Batch, Row
from engine.cache import restores
from engine.cache.copies import DirectCopies
from engine.cache.pool import KVPool
from engine.model.runner import ModelRunner
from tests.engine.cold_rig import ColdRig
from tests.engine.late_copies import LateCodec, LateCopies
from tests.engine.model import tiny
from tests.engine.test_copy_race import everything_right_on_disk
from tests.engine.test_host_race import LONG
from tests.engine.test_tiers import PROMPT, follow, turn
from tests.engine.test_tiers_oracle import (  # noqa: F401 - they run here with late copies
    driven,
    expected,
    llama,
    test_a_branch_and_an_edit_find_what_they_share,
    test_several_models_under_one_budget_find_their_own,
    test_who_stepped_back_goes_on_as_it_began,
)


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines whose copies are late; the memory of a pool that has changed its size is another's at once."""
    copies, resize = LateCopies(), KVPool.resize
    monkeypatch.setattr(opening, "copies_for", lambda device: copies)
    monkeypatch.setattr(served, "ImageCodec", lambda **shape: LateCodec(copies.cuda, **shape))

    def move(pool: KVPool, blocks: int, moved: Mapping[int, int]) -> None:
        old = pool.data
        resize(pool, blocks, moved)
        old.fill_(torch.nan)

    monkeypatch.setattr(KVPool, "resize", move)


def under_way(rig: ColdRig) -> int:
    """Copies, and waits of the side stream, that have not come yet."""
    assert isinstance(rig.model.copies, LateCopies)
    side = rig.model.copies.cuda.side
    return side.queued - side.done


def test_what_only_leaves_a_copy_behind_holds_up_no_pass(rigs: list[ColdRig]) -> None:
    rigs.append(rig := ColdRig(host_blocks=64, late=True))
    follow(rig, PROMPT)
    for block in rig.residency.blocks():
        rig.residency.keep(block)
    before = under_way(rig)
    assert before > 0
    rig.submit([90, *PROMPT], session="other")
    rig.step()
    rig.step()
    assert under_way(rig) == before


def test_a_pool_changes_its_size_while_blocks_are_copied(rigs: list[ColdRig]) -> None:
    rigs.append(rig := ColdRig(host_blocks=64, blocks=20, late=True))
    _, more = turn(rig, PROMPT)
    _, other = turn(rig, [90, *PROMPT[1:]], "other")
    rig.resize(10)  # some leave, some move
    assert len(rig.cold()) == 8 and under_way(rig) == 0
    rig.resize(30)
    assert rig.sources(follow(rig, other, "other"))[3] == 4
    assert rig.sources(follow(rig, more))[3] == 4


def test_a_block_goes_from_host_to_disk_as_soon_as_it_has_come_there(rigs: list[ColdRig], tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path, host_blocks=64, late=True))
    _, more = turn(rig, PROMPT)
    rig.flush()
    assert under_way(rig) > 0
    rig.tiers.demote("s", "disk")
    rig.settle()
    assert all(cold.disk and cold.host is None for cold in rig.cold())
    everything_right_on_disk(rig)
    assert rig.sources(follow(rig, more)) == (0, 0, 33, 4)


def test_a_buffer_is_not_read_into_while_it_is_copied_from(
    rigs: list[ColdRig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restores, "COPY_UNHURRIED", 8)  # so that some are read while others are copied
    rigs.append(rig := ColdRig(tmp_path, blocks=120, late=True))
    _, more = turn(rig, LONG)  # 20 blocks, of which 16 are read ahead
    rig.save()
    rig.flush()
    again = rig.submit(more)
    while again not in rig.finished:
        rig.step()
        time.sleep(0.01)  # so that a worker that does not wait is the first
    assert rig.sources(again) == (0, 0, 83, 4)


class Witness(DirectCopies):
    """Notes what the pool holds when it is told that this will change."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self.seen: list[tuple[str, torch.Tensor]] = []

    def before_writes(self) -> None:
        self.seen.append(("writes", self._pool.data.clone()))

    def before_moving(self) -> None:
        self.seen.append(("moving", self._pool.data.clone()))


def test_the_pool_is_not_changed_before_copies_had_their_say(tmp_path: Path) -> None:
    loaded = tiny.load("llama", tmp_path)
    pool = tiny.make_pool(loaded)
    pool.data.zero_()  # NaN is not what it is
    copies = Witness(pool)
    runner = ModelRunner(loaded, pool, copies)
    changes = {
        "writes": lambda: runner.run(Batch([Row(token_ids=[9, 8, 7], start=0, block_ids=[3], draws=[])])),
        "writes within": lambda: runner.copy_tokens(3, 5, 2),
        "moving": lambda: runner.resize(8, {3: 0, 5: 1}),
    }
    for name, change in changes.items():
        before = pool.data.clone()
        change()
        told, seen = copies.seen.pop()
        assert name.startswith(told) and copies.seen == []
        assert torch.equal(seen, before) and not torch.equal(pool.data, before)
