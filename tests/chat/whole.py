"""The whole web application on a free port, as `app.py` serves it, in the test's own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from chat.service import ChatService
from chat.serving import Server, listen
from chat.settings import Settings
from chat.web import build_app


@asynccontextmanager
async def whole(service: ChatService) -> AsyncIterator[str]:
    """The base URL of the application, page and all; it runs until the block is left."""
    with listen("127.0.0.1", 0) as listener:
        server = Server(build_app(service, Settings(data_dir=Path("unused"))))
        task = asyncio.create_task(server.serve([listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task
