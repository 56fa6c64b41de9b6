"""Find in storage what a stateless client sends again with every request, so that the sampled ids can be used.

Knows nothing of the engine. Messages match by role and text without surrounding white space, from the first one on;
what matters is that the whole path is equal, which its key says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from cachetools import TTLCache

from chat.templates import ChatTemplate, Entry
from storage.keys import path_keys
from storage.records import MessageRecord, SessionRecord, StoredPath
from storage.store import Store

RECENT, RECENT_S = 64, 3600.0  # paths that are kept in memory, and for how long: API chats stay much longer


@dataclass(frozen=True)
class Match:
    """A stored path whose messages are the first `len(path)` of a client's, each with token ids."""

    session: SessionRecord
    path: tuple[MessageRecord, ...]


class RecentPaths:
    """The paths that were stored last, as they were stored, so that a chat that goes on need not wait for storage.

    Whoever stores messages of API chats notes them here. Nothing else changes those before they expire, by the `clock`
    that says when they do.
    """

    def __init__(self, clock: Callable[[], float] = time.time, most: int = RECENT) -> None:
        self._paths: TTLCache[tuple[str, str], Match] = TTLCache(most, RECENT_S, timer=clock)

    def note(self, user_id: str, session: SessionRecord, path: Sequence[MessageRecord]) -> None:
        """These messages of an API chat of this user's are stored, from the root on."""
        self._paths[user_id, path[-1].path_key] = Match(session, tuple(path))

    def find(self, user_id: str, keys: Sequence[str], template: ChatTemplate) -> Match | None:
        """A usable path whose keys are these, or all of them but the last; nothing longer can be stored."""
        for count in (len(keys), len(keys) - 1):
            found = self._paths.get((user_id, keys[count - 1])) if count else None
            if found is None or (count < len(keys) and found.path[-1].role != "assistant"):
                continue  # the ids of a question that is followed by another one ask for a reply
            if _usable(found.path, template, is_last=count == len(keys)):
                return found
        return None


async def longest_match(
    store: Store,
    user_id: str,
    messages: Sequence[Entry],
    template: ChatTemplate,
    prefer: str | None = None,
    *,
    recent: RecentPaths | None = None,
) -> Match | None:
    """The longest usable stored path of this user's, of several equal ones that of session `prefer`, else the newest.

    Usable are paths that end in a reply, or in the user message to be answered, and whose ids are of this vocabulary.
    Stored API chats come before chats of the page, because only the former can simply be continued. Storage is not
    asked for what is among `recent`, unless a session is preferred.
    """
    keys = path_keys((message.role, message.text) for message in messages)
    if recent is not None and prefer is None and (known := recent.find(user_id, keys, template)) is not None:
        return known
    whole = keys[-1]
    wanted = [key for message, key in zip(messages, keys, strict=True) if message.role == "assistant" or key == whole]

    def choose(paths: Iterator[StoredPath]) -> Match | None:
        for key, equal in groupby(paths, attrgetter("key")):
            usable = (path for path in equal if _usable(path.messages, template, is_last=key == whole))
            if (found := _best(usable, prefer)) is not None:
                return Match(found.session, found.messages)
        return None

    return await store.choose_path(user_id, wanted[::-1], choose)


def _best(paths: Iterator[StoredPath], prefer: str | None) -> StoredPath | None:
    """Of equal paths, the newest first, the one to go on with; no more of them are read than it takes."""
    found: StoredPath | None = None
    for path in paths:
        if path.session.id == prefer:
            return path
        if found is None or (found.session.origin != "api" and path.session.origin == "api"):
            found = path
        if prefer is None and found.session.origin == "api":
            break
    return found


def _usable(path: Sequence[MessageRecord], template: ChatTemplate, *, is_last: bool) -> bool:
    if any(
        message.tokenizer.partition("/")[0] != template.identity or message.status == "streaming" for message in path
    ):
        return False
    last = path[-1]
    return not is_last or (last.tokenizer == template.rendering and template.ends_prompt(last.token_ids))
