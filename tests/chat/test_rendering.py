"""Chat templates as programs that came with a model: what they can use and do, and when they are stopped."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from chat import rendering
from chat.errors import TemplateError, UnusableModel
from chat.rendering import Renderer
from chat.templates import ChatTemplate, Entry
from tests.chat import model_files as files

USER = [{"role": "user", "content": "hi"}]
MINUTES = files.CHATML.replace("{% for", "{{ strftime_now('%H:%M') }} {% for", 1)
FORGETFUL_AND_DATED = MINUTES.replace("<|im_start|>{{", "<|im_start|>{% if not loop.last %}old {% endif %}{{", 1)


def prompt(template: ChatTemplate, *entries: Entry) -> str:
    ids = template.prompt(entries, template.fill(entries))
    return template.tokenizer.decode(ids, skip_special_tokens=False)


@pytest.fixture
def with_template(tmp_path: Path) -> Callable[[str], ChatTemplate]:
    """A small tokenizer under a chat template."""
    tokenizer = files.with_tokens(None, ["<|im_start|>", "<|im_end|>"])
    return lambda source: ChatTemplate.load(files.save(tmp_path, tokenizer, source))


# --- where templates are kept -----------------------------------------------------------------------------------------


def test_a_model_without_a_template_gets_the_plain_one(tmp_path):
    template = ChatTemplate.load(files.save(tmp_path, files.byte_fallback(), None))
    entries = [Entry("system", "be he"), Entry("user", "one"), Entry("assistant", "two"), Entry("user", "a b")]
    assert prompt(template, *entries) == (
        "<s> be he\n\nUser:\none\n\nAssistant:\ntwo\n\nUser:\na b\n\nAssistant:\n"  # its tokenizer begins texts so
    )
    assert template.notes.notice.startswith("This model has no chat template; a plain one is used")


@pytest.mark.parametrize("template", ["", None, []])
def test_an_empty_template_is_none(tmp_path, template):
    files.save(tmp_path, files.without_added(), None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert ChatTemplate.load(tmp_path).notes.notice
    (tmp_path / "chat_template.jinja").write_text("")
    assert ChatTemplate.load(tmp_path).notes.notice


def test_a_template_in_a_file_of_its_own_and_the_first_of_several(tmp_path):
    files.save(tmp_path, files.without_added(), None)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": files.CHATML}))
    assert prompt(ChatTemplate.load(tmp_path), Entry("user", "x")).startswith(" <|im_start|>user\nx<|im_end|>")
    several = [{"name": "rag", "template": files.HOLLOW}, {"name": "tool_use", "template": "no"}]
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": several}))
    assert prompt(ChatTemplate.load(tmp_path), Entry("user", "x")) == " user: x\nassistant: "


@pytest.mark.parametrize("content", ["[1]", "{", '{"chat_template": [{}]}'])
def test_damaged_template_files_are_named(tmp_path, content):
    files.save(tmp_path, files.without_added(), None)
    (tmp_path / "chat_template.json").write_text(content)
    with pytest.raises(UnusableModel, match="cannot be read"):
        ChatTemplate.load(tmp_path)


# --- system prompts ---------------------------------------------------------------------------------------------------


def test_a_refused_system_prompt_begins_the_next_user_message(with_template):
    template = with_template(files.ALTERNATING)
    entries = [
        Entry("system", "be brief"),
        Entry("user", "<end_of_turn>"),
        Entry("assistant", "Two."),
        Entry("user", "x"),
    ]
    assert prompt(template, *entries) == (
        "<start_of_turn>user\nbe brief\n\n<end_of_turn><end_of_turn>\n<start_of_turn>model\nTwo.<end_of_turn>\n"
        "<start_of_turn>user\nx<end_of_turn>\n<start_of_turn>model\n"
    )
    late = [Entry("user", "one"), Entry("assistant", "Two."), Entry("system", "be brief"), Entry("user", "x")]
    assert "user\nbe brief\n\nx<end_of_turn>" in prompt(template, *late)
    alone = [Entry("system", "be brief"), Entry("assistant", "Two."), Entry("system", " "), Entry("user", "x")]
    assert prompt(template, *alone).startswith("<start_of_turn>user\nbe brief<end_of_turn>\n<start_of_turn>model\nTwo.")
    assert "user\nx<end_of_turn>" in prompt(template, *alone)


def test_a_system_prompt_that_a_template_passes_over_begins_the_next_user_message(with_template):
    template = with_template(files.CHATML.replace("messages %}", "messages if m.role != 'system' %}"))
    assert prompt(template, Entry("system", "be brief"), Entry("user", "x")).startswith(
        "<|im_start|>user\nbe brief\n\nx<|im_end|>"
    )


def test_turns_that_a_template_refuses_stay_refused(with_template):
    template = with_template(files.ALTERNATING)
    with pytest.raises(TemplateError, match=r"in this order \(user, user\): Conversation roles must alternate"):
        template.fill([Entry("user", "one"), Entry("user", "two")])


# --- dates ------------------------------------------------------------------------------------------------------------


def at(hour: int, minute: int) -> float:
    return datetime(2031, 5, 6, hour, minute).timestamp()


@pytest.mark.parametrize("source", [files.DATED, MINUTES, FORGETFUL_AND_DATED])
def test_a_chat_keeps_the_date_that_it_began_with(with_template, monkeypatch, source):
    template = with_template(source)
    now = [at(9, 15)]
    monkeypatch.setattr(rendering, "now", lambda: datetime.fromtimestamp(now[0]))
    entries = [Entry("user", "one")]
    segments = template.fill(entries)
    first = template.prompt(entries, segments)
    assert ("06 May 2031" if source == files.DATED else "09:15") in prompt(template, *entries)
    now[0] = at(9, 15) + 86400 * 300 + 3600
    later = [
        Entry("user", "one", segments[0], at(9, 15)),
        Entry("assistant", "Two.", (5, 2), at(9, 16)),
        Entry("user", "x"),
    ]
    second = template.prompt(later, template.fill(later))
    if template.stable:
        assert second[: len(first)] == first
    text = template.tokenizer.decode(second, skip_special_tokens=False)
    assert text.count("06 May 2031" if source == files.DATED else "09:15") == 1
    assert "10:15" not in text


def test_what_users_share_ends_where_the_date_differs(with_template, monkeypatch):
    template = with_template(files.DATED)
    entries = [Entry("user", "one")]
    assert template.shared_length(entries, template.fill(entries)) > 10
    monkeypatch.setattr(rendering, "now", lambda: datetime(1999, 12, 31))
    shared = template.shared_length(entries, segments := template.fill(entries))
    text = template.tokenizer.decode(list(segments[0][:shared]), skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nToday is")
    assert "Dec" not in text


# --- programs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hostile",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(messages[0]) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ strftime_now.__self__.__class__.__mro__ }}",
        "{{ range(10**9) | list }}",
        "{{ raise_exception.__globals__['sys'] }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{% include '/etc/passwd' %}",
        "{{ '%s'.format(messages).__class__.__init__() }}",
    ],
)
def test_a_hostile_template_gets_nowhere(with_template, hostile):
    with pytest.raises(UnusableModel, match="chat template"):
        with_template(hostile)


def test_a_template_cannot_change_the_messages_of_others():
    messages = [dict(USER[0])]
    with pytest.raises(TemplateError):
        Renderer("{% set _ = messages[0].update({'content': 'x'}) %}{{ messages[0].content }}", {}).render(
            messages, generation=True
        )
    assert messages == USER


@pytest.mark.parametrize(
    "endless",
    [
        "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
        "{% for a in range(90000) %}{% for b in range(90000) %}x{% endfor %}{% endfor %}",
        "{% for a in range(90000) %}{% set x = range(90) | sum %}{% if x == a %}{% break %}{% endif %}{% endfor %}",
    ],
)
def test_a_template_that_does_not_come_to_an_end_is_stopped(with_template, monkeypatch, endless):
    monkeypatch.setattr(rendering, "MOST_STEPS", 20_000)
    with pytest.raises(UnusableModel, match=r"cannot chat\. The model's chat template does not come to an end"):
        with_template(endless)


def test_a_template_may_be_slow_with_some_messages_alone(with_template, monkeypatch):
    monkeypatch.setattr(rendering, "MOST_STEPS", 20_000)
    loop = "{% if m.content == 'loop' %}{% for a in range(90000) %}{% endfor %}{% endif %}"
    template = with_template(files.CHATML.replace("<|im_start|>", loop + "<|im_start|>", 1))
    with pytest.raises(TemplateError, match="does not come to an end with these messages"):
        template.fill([Entry("user", "loop")])
    assert template.fill([Entry("user", "hi")])
    assert sys.gettrace() is None


def test_the_usual_limit_leaves_room_for_long_chats(with_template):
    template = with_template(files.STRIPPING)
    entries = [Entry(("user", "assistant")[number % 2], "x") for number in range(4001)]
    assert len(template.fill(entries)) == 4001
