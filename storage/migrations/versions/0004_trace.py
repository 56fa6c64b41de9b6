"""A trace of turns, by block and without text, for comparing cache policies."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "trace",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("device_tokens", sa.Integer(), nullable=False),
        sa.Column("host_tokens", sa.Integer(), nullable=False),
        sa.Column("disk_tokens", sa.Integer(), nullable=False),
        sa.Column("computed_tokens", sa.Integer(), nullable=False),
        sa.Column("output_tokens", sa.Integer(), nullable=False),
        sa.Column("blocks", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_trace"),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name="fk_trace_session_id", ondelete="CASCADE"),
    )
    op.create_index("ix_trace_session_id", "trace", ["session_id"])
