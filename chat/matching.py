"""Find in storage what a stateless client sends again with every request, so that the sampled ids can be used.

Knows nothing of the engine. Messages match by role and text without surrounding white space, from the first one on;
what matters is that the whole path is equal, which its key says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from chat.templates import ChatTemplate, Entry
from storage.errors import UnknownMessage
from storage.keys import path_keys
from storage.records import MessageRecord, SessionRecord
from storage.store import Store


@dataclass(frozen=True)
class Match:
    """A stored path whose messages are the first `len(path)` of a client's, each with token ids."""

    session: SessionRecord
    path: tuple[MessageRecord, ...]


async def longest_match(
    store: Store, user_id: str, messages: Sequence[Entry], template: ChatTemplate, prefer: str | None = None
) -> Match | None:
    """The longest usable stored path of this user's, of several equal ones that of session `prefer`, else the newest.

    Usable are paths that end in a reply, or in the user message to be answered, and whose ids are of this vocabulary.
    Stored API chats come before chats of the page, because only the former can simply be continued.
    """
    keys = path_keys((message.role, message.text) for message in messages)
    for count in range(len(messages), 0, -1):
        is_last = count == len(messages)
        if messages[count - 1].role != "assistant" and not is_last:
            continue
        found: Match | None = None
        for record in await store.find_paths(user_id, keys[count - 1]):
            match = await _usable(store, user_id, record, template, is_last=is_last)
            if match is None:
                continue
            if match.session.id == prefer:
                return match
            if found is None or (found.session.origin != "api" and match.session.origin == "api"):
                found = match
            if prefer is None and found.session.origin == "api":
                break
        if found is not None:
            return found
    return None


async def _usable(
    store: Store, user_id: str, record: MessageRecord, template: ChatTemplate, *, is_last: bool
) -> Match | None:
    try:
        session, path = await asyncio.gather(
            store.session(user_id, record.session_id), store.path(record.session_id, record.id)
        )
    except UnknownMessage:  # deleted meanwhile
        return None
    if session is None or any(
        message.tokenizer.partition("/")[0] != template.identity or message.status == "streaming" for message in path
    ):
        return None
    last = path[-1]
    if is_last and not (last.tokenizer == template.rendering and template.ends_prompt(last.token_ids)):
        return None
    return Match(session, tuple(path))
