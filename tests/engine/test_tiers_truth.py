"""What the tiers say and what is true: names that collide, files that lie, marks that stay."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from engine.cache import block as naming
from engine.cache.block_file import BlockHeader
from engine.cache.cold import ColdBlock
from engine.cache.disk import BlockFiles
from tests.engine.cold_rig import FINGERPRINT, ColdRig
from tests.engine.test_tiers import ALICE, BOB, PROMPT, follow, turn

OTHERS = [90 - token for token in PROMPT]


def block_files(rig: ColdRig) -> BlockFiles:
    assert rig.tiers.disk.files is not None
    return rig.tiers.disk.files.blocks


def by_depth(rig: ColdRig) -> list[ColdBlock]:
    return sorted(rig.cold(), key=lambda cold: cold.depth)


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_name_that_two_blocks_have_is_not_enough(rigs: list[ColdRig], monkeypatch: pytest.MonkeyPatch) -> None:
    def weak(parent: bytes, token_ids: Sequence[int], salt: bytes) -> bytes:
        return hashlib.blake2b(parent + salt, digest_size=16).digest()

    monkeypatch.setattr(naming, "block_hash", weak)
    rigs.append(rig := ColdRig(host_blocks=64))
    follow(rig, PROMPT, "first")
    rig.flush()
    assert rig.sources(follow(rig, OTHERS, "second")) == (0, 0, 0, 30)


def test_a_name_that_stands_for_no_beginning_is_not_enough(
    rigs: list[ColdRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def weak(parent: bytes, token_ids: Sequence[int], salt: bytes) -> bytes:
        return hashlib.blake2b(struct.pack(f"<{len(token_ids)}q", *token_ids) + salt, digest_size=16).digest()

    monkeypatch.setattr(naming, "block_hash", weak)
    rigs.append(rig := ColdRig(host_blocks=64))
    follow(rig, [1, 2, 3, 4, *OTHERS], "first")
    follow(rig, [5, 6, 7, 8], "second")
    rig.flush()
    assert rig.sources(follow(rig, [5, 6, 7, 8, *OTHERS], "second")) == (0, 4, 0, 30)


def test_what_two_users_say_has_two_names(rigs: list[ColdRig], tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    for name, salt in (("alice", ALICE), ("bob", BOB)):
        follow(rig, PROMPT, name, salt=salt, shared_len=12)
    rig.save()
    assert sorted(len(cold.holders) for cold in rig.cold()) == [1] * 12 + [2] * 3
    assert {cold.preset for cold in rig.cold() if len(cold.holders) == 2} == {True}


def test_a_tail_is_its_user_s_own_whatever_its_chat_is_called(rigs: list[ColdRig]) -> None:
    rigs.append(rig := ColdRig(host_blocks=64))
    follow(rig, PROMPT[:3], "chat", salt=ALICE, max_tokens=1)
    rig.flush()
    assert rig.sources(follow(rig, PROMPT[:3], "chat", salt=BOB, max_tokens=1)) == (0, 0, 0, 3)


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_file_that_says_other_tokens_is_not_believed(rigs: list[ColdRig], tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    _, more = turn(rig, PROMPT)
    rig.save()
    rig.flush()
    cold = by_depth(rig)[2]
    files, image = block_files(rig), torch.empty(rig.image_bytes, dtype=torch.uint8).numpy().data
    header = files.read(FINGERPRINT, cold.key, image)
    files.write(msgspec.structs.replace(header, token_ids=[1, 2, 3, 4]), image)  # whole, and with its checksums
    again = follow(rig, more)
    assert rig.sources(again) == (0, 0, 8, 29)
    assert not list(tmp_path.rglob(f"{cold.key.hex()}.kv")), "it is not asked again"


@pytest.mark.parametrize("prompt", [PROMPT, [1, 2, 3, 4] * 7])
def test_two_files_that_were_swapped_are_no_use(rigs: list[ColdRig], tmp_path: Path, prompt: list[int]) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    _, more = turn(rig, prompt)
    rig.save()
    rig.flush()
    left, right = (next(tmp_path.rglob(f"{cold.key.hex()}.kv")) for cold in by_depth(rig)[3:5])
    content = left.read_bytes()
    left.write_bytes(right.read_bytes())
    right.write_bytes(content)
    assert rig.sources(follow(rig, more)) == (0, 0, 12, len(more) - 12)


def test_what_is_damaged_goes(rigs: list[ColdRig], tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    _, more = turn(rig, PROMPT)
    rig.save()
    rig.flush()
    (file,) = tmp_path.rglob(f"{by_depth(rig)[5].key.hex()}.kv")
    content = bytearray(file.read_bytes())
    content[-4096] ^= 1
    file.write_bytes(content)
    follow(rig, more)
    assert not file.exists()
    assert rig.tiers.disk.bytes == sum(file.stat().st_size for file in tmp_path.rglob("*.kv"))


def test_a_tail_is_kept_without_what_else_its_slot_held(rigs: list[ColdRig], tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path, host_blocks=64))
    follow(rig, [50, 51, 52, 53, 54], "private", max_tokens=1)
    rig.flush()
    follow(rig, [50, 9], "other", max_tokens=1)  # begins with a copy of a block of which one token is wanted
    rig.save()
    rig.flush()
    (tail,) = (cold for cold in rig.cold() if cold.holders == {"other"})
    assert list(tail.token_ids) == [50, 9]
    assert rig.ids_in_host(tail) == rig.ids_on_disk(tail) == [50, 9, 0, 0]


def test_what_another_chat_still_needs_is_not_removed(rigs: list[ColdRig], tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    _, more = turn(rig, PROMPT[:6], "short", max_tokens=1)
    rig.save()
    rig.flush()
    follow(rig, PROMPT, "long")
    rig.save()
    rig.settle()
    rig.flush()
    tails = [list(cold.token_ids) for cold in rig.cold() if cold.holders == {"short"}]
    assert tails == [PROMPT[4:6]]
    rig.delete("long")
    assert rig.sources(follow(rig, more, "short")) == (0, 0, 6, 4)


# --- marks ------------------------------------------------------------------------------------------------------------


def test_what_was_rounded_once_is_marked_for_good(rigs: list[ColdRig], tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path, host_blocks=64))
    _, more = turn(rig, PROMPT)
    rig.flush()
    for cold in rig.cold():
        cold.lossy = True
    follow(rig, more)
    lossy = [block.lossy for block in rig.manager.blocks.values() if block.depth < 8]
    assert lossy == [True] * 8
    rig.save()
    headers = [stored.header for stored in block_files(rig).scan(FINGERPRINT)]
    assert {header.lossy for header in headers if header.depth < 8} == {True}


def header_of(rig: ColdRig, depth: int) -> BlockHeader:
    return next(stored.header for stored in block_files(rig).scan(FINGERPRINT) if stored.header.depth == depth)


def test_who_shares_a_block_is_known_after_a_kill(rigs: list[ColdRig], tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    follow(rig, PROMPT, "first")
    rig.save()
    _, more = turn(rig, PROMPT[:21], "second")
    rig.save()
    assert header_of(rig, 0).holders == ["first"], "its file was written before"
    rig.delete("first")
    rigs.append(later := ColdRig(tmp_path))
    assert {holder for cold in later.cold() for holder in cold.holders} == {"second"}
    assert later.sources(follow(later, more, "second")) == (0, 0, 24, 4)
    later.delete("second")
    assert not list(tmp_path.rglob("*.kv"))


def test_a_deleted_chat_holds_nothing_after_a_kill(rigs: list[ColdRig], tmp_path: Path) -> None:
    rigs.append(rig := ColdRig(tmp_path))
    follow(rig, PROMPT, "first")
    rig.save()
    follow(rig, PROMPT[:21], "second")  # and killed before what that one holds was saved
    rig.delete("first")
    rigs.append(later := ColdRig(tmp_path))
    assert {holder for cold in later.cold() for holder in cold.holders} <= {"second"}
    later.delete("second")
    assert not list(tmp_path.rglob("*.kv"))
