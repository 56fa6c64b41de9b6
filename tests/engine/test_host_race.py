"""Blocks in host that leave it, or should, while a turn brings them to the device a few at a time."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from engine.cache import restores
from tests.engine.cold_rig import ColdRig
from tests.engine.test_tiers import follow, turn

pytestmark = pytest.mark.usefixtures("copies")

LONG = [1 + number % 60 for number in range(80)]  # 20 blocks


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[ColdRig]:
    """Host holds little more than one chat, and a step brings two blocks."""
    monkeypatch.setattr(restores, "COPY_AT_ONCE", 2)
    rig = ColdRig(blocks=120, host_blocks=24)
    yield rig
    rig.close()
    rig.check()


def half_restored(rig: ColdRig) -> str:
    """A turn of which a part has come from host, beside one that writes: two blocks come in a step."""
    _, more = turn(rig, LONG)
    rig.flush()
    assert all(cold.host is not None for cold in rig.cold())
    rig.submit([70, 71, 72], max_tokens=120, session="talker")
    rig.step()
    request_id = rig.submit(more)
    rig.step()
    reads = [cold for cold in rig.cold() if cold.reads]
    assert 0 < len(reads) < 21, "it has begun and not ended"
    return request_id


@pytest.mark.parametrize("pressure", ["full", "smaller", "expired", "wish"])
def test_a_slot_in_host_is_not_reused_while_it_is_read(rig: ColdRig, pressure: str) -> None:
    waiting = half_restored(rig)
    held = [cold for cold in rig.cold() if cold.reads]
    if pressure == "full":
        other = rig.submit([65, *LONG], max_tokens=1, session="other")
        while other not in rig.finished:
            rig.step()
        rig.flush()  # the other's blocks want all slots
    elif pressure == "smaller":
        rig.tiers.configure(msgspec.structs.replace(rig.config, host_kv=rig.image_bytes))
    elif pressure == "expired":
        rig.tiers.configure(msgspec.structs.replace(rig.config, host_ttl=1.0))
        rig.now += 100
        rig.tiers.enforce("host")
    else:
        rig.tiers.demote("s", None)
    assert all(cold.host is not None for cold in held if cold.reads)
    while waiting not in rig.finished:
        rig.step()
    assert rig.sources(waiting) == (0, 83, 0, 4)
    rig.drop("talker")
    rig.run()
    rig.tiers.enforce("host")
    rig.check()
    assert not any(cold.reads for cold in rig.cold())
    assert rig.tiers.host.held_bytes <= rig.tiers.tier_limits("host").budget


def test_a_chat_that_is_deleted_while_another_reads_it_is_gone(rig: ColdRig) -> None:
    follow(rig, LONG)
    rig.flush()
    rig.submit([70, 71, 72], max_tokens=120, session="talker")
    rig.step()
    reader = rig.submit([*LONG, 9], session="reader")
    rig.step()
    rig.forget("s")
    used = rig.tiers.host.used_bytes
    assert used == 0, "its RAM is free at once"
    while reader not in rig.finished:
        rig.step()
    device, host, disk, computed = rig.sources(reader)
    assert (device, disk) == (0, 0)
    assert 0 < host < 80, "what had come stays, the rest is computed"
    assert host + computed == 81
    assert not any(cold.reads for cold in rig.cold())
