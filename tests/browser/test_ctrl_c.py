"""Ctrl-C under a real tab: a tab holds streams open for as long as it lives, and must not keep the server."""

from __future__ import annotations

import time

from playwright.sync_api import BrowserContext, expect

from tests.browser.driver import ChatDriver
from tests.browser.server import Server


def test_ctrl_c_ends_the_server_in_time_and_keeps_what_was_written(context: BrowserContext, own_server: Server) -> None:
    own_server.start().wait_for_page().wait_until_ready()
    tab = ChatDriver(context.new_page(), own_server.url).open()
    tab.send("Tell me a very long story about a ship and the sea.")
    early = tab.wait_text_grows(20)
    begun = time.monotonic()
    own_server.stop()
    assert time.monotonic() - begun < 10  # a tab that kept it would keep it for ever
    assert own_server.output().splitlines()[-1] == "Ending; everything so far is kept."
    own_server.start().wait_for_page().wait_until_ready()
    expect(tab.status).to_be_hidden(timeout=60_000)
    expect(tab.notices).to_contain_text("interrupted")
    assert tab.replies.last.locator(".kw-text").inner_text().startswith(early)
