"""Chats brought to the device before they are asked for, and what their next turn would cost.

Nothing here loads a model, waits for a turn or troubles anybody: what cannot be done is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from chat.errors import ChatError, NotReady
from chat.estimates import Place, estimated, place
from chat.models import Models
from chat.templates import Entry
from chat.views import EstimateView, WarmingView
from engine.client import EngineClient
from engine.errors import EngineUnavailable
from engine.protocol import Prefetched
from storage.errors import StorageError
from storage.records import SessionRecord, UserRecord
from storage.store import Store

log = logging.getLogger(__name__)

STAND_IN = "And then?"  # for a message that is not written yet
MOST_WARMED = 20  # chats that are warmed at the start, beside those that are pinned


@dataclass(frozen=True)
class _Prompt:
    """A chat as the engine's calls take it, and which share of the device it fills."""

    place: Place
    share: float


class Warmth:
    """Prefetches and estimates. Whether a chat belongs to whoever asks was settled before."""

    def __init__(self, store: Store, engine: EngineClient, models: Models) -> None:
        self._store = store
        self._engine = engine
        self._models = models
        self._task: asyncio.Task[None] | None = None
        self.warming: WarmingView | None = None
        """How far the warming of recent chats is; None: it is over."""

    async def prefetch(self, user: UserRecord, session: SessionRecord) -> Prefetched | None:
        """Bring a chat to the device; None where there is nothing to bring. Cancelling it cancels it in the engine.

        Raises EngineUnavailable, StorageError, ChatError.
        """
        prompt = await self._prompt(user, session)
        return await self._engine.prefetch(session.id, *prompt.place) if prompt is not None else None

    async def estimate(self, user: UserRecord, session: SessionRecord, text: str = "") -> EstimateView:
        """What the chat's next turn would cost, with this message or a short one.

        Raises NotReady where the engine or the chat's model is not, and as `LoadedModel.compose` and `estimated`.
        """
        model = self._models.known(session.model_id)
        if model is None:
            raise NotReady("The chat's model is not loaded; its next message loads it.")
        path = await self._store.path(session.id)
        entries = [model.entry(message) for message in path]
        if not path and session.system_prompt:
            entries.append(Entry("system", session.system_prompt))
        if text or not path or path[-1].role != "user":  # else the message is there and waits for its reply
            entries.append(Entry("user", text or STAND_IN))
        composed = await model.compose(entries)
        return await estimated(self._engine, user, model, composed, session.id)

    # --- at the start -----------------------------------------------------------------------------------------------

    def warm_recent(self, user: UserRecord, pinned: Sequence[str]) -> None:
        """Begin to bring the pinned and the recent chats to the device, as many as fit; the most recent comes last."""
        self.interrupt()
        self._task = asyncio.create_task(self._warm(user, pinned))

    def interrupt(self) -> None:
        """Stop that, because a turn begins, or the engine is gone."""
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """Stop that and wait for its end."""
        self.interrupt()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _warm(self, user: UserRecord, pinned: Sequence[str]) -> None:
        try:
            with contextlib.suppress(ChatError):  # the page tells what is wrong with the model
                await self._models.get()
                chats = await self._that_fit(user, pinned)
                for done, (chat, prompt) in enumerate(chats):
                    self.warming = WarmingView(done, len(chats))
                    await self._engine.prefetch(chat, *prompt.place)
        except (EngineUnavailable, StorageError) as error:
            log.info("recent chats were not warmed to the end: %s", error)
        finally:
            self.warming = None

    async def _that_fit(self, user: UserRecord, pinned: Sequence[str]) -> list[tuple[str, _Prompt]]:
        """Pinned and recent chats, the last used last, as far as the device has room for all of them at once."""
        recent = [chat.id for chat in await self._store.sessions(user.id, limit=MOST_WARMED)]
        fit: list[tuple[str, _Prompt]] = []
        left, first = self._engine.config.cache.device_high, 0
        for chat in [*pinned, *(chat for chat in recent if chat not in set(pinned))]:
            session = await self._store.session(user.id, chat)
            prompt: _Prompt | None = None
            if session is not None:
                with contextlib.suppress(ChatError):  # it has outgrown the context, or its template fails
                    prompt = await self._prompt(user, session)
            if prompt is not None and prompt.share <= left:
                left -= prompt.share
                fit.insert(first, (chat, prompt))
                first += chat in pinned
        return fit

    async def _prompt(self, user: UserRecord, session: SessionRecord) -> _Prompt | None:
        """All that was said in a chat; None where nothing was, or its model is not loaded. Raises as `prefetch`."""
        model = self._models.known(session.model_id)
        path = await self._store.path(session.id) if model is not None else []
        if model is None or not path:
            return None
        composed = await model.compose([model.entry(message) for message in path])
        blocks = -(-len(composed.prompt) // model.capabilities.block_size)
        return _Prompt(place(user, model, composed), blocks / max(1, model.capabilities.total_blocks))
