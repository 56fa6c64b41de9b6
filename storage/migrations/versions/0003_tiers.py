"""Where each turn's tokens came from and why the rest was not found; pins; what happened to the cache."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    with op.batch_alter_table("turns", recreate="always") as turns:
        turns.add_column(sa.Column("host_tokens", sa.Integer(), nullable=False, server_default="0"))
        turns.add_column(sa.Column("disk_tokens", sa.Integer(), nullable=False, server_default="0"))
        turns.add_column(sa.Column("restore_s", sa.Double(), nullable=False, server_default="0"))
        turns.add_column(sa.Column("fingerprint", sa.Text(), nullable=False, server_default=sa.text("''")))
        turns.add_column(sa.Column("miss_position", sa.Integer(), nullable=True))
        turns.add_column(sa.Column("miss_message", sa.Integer(), nullable=True))
        turns.add_column(sa.Column("miss_role", sa.Text(), nullable=True))
        turns.add_column(sa.Column("miss_cause", sa.Text(), nullable=True))
        turns.add_column(sa.Column("miss_detail", sa.Text(), nullable=True))
        turns.create_check_constraint(op.f("ck_turns_tiers"), "min(host_tokens, disk_tokens) >= 0")
    with op.batch_alter_table("sessions", recreate="always") as sessions:
        sessions.add_column(
            sa.Column("pinned", sa.Boolean(), nullable=False, server_default="0"), insert_before="title"
        )
        sessions.add_column(sa.Column("ttl_s", sa.Double(), nullable=True), insert_before="title")
        sessions.create_index("ix_sessions_kept", ["id"], sqlite_where=sa.text("pinned OR ttl_s IS NOT NULL"))
    op.create_table(
        "cache_events",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=True),
        sa.Column("source", sa.Text(), nullable=True),
        sa.Column("target", sa.Text(), nullable=True),
        sa.Column("blocks", sa.Integer(), nullable=False),
        sa.Column("bytes", sa.Integer(), nullable=False),
        sa.Column("age_s", sa.Double(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_cache_events"),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name="fk_cache_events_session_id", ondelete="CASCADE"),
    )
    op.create_index("ix_cache_events_session_id", "cache_events", ["session_id"])
    op.create_table(
        "pending_drops",
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("session_id", name="pk_pending_drops"),
    )
