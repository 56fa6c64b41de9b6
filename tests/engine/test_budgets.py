"""What host and disk may hold where nothing is set, and what of the machine that is a part of."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import budgets, room
from engine.budgets import disk_room, fill_in
from engine.config import CacheConfig

GIB = 2**30


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 GiB of memory and 90 GiB of disk are free."""
    monkeypatch.setattr(budgets, "free_memory", lambda: 8 * GIB)
    monkeypatch.setattr(budgets, "free_disk", lambda _: 90 * GIB)


def test_what_is_not_set_is_a_part_of_what_there_is(tmp_path: Path) -> None:
    filled = fill_in(CacheConfig(device_kv=5), str(tmp_path), on_cpu=True)
    assert filled == CacheConfig(device_kv=5, host_kv=429_496_729, disk_kv=9 * GIB)
    assert fill_in(CacheConfig(), str(tmp_path), on_cpu=False).host_kv == 2 * GIB


def test_what_is_set_stays(tmp_path: Path) -> None:
    given = CacheConfig(host_kv=0, disk_kv=7)
    assert fill_in(given, str(tmp_path), on_cpu=True) == given
    assert fill_in(given, None, on_cpu=True).disk_kv == 0


def test_the_default_share_of_the_disk_is_the_same_once_the_tier_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / "block").write_bytes(bytes(10_000))
    monkeypatch.setattr(budgets, "free_disk", lambda _: 90_000)
    assert fill_in(CacheConfig(), str(tmp_path), on_cpu=True).disk_kv == 10_000


def test_a_large_disk_is_not_taken_for_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "free_disk", lambda _: 9000 * GIB)
    assert fill_in(CacheConfig(), str(tmp_path), on_cpu=True).disk_kv == 20 * GIB


def test_a_disk_that_cannot_be_asked_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_: Path) -> int:
        raise PermissionError("not yours")

    monkeypatch.setattr(budgets, "free_disk", gone)
    assert disk_room(tmp_path) == 0


# --- what there is ----------------------------------------------------------------------------------------------------


def test_free_memory_is_bounded_by_the_container(tmp_path: Path) -> None:
    whole = room.free_memory(tmp_path)
    assert whole > 2**20
    for name, text in (("max", "1048576\n"), ("current", "700000\n"), ("stat", "anon 1\ninactive_file 100000\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert room.memory_limit(tmp_path) == 1_048_576
    assert room.free_memory(tmp_path) == 1_048_576 - 700_000 + 100_000
    (tmp_path / "memory.stat").write_text("nothing known")
    assert room.free_memory(tmp_path) == 1_048_576 - 700_000
    (tmp_path / "memory.current").write_text("2000000")
    assert room.free_memory(tmp_path) == 0
    (tmp_path / "memory.max").write_text("max")
    assert room.memory_limit(tmp_path) is None
    assert room.free_memory(tmp_path) > 2**20


def test_what_a_folder_holds(tmp_path: Path) -> None:
    assert room.used_disk(tmp_path / "none") == 0
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "one").write_bytes(bytes(1000))
    (tmp_path / "two").write_bytes(bytes(24))
    (tmp_path / "round").symlink_to(tmp_path)
    size = room.used_disk(tmp_path) - (tmp_path / "round").lstat().st_size
    assert size == 1024
    assert room.free_disk(tmp_path / "not" / "there") > 0
