"""The queries about messages, their token ids and turns. Each takes an open transaction; none knows threads.

Every message carries the key of its path (`storage.keys`), kept true here whenever a text on the path changes.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import exists, func, literal_column, select, update
from sqlalchemy.orm import Session

from storage.errors import UnknownMessage, UnknownSession
from storage.keys import first_parent_key, path_key
from storage.models import MessageRow, SessionRow, TokensRow, TurnRow
from storage.records import MessageRecord, TurnRecord
from storage.tokens import pack_ids

_MESSAGE = (
    MessageRow.id,
    MessageRow.session_id,
    MessageRow.parent_id,
    MessageRow.role,
    MessageRow.text,
    MessageRow.status,
    MessageRow.finish_reason,
    MessageRow.error,
    MessageRow.created_at,
    MessageRow.path_key,
)
_TURN = [TurnRow.__table__.c[name] for name in TurnRecord.__dataclass_fields__]


def insert_message(
    db: Session,
    *,
    message_id: str,
    session_id: str,
    parent_id: str | None,
    role: str,
    text: str,
    token_ids: tuple[int, ...],
    tokenizer: str,
    status: str,
    finish_reason: str | None,
    error: str | None,
    now: float,
) -> MessageRecord:
    """Add a message under its parent and make it the session's leaf."""
    session = db.get(SessionRow, session_id)
    if session is None:
        raise UnknownSession(session_id)
    parent_key = _parent_key(db, session, parent_id, role)
    last = db.scalar(select(func.max(MessageRow.seq)).where(MessageRow.session_id == session_id))
    row = MessageRow(
        id=message_id,
        session_id=session_id,
        parent_id=parent_id,
        seq=(last or 0) + 1,
        role=role,
        status=status,
        finish_reason=finish_reason,
        created_at=now,
        path_key=path_key(parent_key, role, text),
        error=error,
        text=text,
    )
    db.add(row)
    db.flush()
    db.add(TokensRow(message_id=message_id, tokenizer=tokenizer, ids=pack_ids(token_ids)))
    session.leaf_id, session.updated_at = message_id, now
    db.flush()
    stored = {column.key: getattr(row, column.key) for column in _MESSAGE}
    return MessageRecord(**stored, token_ids=token_ids, tokenizer=tokenizer)


def read_children(db: Session, message_id: str | None, session_id: str) -> list[MessageRecord]:
    """The messages right under `message_id` (None: the roots), in the order they were added."""
    statement = select(*_MESSAGE).where(MessageRow.session_id == session_id).order_by(MessageRow.seq)
    statement = statement.where(MessageRow.parent_id == message_id)  # IS NULL for None
    return [MessageRecord(**row._mapping) for row in db.execute(statement)]


def change_message(
    db: Session, message_id: str, changes: dict[str, Any], token_ids: tuple[int, ...] | None, tokenizer: str | None
) -> bool:
    """Set these columns and, where given, the token ids; False when there is no such message."""
    found = db.execute(
        select(MessageRow.session_id, MessageRow.parent_id, MessageRow.role).where(MessageRow.id == message_id)
    ).one_or_none()
    if found is None:
        return False
    if "text" in changes:
        session = db.get_one(SessionRow, found.session_id)
        key = path_key(_parent_key(db, session, found.parent_id, found.role), found.role, changes["text"])
        changes = changes | {"path_key": key}
    if changes:
        db.execute(update(MessageRow).where(MessageRow.id == message_id).values(**changes))
    tokens: dict[str, Any] = {} if token_ids is None else {"ids": pack_ids(token_ids)}
    if tokenizer is not None:
        tokens["tokenizer"] = tokenizer
    if tokens:
        db.execute(update(TokensRow).where(TokensRow.message_id == message_id).values(**tokens))
    if "text" in changes and db.scalar(select(exists().where(MessageRow.parent_id == message_id))):
        rekey(db, found.session_id)
    return True


def rekey(db: Session, session_id: str) -> None:
    """Compute the path keys of a whole session again, after a text above other messages changed."""
    session = db.get_one(SessionRow, session_id, populate_existing=True)
    columns = (MessageRow.id, MessageRow.parent_id, MessageRow.role, MessageRow.text, MessageRow.path_key)
    rows = db.execute(select(*columns).where(MessageRow.session_id == session_id).order_by(MessageRow.seq)).all()
    keys: dict[str, str] = {}
    for row in rows:  # a parent was added before its children
        above = keys[row.parent_id] if row.parent_id else first_parent_key(session.system_prompt, row.role)
        keys[row.id] = path_key(above, row.role, row.text)
        if keys[row.id] != row.path_key:
            db.execute(update(MessageRow).where(MessageRow.id == row.id).values(path_key=keys[row.id]))


def interrupt_streaming(db: Session) -> int:
    """Mark the replies that a dead server left growing; how many there were."""
    growing = MessageRow.status == literal_column("'streaming'")  # a literal, so that the partial index serves
    ids = list(db.scalars(select(MessageRow.id).where(growing)))
    for message_id in ids:
        db.execute(update(MessageRow).where(MessageRow.id == message_id).values(status="interrupted"))
    return len(ids)


def insert_turn(db: Session, turn: TurnRecord) -> None:
    """Store a turn as it is in `turn`."""
    if db.scalar(select(MessageRow.id).where(MessageRow.id == turn.message_id)) is None:
        raise UnknownMessage(turn.message_id)
    db.add(TurnRow(**{name: getattr(turn, name) for name in TurnRecord.__dataclass_fields__}))
    db.flush()


def read_turns(db: Session, session_id: str) -> dict[str, TurnRecord]:
    """The newest turn of each message of a session, by message id."""
    statement = (
        select(*_TURN)
        .join(MessageRow, MessageRow.id == TurnRow.message_id)
        .where(MessageRow.session_id == session_id)
        .order_by(TurnRow.created_at, TurnRow.id)
    )
    turns = (TurnRecord(**row._mapping) for row in db.execute(statement))
    return {turn.message_id: turn for turn in turns}


def _parent_key(db: Session, session: SessionRow, parent_id: str | None, role: str) -> str:
    if parent_id is None:
        return first_parent_key(session.system_prompt, role)
    statement = select(MessageRow.path_key).where(MessageRow.id == parent_id, MessageRow.session_id == session.id)
    key = db.scalar(statement)
    if key is None:
        raise UnknownMessage(parent_id, session.id)
    return key
