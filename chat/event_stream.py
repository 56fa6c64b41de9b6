"""Send server-sent events, and notice at once when the client goes away.

Knows nothing of what is sent. Starlette's own streaming leaves the noticing to the server's version of ASGI.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


class EventStream(Response):
    """Sends the chunks. `abandon` is called when the client goes away, and once more at the end."""

    def __init__(self, chunks: AsyncIterator[bytes], abandon: Callable[[], None]) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        del self.headers["content-length"]
        self._chunks = chunks
        self._abandon = abandon

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_client_gone(receive))
        gone.add_done_callback(lambda _: self._abandon())
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for chunk in self._chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            gone.cancel()  # which abandons too: whatever ended the sending, nobody listens any more


async def unless_gone(work: Awaitable[T], receive: Receive) -> T:
    """What `work` gives. Raises ClientDisconnect when the client goes away first, and cancels `work`."""
    task, gone = asyncio.ensure_future(work), asyncio.create_task(_client_gone(receive))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return await task
        raise ClientDisconnect
    finally:
        task.cancel()
        gone.cancel()


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
