"""A real server on a free port, in the test's own event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI

from chat.admin_api import admin_router
from chat.api import api_router
from chat.figures import figures_router
from chat.guard import add_guards
from chat.page_routes import page_router
from chat.refusals import add_refusals
from chat.service import ChatService


@dataclass
class Bound:
    host: str = "127.0.0.1"


@asynccontextmanager
async def serving(service: ChatService) -> AsyncIterator[str]:
    """The base URL of a server that runs until the block is left."""
    app = FastAPI(openapi_url=None)
    add_refusals(app)
    add_guards(app, Bound())
    app.include_router(api_router(service))
    app.include_router(page_router(service))
    app.include_router(figures_router(service))
    app.include_router(admin_router(service))
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1, lifespan="off"))
    task = asyncio.create_task(server.serve([listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
