"""Turns of stateless clients: each request brings the whole chat, and is matched with what is stored of it.

Knows the ledger, storage and the engine, and nothing of HTTP. What a client sends again is not encoded again, because
its text may stand for other ids than the model sampled; only what is new is appended. The chats are stored with origin
"api", appear in no list, and expire.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cachetools import LRUCache

from chat.api_turn import ApiTurn
from chat.errors import ChatError, InvalidRequest, ModelNotFound, StorageFailed, check_text
from chat.estimates import Estimator, estimated
from chat.figures import RecentReplies
from chat.generation import Engine, Generation, Reply
from chat.matching import Match, RecentPaths, longest_match
from chat.misses import Misses
from chat.model import Composed, LoadedModel
from chat.templates import Entry
from chat.turns import turn_record
from chat.views import EstimateView, Status, TurnOptions
from engine.protocol import Sampling
from storage.errors import StorageError, UnknownModel
from storage.records import MessageRecord, SessionRecord, UserRecord
from storage.store import Store

log = logging.getLogger(__name__)

EXPIRES_SECONDS = 30 * 24 * 3600.0
MAX_N = 128
HINTS = 4096  # session hints remembered
PLAIN = Sampling(temperature=1.0)  # what OpenAI's clients expect where they say nothing


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


class CompletionEngine(Engine, Estimator, Protocol):
    """The part of `EngineClient` that stateless clients need."""


class Completions:
    """Begins the turns of stateless clients, and owns those that run."""

    def __init__(
        self,
        store: Store,
        engine: CompletionEngine,
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
        self._recent_paths = RecentPaths(clock)

    async def close(self) -> None:
        """End all turns, storing what was delivered."""
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def begin(self, user: UserRecord, model: LoadedModel, request: Request) -> ApiTurn:
        """Match the messages, submit them, and store what is new while the engine works.

        Raises InvalidRequest, InvalidText, ModelNotFound, PromptTooLong, TemplateError, StorageFailed.
        """
        match, composed = await self._composed(user, model, request)
        path = match.path if match else ()
        try:
            session, stored = await self._session(user.id, model.id, match)
        except UnknownModel:  # forgotten a moment ago
            raise ModelNotFound(model.name) from None
        except StorageError as error:
            raise StorageFailed(error) from error
        if request.hint:
            self._hints[user.id, request.hint] = session.id
        submit = model.submit(session.id, composed, request.options, usual=PLAIN, salt=user.salt, n=request.n)
        generation = Generation(
            self._engine,
            submit,
            model.template,
            request.options.stop,
            started=request.started,
            timer=self._timer,
            recent=self._recent,
            explain=self._misses(model, composed, match).explain,
        )
        generation.submit_now()  # before a thread that stores things wants to run too
        asking = asyncio.ensure_future(self._store_messages(session, path[:stored], composed, model))
        turn = ApiTurn(generation, model, session.id, len(path))
        task = turn.start(lambda: self._store_replies(generation, session, asking, model))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return turn

    async def estimate(self, user: UserRecord, model: LoadedModel, request: Request) -> EstimateView:
        """What these messages would cost. Stores nothing. Raises as `begin`, and NotReady."""
        match, composed = await self._composed(user, model, request)
        return await estimated(self._engine, user, model, composed, match.session.id if match else "")

    async def _composed(self, user: UserRecord, model: LoadedModel, request: Request) -> tuple[Match | None, Composed]:
        """What is stored of a chat, and its prompt with the ids that were stored."""
        _check(request, model)
        prefer = self._hints.get((user.id, request.hint)) if request.hint else None
        match = await longest_match(
            self._store, user.id, request.messages, model.template, prefer, recent=self._recent_paths
        )
        path = match.path if match else ()
        entries = [*(model.entry(message) for message in path), *request.messages[len(path) :]]
        return match, await model.compose(entries)

    def _misses(self, model: LoadedModel, composed: Composed, match: Match | None) -> Misses:
        stored_in, path = (match.session.id, match.path) if match else (None, ())
        return Misses(self._store, stored_in, model.capabilities.fingerprint, composed, path, self._engine.started_at)

    async def _session(self, user_id: str, model_id: str, match: Match | None) -> tuple[SessionRecord, int]:
        """The session to store in, and how many of the matched messages are there already.

        A chat of the page lends its ids, but it is a person's: what an API client goes on with is stored apart.
        """
        if match is not None and match.session.origin == "api":
            return match.session, len(match.path)
        expires_at = self._clock() + EXPIRES_SECONDS
        session = await self._store.create_session(user_id, origin="api", expires_at=expires_at, model_id=model_id)
        return session, 0

    async def _store_messages(
        self, session: SessionRecord, there: Sequence[MessageRecord], composed: Composed, model: LoadedModel
    ) -> list[MessageRecord]:
        """Store the messages that are not `there`, one under the other; all of them."""
        path = list(there)
        if path:
            await self._store.update_session(session.user_id, session.id, expires_at=self._clock() + EXPIRES_SECONDS)
        for entry, segment in zip(composed.entries[len(there) :], composed.segments[len(there) :], strict=True):
            message = await self._store.add_message(
                session.id,
                parent_id=path[-1].id if path else None,
                role=entry.role,
                text=entry.text,
                token_ids=segment,
                tokenizer=model.names(entry),
            )
            path.append(message)
        self._recent_paths.note(session.user_id, session, path)
        return path

    async def _store_replies(
        self,
        generation: Generation,
        session: SessionRecord,
        asking: asyncio.Future[list[MessageRecord]],
        model: LoadedModel,
    ) -> None:
        """Store the replies beside each other. A failure costs the next request its match, and this one nothing."""
        try:
            path = await asking
            for reply in generation.replies:
                reply.content.finish()
                message = await self._store.add_message(
                    session.id,
                    parent_id=path[-1].id,
                    role="assistant",
                    text=reply.content.text,
                    token_ids=reply.content.delivered_ids(),
                    tokenizer=model.template.identity,
                    status=_status(reply, generation.error),
                    finish_reason=reply.finish_reason,
                    error=generation.error.message if generation.error else None,
                )
                self._recent_paths.note(session.user_id, session, [*path, message])
                figures = reply.figures(generation.started)
                if figures is not None:
                    reason = reply.finish_reason or "cancelled"
                    turn = turn_record(message.id, figures, reason, generation.total_s(), generation.submit.model)
                    await self._store.add_turn(turn)
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
