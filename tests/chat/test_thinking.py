"""Reasoning told from answers: as text grows, in what is sent again, on the API, and whichever policy holds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import openai
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chat.service import ChatService
from chat.streaming import ReplyText
from chat.templates import ChatTemplate, Entry
from chat.thinking import KNOWN, STORED, Marks, Policy, Splitter, Trimmer, Writer, find_marks, reasoning_tokens
from storage.reasoning import split_reply
from tests.chat import model_files as files
from tests.chat.fake_engine import END, FakeEngine
from tests.chat.serving import serving

CHANNELS = KNOWN[2]
PARTS = st.lists(
    st.sampled_from(["<think>", "</think>", "<thi", "nk>", "</", "think>", " ", "\n", "a", "b c", "<", "é"]), max_size=9
).map("".join)
CUTS = st.lists(st.integers(1, 40), max_size=6)


def cut(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    return [text[a:b] for a, b in pairwise(edges)]


def told(pieces: list[str], marks: Marks, *, opened: bool = False, trimmed: bool = False) -> dict[str, str]:
    splitter, trimmer = Splitter(marks, opened=opened), Trimmer()
    parts = {"reasoning": "", "answer": ""}
    for news in (*map(splitter.push, pieces), splitter.flush()):
        for part, text in trimmer.trim(news) if trimmed else news:
            parts[part] += text
    return parts


@settings(max_examples=300)
@given(text=PARTS, cuts=CUTS)
@example(text="<think>\n a </think> \n b", cuts=[3, 9, 10, 12, 20])
def test_growing_text_is_parted_and_trimmed_as_the_whole_is(text, cuts):
    parts = split_reply(text)
    assert told(cut(text, cuts), STORED, trimmed=True) == {"reasoning": parts.reasoning, "answer": parts.answer}


@settings(max_examples=200)
@given(text=PARTS, cuts=CUTS, opened=st.booleans())
def test_what_is_told_does_not_depend_on_how_the_text_is_cut(text, cuts, opened):
    assert told(cut(text, cuts), STORED, opened=opened) == told(list(text), STORED, opened=opened)


@pytest.mark.parametrize(
    ("text", "opened", "stored"),
    [
        (f"{CHANNELS.opening}hm{CHANNELS.closing}Yes.", False, "<think>hm</think>Yes."),
        ("<|channel|>final<|message|>Yes.", False, "Yes."),
        ("Yes.", False, "Yes."),
        ("<|channel|>analysis<|message|>hm", False, "<think>hm"),
        ("<|channel|>ana", False, "<|channel|>ana"),
        (f"hm{CHANNELS.closing}Yes.", True, "<think>hm</think>Yes."),
        ("", True, ""),
    ],
)
def test_a_models_own_marks_become_the_stored_ones(text, opened, stored):
    splitter, writer = Splitter(CHANNELS, opened=opened), Writer()
    written = "".join(writer.write(splitter.push(letter)) for letter in text) + writer.write(splitter.flush())
    assert written == stored


def test_which_marks_a_model_has():
    assert find_marks(["<s>", "</s>"], "{{ messages }}") is None
    assert find_marks(["<think>", "</think>"], "") == STORED
    assert find_marks(["<think>"], "") is None
    assert find_marks([], "m.content.split('</think>')[-1]") == STORED
    assert find_marks(["[THINK]", "[/THINK]"], "") == Marks("[THINK]", "[/THINK]")
    assert find_marks(["<|channel|>"], files.CHANNELS) == CHANNELS


@pytest.mark.parametrize(
    ("pieces", "opened", "count", "rest"),
    [
        ([], False, 0, ""),
        ([], True, 0, ""),
        (["a", "b"], False, 0, ""),
        (["a", "b"], True, 2, ""),
        (["a", "</think>", "b"], False, 0, ""),
        (["a", "</think>", "\n", " ", " b"], True, 4, ""),
        (["\n", "<think>", "a", "</think>", "\n\n", "b"], False, 5, ""),
        (["<", "think", ">a</", "think", ">(", "b"], False, 5, "("),
        (["<think>", "a", "</think>"], False, 3, ""),
        (["<think>", "a", "</think>", " b", "\n"], False, 3, ""),
        (["<think>", "a", "</think>", "b", "</think>", "c"], False, 3, ""),
    ],
)
def test_how_many_tokens_are_reasoning(pieces, opened, count, rest):
    assert reasoning_tokens(pieces, STORED, opened=opened) == (count, rest)


# --- whole turns ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def thinker(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded tokenizer with `<think>` and `</think>`, and a template that takes reasoning out of the history."""
    tokenizer = files.with_tokens(embedded_model / "tokenizer.json", plain=["<think>", "</think>"])
    return files.save(tmp_path_factory.mktemp("thinker"), tokenizer, files.STRIPPING)


THOUGHT = "<think>\nThey want a number, so let us see.\n</think>\n\nFour."


@pytest.fixture(params=["preserve", "strip"])
async def thinking(request, store, thinker) -> AsyncIterator[tuple[ChatService, FakeEngine, ChatTemplate, Policy]]:
    template = ChatTemplate.load(thinker)
    ids = template.tokenizer.encode(THOUGHT, add_special_tokens=False).ids
    engine = FakeEngine(thinker, lambda *_: [*ids, END])
    service = ChatService(store, engine, thinking=request.param)  # type: ignore[arg-type]
    await service.start()
    yield service, engine, template, request.param
    await service.close()


def expected_reuse(policy: str, before: list[int], written: int) -> int:
    """What the next turn reuses: all but the token sampled last, or everything before the reply."""
    return len(before) + written - 1 if policy == "preserve" else len(before)


async def test_reuse_over_turns_of_the_page(thinking, store):
    service, engine, template, policy = thinking
    chat = (await service.create_session(service.user.id)).id
    for turn in range(4):
        done = await (await service.send(service.user.id, chat, f"What is 2 + {turn}?")).finished()
        assert done.text == THOUGHT
        if turn:
            sent = engine.submits[turn - 1].token_ids
            assert done.figures.reused_tokens == expected_reuse(policy, sent, done.figures.output_tokens)
        path = await store.path(chat)
        assert template.decode(path[-1].token_ids) == path[-1].text == THOUGHT  # the ledger keeps all of it
    shown = await service.session(service.user.id, chat)
    assert shown.context_tokens == done.figures.prompt_tokens + done.figures.output_tokens  # as it was sent
    prompt = template.tokenizer.decode(engine.submits[-1].token_ids, skip_special_tokens=False)
    assert prompt.count("They want a number") == (3 if policy == "preserve" else 0)
    assert prompt.count("Four.<|im_end|>") == 3


async def test_reuse_over_requests_of_a_client_that_sends_answers_alone(thinking):
    service, engine, _, policy = thinking
    async with serving(service) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        history: list[dict[str, str]] = []
        for turn in range(3):
            history.append({"role": "user", "content": f"What is 2 + {turn}?"})
            answer = await client.chat.completions.create(model="default", messages=history)
            message = answer.choices[0].message
            assert message.content == "Four."
            assert message.reasoning_content == "They want a number, so let us see."
            assert answer.model_extra["keepwarm"]["matched_messages"] == 2 * turn
            if turn:
                sent = engine.submits[turn - 1].token_ids
                reused = answer.usage.prompt_tokens_details.cached_tokens
                assert reused == expected_reuse(policy, sent, answer.usage.completion_tokens)
            history.append({"role": "assistant", "content": message.content})
        assert (await client.models.retrieve("default")).model_extra["keepwarm"]["thinking"] == policy


async def test_reasoning_is_streamed_apart_from_the_answer(thinking):
    service, engine, *_ = thinking
    ask = {"model": "default", "messages": [{"role": "user", "content": "2 + 2"}], "stream": True}
    async with serving(service) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        deltas = [chunk.choices[0].delta async for chunk in await client.chat.completions.create(**ask)]
        assert "".join(delta.content or "" for delta in deltas) == "Four."
        reasoning = [delta.model_extra.get("reasoning_content", "") for delta in deltas]
        assert "".join(reasoning) == "They want a number, so let us see."
        assert len([text for text in reasoning if text]) > 3
        engine.tokens_until_death = 5
        with pytest.raises(openai.APIError, match="stopped unexpectedly"):
            async for chunk in await client.chat.completions.create(**ask):
                assert not chunk.choices[0].delta.content


async def test_ordinary_replies_have_no_field_more(url_of_ordinary):
    async with openai.AsyncOpenAI(base_url=f"{url_of_ordinary}/v1", api_key="none") as client:
        answer = await client.chat.completions.create(model="default", messages=[{"role": "user", "content": "hi"}])
        assert answer.choices[0].message.content == "Fine."
        assert "reasoning_content" not in answer.choices[0].message.model_extra
        assert (await client.models.retrieve("default")).model_extra["keepwarm"]["thinking"] is None


@pytest.fixture
async def url_of_ordinary(service: ChatService) -> AsyncIterator[str]:
    async with serving(service) as url:
        yield url


async def test_another_models_reasoning_is_no_text_of_a_chat(thinking, template):
    """A chat that goes on with a model of another tokenizer reads the answers alone."""
    service, *_ = thinking
    chat = (await service.create_session(service.user.id)).id
    await (await service.send(service.user.id, chat, "2 + 2")).finished()
    path = await service._store.path(chat)
    entries = [*(Entry(message.role, message.text) for message in path), Entry("user", "more")]
    text = template.tokenizer.decode(template.prompt(entries, template.fill(entries)), skip_special_tokens=False)
    assert "assistant\nFour.<|im_end|>" in text


def test_a_stop_string_counts_in_reasoning_too(thinker):
    template = ChatTemplate.load(thinker)
    reply = ReplyText(template, ("let us",), [END])
    reply.push(template.tokenizer.encode(THOUGHT, add_special_tokens=False).ids)
    assert reply.stopped
    assert reply.text == "<think>\nThey want a number, so "
    assert template.decode(reply.delivered_ids()) == reply.text
