"""The page's HTML: Markdown that can do nothing but be read, and each message's ending and figures in plain words."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat.page_html import WHY, figures_line, live_reply, miss_sentence, notice, transcript
from chat.page_markdown import render_growing, render_markdown, sections
from chat.views import Figures, MessageView, MissCause, MissView, SessionDetail, TurnView

FIGURES = Figures(
    prompt_tokens=1222, reused_tokens=1180, computed_tokens=42, output_tokens=120, ttft_s=0.094, tpot_s=1 / 54
)
USER = MessageView("m1", "user", "How?")
REPLY = MessageView("m2", "assistant", "Like **so**.", figures=FIGURES, finish_reason="stop")


def detail(*messages: MessageView, running: bool = False) -> SessionDetail:
    return SessionDetail("s", "Title", 0.0, running, "", messages)


def text_of(html: str) -> str:
    return re.sub(r"<[^>]+>", "", html)


@pytest.mark.parametrize(
    "hostile",
    [
        '<img src=x onerror="alert(1)">',
        "<script>alert(1)</script>",
        "[x](javascript:alert(1))",
        "[x](JaVaScRiPt:alert(1))",
        "[x](data:text/html;base64,PHNjcmlwdD4=)",
        "<javascript:alert(1)>",
        "![x](https://elsewhere.example/p.png)",
        '![" onerror="alert(1)](https://elsewhere.example/"onerror="x)',
        '```"><img src=x onerror=alert(1)>\ncode\n```',
        "[x]: javascript:alert(1)\n\n[x]",
        '| <img src=x onerror="alert(1)"> |\n|---|\n| <b onclick=x> |',
    ],
)
def test_nothing_in_a_message_runs_or_fetches(hostile: str) -> None:
    for html in (render_markdown(hostile), render_growing(hostile)):
        tags = re.findall(r"<[^>]*>", html)
        assert not [tag for tag in tags if re.match(r"<(img|script|iframe|svg|object|b)\b", tag)], html
        assert not [tag for tag in tags if re.search(r"\son\w+\s*=", re.sub(r'"[^"]*"', '""', tag))], html
        assert not re.search(r'href="\s*(javascript|data|vbscript):', html, re.IGNORECASE), html


def test_links_open_elsewhere_and_tell_nobody_where_from() -> None:
    assert render_markdown("[here](https://example.org)") == (
        '<p><a href="https://example.org" target="_blank" rel="noopener noreferrer">here</a></p>\n'
    )


def test_code_keeps_its_white_space_and_is_coloured() -> None:
    html = render_markdown("```python\nif x:\n\n    y  =  '<b>'\n```")
    assert "if x:\n\n    y  =  '&lt;b&gt;'" in text_of(html).replace("&#39;", "'")
    assert 'class="hl-k"' in html


LINES = (
    "A paragraph.", "", "", "- item", "  more", "1. one", "> quote", "```py", "```", "~~~~", "# Head", "    code",
    "|a|\n|-|", "***",
)  # fmt: skip


@given(st.lists(st.sampled_from(LINES), max_size=24))
def test_growing_text_looks_as_it_will_when_it_is_whole(lines: list[str]) -> None:
    text = "\n".join(lines)
    assert "".join(sections(text)) == text
    assert render_growing(text) == render_markdown(text)


def test_the_quiet_line_says_what_a_reply_cost() -> None:
    line = figures_line(FIGURES)
    assert text_of(line) == "1,180 tokens reused · 42 read · 0.09 s to first token · 54 tok/s"
    assert "Of 1,222 prompt tokens, 1,180 were still warm and 42 were read anew; the reply has 120 tokens." in line


def test_the_figures_say_what_was_guessed() -> None:
    assert "guessed" not in figures_line(FIGURES)
    line = figures_line(replace(FIGURES, drafted_tokens=1200, accepted_tokens=30))
    assert "30 of 1,200 tokens that were guessed came true." in line


def test_the_quiet_line_tells_the_tiers_that_tokens_came_back_from() -> None:
    line = figures_line(replace(FIGURES, host_tokens=100, disk_tokens=1000, restore_s=0.052))
    assert text_of(line).startswith("1,180 tokens reused (100 from RAM, 1,000 from disk) · 42 read · ")
    assert "1,180 were still warm (100 from RAM, 1,000 from disk, brought back in 0.05 s) and 42 were read anew" in line
    assert "reused (80 from disk) ·" in text_of(figures_line(replace(FIGURES, disk_tokens=80)))


@pytest.mark.parametrize("cause", WHY)
def test_the_quiet_line_says_in_its_hint_why_anything_was_read_again(cause: MissCause) -> None:
    line = figures_line(replace(FIGURES, miss=MissView(7, 1, "assistant", cause, "disk: <unused>")))
    assert text_of(line) == text_of(figures_line(FIGURES))
    said = f"Read again from a reply on, because {WHY[cause]} (disk: &lt;unused&gt;)."
    assert (said in line) is (cause != "new")


def test_a_miss_that_no_message_can_be_named_for() -> None:
    assert miss_sentence(MissView(7, None, None, "template")) == (
        "Read again, because the model’s template writes earlier messages anew."
    )


def test_every_cause_has_its_words() -> None:
    assert set(WHY) == {cause for kind in get_args(MissCause) for cause in (get_args(kind) or (kind,))}


def test_the_quiet_line_of_a_reply_with_no_token_or_one_claims_no_speed() -> None:
    counts = "1,180 tokens reused · 42 read"
    assert text_of(figures_line(replace(FIGURES, ttft_s=None, tpot_s=None))) == counts
    assert text_of(figures_line(replace(FIGURES, tpot_s=None))) == f"{counts} · 0.09 s to first token"


@pytest.mark.parametrize(
    ("change", "said", "retry"),
    [
        ({"status": "stopped"}, "You stopped this reply.", True),
        ({"status": "interrupted"}, "This reply was interrupted when Keepwarm ended; what had arrived is kept.", True),
        ({"status": "failed", "error": "The engine <died>."}, "The engine &lt;died&gt;.", True),
        ({"finish_reason": "length"}, "This reply ended at its limit of 120 tokens.", False),
        ({"finish_reason": "length", "error": "The context is full."}, "The context is full.", False),
    ],
)
def test_a_reply_that_did_not_simply_end_says_why(change: dict[str, str], said: str, retry: bool) -> None:
    html = transcript(detail(USER, replace(REPLY, **change)))
    assert said in html
    assert ('data-act="retry"' in html) is retry


def test_only_the_last_reply_can_be_retried() -> None:
    failed = replace(REPLY, status="failed", error="No.")
    html = transcript(detail(USER, failed, replace(USER, id="m3"), replace(REPLY, id="m4")))
    assert "No." in html
    assert 'data-act="retry"' not in html


def test_a_message_without_a_reply_offers_one() -> None:
    assert 'data-act="retry"' in transcript(detail(USER))
    assert 'data-act="retry"' not in transcript(detail(USER, running=True))


def test_the_reply_being_written_is_left_to_the_live_part() -> None:
    html = transcript(detail(USER, replace(REPLY, status="streaming"), running=True), live_message="m2")
    assert "How?" in html
    assert "Like" not in html


def test_a_persons_text_is_shown_as_typed() -> None:
    html = transcript(detail(replace(USER, text="a  b\n\n *c* <i>")))
    assert '<div class="kw-typed">a  b\n\n *c* &lt;i&gt;</div>' in html


def test_progress_of_a_long_prompt_is_told_in_tokens() -> None:
    view = TurnView("s", "m", state="reading", reused=300, read=212, total=2140)
    assert text_of(live_reply(view)) == "Reading 512 of 2,140 tokens · 300 reused"
    assert 'max="2140" value="512"' in live_reply(view)
    assert text_of(live_reply(replace(view, reused=0))) == "Reading 212 of 2,140 tokens"
    assert text_of(live_reply(replace(view, state="waiting"))) == "Waiting for its turn"


def test_a_notice_is_announced_unless_it_is_calm() -> None:
    assert 'role="alert"' in notice("Broken.")
    assert 'role="note"' in notice("Stopped.", calm=True)


THOUGHT = "<think>\nHm, *hm*. <b>\n</think>\n\nLike **so**."


def test_reasoning_is_folded_above_the_answer_and_not_copied() -> None:
    html = transcript(detail(USER, replace(REPLY, text=THOUGHT)))
    folded = re.search(
        r'<details class="kw-thought" data-thought="m2"><summary>(.*?)</summary>(.*?)</details>(.*)', html, re.S
    )
    assert folded
    assert folded[1] == "Thought in 3 words"
    assert "<em>hm</em>. &lt;b&gt;" in folded[2]
    assert '<div class="kw-text"><p>Like <strong>so</strong>.</p>' in folded[3]
    assert 'data-text="Like **so**."' in folded[3]
    assert "think&gt;" not in html


@pytest.mark.parametrize("text", ["Like so.", "<think>\n\n</think>\n\nLike so."])
def test_a_reply_without_reasoning_has_nothing_folded(text: str) -> None:
    html = transcript(detail(USER, replace(REPLY, text=text)))
    assert "<details" not in html
    assert 'data-text="Like so."' in html


def test_words_are_counted_where_they_are_not_set_apart() -> None:
    assert "Thought in 5 words" in transcript(detail(replace(REPLY, text="<think>你好 a b, c</think>x")))
    assert "Thought in 1 word<" in transcript(detail(replace(REPLY, text="<think>hm</think>x")))


def test_reasoning_that_grows_says_so_until_the_answer_begins() -> None:
    view = TurnView("s", "m", state="writing")
    thinking = [live_reply(replace(view, text=text)) for text in ("<think>", "<think>\nHm", "<think>\nHm</think>\n")]
    assert [text_of(html) for html in thinking] == ["Thinking", "ThinkingHm\n", "ThinkingHm\n"]
    assert all('data-thought="m"' in html for html in thinking)
    answering = live_reply(replace(view, text="<think>\nHm</think>\n\nYes"))
    assert text_of(answering) == "Thought in 1 wordHm\nYes\n"
    assert '<div class="kw-text kw-growing"><p>Yes</p>' in answering


def test_a_reply_that_ended_inside_its_reasoning_says_so() -> None:
    thought = replace(REPLY, text="<think>\nHm")
    assert "The model thought, and then wrote no answer." in transcript(detail(USER, thought))
    assert "data-text" not in transcript(detail(USER, thought))
    stopped = transcript(detail(USER, replace(thought, status="stopped")))
    assert "You stopped this reply." in stopped
    assert "wrote no answer" not in stopped
