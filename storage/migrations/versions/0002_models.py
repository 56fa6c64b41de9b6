"""Models that were loaded, and which of them each session chats with."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "models",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("adapter", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("used_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_models"),
        sa.UniqueConstraint("name", name="uq_models_name"),
        sa.UniqueConstraint("source", "adapter", name="uq_models_source"),
    )
    with op.batch_alter_table("sessions", recreate="always") as sessions:
        sessions.add_column(sa.Column("model_id", sa.Text(), nullable=True), insert_before="title")
        sessions.create_foreign_key("fk_sessions_model_id", "models", ["model_id"], ["id"], ondelete="SET NULL")
        sessions.create_index("ix_sessions_model_id", ["model_id"])
