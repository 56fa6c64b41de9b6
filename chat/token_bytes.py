"""What a tokenizer does with bytes: tokens that stand for one byte each, and how few tokens a text can come to.

Knows nothing of chats, templates and control tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"  # what bytes that make no character, or not yet one, decode to
COMPOSED = 4  # composing characters (NFC) makes a text shorter than this many times, in UTF-8


def byte_tokens(tokenizer: Tokenizer) -> dict[int, int]:
    """The bytes that single tokens (`<0xE2>`) stand for, by id; none where the tokenizer has no such tokens."""
    decoder = tokenizer.decoder
    if decoder is None or decoder.decode(["<0x41>"]) != "A":
        return {}
    ids = {tokenizer.token_to_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
    return {index: byte for index, byte in ids.items() if index is not None}


def mended(tokenizer: Tokenizer, byte_ids: Mapping[int, int], token_ids: Sequence[int]) -> str:
    """The text of these tokens, where only bytes that make no character become U+FFFD.

    The library gives up a whole run of byte tokens for one bad byte in it, so that the text of the first would change
    with the last. The tokens must be those to be shown.
    """
    words: list[str] = []
    run = bytearray()
    for token in token_ids:
        if token in byte_ids:
            run.append(byte_ids[token])
            continue
        words += _words(run)
        run.clear()
        words.append(tokenizer.id_to_token(token) or "")
    return str(tokenizer.decoder.decode([*words, *_words(run)]))


def _words(run: bytearray) -> list[str]:
    """The tokens of a run of bytes, the bad ones replaced."""
    words: list[str] = []
    for piece in re.split(f"({BROKEN})", run.decode("utf-8", "replace")):
        words += [BROKEN] if piece == BROKEN else [f"<0x{byte:02X}>" for byte in piece.encode()]
    return words


class LeastTokens:
    """A lower bound of the number of tokens of a text, from its length alone.

    It holds for every text; 0 where characters may vanish (unknown ones, or in a normaliser that is not known here).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        vocabulary = tokenizer.get_vocab()
        added = tokenizer.get_added_tokens_decoder().values()
        splits = _parts(tokenizer.pre_tokenizer)
        by_letters = any(part["type"] == "ByteLevel" for part in splits)
        longest = max((len(word if by_letters else word.encode()) for word in vocabulary), default=1)
        longest = max([longest, *(len(token.content.encode()) for token in added)])
        shrinks = [_shrinks(part) for part in _parts(tokenizer.normalizer)]
        holds = all(map(_keeps, splits)) and all(shrinks) and _reads_all(tokenizer, by_letters)
        self._bytes = longest * max(shrinks, default=1) if holds else 0
        unknown = {byte for byte, letter in _byte_letters().items() if letter not in vocabulary}
        self._unknown = bytes(unknown) if by_letters else b""
        self._swallows = any(token.lstrip or token.rstrip for token in added)

    def __call__(self, text: str) -> int:
        """At least so many tokens."""
        if not self._bytes:
            return 0
        data = ("".join(text.split()) if self._swallows else text).encode("utf-8", "replace")
        return -(-len(data.translate(None, self._unknown)) // self._bytes)


def _parts(component: Any) -> list[dict[str, Any]]:
    """A normaliser or pre-tokenizer as its parts, each with its `type`."""
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    found: list[dict[str, Any]] = state.get("normalizers") or state.get("pretokenizers") or [state]
    return found


def _reads_all(tokenizer: Tokenizer, by_letters: bool) -> bool:
    """Whether each byte of a text becomes part of a token (or, by letters, is left out for itself alone)."""
    model = tokenizer.model
    if type(model).__name__ != "BPE":
        return False
    return model.unk_token is None if by_letters else model.byte_fallback and len(byte_tokens(tokenizer)) == 256


def _keeps(split: Mapping[str, Any]) -> bool:
    """Whether a pre-tokenizer leaves nothing out."""
    return split["type"] in ("ByteLevel", "Metaspace", "Digits") or split.get("behavior", "Removed") != "Removed"


def _shrinks(part: Mapping[str, Any]) -> int:
    """How many times shorter a normaliser may make a text, in bytes; 0: any."""
    if part["type"] == "NFC":
        return COMPOSED
    keeps = part["type"] == "Prepend" or (part["type"] == "Replace" and part["pattern"] == {"String": " "})
    return 1 if keeps and part.get("content", "-") else 0


def _byte_letters() -> dict[int, str]:
    """The letters by which byte-level vocabularies spell bytes, as GPT-2 began it."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(0x100) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {byte: chr(0x100 + number) for number, byte in enumerate(hidden)}
