"""The store: everything Keepwarm remembers, behind async methods that never block the event loop.

A call's SQL runs on one writing thread or on one of a few reading threads, in a transaction of its own; what comes back
is a frozen record. A call that returned is on the disk. A cancelled write that had begun is still carried out.
The queries are in `sessions`, `messages` and `saved`, and in the parts' own modules; the threads in `threads`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy.orm import Session

from storage import messages, paths, saved, sessions
from storage.cache_tables import CacheTables, note_drops
from storage.catalog import Catalog
from storage.deletion import mark_scrub_due
from storage.records import (
    KEEP,
    Keep,
    MessageRecord,
    Origin,
    Role,
    SessionRecord,
    SessionSummary,
    Status,
    StoredPath,
    TurnRecord,
    UserRecord,
    new_id,
)
from storage.threads import Threads

T = TypeVar("T")


class Store:
    """The database of one data directory. Usable from one event loop; every method may raise a StorageError.

    `catalog` has the models, `cache` the tables about the cache.
    """

    def __init__(self, threads: Threads, clock: Callable[[], float]) -> None:
        self._threads = threads
        self._clock = clock
        self.catalog = Catalog(threads, clock)
        self.cache = CacheTables(threads)

    @classmethod
    async def open(cls, data_dir: Path, clock: Callable[[], float] = time.time) -> Store:
        """Open the database of `data_dir`, making both where missing and upgrading an older one (a backup first).

        Raises DataDirectoryError, DatabaseDamaged, DatabaseTooNew, MigrationFailed, DatabaseBusy or DiskFull.
        """
        return cls(await Threads.open(data_dir), clock)

    async def close(self) -> None:
        """Finish the writes that were asked for, then close the file. A second call does nothing."""
        await self._threads.close()

    # Users

    async def implicit_admin(self) -> UserRecord:
        """The one user of a loopback installation ("local", an admin), made with a random salt at the first call."""
        now = self._clock()
        return await self._threads.write(lambda db: sessions.implicit_admin(db, now))

    # Sessions

    async def create_session(
        self,
        user_id: str,
        *,
        title: str = "",
        system_prompt: str = "",
        origin: Origin = "chat",
        expires_at: float | None = None,
        model_id: str | None = None,
    ) -> SessionRecord:
        """A new, empty session of this user. Raises UnknownModel."""
        now = self._clock()
        record = SessionRecord(
            id=new_id(),
            user_id=user_id,
            title=title,
            system_prompt=system_prompt,
            origin=origin,
            created_at=now,
            updated_at=now,
            leaf_id=None,
            expires_at=expires_at,
            model_id=model_id,
        )
        return await self._threads.write(lambda db: sessions.insert_session(db, record))

    async def session(self, user_id: str, session_id: str) -> SessionRecord | None:
        """The session; None when there is none or it is another user's."""
        return await self._threads.read(lambda db: sessions.find_session(db, user_id, session_id))

    async def sessions(
        self,
        user_id: str,
        *,
        origin: Origin = "chat",
        limit: int = 200,
        before: SessionSummary | float | None = None,
    ) -> list[SessionSummary]:
        """Up to `limit` sessions of this user, the last touched first; reads no message and no system prompt.

        `before` continues a list: the last record of the page so far (exact), or a time (sessions touched earlier).
        """
        return await self._threads.read(lambda db: sessions.list_sessions(db, user_id, origin, limit, before))

    async def update_session(
        self,
        user_id: str,
        session_id: str,
        *,
        title: str | Keep = KEEP,
        system_prompt: str | Keep = KEEP,
        leaf_id: str | Keep | None = KEEP,
        model_id: str | Keep | None = KEEP,
        expires_at: float | Keep | None = KEEP,
        pinned: bool | Keep = KEEP,
        ttl_s: float | Keep | None = KEEP,
        touch: bool = True,
    ) -> SessionRecord | None:
        """Change what is given, and move the session to the top of the list if `touch`; the session as it is now.

        None when it is not this user's. UnknownMessage when `leaf_id` is no message of the session; UnknownModel.
        """
        given = {
            "title": title,
            "system_prompt": system_prompt,
            "leaf_id": leaf_id,
            "model_id": model_id,
            "expires_at": expires_at,
            "pinned": pinned,
            "ttl_s": ttl_s,
        }
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not KEEP}
        if touch:
            changes["updated_at"] = self._clock()

        def work(db: Session) -> SessionRecord | None:
            session = sessions.change_session(db, user_id, session_id, changes)
            if session is not None and "system_prompt" in changes:
                messages.rekey(db, session_id)
            return session

        return await self._threads.write(work)

    async def settle_session(self, session_id: str, *, title: str, model_id: str) -> None:
        """Give the session this title and this model where it has none yet; a forgotten model counts as none."""
        await self._threads.write(lambda db: sessions.settle_session(db, session_id, title, model_id))

    async def delete_session(self, user_id: str, session_id: str) -> bool:
        """Delete the session with all that belongs to it; False when it is not this user's.

        On return its text is out of the database file, the WAL and the backups. Takes about half a second per 100 MB of
        database, on the writing thread.
        """
        return bool(await self._delete(lambda db: sessions.owned_session_id(db, user_id, session_id)))

    async def delete_expired(self, now: float) -> list[str]:
        """Delete, as above, every session whose `expires_at` is `now` or earlier; their ids."""
        return await self._delete(lambda db: sessions.expired_session_ids(db, now))

    async def _delete(self, find: Callable[[Session], list[str]]) -> list[str]:
        def work(db: Session) -> list[str]:
            found = find(db)
            if found:
                sessions.delete_sessions(db, found)
                note_drops(db, found)
                mark_scrub_due(db)
            return found

        found = await self._threads.write(work)
        if found:
            await self._threads.scrub()
        return found

    # Messages

    async def add_message(
        self,
        session_id: str,
        *,
        parent_id: str | None,
        role: Role,
        text: str,
        token_ids: Sequence[int],
        tokenizer: str,
        status: Status = "complete",
        finish_reason: str | None = None,
        error: str | None = None,
    ) -> MessageRecord:
        """Add a message under `parent_id` (None: a root), make it the session's leaf and touch the session.

        Raises UnknownSession, UnknownMessage (the parent), InvalidText, InvalidValue (a role, a status, a token id).
        """
        now = self._clock()
        return await self._threads.write(
            lambda db: messages.insert_message(
                db,
                message_id=new_id(),
                session_id=session_id,
                parent_id=parent_id,
                role=role,
                text=text,
                token_ids=tuple(token_ids),
                tokenizer=tokenizer,
                status=status,
                finish_reason=finish_reason,
                error=error,
                now=now,
            )
        )

    async def update_message(
        self,
        message_id: str,
        *,
        text: str | Keep = KEEP,
        token_ids: Sequence[int] | Keep = KEEP,
        tokenizer: str | Keep = KEEP,
        status: Status | Keep = KEEP,
        finish_reason: str | Keep | None = KEEP,
        error: str | Keep | None = KEEP,
    ) -> bool:
        """Change what is given, for instance a growing reply's text and ids; False when the message is gone."""
        given = {"text": text, "status": status, "finish_reason": finish_reason, "error": error}
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not KEEP}
        ids = None if isinstance(token_ids, Keep) else tuple(token_ids)
        name = None if isinstance(tokenizer, Keep) else tokenizer
        return await self._threads.write(lambda db: messages.change_message(db, message_id, changes, ids, name))

    async def path(self, session_id: str, leaf_id: str | None = None) -> list[MessageRecord]:
        """The messages from the root to `leaf_id` (None: the session's leaf), with token ids; [] for an empty session.

        Raises UnknownMessage when `leaf_id` is no message of the session.
        """
        return await self._threads.read(lambda db: paths.read_path(db, session_id, leaf_id))

    async def children(self, message_id: str | None, session_id: str) -> list[MessageRecord]:
        """The messages right under `message_id` (None: the roots) in the order they were added; no token ids."""
        return await self._threads.read(lambda db: messages.read_children(db, message_id, session_id))

    async def find_paths(self, user_id: str, path_key: str, limit: int = 20) -> list[MessageRecord]:
        """This user's messages whose whole path has this key (`storage.keys`), the newest first; no token ids."""
        return await self._threads.read(lambda db: paths.read_paths_with_key(db, user_id, path_key, limit))

    async def choose_path(
        self, user_id: str, path_keys: Sequence[str], choose: Callable[[Iterator[StoredPath]], T], limit: int = 20
    ) -> T:
        """What `choose` makes of this user's paths with these keys: in the order of the keys, the newest of each first.

        It is called on a reading thread; each path is read when it asks for it, all as of one moment, `limit` at most.
        """
        return await self._threads.read(lambda db: choose(paths.stored_paths(db, user_id, path_keys, limit)))

    async def interrupt_streaming(self) -> int:
        """At start: what a dead server left "streaming" becomes "interrupted"; how many messages that were."""
        return await self._threads.write(messages.interrupt_streaming)

    # Turns

    async def add_turn(self, turn: TurnRecord) -> TurnRecord:
        """Store the figures of a reply; returns them with `created_at` filled. Raises UnknownMessage, InvalidValue."""
        stored = turn if turn.created_at is not None else dataclasses.replace(turn, created_at=self._clock())
        await self._threads.write(lambda db: messages.insert_turn(db, stored))
        return stored

    async def turns(self, session_id: str) -> dict[str, TurnRecord]:
        """The newest turn of each message of the session, by message id."""
        return await self._threads.read(lambda db: messages.read_turns(db, session_id))

    # Settings saved in the app

    async def saved_settings(self) -> dict[str, str]:
        """Every saved setting, by key."""
        return await self._threads.read(saved.saved_settings)

    async def save_setting(self, key: str, value: str) -> None:
        """Save one, replacing an older value."""
        await self._threads.write(lambda db: saved.save_setting(db, key, value))

    async def forget_setting(self, key: str) -> bool:
        """Remove one; False when it was not saved."""
        return await self._threads.write(lambda db: saved.forget_setting(db, key))
