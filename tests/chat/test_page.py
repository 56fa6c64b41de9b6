"""The page's values as a person types them, and what they are told when a value cannot be."""

from __future__ import annotations

import pytest

from chat.errors import InvalidRequest
from chat.page import MY_SAMPLING, OWN_SAMPLING, ChatPage, turn_options

MOST = 2**63 - 1


@pytest.mark.parametrize(
    ("text", "number"),
    [("", None), (" ", None), ("0", 0), (" 1,000 ", 1000), (str(MOST), MOST), ("0" * 5000 + "7", 7), ("0" * 5000, 0)],
)
def test_seeds(text, number):
    options = turn_options(MY_SAMPLING, 0.5, 0.9, text, "")
    assert options.sampling is not None
    assert (options.sampling.seed, options.max_tokens) == (number, None)
    assert turn_options(OWN_SAMPLING, 0.5, 0.9, text, "").sampling is None


@pytest.mark.parametrize("text", [str(MOST + 1), str(2**64), "9" * 20, "9" * 5000, "-1", "1.5", "٣", "²", "seven"])
def test_seeds_that_no_engine_can_take_are_named(text):
    with pytest.raises(InvalidRequest) as raised:
        turn_options(MY_SAMPLING, 0.5, 0.9, text, "")
    sentence = str(raised.value)
    assert sentence.startswith(f"Seed in the settings is “{text[:38]}")
    assert sentence.endswith("it takes a whole number from 0 to 9223372036854775807, or none.")
    assert len(sentence) < 160


@pytest.mark.parametrize("text", ["0", "9" * 5000, "-1"])
def test_lengths_that_no_reply_can_have_are_named(text):
    with pytest.raises(InvalidRequest, match=r"^Longest reply in the settings is “.*from 1 to 9223372036854775807"):
        turn_options(OWN_SAMPLING, 0.5, 0.9, "", text)


async def test_a_bad_seed_stores_nothing(service, store, engine):
    page = ChatPage(service)
    for chat in ("new-1", (await service.create_session(service.user.id)).id):
        notice = (await page._on_send(chat, "", "hi", "", MY_SAMPLING, 1.0, 1.0, "9" * 30, ""))[page._notice]
        assert "Seed in the settings" in notice["html"]
        assert notice["chat"] == chat
    assert await store.path(chat) == []
    assert len(await service.sessions(service.user.id)) == 1
    assert engine.submits == []


async def test_the_greatest_values_are_answered(service, engine):
    page = ChatPage(service)
    shown = await page._on_send("new-1", "", "hi", "", MY_SAMPLING, 1.0, 1.0, str(MOST), str(MOST))
    assert shown[page._notice]["sent"]
    assert engine.submits[0].sampling.seed == MOST
    assert engine.submits[0].max_tokens == engine.capabilities.context_length
