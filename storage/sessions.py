"""The queries about users and sessions. Each takes an open transaction; none knows threads or connections."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, cast

from sqlalchemy import bindparam, delete, select, tuple_, update
from sqlalchemy.orm import Session

from storage.errors import UnknownMessage, UnknownModel
from storage.models import MessageRow, ModelRow, SessionRow, UserRow
from storage.records import Origin, SessionRecord, SessionSummary, UserRecord, UserRole, new_id

LOCAL_ADMIN = "local"
SALT_BYTES = 16

_SUMMARY = (
    SessionRow.id,
    SessionRow.user_id,
    SessionRow.title,
    SessionRow.origin,
    SessionRow.created_at,
    SessionRow.updated_at,
    SessionRow.leaf_id,
    SessionRow.expires_at,
    SessionRow.pinned,
    SessionRow.ttl_s,
)

_session = SessionRow.__table__.c
_SESSION = select(*(_session[name] for name in SessionRecord.__dataclass_fields__)).where(
    _session.id == bindparam("session"), _session.user_id == bindparam("user")
)  # made once: every turn waits for it


def implicit_admin(db: Session, now: float) -> UserRecord:
    """The one user of a loopback installation, made with a fresh salt at the first call."""
    row = db.scalar(select(UserRow).where(UserRow.name == LOCAL_ADMIN))
    if row is None:
        row = UserRow(id=new_id(), name=LOCAL_ADMIN, role="admin", salt=secrets.token_bytes(SALT_BYTES), created_at=now)
        db.add(row)
        db.flush()
    return UserRecord(id=row.id, name=row.name, role=cast(UserRole, row.role), salt=row.salt)


def insert_session(db: Session, record: SessionRecord) -> SessionRecord:
    """Store a new session as it is in `record`. Raises UnknownModel."""
    _require_model(db, record.model_id)
    db.add(
        SessionRow(
            id=record.id,
            user_id=record.user_id,
            origin=record.origin,
            created_at=record.created_at,
            updated_at=record.updated_at,
            expires_at=record.expires_at,
            leaf_id=record.leaf_id,
            title=record.title,
            system_prompt=record.system_prompt,
            model_id=record.model_id,
            pinned=record.pinned,
            ttl_s=record.ttl_s,
        )
    )
    db.flush()
    return record


def find_session(db: Session, user_id: str, session_id: str) -> SessionRecord | None:
    """The session, if it is this user's."""
    row = db.execute(_SESSION, {"session": session_id, "user": user_id}).one_or_none()
    return None if row is None else SessionRecord(**row._mapping)


def list_sessions(
    db: Session, user_id: str, origin: Origin, limit: int, before: SessionSummary | float | None
) -> list[SessionSummary]:
    """One page of a user's sessions, the last touched first; reads the index and narrow columns only."""
    statement = (
        select(*_SUMMARY)
        .where(SessionRow.user_id == user_id, SessionRow.origin == origin)
        .order_by(SessionRow.updated_at.desc(), SessionRow.id.desc())
        .limit(limit)
    )
    if isinstance(before, SessionSummary):
        statement = statement.where(tuple_(SessionRow.updated_at, SessionRow.id) < (before.updated_at, before.id))
    elif before is not None:
        statement = statement.where(SessionRow.updated_at < before)
    return [SessionSummary(**row._mapping) for row in db.execute(statement)]


def change_session(db: Session, user_id: str, session_id: str, changes: dict[str, Any]) -> SessionRecord | None:
    """Set these columns; None when the session is not this user's. A new leaf must be a message of the session.

    Raises UnknownMessage, UnknownModel.
    """
    if not owned_session_id(db, user_id, session_id):
        return None
    leaf_id = changes.get("leaf_id")
    if leaf_id is not None:
        home = db.scalar(select(MessageRow.session_id).where(MessageRow.id == leaf_id))
        if home != session_id:
            raise UnknownMessage(leaf_id, session_id)
    _require_model(db, changes.get("model_id"))
    if changes:
        db.execute(update(SessionRow).where(SessionRow.id == session_id).values(**changes))
    return find_session(db, user_id, session_id)


def settle_session(db: Session, session_id: str, title: str, model_id: str) -> None:
    """Give the session this title and this model where it has none yet; a model that is forgotten counts as none."""
    here, known = SessionRow.id == session_id, select(ModelRow.id).where(ModelRow.id == model_id).scalar_subquery()
    db.execute(update(SessionRow).where(here, SessionRow.title == "").values(title=title))
    db.execute(update(SessionRow).where(here, SessionRow.model_id.is_(None)).values(model_id=known))


def _require_model(db: Session, model_id: str | None) -> None:
    if model_id is not None and db.get(ModelRow, model_id) is None:
        raise UnknownModel(model_id)


def delete_sessions(db: Session, session_ids: Sequence[str]) -> None:
    """Delete these sessions; their messages, token ids and turns go with them."""
    for session_id in session_ids:
        db.execute(delete(SessionRow).where(SessionRow.id == session_id))


def owned_session_id(db: Session, user_id: str, session_id: str) -> list[str]:
    """[session_id] if the session is this user's, else []."""
    statement = select(SessionRow.id).where(SessionRow.id == session_id, SessionRow.user_id == user_id)
    return list(db.scalars(statement))


def expired_session_ids(db: Session, now: float) -> list[str]:
    """The sessions whose time has come, the earliest first."""
    statement = select(SessionRow.id).where(SessionRow.expires_at <= now).order_by(SessionRow.expires_at, SessionRow.id)
    return list(db.scalars(statement))
