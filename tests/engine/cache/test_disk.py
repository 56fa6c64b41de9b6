"""Blocks in files: what is written is read again, found by a scan, counted, and gone when it is deleted."""

from __future__ import annotations

import hashlib
import os
import stat
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from isal import isal_zlib

from engine.cache import block_file, disk
from engine.cache.block_file import BlockUnreadable, BlockWriteFailed
from engine.cache.disk import BlockFiles
from engine.cache.holders import HolderFiles, SessionRecord
from engine.cache.store import BlockStore, Stored
from tests.engine.cache.disk_blocks import (
    IMAGE_BYTES,
    MODEL,
    OTHER_MODEL,
    everything,
    found,
    header_of,
    image_of,
    key_of,
    path_of,
    read,
    write,
)


@pytest.fixture
def files(tmp_path: Path) -> BlockFiles:
    return BlockFiles(tmp_path / "kv")


def test_a_block_is_read_as_it_was_written_also_after_a_restart(files: BlockFiles) -> None:
    assert files.write(header_of(1), image_of(1)) == 4096 + 12288
    for opened in (files, BlockFiles(files.root)):
        assert read(opened, 1) == (header_of(1), bytes(image_of(1)))


def test_the_file_of_format_1_stays_as_it_is(files: BlockFiles) -> None:
    """When this fails, blocks written before the change are read wrongly: raise `FORMAT_VERSION`."""
    path = write(files, 1)
    name = "cea3878a334b240469d159ff840b6434"
    assert everything(files.root) == [f"blocks-1/{MODEL.hex()}/{name[:2]}/{name}.kv"]
    data = path.read_bytes()
    assert (data[:16].hex(), len(data)) == ("4b4545505741524d0100000064000000", 16384)
    assert int.from_bytes(data[16:20], "little") == zlib.crc32(image_of(1))
    assert hashlib.sha256(data).hexdigest() == "6090019127688ae5f0e245d55e086dac7d69b2e0ea27262baba1575e234813da"


def test_only_the_owner_can_enter_or_read(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        files = BlockFiles(tmp_path / "kv")
        write(files, 1)
    finally:
        os.umask(before)
    modes = {path.suffix: stat.S_IMODE(path.stat().st_mode) for path in [files.root, *files.root.rglob("*")]}
    assert modes == {"": 0o700, ".kv": 0o600}


def test_a_block_that_is_written_again_replaces_the_one_before(files: BlockFiles) -> None:
    write(files, 1)
    files.write(header_of(1, holders=["other"]), image_of(2))
    assert read(files, 1) == (header_of(1, holders=["other"]), bytes(image_of(2)))
    assert len(everything(files.root)) == 1


def test_a_block_that_was_deleted_is_missing_and_may_be_deleted_again(files: BlockFiles) -> None:
    write(files, 1)
    write(files, 2)
    files.delete(MODEL, key_of(1))
    files.delete(MODEL, key_of(1))
    files.delete(OTHER_MODEL, key_of(1))
    with pytest.raises(BlockUnreadable, match="No such file") as missing:
        read(files, 1)
    assert missing.value.fault == "missing"
    assert found(files) == [2]


def test_a_header_with_many_holders_takes_more_than_a_page(files: BlockFiles) -> None:
    many = [f"{number:032x}" for number in range(1000)]
    path = write(files, 1, holders=many)
    assert path.stat().st_size % 4096 == 0 and path.read_bytes().count(image_of(1)[:64]) == 1
    assert path.read_bytes().index(image_of(1)[:64]) % 4096 == 0
    assert read(files, 1) == (header_of(1, holders=many), bytes(image_of(1)))
    assert found(files) == [1]


def test_a_header_without_measure_is_refused_and_leaves_nothing(files: BlockFiles) -> None:
    with pytest.raises(BlockWriteFailed, match=r"its header of 1,100,... bytes is too long"):
        write(files, 1, holders=["x" * 1_100_000])
    assert everything(files.root) == []


@pytest.mark.parametrize("size", [0, 1, 4096, 8192])
def test_images_of_any_size(files: BlockFiles, size: int) -> None:
    path = write(files, 1, image_bytes=size)
    assert path.stat().st_size == 4096 + -(-size // 4096) * 4096
    assert read(files, 1, size)[1] == bytes(image_of(1, size))


def test_names_and_images_of_a_wrong_length_are_refused(files: BlockFiles) -> None:
    for wrong in (
        header_of(1, key=b"../../etc"),
        header_of(1, fingerprint=b""),
        header_of(1, fingerprint=bytes(65)),
        header_of(1, image_bytes=IMAGE_BYTES - 1),
    ):
        with pytest.raises(ValueError, match="bytes"):
            files.write(wrong, image_of(1))
    assert everything(files.root) == []


def test_images_of_other_items_than_bytes(files: BlockFiles) -> None:
    files.write(header_of(1, image_bytes=16), memoryview(b"0123456789abcdef").cast("d"))
    assert read(files, 1, 16)[1] == b"0123456789abcdef"


# --- scanning and counting --------------------------------------------------------------------------------------------


def test_a_scan_finds_the_blocks_of_one_model(files: BlockFiles) -> None:
    for number in range(20):
        write(files, number)
    write(files, 20, fingerprint=OTHER_MODEL)
    seen: list[tuple[int, int]] = []
    blocks = BlockFiles(files.root).scan(MODEL, lambda done, total: seen.append((done, total)))
    assert sorted(block.header.depth for block in blocks) == list(range(20))
    assert {block.bytes for block in blocks} == {16384}
    assert next(block.header for block in blocks if block.header.depth == 3) == header_of(3)
    assert seen[-1] == (20, 20) and seen == sorted(seen)
    assert files.scan(bytes(32)) == []


def test_a_scan_reads_no_image(files: BlockFiles) -> None:
    path = write(files, 1)
    with path.open("r+b") as file:
        file.seek(-IMAGE_BYTES, os.SEEK_END)
        file.write(b"damaged")
    assert found(files) == [1] and files.quarantined == 0
    with pytest.raises(BlockUnreadable):
        read(files, 1)


def test_a_scan_leaves_strangers_alone_and_counts_them(files: BlockFiles) -> None:
    shard = write(files, 1).parent
    for name in ("notes.txt", "x.kv", f"{key_of(2).hex()}.kw"):
        (shard / name).write_text("mine")
    (shard.parent / "zz").mkdir()
    assert found(files) == [1] and files.quarantined == 0
    assert len(everything(files.root)) == 4
    assert files.usage() == {MODEL: Stored(4, 16384 + 12)}


def test_usage_counts_every_model_and_forgetting_takes_one(files: BlockFiles) -> None:
    assert files.usage() == {}
    for number in range(3):
        write(files, number)
    write(files, 3, fingerprint=OTHER_MODEL)
    assert files.usage() == {MODEL: Stored(3, 3 * 16384), OTHER_MODEL: Stored(1, 16384)}
    blocks = sum(path.stat().st_blocks * 512 for path in files.root.rglob("*.kv"))
    assert blocks == 4 * 16384
    assert files.forget(MODEL) == Stored(3, 3 * 16384)
    assert files.forget(MODEL) == Stored(0, 0)
    assert files.usage() == {OTHER_MODEL: Stored(1, 16384)} and found(files) == []


def test_every_folder_that_changed_is_made_safe_once(files: BlockFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(disk, "sync_folder", lambda folder: synced.append(folder) or folder.stat())
    first = write(files, 1)
    write(files, 1)
    files.sync()
    assert sorted(synced) == [first.parent.parent.parent, first.parent.parent, first.parent]
    synced.clear()
    files.sync()
    assert synced == []
    files.delete(MODEL, key_of(1))
    files.sync()
    assert synced == [first.parent]
    files.delete(MODEL, key_of(1))
    files.forget(MODEL)
    files.sync()  # of a folder that is gone


def test_a_folder_that_cannot_be_made_safe_is_no_error(files: BlockFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    write(files, 1)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    files.sync()


# --- deleting ---------------------------------------------------------------------------------------------------------


def test_nothing_of_a_deleted_chat_is_left_anywhere(files: BlockFiles) -> None:
    canary = [31337, 40404, 27182, 31415]
    packed, image, session_id = msgspec.msgpack.encode(canary), b"the canary's K and V" * 10, "canary-session"
    holders = HolderFiles(files.root)
    old = files.root / "blocks-0" / "any"
    old.mkdir(parents=True)
    (old / "file").write_bytes(packed + image)
    header = header_of(1, token_ids=canary, holders=[session_id], image_bytes=len(image))
    files.write(header, memoryview(image))
    holders.save(SessionRecord(session_id=session_id, used_at=1.0, keys={MODEL: [header.key]}))
    write(files, 3)
    files.set_aside()

    def seen() -> int:
        signs = (packed, image, session_id.encode(), header.key)
        data = [path.read_bytes() for path in files.root.rglob("*") if path.is_file()]
        return sum(sign in content for content in data for sign in signs)

    assert seen() == 4 + 2 + 2
    files.delete(MODEL, header.key)
    holders.delete(session_id)
    files.discard_old()
    assert seen() == 0 and found(files) == [3]


# --- threads ----------------------------------------------------------------------------------------------------------


def test_blocks_are_written_read_and_deleted_from_several_threads(files: BlockFiles) -> None:
    def live(number: int) -> bool:
        for _ in range(3):
            write(files, number)
            whole = read(files, number) == (header_of(number), bytes(image_of(number)))
            files.delete(MODEL, key_of(number))
            if not whole:
                return False
        write(files, number)
        return True

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(live, range(40)))
    assert found(files) == list(range(40)) and files.usage() == {MODEL: Stored(40, 40 * 16384)}


def test_a_read_beside_writes_and_deletes_gets_all_of_one_block_or_nothing(files: BlockFiles) -> None:
    stop = threading.Event()
    images = {bytes([byte]) * IMAGE_BYTES for byte in range(4)}

    def change() -> None:
        while not stop.is_set():
            for image in images:
                files.write(header_of(1), memoryview(image))
            files.delete(MODEL, key_of(1))

    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(change)
        outcomes: set[object] = set()
        reads, until = 0, time.monotonic() + 10
        try:
            while reads < 300 or (outcomes != {True, "missing"} and time.monotonic() < until):
                reads += 1
                try:
                    outcomes.add(read(files, 1)[1] in images)
                except BlockUnreadable as error:
                    outcomes.add(error.fault)
        finally:
            stop.set()
        done.result()
    assert outcomes == {True, "missing"}
    assert everything(files.root) == []


def test_files_are_what_the_disk_tier_asks_for(files: BlockFiles) -> None:
    store: BlockStore = files
    assert all(callable(getattr(store, name)) for name in vars(BlockStore) if not name.startswith("_"))


def test_the_faster_checksum_is_the_same() -> None:
    assert block_file.crc32(b"123456789") == zlib.crc32(b"123456789") == 0xCBF43926
    assert isal_zlib.crc32(image_of(1), 7) == zlib.crc32(image_of(1), 7)


def test_a_path_is_made_of_digits_alone(files: BlockFiles) -> None:
    assert write(files, 5) == path_of(files.root, key_of(5))
