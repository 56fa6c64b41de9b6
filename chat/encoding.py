"""Texts to token ids and back, so that control tokens are only those that a template wrote.

Knows neither chats nor templates. What a user typed may spell a control token (`<|im_end|>`); `defuse` puts a character
that occurs nowhere else inside it, and `encode` cuts the text there, so that no such token can come of it. Some
tokenizers rewrite what they read (full-width letters, capitals) and only then look for control tokens, or have them
among the words of their vocabulary; so `encode` also looks at what came out, and cuts wherever a control token stands
for anything but its own text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from tokenizers import Tokenizer

from chat.errors import InvalidText
from chat.token_bytes import BROKEN, LeastTokens, byte_tokens, mended

_PRIVATE_USE = range(0x100000, 0x10FFFE)  # code points that no text means anything by
_PRIVATE_USE_RE = re.compile(f"[{chr(_PRIVATE_USE[0])}-{chr(_PRIVATE_USE[-1])}]")

SHORT = 2000  # characters that are encoded in less time than it takes to let others run meanwhile


class Lead(NamedTuple):
    """What a text in the middle of a chat is encoded behind, and its ids; `swallows`: it takes white space after it."""

    text: str
    ids: list[int]
    swallows: bool = False


class TextEncoder:
    """The tokenizer of one model. Immutable; safe to use from threads.

    `added` are the texts of the tokens that are no part of words, by id; `control` those of them that are special, or
    spelt in what the template writes, `source`; `swallows` names those that take the white space after them.
    """

    def __init__(self, tokenizer: Tokenizer, source: str = "") -> None:
        self.tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.added = {index: token.content for index, token in added.items()}
        self.swallows = {index for index, token in added.items() if token.rstrip}
        self.control = {
            index: token.content
            for index, token in added.items()
            if token.special or (token.content in source and not _is_plain(token.content))
        }
        self._hidden = {index for index, token in added.items() if token.special}
        longest_first = sorted(self.control.values(), key=len, reverse=True)
        self._control_re = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._unknown = self._unknown_ids()
        self._bytes = byte_tokens(tokenizer)
        self._least = LeastTokens(tokenizer)
        self._lead = self._choose_lead()
        spellings = [self.encode_text(text) for text in (BROKEN, f" {BROKEN}")]
        self._broken = [ids for ids in spellings if self.decode(ids).strip() == BROKEN]

    def encode_text(self, text: str) -> list[int]:
        """Token ids of text in the middle of a chat; the texts of control tokens in it stay plain text."""
        (cut,) = unused_characters([text], 1)
        return self.encode(self.defuse(text, cut), cut, start=False)

    def encode(self, text: str, cut: str, *, start: bool) -> list[int]:
        """Token ids of rendered text: control tokens count, except those that `defuse` cut in two.

        In the middle of a chat (not `start`) the text is encoded behind something else, because some tokenizers put a
        space before the first word of whatever they are given. Raises InvalidText when the tokenizer cannot read it.
        """
        pieces = [piece for piece in text.split(cut) if piece]
        first = self._encode_honestly(pieces[:1], bare=True) if start else []
        return [token for ids in (*first, *self._encode_honestly(pieces[len(first) :])) for token in ids]

    def encode_bare(self, text: str) -> list[int]:
        """Token ids of `text` exactly as the tokenizer makes them of a text of its own. Raises InvalidText."""
        return self._batch([text])[0]

    def least_tokens(self, text: str) -> int:
        """A number of tokens that the encoding of rendered text surely reaches, found without encoding it."""
        return self._least(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of these tokens, without control tokens; U+FFFD where bytes make no character."""
        text = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        if self._bytes and BROKEN in text:
            shown = [token for token in token_ids if token not in self._hidden]
            return mended(self.tokenizer, self._bytes, shown)
        return text

    def ends_in_mark(self, token_ids: Sequence[int]) -> bool:
        """Whether these tokens end in U+FFFD as somebody writes it, and not in bytes that make no character."""
        return any(list(token_ids[-len(ids) :]) == ids for ids in self._broken)

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token by itself, control tokens included."""
        return self.tokenizer.decode_batch([[token] for token in token_ids], skip_special_tokens=False)

    def defuse(self, text: str, cut: str) -> str:
        """`text` with `cut` inside every text that would become a control token."""
        return self._control_re.sub(lambda found: found[0][:1] + cut + self.defuse(found[0][1:], cut), text)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _encode_honestly(self, pieces: Sequence[str], *, bare: bool = False) -> list[list[int]]:
        """The ids of each piece, without a control token that the piece does not spell."""
        encoded = self._batch(pieces) if bare else self._batch_behind(self._lead, pieces)
        for number, (piece, ids) in enumerate(zip(pieces, encoded, strict=True)):
            made = [self.control[token] for token in ids if token in self.control and token not in self._unknown]
            if made and made != self._control_re.findall(piece):
                encoded[number] = self._without_forged(piece, ids, bare=bare)
        return encoded

    def _without_forged(self, text: str, ids: list[int], *, bare: bool) -> list[int]:
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        cuts = [0]
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            known = token in self.control and token not in self._unknown
            if known and text[start:end].strip() != self.control[token]:
                if end - start < 2:
                    raise InvalidText(f"The model takes {text[start:end]!r} for a control token; leave it out.")
                cuts.append(start + 1)
        if len(cuts) == 1:
            return ids
        parts = [text[start:end] for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True) if end > start]
        first = self._encode_honestly(parts[:1], bare=bare)
        return [token for part in (*first, *self._encode_honestly(parts[1:])) for token in part]

    def _batch_behind(self, lead: Lead, pieces: Sequence[str]) -> list[list[int]]:
        """As `_batch`, for texts that something comes before."""
        count = len(lead.ids)
        led = self._batch([piece if lead.swallows and piece[0].isspace() else lead.text + piece for piece in pieces])
        behind = [ids[count:] if ids[:count] == lead.ids else None for ids in led]
        alone = iter(self._batch([piece for piece, ids in zip(pieces, behind, strict=True) if ids is None]))
        return [next(alone) if ids is None else ids for ids in behind]

    def _batch(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        try:
            if len(texts) == 1 and len(texts[0]) <= SHORT:
                return [list(self.tokenizer.encode(texts[0], add_special_tokens=False).ids)]
            encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)  # others may run
        except Exception as error:  # tokenizers raises bare Exceptions
            raise InvalidText(f"The model's tokenizer cannot read this text: {error}") from None
        return [list(encoding.ids) for encoding in encodings]

    def _unknown_ids(self) -> set[int]:
        """The token that stands for every character outside the vocabulary, if there is one."""
        named = getattr(self.tokenizer.model, "unk_token", None)
        known = {self.tokenizer.token_to_id(named)} if named else set()
        with suppress(InvalidText):
            known |= set(self.encode_bare(chr(_PRIVATE_USE[-1])))  # one kind of tokenizer does not name it
        return {index for index in known if index is not None}

    def _choose_lead(self) -> Lead:
        """The first lead that leaves a word as it is; some tokenizers put a space even behind a control token."""
        control = sorted(self.control, key=lambda index: (index in self.swallows, index))[:1]
        leads = [self._lead_of(self.control[index], index in self.swallows) for index in control]
        with suppress(InvalidText):  # not in this vocabulary
            leads.append(self._lead_of("\n"))
        leads.append(Lead("", []))
        vocabulary = self.tokenizer.get_vocab()
        word = "a" if "a" in vocabulary else min((w for w in vocabulary if w.isascii() and w.isalpha()), default="a")
        alone = self.encode_bare(word)
        whole = self.decode(alone) + word
        fits = (lead for lead in leads if self.decode([*alone, *self._batch_behind(lead, [word])[0]]) == whole)
        return next(fits, leads[0])

    def _lead_of(self, text: str, swallows: bool = False) -> Lead:
        return Lead(text, self.encode_bare(text), swallows)


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


def _is_plain(text: str) -> bool:
    """Whether a token could be a word or white space as people write them, so that it is no sign of a template."""
    return text.isspace() or text.replace(" ", "").isalnum()
