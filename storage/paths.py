"""The queries about paths of messages, on which every turn waits: their statements are made once, not at each call.

Each takes an open transaction; none knows threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import Select, bindparam, literal, select
from sqlalchemy.orm import Session

from storage.errors import UnknownMessage
from storage.models import MessageRow, SessionRow, TokensRow
from storage.records import MessageRecord, StoredPath
from storage.sessions import find_session
from storage.tokens import unpack_ids

# Tables instead of mapped classes: SQLAlchemy then gives rows at once, without its identity map.
_messages, _sessions, _tokens = (row.__table__.c for row in (MessageRow, SessionRow, TokensRow))
_MESSAGE = [_messages[name] for name in MessageRecord.__dataclass_fields__ if name not in ("token_ids", "tokenizer")]


def _climbing(leaf: Any) -> Select[Any]:
    """From the message `leaf` of session `session` up to the root, the root first, with token ids."""
    climb = (
        select(_messages.id, _messages.parent_id, literal(0).label("height"))
        .where(_messages.session_id == bindparam("session"), _messages.id == leaf)
        .cte("climb", recursive=True)
    )
    above = select(_messages.id, _messages.parent_id, climb.c.height + 1).join(climb, _messages.id == climb.c.parent_id)
    climb = climb.union_all(above)
    return (
        select(*_MESSAGE, _tokens.ids, _tokens.tokenizer)
        .join(climb, climb.c.id == _messages.id)
        .outerjoin(TokensRow.__table__, _tokens.message_id == _messages.id)
        .order_by(climb.c.height.desc())
    )


_FROM_MESSAGE = _climbing(bindparam("leaf"))
_FROM_LEAF = _climbing(select(_sessions.leaf_id).where(_sessions.id == bindparam("session")).scalar_subquery())
_WITH_KEY = (
    select(*_MESSAGE)
    .join(SessionRow.__table__, _sessions.id == _messages.session_id)
    .where(_messages.path_key == bindparam("key"), _sessions.user_id == bindparam("user"))
    .order_by(_messages.created_at.desc(), _messages.seq.desc(), _messages.id)
    .limit(bindparam("most"))
)


def read_path(db: Session, session_id: str, leaf_id: str | None) -> list[MessageRecord]:
    """The messages from the root to `leaf_id` (None: the session's leaf), with their token ids; one statement."""
    statement = _FROM_LEAF if leaf_id is None else _FROM_MESSAGE
    path = []
    for row in db.execute(statement, {"session": session_id, "leaf": leaf_id}):
        values = dict(row._mapping)
        ids, tokenizer = values.pop("ids"), values.pop("tokenizer")
        path.append(MessageRecord(**values, token_ids=unpack_ids(ids or b""), tokenizer=tokenizer or ""))
    if leaf_id is not None and not path:
        raise UnknownMessage(leaf_id, session_id)
    return path


def read_paths_with_key(db: Session, user_id: str, key: str, limit: int) -> list[MessageRecord]:
    """This user's messages whose path has this key, the newest first."""
    found = db.execute(_WITH_KEY, {"key": key, "user": user_id, "most": limit})
    return [MessageRecord(**row._mapping) for row in found]


def stored_paths(db: Session, user_id: str, keys: Sequence[str], limit: int) -> Iterator[StoredPath]:
    """This user's paths with these keys, in the order of the keys and the newest of each first, read one by one."""
    for key in keys:
        for message in read_paths_with_key(db, user_id, key, limit):
            session = find_session(db, user_id, message.session_id)
            if session is not None:
                yield StoredPath(key, session, tuple(read_path(db, session.id, message.id)))
