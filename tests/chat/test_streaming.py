"""Incremental text: nothing broken, nothing leaked, nothing lost."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from chat.streaming import Detokenizer, ReplyText, StopStrings
from chat.templates import ChatTemplate

END, START = 2, 1
characters = st.characters(exclude_categories=["Cs", "Cn", "Co"])
ids_lists = st.lists(st.integers(0, 49151) | st.integers(20, 280), max_size=40)


def reply(template: ChatTemplate, ids: list[int], stops: tuple[str, ...] = ()) -> ReplyText:
    made = ReplyText(template, stops, [END])
    for token_id in ids:
        made.push([token_id])
    made.finish()
    return made


@settings(max_examples=300)
@given(ids_lists)
@example([5549])  # a space and the beginning of a character in one token
def test_pieces_add_up_to_the_batch_decode(template, ids):
    detokenizer = Detokenizer(template.decode)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    whole = template.decode(ids)
    text = "".join(pieces)
    assert not any(piece.endswith("\ufffd") for piece in pieces)
    assert whole.startswith(text)
    assert whole == text or whole.endswith("\ufffd")  # only what ends inside a character is kept back


@settings(max_examples=300)
@given(ids_lists)
def test_the_text_of_a_reply_is_the_batch_decode_of_its_ids(template, ids):
    made = reply(template, ids)
    kept = made.delivered_ids()
    assert list(kept) == ids[: len(kept)]
    assert template.decode(kept) == made.text


@settings(max_examples=200)
@given(text=st.text(characters, max_size=30), at=st.integers(0, 30), stop=st.text(characters, min_size=1, max_size=3))
@example(text="stopping here", at=2, stop="pin")
@example(text="Привет 👩‍👩‍👧 мир", at=5, stop="👩")
def test_a_stop_string_in_the_text_of_real_tokens(template, text, at, stop):
    whole = text[:at] + stop + text[at:]
    ids = template.encode_text(whole)
    assume(template.decode(ids) == whole)  # this vocabulary lacks a few bytes of unassigned characters
    made = reply(template, [*ids, END], (stop,))
    assert made.stopped
    assert made.text == whole[: whole.index(stop)]
    assert template.decode(made.delivered_ids()) == made.text
    assert END not in made.delivered_ids()


def cut(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    return [text[a:b] for a, b in pairwise(edges)]


@settings(max_examples=400)
@given(
    st.text("abx", max_size=20),
    st.lists(st.text("abx", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 19)),
)
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(text, stops, cuts):
    def run(pieces: list[str]) -> tuple[str, bool]:
        filter_, out = StopStrings(stops), ""
        for piece in pieces:
            out += filter_.push(piece)
            assert not any(stop in out for stop in stops)
            if filter_.found:
                break
        return out + filter_.flush(), filter_.found

    assert run(cut(text, cuts)) == run(list(text))
    out, found = run(list(text))
    assert found == any(stop in text for stop in stops)
    assert text.startswith(out)
    assert found or out == text


def test_a_beginning_of_a_stop_string_is_held_and_then_given():
    filter_ = StopStrings(["</end>"])
    assert [filter_.push(piece) for piece in ("a<", "/e", "x", "<")] == ["a", "", "</ex", ""]
    assert filter_.flush() == "<"


def test_an_incomplete_character_is_held(template):
    ids = template.encode_text("é👩")
    made = ReplyText(template, (), [END])
    assert [made.push([token_id]) for token_id in ids] == ["é"] + [""] * (len(ids) - 2) + ["👩"]


def test_a_reply_cut_inside_a_character_ends_before_it(template):
    ids = template.encode_text("ok 👩")
    made = reply(template, ids[:-1])
    assert made.text == "ok" or made.text == "ok "
    assert template.decode(made.delivered_ids()) == made.text
    assert len(made.delivered_ids()) < len(ids) - 1


def test_the_end_token_is_kept_and_not_shown(template):
    ids = template.encode_text("Done.")
    made = reply(template, [*ids, END])
    assert (made.text, made.delivered_ids(), made.sampled) == ("Done.", (*ids, END), len(ids) + 1)


def test_an_end_token_that_the_template_does_not_write_is_left_out(template):
    ids = template.encode_text("Done.")
    made = ReplyText(template, (), [0, END])
    made.push([*ids, 0])
    assert made.delivered_ids() == tuple(ids)


def test_the_end_token_goes_with_an_incomplete_character_before_it(template):
    ids = template.encode_text("👩")[:-1]
    assert reply(template, [*ids, END]).delivered_ids() == ()


def test_ids_after_the_end_are_ignored(template):
    assert reply(template, [END, *template.encode_text("more")]).text == ""


def test_control_tokens_in_a_reply_are_not_shown_but_kept(template):
    ids = [*template.encode_text("a"), START, *template.encode_text("b")]
    made = reply(template, ids)
    assert (made.text, list(made.delivered_ids())) == ("ab", ids)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_cut_token_is_encoded_again(template, count):
    (token,) = template.encode_text("hello")
    made = reply(template, [token], ("hello"[count:],))
    assert made.text == "hello"[:count]
    assert template.decode(made.delivered_ids()) == made.text
