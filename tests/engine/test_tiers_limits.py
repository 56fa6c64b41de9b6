"""Budgets that are kept, whatever is pinned or does not fit, and copies that fail for lack of memory."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine.cache.pins import OUTGROWN
from tests.engine.cold_rig import ColdRig
from tests.engine.test_tiers import PROMPT, follow, turn

# --- budgets ----------------------------------------------------------------------------------------------------------


def test_a_chain_that_is_larger_than_the_disk_is_written_once(rigs: list[ColdRig], tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path, disk_blocks=4))
    follow(rig, PROMPT)
    for _ in range(100):
        more = rig.residency.saver.save()
        assert rig.tiers.disk.bytes <= 4 * 8192, "what is being written counts"
        if not more and not rig.tiers.disk.saving and not rig.residency.saver.unsaved:
            break
        rig.settle()
    assert not rig.residency.saver.unsaved, "and then it is left alone"
    assert 0 < len(list(tmp_path.rglob("*.kv"))) <= 4


def test_a_smaller_disk_is_kept_to_from_the_start(rigs: list[ColdRig], tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    _, more = turn(rig, PROMPT)
    rig.save()
    rig.close()
    rigs.append(later := ColdRig(tmp_path, disk_blocks=5, disk_low=1.0))
    later.settle()
    assert sorted(cold.depth for cold in later.cold()) == [0, 1, 2, 3, 4], "the end of a chain goes first"
    assert len(list(tmp_path.rglob("*.kv"))) == 5
    assert later.sources(follow(later, more)) == (0, 0, 20, 17)


def test_what_is_written_while_the_disk_gets_smaller_goes_when_it_is_there(rigs: list[ColdRig], tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    turn(rig, PROMPT)
    rig.residency.saver.save()
    assert rig.tiers.disk.saving > 2
    rig.tiers.configure(msgspec.structs.replace(rig.tiers.limits, disk_kv=2 * 8192))
    rig.settle()
    assert len(list(tmp_path.rglob("*.kv"))) == 2
    rig.check()


def test_what_is_read_while_the_disk_gets_smaller_goes_when_it_was_read(rigs: list[ColdRig], tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    _, more = turn(rig, PROMPT)
    rig.save()
    rig.flush()
    request_id = rig.submit(more, max_tokens=1)
    rig.scheduler.schedule()
    assert rig.tiers.disk.loading
    rig.tiers.configure(msgspec.structs.replace(rig.tiers.limits, disk_kv=2 * 8192))
    rig.run()
    rig.settle()
    assert rig.sources(request_id)[2] > 0
    assert rig.tiers.used("disk") <= 2 * 8192


def test_what_is_read_no_more_while_the_disk_gets_smaller_goes(rigs: list[ColdRig], tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    _, more = turn(rig, PROMPT)
    rig.save()
    rig.flush()
    request_id = rig.submit(more, max_tokens=1)
    rig.scheduler.schedule()
    rig.tiers.configure(msgspec.structs.replace(rig.tiers.limits, disk_kv=2 * 8192))
    assert rig.tiers.used("disk") > 2 * 8192, "while it is being read"
    rig.cancel(request_id)
    rig.settle()
    assert rig.tiers.used("disk") <= 2 * 8192


def test_what_is_pinned_beyond_its_share_leaves_a_disk_that_gets_smaller(rigs: list[ColdRig], tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    turn(rig, PROMPT)
    rig.tiers.sessions.wish("s", rig.now, pinned=True, ttl=None)
    rig.save()
    rig.tiers.configure(msgspec.structs.replace(rig.tiers.limits, disk_kv=4 * 8192, disk_low=0.01))
    assert [cold.depth for cold in rig.cold() if cold.disk] == [0, 1], "its share is kept below the low mark"
    rig.tiers.sessions.wish("s", rig.now, pinned=False, ttl=None)
    rig.tiers.configure(msgspec.structs.replace(rig.tiers.limits, disk_kv=8192))
    assert rig.tiers.used("disk") <= 8192


def test_what_has_to_go_while_its_chat_is_saved_is_not_written_again(rigs: list[ColdRig], tmp_path: Path) -> None:
    """Else saving, and whatever takes its room, would take turns without end."""
    rigs.append(rig := ColdRig(tmp_path))
    turn(rig, PROMPT)
    rig.residency.saver.save()
    rig.settle()
    last = max((cold for cold in rig.cold() if cold.disk), key=lambda cold: cold.depth)
    rig.tiers.holdings.take_from_disk(last, "watermark")
    rig.settle()
    rig.residency.saver.save()
    assert (rig.tiers.disk.saving, rig.residency.saver.unsaved) == (0, 0)
    turn(rig, [*PROMPT, 9], "s")
    rig.save()
    assert len(rig.cold()) > last.depth, "the next turn's end is another matter"


def test_a_day_that_allows_nothing_more_writes_nothing(rigs: list[ColdRig], tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    assert rig.tiers.disk.files is not None
    rig.tiers.disk.files.writes.bytes_per_day = 3 * 8192
    _, more = turn(rig, PROMPT)
    rig.save()
    assert len(list(tmp_path.rglob("*.kv"))) == 3
    assert rig.sources(follow(rig, more)) == (33, 0, 0, 4), "no chat is the worse for it"


def test_what_host_has_no_room_for_goes_to_disk_though_nobody_saved_it(rigs: list[ColdRig], tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path, host_blocks=4))
    _, more = turn(rig, PROMPT)
    rig.flush()
    rig.settle()
    assert sorted((cold.depth, cold.host is not None) for cold in rig.cold()) == [
        (depth, depth < 4) for depth in range(9)
    ]
    assert rig.sources(follow(rig, more)) == (0, 16, 17, 4)


def test_a_pinned_chat_is_not_pushed_out(rigs: list[ColdRig], tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path, disk_blocks=18, host_blocks=18))
    _, more = turn(rig, PROMPT, "kept")
    rig.tiers.sessions.wish("kept", rig.now, pinned=True, ttl=None)
    rig.save()
    rig.flush()
    for number in range(3):
        follow(rig, [60 + number, *PROMPT[1:]], f"other {number}")
        rig.save()
        rig.flush()
    for tier in ("host", "disk"):
        assert sum(bool(getattr(cold, tier)) for cold in rig.tiers.index.held_by("kept")) == 9
    assert rig.sources(follow(rig, more, "kept")) == (0, 33, 0, 4)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_pinned_chat_that_outgrows_its_share_makes_way_for_others(
    rigs: list[ColdRig], tmp_path: Path, tier: str
) -> None:
    """Tail first, down to its share, and the log says why."""
    rooms = {"host": {"host_blocks": 12}, "disk": {"folder": tmp_path, "disk_blocks": 12, "disk_low": 1.0}}
    rigs.append(rig := ColdRig(**rooms[tier]))
    rig.tiers.sessions.wish("kept", rig.now, pinned=True, ttl=None)
    _, more = turn(rig, PROMPT, "kept")
    for number in range(4):
        rig.save()
        rig.flush()
        kept = sorted(cold.depth for cold in rig.tiers.index.held_by("kept"))
        assert kept == [0, 1, 2, 3, 4, 5, *([] if number > 1 else [6] if number else [6, 7, 8])]
        assert number == 0 or len(rig.tiers.index.held_by(f"other {number}")) == 5
        follow(rig, [60 + number, *PROMPT[1:16]], f"other {number + 1}")
    told = [
        (event.action, event.session_id, event.source, event.blocks)
        for event in rig.tiers.journal.take()
        if event.reason == OUTGROWN
    ]
    assert told == [("evicted", "kept", tier, 3)]
    from_tier = rig.sources(follow(rig, more, "kept"))[1:3]
    assert sorted(from_tier) == [0, 24]


def test_the_first_pinned_keeps_its_share(rigs: list[ColdRig]) -> None:
    rigs.append(rig := ColdRig(host_blocks=20))
    for name in ("second", "first"):
        turn(rig, [60 + len(name), *PROMPT[1:]], name)
    for name in ("first", "second", "first"):  # once more is nothing new
        rig.tiers.sessions.wish(name, rig.now, pinned=True, ttl=None)
    rig.flush()
    follow(rig, [70, *PROMPT[1:]], "other")
    rig.flush()
    assert len(rig.tiers.index.held_by("first")) == 9
    assert sorted(cold.depth for cold in rig.tiers.index.held_by("second")) == [0, 1]


def test_a_pool_keeps_a_pinned_chat_as_far_as_its_share_goes(rigs: list[ColdRig]) -> None:
    rigs.append(rig := ColdRig(blocks=12))
    rig.tiers.sessions.wish("kept", rig.now, pinned=True, ttl=None)
    turn(rig, PROMPT, "kept")
    for number in range(2):
        follow(rig, [60 + number, *PROMPT[1:16]], "other")
    kept = sorted(block.depth for block in rig.manager.blocks.values() if "kept" in block.holders)
    assert kept == [0, 1, 2, 3, 4, 5]


def test_a_smaller_budget_is_kept_whatever_is_pinned(rigs: list[ColdRig], tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path, host_blocks=20))
    _, more = turn(rig, PROMPT, "kept")
    follow(rig, [90 - token for token in PROMPT], "other")
    rig.save()
    rig.flush()
    rig.tiers.sessions.wish("kept", rig.now, pinned=True, ttl=None)
    rig.tiers.configure(msgspec.structs.replace(rig.config, host_kv=4 * rig.image_bytes, disk_kv=4 * 8192))
    rig.settle()
    rig.check()
    for tier in ("host", "disk"):
        assert rig.tiers.used(tier) <= rig.tiers.tier_limits(tier).budget
        assert {0, 1} <= {cold.depth for cold in rig.tiers.index.held_by("kept") if getattr(cold, tier)}
    assert rig.tiers.host.held_bytes <= 4 * rig.image_bytes
    assert sum(rig.sources(follow(rig, more, "kept"))[1:3]) >= 8
    rig.settle()


# --- what fails -------------------------------------------------------------------------------------------------------


def no_memory(*_: object, **__: object) -> None:
    raise MemoryError("no memory")


def test_a_copy_from_the_device_that_fails_costs_the_copy_alone(
    rigs: list[ColdRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rigs.append(rig := ColdRig(host_blocks=64, blocks=10))
    follow(rig, PROMPT)
    with monkeypatch.context() as patch:
        patch.setattr(rig.residency.space.codec, "store", no_memory)
        other = rig.submit([70, *PROMPT[1:]], session="other")
        rig.run()
    assert rig.sources(other) == (0, 0, 0, 30)
    assert rig.cold() == []


def test_a_copy_to_the_device_that_fails_is_computed(rigs: list[ColdRig], monkeypatch: pytest.MonkeyPatch) -> None:
    rigs.append(rig := ColdRig(host_blocks=64))
    _, more = turn(rig, PROMPT)
    rig.flush()
    with monkeypatch.context() as patch:
        patch.setattr(rig.residency.space.codec, "load_many", no_memory)
        again = follow(rig, more)
    assert rig.sources(again) == (0, 0, 0, 37)
    assert not any(cold.reads for cold in rig.cold())


def test_a_turn_that_fails_while_it_is_let_in_holds_no_block_below(
    rigs: list[ColdRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rigs.append(rig := ColdRig(host_blocks=64))
    turn(rig, PROMPT)
    rig.flush()
    follow(rig, PROMPT[:6])
    with monkeypatch.context() as patch:
        patch.setattr(rig.manager, "_copy_tokens", no_memory)
        rig.submit([*PROMPT[:22], 50, 51], session="other")
        with pytest.raises(MemoryError):
            rig.step()
        rig.note(rig.scheduler.fail("no memory"))
    assert not any(cold.reads for cold in rig.cold())


def test_the_same_turn_again_leaves_two_equal_tails(rigs: list[ColdRig]) -> None:
    rigs.append(rig := ColdRig(host_blocks=64, device_ttl=100.0))
    follow(rig, PROMPT)
    follow(rig, PROMPT)
    tails = [block.token_ids for block in rig.manager.blocks.values() if len(block.token_ids) < 4]
    assert len(tails) == 2
    assert tails[0] == tails[1]
    rig.now += 200
    rig.residency.relieve(float("inf"), expired=True)
    assert rig.manager.blocks == {}
    assert len(rig.cold()) == 9
