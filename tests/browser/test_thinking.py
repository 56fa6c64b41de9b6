"""A model that thinks, and one without a chat template, as the page shows them. The engine plays a script."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import uvicorn
from playwright.sync_api import BrowserContext, expect
from tokenizers import Tokenizer

from chat.service import ChatService
from chat.settings import Settings
from chat.web import build_app
from storage.store import Store
from tests.browser.driver import ChatDriver
from tests.chat import model_files as files
from tests.chat.fake_engine import END, FakeEngine

THOUGHT = (
    "<think>\nThey want to know *why*. Let me see: light, air, eyes.\n</think>\n\nBecause air scatters **blue** most."
)


class Scripted:
    """The whole application over an engine that plays a script, in a thread with an event loop of its own."""

    def __init__(self, model: Path, tokenizer: Tokenizer, data: Path) -> None:
        self.url = ""
        self._data = data
        ids = tokenizer.encode(THOUGHT, add_special_tokens=False).ids
        self._engine = FakeEngine(model, lambda *_: [*ids, END])
        self._loop = asyncio.new_event_loop()
        self._ready, self._over = threading.Event(), asyncio.Event()

    def pause_after(self, tokens: int | None) -> None:
        """Let the reply go on for so many tokens; None: to its end."""

        def set_gate() -> None:
            self._engine.tokens_until_pause = tokens
            self._engine.gate.set()

        self._loop.call_soon_threadsafe(set_gate)

    @contextmanager
    def running(self) -> Iterator[Scripted]:
        thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()))
        thread.start()
        try:
            assert self._ready.wait(60)
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._over.set)
            thread.join(30)

    async def _serve(self) -> None:
        store = await Store.open(self._data)
        service = ChatService(store, self._engine, thinking="strip")  # type: ignore[arg-type]
        await service.start()
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        app = build_app(service, Settings(data_dir=self._data, port=port))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1, lifespan="off"))
        serving = asyncio.create_task(server.serve([listener]))
        self.url = f"http://127.0.0.1:{port}/"
        self._ready.set()
        await self._over.wait()
        await service.close()
        server.should_exit = True
        await serving
        await store.close()


@pytest.fixture
def scripted(embedded_model: Path, tmp_path: Path) -> Iterator[Callable[[str | None], Scripted]]:
    with ExitStack() as stack:

        def start(template: str | None) -> Scripted:
            tokenizer = files.with_tokens(embedded_model / "tokenizer.json", plain=["<think>", "</think>"])
            model = files.save(tmp_path / "model", tokenizer, template)
            return stack.enter_context(Scripted(model, tokenizer, tmp_path / "data").running())

        yield start


def test_reasoning_is_folded_while_it_grows_and_stays_as_it_was_left(
    context: BrowserContext, scripted: Callable[[str | None], Scripted]
) -> None:
    server = scripted(files.STRIPPING)
    tab = ChatDriver(context.new_page(), server.url).open()
    thought = tab.page.locator("details.kw-thought")
    server.pause_after(6)
    tab.send("Why is the sky blue?")
    expect(thought.locator("summary")).to_have_text("Thinking")
    expect(thought).not_to_have_attribute("open", "")
    thought.locator("summary").click()
    expect(thought).to_contain_text("They want")
    server.pause_after(6)  # more of it comes, and it stays open
    expect(thought).to_contain_text("Let me")
    expect(thought).to_have_attribute("open", "")
    server.pause_after(None)
    assert tab.wait_reply() == "Because air scatters blue most."
    expect(thought).to_have_attribute("open", "")
    expect(thought.locator("summary")).to_have_text("Thought in 11 words")
    copy = tab.replies.last.get_by_role("button", name="Copy this reply")
    expect(copy).to_have_attribute("data-text", "Because air scatters **blue** most.")
    thought.locator("summary").press("Enter")
    expect(thought).not_to_have_attribute("open", "")
    tab.open(tab.chat)  # as it is found later
    expect(thought).not_to_have_attribute("open", "")
    tab.open_settings()
    expect(tab.page.locator("#kw-thinking")).to_contain_text("is left out of what it reads")
    expect(tab.page.locator("#kw-model-note")).to_be_hidden()


def test_a_model_without_a_template_is_said_quietly(
    context: BrowserContext, scripted: Callable[[str | None], Scripted]
) -> None:
    tab = ChatDriver(context.new_page(), scripted(None).url).open()
    note = tab.page.locator("#kw-model-note")
    expect(note).to_contain_text("This model has no chat template; a plain one is used")
    tab.ask("Why?")
    expect(note).to_be_visible()
    expect(tab.notices).to_have_count(0)
