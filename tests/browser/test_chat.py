"""A person chats: replies stream, a second turn is warm, Stop keeps the text, tabs and chats are not mixed up."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.browser.driver import COUNT, LONG, ChatDriver


def test_a_new_chat_streams_its_reply_and_says_what_it_cost(tab: ChatDriver) -> None:
    expect(tab.page.locator(".kw-empty h2")).to_be_visible()
    tab.limit_replies(60)
    tab.send("Name the seasons, one per line, each with a sentence about it.")
    early = tab.wait_text_grows()
    later = tab.wait_text_grows(len(early))
    final = tab.wait_reply()
    assert len(early) < len(later) <= len(final) + 1
    figures = tab.figures()
    assert figures.reused + figures.read == figures.prompt
    assert figures.output > 5
    assert tab.chat, "the address names the chat"
    row = tab.row("Name the seasons, one per line, each with a sentence about…")
    expect(row.locator("a")).to_have_attribute("aria-current", "page")
    expect(tab.page).to_have_title(re.compile(r"^Name the seasons.* · Keepwarm$"))


def test_the_second_turn_does_not_read_the_first_again(tab: ChatDriver) -> None:
    tab.limit_replies(24)
    tab.ask("Write one sentence about the sea.")
    first = tab.figures()
    tab.ask("And one about the mountains.")
    second = tab.figures()
    assert second.reused >= first.prompt + first.output - 1  # the token sampled last was never read
    assert second.read < first.prompt + second.output


def test_stop_ends_the_reply_and_keeps_its_text(tab: ChatDriver) -> None:
    tab.be_steady()
    tab.send(LONG)
    early = tab.wait_text_grows(20)
    tab.stop()
    kept = tab.wait_reply()
    assert kept.startswith(early.rstrip()[:20])
    expect(tab.notices).to_have_text(re.compile("You stopped this reply"))
    tab.page.reload()
    tab.wait_usable()
    expect(tab.replies.last.locator(".kw-text")).to_have_text(kept, use_inner_text=True)
    tab.be_steady()
    tab.limit_replies(12)
    tab.page.get_by_role("button", name="Retry").click()
    expect(tab.notices.filter(has_text="stopped")).to_have_count(0)
    tab.wait_reply()
    assert tab.figures().output == 12
    expect(tab.users).to_have_count(1)


def test_a_reply_that_hit_its_limit_says_so(tab: ChatDriver) -> None:
    tab.be_steady()
    tab.limit_replies(8)
    tab.ask(LONG)
    expect(tab.notices).to_have_text(re.compile("limit"))
    assert tab.figures().output == 8


def test_a_reload_and_a_second_tab_join_the_running_reply(tab: ChatDriver, second_tab: ChatDriver) -> None:
    tab.be_steady()
    tab.send(LONG)
    before = tab.wait_text_grows(10)
    tab.page.reload()
    after = tab.wait_text_grows(len(before))
    assert after.startswith(before[:10])
    second_tab.open(tab.chat)
    beside = second_tab.wait_text_grows(len(after))
    assert beside.startswith(before[:10])
    second_tab.stop()
    assert tab.wait_reply() == second_tab.wait_reply()


def test_a_reply_begun_in_another_tab_appears_by_itself(tab: ChatDriver, second_tab: ChatDriver) -> None:
    tab.be_steady()
    tab.limit_replies(8)
    tab.ask("Say one word.")
    second_tab.open(tab.chat)
    tab.limit_replies(None)
    tab.send(LONG)
    second_tab.wait_text_grows(10)
    expect(second_tab.users).to_have_count(2)
    tab.stop()
    assert second_tab.wait_reply() == tab.wait_reply()


def test_two_chats_that_are_written_at_once_are_not_mixed(tab: ChatDriver) -> None:
    tab.be_steady()
    tab.send(COUNT)
    numbers = tab.wait_text_grows(5)
    first = tab.chat
    tab.new_chat()
    tab.send(LONG)
    story = tab.wait_text_grows(20)
    second = tab.chat
    assert first != second
    for chat, beginning in ((first, numbers), (second, story)) * 3:
        tab.page.locator(f"#kw-chats a[data-chat='{chat}']").click()
        text = tab.wait_text_grows(len(beginning) - 1)
        assert text.startswith(beginning[:5]), "the text of the other chat"
        expect(tab.users).to_have_count(1)
    expect(tab.page.locator("#kw-chats .kw-typing")).to_have_count(2)
    for chat in (first, second):
        tab.page.locator(f"#kw-chats a[data-chat='{chat}']").click()
        expect(tab.stop_button).to_be_visible()
        tab.stop()
    expect(tab.page.locator("#kw-chats .kw-typing")).to_have_count(0)


def test_back_and_forward_walk_through_the_chats(tab: ChatDriver) -> None:
    tab.limit_replies(6)
    tab.ask("Say yes.")
    first = tab.chat
    tab.new_chat()
    tab.ask("Say no.")
    second = tab.chat
    tab.page.go_back()
    expect(tab.users).to_have_text("Say yes.")
    assert tab.chat == first
    tab.page.go_forward()
    expect(tab.users).to_have_text("Say no.")
    assert tab.chat == second


@pytest.mark.parametrize("how", ["double click", "two enters"])
def test_a_message_is_sent_once(tab: ChatDriver, how: str) -> None:
    tab.limit_replies(6)
    chats = tab.page.locator("#kw-chats li").count()
    tab.box.fill("Say hello once.")
    expect(tab.send_button).to_have_attribute("aria-disabled", "false")
    if how == "double click":
        tab.send_button.dblclick()
    else:
        tab.box.press("Enter")
        tab.box.press("Enter")
    tab.page.wait_for_selector(".kw-user")
    tab.wait_reply()
    expect(tab.users).to_have_count(1)
    expect(tab.page.locator("#kw-chats li")).to_have_count(chats + 1)
