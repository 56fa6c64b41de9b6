"""The chat page as a person uses it: what can be clicked and what can be read, in the page's own words."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from playwright.sync_api import Locator, Page, expect

# With `be_steady`, the embedded model answers these for hundreds of tokens.
LONG = "Tell me a very long story about a lighthouse keeper and her cat. Take your time."
COUNT = "Count upwards in digits from 1 to 300, with commas between, and nothing else."
REPLY_MS = 60_000
FIGURES = re.compile(
    r"^([\d,]+) tokens reused(?: \([^)]*\))? · ([\d,]+) read · (\d+\.\d\d) s to first token(?: · ([\d,.]+) tok/s)?$"
)
HINT = re.compile(r"Of ([\d,]+) prompt tokens, .*the reply has ([\d,]+) tokens\.")


@dataclass(frozen=True)
class Figures:
    """The line under a reply; `prompt` and `output` come from its tooltip."""

    reused: int
    read: int
    first_token_s: float
    prompt: int
    output: int


class ChatDriver:
    """One tab."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url

    def open(self, chat: str = "") -> ChatDriver:
        """Load the page (at a chat) and wait until it can be used."""
        self.page.goto(self.url + (f"?chat={chat}" if chat else ""))
        self.wait_usable()
        return self

    def wait_usable(self) -> None:
        """The page has drawn a chat and asked the server for its state."""
        expect(self.page.locator("#kw-header h1")).to_be_visible(timeout=30_000)
        expect(self.page.locator("#kw-chats > *").first).to_be_attached(timeout=30_000)

    # --- what is there

    @property
    def box(self) -> Locator:
        return self.page.get_by_label("Message", exact=True)

    @property
    def send_button(self) -> Locator:
        return self.page.get_by_role("button", name="Send", exact=True)

    @property
    def stop_button(self) -> Locator:
        return self.page.get_by_role("button", name="Stop", exact=True)

    @property
    def users(self) -> Locator:
        return self.page.locator(".kw-user .kw-typed")

    @property
    def replies(self) -> Locator:
        return self.page.locator(".kw-reply")

    @property
    def growing(self) -> Locator:
        return self.page.locator("#kw-live .kw-growing")

    @property
    def notices(self) -> Locator:
        return self.page.locator(".kw-notice")

    @property
    def status(self) -> Locator:
        return self.page.locator("#kw-status")

    def row(self, title: str) -> Locator:
        return self.page.locator("#kw-chats li", has=self.page.get_by_text(title, exact=True))

    @property
    def chat(self) -> str:
        """The id in the address."""
        return str(self.page.evaluate("new URL(location.href).searchParams.get('chat') || ''"))

    # --- what can be done

    def new_chat(self) -> None:
        self.page.locator("#kw-new").click()
        expect(self.page.locator(".kw-empty")).to_be_visible()

    def send(self, text: str) -> None:
        """Write `text` and press Enter; returns when the message stands in the chat."""
        before = self.users.count()
        self.box.fill(text)
        expect(self.send_button).to_have_attribute("aria-disabled", "false", timeout=REPLY_MS)
        self.box.press("Enter")
        expect(self.users).to_have_count(before + 1, timeout=REPLY_MS)

    def wait_reply(self) -> str:
        """Wait until no reply is being written; the answer of the last one."""
        expect(self.send_button).to_be_visible(timeout=REPLY_MS)
        expect(self.page.locator("#kw-live .kw-reply")).to_have_count(0)
        return self.replies.last.locator("> .kw-text").inner_text()

    def ask(self, text: str) -> str:
        """Send `text` and wait for the whole reply."""
        self.send(text)
        return self.wait_reply()

    def stop(self) -> None:
        self.stop_button.click()
        expect(self.send_button).to_be_visible(timeout=REPLY_MS)

    def open_settings(self) -> None:
        if not self.page.locator("#kw-settings").is_visible():
            self.page.locator("#kw-header").get_by_role("button", name="Settings").click()
        expect(self.page.locator("#kw-settings")).to_be_visible()

    def limit_replies(self, tokens: int | None) -> None:
        """Set the longest reply in the settings area."""
        self.open_settings()
        self.page.get_by_label("Longest reply, in tokens").fill("" if tokens is None else str(tokens))
        self.page.get_by_role("button", name="Close settings").click()

    def be_steady(self) -> None:
        """Choose the likeliest token always, so that the same question gets the same reply."""
        self.open_settings()
        self.page.get_by_label("Set here").check()
        self.page.get_by_label("number input for Temperature").fill("0")
        self.page.get_by_role("button", name="Close settings").click()

    def figures(self) -> Figures:
        """The figures under the last reply."""
        line = self.replies.last.locator(".kw-figures")
        expect(line).to_be_visible()
        shown, hint = FIGURES.match(line.inner_text()), HINT.match(line.get_attribute("title") or "")
        assert shown, line.inner_text()
        assert hint, line.get_attribute("title")
        count = lambda text: int(text.replace(",", ""))  # noqa: E731
        return Figures(count(shown[1]), count(shown[2]), float(shown[3]), count(hint[1]), count(hint[2]))

    def wait_text_grows(self, longer_than: int = 0) -> str:
        """Wait until the reply being written has more than `longer_than` characters; its text then."""
        self.page.wait_for_function(
            "n => (document.querySelector('#kw-live .kw-growing')?.innerText.length ?? 0) > n",
            arg=longer_than, timeout=REPLY_MS,
        )  # fmt: skip
        return self.growing.inner_text()

    def evaluate(self, expression: str, argument: Any = None) -> Any:
        return self.page.evaluate(expression, argument)
