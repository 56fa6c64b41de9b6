"""The tables. Migrations make them; a test holds that both agree. Knows no query.

Wide text columns come last in their table: SQLite reads a row from its start, so a list that wants only the narrow
columns never follows the pages of a long text.
"""

from __future__ import annotations

from sqlalchemy import CheckConstraint, Double, ForeignKey, Index, LargeBinary, MetaData, Text, UniqueConstraint, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

ROLES = ("system", "user", "assistant")
STATUSES = ("complete", "streaming", "interrupted", "stopped", "failed")


def _one_of(column: str, values: tuple[str, ...]) -> CheckConstraint:
    return CheckConstraint(f"{column} IN ({', '.join(repr(value) for value in values)})", name=column)


class Base(DeclarativeBase):
    """Named constraints, because a later migration can only change what has a name."""

    metadata = MetaData(
        naming_convention={
            "pk": "pk_%(table_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "uq": "uq_%(table_name)s_%(column_0_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "ix": "ix_%(table_name)s_%(column_0_name)s",
        }
    )
    type_annotation_map = {str: Text(), bytes: LargeBinary(), float: Double()}  # noqa: RUF012 - SQLAlchemy's own protocol


class UserRow(Base):
    """Who owns sessions; the salt keeps their cached blocks apart."""

    __tablename__ = "users"
    __table_args__ = (_one_of("role", ("admin", "user")), CheckConstraint("length(salt) = 16", name="salt"))

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    role: Mapped[str]
    salt: Mapped[bytes]
    created_at: Mapped[float]


class ModelRow(Base):
    """A model that was loaded once, by the source and adapter ("": none) that a person named."""

    __tablename__ = "models"
    __table_args__ = (UniqueConstraint("source", "adapter"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    source: Mapped[str]
    adapter: Mapped[str]
    created_at: Mapped[float]
    used_at: Mapped[float]


class SessionRow(Base):
    """A conversation: a tree of messages and the leaf it stands at."""

    __tablename__ = "sessions"
    __table_args__ = (
        _one_of("origin", ("chat", "api")),
        Index("ix_sessions_list", "user_id", "origin", "updated_at", "id"),
        Index("ix_sessions_kept", "id", sqlite_where=text("pinned OR ttl_s IS NOT NULL")),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id", ondelete="CASCADE"))
    origin: Mapped[str]
    created_at: Mapped[float]
    updated_at: Mapped[float]
    expires_at: Mapped[float | None] = mapped_column(index=True)
    leaf_id: Mapped[str | None] = mapped_column(
        ForeignKey("messages.id", ondelete="SET NULL", use_alter=True), index=True
    )
    model_id: Mapped[str | None] = mapped_column(ForeignKey("models.id", ondelete="SET NULL"), index=True)
    pinned: Mapped[bool] = mapped_column(server_default="0")
    ttl_s: Mapped[float | None]
    title: Mapped[str]
    system_prompt: Mapped[str]


class MessageRow(Base):
    """A message; `seq` numbers a session's messages in the order they were added, whatever the clock says.

    `parent_id` does not cascade: SQLite carries a cascade out as nested triggers and stops at 1,000 of them, while a
    session's messages all go in one statement.
    """

    __tablename__ = "messages"
    __table_args__ = (
        _one_of("role", ROLES),
        _one_of("status", STATUSES),
        CheckConstraint("parent_id IS NULL OR parent_id <> id", name="parent"),
        UniqueConstraint("session_id", "seq"),
        Index("ix_messages_streaming", "status", sqlite_where=text("status = 'streaming'")),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id", ondelete="CASCADE"))
    parent_id: Mapped[str | None] = mapped_column(ForeignKey("messages.id"), index=True)
    seq: Mapped[int]
    role: Mapped[str]
    status: Mapped[str]
    finish_reason: Mapped[str | None]
    created_at: Mapped[float]
    path_key: Mapped[str] = mapped_column(index=True)
    error: Mapped[str | None]
    text: Mapped[str]


class TokensRow(Base):
    """The exact ids of a message, apart from it so that pages which show text read none."""

    __tablename__ = "message_tokens"
    __table_args__ = (CheckConstraint("length(ids) % 4 = 0", name="ids"),)

    message_id: Mapped[str] = mapped_column(ForeignKey("messages.id", ondelete="CASCADE"), primary_key=True)
    tokenizer: Mapped[str]
    ids: Mapped[bytes]


class TurnRow(Base):
    """The figures of one reply."""

    __tablename__ = "turns"
    __table_args__ = (
        CheckConstraint(
            "min(prompt_tokens, device_tokens, computed_tokens, recomputed_tokens, output_tokens) >= 0", name="tokens"
        ),
        CheckConstraint("min(host_tokens, disk_tokens) >= 0", name="tiers"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    message_id: Mapped[str] = mapped_column(ForeignKey("messages.id", ondelete="CASCADE"), index=True)
    prompt_tokens: Mapped[int]
    device_tokens: Mapped[int]
    computed_tokens: Mapped[int]
    recomputed_tokens: Mapped[int]
    output_tokens: Mapped[int]
    ttft_s: Mapped[float | None]
    tpot_s: Mapped[float | None]
    total_s: Mapped[float]
    finish_reason: Mapped[str]
    created_at: Mapped[float]
    host_tokens: Mapped[int] = mapped_column(server_default="0")
    disk_tokens: Mapped[int] = mapped_column(server_default="0")
    restore_s: Mapped[float] = mapped_column(server_default="0")
    fingerprint: Mapped[str] = mapped_column(server_default=text("''"))
    miss_position: Mapped[int | None]
    miss_message: Mapped[int | None]
    miss_role: Mapped[str | None]
    miss_cause: Mapped[str | None]
    miss_detail: Mapped[str | None]


class CacheEventRow(Base):
    """One thing that happened to the cache; `session_id` None: it was nobody's alone. Numbered as they came."""

    __tablename__ = "cache_events"

    id: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[float]
    action: Mapped[str]
    session_id: Mapped[str | None] = mapped_column(ForeignKey("sessions.id", ondelete="CASCADE"), index=True)
    source: Mapped[str | None]
    target: Mapped[str | None]
    blocks: Mapped[int]
    bytes: Mapped[int]
    age_s: Mapped[float]
    reason: Mapped[str]


class TraceRow(Base):
    """One turn as a cache policy sees it, without text or token ids. Numbered as they ended."""

    __tablename__ = "trace"

    id: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[float]
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id", ondelete="CASCADE"), index=True)
    model: Mapped[str]
    device_tokens: Mapped[int]
    host_tokens: Mapped[int]
    disk_tokens: Mapped[int]
    computed_tokens: Mapped[int]
    output_tokens: Mapped[int]
    blocks: Mapped[bytes]


class PendingDropRow(Base):
    """A session that was deleted here, and that the engine has still to forget."""

    __tablename__ = "pending_drops"

    session_id: Mapped[str] = mapped_column(primary_key=True)


class SettingRow(Base):
    """A setting saved in the app, as text."""

    __tablename__ = "settings"

    key: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[str]
