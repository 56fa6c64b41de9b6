"""A reply's reasoning: how a model marks it, telling it from the answer as both grow, and leaving it out later.

Knows no tokenizer, no template and no page.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from storage.reasoning import CLOSING, OPENING

Policy = Literal["preserve", "strip"]
"""Whether the reasoning of earlier replies stays in what the model reads, or leaves it when the next message comes."""
Part = Literal["reasoning", "answer"]


@dataclass(frozen=True)
class Marks:
    """What a model writes before its reasoning, between that and the answer, and before an answer without reasoning."""

    opening: str
    closing: str
    direct: str = ""


STORED = Marks(OPENING, CLOSING)
"""The marks in stored texts, whatever the model's own are."""
KNOWN = (
    STORED,
    Marks("[THINK]", "[/THINK]"),
    Marks(
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
        "<|channel|>final<|message|>",
    ),
    Marks("<seed:think>", "</seed:think>"),
    Marks("◁think▷", "◁/think▷"),
    Marks("<thought>", "</thought>"),
)


def find_marks(added: Collection[str], source: str) -> Marks | None:
    """The marks of a model whose vocabulary has these `added` tokens, and whose template is `source`."""
    for marks in KNOWN:
        if {marks.opening, marks.closing} <= set(added) or marks.opening in source or marks.closing in source:
            return marks
    return None


class Splitter:
    """Tells the reasoning of one growing reply from its answer. `opened`: the prompt ended in the opening mark.

    What may yet become a mark is kept back, so the result does not depend on how the text was cut into pieces.
    """

    def __init__(self, marks: Marks, *, opened: bool = False) -> None:
        self._marks = marks
        self._part: Part | None = None  # None: not known yet
        self._default: Part = "reasoning" if opened else "answer"
        self._held = ""

    def push(self, piece: str) -> list[tuple[Part, str]]:
        """What the text so far surely is; each part is told, perhaps with "", when it begins."""
        text, self._held = self._held + piece, ""
        told: list[tuple[Part, str]] = []
        if self._part is None:
            text = self._begin(text)
        if self._part == "reasoning":
            thought, closing, text = text.partition(self._marks.closing)
            if not closing:
                keep = overlap(thought, self._marks.closing)
                thought, self._held = thought[: len(thought) - keep], thought[len(thought) - keep :]
            told.append(("reasoning", thought))
            if closing:
                self._part = "answer"
        if self._part == "answer":
            told.append(("answer", text))
        return told

    def flush(self) -> list[tuple[Part, str]]:
        """What was kept back and, now that the reply is over, is no mark."""
        held, self._held = self._held, ""
        return [(self._part or self._default, held)] if held else []

    def _begin(self, text: str) -> str:
        """`text` without the mark that it begins with; all of it is kept back where it may yet become one."""
        head = text.lstrip()
        beginnings: dict[str, Part] = {self._marks.opening: "reasoning"}
        if self._marks.direct:
            beginnings[self._marks.direct] = "answer"
        for mark, part in beginnings.items():
            if head.startswith(mark):
                self._part = part
                return head.removeprefix(mark)
        if any(mark.startswith(head) for mark in beginnings):
            self._held = text
            return ""
        self._part = self._default
        return text


class Writer:
    """Writes what a `Splitter` tells in the stored form."""

    def __init__(self) -> None:
        self._part: Part | None = None

    def write(self, told: Sequence[tuple[Part, str]]) -> str:
        """The text to add."""
        texts = []
        for part, text in told:
            if part != self._part:
                texts.append(OPENING if part == "reasoning" else CLOSING if self._part == "reasoning" else "")
            self._part = part
            texts.append(text)
        return "".join(texts)


def stored_form(text: str, splitter: Splitter | None) -> str:
    """A whole reply as it is stored; without a splitter it has no reasoning."""
    if splitter is None:
        return text
    writer = Writer()
    return writer.write(splitter.push(text)) + writer.write(splitter.flush())


class Trimmer:
    """Takes the white space around the reasoning away, as `split_reply` does for a whole text."""

    def __init__(self) -> None:
        self._part: Part | None = None
        self._thought = False  # whether there was any reasoning
        self._blank = False  # whether white space that comes now is at the beginning of its part
        self._held = ""

    def trim(self, told: Sequence[tuple[Part, str]]) -> list[tuple[Part, str]]:
        """What there is to tell now, without empty texts."""
        trimmed: list[tuple[Part, str]] = []
        for part, piece in told:
            self._thought |= part == "reasoning"
            if part != self._part:
                self._part, self._blank, self._held = part, self._thought, ""
            text = (self._held + piece).lstrip() if self._blank else self._held + piece
            self._blank &= not text
            kept = text.rstrip() if part == "reasoning" else text
            self._held = text[len(kept) :]
            if kept:
                trimmed.append((part, kept))
        return trimmed


def reasoning_tokens(pieces: Sequence[str], marks: Marks, *, opened: bool) -> tuple[int, str]:
    """How many first tokens of a reply are reasoning, and what the last of them says beyond it (mostly "").

    `pieces` are the texts of its tokens. Tokens of white space after the reasoning belong to it; (0, "") where there is
    none.
    """
    text = "".join(pieces)
    start = len(text) - len(text.lstrip())
    if text.startswith(marks.opening, start):
        start += len(marks.opening)
    elif not opened:
        return 0, ""
    at = text.find(marks.closing, start)
    if at < 0:
        return len(pieces), ""
    end, total, count = at + len(marks.closing), 0, 0
    while total < end or (count < len(pieces) and not text[end : total + len(pieces[count])].strip()):
        total += len(pieces[count])
        count += 1
    return count, text[end:total].lstrip()


def overlap(text: str, mark: str) -> int:
    """The length of the longest end of `text` that is a beginning of `mark`, but not all of it."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:size])), 0)
