"""Begins the turns of people's chats, and owns those that run: at most one per chat.

Knows storage, the ledger and the engine; whether a chat belongs to whoever asks was settled before.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from chat.errors import ModelUnavailable, NothingToRetry, SessionBusy, SessionNotFound, StorageFailed, TurnStopped
from chat.figures import RecentReplies
from chat.generation import Engine, Generation
from chat.misses import Misses
from chat.model import Composed, LoadedModel
from chat.models import Models
from chat.templates import Entry
from chat.turns import SAVE_SECONDS, LiveTurn
from chat.views import TurnOptions
from storage.errors import StorageError, UnknownMessage, UnknownSession
from storage.records import MessageRecord, SessionRecord, UserRecord
from storage.store import Store

TITLE_LENGTH = 60


@dataclass(frozen=True)
class Asked:
    """Who asks for a turn, in which chat, how the reply is to be made, and since when they wait."""

    user: UserRecord
    session: SessionRecord
    options: TurnOptions
    started: float


class Conversations:
    """The running turns by session id. Made and used on one event loop."""

    def __init__(
        self,
        store: Store,
        engine: Engine,
        models: Models,
        *,
        timer: Callable[[], float] = time.perf_counter,
        save_seconds: float = SAVE_SECONDS,
        recent: RecentReplies | None = None,
    ) -> None:
        self._store = store
        self._engine = engine
        self._models = models
        self._timer = timer
        self._save_seconds = save_seconds
        self._recent = recent
        self._turns: dict[str, LiveTurn] = {}
        self._starting: dict[str, asyncio.Event] = {}  # set when the turn runs, or could not begin
        self._loading: dict[str, asyncio.Task[LoadedModel]] = {}  # what a starting turn waits for before all else
        self._tasks: set[asyncio.Task[LiveTurn]] = set()

    def live(self, session_id: str) -> LiveTurn | None:
        """The turn that runs in this chat, if one does."""
        return self._turns.get(session_id)

    def is_running(self, session_id: str) -> bool:
        """Whether a turn runs or is about to."""
        return session_id in self._turns or session_id in self._starting

    async def carry_out(self, work: Coroutine[Any, Any, LiveTurn]) -> LiveTurn:
        """Do `work` to its end even if whoever asked goes away: a message is stored with its turn or not at all."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._carried_out)
        return await asyncio.shield(task)

    async def send(self, asked: Asked, text: str) -> LiveTurn:
        """Store the message and begin the reply; see `ChatService.send`."""
        with self._reserved(asked.session.id):
            return await self._send(asked, text)

    async def retry(self, asked: Asked) -> LiveTurn:
        """Begin another reply to the last user message; see `ChatService.retry`."""
        with self._reserved(asked.session.id):
            return await self._retry(asked)

    async def stop(self, session_id: str) -> None:
        """End the chat's reply where it is, if one runs, and wait until it is saved.

        A turn that still waits for its model fails with TurnStopped; the engine goes on loading.
        """
        if load := self._loading.get(session_id):
            load.cancel()
        if starting := self._starting.get(session_id):
            await starting.wait()
        if turn := self._turns.get(session_id):
            await turn.stop()

    async def close(self) -> None:
        """Interrupt all turns, saving what was delivered."""
        for load in self._loading.values():
            load.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(turn.interrupt() for turn in list(self._turns.values())))

    # --- inside -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _reserved(self, session_id: str) -> Iterator[None]:
        if self.is_running(session_id):
            raise SessionBusy
        done = self._starting[session_id] = asyncio.Event()
        try:
            yield
        finally:
            del self._starting[session_id]
            done.set()

    def _carried_out(self, task: asyncio.Task[LiveTurn]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever asked may be gone; the error is then nobody's

    async def _send(self, asked: Asked, text: str) -> LiveTurn:
        session = asked.session
        model = await self._model_of(session)
        path = await self._store.path(session.id)
        system = [Entry("system", session.system_prompt)] if not path and session.system_prompt else []
        composed = await model.compose([*(model.entry(message) for message in path), *system, Entry("user", text)])

        async def store_question() -> str | None:
            await self._save_changed_segments(path, composed, model)
            parent_id = path[-1].id if path else None
            for entry, segment in zip(composed.entries[len(path) :], composed.segments[len(path) :], strict=True):
                message = await self._store.add_message(
                    session.id,
                    parent_id=parent_id,
                    role=entry.role,
                    text=entry.text,
                    token_ids=segment,
                    tokenizer=model.template.rendering,
                )
                parent_id = message.id
            await self._store.settle_session(session.id, title=title_of(text), model_id=model.id)
            return parent_id

        return await self._reply(asked, model, path, composed, store_question)

    async def _retry(self, asked: Asked) -> LiveTurn:
        model = await self._model_of(asked.session)
        path = await self._store.path(asked.session.id)
        while path and path[-1].role == "assistant":
            path.pop()
        if not path or path[-1].role != "user":
            raise NothingToRetry
        composed = await model.compose([model.entry(message) for message in path])
        question = path[-1].id

        async def stored_question() -> str | None:
            return question

        return await self._reply(asked, model, path, composed, stored_question)

    async def _model_of(self, session: SessionRecord) -> LoadedModel:
        """The model that the chat remembers, else the default. Raises TurnStopped when `stop` ends the wait for it."""
        load = self._loading[session.id] = asyncio.create_task(self._models.get(session.model_id))
        try:
            return await load
        except asyncio.CancelledError:
            if load.cancelled() and not _cancelled():
                raise TurnStopped from None
            raise
        except ModelUnavailable as error:
            raise ModelUnavailable(f"{error.message} Choose another model for this chat to go on.") from error
        finally:
            del self._loading[session.id]

    async def _reply(
        self,
        asked: Asked,
        model: LoadedModel,
        path: Sequence[MessageRecord],
        composed: Composed,
        store_question: Callable[[], Awaitable[str | None]],
    ) -> LiveTurn:
        """Submit, and store the question and its reply's row while the engine works."""
        session, options = asked.session, asked.options
        submit = model.submit(session.id, composed, options, usual=model.sampling, salt=asked.user.salt)
        generation = Generation(
            self._engine,
            submit,
            model.template,
            options.stop,
            started=asked.started,
            timer=self._timer,
            recent=self._recent,
            explain=Misses(
                self._store, session.id, model.capabilities.fingerprint, composed, path, self._engine.started_at
            ).explain,
        )
        with _storing(session.id):
            async with generation.begun():
                message = await self._store.add_message(
                    session.id,
                    parent_id=await store_question(),
                    role="assistant",
                    text="",
                    token_ids=(),
                    tokenizer=model.template.identity,
                    status="streaming",
                )
        turn = LiveTurn(
            self._store,
            generation,
            session_id=session.id,
            message_id=message.id,
            on_done=self._done,
            save_seconds=self._save_seconds,
        )
        self._turns[session.id] = turn
        turn.start()
        return turn

    async def _save_changed_segments(
        self, path: Sequence[MessageRecord], composed: Composed, model: LoadedModel
    ) -> None:
        """A user message that never got a reply is followed by another one: its segment lost the generation prompt."""
        for message, segment in zip(path, composed.segments, strict=False):
            if message.tokenizer == model.template.rendering and message.token_ids != segment:
                await self._store.update_message(message.id, token_ids=segment)

    def _done(self, turn: LiveTurn) -> None:
        if self._turns.get(turn.session_id) is turn:
            del self._turns[turn.session_id]


def title_of(text: str) -> str:
    """The first line of `text` that says something, at most `TITLE_LENGTH` characters, cut between words."""
    line = next((" ".join(line.split()) for line in text.splitlines() if line.strip()), "")
    if len(line) <= TITLE_LENGTH:
        return line
    head = line[: TITLE_LENGTH - 1]
    words = head.rsplit(" ", 1)[0]
    return (words if len(words) > TITLE_LENGTH // 2 else head).rstrip() + "…"


def _cancelled() -> bool:
    """Whether somebody wants the running task itself to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@contextlib.contextmanager
def _storing(session_id: str) -> Iterator[None]:
    try:
        yield
    except (UnknownSession, UnknownMessage):
        raise SessionNotFound(session_id) from None
    except StorageError as error:
        raise StorageFailed(error) from error
