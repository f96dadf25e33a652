"""Adds continuous loops with their leases, and the steps of their cycles."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.create_table(
        "loops",
        sa.Column("agent", sa.String(64), primary_key=True),
        sa.Column("file", sa.Text, nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("enabled", sa.Boolean, nullable=False),
        sa.Column("holder", sa.String(200)),
        sa.Column("token", sa.String(32)),
        sa.Column("beats", sa.Integer, nullable=False),
        sa.Column("beat_at", sa.Float),
        sa.Column("changed_at", sa.Float, nullable=False),
        sa.Column("changed_by", sa.String(200), nullable=False),
    )
    op.create_table(
        "loop_steps",
        sa.Column("agent", sa.String(64), primary_key=True),
        sa.Column("cycle", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("step", sa.String(16), primary_key=True),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("detail_json", sa.Text, nullable=False),
        sa.Column("started_at", sa.Float, nullable=False),
        sa.Column("ended_at", sa.Float),
        sa.Column("by", sa.String(200), nullable=False),
    )
