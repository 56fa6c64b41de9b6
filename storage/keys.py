"""The key of a path of messages, by which a stateless client's list finds what is stored. Knows no database."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from storage.reasoning import split_reply

ROOT = ""
"""The key of the empty path."""


def path_key(parent_key: str, role: str, text: str) -> str:
    """The key of the path that continues the one of `parent_key` (`ROOT` to begin) with one message.

    A chained BLAKE2b digest of 32 hexadecimal digits over (role, text without surrounding white space), so equal keys
    mean equal messages all the way from the root. The reasoning of a reply does not count, because clients do not send
    it back. Any Python string is accepted, lone surrogates included.
    """
    if role == "assistant":
        text = split_reply(text).answer
    digest = hashlib.blake2b(digest_size=16)
    for part in (parent_key, role, text.strip()):
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))  # so that no two lists of parts run together
        digest.update(data)
    return digest.hexdigest()


def path_keys(messages: Iterable[tuple[str, str]]) -> list[str]:
    """The key after each of `messages`, (role, text) pairs from the root."""
    keys, key = [], ROOT
    for role, text in messages:
        key = path_key(key, role, text)
        keys.append(key)
    return keys


def first_parent_key(system_prompt: str, role: str) -> str:
    """The parent key of a session's first message.

    A system prompt kept beside the messages counts as the system message it stands for, so both ways of storing it have
    the key of the list that a client sends. Where the first message is the system prompt itself, it counts once.
    """
    if not system_prompt.strip() or role == "system":
        return ROOT
    return path_key(ROOT, "system", system_prompt)
