"""Turns of stateless clients: each request brings the whole chat, and is matched with what is stored of it.

Knows the ledger, storage and the engine, and nothing of HTTP. What a client sends again is not encoded again, because
its text may stand for other ids than the model sampled; only what is new is appended. The chats are stored with origin
"api", appear in no list, and expire.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from cachetools import LRUCache

from chat.errors import ChatError, EngineFailed, InvalidRequest, ModelNotFound, NotReady, StorageFailed, check_text
from chat.figures import RecentReplies
from chat.generation import Ended, Engine, Generation, Piece, Reply
from chat.matching import Match, longest_match
from chat.model import Composed, LoadedModel
from chat.templates import Entry
from chat.turns import turn_record
from chat.views import Status, TurnOptions
from engine.protocol import Progress, Sampling
from storage.errors import StorageError, UnknownModel
from storage.records import UserRecord
from storage.store import Store

log = logging.getLogger(__name__)

EXPIRES_SECONDS = 30 * 24 * 3600.0
MAX_N = 128
HINTS = 4096  # session hints remembered
PLAIN = Sampling(temperature=1.0)  # what OpenAI's clients expect where they say nothing

ApiEvent = Progress | Piece | Ended


@dataclass(frozen=True)
class Request:
    """What a stateless client asks: the whole chat, answered `n` times.

    `hint` is the client's own name for a session: of several equal stored paths, the one this user last used under
    that name is taken. It opens nothing that the messages themselves would not. `started`: when the request came.
    """

    messages: tuple[Entry, ...]
    options: TurnOptions
    started: float
    n: int = 1
    hint: str | None = None


class ApiTurn:
    """The replies to one request: a task of the server, read by one client, stopped when that client goes away.

    `matched_messages` of the client's messages were found in storage. `error` is set once the engine has failed it.
    """

    def __init__(self, generation: Generation, model: LoadedModel, session_id: str, matched_messages: int) -> None:
        self.model = model
        self.session_id = session_id
        self.matched_messages = matched_messages
        self._generation = generation
        self._events: asyncio.Queue[ApiEvent | None] = asyncio.Queue()
        self._heard = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None  # kept, because a task that nobody holds may vanish

    @property
    def replies(self) -> Sequence[Reply]:
        """The `n` replies, growing until `finished`."""
        return self._generation.replies

    @property
    def error(self) -> ChatError | None:
        """Why the engine ended the turn, if it did."""
        return self._generation.error

    @property
    def started(self) -> float:
        """When the request came, on the service's timer."""
        return self._generation.started

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self._generation.submit.token_ids)

    async def accepted(self) -> None:
        """Wait until the engine has taken the request. Raises its refusal."""
        await self._heard.wait()
        if self.error is not None:
            raise self.error

    def cut_by(self) -> ChatError | None:
        """Why the replies ended before their end, if they did: the engine's error, or the server's own end."""
        if self.error is None and not all(reply.over for reply in self.replies):
            return NotReady("The server is shutting down; the reply is cut here.")
        return self.error

    async def events(self) -> AsyncIterator[Piece | Ended]:
        """The text as it comes. The replies' `Ended` come last, once everything is stored; see `cut_by`."""
        while (event := await self._events.get()) is not None:
            if not isinstance(event, Progress):
                yield event

    async def finished(self) -> None:
        """Wait until all replies are over and stored. Raises what cut them."""
        if self._task is not None:
            await asyncio.wait([self._task])
        if (cut := self.cut_by()) is not None:
            raise cut

    async def stop(self) -> None:
        """End the replies where they are and wait until they are stored."""
        if self._task is not None and not self._task.done():
            await self._generation.stop()
            await asyncio.wait([self._task])

    def abandon(self) -> None:
        """Stop without waiting, because the client went away; nothing happens to a turn that is over."""
        if self._task is not None and not self._task.done():
            self._stopping = asyncio.create_task(self.stop())

    def total_s(self) -> float:
        """Seconds since the request came."""
        return self._generation.total_s()

    def start(self, store: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Begin; `store` is called when the engine is done, and awaited before the end is told."""
        self._task = asyncio.create_task(self._run(store), name=f"completion {self._generation.submit.request_id}")
        return self._task

    async def _run(self, store: Callable[[], Awaitable[None]]) -> None:
        ended: list[Ended] = []
        try:
            async for event in self._generation.events():
                if isinstance(event, Ended):
                    ended.append(event)
                else:
                    self._events.put_nowait(event)
                self._heard.set()
        except Exception:
            log.exception("a completion failed")
            self._generation.error = EngineFailed("Something went wrong inside Keepwarm; the log has the details.")
        finally:
            await store()
            for event in ended:
                self._events.put_nowait(event)
            self._events.put_nowait(None)
            self._heard.set()


class Completions:
    """Begins the turns of stateless clients, and owns those that run."""

    def __init__(
        self,
        store: Store,
        engine: Engine,
        *,
        clock: Callable[[], float],
        timer: Callable[[], float] = time.perf_counter,
        recent: RecentReplies | None = None,
    ) -> None:
        self._store = store
        self._engine = engine
        self._clock = clock
        self._timer = timer
        self._recent = recent
        self._running: set[asyncio.Task[None]] = set()
        self._hints: LRUCache[tuple[str, str], str] = LRUCache(HINTS)

    async def close(self) -> None:
        """End all turns, storing what was delivered."""
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def begin(self, user: UserRecord, model: LoadedModel, request: Request) -> ApiTurn:
        """Match the messages, submit them, and store what is new while the engine works.

        Raises InvalidRequest, InvalidText, ModelNotFound, PromptTooLong, TemplateError, StorageFailed.
        """
        _check(request, model)
        hint = (user.id, request.hint) if request.hint else None
        prefer = self._hints.get(hint) if hint else None
        match = await longest_match(self._store, user.id, request.messages, model.template, prefer)
        path = match.path if match else ()
        composed = await model.compose([*(model.entry(message) for message in path), *request.messages[len(path) :]])
        try:
            session_id, stored = await self._session(user.id, model.id, match)
        except UnknownModel:  # forgotten a moment ago
            raise ModelNotFound(model.name) from None
        except StorageError as error:
            raise StorageFailed(error) from error
        if hint:
            self._hints[hint] = session_id
        submit = model.submit(session_id, composed, request.options, usual=PLAIN, salt=user.salt, n=request.n)
        generation = Generation(
            self._engine,
            submit,
            model.template,
            request.options.stop,
            started=request.started,
            timer=self._timer,
            recent=self._recent,
        )
        parent_id = path[stored - 1].id if stored else None
        asking = asyncio.ensure_future(
            self._store_messages(user.id, session_id, parent_id, stored=stored, composed=composed, model=model)
        )
        turn = ApiTurn(generation, model, session_id, len(path))
        task = turn.start(lambda: self._store_replies(generation, asking, model))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return turn

    async def _session(self, user_id: str, model_id: str, match: Match | None) -> tuple[str, int]:
        """The session to store in, and how many of the matched messages are there already.

        A chat of the page lends its ids, but it is a person's: what an API client goes on with is stored apart.
        """
        if match is not None and match.session.origin == "api":
            return match.session.id, len(match.path)
        expires_at = self._clock() + EXPIRES_SECONDS
        session = await self._store.create_session(user_id, origin="api", expires_at=expires_at, model_id=model_id)
        return session.id, 0

    async def _store_messages(
        self,
        user_id: str,
        session_id: str,
        parent_id: str | None,
        *,
        stored: int,
        composed: Composed,
        model: LoadedModel,
    ) -> str | None:
        """Store the messages that are not, one under the other; the id of the last."""
        if stored:
            await self._store.update_session(user_id, session_id, expires_at=self._clock() + EXPIRES_SECONDS)
        for entry, segment in zip(composed.entries[stored:], composed.segments[stored:], strict=True):
            message = await self._store.add_message(
                session_id,
                parent_id=parent_id,
                role=entry.role,
                text=entry.text,
                token_ids=segment,
                tokenizer=model.names(entry),
            )
            parent_id = message.id
        return parent_id

    async def _store_replies(
        self, generation: Generation, asking: asyncio.Future[str | None], model: LoadedModel
    ) -> None:
        """Store the replies beside each other. A failure costs the next request its match, and this one nothing."""
        try:
            parent_id = await asking
            for reply in generation.replies:
                reply.content.finish()
                message = await self._store.add_message(
                    generation.submit.session_id,
                    parent_id=parent_id,
                    role="assistant",
                    text=reply.content.text,
                    token_ids=reply.content.delivered_ids(),
                    tokenizer=model.template.identity,
                    status=_status(reply, generation.error),
                    finish_reason=reply.finish_reason,
                    error=generation.error.message if generation.error else None,
                )
                figures = reply.figures(generation.started)
                if figures is not None:
                    reason = reply.finish_reason or "cancelled"
                    await self._store.add_turn(turn_record(message.id, figures, reason, generation.total_s()))
        except StorageError as error:
            log.error("an API chat could not be stored: %s", error)


def _check(request: Request, model: LoadedModel) -> None:
    messages, n = request.messages, request.n
    if not messages:
        raise InvalidRequest("messages must hold at least one message.", "messages")
    if messages[-1].role != "user":
        raise InvalidRequest(f"The last message must be the user's, not the {messages[-1].role}'s.", "messages")
    for index, message in enumerate(messages):
        check_text(message.text, f"content of messages[{index}]")
    most = min(MAX_N, model.capabilities.total_blocks - 1)
    if not 1 <= n <= most:
        raise InvalidRequest(f"n must be between 1 and {most} here, not {n}.", "n")


def _status(reply: Reply, error: ChatError | None) -> Status:
    if not reply.over:
        return "failed" if error is not None else "interrupted"
    return "stopped" if reply.finish_reason == "cancelled" else "complete"
