"""Texts to token ids and back, so that control tokens are only those that a template wrote.

Knows neither chats nor templates. What a user typed may spell a control token (`<|im_end|>`); `defuse` puts a character
that occurs nowhere else inside it, and `encode` cuts the text there, so that no such token can come of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import islice

from tokenizers import Tokenizer

from chat.errors import InvalidText

_PRIVATE_USE = range(0x100000, 0x10FFFE)  # code points that no text means anything by
_PRIVATE_USE_RE = re.compile(f"[{chr(_PRIVATE_USE[0])}-{chr(_PRIVATE_USE[-1])}]")


class TextEncoder:
    """The tokenizer of one model. Immutable; safe to use from threads.

    `added` are the texts of the tokens that are no part of words, by id; `swallows` names those that take the white
    space after them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.added = {index: token.content for index, token in added.items()}
        self.swallows = {index for index, token in added.items() if token.rstrip}
        self._control = {index: token.content for index, token in added.items() if token.special}
        longest_first = sorted(self._control.values(), key=len, reverse=True)
        self._control_re = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._anchor_id = min(self._control, key=lambda index: (index in self.swallows, index), default=None)

    def encode_text(self, text: str) -> list[int]:
        """Token ids of text in the middle of a chat; the texts of control tokens in it stay plain text."""
        (cut,) = unused_characters([text], 1)
        return self.encode(self.defuse(text, cut), cut, start=False)

    def encode(self, text: str, cut: str, *, start: bool) -> list[int]:
        """Token ids of rendered text: control tokens count, except those that `defuse` cut in two.

        In the middle of a chat (not `start`) the text is encoded behind a control token, because some tokenizers put a
        space before the first word of whatever they are given.
        """
        ids: list[int] = []
        for piece in text.split(cut):
            if piece:
                ids.extend(self.encode_bare(piece) if start else self._encode_behind_control(piece))
                start = False
        return ids

    def encode_bare(self, text: str) -> list[int]:
        """Token ids of `text` exactly as the tokenizer makes them of a text of its own."""
        (encoded,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)  # lets other threads run
        return list(encoded.ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of these tokens, without control tokens; U+FFFD where bytes make no character."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def defuse(self, text: str, cut: str) -> str:
        """`text` with `cut` inside every text that would become a control token."""
        return self._control_re.sub(lambda found: found[0][:1] + cut + self.defuse(found[0][1:], cut), text)

    def _encode_behind_control(self, text: str) -> list[int]:
        anchor = self._anchor_id
        if anchor is None or (anchor in self.swallows and text[0].isspace()):
            return self.encode_bare(text)
        ids = self.encode_bare(self._control[anchor] + text)
        return ids[1:] if ids[0] == anchor else self.encode_bare(text)


def unused_characters(texts: Iterable[str], count: int) -> list[str]:
    """The first `count` private-use characters that no text contains. Raises InvalidText when too few are left."""
    used = {found for text in texts if not text.isascii() for found in _PRIVATE_USE_RE.findall(text)}
    unused = list(islice((chr(code) for code in _PRIVATE_USE if chr(code) not in used), count))
    if len(unused) < count:
        raise InvalidText(
            f"The messages use almost every private-use character from U+{_PRIVATE_USE[0]:X} to "
            f"U+{_PRIVATE_USE[-1]:X}; {count} of them must be left unused."
        )
    return unused
