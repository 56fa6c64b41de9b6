"""Chats that go from one chat template to another of the same vocabulary: each model reads its own template alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx
import msgspec
import pytest

from chat.templates import ChatTemplate, Entry
from engine.protocol import Submit
from tests.chat import model_files as files
from tests.chat.fake_engine import END, FakeEngine
from tests.chat.serving import serving

WORDS = """{% for m in messages %}{{ m.role | upper }}: {{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}ASSISTANT: {% endif %}"""


@pytest.fixture
def words(engine: FakeEngine, embedded_model: Path, tmp_path: Path) -> ChatTemplate:
    """The embedded model's tokenizer under another template, as a model that the engine can load; it answers in odd
    tokens, which nobody would get by encoding the text.
    """
    folder = tmp_path / "words"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded_model / name, folder)
    (folder / "chat_template.jinja").write_text(WORDS)
    made = ChatTemplate.load(folder)
    engine.others = {
        "/models/words": msgspec.structs.replace(
            engine.capabilities, model_name="words", model_path=str(folder), fingerprint="e" * 16
        )
    }
    engine.script = lambda *_: odd(made)
    return made


def odd(template: ChatTemplate) -> list[int]:
    ids = [token for letter in "Fine." for token in template.encode_text(letter)]
    assert ids != template.encode_text("Fine.")
    return [*ids, END]


def fresh(template: ChatTemplate, *texts: str, system: str = "") -> str:
    """What the template makes of a chat in which every reply was "Fine."."""
    messages = [{"role": "system", "content": system}] if system else []
    for text in texts:
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": "Fine."}]
    return template._render(messages[:-1], generation=True)


def check(template: ChatTemplate, submit: Submit, *texts: str, system: str = "") -> None:
    """The prompt reads as a fresh rendering, with the sampled ids of every reply in it."""
    assert template.tokenizer.decode(submit.token_ids, skip_special_tokens=False) == fresh(
        template, *texts, system=system
    )
    ids, count = odd(template), len(odd(template))
    found = sum(submit.token_ids[at : at + count] == ids for at in range(len(submit.token_ids)))
    assert found == len(texts) - 1


@pytest.mark.parametrize("system", ["", "Be brief."])
async def test_a_chat_of_the_page_is_read_in_the_template_of_its_model(service, engine, template, words, system):
    chat = (await service.create_session(service.user.id, system)).id
    say = lambda text: service.send(service.user.id, chat, text)  # noqa: E731
    await (await say("one")).finished()
    added = await service.add_model("/models/words")
    default = next(model for model in await service.models() if model.default)
    await service.choose_model(service.user.id, chat, added.id)
    await (await say("two")).finished()
    await (await say("three")).finished()
    await service.choose_model(service.user.id, chat, default.id)
    await (await say("four")).finished()
    await (await say("five")).finished()
    first, second, third, fourth, fifth = engine.submits
    texts = ("one", "two", "three", "four", "five")
    for turn, (submit, read) in enumerate(
        zip(engine.submits, (template, words, words, template, template), strict=True)
    ):
        check(read, submit, *texts[: turn + 1], system=system)
    for before, after in ((first, fourth), (second, third), (fourth, fifth)):
        known = [*before.token_ids, *odd(template)]
        assert after.token_ids[: len(known)] == known


async def test_an_estimate_brings_no_model_into_memory(service, engine, template, words):
    loaded = await service.add_model("/models/words")
    body = {"model": "words", "messages": [{"role": "user", "content": "one"}]}
    async with serving(service) as url, httpx.AsyncClient(base_url=url) as http:
        found = await http.post("/v1/chat/completions/estimate", json=body)
        assert found.json()["prompt_tokens"] == len(engine.estimates[-1])
        assert words.tokenizer.decode(engine.estimates[-1], skip_special_tokens=False) == fresh(words, "one")
        engine.served.discard("e" * 16)
        answer = await http.post("/v1/chat/completions/estimate", json=body)
        assert (answer.status_code, answer.json()["error"]["message"]) == (
            503, "The model is not loaded; the next message for it loads it."
        )  # fmt: skip
        assert engine.served == {engine.capabilities.fingerprint}
        await service.forget_model(loaded.id)
        assert (await http.post("/v1/chat/completions/estimate", json=body)).status_code == 404


async def test_an_estimate_reads_what_the_default_needs_and_nobody_has_read(service, engine, template):
    service._models._read.clear()
    body = {"model": "default", "messages": [{"role": "user", "content": "one"}]}
    async with serving(service) as url, httpx.AsyncClient(base_url=url) as http:
        assert (await http.post("/v1/chat/completions/estimate", json=body)).status_code == 200


async def test_a_chat_of_a_client_is_read_in_the_template_of_its_model(service, engine, template, words):
    await service.add_model("/models/words")
    history: list[dict[str, str]] = [{"role": "system", "content": "Be brief."}]
    texts = ("one", "two", "three", "four", "five")
    names = ("default", "words", "words", "default", "default")
    async with serving(service) as url, httpx.AsyncClient(base_url=url) as http:
        for turn, name in enumerate(names):
            history.append({"role": "user", "content": texts[turn]})
            answer = (await http.post("/v1/chat/completions", json={"model": name, "messages": history})).json()
            assert answer["keepwarm"]["matched_messages"] == (2 * turn + 1 if turn else 0)
            history.append({"role": "assistant", "content": "Fine."})
            read = template if name == "default" else words
            check(read, engine.submits[-1], *texts[: turn + 1], system="Be brief.")
        # the same question again, of the other model: its answer is to be asked for in its own template
        await http.post("/v1/chat/completions", json={"model": "words", "messages": history[:-1]})
        check(words, engine.submits[-1], *texts, system="Be brief.")
    first, second, third, fourth, fifth, _ = engine.submits
    for before, after in ((first, fourth), (second, third), (fourth, fifth)):
        known = [*before.token_ids, *odd(template)]
        assert after.token_ids[: len(known)] == known


async def test_a_reply_that_a_client_wrote_goes_over_to_another_template(service, engine, template, words):
    await service.add_model("/models/words")
    history = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "Mine."},
        {"role": "assistant", "content": "Mine too."},
        {"role": "user", "content": "two"},
    ]
    async with serving(service) as url, httpx.AsyncClient(base_url=url) as http:
        for name, read in (("default", template), ("words", words), ("default", template)):
            await http.post("/v1/chat/completions", json={"model": name, "messages": history})
            sent = read.tokenizer.decode(engine.submits[-1].token_ids, skip_special_tokens=False)
            assert sent == read._render(history, generation=True)
            history += [{"role": "assistant", "content": "Fine."}, {"role": "user", "content": f"to {name}"}]


async def test_what_was_stored_under_the_vocabulary_alone_comes_out_the_same(service, store, engine, template, words):
    """Databases from before templates had names."""
    chat = (await service.create_session(service.user.id, "Be brief.")).id
    for text in ("one", "two"):
        await (await service.send(service.user.id, chat, text)).finished()
    for message in await store.path(chat):
        await store.update_message(message.id, tokenizer=template.identity)
    await (await service.send(service.user.id, chat, "three")).finished()
    _, second, third = engine.submits
    known = [*second.token_ids, *odd(template)]
    assert third.token_ids[: len(known)] == known
    check(template, third, "one", "two", "three", system="Be brief.")


# --- reasoning --------------------------------------------------------------------------------------------------------

SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>", *files.MARKS_OF_CHANNELS]
SAMPLED = {
    files.OPENED: "hm\n</think>\n\nYes.</s>",
    files.CHANNELS: "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
}


@pytest.fixture
def load(tmp_path: Path):
    def load(source: str) -> ChatTemplate:
        tokenizer = files.with_tokens(None, SPECIAL)
        return ChatTemplate.load(files.save(tmp_path, tokenizer, source, bos_token="<s>", eos_token="</s>"))

    return load


@pytest.mark.parametrize("source", SAMPLED)
def test_a_reply_that_begins_inside_its_reasoning_follows_what_opens_it(load, source):
    template = load(source)
    ids = tuple(template.tokenizer.encode(SAMPLED[source], add_special_tokens=False).ids)
    question = template.fill([Entry("user", "one")])[0]
    reply = Entry(
        "assistant", "<think>hm\n</think>\n\nYes." if source == files.OPENED else "<think>hm</think>Yes.", ids
    )
    segments = template.fill([Entry("user", "one"), reply, Entry("user", "two")])
    assert segments[:2] == [question, ids]


def test_a_reply_that_begins_inside_its_reasoning_goes_over_as_its_answer(load):
    ids = tuple(load(files.OPENED).tokenizer.encode(SAMPLED[files.OPENED], add_special_tokens=False).ids)
    template = load(files.CHATML)
    entries = [Entry("user", "one"), Entry("assistant", "<think>hm\n</think>\n\nYes.", ids), Entry("user", "two")]
    text = template.tokenizer.decode(template.prompt(entries, template.fill(entries)), skip_special_tokens=False)
    assert "assistant\nYes.<|im_end|>\n" in text
    assert "hm" not in text


def test_a_reply_without_reasoning_is_put_where_the_template_has_answers(load):
    template = load(files.OPENED)
    entries = [
        Entry("user", "one"),
        Entry("assistant", "Yes.", tuple(template.encode_text("Yes."))),
        Entry("user", "2"),
    ]
    text = template.tokenizer.decode(template.prompt(entries, template.fill(entries)), skip_special_tokens=False)
    assert text == "<s><|user|>one<|assistant|>Yes.</s><|user|>2<|assistant|><think>\n"
