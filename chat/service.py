"""The chat service: sessions, their turns and their ledgers, for every face alike.

Owns which turns run. Knows storage and the engine's protocol; knows nothing of HTTP and of pages. Every method takes
the user who asks and answers for that user's chats alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from chat.api_turn import ApiTurn
from chat.cache_service import CacheService
from chat.completion import Completions, Request
from chat.conversation import Asked, Conversations, title_of
from chat.errors import EmptyMessage, ModelNotFound, SessionNotFound, SystemPromptFixed, check_text
from chat.figures import RecentReplies
from chat.models import DEFAULT, Models
from chat.shown import context_tokens, message_view
from chat.templates import Entry
from chat.thinking import Policy
from chat.turns import SAVE_SECONDS, LiveTurn
from chat.views import EstimateView, ModelView, SessionDetail, SessionView, TurnOptions
from engine.client import EngineClient
from engine.errors import EngineUnavailable
from engine.protocol import Snapshot
from engine.state import EngineState
from storage.errors import StorageError, UnknownModel
from storage.records import SessionRecord, SessionSummary, UserRecord
from storage.store import Store

log = logging.getLogger(__name__)

EXPIRY_SECONDS = 3600.0  # how often expired API chats are removed


class ChatService:
    """What the faces talk to. One per server; made and used on one event loop."""

    user: UserRecord
    """The implicit user of a loopback server; there after `start`."""

    recent: RecentReplies
    """What the last replies cost."""

    cache: CacheService
    """What may be asked of the cache: pins, prefetches, estimates, events."""

    def __init__(
        self,
        store: Store,
        engine: EngineClient,
        *,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.perf_counter,
        save_seconds: float = SAVE_SECONDS,
        thinking: Policy = "preserve",
    ) -> None:
        self._store = store
        self._engine = engine
        self._clock = clock
        self._timer = timer
        self._models = Models(engine, store, thinking)
        self.recent = RecentReplies(timer)
        self.cache = CacheService(store, engine, self._models)
        self._conversations = Conversations(
            store, engine, self._models, timer=timer, save_seconds=save_seconds, recent=self.recent
        )
        self._completions = Completions(store, engine, clock=clock, timer=timer, recent=self.recent)
        self._chores: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Mark what a killed server left half-written, remove expired API chats, and read the tokenizer once known."""
        self.user = await self._store.implicit_admin()
        interrupted = await self._store.interrupt_streaming()
        if interrupted:
            log.info("%d replies were interrupted when the server ended", interrupted)
        await self.cache.start(self.user)
        self._chores = [asyncio.create_task(self._expire()), asyncio.create_task(self._models.follow())]

    async def close(self) -> None:
        """End all turns, keeping what was delivered as "interrupted". Takes well under a second."""
        for chore in self._chores:
            chore.cancel()
        await asyncio.gather(*self._chores, return_exceptions=True)
        await asyncio.gather(self._conversations.close(), self._completions.close(), self.cache.close())

    # --- the engine's state -----------------------------------------------------------------------------------------

    def status(self) -> EngineState:
        """Where the engine is: "failed" also where it serves a model that cannot chat (a broken template, …)."""
        state = self._engine.state
        return replace(state, phase="failed", message=self._models.problem) if self._models.problem else state

    async def snapshot(self) -> Snapshot | None:
        """The engine's gauges and counters; None while there is no engine to ask."""
        try:
            return await self._engine.snapshot()
        except EngineUnavailable:
            return None

    # --- models -----------------------------------------------------------------------------------------------------

    async def models(self) -> list[ModelView]:
        """The models that chats can be held with, the default first."""
        return await self._models.views()

    async def model(self, name: str) -> ModelView:
        """The model of this name, or of "default". Raises ModelNotFound."""
        return await self._models.view(name)

    async def add_model(self, source: str, adapter: str = "") -> ModelView:
        """Load a model by its folder, hub id or .gguf file, and remember it; `status().loads` tells how far it is.

        Raises InvalidRequest, InvalidText, NotReady, ModelNotLoadable, UnusableModel.
        """
        added = await self._models.add(source, adapter)
        return await self._models.view(added.name)

    async def forget_model(self, model_id: str) -> None:
        """Take a model that no chat is held with from the list. Raises ModelNotFound, InvalidRequest."""
        await self._models.forget(model_id)

    async def choose_model(self, user_id: str, session_id: str, model_id: str) -> None:
        """Hold the chat with another model from its next turn on. Raises SessionNotFound, ModelNotFound."""
        record = await self._owned(user_id, session_id)
        if record.model_id != await self._known_model(model_id):
            with _known_models():
                await self._store.update_session(user_id, session_id, model_id=model_id, touch=False)

    # --- sessions ---------------------------------------------------------------------------------------------------

    async def sessions(self, user_id: str, limit: int = 200) -> list[SessionView]:
        """The user's chats, the last touched first. Reads no messages."""
        return [self._session_view(record) for record in await self._store.sessions(user_id, limit=limit)]

    async def session(self, user_id: str, session_id: str) -> SessionDetail:
        """The chat along its current path. Raises SessionNotFound."""
        record = await self._owned(user_id, session_id)
        live = self._conversations.live(session_id)  # before reading: a turn that ends meanwhile is still known
        path = await self._store.path(session_id)
        turns = await self._store.turns(session_id)
        live = live or self._conversations.live(session_id)
        model = self._models.known(record.model_id)
        return SessionDetail(
            id=record.id,
            title=record.title,
            updated_at=record.updated_at,
            running=self._conversations.is_running(session_id),
            system_prompt=record.system_prompt,
            messages=tuple(message_view(m, turns.get(m.id), live) for m in path if m.role != "system"),
            context_tokens=context_tokens(path, turns),
            context_length=model.capabilities.room if model else 0,
            model_id=record.model_id,
        )

    async def create_session(
        self, user_id: str, system_prompt: str | None = None, model_id: str | None = None
    ) -> SessionView:
        """A new, empty chat, with the default model where none is chosen. Raises InvalidText, ModelNotFound."""
        prompt = _prompt_of(system_prompt or "")
        chosen = await self._known_model(model_id) if model_id else None
        with _known_models():
            record = await self._store.create_session(user_id, system_prompt=prompt, model_id=chosen)
        return self._session_view(record)

    async def set_system_prompt(self, user_id: str, session_id: str, system_prompt: str) -> None:
        """Change it in a chat without messages. Raises SessionNotFound, InvalidText, SystemPromptFixed."""
        prompt = _prompt_of(system_prompt)
        record = await self._owned(user_id, session_id)
        if record.leaf_id is not None or self._conversations.is_running(session_id):
            raise SystemPromptFixed
        await self._store.update_session(user_id, session_id, system_prompt=prompt, touch=False)

    async def rename(self, user_id: str, session_id: str, title: str) -> SessionView:
        """Give the chat a title; "" lets the next message give it one. Raises SessionNotFound, InvalidText."""
        check_text(title, "title")
        record = await self._store.update_session(user_id, session_id, title=title_of(title), touch=False)
        if record is None or record.origin != "chat":
            raise SessionNotFound(session_id)
        return self._session_view(record)

    async def delete_session(self, user_id: str, session_id: str) -> None:
        """Stop the chat's turn, delete the chat and forget its blocks. Raises SessionNotFound."""
        await self._owned(user_id, session_id)
        await self._conversations.stop(session_id)
        if not await self._store.delete_session(user_id, session_id):
            raise SessionNotFound(session_id)
        await self.cache.forget([session_id])

    # --- turns ------------------------------------------------------------------------------------------------------

    async def send(self, user_id: str, session_id: str, text: str, options: TurnOptions | None = None) -> LiveTurn:
        """Store the message and begin the reply. On an error nothing was stored.

        Raises EmptyMessage, InvalidText, NotReady, SessionNotFound, SessionBusy, PromptTooLong, TemplateError,
        UnusableModel, ModelUnavailable, and TurnStopped when `stop` was called while the model was loading.
        """
        started = self._timer()
        if not text.strip():
            raise EmptyMessage
        check_text(text, "message")

        async def work() -> LiveTurn:
            return await self._conversations.send(await self._asked(user_id, session_id, options, started), text)

        return await self._conversations.carry_out(work())

    async def retry(self, user_id: str, session_id: str, options: TurnOptions | None = None) -> LiveTurn:
        """A new reply to the last user message, beside the ones it has. Raises as `send`, and NothingToRetry."""
        started = self._timer()

        async def work() -> LiveTurn:
            return await self._conversations.retry(await self._asked(user_id, session_id, options, started))

        return await self._conversations.carry_out(work())

    async def stop(self, user_id: str, session_id: str) -> None:
        """End the running reply where it is, or the wait for its model; nothing happens when none runs.

        Raises SessionNotFound.
        """
        await self._owned(user_id, session_id)
        await self._conversations.stop(session_id)

    def live_turn(self, session_id: str) -> LiveTurn | None:
        """The turn that runs in this chat, if one does."""
        return self._conversations.live(session_id)

    async def running_turn(self, user_id: str, session_id: str) -> LiveTurn | None:
        """The same for a chat that need not be the user's. Raises SessionNotFound."""
        await self._owned(user_id, session_id)
        return self._conversations.live(session_id)

    async def complete(
        self,
        user_id: str,
        messages: Sequence[Entry],
        options: TurnOptions | None = None,
        n: int = 1,
        *,
        session_hint: str | None = None,
        model: str = DEFAULT,
    ) -> ApiTurn:
        """Answer a stateless client's whole chat `n` times. `session_hint` is the client's own name for it.

        Raises NotReady, ModelNotFound, ModelUnavailable, InvalidRequest, InvalidText, PromptTooLong, TemplateError,
        UnusableModel.
        """
        request = Request(tuple(messages), options or TurnOptions(), self._timer(), n, session_hint)
        self.cache.turn_begins()
        return await self._completions.begin(self.user, await self._models.named(model), request)

    async def estimate(
        self, user_id: str, messages: Sequence[Entry], *, session_hint: str | None = None, model: str = DEFAULT
    ) -> EstimateView:
        """What `complete` would cost with these messages. Stores and loads nothing. Raises as it does."""
        request = Request(tuple(messages), TurnOptions(), self._timer(), hint=session_hint)
        return await self._completions.estimate(self.user, await self._models.loaded(model), request)

    # --- inside -----------------------------------------------------------------------------------------------------

    async def _owned(self, user_id: str, session_id: str) -> SessionRecord:
        record = await self._store.session(user_id, session_id)
        if record is None or record.origin != "chat":
            raise SessionNotFound(session_id)
        return record

    async def _known_model(self, model_id: str) -> str:
        if all(model.id != model_id for model in await self._models.views()):
            raise ModelNotFound(model_id)
        return model_id

    def _session_view(self, record: SessionSummary) -> SessionView:
        return SessionView(record.id, record.title, record.updated_at, self._conversations.is_running(record.id))

    async def _asked(self, user_id: str, session_id: str, options: TurnOptions | None, started: float) -> Asked:
        self.cache.turn_begins()
        return Asked(self.user, await self._owned(user_id, session_id), options or TurnOptions(), started)

    async def _expire(self) -> None:
        while True:
            try:
                await self.cache.forget(await self._store.delete_expired(self._clock()))
            except StorageError as error:
                log.error("expired API chats could not be removed, another try follows: %s", error)
            await asyncio.sleep(EXPIRY_SECONDS)


@contextlib.contextmanager
def _known_models() -> Iterator[None]:
    try:
        yield
    except UnknownModel as error:  # forgotten a moment ago
        raise ModelNotFound(error.model_id) from None


def _prompt_of(text: str) -> str:
    return check_text(text, "system prompt") if text.strip() else ""
