"""The queries about paths of messages, on which every turn waits: their statements are made once, not at each call.

Each takes an open transaction; none knows threads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import Select, bindparam, func, literal, select
from sqlalchemy.orm import Session

from storage.errors import UnknownMessage
from storage.models import MessageRow, SessionRow, TokensRow
from storage.records import MessageRecord, SessionRecord, StoredPath
from storage.tokens import unpack_ids

# Tables instead of mapped classes: SQLAlchemy then gives rows at once, without its identity map.
_messages, _sessions, _tokens = (row.__table__.c for row in (MessageRow, SessionRow, TokensRow))
_NAMES = [name for name in MessageRecord.__dataclass_fields__ if name not in ("token_ids", "tokenizer")]
_MESSAGE = [_messages[name] for name in _NAMES]
_SESSION = [_sessions[name] for name in SessionRecord.__dataclass_fields__]


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
_wanted = func.json_each(bindparam("keys")).table_valued("key", "value")  # a list of any length as one parameter
_WITH_KEYS = (
    select(_messages.id.label("leaf"), _messages.path_key, *_SESSION)
    .select_from(_wanted)
    .join(MessageRow.__table__, _messages.path_key == _wanted.c.value)
    .join(SessionRow.__table__, _sessions.id == _messages.session_id)
    .where(_sessions.user_id == bindparam("user"))
    .order_by(_wanted.c.key, _messages.created_at.desc(), _messages.seq.desc(), _messages.id)
    .limit(bindparam("most"))
)


def read_path(db: Session, session_id: str, leaf_id: str | None) -> list[MessageRecord]:
    """The messages from the root to `leaf_id` (None: the session's leaf), with their token ids; one statement."""
    statement = _FROM_LEAF if leaf_id is None else _FROM_MESSAGE
    path = []
    for *values, ids, tokenizer in db.execute(statement, {"session": session_id, "leaf": leaf_id}):
        message = dict(zip(_NAMES, values, strict=True))
        path.append(MessageRecord(**message, token_ids=unpack_ids(ids or b""), tokenizer=tokenizer or ""))
    if leaf_id is not None and not path:
        raise UnknownMessage(leaf_id, session_id)
    return path


def read_paths_with_key(db: Session, user_id: str, key: str, limit: int) -> list[MessageRecord]:
    """This user's messages whose path has this key, the newest first."""
    found = db.execute(_WITH_KEY, {"key": key, "user": user_id, "most": limit})
    return [MessageRecord(**row._mapping) for row in found]


def stored_paths(db: Session, user_id: str, keys: Sequence[str], limit: int) -> Iterator[StoredPath]:
    """This user's paths with these keys, in the order of the keys and the newest of each first, read one by one."""
    for row in db.execute(_WITH_KEYS, {"keys": json.dumps(keys), "user": user_id, "most": limit}).all():
        session = dict(row._mapping)
        leaf_id, key = session.pop("leaf"), session.pop("path_key")
        yield StoredPath(key, SessionRecord(**session), tuple(read_path(db, session["id"], leaf_id)))
