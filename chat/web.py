"""Assemble the one web application: guards first, then the API and the page's own routes, then the page at "/".

The order matters: routes added after the page is mounted at "/" are never reached.
"""

from __future__ import annotations

import os

from fastapi import FastAPI
from fastapi.staticfiles import StaticFiles
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chat.admin_api import admin_router
from chat.api import api_router
from chat.figures import figures_router
from chat.guard import add_guards
from chat.page import build_page
from chat.page_assets import FOLDER, PREFIX, head_tags
from chat.page_gate import PageGate
from chat.page_routes import page_router
from chat.page_theme import page_theme
from chat.quick_gradio import gr
from chat.refusals import add_refusals
from chat.service import ChatService
from chat.settings import VERSION, Settings

# Nothing from elsewhere, ever: neither Gradio nor a reply can make the browser fetch what is not this server's.
CONTENT_POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self' 'unsafe-inline' 'unsafe-eval'",  # Gradio evaluates the templates of its components
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src 'self' data:",
        "connect-src 'self'",
        "object-src 'none'",
        "base-uri 'self'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)

# Gradio looks for new events that often. By itself it does so every millisecond, also while nobody has the page open,
# which keeps a core busy for 8% of the time instead of 4%.
QUEUE_SECONDS = 0.005


def build_app(service: ChatService, settings: Settings) -> FastAPI:
    """The whole application over a service that its caller starts and closes."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    app = FastAPI(title="Keepwarm", version=VERSION, docs_url=None, redoc_url=None, openapi_url=None)
    add_refusals(app)
    add_guards(app, settings)
    app.add_middleware(PageHeaders)
    app.include_router(api_router(service))
    app.include_router(page_router(service))
    app.include_router(figures_router(service))
    app.include_router(admin_router(service))
    app.mount(PREFIX, StaticFiles(directory=FOLDER), name="page-assets")
    page = build_page(service)
    page._queue.sleep_when_free = QUEUE_SECONDS
    gr.mount_gradio_app(
        app,
        page,
        path="/",
        app_kwargs={"middleware": [Middleware(PageGate, blocks=page)]},
        footer_links=[],
        run_history=False,
        show_error=False,
        ssr_mode=False,
        enable_monitoring=False,
        mcp_server=False,
        pwa=False,
        favicon_path=str(FOLDER / "favicon.png"),
        theme=page_theme(),
        head=head_tags(),
    )
    return app


class PageHeaders:
    """Adds the content policy and its companions to every HTTP response; plain ASGI, so that streams stay streams.

    Takes away what would let a page of another origin read the answer: Gradio invites every port of this machine.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Content-Security-Policy"] = CONTENT_POLICY
                headers["X-Content-Type-Options"] = "nosniff"
                headers["Referrer-Policy"] = "no-referrer"
                for name in {name for name in headers if name.startswith("access-control-")}:
                    del headers[name]
            await send(message)

        await self._app(scope, receive, with_headers if scope["type"] == "http" else send)
