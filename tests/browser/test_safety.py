"""What is written in a chat is read, never run; the page looks after itself on small and dark screens."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from storage import Store
from tests.browser.driver import ChatDriver
from tests.browser.server import Server

CANARY = (
    '<img src=x onerror="window.pwned=1"> <script>window.pwned=2</script> <svg onload="window.pwned=3"></svg>'
    " [link](javascript:window.pwned=4) ![image](https://elsewhere.example/pixel.png)"
)
HOSTILE = f"{CANARY}\n\n```html\n{CANARY}\n```\n\n| {CANARY.replace('|', '')} |\n|---|\n| `{CANARY}` |\n"

CONTRAST = """() => {
  const channel = c => (c /= 255, c <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4);
  const parse = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => .2126 * channel(r) + .7152 * channel(g) + .0722 * channel(b);
  const ground = node => {
    for (; node; node = node.parentElement) {
      const [r, g, b, a = 1] = parse(getComputedStyle(node).backgroundColor);
      if (a === 1) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const poor = [];
  const ratio = (color, node) => {
    const [a, b] = [light(parse(color)), light(ground(node))].sort((x, y) => y - x);
    return (a + .05) / (b + .05);
  };
  for (const node of document.querySelectorAll('#kw-app :placeholder-shown')) {
    const found = ratio(getComputedStyle(node, '::placeholder').color, node);
    if (node.offsetParent && found < 4.5) poor.push(`placeholder "${node.placeholder}" ${found.toFixed(2)}`);
  }
  for (const node of document.querySelectorAll('#kw-app *')) {
    const own = [...node.childNodes].some(child => child.nodeType === 3 && child.textContent.trim());
    const box = node.getBoundingClientRect();
    if (!own || !box.width || !box.height || getComputedStyle(node).visibility === 'hidden') continue;
    if (node.closest('[aria-disabled=true], .kw-tools')) continue;
    const found = ratio(getComputedStyle(node).color, node);
    const what = `${node.tagName}.${node.className} "${node.textContent.trim().slice(0, 30)}"`;
    if (found < 4.5) poor.push(`${what} ${found.toFixed(2)}`);
  }
  return poor;
}"""


async def _seed(server: Server) -> str:
    """A chat whose reply is hostile, written straight to the database of a server that does not run yet."""
    store = await Store.open(server.data_dir)
    try:
        user = await store.implicit_admin()
        session = await store.create_session(user.id, title=CANARY, system_prompt=CANARY)
        parent = None
        for role, text in (("user", HOSTILE), ("assistant", HOSTILE)):
            message = await store.add_message(
                session.id, parent_id=parent, role=role, text=text, token_ids=(1,), tokenizer="none"
            )
            parent = message.id
        return session.id
    finally:
        await store.close()


def test_markup_in_messages_titles_and_prompts_does_nothing(
    context: BrowserContext, own_server: Server, tiny_model: Path
) -> None:
    with ThreadPoolExecutor() as elsewhere:  # the browser's loop holds this thread
        chat = elsewhere.submit(asyncio.run, _seed(own_server)).result()
    own_server.flags("--model", str(tiny_model)).start().wait_for_page()
    tab = ChatDriver(context.new_page(), own_server.url).open(chat)
    expect(tab.users).to_have_text(HOSTILE, use_inner_text=True)
    expect(tab.replies).to_contain_text('<img src=x onerror="window.pwned=1">')
    expect(tab.page.locator("#kw-header h1")).to_have_text(CANARY)
    tab.open_settings()
    expect(tab.page.get_by_label("System prompt")).to_have_value(CANARY)
    live_parts = ":is(img, script, iframe, [onerror], [onload], [href^='javascript'])"
    for inside in ("#kw-scroll", "#kw-chats", "#kw-header"):
        expect(tab.page.locator(f"{inside} {live_parts}")).to_have_count(0)
    assert tab.evaluate("window.pwned") is None


def test_every_answer_forbids_what_comes_from_elsewhere(tab: ChatDriver) -> None:
    answer = tab.page.request.get(tab.url)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "connect-src 'self'" in policy
    refused = tab.evaluate("fetch('https://elsewhere.example/').then(() => 'went out', () => 'refused')")
    assert refused == "refused"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_is_readable_and_fits(browser, server: Server, scheme: str, width: int) -> None:  # type: ignore[no-untyped-def]
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    tab = ChatDriver(context.new_page(), server.url).open()
    tab.limit_replies(30)
    check_page(tab.page)
    long_word = "a" * 400
    tab.ask(f"Repeat this word: {long_word}")
    tab.open_settings()
    check_page(tab.page)
    background = tab.evaluate("getComputedStyle(document.querySelector('.gradio-container')).backgroundColor")
    assert background == {"light": "rgb(253, 251, 248)", "dark": "rgb(25, 23, 21)"}[scheme]
    expect(tab.page.locator("footer")).to_be_hidden()
    context.close()


def check_page(page: Page) -> None:
    """Nothing sticks out sideways, and every text stands out from its ground (WCAG AA, 4.5 to 1)."""
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("(a => a.scrollWidth <= a.clientWidth)(document.querySelector('#kw-scroll'))")
    assert page.evaluate(CONTRAST) == []


@pytest.mark.parametrize("width", [780, 900, 1060])
def test_in_a_middling_window_everything_has_its_place(browser, server: Server, width: int) -> None:  # type: ignore[no-untyped-def]
    context = browser.new_context(viewport={"width": width, "height": 800})
    tab = ChatDriver(context.new_page(), server.url).open()
    edges = "(id => (box => [box.left, box.right])(document.querySelector(id).getBoundingClientRect()))"
    assert tab.evaluate(f"{edges}('#kw-entry')") == tab.evaluate(f"{edges}('#kw-transcript')")
    tab.open_settings()
    left, right = tab.evaluate(f"{edges}('#kw-settings')")
    assert (right - left, right) == (21 * 16, width)
    tab.page.keyboard.press("Escape")
    expect(tab.page.locator("#kw-settings")).to_be_hidden()
    context.close()


def test_on_a_phone_the_list_opens_and_closes_again(browser, server: Server) -> None:  # type: ignore[no-untyped-def]
    context = browser.new_context(viewport={"width": 390, "height": 800}, has_touch=True, is_mobile=True)
    tab = ChatDriver(context.new_page(), server.url).open()
    expect(tab.page.locator("#kw-side")).to_be_hidden()
    tab.page.get_by_role("button", name="Show the list of chats").click()
    expect(tab.page.locator("#kw-new")).to_be_visible()
    tab.page.locator("#kw-new").click()
    expect(tab.page.locator("#kw-side")).to_be_hidden()
    expect(tab.box).not_to_be_focused()  # that would bring up a keyboard
    tab.limit_replies(4)
    tab.ask("Hello?")
    tab.open_settings()
    tab.page.get_by_label("Set here").check()
    small = tab.evaluate(
        """() => [...document.querySelectorAll('#kw-app :is(button, a), #kw-mode label')]
          .filter(node => node.offsetParent && !node.closest('.kw-text'))
          .map(node => [node.outerHTML.slice(0, 90), node.getBoundingClientRect().height])
          .filter(([, height]) => height && height < 36)"""
    )
    assert small == []
    context.close()


def test_the_keyboard_reaches_everything_and_everything_has_a_name(tab: ChatDriver) -> None:
    nameless = tab.evaluate(
        """() => [...document.querySelectorAll('#kw-app :is(button, a, input, textarea)')]
          .filter(node => node.offsetParent && !node.textContent.trim() && !node.ariaLabel && !node.labels?.length
                          && !node.getAttribute('placeholder'))
          .map(node => node.outerHTML.slice(0, 120))"""
    )
    assert nameless == []
    tab.page.locator(".kw-brand").focus()
    reached: list[str] = []
    stops = 3 * tab.page.locator("#kw-chats li").count() + 20  # a chat, and its two tools, are three
    while "kw-send" not in reached and len(reached) < stops:
        tab.page.keyboard.press("Tab")
        reached.append(tab.evaluate("document.activeElement.closest('[id^=kw-]')?.id || ''"))
    order = [reached.index(name) for name in ("kw-new", "kw-header", "kw-box", "kw-send") if name in reached]
    assert len(order) == 4 and order == sorted(order), reached


def test_a_chat_needs_nothing_of_gradios_queue_and_every_request_is_answered(
    context: BrowserContext, tab: ChatDriver
) -> None:
    asked: list[str] = []
    refused: list[str] = []
    context.on("request", lambda request: asked.append(request.url))
    context.on("response", lambda answer: None if answer.ok else refused.append(f"{answer.status} {answer.url}"))
    tab.page.reload()
    tab.wait_usable()
    tab.limit_replies(4)
    tab.ask("Hello?")
    assert any("/gradio_api/run/" in url for url in asked)
    assert not [url for url in asked if "/gradio_api/queue" in url or "/gradio_api/call" in url]
    assert refused == []
