"""One request to the engine and the replies that come of it, as text with times.

Knows nothing of sessions, storage or pages. Whoever iterates `Generation.events` sees each piece of text once, in
order; the engine never waits for them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol, cast

from chat.errors import ChatError, EngineFailed, InvalidRequest, NotReady
from chat.figures import RecentReplies
from chat.streaming import Codec, ReplyText
from chat.views import Figures, MissView
from engine.protocol import Finished, FinishReason, Miss, Progress, Rejected, Submit, Tokens, Usage

EngineEvent = Progress | Tokens | Finished | Rejected
EventStream = AsyncGenerator[EngineEvent, None]


class Engine(Protocol):
    """The part of `EngineClient` that a generation needs. It was started at `started_at`, in Unix time."""

    started_at: float

    def stream(self, submit: Submit) -> AsyncIterator[EngineEvent]:
        """Submit and yield what comes of it."""

    async def cancel(self, request_id: str, index: int | None = None) -> None:
        """End a request within one step."""


@dataclass(frozen=True)
class Piece:
    """New text of reply `index`."""

    index: int
    text: str


@dataclass(frozen=True)
class Ended:
    """Reply `index` is over."""

    index: int


class Reply:
    """One of a generation's replies. `finish_reason` None: not over, or ended by an error.

    `detail` is a sentence where the reason alone would puzzle a person (the pool or the context is full), else "".
    """

    def __init__(self, codec: Codec, stops: Iterable[str], stop_ids: Iterable[int]) -> None:
        self.content = ReplyText(codec, stops, stop_ids)
        self.finish_reason: FinishReason | None = None
        self.detail = ""
        self.usage: Usage | None = None
        self.miss: MissView | None = None
        self.over = False
        self.first_text_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None

    @property
    def ended(self) -> bool:
        """Whether no more text can come: the engine said so, or a stop string was found."""
        return self.over or self.content.stopped

    def figures(self, started: float) -> Figures | None:
        """The figures of this reply, for a turn that `started` then; None while the engine has not told its usage."""
        if self.usage is None:
            return None
        tpot = None
        if self.content.sampled > 1 and self.first_token_at is not None and self.last_token_at is not None:
            tpot = (self.last_token_at - self.first_token_at) / (self.content.sampled - 1)
        return Figures(
            prompt_tokens=self.usage.prompt_tokens,
            reused_tokens=self.usage.device_tokens + self.usage.host_tokens + self.usage.disk_tokens,
            host_tokens=self.usage.host_tokens,
            disk_tokens=self.usage.disk_tokens,
            restore_s=self.usage.restore_s,
            miss=self.miss,
            computed_tokens=self.usage.computed_tokens,
            recomputed_tokens=self.usage.recomputed_tokens,
            drafted_tokens=self.usage.drafted_tokens,
            accepted_tokens=self.usage.accepted_tokens,
            output_tokens=self.content.sampled,
            ttft_s=None if self.first_text_at is None else self.first_text_at - started,
            tpot_s=tpot,
        )


class Generation:
    """A request and its `submit.n` replies. Iterate `events` once; `error` and `retryable` say how it failed, if so.

    `started` is the time, on `timer`, from which people wait. `recent` takes note of each reply that ends;
    `explain` says why its prompt was not found whole.
    """

    def __init__(
        self,
        engine: Engine,
        submit: Submit,
        codec: Codec,
        stops: Iterable[str] = (),
        *,
        started: float | None = None,
        timer: Callable[[], float] = time.perf_counter,
        recent: RecentReplies | None = None,
        explain: Callable[[Miss], Awaitable[MissView]] | None = None,
    ) -> None:
        self.submit = submit
        self.started = timer() if started is None else started
        self.replies = [Reply(codec, tuple(stops), submit.stop_ids) for _ in range(submit.n)]
        self.error: ChatError | None = None
        self._engine = engine
        self._timer = timer
        self._recent = recent
        self._explain = explain
        self._stop_wanted = False
        self._begun: tuple[EventStream, asyncio.Future[EngineEvent]] | None = None

    async def stop(self) -> None:
        """End the replies where they are, within one step of the engine."""
        self._stop_wanted = True
        await self._engine.cancel(self.submit.request_id)

    def submit_now(self) -> None:
        """Have the engine begin before anything else that is waiting to run; `events` must follow."""
        self._begin()

    @asynccontextmanager
    async def begun(self) -> AsyncIterator[None]:
        """Submit now, so that the engine works while the block stores things; an error in it takes the request back."""
        stream, first = self._begin()
        try:
            yield
        except BaseException:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            await stream.aclose()
            raise

    async def events(self) -> AsyncIterator[Progress | Piece | Ended]:
        """What happens, in order; ends when all replies are over, or with `error` set."""
        if self._stop_wanted and self._begun is None:  # before the engine ever heard of it
            for index, reply in enumerate(self.replies):
                reply.finish_reason, reply.over = "cancelled", True
                yield Ended(index)
            return
        stream, first = self._begun or self._begin()
        async with aclosing(stream), aclosing(_resumed(first, stream)) as events:
            async for event in events:
                match event:
                    case Progress():
                        yield event
                    case Tokens():
                        if piece := await self._take(event):
                            yield Piece(event.index, piece)
                    case Finished():
                        if event.usage.miss is not None and self._explain is not None:
                            self.replies[event.index].miss = await self._explain(event.usage.miss)
                        if piece := self._finish(event):
                            yield Piece(event.index, piece)
                        yield Ended(event.index)
                    case Rejected():
                        self.error = error_of(event)
        for index, reply in enumerate(self.replies):
            if not reply.over and (piece := reply.content.finish()):
                yield Piece(index, piece)

    def total_s(self) -> float:
        """Seconds since the turn started."""
        return self._timer() - self.started

    def _begin(self) -> tuple[EventStream, asyncio.Future[EngineEvent]]:
        stream = cast(EventStream, self._engine.stream(self.submit))
        self._begun = stream, asyncio.ensure_future(_first(stream))
        return self._begun

    async def _take(self, event: Tokens) -> str:
        reply = self.replies[event.index]
        if reply.ended:
            return ""
        now = self._timer()
        reply.first_token_at = now if reply.first_token_at is None else reply.first_token_at
        reply.last_token_at = now
        piece = reply.content.push(event.token_ids)
        if piece and reply.first_text_at is None:
            reply.first_text_at = now
        if reply.content.stopped:
            reply.finish_reason = "stop"
            await self._engine.cancel(self.submit.request_id, event.index)
        return piece

    def _finish(self, event: Finished) -> str:
        reply = self.replies[event.index]
        reply.usage, reply.over = event.usage, True
        if reply.finish_reason is None:  # else a stop string ended it first
            reply.finish_reason = event.reason
            reply.detail = f"The reply ended early: {event.detail}." if event.detail else ""
        piece = reply.content.finish()
        if piece and reply.first_text_at is None:
            reply.first_text_at = self._timer()
        figures = reply.figures(self.started)
        if self._recent is not None and figures is not None:
            self._recent.note(figures, event.usage, self.total_s(), first=event.index == 0)
        return piece


def error_of(event: Rejected) -> ChatError:
    """The engine's refusal as an error that a face can show."""
    match event.code:
        case "not_ready":
            return NotReady(event.message)
        case "invalid":
            return InvalidRequest(event.message)
        case "too_long":
            return ChatError(event.message, code="context_length_exceeded")
        case code:
            return EngineFailed(event.message, code=code, retryable=event.retryable)


async def _first(stream: EventStream) -> EngineEvent:
    return await anext(stream)


async def _resumed(first: asyncio.Future[EngineEvent], stream: EventStream) -> EventStream:
    try:
        yield await first
    except StopAsyncIteration:
        return
    async for event in stream:
        yield event
