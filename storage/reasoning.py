"""How one stored text holds a reply's reasoning and its answer: `<think>` reasoning `</think>` answer.

Whatever a model writes around its reasoning, its stored text has this form. Knows no model and no database.
"""

from __future__ import annotations

from typing import NamedTuple

OPENING, CLOSING = "<think>", "</think>"


class Parts(NamedTuple):
    """A reply's reasoning ("": none) and its answer; `open`: the reasoning has not come to its end."""

    reasoning: str
    answer: str
    open: bool = False


def split_reply(text: str) -> Parts:
    """The parts of a reply's text, without the white space around the reasoning."""
    head = text.lstrip()
    if not head.startswith(OPENING):
        return Parts("", text)
    reasoning, closing, answer = head.removeprefix(OPENING).partition(CLOSING)
    return Parts(reasoning.strip(), answer.lstrip(), not closing)
