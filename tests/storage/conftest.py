"""A real store in a directory of its own, a clock that only the test moves, and a record of the SQL that ran."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event

from storage import MessageRecord, Store, UserRecord


@dataclass
class Clock:
    now: float = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(tmp_path: Path, empty_database: Path, clock: Clock) -> AsyncIterator[Store]:
    shutil.copytree(empty_database, tmp_path / "data")
    store = await Store.open(tmp_path / "data", clock)
    yield store
    await store.close()


@pytest.fixture
async def user(store: Store) -> UserRecord:
    return await store.implicit_admin()


@pytest.fixture
def say(store: Store) -> Callable[..., Any]:
    """`await say(session_id, parent, role, text)`: add a message under a record (or None)."""

    async def add(session_id: str, parent: MessageRecord | None, role: Any, text: str, **more: Any) -> MessageRecord:
        given: dict[str, Any] = {"token_ids": tuple(map(ord, text)), "tokenizer": "test"} | more
        parent_id = parent.id if parent else None
        return await store.add_message(session_id, parent_id=parent_id, role=role, text=text, **given)

    return add


@contextmanager
def recorded_sql(engine: Engine) -> Iterator[list[tuple[str, Any]]]:
    """The (statement, parameters) that `engine` executes meanwhile."""
    seen: list[tuple[str, Any]] = []

    def note(_conn: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, _many: bool) -> None:
        seen.append((statement, parameters))

    event.listen(engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(engine, "before_cursor_execute", note)


def add_other_user(store: Store, user_id: str = "other") -> str:
    """A second user, whom no public method makes yet."""
    store._threads.database.write(
        lambda db: db.connection().exec_driver_sql(
            "INSERT INTO users (id, name, role, salt, created_at) VALUES (?, ?, 'user', zeroblob(16), 0)",
            (user_id, user_id),
        )
    )
    return user_id
