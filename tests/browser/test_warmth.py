"""The page has the open chat brought near before it is asked for, quietly, and says how soon a reply would begin."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from playwright.sync_api import Page, Route, expect

from tests.browser.driver import LONG, ChatDriver


@dataclass
class Asked:
    """What the page asked of the server about warmth, and what it was told."""

    seconds: float | None = 0.1234
    ready: list[str] = field(default_factory=list)
    warmed: list[str] = field(default_factory=list)
    held: list[Route] = field(default_factory=list)
    hold: bool = False

    def listen(self, page: Page) -> None:
        """Answer in the server's place, so that the test knows the figures."""

        def ready(route: Route) -> None:
            self.ready.append(route.request.url.rpartition("=")[2])
            route.fulfill(json={"seconds": self.seconds})

        def warm(route: Route) -> None:
            self.warmed.append(json.loads(route.request.post_data or "")["chat"])
            if self.hold:
                self.held.append(route)
            else:
                route.fulfill(json={})

        page.route("**/page/ready?*", ready)
        page.route("**/page/warm", warm)


def until(tab: ChatDriver, holds: Callable[[], bool]) -> None:
    """Wait for something that the page asks for a moment later."""
    for _ in range(100):
        if holds():
            return
        tab.page.wait_for_timeout(50)
    raise AssertionError("it was not asked for")


@pytest.fixture
def asked(tab: ChatDriver) -> Asked:
    made = Asked()
    made.listen(tab.page)
    return made


def test_a_chat_is_brought_near_after_its_turn_and_when_it_is_opened(tab: ChatDriver, asked: Asked) -> None:
    ready = tab.page.locator("#kw-ready")
    expect(ready).to_be_hidden()
    tab.limit_replies(4)
    tab.ask("A chat that is kept near.")
    chat = tab.chat
    expect(ready).to_have_text("ready: 0.1 s")
    until(tab, lambda: asked.warmed == [chat])
    tab.new_chat()
    expect(ready).to_be_hidden()
    asked.seconds = 12.6
    tab.row("A chat that is kept near.").locator("a").click()
    expect(ready).to_have_text("ready: 13 s")
    until(tab, lambda: asked.warmed == [chat, chat])
    tab.page.reload()
    tab.wait_usable()
    expect(ready).to_have_text("ready: 13 s")
    until(tab, lambda: len(asked.warmed) >= 3 and set(asked.warmed) == {chat})
    asked.seconds = None
    tab.page.reload()
    tab.wait_usable()
    expect(tab.users).to_have_count(1)
    expect(ready).to_be_hidden()


def test_leaving_a_chat_or_sending_in_it_ends_what_is_still_on_its_way(tab: ChatDriver, asked: Asked) -> None:
    tab.be_steady()
    asked.hold = True
    failed: list[str] = []
    tab.page.on("requestfailed", lambda request: request.url.endswith("/page/warm") and failed.append("warm"))
    tab.limit_replies(4)
    tab.ask("A chat that is left.")
    until(tab, lambda: len(asked.held) == 1)
    assert failed == []
    tab.new_chat()
    until(tab, lambda: failed == ["warm"])
    tab.row("A chat that is left.").locator("a").click()
    expect(tab.page.locator("#kw-ready")).to_have_text("ready: 0.1 s")
    tab.limit_replies(None)
    tab.send(LONG)
    tab.wait_text_grows(5)
    expect(tab.page.locator("#kw-ready")).to_be_hidden()
    until(tab, lambda: failed == ["warm", "warm"])
    tab.stop()


def test_writing_after_a_pause_is_a_sign_once(tab: ChatDriver, asked: Asked) -> None:
    tab.limit_replies(4)
    tab.ask("A chat to be written in.")
    expect(tab.page.locator("#kw-ready")).to_be_visible()
    until(tab, lambda: len(asked.warmed) == 1)
    tab.box.press_sequentially("soon")
    assert len(asked.warmed) == 1  # it was opened a moment ago
    tab.evaluate("() => { const now = Date.now; Date.now = () => now() + 31000; }")
    tab.box.press_sequentially(" more")
    until(tab, lambda: len(asked.warmed) == 2)
    tab.page.wait_for_timeout(200)
    assert len(asked.warmed) == 2, "and no more often"


def test_the_return_of_recent_chats_is_told_quietly(tab: ChatDriver) -> None:
    def state(route: Route) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, json={**answer.json(), "warming": {"done": 3, "total": 20}})

    tab.page.route("**/page/state?*", state)
    expect(tab.status).to_have_text("Bringing back recent chats: 3 of 20")
    expect(tab.send_button).to_have_attribute("title", "Write a message first")
    tab.page.unroute("**/page/state?*")
    expect(tab.status).to_be_hidden()
