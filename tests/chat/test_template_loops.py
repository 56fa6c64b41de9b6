"""Which chat templates can be trusted to come to an end."""

from __future__ import annotations

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from chat.rendering import PLAIN, Renderer
from chat.template_loops import only_over_messages
from chat.templates import ChatTemplate

ENDS = [
    PLAIN,
    "{% for m in messages[1:] %}{{ m['content'] | trim }}{% endfor %}",
    "{% set rest = messages[1:] %}{% for m in rest %}{{ m.content.strip() }}{% endfor %}",
    "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}",
    "{% for t in tools %}{{ t | tojson }}{% endfor %}{% for m in messages[::-1] %}{{ loop.index }}{% endfor %}",
    "{% if not messages %}{{ raise_exception('none') }}{% endif %}{{ strftime_now('%d') }}",
    "{% set ns = namespace(found=false) %}{% for m in messages %}{% set ns.found = true %}{% endfor %}",
]
MAY_NOT = [
    "{% for i in range(100000) %}{% endfor %}",
    "{% set r = range %}{% for m in messages %}{{ r(100000) | list }}{% endfor %}",
    "{% for m in messages %}{% for n in messages %}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% for c in m.content %}{% for d in m.content %}{% endfor %}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% for c in m.a %}{% for d in c.b %}{% endfor %}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% set m = 'x'.ljust(1000000000) %}{% for c in m %}{% endfor %}{% endfor %}",
    "{% for messages in messages %}{% for m in messages %}{% endfor %}{% endfor %}",
    "{% set messages = '%1000000000d' % 1 %}{% for m in messages %}{% endfor %}",
    "{% set a, b = messages, messages %}{% for m in a %}{% endfor %}",
    "{% set a = b %}{% set b = a %}{% for m in a %}{% endfor %}",
    "{% set a %}text{% endset %}{% for m in a %}{% endfor %}",
    "{% for m in 'x' * 1000000000 %}{% endfor %}",
    "{{ 'x' * 3 }}",
    "{{ messages | slice(1000000000) | list }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{{ lipsum(n=1000000000) }}",
    "{% set ns = namespace(f=lipsum) %}{{ ns.f(n=1000000000) }}",
]


def ends(source: str) -> bool:
    return only_over_messages(ImmutableSandboxedEnvironment().parse(source))


@pytest.mark.parametrize("source", ENDS)
def test_loops_over_the_messages_come_to_an_end(source):
    assert ends(source)


@pytest.mark.parametrize("source", MAY_NOT)
def test_of_anything_else_that_cannot_be_said(source):
    assert not ends(source)


def counted(source: str, monkeypatch) -> bool:
    """Whether the steps of a template are counted when it is rendered."""
    renderer, seen = Renderer(source, {}), []
    monkeypatch.setattr("chat.rendering.sys.settrace", seen.append)
    renderer.render([{"role": "user", "content": "one"}], generation=True)
    return bool(seen)


def test_steps_are_counted_only_where_it_takes_that(monkeypatch):
    assert not counted("{% for m in messages %}{{ m.content }}{% endfor %}", monkeypatch)
    assert counted("{% for i in range(3) %}{% endfor %}", monkeypatch)


def test_the_embedded_models_template_is_one_that_ends(embedded_model):
    source = ChatTemplate.load(embedded_model)._render.__self__._source
    assert ends(source)
