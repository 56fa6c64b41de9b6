"""The message box: Enter sends, Shift+Enter and an input method's Enter do not, and what was typed is never lost."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.browser.driver import LONG, ChatDriver


def test_shift_enter_is_a_new_line_and_white_space_is_shown_as_typed(tab: ChatDriver) -> None:
    tab.limit_replies(4)
    tab.box.press_sequentially("one")
    tab.box.press("Shift+Enter")
    tab.box.press("Shift+Enter")
    tab.box.press_sequentially("  two   spaces")
    expect(tab.box).to_have_value("one\n\n  two   spaces")
    expect(tab.users).to_have_count(0)
    tab.box.press("Enter")
    expect(tab.users).to_have_count(1)
    assert tab.users.inner_text() == "one\n\n  two   spaces"
    expect(tab.box).to_have_value("")
    tab.wait_reply()


def test_enter_while_an_input_method_composes_does_not_send(tab: ChatDriver) -> None:
    tab.limit_replies(4)
    tab.box.focus()
    devtools = tab.page.context.new_cdp_session(tab.page)
    devtools.send("Input.imeSetComposition", {"text": "にほん", "selectionStart": 3, "selectionEnd": 3})
    expect(tab.box).to_have_value("にほん")
    expect(tab.send_button).to_have_attribute("aria-disabled", "false")
    composing = {"key": "Enter", "code": "Enter", "bubbles": True, "cancelable": True}
    for extra in ({"isComposing": True}, {"keyCode": 229}):
        tab.box.dispatch_event("keydown", {**composing, **extra})
    devtools.send("Input.insertText", {"text": "日本"})
    expect(tab.box).to_have_value("日本")
    expect(tab.users).to_have_count(0)
    tab.box.press("Enter")
    expect(tab.users).to_have_text("日本")
    tab.wait_reply()


def test_an_empty_message_is_not_sent(tab: ChatDriver) -> None:
    for text in ("", "   \n "):
        tab.box.fill(text)
        tab.box.press("Enter")
        expect(tab.send_button).to_have_attribute("aria-disabled", "true")
    expect(tab.send_button).to_have_attribute("title", "Write a message first")
    expect(tab.users).to_have_count(0)
    assert tab.chat == ""


def test_a_message_that_does_not_fit_stays_in_its_box_with_the_numbers(tab: ChatDriver) -> None:
    text = "warm " * 9000
    chats = tab.page.locator("#kw-chats li").count()
    tab.box.fill(text)
    tab.box.press("Enter")
    expect(tab.notices).to_contain_text("context holds 8,192")
    expect(tab.box).to_have_value(text)
    expect(tab.users).to_have_count(0)
    tab.limit_replies(4)
    tab.ask("Short now.")
    expect(tab.notices.filter(has_text="8,192")).to_have_count(0)
    expect(tab.page.locator("#kw-chats li")).to_have_count(chats + 1)


def test_a_setting_that_is_no_number_is_named_and_nothing_is_lost(tab: ChatDriver) -> None:
    tab.open_settings()
    tab.page.get_by_label("Longest reply, in tokens").fill("many")
    tab.box.fill("Hello")
    tab.box.press("Enter")
    expect(tab.notices).to_contain_text("Longest reply in the settings is “many”")
    expect(tab.box).to_have_value("Hello")


def test_each_chat_keeps_its_draft_also_over_a_reload(tab: ChatDriver) -> None:
    tab.limit_replies(4)
    tab.ask("Say hi.")
    chat = tab.chat
    tab.box.fill("half a thought")
    tab.new_chat()
    expect(tab.box).to_have_value("")
    tab.box.fill("another thought")
    tab.page.locator(f"#kw-chats a[data-chat='{chat}']").click()
    expect(tab.box).to_have_value("half a thought")
    tab.page.reload()
    tab.wait_usable()
    expect(tab.box).to_have_value("half a thought")
    expect(tab.users).to_have_text("Say hi.")
    tab.new_chat()
    expect(tab.box).to_have_value("another thought")


def test_an_example_is_sent_with_one_click(tab: ChatDriver) -> None:
    tab.limit_replies(4)
    example = tab.page.locator(".kw-example").first
    text = example.get_attribute("data-text")
    expect(tab.send_button).to_have_attribute("title", "Write a message first")
    example.click()
    expect(tab.users).to_have_text(text or "?")
    expect(tab.box).to_be_focused()
    tab.wait_reply()


def test_one_can_write_at_once_also_after_stop(tab: ChatDriver) -> None:
    expect(tab.box).to_be_focused()
    tab.be_steady()
    tab.send(LONG)
    tab.wait_text_grows(5)
    tab.stop()
    expect(tab.box).to_be_focused()
