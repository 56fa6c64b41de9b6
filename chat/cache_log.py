"""What happened to the cache: the last events in memory, and more of them in the database."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence

from engine.protocol import CacheEvent
from storage.cache_tables import MOST_EVENTS
from storage.errors import StorageError
from storage.records import CacheEventRecord
from storage.store import Store

log = logging.getLogger(__name__)

REMEMBERED = 1000  # events in memory
UNSAVED = 5000  # events that may wait for a database that is slow or fails; older ones are then not written


class CacheLog:
    """The one owner of the events on the web side. Made and used on one event loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._last: deque[CacheEventRecord] = deque(maxlen=REMEMBERED)
        self._unsaved: deque[CacheEventRecord] = deque(maxlen=UNSAVED)
        self._wanted = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Remember what earlier runs saw, and begin to write."""
        self._last.extend(await self._store.cache.events(REMEMBERED))
        self._writer = asyncio.create_task(self._write())

    async def close(self) -> None:
        """Write what is not yet written."""
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)
            await self._flush()

    def take(self, events: Sequence[CacheEvent]) -> None:
        """The engine tells these, the newest last."""
        records = [_record(event) for event in events]
        self._last.extend(records)
        self._unsaved.extend(records)
        self._wanted.set()

    async def events(self, limit: int) -> list[CacheEventRecord]:
        """The last ones, the newest last; more than `REMEMBERED` are read from the database."""
        if limit <= REMEMBERED:
            return list(self._last)[-limit:]
        await self._flush()
        return await self._store.cache.events(min(limit, MOST_EVENTS))

    def forget(self, session_ids: Sequence[str]) -> None:
        """These sessions are deleted, and what happened to them with them."""
        gone = set(session_ids)
        for held in (self._last, self._unsaved):
            kept = [event for event in held if event.session_id not in gone]
            held.clear()
            held.extend(kept)

    # --- inside -----------------------------------------------------------------------------------------------------

    async def _write(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            await asyncio.shield(self._flush())

    async def _flush(self) -> None:
        events = list(self._unsaved)
        self._unsaved.clear()
        try:
            if events:
                await self._store.cache.add_events(events)
        except StorageError as error:
            log.error("what happened to the cache could not be stored: %s", error)


def _record(event: CacheEvent) -> CacheEventRecord:
    return CacheEventRecord(
        at=event.at,
        action=event.action,
        session_id=event.session_id or None,
        source=event.source,
        target=event.target,
        blocks=event.blocks,
        bytes=event.bytes,
        age_s=event.age_s,
        reason=event.reason,
    )
