"""The disk tier's folder is removed while it is in use: its files leave the books, and it is made again."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from engine.cache.disk import BlockFiles
from engine.cache.holders import HolderFiles, SessionRecord
from engine.cache.write_budget import WriteBudget
from engine.ledger import cold_usage
from tests.engine.cache.disk_blocks import everything, read, write
from tests.engine.cold_rig import ColdRig
from tests.engine.test_disk_space import files
from tests.engine.test_tiers import PROMPT, follow, turn


def test_a_removed_folder_leaves_the_books_and_is_made_again(
    rigs: list[ColdRig], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "kv"
    rigs.append(rig := ColdRig(root))
    turn(rig, PROMPT)
    rig.save()
    rig.flush()
    assert (rig.tiers.used("disk"), len(rig.cold())) == (9 * 8192, 9)
    rig.tiers.journal.take()
    shutil.rmtree(root)
    for _ in range(30):
        rig.now += 1
        rig.tiers.settle()
    assert (rig.tiers.disk.bytes, rig.cold()) == (0, [])
    assert cold_usage(rig.tiers, "disk").used_bytes == 0
    told = [(event.action, event.source, event.blocks, event.bytes) for event in rig.tiers.journal.take()]
    assert told == [("evicted", "disk", 9, 9 * 8192)]
    warned = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert warned == ["the disk tier has lost 72 KiB: its folder was removed"]
    turn(rig, PROMPT)
    rig.save()
    rig.settle()
    rig.close()
    assert files(root) == 9
    assert {path.name for path in root.iterdir()} == {"blocks-1", "sessions", "writes"}
    assert [path.stat().st_mode & 0o777 for path in (root, root / "blocks-1", root / "sessions")] == [0o700] * 3
    assert caplog.records[-1].message == warned[-1], "nothing failed"
    rigs.append(later := ColdRig(root))
    assert len(later.tiers.index.held_by("s")) == 9


def test_a_read_finds_that_the_folder_was_removed(rigs: list[ColdRig], tmp_path: Path) -> None:
    root = tmp_path / "kv"
    rigs.append(rig := ColdRig(root))
    _, more = turn(rig, PROMPT)
    rig.save()
    rig.flush()
    request_id = rig.submit(more, max_tokens=1)
    shutil.rmtree(root)
    rig.run()
    assert rig.sources(request_id) == (0, 0, 0, 37)
    assert rig.tiers.disk.files is not None and rig.tiers.disk.files.blocks.quarantined == 0, "nothing was damaged"
    assert (rig.tiers.disk.bytes, rig.cold()) == (0, [])


def test_a_write_finds_that_the_folder_was_removed(rigs: list[ColdRig], tmp_path: Path) -> None:
    root = tmp_path / "kv"
    rigs.append(rig := ColdRig(root))
    turn(rig, PROMPT, "gone")
    rig.save()
    rig.flush()
    follow(rig, [70, *PROMPT[1:]], "other")
    shutil.rmtree(root)
    rig.residency.saver.save()
    rig.settle()
    rig.save()
    assert rig.tiers.index.held_by("gone") == []
    assert rig.tiers.used("disk") == files(root) * 8192 > 0


def test_what_another_model_left_leaves_the_books_too(rigs: list[ColdRig], tmp_path: Path) -> None:
    root = tmp_path / "kv"
    rigs.append(rig := ColdRig(root))
    turn(rig, PROMPT)
    rig.save()
    rig.close()
    (root / "old").mkdir()
    (root / "old" / "block").write_bytes(bytes(100))
    rigs.append(other := ColdRig(root, fingerprint=b"o" * 32))
    assert other.tiers.disk.bytes == 9 * 8192 + 100
    shutil.rmtree(root)
    other.tiers.settle()
    assert other.tiers.disk.bytes == 0


def test_a_chat_deleted_after_the_folder_was_removed_is_gone(rigs: list[ColdRig], tmp_path: Path) -> None:
    root = tmp_path / "kv"
    rigs.append(rig := ColdRig(root))
    turn(rig, PROMPT)
    rig.save()
    shutil.rmtree(root)
    leaving = rig.forget("s")
    while not rig.tiers.holdings.has_gone(leaving):
        rig.note_an_end()
    assert (leaving.whole, rig.tiers.disk.bytes) == (True, 0)


def test_files_and_records_make_their_folders_again_but_not_what_holds_them(tmp_path: Path) -> None:
    root = tmp_path / "data" / "kv"
    blocks, holders, writes = BlockFiles(root), HolderFiles(root), WriteBudget(root / "writes", None)
    write(blocks, 1)
    shutil.rmtree(root)
    assert blocks.was_removed()
    write(blocks, 2)
    assert read(blocks, 2)
    assert blocks.was_removed(), "it is there again, and what was in it is not"
    assert not blocks.was_removed()
    shutil.rmtree(root)
    holders.save(SessionRecord(session_id="s", used_at=1.0))
    assert [record.session_id for record in holders.load_all()] == ["s"]
    shutil.rmtree(root)
    writes.spend(5)
    assert everything(root) == ["writes"]
    shutil.rmtree(tmp_path / "data")
    with pytest.raises(Exception, match="No such file"):
        write(blocks, 3)  # as when the disk is not mounted
    assert not (tmp_path / "data").exists()
