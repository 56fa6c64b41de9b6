"""What people may ask of the cache: pins, times to live, prefetches, estimates, events; and what the engine is told.

The web side remembers, the engine acts: after each of its starts it is told which sessions it has to forget and which
to keep, and the recent ones are warmed. Every method takes the user who asks and answers for that user's chats alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence

from chat.cache_log import CacheLog
from chat.errors import ChatError, InvalidRequest, NotReady, PinRefused, SessionNotFound
from chat.models import Models
from chat.views import EstimateView, WarmingView
from chat.warmth import Warmth
from engine.client import EngineClient
from engine.errors import EngineUnavailable
from storage.errors import StorageError
from storage.records import CacheEventRecord, SessionRecord, TraceRecord, UserRecord
from storage.store import Store

log = logging.getLogger(__name__)


class CacheService:
    """Part of the chat service, which starts and closes it."""

    def __init__(self, store: Store, engine: EngineClient, models: Models) -> None:
        self._store = store
        self._engine = engine
        self._log = CacheLog(store)
        self._warmth = Warmth(store, engine, models)
        self._chores: list[asyncio.Task[None]] = []
        self._settling: asyncio.Task[None] | None = None
        self._turn_begun = False  # since the engine is ready

    async def start(self, user: UserRecord) -> None:
        """Listen to the engine, and tell it what is remembered whenever it is ready anew; warm the chats of `user`."""
        self._user = user
        await self._log.start()
        self._engine.on_cache_log = self._log.take
        self._chores = [asyncio.create_task(self._follow())]

    async def close(self) -> None:
        """End what runs, and write what the engine told."""
        self._engine.on_cache_log = None
        tasks = [*self._chores, *([self._settling] if self._settling else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._warmth.close()
        await self._log.close()

    # --- what happened ----------------------------------------------------------------------------------------------

    async def events(self, limit: int) -> list[CacheEventRecord]:
        """The last things that happened to the cache, the newest last."""
        return await self._log.events(limit)

    @property
    def gone(self) -> Mapping[tuple[str, str], int]:
        """Blocks that have left a tier for none below it since the start, by tier and reason."""
        return self._log.gone

    async def trace(self, limit: int) -> list[TraceRecord]:
        """The last turns as a cache policy sees them, the last to end last."""
        return await self._log.trace(limit)

    # --- what is to be kept -----------------------------------------------------------------------------------------

    async def pin(self, user_id: str, session_id: str, pinned: bool) -> None:
        """Have a chat's cache stay where it is, or no longer; also after a restart.

        Raises SessionNotFound; and NotReady or PinRefused, with nothing stored, when the engine does not take the pin.
        """
        session = await self._owned(user_id, session_id)
        await self._tell(session, pinned, session.ttl_s, must=pinned)
        try:
            await self._store.update_session(user_id, session_id, pinned=pinned, touch=False)
        except StorageError:
            await self._tell(session, session.pinned, session.ttl_s)
            raise

    async def set_ttl(self, user_id: str, session_id: str, ttl_s: float | None) -> None:
        """How long a chat's unused cache stays in a tier, in seconds; None: as long as everybody's.

        Raises SessionNotFound, InvalidRequest.
        """
        if ttl_s is not None and not 0 < ttl_s < 1e10:
            raise InvalidRequest(f"ttl must be a number of seconds above 0, or null (got {ttl_s:g}).", "ttl")
        session = await self._owned(user_id, session_id)
        await self._store.update_session(user_id, session_id, ttl_s=ttl_s, touch=False)
        await self._tell(session, session.pinned, ttl_s)

    async def forget(self, session_ids: Sequence[str]) -> None:
        """These sessions are deleted: have the engine forget their blocks, now or as soon as it is ready."""
        self._log.forget(session_ids)
        forgotten = []
        with contextlib.suppress(EngineUnavailable):
            for session_id in session_ids:
                answer = await self._engine.drop(session_id)
                forgotten += [session_id] if answer.complete else []
        if forgotten:
            try:
                await self._store.cache.dropped(forgotten)
            except StorageError as error:
                log.warning("the engine is told of deleted chats once more at its next start: %s", error)

    # --- what is about to be asked ----------------------------------------------------------------------------------

    @property
    def warming(self) -> WarmingView | None:
        """How far the warming of recent chats is; None: it is over, or has not begun."""
        return self._warmth.warming

    def turn_begins(self) -> None:
        """Somebody waits for a reply now: warm nothing meanwhile."""
        self._turn_begun = True
        self._warmth.interrupt()

    async def warm(self, user_id: str, session_id: str) -> None:
        """Bring a chat to the device, because its next message is near; cancel this when it is not. Raises nothing."""
        try:
            await self._warmth.prefetch(self._user, await self._owned(user_id, session_id))
        except (ChatError, EngineUnavailable, StorageError) as error:
            log.debug("a chat was not warmed: %s", error)

    async def estimate(self, user_id: str, session_id: str, text: str = "") -> EstimateView:
        """What the chat's next turn would cost, with this message or a short one.

        Raises SessionNotFound, NotReady, PromptTooLong, TemplateError, InvalidText, EngineFailed.
        """
        return await self._warmth.estimate(self._user, await self._owned(user_id, session_id), text)

    # --- inside -----------------------------------------------------------------------------------------------------

    async def _owned(self, user_id: str, session_id: str) -> SessionRecord:
        record = await self._store.session(user_id, session_id)
        if record is None or record.origin != "chat":
            raise SessionNotFound(session_id, of_api=record is not None)
        return record

    async def _tell(self, session: SessionRecord, pinned: bool, ttl_s: float | None, *, must: bool = False) -> None:
        """Tell the engine; what it need not know now it is told when it is ready. It may refuse what it `must` take."""
        try:
            answer = await self._engine.pin(session.id, pinned, ttl_s, again=not must)
        except EngineUnavailable as error:
            if must:
                raise NotReady(f"{error}.") from error
            return
        if must and not answer.pinned:
            raise PinRefused(answer.message)

    async def _follow(self) -> None:
        """Settle with each engine that becomes ready."""
        seen: object = None
        async for state in self._engine.watch():
            if state.phase != "ready":
                seen = None
                self._warmth.interrupt()
            elif state.capabilities is not seen:
                seen, self._turn_begun = state.capabilities, False
                if self._settling is not None:
                    self._settling.cancel()
                self._settling = asyncio.create_task(self._settle())

    async def _settle(self) -> None:
        """Have the engine forget what was deleted meanwhile and keep what is pinned; warm what is likely wanted."""
        try:
            await self.forget(await self._store.cache.pending_drops())
            kept = await self._store.cache.kept_sessions()
            for session in kept:
                await self._engine.pin(session.id, session.pinned, session.ttl_s, again=True)
            if not self._turn_begun:
                self._warmth.warm_recent(self._user, [session.id for session in kept if session.pinned])
        except (EngineUnavailable, StorageError) as error:
            log.info("the engine was not told all that it has to keep; it is at its next start: %s", error)
