"""Adds the name of the agent that made an LM call."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("transitions", sa.Column("agent", sa.String(64), nullable=False, server_default=""))
