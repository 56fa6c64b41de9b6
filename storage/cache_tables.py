"""What the cache leaves in the database: its events, the sessions that it has to forget, and those that it keeps.

`CacheTables` belongs to a `Store`, which lends it its threads. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import delete, func, insert, or_, select
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.orm import Session

from storage.models import CacheEventRow, PendingDropRow, SessionRow
from storage.records import CacheEventRecord, KeptSession
from storage.threads import Threads

MOST_EVENTS = 20_000

_EVENT = [CacheEventRow.__table__.c[name] for name in CacheEventRecord.__dataclass_fields__]


class CacheTables:
    """The three tables and their queries; every method may raise a StorageError."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads

    async def add_events(self, events: Sequence[CacheEventRecord]) -> None:
        """Keep these, the newest last; of all only the last `MOST_EVENTS`. Those of sessions that are gone are not."""
        await self._threads.write(lambda db: insert_events(db, events))

    async def events(self, limit: int) -> list[CacheEventRecord]:
        """The last `limit`, the newest last."""
        return await self._threads.read(lambda db: read_events(db, limit))

    async def kept_sessions(self) -> list[KeptSession]:
        """Every session that is pinned or has a time to live of its own."""
        return await self._threads.read(read_kept)

    async def pending_drops(self) -> list[str]:
        """The sessions that were deleted, and that the engine has not been seen to forget."""
        return await self._threads.read(lambda db: list(db.scalars(select(PendingDropRow.session_id))))

    async def dropped(self, session_ids: Sequence[str]) -> None:
        """The engine has forgotten these."""
        await self._threads.write(
            lambda db: db.execute(delete(PendingDropRow).where(PendingDropRow.session_id.in_(session_ids)))
        )


def insert_events(db: Session, events: Sequence[CacheEventRecord]) -> None:
    """Add the events of sessions that are there, or of none, and delete what is too old."""
    named = {event.session_id for event in events if event.session_id is not None}
    there = set(db.scalars(select(SessionRow.id).where(SessionRow.id.in_(named))))
    rows = [
        {name: getattr(event, name) for name in CacheEventRecord.__dataclass_fields__}
        for event in events
        if event.session_id is None or event.session_id in there
    ]
    if not rows:
        return
    db.execute(insert(CacheEventRow), rows)
    last = select(func.max(CacheEventRow.id)).scalar_subquery()
    db.execute(delete(CacheEventRow).where(CacheEventRow.id <= last - MOST_EVENTS))


def read_events(db: Session, limit: int) -> list[CacheEventRecord]:
    """The last events, the newest last."""
    statement = select(*_EVENT).order_by(CacheEventRow.id.desc()).limit(limit)
    return [CacheEventRecord(**row._mapping) for row in db.execute(statement)][::-1]


def read_kept(db: Session) -> list[KeptSession]:
    """The sessions with a wish of their own, by id."""
    columns = (SessionRow.id, SessionRow.pinned, SessionRow.ttl_s)
    wishes = or_(SessionRow.pinned, SessionRow.ttl_s.is_not(None))
    return [KeptSession(**row._mapping) for row in db.execute(select(*columns).where(wishes).order_by(SessionRow.id))]


def note_drops(db: Session, session_ids: Sequence[str]) -> None:
    """Remember, in the transaction that deletes them, that the engine has to forget these sessions."""
    rows = [{"session_id": each} for each in session_ids]
    db.execute(sqlite_insert(PendingDropRow).on_conflict_do_nothing(), rows)
