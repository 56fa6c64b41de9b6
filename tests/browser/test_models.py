"""Choosing the model of a chat, and loading another one, without a restart."""

from __future__ import annotations

import re
from pathlib import Path

from playwright.sync_api import Page, expect

from tests.browser.driver import REPLY_MS, ChatDriver


def models(page: Page) -> None:
    page.locator("#kw-header .kw-model").click()
    expect(page.get_by_role("dialog", name="Model of this chat")).to_be_visible()


def load(page: Page, source: str) -> None:
    page.get_by_label("Load another model").fill(source)
    page.get_by_role("button", name="Load", exact=True).click()


def test_another_model_is_loaded_and_chosen_and_the_chat_remembers_it(tab: ChatDriver, tiny_model: Path) -> None:
    page = tab.page
    header = page.locator("#kw-header .kw-model")
    expect(header).to_have_text(re.compile("SmolLM2"), timeout=REPLY_MS)
    tab.be_steady()
    tab.limit_replies(6)
    tab.ask("Hello")
    models(page)
    load(page, str(tiny_model))
    expect(header).to_have_text("tiny-llama", timeout=REPLY_MS)
    tab.ask("And now?")
    page.reload()
    tab.wait_usable()
    expect(header).to_have_text("tiny-llama", timeout=REPLY_MS)
    assert tab.users.all_inner_texts() == ["Hello", "And now?"]
    models(page)
    page.get_by_role("button", name=re.compile("SmolLM2")).click()
    expect(header).to_have_text(re.compile("SmolLM2"))
    tab.ask("Back again")
    assert tab.figures().reused > 20, "its own cache is still there"
    models(page)
    page.get_by_role("button", name="Take tiny-llama from this list").click()
    expect(page.locator(".kw-model-row")).to_have_count(1)
    expect(page.locator(".kw-model-row[aria-pressed=true]")).to_have_count(1)


def test_a_new_chat_begins_with_the_model_that_was_chosen_for_it(tab: ChatDriver, tiny_model: Path) -> None:
    page = tab.page
    tab.limit_replies(4)
    tab.new_chat()
    models(page)
    load(page, str(tiny_model))
    header = page.locator("#kw-header .kw-model")
    expect(header).to_have_text("tiny-llama", timeout=REPLY_MS)
    tab.ask("Hello")
    assert tab.chat
    expect(header).to_have_text("tiny-llama")


def test_a_model_that_is_not_there_is_named_where_it_was_asked_for(tab: ChatDriver, tmp_path: Path) -> None:
    page = tab.page
    models(page)
    load(page, str(tmp_path / "nowhere"))
    expect(page.get_by_role("alert")).to_contain_text("nowhere", timeout=REPLY_MS)
    page.get_by_label("Load another model").fill("")
    page.get_by_role("button", name="Close", exact=True).click()
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_the_keyboard_alone_is_enough(tab: ChatDriver) -> None:
    page = tab.page
    page.locator("#kw-header .kw-model").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog", name="Model of this chat")).to_be_visible()
    expect(page.locator(".kw-model-row[aria-pressed=true]")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
