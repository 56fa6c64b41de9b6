"""Files that take long, while everything else goes on: nothing is used before its copy has ended, or once it is lost.

One read or write of a file is held up by hand, its buffer watched: whoever writes to it meanwhile is found out. The
fake model fails at once on a block that was changed, or that came too late to where another's are.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.cache import restores
from engine.protocol import Prefetch
from tests.engine.cold_rig import ColdRig
from tests.engine.gate import Gate, Slow
from tests.engine.test_tiers import PROMPT, follow, turn

pytestmark = pytest.mark.usefixtures("copies")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch, rigs: list[ColdRig]) -> Iterator[Slow]:
    slow = Slow(monkeypatch)
    yield slow
    slow.end()


def saved(rig: ColdRig) -> list[int]:
    """A turn that only the disk holds; the conversation with a next message."""
    _, more = turn(rig, PROMPT)
    rig.save()
    rig.flush()
    rig.tiers.demote("s", "disk")
    assert all(cold.disk and cold.host is None for cold in rig.cold()) and not rig.manager.blocks
    return more


def begin(rig: ColdRig, gate: Gate, prompt: list[int], **fields: Any) -> str:
    """Submit a turn beside one that writes, so that steps go on; its first read is held up."""
    rig.submit([70, 71, 72], max_tokens=120, session="talker")
    rig.step()
    request_id = rig.submit(prompt, **fields)
    rig.step()
    assert gate.reached.wait(10)
    assert rig.tiers.disk.loading
    return request_id


def everything_right_on_disk(rig: ColdRig) -> None:
    """Every file holds the K of its own tokens, and nothing else."""
    for cold in rig.cold():
        if cold.disk:
            rest = rig.manager.block_size - len(cold.token_ids)
            assert rig.ids_on_disk(cold) == [*cold.token_ids, *[0] * rest]


# --- writing ----------------------------------------------------------------------------------------------------------


def test_a_block_is_there_when_it_has_been_written(rigs: list[ColdRig], slow: Slow, tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    gate = slow.write(rig)
    _, more = turn(rig, PROMPT)
    rig.residency.saver.save()
    assert gate.reached.wait(10)
    rig.flush()  # its only copy on the device goes: what is written must have been copied before
    while rig.tiers.disk.saving > 1:
        rig.wait_for_end()
    held = [cold for cold in rig.cold() if cold.writing]
    assert [(cold.depth, cold.disk) for cold in held] == [(0, 0)]
    assert f"{held[0].key.hex()}.kv" not in {file.name for file in tmp_path.rglob("*.kv")}
    assert sum(event.blocks for event in rig.tiers.journal.take() if event.action == "saved") == 8
    rig.submit([70, 71, 72], max_tokens=120, session="talker")
    waiting = rig.submit(more)
    for _ in range(5):
        rig.step()
    assert not rig.replies[waiting], "without the first block the others are no use"
    gate.open(rig)
    assert rig.sources(waiting) == (0, 0, 33, 4)
    everything_right_on_disk(rig)


def test_what_is_written_was_copied_before_its_place_is_reused(rigs: list[ColdRig], slow: Slow, tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path, blocks=10))
    gate = slow.write(rig)
    follow(rig, PROMPT)
    rig.flush()  # nobody has saved it: it is written on its way out
    assert gate.reached.wait(10)
    other, _ = turn(rig, [70, *PROMPT[1:]], "other")  # in the same blocks of the device
    assert rig.sources(other)[0] == 0
    gate.open(rig)
    everything_right_on_disk(rig)


def test_a_buffer_is_not_written_over_while_it_is_written_from(rigs: list[ColdRig], slow: Slow, tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path, blocks=20))
    gate = slow.write(rig)
    follow(rig, PROMPT)
    rig.residency.saver.save()
    assert gate.reached.wait(10)
    for number in range(4):  # through the same buffers
        rig.note_ends()
        more = turn(rig, [61 + number, *PROMPT[1:]], f"other {number}")[1]
        rig.residency.saver.save()
        while rig.tiers.disk.saving > 1:
            rig.wait_for_end()
        rig.flush()
        follow(rig, more, f"other {number}")
    gate.open(rig)
    rig.save()
    assert len(rig.cold()) > 40
    everything_right_on_disk(rig)


def test_deleted_while_it_is_written_and_written_again(rigs: list[ColdRig], slow: Slow, tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    gate = slow.write(rig)
    follow(rig, PROMPT, "first")
    rig.residency.saver.save()
    assert gate.reached.wait(10)
    assert {cold.writing for cold in rig.forget("first").writing} == {True}
    _, more = turn(rig, PROMPT, "second")  # the same blocks under the same keys
    rig.residency.saver.save()
    while rig.tiers.disk.saving > 1:
        rig.wait_for_end()
    gate.open(rig)
    rig.save()
    assert {holder for cold in rig.cold() for holder in cold.holders} == {"second"}
    assert {file.stem for file in tmp_path.rglob("*.kv")} == {cold.key.hex() for cold in rig.cold()}
    rig.flush()
    assert rig.sources(follow(rig, more, "second")) == (0, 0, 33, 4)


def test_a_chat_that_is_deleted_while_it_is_written_is_not_found(
    rigs: list[ColdRig], slow: Slow, tmp_path: Path
) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    gate = slow.write(rig)
    _, more = turn(rig, PROMPT)
    rig.residency.saver.save()
    assert gate.reached.wait(10)
    rig.forget("s")
    assert rig.cold() == []
    gate.open(rig)
    assert list(tmp_path.rglob("*.kv")) == []
    assert rig.sources(follow(rig, more)) == (0, 0, 0, 37)


# --- reading ----------------------------------------------------------------------------------------------------------


def test_a_late_read_is_waited_for_and_nothing_runs_on_half_of_it(
    rigs: list[ColdRig], slow: Slow, tmp_path: Path
) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    more = saved(rig)
    gate = slow.read(rig)
    waiting = begin(rig, gate, more)
    for _ in range(5):
        rig.step()
    assert not rig.replies[waiting], "a turn does not begin before its blocks are there"
    assert rig.found(more) == 0, "and nobody else finds them"
    gate.open(rig)
    assert rig.sources(waiting) == (0, 0, 33, 4)


def test_a_read_that_comes_after_its_turn_was_cancelled_lands_nowhere(
    rigs: list[ColdRig], slow: Slow, tmp_path: Path
) -> None:
    rigs.append(rig := ColdRig(tmp_path, blocks=24))
    more = saved(rig)
    gate = slow.read(rig)
    cancelled = begin(rig, gate, more)
    rig.cancel(cancelled)
    other = rig.submit([66, *PROMPT[1:]], session="other")  # in the blocks that the first has given back
    for _ in range(3):
        rig.step()
    gate.open(rig)
    assert rig.sources(other) == (0, 0, 0, 30)
    rig.flush()
    assert rig.sources(follow(rig, more)) == (0, 0, 33, 4), "what it was read from is as it was"


@pytest.mark.parametrize("again", [False, True])
def test_a_read_that_comes_after_its_chat_was_deleted_lands_nowhere(
    rigs: list[ColdRig], slow: Slow, tmp_path: Path, again: bool
) -> None:
    rigs.append(rig := ColdRig(tmp_path, blocks=24))
    more = saved(rig)
    gate = slow.read(rig)
    begin(rig, gate, more)
    assert rig.delete("s") == 9
    assert list(tmp_path.rglob("*.kv")) == []
    other = rig.submit(more if again else [66, *PROMPT[1:]], session="other")
    for _ in range(3):
        rig.step()
    gate.open(rig)
    assert rig.sources(other) == (0, 0, 0, 37 if again else 30), "nothing of a deleted chat is found"
    assert {holder for cold in rig.cold() for holder in cold.holders} <= {"other", "talker"}
    rig.save()
    rig.flush()
    everything_right_on_disk(rig)


def test_a_read_that_fails_late_takes_no_file_that_was_written_since(
    rigs: list[ColdRig], slow: Slow, tmp_path: Path
) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    more = saved(rig)
    first = min(rig.cold(), key=lambda cold: cold.depth)
    (file,) = tmp_path.rglob(f"{first.key.hex()}.kv")
    file.write_bytes(file.read_bytes()[:-8])
    gate = slow.read(rig)
    begin(rig, gate, more)
    rig.forget("s")
    rig.drop("talker")
    _, longer = turn(rig, more, "other")
    rig.residency.saver.save()
    while rig.tiers.disk.saving:
        rig.wait_for_end()
    gate.open(rig)
    assert {file.stem for file in tmp_path.rglob("*.kv")} == {cold.key.hex() for cold in rig.cold()}
    rig.flush()
    assert rig.sources(follow(rig, longer, "other")) == (0, 0, 40, 4)


@pytest.mark.parametrize("ahead", [1, 16])
def test_a_read_that_ends_after_its_block_came_from_elsewhere_gives_its_buffer_back(
    rigs: list[ColdRig], slow: Slow, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ahead: int
) -> None:
    monkeypatch.setattr(restores, "READ_AHEAD", ahead)
    rigs.append(rig := ColdRig(tmp_path, host_blocks=64))
    more = saved(rig)
    gate = slow.read(rig)
    patient = begin(rig, gate, more)
    quick = rig.submit(more, priority=1)
    while quick not in rig.finished:
        rig.step()
    rig.flush()  # to host, with a block that begins with the tail for which the patient one may not have asked yet
    while patient not in rig.finished:
        rig.step()
    assert rig.sources(patient) == (0, 32, 1, 4), "all but its own tail"
    gate.open(rig)


def test_a_buffer_is_not_read_into_before_its_block_was_copied(rigs: list[ColdRig], slow: Slow, tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path, blocks=80))
    more = saved(rig)
    others = [[61 + number, *PROMPT[1:]] for number in range(3)]
    for number, prompt in enumerate(others):
        follow(rig, prompt, f"other {number}")
    rig.save()
    rig.flush()
    gate = slow.read(rig)
    patient = begin(rig, gate, more)
    for number, prompt in enumerate(others):  # through the other buffers; a second worker reads them
        request_id = rig.submit([*prompt, 9], session=f"other {number}")
        while request_id not in rig.finished:
            rig.step()
        assert rig.sources(request_id)[2] == 30
    gate.open(rig)
    assert rig.sources(patient) == (0, 0, 33, 4)


def test_a_prefetch_that_is_overtaken_by_a_deletion_leaves_nothing(
    rigs: list[ColdRig], slow: Slow, tmp_path: Path
) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    more = saved(rig)
    gate = slow.read(rig)
    rig.submit([70, 71, 72], max_tokens=120, session="talker")
    rig.note(rig.scheduler.prefetch(Prefetch(call_id="ahead", session_id="s", token_ids=more[:34])))
    rig.step()
    assert gate.reached.wait(10)
    rig.delete("s")
    assert rig.prefetched["ahead"].disk_tokens == 0
    gate.open(rig)
    assert list(tmp_path.rglob("*.kv")) == []
    assert rig.sources(follow(rig, more)) == (0, 0, 0, 37)


def test_a_disk_that_does_not_answer_is_not_waited_for(rigs: list[ColdRig], slow: Slow, tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    more = saved(rig)
    gate = slow.read(rig, patience_s=restores.PATIENCE_S)
    waiting = begin(rig, gate, more)
    while waiting not in rig.finished:
        rig.step()
    assert rig.sources(waiting) == (0, 0, 0, 37)
    gate.open(rig)
