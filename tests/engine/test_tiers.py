"""Chats whose blocks left the device: from host and disk, across a restart, each reply checked token by token.

The fake model recomputes every digest from what it reads, so that a wrong, shifted or stale block fails at once.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from engine.cache.holders import HolderFiles
from engine.protocol import Miss, Prefetch
from tests.engine.cold_rig import ColdRig
from tests.engine.rig import Rig

pytestmark = pytest.mark.usefixtures("copies")

PROMPT = list(range(1, 31))  # 7 blocks of 4, and 2 tokens
ALICE, BOB = b"a" * 16, b"b" * 16


def follow(rig: ColdRig, prompt: list[int], session: str = "s", **fields: object) -> str:
    """One turn to its end: the request's id."""
    request_id = rig.submit(prompt, session=session, **fields)
    rig.run()
    return request_id


def turn(rig: ColdRig, prompt: list[int], session: str = "s", **fields: object) -> tuple[str, list[int]]:
    """One turn to its end: its id, and the whole conversation with a next message."""
    request_id = follow(rig, prompt, session, **fields)
    return request_id, [*prompt, *rig.replies[request_id][0], 7, 8, 9]


def test_a_turn_finds_in_host_what_left_the_device(rigs: list[ColdRig]) -> None:
    rigs.append(rig := ColdRig(host_blocks=64))
    _, more = turn(rig, PROMPT)
    rig.flush()
    assert (len(rig.manager.blocks), len(rig.cold())) == (0, 9)
    again = follow(rig, more)
    assert rig.sources(again) == (0, 33, 0, 4), "all but the token sampled last, and the new message"
    assert rig.finished[again][0].usage.miss == Miss(position=33, cause="new")


def test_a_turn_finds_on_disk_what_an_earlier_engine_saved(rigs: list[ColdRig], tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    _, more = turn(rig, PROMPT)
    rig.save()
    rig.close()
    rigs.append(later := ColdRig(tmp_path))
    assert len(later.cold()) == 9
    again = follow(later, more)
    assert later.sources(again) == (0, 0, 33, 4)


def test_a_reply_is_saved_as_it_grows_and_its_old_tail_is_removed(rigs: list[ColdRig], tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    _, more = turn(rig, PROMPT)
    rig.save()
    follow(rig, more)
    rig.save()
    assert sorted(len(cold.token_ids) for cold in rig.cold()) == [4] * 10, "40 tokens, and no tail of the first turn"
    rig.settle()
    assert len(list(tmp_path.rglob("*.kv"))) == 10


def test_what_does_not_fit_host_goes_on_to_disk(rigs: list[ColdRig], tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path, host_blocks=4))
    _, more = turn(rig, PROMPT)
    rig.save()
    rig.flush()
    assert sum(cold.host is not None for cold in rig.cold()) == 4
    again = follow(rig, more)
    assert rig.sources(again) == (0, 16, 17, 4), "the head left the device last, and so is in host"


def test_without_host_what_leaves_the_device_unsaved_is_written(rigs: list[ColdRig], tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    _, more = turn(rig, PROMPT)
    rig.flush()
    rig.save()
    assert rig.sources(follow(rig, more)) == (0, 0, 33, 4)


def test_a_preempted_sequence_loses_nothing(rigs: list[ColdRig]) -> None:
    rigs.append(rig := ColdRig(blocks=18, host_blocks=64))
    first = rig.submit(PROMPT, max_tokens=16, session="first")
    second = rig.submit([50, *PROMPT[1:]], max_tokens=16, session="second")
    rig.run()
    usage = rig.finished[second][0].usage
    assert (usage.preemptions, usage.recomputed_tokens) == (1, 0), "its blocks came back from host"
    assert rig.finished[first][0].usage.preemptions == 0


def test_a_chat_that_another_pushed_out_comes_back(rigs: list[ColdRig]) -> None:
    rigs.append(rig := ColdRig(blocks=10, host_blocks=64))
    talks = {name: [number, *PROMPT[1:]] for number, name in enumerate("abc", start=40)}
    for _ in range(3):
        for name, prompt in talks.items():
            _, talks[name] = turn(rig, prompt[-30:] if len(prompt) > 36 else prompt, name, max_tokens=2)
    events = [event for event in rig.tiers.journal.take() if event.action == "promoted"]
    assert sum(event.blocks for event in events) > 10
    assert {event.reason for event in events} == {"a chat goes on"}


def test_a_block_that_ends_inside_a_message_is_copied(rigs: list[ColdRig]) -> None:
    rigs.append(rig := ColdRig(host_blocks=64))
    turn(rig, PROMPT)
    rig.flush()
    assert rig.sources(follow(rig, PROMPT[:20])) == (0, 19, 0, 1), "a full block of which three tokens are wanted"
    rig.flush()
    branch = [*PROMPT[:22], 90, 91, 92]
    assert rig.sources(follow(rig, branch)) == (0, 22, 0, 3), "two tokens of a block, then another way"


def test_samples_that_agree_leave_and_come_back(rigs: list[ColdRig]) -> None:
    rigs.append(rig := ColdRig(host_blocks=64))
    request_id = rig.submit(PROMPT, n=3, max_tokens=4)
    rig.run()
    assert len({tuple(reply) for reply in rig.replies[request_id].values()}) == 1
    rig.flush()
    more = [*PROMPT, *rig.replies[request_id][0], 7]
    assert rig.sources(follow(rig, more)) == (0, 33, 0, 2)


def test_two_users_share_nothing_but_a_preset(rigs: list[ColdRig], tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path, host_blocks=64))
    follow(rig, PROMPT, "alice", salt=ALICE, shared_len=12)
    rig.save()
    rig.flush()
    bob = follow(rig, PROMPT, "bob", salt=BOB, shared_len=12)
    assert rig.sources(bob) == (0, 12, 0, 18)
    rig.flush()
    assert rig.sources(follow(rig, PROMPT, "alice", salt=ALICE, shared_len=12)) == (0, 29, 0, 1)


def test_a_tail_is_its_session_own(rigs: list[ColdRig]) -> None:
    rigs.append(rig := ColdRig(host_blocks=64))
    _, more = turn(rig, PROMPT, "a", salt=ALICE)
    rig.flush()
    assert rig.sources(follow(rig, more, "b", salt=ALICE)) == (0, 32, 0, 5)


def test_other_weights_find_nothing(rigs: list[ColdRig], tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    follow(rig, PROMPT)
    rig.save()
    rig.close()
    rigs.append(other := ColdRig(tmp_path, fingerprint=b"g" * 32))
    assert other.cold() == []
    assert other.sources(follow(other, PROMPT)) == (0, 0, 0, 30)
    assert other.tiers.disk.bytes == sum(file.stat().st_size for file in tmp_path.rglob("*.kv")), "and count the others"


def test_a_chat_with_a_model_that_is_not_loaded_is_deleted_too(rigs: list[ColdRig], tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    follow(rig, PROMPT, "alice", salt=ALICE)
    follow(rig, PROMPT, "bob", salt=BOB)
    rig.save()
    rig.close()
    rigs.append(other := ColdRig(tmp_path, fingerprint=b"g" * 32))
    follow(other, PROMPT, "bob", salt=BOB)
    other.save()
    other.delete("alice")
    assert len(list(tmp_path.rglob("*.kv"))) == 18
    other.delete("bob")
    assert list(tmp_path.rglob("*.kv")) == []
    assert other.tiers.disk.bytes == 0


def test_models_that_are_not_loaded_give_way_on_disk(rigs: list[ColdRig], tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    follow(rig, PROMPT)
    rig.save()
    rig.close()
    rigs.append(other := ColdRig(tmp_path, disk_blocks=10, disk_low=1.0, fingerprint=b"g" * 32))
    _, more = turn(other, PROMPT)
    other.save()
    other.settle()
    assert len(list(tmp_path.rglob("*.kv"))) == 10, "one of the other model's is left"
    other.flush()
    assert other.sources(follow(other, more)) == (0, 0, 33, 4)


@pytest.mark.parametrize("damage", ["flip", "cut", "lose"])
def test_a_file_that_cannot_be_trusted_is_a_miss(rigs: list[ColdRig], tmp_path: Path, damage: str) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    _, more = turn(rig, PROMPT)
    rig.save()
    rig.flush()
    cold = sorted(rig.cold(), key=lambda cold: cold.depth)[5]
    (file,) = tmp_path.rglob(f"{cold.key.hex()}.kv")
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[-4096] ^= 1  # the first of the image
    file.write_bytes(content[:-8] if damage == "cut" else content)
    if damage == "lose":
        file.unlink()
    again = follow(rig, more)
    assert rig.sources(again) == (0, 0, 20, 17), "what comes before it is found"
    miss = rig.finished[again][0].usage.miss
    assert miss is not None
    assert (miss.position, miss.cause) == (20, "unreadable")
    assert [event.action for event in rig.tiers.journal.take() if event.source == "disk"].count("quarantined") == 1
    rig.save()
    rig.flush()
    more = [*more, *rig.replies[again][0], 3]
    assert rig.sources(follow(rig, more)) == (0, 0, 40, 2), "the next turn finds it whole again"


def test_why_a_turn_missed(rigs: list[ColdRig]) -> None:
    rigs.append(rig := ColdRig(host_blocks=0))
    first, more = turn(rig, PROMPT)
    assert rig.finished[first][0].usage.miss == Miss(position=0, cause="new")
    rig.flush()
    gone = follow(rig, more)
    assert rig.finished[gone][0].usage.miss == Miss(
        position=0, cause="evicted", detail="device: it had no room; host and disk are off"
    )
    edited = follow(rig, [*more[:9], 60, 61, 62])
    assert rig.finished[edited][0].usage.miss == Miss(position=9, cause="diverged")


def test_what_is_computed_faster_is_not_loaded(rigs: list[ColdRig]) -> None:
    rigs.append(rig := ColdRig(host_blocks=64, force="recompute"))
    _, more = turn(rig, PROMPT)
    rig.flush()
    again = follow(rig, more)
    assert rig.sources(again) == (0, 0, 0, 37)
    miss = rig.finished[again][0].usage.miss
    assert miss is not None
    assert (miss.cause, miss.position) == ("slower", 0)


def test_what_was_never_read_is_not_said_to_be_slower_to_load(rigs: list[ColdRig]) -> None:
    rigs.append(rig := ColdRig(host_blocks=64, force="recompute"))
    _, more = turn(rig, PROMPT)
    rig.flush()
    longer = [*more, *range(20, 20 + 2 * len(more))]
    miss = rig.finished[follow(rig, longer)][0].usage.miss
    assert miss is not None
    assert (miss.cause, miss.position) == ("new", 33), "most of what is read has no copy anywhere"


def test_a_deleted_chat_leaves_no_file(rigs: list[ColdRig], tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path, host_blocks=64))
    follow(rig, PROMPT, "alice", salt=ALICE, shared_len=12)
    follow(rig, PROMPT, "bob", salt=BOB, shared_len=12)
    rig.save()
    rig.flush()
    assert rig.delete("alice") == 6
    files = {file.stem for file in tmp_path.rglob("*.kv")}
    assert files == {cold.key.hex() for cold in rig.cold()}
    assert all(cold.holders == {"bob"} for cold in rig.cold())
    rig.close()
    rigs.append(later := ColdRig(tmp_path))
    later.delete("bob")
    assert list(tmp_path.rglob("*.kv")) == [], "what a session held is known after a restart"
    assert list((tmp_path / "sessions").iterdir()) == []


def test_a_deleted_chat_does_not_come_back_in_what_another_shares(rigs: list[ColdRig], tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    for session, salt in (("alice", ALICE), ("bob", BOB)):
        follow(rig, PROMPT, session, salt=salt, shared_len=12)
    rig.save()
    rig.close()
    for session in ("alice", "bob"):  # as if it was killed before it had noted who holds what; the files say it
        HolderFiles(tmp_path).delete(session)
        HolderFiles(tmp_path).introduce(session)
    for session in ("alice", "bob"):
        rigs.append(later := ColdRig(tmp_path))
        later.delete(session)
        later.close()
    assert list(tmp_path.rglob("*.kv")) == []


@pytest.mark.parametrize("amid", [False, True])
def test_a_file_that_nobody_has_saved_does_not_bring_a_deleted_chat_back(
    rigs: list[ColdRig], tmp_path: Path, amid: bool
) -> None:
    """It went to disk for lack of room, and names both; then one of the two is deleted."""
    rigs.append(rig := ColdRig(tmp_path))
    for session, salt in (("alice", ALICE), ("bob", BOB)):
        follow(rig, PROMPT, session, salt=salt, shared_len=12)
    rig.flush()
    if not amid:
        rig.settle()
    rig.delete("alice")
    rig.settle()  # and then it is killed
    rigs.append(later := ColdRig(tmp_path))
    assert {holder for cold in later.cold() for holder in cold.holders} == {"bob"}
    later.delete("bob")
    assert list(tmp_path.rglob("*.kv")) == []


def test_a_chat_deleted_while_it_is_saved_leaves_no_file(rigs: list[ColdRig], tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    follow(rig, PROMPT, "alice")
    assert rig.residency.saver.save() is False
    assert rig.tiers.disk.saving == 9
    rig.delete("alice")
    assert list(tmp_path.rglob("*.kv")) == []
    assert rig.tiers.disk.bytes == 0


def test_a_cancelled_restore_gives_everything_back(rigs: list[ColdRig], tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    _, more = turn(rig, PROMPT)
    rig.save()
    rig.flush()
    request_id = rig.submit(more)
    rig.step()
    assert rig.tiers.disk.loading > 0
    rig.cancel(request_id)
    while rig.tiers.disk.loading:
        rig.posted.get(timeout=10)()
    assert rig.scheduler.idle
    assert rig.tiers.disk.staging.used_bytes == 0
    assert {cold.reads for cold in rig.cold()} == {0}
    assert rig.sources(follow(rig, more)) == (0, 0, 33, 4)


def test_what_is_fetched_ahead_is_there(rigs: list[ColdRig], tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    _, more = turn(rig, PROMPT)
    rig.save()
    rig.flush()
    rig.note(rig.scheduler.prefetch(Prefetch(call_id="ahead", session_id="s", token_ids=more[:34])))
    rig.run()
    answer = rig.prefetched["ahead"]
    assert (answer.device_tokens, answer.host_tokens, answer.disk_tokens) == (33, 0, 33)
    events = [event for event in rig.tiers.journal.take() if event.action == "promoted"]
    assert {event.reason for event in events} == {"a chat is likely to go on"}
    assert rig.sources(follow(rig, more)) == (33, 0, 0, 4)


def test_what_is_fetched_ahead_makes_way(rigs: list[ColdRig], tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path, blocks=10))
    _, more = turn(rig, PROMPT)
    rig.save()
    rig.flush()
    rig.note(rig.scheduler.prefetch(Prefetch(call_id="ahead", session_id="s", token_ids=more[:34])))
    rig.step()
    other = follow(rig, [70, *PROMPT[1:]], "other")
    assert "ahead" in rig.prefetched
    assert rig.sources(other) == (0, 0, 0, 30)


def test_blocks_leave_each_tier_when_their_time_is_over(rigs: list[ColdRig], tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path, host_blocks=64, device_ttl=100.0, host_ttl=1000.0, disk_ttl=10_000.0))
    follow(rig, PROMPT)
    rig.save()
    where = []
    for wait in (0, 101, 1000, 10_000):
        rig.now += wait
        rig.residency.relieve(float("inf"), expired=True)
        for tier in ("host", "disk"):
            rig.tiers.enforce(tier)
        host, disk = (sum(bool(getattr(cold, tier)) for cold in rig.cold()) for tier in ("host", "disk"))
        where.append((len(rig.manager.blocks), host, disk))
    assert where == [(9, 0, 9), (0, 9, 9), (0, 0, 9), (0, 0, 0)]


def test_a_pinned_chat_stays(rigs: list[ColdRig], tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path, host_blocks=4, device_ttl=100.0, disk_ttl=100.0))
    _, more = turn(rig, PROMPT, "kept")
    follow(rig, [60, *PROMPT[1:]], "other")
    rig.save()
    rig.tiers.sessions.wish("kept", rig.now, pinned=True, ttl=None)
    rig.now += 200
    rig.residency.relieve(float("inf"), expired=True)
    rig.tiers.enforce("disk")
    assert {holder for block in rig.manager.blocks.values() for holder in block.holders} == {"kept"}
    assert {holder for cold in rig.cold() if cold.disk for holder in cold.holders} == {"kept"}
    assert rig.sources(follow(rig, more, "kept")) == (33, 0, 0, 4)


def test_a_full_disk_stops_saving_and_harms_no_chat(
    rigs: list[ColdRig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.cache.block_file import DiskFull

    rigs.append(rig := ColdRig(tmp_path))
    files = rig.tiers.disk.files
    assert files is not None
    monkeypatch.setattr(files.blocks, "write", lambda *_: (_ for _ in ()).throw(DiskFull("no space left")))
    _, more = turn(rig, PROMPT)
    rig.residency.saver.save()
    while rig.tiers.disk.saving:
        rig.posted.get(timeout=10)()
    assert rig.cold() == []
    assert rig.sources(follow(rig, more)) == (33, 0, 0, 4)
    told = [event for event in rig.tiers.journal.take() if event.action == "skipped"]
    assert [event.reason for event in told] == ["no space left"]
    monkeypatch.undo()
    rig.now += 61
    follow(rig, more)
    rig.save()
    assert len(rig.cold()) > 0, "a minute later it is tried again"


def test_a_disk_that_does_not_answer_is_not_waited_for(
    rigs: list[ColdRig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    _, more = turn(rig, PROMPT)
    rig.save()
    rig.flush()
    files, answer = rig.tiers.disk.files, threading.Event()
    assert files is not None
    read = files.blocks.read
    monkeypatch.setattr(files.blocks, "read", lambda *of: answer.wait(10) and read(*of))
    request_id = rig.submit(more)
    for _ in range(12):
        rig.note_ends()
        Rig.step(rig)
    assert rig.sources(request_id) == (0, 0, 0, 37)
    miss = rig.finished[request_id][0].usage.miss
    assert miss is not None
    assert (miss.cause, miss.detail) == ("unreadable", "the disk did not answer in time")
    answer.set()
    while rig.tiers.disk.loading:
        rig.posted.get(timeout=10)()
    assert rig.tiers.disk.staging.used_bytes == 0


def test_what_was_pinned_outlives_a_long_pause(rigs: list[ColdRig], tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    _, more = turn(rig, PROMPT, "kept")
    follow(rig, [60, *PROMPT[1:]], "other")
    rig.save()
    rig.close()
    rigs.append(later := ColdRig(tmp_path, disk_ttl=100.0, now=1000.0))
    assert {holder for cold in later.cold() for holder in cold.holders} == {"kept", "other"}
    later.tiers.sessions.wish("kept", later.now, pinned=True, ttl=None)
    later.tiers.enforce("disk")
    assert {holder for cold in later.cold() for holder in cold.holders} == {"kept"}
    assert later.sources(follow(later, more, "kept")) == (0, 0, 33, 4)


def test_what_is_larger_than_a_tier_pushes_nobody_out(rigs: list[ColdRig]) -> None:
    rigs.append(rig := ColdRig(host_blocks=1, host_high=0.5, host_low=0.5))
    follow(rig, PROMPT)
    rig.flush()
    assert rig.cold() == []
