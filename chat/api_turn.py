"""The turn of a stateless client while it runs: its replies as they grow, and its end, once everything is stored.

Knows a generation, and nothing of storage and HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from chat.errors import ChatError, EngineFailed, NotReady
from chat.generation import Ended, Generation, Piece, Reply
from chat.model import LoadedModel
from engine.protocol import Progress

log = logging.getLogger(__name__)

ApiEvent = Progress | Piece | Ended


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
