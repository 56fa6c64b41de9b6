"""A deleted chat leaves nothing: after `Drop` no file holds its token ids in any encoding, and none is named for it.

The whole data directory is searched, as bytes. Every test first finds the canary by the same search.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from transformers import AutoTokenizer

from engine.cache.block_file import BlockHeader, BlockWriteFailed
from engine.cache.disk import BlockFiles
from engine.cache.saver import Saver
from engine.errors import EngineUnavailable
from tests.engine.tiered import BLOCK, Driven, Sources, engine, model, settings, until

CANARY = "The heron keeps its third key under a green stone by the weir, where nobody but Mirabelle looks."
RUN = 4  # ids in a row that are searched for: a block may begin or end anywhere in the sentence
ALICE = b"a" * 16


@pytest.fixture(scope="module")
def canary(tiny_model: Path) -> list[int]:
    ids: list[int] = AutoTokenizer.from_pretrained(tiny_model).encode(CANARY)
    assert len(ids) > 2 * BLOCK
    return ids


@pytest.fixture
async def driven(tiny_model: Path, tmp_path: Path) -> AsyncIterator[Driven]:
    async with engine(settings(tiny_model, tmp_path)) as driven:
        yield driven


def traces(data: Path, ids: list[int]) -> set[Path]:
    """The files in which a run of these ids, or the sentence itself, is found in any of the encodings in use."""
    parts = [CANARY[start : start + 12].encode() for start in range(len(CANARY) - 12)]
    for start in range(len(ids) - RUN + 1):
        run = ids[start : start + RUN]
        parts += [struct.pack(f"<{RUN}{kind}", *run) for kind in "iq"]
        parts.append(b"".join(msgspec.msgpack.encode(token) for token in run))
    contents = {path: path.read_bytes() for path in data.rglob("*") if path.is_file() and "models" not in path.parts}
    return {path for path, content in contents.items() if any(part in content for part in parts)}


def files(data: Path) -> set[str]:
    """Names of all files of blocks and of sessions."""
    return {path.name for path in (data / "kv").rglob("*") if path.is_file() and path.name != "writes"}


async def test_a_deleted_chat_leaves_no_trace(driven: Driven, canary: list[int], tmp_path: Path) -> None:
    other = await driven.turn([7] * 30, "other", salt=ALICE)
    await driven.saved()
    before = files(tmp_path)
    turn = await driven.turn(canary, salt=ALICE)
    await driven.turn([*turn.known, *canary[::-1]], salt=ALICE)
    await driven.turn([*canary[:11], *canary], salt=ALICE)  # an edit: what it leaves behind is the chat's too
    await driven.saved()
    assert len(traces(tmp_path, canary)) > 3
    answer = await driven.drop("s")
    assert answer.blocks > 0
    assert traces(tmp_path, canary) == set()
    assert files(tmp_path) == before
    snapshot = await driven.client.snapshot()
    assert "s" not in snapshot.sessions
    assert (await driven.turn(canary, "s", salt=ALICE)).sources.computed == len(canary)
    assert (await driven.turn([*other.known, 3], "other", salt=ALICE)).sources.computed == 2


@pytest.mark.parametrize("tier", ["host", "disk"])
async def test_a_chat_that_was_demoted_is_deleted(driven: Driven, canary: list[int], tmp_path: Path, tier: str) -> None:
    await driven.turn(canary)
    await driven.leave("s", tier)
    await driven.drop("s")
    await until(lambda: traces(tmp_path, canary) == set())
    snapshot = await driven.client.snapshot()
    assert [tier.used_bytes for tier in snapshot.tiers] == [0, 0, 0]
    assert files(tmp_path) == set()


async def test_what_only_a_deleted_chat_had_sent_is_new_again(
    tiny_model: Path, canary: list[int], tmp_path: Path
) -> None:
    async with engine(settings(tiny_model, tmp_path, host_kv=0, disk_kv=0)) as driven:
        await driven.turn(canary)
        await driven.leave("s", "none")
        gone = (await driven.turn([*canary, 3], "other")).usage.miss
        assert gone is not None
        assert gone.cause == "evicted"
        await driven.drop("other")
        await driven.drop("s")
        miss = (await driven.turn([*canary, 3], "later")).usage.miss
        assert miss is not None
        assert (miss.position, miss.cause, miss.detail) == (0, "new", "")


async def test_a_chat_deleted_while_it_is_saved_leaves_no_trace(
    driven: Driven, canary: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, begun, go_on = BlockFiles.write, threading.Event(), threading.Event()

    def slow(*args: object) -> int:
        begun.set()
        assert go_on.wait(10)
        return write(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(BlockFiles, "write", slow)
    await driven.turn(canary)
    await until(begun.is_set)
    threading.Timer(0.3, go_on.set).start()
    await driven.drop("s")
    assert go_on.is_set(), "the answer waits for what was on its way"
    assert traces(tmp_path, canary) == set()
    assert files(tmp_path) == set()
    assert (await driven.client.snapshot()).tiers[2].used_bytes == 0


async def test_a_chat_deleted_amid_its_reply_leaves_no_trace(driven: Driven, canary: list[int], tmp_path: Path) -> None:
    turn = await driven.turn(canary)
    await driven.saved()
    reply = asyncio.create_task(driven.turn([*turn.known, 3], new=800))
    await driven.running()
    assert traces(tmp_path, canary) != set()
    await driven.drop("s")
    assert (await reply).reason == "cancelled"
    assert files(tmp_path) == set()
    await asyncio.sleep(0.1)
    assert files(tmp_path) == set(), "nor is anything saved that the last step has computed"


@pytest.fixture
async def dropped_amid_restore(driven: Driven, canary: list[int], monkeypatch: pytest.MonkeyPatch) -> Driven:
    """An engine whose only chat was deleted while its blocks were being read from disk."""
    monkeypatch.setattr("engine.keeper.LOG_SECONDS", 0.02)
    turn = await driven.turn(canary)
    await driven.leave("s", "disk")
    read, begun, go_on = BlockFiles.read, threading.Event(), threading.Event()

    def slow(*args: object) -> BlockHeader:
        begun.set()
        assert go_on.wait(10)
        return read(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(BlockFiles, "read", slow)
    again = asyncio.create_task(driven.turn([*turn.known, 3]))
    await until(begun.is_set)
    await driven.drop("s")
    go_on.set()
    assert (await again).reason == "cancelled"
    return driven


async def test_a_chat_deleted_while_it_comes_back_leaves_no_trace(dropped_amid_restore: Driven, tmp_path: Path) -> None:
    assert files(tmp_path) == set()
    snapshot = await dropped_amid_restore.client.snapshot()
    assert [tier.used_bytes for tier in snapshot.tiers] == [0, 0, 0]


async def test_a_file_that_was_deleted_is_not_called_damaged(dropped_amid_restore: Driven) -> None:
    await asyncio.sleep(0.3)  # many times what the log takes
    assert "quarantined" not in [event.action for event in dropped_amid_restore.told]


async def test_a_chat_of_an_earlier_run_is_deleted(tiny_model: Path, canary: list[int], tmp_path: Path) -> None:
    async with engine(settings(tiny_model, tmp_path)) as driven:
        await driven.turn(canary)
        await driven.saved()
    async with engine(settings(tiny_model, tmp_path)) as driven:
        assert traces(tmp_path, canary) != set()
        assert (await driven.drop("s")).blocks > 0
        assert traces(tmp_path, canary) == set()
        assert files(tmp_path) == set()


@pytest.mark.parametrize("restart", [False, True])
async def test_what_two_chats_share_goes_with_the_last(
    tiny_model: Path, canary: list[int], tmp_path: Path, restart: bool
) -> None:
    ends = {"first": [*canary, *range(100, 110)], "second": [*canary, *range(200, 210)]}
    config = settings(tiny_model, tmp_path)
    async with engine(config) as driven:
        for session, ids in ends.items():
            await driven.turn(ids, session, salt=ALICE)
            await driven.saved()
        if not restart:
            await forget_both(driven, canary, ends, tmp_path)
    if restart:
        async with engine(config) as driven:
            await forget_both(driven, canary, ends, tmp_path)


async def forget_both(driven: Driven, canary: list[int], ends: dict[str, list[int]], data: Path) -> None:
    await driven.drop("first")
    assert traces(data, canary) != set(), "the second chat has said the same"
    assert traces(data, list(range(100, 110))) == set()
    await driven.leave("second", "disk")
    again = await driven.turn([*ends["second"], 3], "second", salt=ALICE)
    assert again.sources == Sources(0, 0, len(ends["second"]), 1)
    await driven.drop("second")
    assert traces(data, canary) == traces(data, list(range(200, 210))) == set()
    assert files(data) == set()


async def test_what_was_shared_is_known_after_a_crash(
    tiny_model: Path, canary: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The engine ends before the second chat is saved: nothing but the drop could tell that it uses what is there.
    async with engine(settings(tiny_model, tmp_path)) as driven:
        await driven.turn(canary, "first", salt=ALICE)
        await driven.saved()
        with monkeypatch.context() as killed:
            killed.setattr(Saver, "save", lambda *_: False)
            await driven.turn([*canary, 3], "second", salt=ALICE)
            await driven.drop("first")
            await driven.client.close()
        assert traces(tmp_path, canary) != set()
        await driven.client.start()
        await driven.client.wait_ready()
        await driven.drop("second")
        assert traces(tmp_path, canary) == set()


async def test_a_chat_of_a_model_that_is_not_served_is_deleted(
    tiny_model: Path, canary: list[int], tmp_path: Path
) -> None:
    async with engine(settings(tiny_model, tmp_path)) as driven:
        await driven.turn(canary)
        await driven.saved()
    async with engine(settings(model(tmp_path / "models" / "other"), tmp_path)) as driven:
        await driven.drop("s")
        assert traces(tmp_path, canary) == set()
    async with engine(settings(tiny_model, tmp_path)) as driven:
        assert (await driven.turn([*canary, 3])).sources.computed == len(canary) + 1


async def test_a_chat_is_deleted_while_the_disk_tier_is_off(
    tiny_model: Path, canary: list[int], tmp_path: Path
) -> None:
    async with engine(settings(tiny_model, tmp_path)) as driven:
        await driven.turn(canary)
        await driven.saved()
    async with engine(settings(tiny_model, tmp_path, disk_kv=0)) as driven:
        await driven.drop("s")
        assert traces(tmp_path, canary) == set()


@pytest.mark.parametrize("served", [True, False])
async def test_a_chat_whose_files_cannot_be_deleted_is_still_known(
    tiny_model: Path, canary: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: bool
) -> None:
    """A disk that cannot be written to for a while must not make a deleted chat immortal."""

    def fail(*_: object) -> None:
        raise BlockWriteFailed("cannot delete: the file system is read-only")

    other = model(tmp_path / "models" / "other")
    async with engine(settings(tiny_model, tmp_path)) as driven:
        await driven.turn(canary)
        await driven.saved()
    async with engine(settings(tiny_model if served else other, tmp_path)) as driven:
        with monkeypatch.context() as broken:
            broken.setattr(BlockFiles, "delete", fail)
            with contextlib.suppress(EngineUnavailable):
                await driven.drop("s")
        assert driven.client.state.phase == "ready"
    async with engine(settings(tiny_model, tmp_path)) as driven:
        if "s" in (await driven.client.snapshot()).sessions:  # whoever asks for what there is finds it, and can go on
            await driven.drop("s")
        assert traces(tmp_path, canary) == set()


async def test_files_of_an_old_format_go_with_any_chat(tiny_model: Path, canary: list[int], tmp_path: Path) -> None:
    async with engine(settings(tiny_model, tmp_path)) as driven:
        await driven.turn(canary)
        await driven.saved()
    (blocks,) = (tmp_path / "kv").glob("blocks-*")
    blocks.rename(tmp_path / "kv" / "blocks-0")
    async with engine(settings(tiny_model, tmp_path)) as driven:
        assert (await driven.turn([*canary, 3])).sources.computed == len(canary) + 1, "another format is not read"
        assert any("old" in path.parts for path in traces(tmp_path, canary))
        await driven.drop("another chat")  # nobody knows whose they were
        assert not any("old" in path.parts for path in traces(tmp_path, canary))
        await driven.drop("s")
        assert traces(tmp_path, canary) == set()
