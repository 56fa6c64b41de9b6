"""Turn the sampled ids of one reply into text as they come, and end the reply at a stop string.

Knows nothing of where ids come from or where text goes. Three promises: no incomplete character is ever given out, no
part of a stop string is ever given out, and what was given out in total is the decoding of `delivered_ids`, but that a
model's own marks around its reasoning become those of stored texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from chat.thinking import Splitter, Writer, overlap

_BROKEN = "\N{REPLACEMENT CHARACTER}"  # what bytes that make no character, or not yet one, decode to
_LONG, _UNSURE = 16, 3  # ids: a window that is worth shortening; those at the end that may yet make a character


class Detokenizer:
    """Text of a growing list of ids. Owns the ids; `ends[i]` is the length of the text once id `i` is in it.

    Decoding everything at each token would take quadratic time, and decoding each token alone breaks characters and
    loses spaces. So only a window is decoded, from the last place but one where the text was whole:

        ids   |  given out long ago  | window: shown already | not yet shown |
                                     ^ _start                ^ _shown

    Where nothing but bytes comes that make no character, what is sure of their text waits in `_held`, so that the
    window stays short then too.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], ends_in_mark: Callable[[Sequence[int]], bool] = lambda _: False
    ) -> None:
        self._decode = decode
        self._ends_in_mark = ends_in_mark
        self._start = self._shown = 0
        self._window = ""  # the text of ids[_start:_shown]
        self._held = ""
        self.ids: list[int] = []
        self.ends: list[int | None] = []  # None: id i ends inside a character
        self.length = 0  # characters given out

    def push(self, token_id: int) -> str:
        """The text that this id completes, "" while a character is incomplete."""
        self.ids.append(token_id)
        text = self._decode(self.ids[self._start :])
        if text.endswith(_BROKEN) and not self._ends_in_mark(self.ids):
            self.ends.append(None)
            self._shorten(text)
            return ""
        piece = self._held + text[len(self._window) :]
        if piece:
            self._held = ""
            self._start, self._shown = self._shown, len(self.ids)
            self._window = self._decode(self.ids[self._start :])
            self.length += len(piece)
        self.ends.append(self.length)
        return piece

    def _shorten(self, text: str) -> None:
        cut = len(self.ids) - _UNSURE
        if cut < max(self._shown, self._start + _LONG):
            return
        sure = self._decode(self.ids[self._start : cut])
        if sure + self._decode(self.ids[cut:]) == text:  # no character lies across the cut
            self._held += sure[len(self._window) :]
            self._start, self._shown, self._window = cut, cut, ""


class StopStrings:
    """Lets text through up to the first stop string; keeps back what may yet become one.

    Of several, the one that is complete first counts, and of those the longest, so that the result does not depend on
    how the text was cut into pieces.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.found = False

    def push(self, piece: str) -> str:
        """The part of the text so far that can be given out now."""
        text = self._held + piece
        hits = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            self.found, self._held = True, ""
            return text[: min(hits)[1]]
        keep = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was kept back and, now that the reply is over, is no stop string."""
        held, self._held = self._held, ""
        return held


class Codec(Protocol):
    """What a reply needs of the model's tokenizer and template."""

    @property
    def stops(self) -> tuple[str, ...]:
        """Where a reply ends, whatever else is asked."""

    def splitter(self) -> Splitter | None:
        """What tells the reasoning of one reply from its answer; None where there is none."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of these ids, without control tokens; U+FFFD where bytes make no character."""

    def ends_in_mark(self, token_ids: Sequence[int]) -> bool:
        """Whether these ids end in U+FFFD as somebody writes it, and not in bytes that make no character."""

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text in the middle of a chat."""

    def closes(self, token_id: int) -> bool:
        """Whether the chat template itself writes this id after a reply."""


class ReplyText:
    """One reply: ids in, text out, and at the end the ids that stand for exactly that text.

    The first of `stop_ids` ends the reply and is no text, whatever it decodes to. Reasoning is in the text as
    `storage.reasoning` has it.
    """

    def __init__(self, codec: Codec, stops: Iterable[str] = (), stop_ids: Iterable[int] = ()) -> None:
        self._codec = codec
        self._detokenizer = Detokenizer(codec.decode, codec.ends_in_mark)
        self._stops = StopStrings((*codec.stops, *stops))
        self._splitter = codec.splitter()
        self._writer = Writer()
        self._stop_ids = frozenset(stop_ids)
        self._end_id: int | None = None
        self._decoded: list[str] = []  # what the ids say, as far as no stop string cut it
        self._parts = self._decoded if self._splitter is None else []

    @property
    def text(self) -> str:
        """All text given out so far."""
        return _joined(self._parts)

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the reply; later ids are ignored."""
        return self._stops.found

    @property
    def sampled(self) -> int:
        """How many ids were taken in, up to the one that ended the reply."""
        return len(self._detokenizer.ids) + (self._end_id is not None)

    def push(self, token_ids: Iterable[int]) -> str:
        """The text to give out for these ids."""
        pieces = []
        for token_id in token_ids:
            if self._stops.found or self._end_id is not None:
                break
            if token_id in self._stop_ids:
                self._end_id = token_id
            else:
                pieces.append(self._stops.push(self._detokenizer.push(token_id)))
        return self._give("".join(pieces))

    def finish(self) -> str:
        """The last text, kept back so far as it might have become a stop string."""
        text = self._give(self._stops.flush())
        if self._splitter is not None:
            self._parts.append(rest := self._writer.write(self._splitter.flush()))
            text += rest
        return text

    def delivered_ids(self) -> tuple[int, ...]:
        """The ids of the text given out: the sampled ones, as far as all their text was given out.

        Where a stop string begins inside a token, what was given out of that token is encoded again, so that the next
        turn reads what the person saw. An incomplete character at the end is not part of the reply. The id that ended
        the reply is part of it if the chat template writes that id there; some models have several.
        """
        ids, ends, text = self._detokenizer.ids, self._detokenizer.ends, _joined(self._decoded)
        count = next((i + 1 for i in reversed(range(len(ids))) if _within(ends[i], len(text))), 0)
        while self._stops.found and count and ends[count - 1] == (ends[count - 2] if count > 1 else 0):
            count -= 1  # a control token in front of the stop string
        kept = ids[:count]
        if rest := text[(ends[count - 1] or 0) if count else 0 :]:
            whole = [*kept, *self._codec.encode_text(rest)]
            return tuple(whole if self._codec.decode(whole) == text else kept)
        if self._end_id is not None and count == len(ids) and self._codec.closes(self._end_id):
            kept.append(self._end_id)
        return tuple(kept)

    def _give(self, piece: str) -> str:
        if not piece:
            return ""
        self._decoded.append(piece)
        if self._splitter is None:
            return piece
        self._parts.append(written := self._writer.write(self._splitter.push(piece)))
        return written


def _joined(parts: list[str]) -> str:
    """The text of `parts`, which become one."""
    if len(parts) > 1:
        parts[:] = ["".join(parts)]
    return parts[0] if parts else ""


def _within(end: int | None, length: int) -> bool:
    return end is not None and end <= length
