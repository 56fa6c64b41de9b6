"""Make the README's pictures with the real application: `python -m tests.browser.screenshots`.

It starts `app.py` on a data directory of its own, chats with the embedded model, and writes assets/screenshots/.
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, ViewportSize, sync_playwright

from engine.model.sources import EMBEDDED, prepare
from tests.browser.browsers import arguments, find_browser
from tests.browser.driver import ChatDriver
from tests.browser.server import ROOT, Server, new_data_dir

FOLDER = ROOT / "assets" / "screenshots"
QUESTIONS = (
    ("Write a Python function that checks whether a word is a palindrome.", 400),
    ("Give me three names for a small café by the sea.", 120),
    ("How do I keep a sourdough starter warm in winter?", 120),
)
FOLLOW_UP = ("What does the function return?", 200)


def main() -> None:
    """Chat a little, then take each picture."""
    path = find_browser()
    if path is None:
        raise SystemExit("no Chromium or Chrome found; TEST_BROWSER can name one")
    models = ROOT / ".cache" / "models"
    prepare(EMBEDDED, models, lambda *_: None)
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments())
        with Server(new_data_dir(Path(folder) / "data", models)) as server:
            server.wait_for_page().wait_until_ready()
            chat = converse(browser, server)
            take(browser, server, chat, "chat-light.png", {"width": 1200, "height": 760}, "light")
            take(browser, server, chat, "chat-dark.png", {"width": 1200, "height": 760}, "dark")
            take(browser, server, chat, "chat-phone.png", {"width": 390, "height": 760}, "light")
        browser.close()


def converse(browser: Browser, server: Server) -> str:
    """A few chats, the first of which has a second turn; the id of that one."""
    tab = ChatDriver(browser.new_page(), server.url).open()
    tab.be_steady()
    chat = ""
    for question, tokens in reversed(QUESTIONS):
        tab.new_chat()
        tab.limit_replies(tokens)
        tab.ask(question)
        chat = tab.chat
    tab.limit_replies(FOLLOW_UP[1])
    tab.ask(FOLLOW_UP[0])
    return chat


def take(browser: Browser, server: Server, chat: str, name: str, size: ViewportSize, scheme: str) -> None:
    """One picture, packed tightly."""
    page = browser.new_page(viewport=size, color_scheme=scheme)  # type: ignore[arg-type]
    ChatDriver(page, server.url).open(chat)
    page.locator(".kw-figures").last.wait_for()
    page.wait_for_timeout(500)
    Image.open(io.BytesIO(page.screenshot())).convert("RGB").save(FOLDER / name, optimize=True)
    page.close()


if __name__ == "__main__":
    main()
