"""What happened to the cache: the last events in memory, more of them and the trace of turns in the database."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from engine import protocol
from storage.cache_tables import MOST_EVENTS, MOST_TURNS
from storage.errors import StorageError
from storage.records import CacheEventRecord, TraceRecord
from storage.store import Store

log = logging.getLogger(__name__)

R = TypeVar("R", CacheEventRecord, TraceRecord)

REMEMBERED = 1000  # events in memory
UNSAVED = 5000  # events, and turns, that may wait for a database that is slow or fails; older ones are not written


class CacheLog:
    """The one owner of the engine's log on the web side. Made and used on one event loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.gone: Counter[tuple[str, str]] = Counter()
        """Blocks that have left a tier for none below it since the start, by tier and reason."""
        self._last: deque[CacheEventRecord] = deque(maxlen=REMEMBERED)
        self._unsaved: deque[CacheEventRecord] = deque(maxlen=UNSAVED)
        self._turns: deque[TraceRecord] = deque(maxlen=UNSAVED)
        self._wanted, self._writing = asyncio.Event(), asyncio.Lock()
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

    def take(self, told: protocol.CacheLog) -> None:
        """The engine tells this, the newest last."""
        for event in told.events:
            if event.action in ("evicted", "expired") and event.source is not None and event.target is None:
                self.gone[event.source, event.reason] += event.blocks
        events = [_event(event) for event in told.events]
        self._last.extend(events)
        self._unsaved.extend(events)
        self._turns.extend(_turn(turn) for turn in told.turns)
        self._wanted.set()

    async def events(self, limit: int) -> list[CacheEventRecord]:
        """The last ones, the newest last; more than `REMEMBERED` are read from the database."""
        if limit <= REMEMBERED:
            return list(self._last)[-limit:]
        await self._flush()
        return await self._store.cache.events(min(limit, MOST_EVENTS))

    async def trace(self, limit: int) -> list[TraceRecord]:
        """The last turns, the last to end last."""
        await self._flush()
        return await self._store.cache.trace(min(limit, MOST_TURNS))

    def forget(self, session_ids: Sequence[str]) -> None:
        """These sessions are deleted, and what happened to them with them."""
        gone = set(session_ids)
        for events in (self._last, self._unsaved):
            _retain(events, gone)
        _retain(self._turns, gone)

    # --- inside -----------------------------------------------------------------------------------------------------

    async def _write(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            await asyncio.shield(self._flush())

    async def _flush(self) -> None:
        """On return all that was told is written, also what another call has begun to write."""
        async with self._writing:
            events, turns = list(self._unsaved), list(self._turns)
            self._unsaved.clear()
            self._turns.clear()
            try:
                if events:
                    await self._store.cache.add_events(events)
                if turns:
                    await self._store.cache.add_turns(turns)
            except StorageError as error:
                log.error("what happened to the cache could not be stored: %s", error)


def _retain(held: deque[R], gone: set[str]) -> None:
    """Drop what is of these sessions."""
    kept = [record for record in held if record.session_id not in gone]
    held.clear()
    held.extend(kept)


def _event(event: protocol.CacheEvent) -> CacheEventRecord:
    return CacheEventRecord(**msgspec.structs.asdict(event) | {"session_id": event.session_id or None})


def _turn(turn: protocol.TurnTrace) -> TraceRecord:
    return TraceRecord(**msgspec.structs.asdict(turn))
