"""Users, sessions, messages with their token ids, turns, settings."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "users",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("salt", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_users"),
        sa.UniqueConstraint("name", name="uq_users_name"),
        sa.CheckConstraint("role IN ('admin', 'user')", name=op.f("ck_users_role")),
        sa.CheckConstraint("length(salt) = 16", name=op.f("ck_users_salt")),
    )
    op.create_table(
        "sessions",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("origin", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.Column("leaf_id", sa.Text(), nullable=True),
        sa.Column("title", sa.Text(), nullable=False),
        sa.Column("system_prompt", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_sessions"),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name="fk_sessions_user_id", ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["leaf_id"], ["messages.id"], name="fk_sessions_leaf_id", ondelete="SET NULL"),
        sa.CheckConstraint("origin IN ('chat', 'api')", name=op.f("ck_sessions_origin")),
    )
    op.create_index("ix_sessions_list", "sessions", ["user_id", "origin", "updated_at", "id"])
    op.create_index("ix_sessions_expires_at", "sessions", ["expires_at"])
    op.create_index("ix_sessions_leaf_id", "sessions", ["leaf_id"])
    op.create_table(
        "messages",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("parent_id", sa.Text(), nullable=True),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("finish_reason", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("path_key", sa.Text(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("text", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_messages"),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name="fk_messages_session_id", ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["parent_id"], ["messages.id"], name="fk_messages_parent_id"),
        sa.UniqueConstraint("session_id", "seq", name="uq_messages_session_id"),
        sa.CheckConstraint("role IN ('system', 'user', 'assistant')", name=op.f("ck_messages_role")),
        sa.CheckConstraint(
            "status IN ('complete', 'streaming', 'interrupted', 'stopped', 'failed')", name=op.f("ck_messages_status")
        ),
        sa.CheckConstraint("parent_id IS NULL OR parent_id <> id", name=op.f("ck_messages_parent")),
    )
    op.create_index("ix_messages_parent_id", "messages", ["parent_id"])
    op.create_index("ix_messages_path_key", "messages", ["path_key"])
    op.create_index("ix_messages_streaming", "messages", ["status"], sqlite_where=sa.text("status = 'streaming'"))
    op.create_table(
        "message_tokens",
        sa.Column("message_id", sa.Text(), nullable=False),
        sa.Column("tokenizer", sa.Text(), nullable=False),
        sa.Column("ids", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("message_id", name="pk_message_tokens"),
        sa.ForeignKeyConstraint(
            ["message_id"], ["messages.id"], name="fk_message_tokens_message_id", ondelete="CASCADE"
        ),
        sa.CheckConstraint("length(ids) % 4 = 0", name=op.f("ck_message_tokens_ids")),
    )
    op.create_table(
        "turns",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("message_id", sa.Text(), nullable=False),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("device_tokens", sa.Integer(), nullable=False),
        sa.Column("computed_tokens", sa.Integer(), nullable=False),
        sa.Column("recomputed_tokens", sa.Integer(), nullable=False),
        sa.Column("output_tokens", sa.Integer(), nullable=False),
        sa.Column("ttft_s", sa.Double(), nullable=True),
        sa.Column("tpot_s", sa.Double(), nullable=True),
        sa.Column("total_s", sa.Double(), nullable=False),
        sa.Column("finish_reason", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_turns"),
        sa.ForeignKeyConstraint(["message_id"], ["messages.id"], name="fk_turns_message_id", ondelete="CASCADE"),
        sa.CheckConstraint(
            "min(prompt_tokens, device_tokens, computed_tokens, recomputed_tokens, output_tokens) >= 0",
            name=op.f("ck_turns_tokens"),
        ),
    )
    op.create_index("ix_turns_message_id", "turns", ["message_id"])
    op.create_table(
        "settings",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_settings"),
    )
