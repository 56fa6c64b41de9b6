"""Tokenizers of every kind: no text becomes a control token, and text that grows is what it is at the end."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from chat.encoding import TextEncoder
from chat.errors import InvalidText, PromptTooLong, UnusableModel
from chat.streaming import Detokenizer, ReplyText
from chat.templates import LARGE, ChatTemplate, Entry
from tests.chat import model_files as files

SPELT = [
    "<|im_end|>", "<|im_start|>", "<s>", "</s>", "<unk>", "[SEP]", "[UNK]", "<think>", "</think>", "[INST]",
    "＜|im_end|＞", "<|im\u200b_end|>", "＜/s＞", "﹤s﹥", "＜think＞", "<THINK>", "<|IM_END|>",
    "ℌ", "ﬁ", "▁", "\U00100000",
]  # fmt: skip
texts = st.lists(st.text(max_size=12) | st.sampled_from(SPELT), max_size=8).map("".join)
KINDS = ["embedded", "compatible", "composed", "small", "bytes", "unigram", "word pieces", "no added"]


@pytest.fixture(scope="module")
def kinds(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTemplate]:
    folder, own = tmp_path_factory.mktemp("kinds"), embedded_model / "tokenizer.json"
    sentence = {"bos_token": "<s>", "eos_token": "</s>"}
    made = [
        (Tokenizer.from_file(str(own)), files.CHATML, {}),
        (files.rewriting(own, normalizers.NFKC()), files.STRIPPING, {}),
        (files.rewriting(own, normalizers.NFC()), files.STRIPPING, {}),
        (files.rewriting(own, normalizers.Lowercase()), files.STRIPPING, {}),
        (files.byte_fallback(), files.BRACKETS, sentence),
        (files.unigram(), files.BRACKETS, sentence),
        (files.word_pieces(), files.HOLLOW, {}),
        (files.without_added(), files.HOLLOW, {}),
    ]
    return {
        kind: ChatTemplate.load(files.save(folder / kind, tokenizer, template, **names))
        for kind, (tokenizer, template, names) in zip(KINDS, made, strict=True)
    }


every_kind = pytest.mark.parametrize("kind", KINDS)


def control(template: ChatTemplate, ids: list[int]) -> list[str]:
    """The control tokens among `ids`, but for the one that stands for unknown characters."""
    texts = {index: token.content for index, token in template.tokenizer.get_added_tokens_decoder().items()}
    return [texts[index] for index in ids if texts.get(index, "<unk>") not in ("<unk>", "[UNK]")]


def prompt(template: ChatTemplate, *entries: Entry) -> list[int]:
    return template.prompt(entries, template.fill(entries))


@every_kind
@settings(max_examples=60)
@given(data=st.data())
def test_no_text_becomes_a_control_token(kinds, kind, data):
    template = kinds[kind]
    chat = data.draw(st.lists(texts, min_size=1, max_size=3))
    entries = [
        Entry(("user", "assistant")[number % 2], text) for number, text in enumerate([*chat, "x"][: len(chat) | 1])
    ]
    harmless = [Entry(entry.role, "a") for entry in entries]
    assert control(template, prompt(template, *entries)) == control(template, prompt(template, *harmless))
    assert control(template, template.encode_text(entries[0].text)) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("compatible", "＜think＞"),
        ("compatible", "＜＜think＞think＞"),
        ("compatible", "<think>＜/think＞" * 3),
        ("small", "<THINK> and </Think>"),
        ("unigram", "a＜/s＞b＜s＞"),
        ("unigram", "a</s>b"),
    ],
)
def test_a_rewritten_text_makes_no_control_token(kinds, name, text):
    template = kinds[name]
    bare = template.tokenizer.encode(text, add_special_tokens=False)
    assert control(template, bare.ids)  # so it would without care
    ids = template.encode_text(text)
    assert control(template, ids) == []
    assert template.decode(ids) == template.tokenizer.normalizer.normalize_str(text)


def test_a_single_character_that_is_a_control_token_is_refused(embedded_model):
    tokenizer = files.rewriting(embedded_model / "tokenizer.json", normalizers.NFKC())
    tokenizer.add_tokens(["TEL"])
    encoder = TextEncoder(tokenizer, "TEL:<TEL>")
    assert encoder.encode_text("TEL")  # a word as people write it
    tokenizer = files.rewriting(embedded_model / "tokenizer.json", normalizers.Replace("℡", "<think>"))
    with pytest.raises(InvalidText, match="takes '℡' for a control token"):
        TextEncoder(tokenizer, "<think>").encode_text("a ℡ b")


@settings(max_examples=150)
@given(text=texts)
def test_texts_round_trip(kinds, text):
    bare = kinds["bytes"].encode_text(text)
    assert kinds["bytes"].decode([*kinds["bytes"].encode_text("x"), *bare]) == "x" + text.replace("▁", " ")
    assert kinds["no added"].decode([*kinds["no added"].encode_text("x"), *kinds["no added"].encode_text(text)]) == (
        "x" + text
    )
    embedded = kinds["embedded"]
    assume(embedded.decode(embedded.tokenizer.encode(text, add_special_tokens=False).ids) == text)  # bytes it lacks
    assert embedded.decode(embedded.encode_text(text)) == text


def test_a_tokenizer_that_puts_a_space_before_each_text_adds_none_inside_a_chat(kinds):
    for name in ("bytes", "unigram", "no added"):
        template = kinds[name]
        before = template.encode_text("ab")
        assert template.decode([*before, *template.encode_text("ab</s>ab")]) == "abab</s>ab"


def test_added_words_are_no_control_tokens(embedded_model):
    tokenizer = files.with_tokens(embedded_model / "tokenizer.json", plain=["  ", "user", "<tool>"])
    encoder = TextEncoder(tokenizer, "  user <|im_end|>")
    assert {tokenizer.id_to_token(index) for index in encoder.control} & {"  ", "user", "<tool>"} == set()
    assert tokenizer.token_to_id("user") in encoder.encode_text("a user")
    assert tokenizer.token_to_id("<tool>") in TextEncoder(tokenizer, "<tool>").control


# --- growing ----------------------------------------------------------------------------------------------------------


@st.composite
def ids_of(draw: st.DrawFn, template: ChatTemplate) -> list[int]:
    """Any ids, runs of single bytes more often than chance has them."""
    size = template.tokenizer.get_vocab_size()
    single = [template.tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in (0x41, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0xFF)]
    some = st.integers(0, size - 1)
    known = [index for index in single if index is not None]
    return draw(st.lists(st.sampled_from(known) | some if known else some, max_size=24))


@every_kind
@settings(max_examples=80)
@given(data=st.data())
def test_what_grows_is_what_the_ids_say_at_the_end(kinds, kind, data):
    template = kinds[kind]
    ids = data.draw(ids_of(template))
    reply = ReplyText(template)
    pieces = [reply.push([index]) for index in ids] + [reply.finish()]
    kept = list(reply.delivered_ids())
    assert kept == ids[: len(kept)]
    assert "".join(pieces) == reply.text
    if template.splitter() is None:
        assert reply.text == template.decode(kept)
    assert kept == ids or template.decode(ids).endswith("\ufffd")  # only what ends inside a character is left out


@settings(max_examples=200)
@given(st.binary(max_size=12), st.binary(max_size=3))
@example(b"\xe2\x82\xac\xff", b"")
@example(b"\xef\xbf\xbd", b"a")
def test_bytes_decode_alike_however_the_run_goes_on(kinds, first, second):
    template = kinds["bytes"]
    byte = lambda data: [template.tokenizer.token_to_id(f"<0x{value:02X}>") for value in data]  # noqa: E731
    whole = template.decode([*template.encode_text("a"), *byte(first), *byte(second)])
    assert whole == "a" + (first + second).decode("utf-8", "replace")
    if "\ufffd" not in whole:
        assert whole == template.tokenizer.decode([*template.encode_text("a"), *byte(first + second)])


@pytest.mark.parametrize("name", ["embedded", "bytes"])
@settings(max_examples=60)
@given(
    st.lists(st.sampled_from([b"\x80" * 40, b"\xff" * 30, "é€👩".encode(), b"\xe2\x82", b"\xf0\x9f\x91", b"a", b" "]))
)
def test_a_long_run_of_broken_bytes_is_decoded_in_pieces(kinds, name, runs):
    template = kinds[name]
    spell = (lambda byte: f"<0x{byte:02X}>") if name == "bytes" else bytes_to_unicode().get
    known = (template.tokenizer.token_to_id(spell(byte)) for run in runs for byte in run)
    ids = [index for index in known if index is not None]
    sizes: list[int] = []
    detokenizer = Detokenizer(lambda some: (sizes.append(len(some)), template.decode(some))[1])
    text = "".join(detokenizer.push(index) for index in ids)
    ends = [(at + 1, end) for at, end in enumerate(detokenizer.ends) if end is not None]
    assert all(template.decode(ids[:count]) == text[:end] for count, end in ends)
    assert text == template.decode(ids) or template.decode(ids).endswith("\ufffd")
    assert max(sizes, default=0) <= 24


@every_kind
def test_a_replacement_character_that_is_written_is_text(kinds, kind):
    template = kinds[kind]
    ids = template.encode_text("ab \ufffd")
    if "\ufffd" not in template.decode(ids):
        return  # this vocabulary has no such character
    reply = ReplyText(template)
    reply.push(ids)
    assert (reply.text, list(reply.delivered_ids())) == (template.decode(ids), ids)


def test_a_character_of_bytes_is_shown_as_soon_as_it_is_there(kinds):
    template = kinds["bytes"]
    ids = template.encode_text("€👩")
    reply = ReplyText(template)
    assert [reply.push([index]) for index in ids] == ["", "", "€", "", "", "", "👩"]


# --- long texts -------------------------------------------------------------------------------------------------------


LONG = ["a" * 600, "👩" * 150, " " * 600, "中" * 200, "e\u0301" * 300, "\u212b" * 200, "\U0010fffd" * 150, "<s>" * 99]


@every_kind
@settings(max_examples=60)
@given(text=texts)
def test_fewer_tokens_are_never_promised_than_there_are(kinds, kind, text):
    template = kinds[kind]
    assert template._encoder.least_tokens(text) <= len(template._encoder.encode_bare(text))


@every_kind
def test_fewer_tokens_are_never_promised_for_a_long_text(kinds, kind):
    template = kinds[kind]
    for text in LONG:
        assert template._encoder.least_tokens(text) <= len(template._encoder.encode_bare(text))


@pytest.mark.parametrize("text", ["\u1112\u1161\u11ab" * 50, "\u212a" * 50, "a\u0323\u0302" * 50])
def test_tokens_of_characters_that_are_composed_are_not_promised(text):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.normalizer = pre_tokenizers.ByteLevel(False), normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    encoder = TextEncoder(tokenizer)
    assert 0 < encoder.least_tokens(text) <= len(encoder.encode_bare(text))


def test_a_text_that_surely_does_not_fit_is_not_encoded(kinds, monkeypatch):
    for name in ("embedded", "composed", "bytes", "no added"):
        template = kinds[name]
        with monkeypatch.context() as patch:
            patch.setattr(template._encoder, "_batch", None)  # nothing may be encoded
            with pytest.raises(
                PromptTooLong, match=r"with this message is at least .* shorten the message by at least"
            ):
                template.fill([Entry("user", "ab " * 400_000)], 1000)
        assert template.fill([Entry("user", "ab " * (LARGE // 2))], 10**6)  # it may fit, and is encoded


def test_a_text_that_a_tokenizer_cannot_read_is_an_error_for_people(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="b"))
    with pytest.raises(UnusableModel, match=r"cannot chat\. The model's tokenizer cannot read this text"):
        ChatTemplate.load(files.save(tmp_path, tokenizer, files.HOLLOW))
    with pytest.raises(InvalidText, match="cannot read this text"):
        TextEncoder(Tokenizer(models.WordLevel({"a": 0}, unk_token="b"))).encode_text("ab")
