"""What the cache leaves in the database: its events, a trace of turns, which sessions it has to forget and to keep.

`CacheTables` belongs to a `Store`, which lends it its threads. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import delete, func, insert, or_, select
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.orm import Session

from storage.models import CacheEventRow, PendingDropRow, SessionRow, TraceRow
from storage.records import CacheEventRecord, KeptSession, TraceRecord
from storage.threads import Threads

MOST_EVENTS = 20_000
MOST_TURNS = 20_000  # in the trace: some 10 MB of ordinary chats, 40 MB of the longest

_EVENT = [CacheEventRow.__table__.c[name] for name in CacheEventRecord.__dataclass_fields__]
_TURN = [TraceRow.__table__.c[name] for name in TraceRecord.__dataclass_fields__]


class CacheTables:
    """The tables and their queries; every method may raise a StorageError."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads

    async def add_events(self, events: Sequence[CacheEventRecord]) -> None:
        """Keep these, the newest last; of all only the last `MOST_EVENTS`. Those of sessions that are gone are not."""
        await self._threads.write(lambda db: insert_events(db, events))

    async def events(self, limit: int) -> list[CacheEventRecord]:
        """The last `limit`, the newest last."""
        return await self._threads.read(lambda db: read_events(db, limit))

    async def add_turns(self, turns: Sequence[TraceRecord]) -> None:
        """Keep these in the trace, the last to end last; of all only the last `MOST_TURNS`.

        Those of sessions that are gone are not kept.
        """
        await self._threads.write(lambda db: insert_turns(db, turns))

    async def trace(self, limit: int) -> list[TraceRecord]:
        """The last `limit` turns, the last to end last."""
        return await self._threads.read(lambda db: read_trace(db, limit))

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
    _append(db, CacheEventRow, events, MOST_EVENTS)


def read_events(db: Session, limit: int) -> list[CacheEventRecord]:
    """The last events, the newest last."""
    statement = select(*_EVENT).order_by(CacheEventRow.id.desc()).limit(limit)
    return [CacheEventRecord(**row._mapping) for row in db.execute(statement)][::-1]


def insert_turns(db: Session, turns: Sequence[TraceRecord]) -> None:
    """Add the turns of sessions that are there, and delete what is too old."""
    _append(db, TraceRow, turns, MOST_TURNS)


def read_trace(db: Session, limit: int) -> list[TraceRecord]:
    """The last turns, the last to end last."""
    statement = select(*_TURN).order_by(TraceRow.id.desc()).limit(limit)
    return [TraceRecord(**row._mapping) for row in db.execute(statement)][::-1]


def _append(
    db: Session,
    table: type[CacheEventRow] | type[TraceRow],
    records: Sequence[CacheEventRecord] | Sequence[TraceRecord],
    most: int,
) -> None:
    """Add what belongs to no session or to one that is there, and keep the last `most` rows."""
    named = {record.session_id for record in records if record.session_id is not None}
    there = set(db.scalars(select(SessionRow.id).where(SessionRow.id.in_(named))))
    kept = [vars(record) for record in records if record.session_id is None or record.session_id in there]
    if not kept:
        return
    db.execute(insert(table), kept)
    last = select(func.max(table.id)).scalar_subquery()
    db.execute(delete(table).where(table.id <= last - most))


def read_kept(db: Session) -> list[KeptSession]:
    """The sessions with a wish of their own, by id."""
    columns = (SessionRow.id, SessionRow.pinned, SessionRow.ttl_s)
    wishes = or_(SessionRow.pinned, SessionRow.ttl_s.is_not(None))
    return [KeptSession(**row._mapping) for row in db.execute(select(*columns).where(wishes).order_by(SessionRow.id))]


def note_drops(db: Session, session_ids: Sequence[str]) -> None:
    """Remember, in the transaction that deletes them, that the engine has to forget these sessions."""
    rows = [{"session_id": each} for each in session_ids]
    db.execute(sqlite_insert(PendingDropRow).on_conflict_do_nothing(), rows)
