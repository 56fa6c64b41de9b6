"""A real browser against the real application; every request that leaves for elsewhere fails the test that made it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, expect, sync_playwright

from tests.browser.browsers import arguments, find_browser
from tests.browser.driver import ChatDriver
from tests.browser.server import Server, new_data_dir

WINDOW = {"width": 1280, "height": 800}

expect.set_options(timeout=20_000)  # on a machine that is busy otherwise


@pytest.fixture(scope="package")  # while it is open, this thread has a running loop, and no async test could run
def browser() -> Iterator[Browser]:
    """One browser for all tests; each test has windows of its own."""
    path = find_browser()
    if path is None:
        without = pytest.fail if os.environ.get("CI") else pytest.skip
        without("no Chromium or Chrome found (TEST_BROWSER can name one)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments())
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def server(
    browser: Browser, embedded_model: Path, model_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """The application with the embedded model, ready; shared, so a test must not end it."""
    del browser, embedded_model  # first of all: is there a browser, and is the model converted
    with Server(new_data_dir(tmp_path_factory.mktemp("data"), model_cache)) as server:
        yield server.wait_for_page().wait_until_ready()


@pytest.fixture
def own_server(browser: Browser, embedded_model: Path, model_cache: Path, tmp_path: Path) -> Iterator[Server]:
    """An application of the test's own, not yet started, to be ended or hurt at will."""
    del browser, embedded_model
    server = Server(new_data_dir(tmp_path / "data", model_cache))
    yield server
    server.stop()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A fresh browser profile; the errors of its pages and its requests to elsewhere fail the test at its end."""
    context = browser.new_context(viewport=WINDOW, locale="en-GB")
    context.set_default_timeout(20_000)
    foreign: list[str] = []
    errors: list[str] = []
    context.on("request", lambda request: None if is_ours(request.url) else foreign.append(request.url))
    context.on("weberror", lambda error: errors.append(str(error.error)))
    yield context
    context.close()
    assert foreign == [], "the page asked for something from elsewhere"
    assert errors == [], "the page's script failed"


def is_ours(url: str) -> bool:
    """Whether a request stays on this machine."""
    return url.startswith(("http://127.0.0.1:", "data:", "blob:"))


@pytest.fixture
def tab(context: BrowserContext, server: Server) -> ChatDriver:
    """A tab with a new chat."""
    return ChatDriver(context.new_page(), server.url).open()


@pytest.fixture
def second_tab(context: BrowserContext, server: Server) -> ChatDriver:
    """Another tab of the same browser, not loaded yet."""
    return ChatDriver(context.new_page(), server.url)
