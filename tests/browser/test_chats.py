"""The list of chats and a chat's own settings: rename, delete, the system prompt, sampling."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.browser.driver import LONG, ChatDriver


def test_a_chat_is_renamed(tab: ChatDriver) -> None:
    tab.limit_replies(4)
    tab.ask("A chat to be renamed.")
    row = tab.row("A chat to be renamed.")
    row.hover()
    row.locator("[data-act=rename]").click()
    name = tab.page.get_by_label("Name of the chat")
    name.fill("  Better <b>name</b> ")
    name.press("Enter")
    expect(tab.page.locator("#kw-header h1")).to_have_text("Better <b>name</b>")
    expect(tab.row("Better <b>name</b>")).to_have_count(1)
    tab.page.reload()
    tab.wait_usable()
    expect(tab.page.locator("#kw-header h1")).to_have_text("Better <b>name</b>")


def test_a_chat_is_deleted_only_after_a_confirmation(tab: ChatDriver) -> None:
    tab.limit_replies(4)
    tab.ask("A chat to be deleted.")
    chat = tab.chat
    row = tab.row("A chat to be deleted.")
    row.hover()
    row.locator("[data-act=remove]").click()
    dialog = tab.page.get_by_role("dialog")
    expect(dialog).to_contain_text("Delete “A chat to be deleted.”?")
    dialog.get_by_role("button", name="Keep").click()
    expect(dialog).to_have_count(0)
    expect(row).to_have_count(1)
    row.hover()
    row.locator("[data-act=remove]").click()
    dialog.get_by_role("button", name="Delete").click()
    expect(row).to_have_count(0)
    expect(tab.page.locator(".kw-empty")).to_be_visible()
    tab.open(chat)
    expect(tab.notices).to_contain_text("There is no chat")
    expect(tab.page.locator(".kw-empty")).to_be_visible()
    expect(row).to_have_count(0)


def test_a_chat_is_deleted_while_its_reply_is_written(tab: ChatDriver) -> None:
    tab.be_steady()
    tab.send(LONG)
    tab.wait_text_grows(5)
    row = tab.page.locator(f"#kw-chats li[data-chat='{tab.chat}']")
    row.hover()
    row.locator("[data-act=remove]").click()
    tab.page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(row).to_have_count(0)
    expect(tab.page.locator(".kw-empty")).to_be_visible()
    tab.limit_replies(4)
    tab.ask("Still there?")


def test_a_system_prompt_belongs_to_the_chat_it_started(tab: ChatDriver) -> None:
    prompt = tab.page.get_by_label("System prompt")
    expect(prompt).to_be_hidden()
    tab.limit_replies(4)
    tab.ask("Without a prompt.")
    without = tab.figures().prompt
    tab.new_chat()
    tab.open_settings()
    prompt.fill("You are the keeper of a lighthouse.\nAnswer in rhymes, always, and mention the lamp.")
    tab.ask("Without a prompt.")
    assert tab.figures().prompt != without
    tab.page.get_by_role("button", name="Close settings").click()
    tab.row("Without a prompt.").last.locator("a").click()
    tab.open_settings()
    expect(tab.page.get_by_text("uses the model's own default")).to_be_visible()
    expect(tab.page.get_by_role("button", name="New chat with this prompt")).to_be_hidden()
    tab.row("Without a prompt.").first.locator("a").click()
    expect(prompt).to_have_js_property("readOnly", True)
    expect(tab.page.locator("#kw-prompt-fixed")).to_be_visible()
    tab.page.reload()
    tab.wait_usable()
    tab.open_settings()
    expect(prompt).to_have_value("You are the keeper of a lighthouse.\nAnswer in rhymes, always, and mention the lamp.")
    expect(prompt).to_have_js_property("readOnly", True)
    tab.page.get_by_role("button", name="New chat with this prompt").click()
    expect(prompt).to_have_js_property("readOnly", False)
    expect(prompt).to_have_value("You are the keeper of a lighthouse.\nAnswer in rhymes, always, and mention the lamp.")
    tab.new_chat()
    expect(prompt).to_have_value("")


def test_what_was_set_is_kept_over_a_reload(tab: ChatDriver) -> None:
    prompt = tab.page.get_by_label("System prompt")
    tab.be_steady()
    tab.limit_replies(5)
    tab.open_settings()
    tab.page.get_by_label("Seed").fill("11")
    prompt.fill("Rhyme.")
    tab.page.reload()
    tab.wait_usable()
    tab.open_settings()
    expect(prompt).to_have_value("Rhyme.")
    expect(tab.page.get_by_label("Longest reply, in tokens")).to_have_value("5")
    expect(tab.page.get_by_label("number input for Temperature")).to_have_value("0")
    expect(tab.page.get_by_label("Seed")).to_have_value("11")
    tab.ask(LONG)
    assert tab.figures().output == 5
    expect(prompt).to_have_value("Rhyme.")
    tab.new_chat()
    expect(prompt).to_have_value("")
    prompt.fill("Sing.")
    tab.page.go_back()
    expect(prompt).to_have_value("Rhyme.")
    tab.new_chat()
    expect(prompt).to_have_value("Sing.")


def test_sampling_can_be_set(tab: ChatDriver) -> None:
    tab.limit_replies(12)
    tab.open_settings()
    tab.page.get_by_label("Set here").check()
    tab.page.get_by_label("number input for Temperature").fill("2")
    tab.page.get_by_label("Seed").fill("7")
    replies = []
    for _ in range(3):  # the first one reads what the others find in the cache, which rounds otherwise in bfloat16
        tab.new_chat()
        replies.append(tab.ask("Write a line of a poem."))
    assert replies[1] == replies[2], "the same seed draws the same words"
    tab.page.get_by_label("Seed").fill("8")
    tab.new_chat()
    assert tab.ask("Write a line of a poem.") != replies[1]
