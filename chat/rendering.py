"""A model's chat template as a function: messages in, text out.

Knows nothing of tokens. Rendering is transformers' own, with three additions: a template that has no place for a system
prompt gets it at the beginning of the next user message; the time that a template writes is the caller's, so that a
chat can keep the one it began with; and a template that does not come to an end is stopped. Templates are programs that
came with the model. They run in Jinja's sandbox, which keeps them from everything but their messages; how much memory
they take is not limited. The steps of one that can only go over its messages are not counted, which takes several times
as long as rendering.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from types import FrameType
from typing import Any, TypeVar

from transformers.utils.chat_template_utils import _compile_jinja_template

from chat.errors import TemplateError
from chat.template_loops import only_over_messages

SHOWN_ROLES = 8  # in an error about the order of messages
MOST_STEPS = 10_000_000  # lines of the compiled template, a few seconds; real ones take some hundred for each message

Message = dict[str, str]
Result = TypeVar("Result")

PLAIN = """{{ beginning }}{% for message in messages %}{% if message.role == 'user' %}User:
{{ message.content }}

{% elif message.role == 'assistant' %}Assistant:
{{ message.content }}

{% else %}{{ message.content }}

{% endif %}{% endfor %}{% if add_generation_prompt %}Assistant:
{% endif %}"""
"""For models without a template. `beginning` is what the tokenizer puts before every text."""
PLAIN_NOTICE = (
    "This model has no chat template; a plain one is used, so replies may be poor. Choose an instruct model for "
    "chatting."
)
PLAIN_STOPS = ("\n\nUser:", "\nUser:", "\n\nAssistant:", "\nAssistant:")
"""Where a reply ends, because a model that was not made for chatting goes on with the other side's lines."""


class Renderer:
    """The template `source`, which may use the `names` (`bos_token`, …). Immutable; safe to use from threads."""

    def __init__(self, source: str, names: Mapping[str, str]) -> None:
        self._source = source
        self._names = dict(names)
        self._ends = _surely_ends(source)
        self.merges_system = False
        if not self._shows_system():
            self.merges_system = True
            self.merges_system = self._shows_system()

    def render(self, messages: Sequence[Message], *, generation: bool, at: float | None = None) -> str:
        """What the template makes of `messages`, with the generation prompt or without, as of the time `at` (now).

        `at` is in seconds since the epoch. Raises TemplateError with the template's own words.
        """
        moment = now() if at is None else datetime.fromtimestamp(at)
        given: dict[str, Any] = {
            **self._names,
            "messages": _merged(messages) if self.merges_system else [dict(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": generation,
            "strftime_now": moment.strftime,
        }
        try:
            compiled = _compile_jinja_template(self._source)  # which transformers keeps
            return str(compiled.render(given)) if self._ends else _limited(lambda: str(compiled.render(given)))
        except _Endless:
            raise TemplateError("The model's chat template does not come to an end with these messages.") from None
        except Exception as error:  # it may raise anything
            roles = ", ".join(message["role"] for message in messages[:SHOWN_ROLES])
            more = f", … {len(messages):,} in all" if len(messages) > SHOWN_ROLES else ""
            raise TemplateError(
                f"The model's chat template refuses messages in this order ({roles}{more}): {error}"
            ) from None

    def _shows_system(self) -> bool:
        """Whether the template takes a system prompt, and writes it."""
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one"}]
        with suppress(TemplateError):
            return "be brief" in self.render(messages, generation=True)
        return False


def now() -> datetime:
    """The time on this machine."""
    return datetime.now()


class _Endless(Exception):  # noqa: N818
    """The template takes too many steps."""


def _surely_ends(source: str) -> bool:
    """Whether rendering takes a time that grows with the messages alone, whatever they are."""
    with suppress(Exception):  # it is not even a template, which rendering will say
        return only_over_messages(_compile_jinja_template(source).environment.parse(source))
    return False


def _merged(messages: Sequence[Message]) -> list[Message]:
    """`messages` where each system message is the beginning of the user message after it."""
    merged: list[Message] = []
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "system":
            waiting += [message["content"]] if message["content"].strip() else []
            continue
        if waiting and message["role"] != "user":
            merged.append({"role": "user", "content": "\n\n".join(waiting)})
            waiting = []
        merged.append({**message, "content": "\n\n".join([*waiting, message["content"]])})
        waiting = []
    if waiting:
        merged.append({"role": "user", "content": "\n\n".join(waiting)})
    return merged


def _limited(work: Callable[[], Result]) -> Result:
    """The result of `work`, which may take so many steps; counting them costs a fraction of a millisecond a message."""
    left = MOST_STEPS

    def count(_frame: FrameType, _event: str, _argument: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise _Endless
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        return work()
    finally:
        sys.settrace(before)
