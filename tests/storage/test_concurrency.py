"""Several threads, stores and processes on one file: nobody is refused, blocked or robbed of what was acknowledged."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from storage import DatabaseBusy, Store, UserRecord, read_saved_settings
from storage.database import FILE_NAME

CHILD = Path(__file__).with_name("child_writer.py")
ROOT = Path(__file__).parents[2]


def spawn(data_dir: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.storage.child_writer", str(data_dir), *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


async def test_two_stores_write_one_file_at_once(tmp_path: Path, store: Store, user: UserRecord) -> None:
    second = await Store.open(tmp_path / "data")
    session = await store.create_session(user.id)

    async def write(which: Store, name: str) -> None:
        for n in range(40):
            await which.add_message(
                session.id, parent_id=None, role="user", text=f"{name}{n}", token_ids=[n], tokenizer="t"
            )

    await asyncio.gather(write(store, "a"), write(second, "b"), write(store, "c"), write(second, "d"))
    roots = await store.children(None, session.id)
    for name in "abcd":
        assert [root.text for root in roots if root.text.startswith(name)] == [f"{name}{n}" for n in range(40)]
    assert roots == await second.children(None, session.id)
    await second.close()


async def test_first_starts_at_the_same_moment(tmp_path: Path) -> None:
    stores = await asyncio.gather(*(Store.open(tmp_path / "data") for _ in range(6)))
    admins = await asyncio.gather(*(store.implicit_admin() for store in stores))
    assert len(set(admins)) == 1
    for store in stores:
        await store.close()


def test_first_starts_of_two_processes(tmp_path: Path) -> None:
    children = [spawn(tmp_path / "data", "5") for _ in range(2)]
    for child in children:
        output, _ = child.communicate(timeout=60)
        assert (child.returncode, output.split()[-1]) == (0, "done")


async def test_a_waiting_write_blocks_neither_reads_nor_the_loop(tmp_path: Path, store: Store) -> None:
    with closing(sqlite3.connect(tmp_path / "data" / FILE_NAME, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        write = asyncio.create_task(store.save_setting("a", "1"))
        for _ in range(20):
            assert await store.saved_settings() == {}
        assert not write.done()
        other.execute("ROLLBACK")
    await write
    assert await store.saved_settings() == {"a": "1"}


async def test_sql_runs_on_threads_of_its_own(store: Store) -> None:
    def name(_: Any) -> str:
        return threading.current_thread().name

    writers = set(await asyncio.gather(*(store._threads.write(name) for _ in range(8))))
    readers = set(await asyncio.gather(*(store._threads.read(name) for _ in range(8))))
    assert len(writers) == 1
    assert threading.current_thread().name not in writers | readers
    assert not writers & readers


async def test_a_lock_that_stays_is_named(tmp_path: Path, store: Store) -> None:
    with store._threads.database.raw() as connection:
        connection.execute("PRAGMA busy_timeout=1").fetchone()
    with closing(sqlite3.connect(tmp_path / "data" / FILE_NAME, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(DatabaseBusy, match="another process"):
            await store.save_setting("a", "1")


async def test_close_carries_out_what_was_asked_before(tmp_path: Path, store: Store) -> None:
    writes = [asyncio.create_task(store.save_setting(f"{n:02}", "x")) for n in range(20)]
    await asyncio.sleep(0)
    await store.close()
    await asyncio.gather(*writes)
    assert list(read_saved_settings(tmp_path / "data")) == [f"{n:02}" for n in range(20)]


async def test_a_cancelled_write_that_began_is_whole(tmp_path: Path, store: Store, user: UserRecord) -> None:
    began, go_on = threading.Event(), threading.Event()

    def slow(db: Any) -> None:
        db.connection().exec_driver_sql("INSERT INTO settings VALUES ('first', '1')")
        began.set()
        go_on.wait(10)
        db.connection().exec_driver_sql("INSERT INTO settings VALUES ('second', '2')")

    task = asyncio.create_task(store._threads.write(slow))
    await asyncio.to_thread(began.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
    await store.save_setting("third", "3")
    assert await store.saved_settings() == {"first": "1", "second": "2", "third": "3"}


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on this system")
@pytest.mark.parametrize("acknowledged", [3, 60])
async def test_a_killed_process_loses_nothing_it_acknowledged(tmp_path: Path, acknowledged: int) -> None:
    child = spawn(tmp_path / "data", "1000000")
    assert child.stdout is not None
    lines: list[str] = []
    while len(lines) < acknowledged:
        lines.append(child.stdout.readline())
    child.send_signal(signal.SIGKILL)
    lines += child.stdout.readlines()
    assert child.wait(10) == -signal.SIGKILL
    child.stdout.close()

    with closing(sqlite3.connect(tmp_path / "data" / FILE_NAME)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    read_saved_settings(tmp_path / "data")
    store = await Store.open(tmp_path / "data")
    user = await store.implicit_admin()
    (session,) = await store.sessions(user.id)
    path = await store.path(session.id)
    said = [line.split() for line in lines if line.endswith("\n")]
    written = sum(kind == "added" for kind, _ in said)
    assert [message.text.split(" ")[0] for message in path[:written]] == [str(n) for n in range(written)]
    grown = {int(n) for kind, n in said if kind == "grown"}
    assert grown
    for n in grown:
        assert path[n].text == f"{n} " + "grown" * 500
        assert path[n].token_ids == tuple(range(500))
    assert len(path) - written in (0, 1)  # one may have been committed and not yet acknowledged
    assert await store.interrupt_streaming() in (len(path), len(path) - len(grown), len(path) - len(grown) - 1)
    await store.close()
