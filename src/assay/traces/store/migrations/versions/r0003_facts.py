"""Adds the table of facts that agents remember: a frozen copy, which does not follow changes of `tables.py`."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.types import UserDefinedType

revision = "0003"
down_revision = "0002"


class TsVector(UserDefinedType[str]):
    cache_ok = True

    def get_col_spec(self, **options: object) -> str:
        return "TSVECTOR"


def upgrade() -> None:
    op.create_table(
        "facts",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("memory", sa.String(64), nullable=False),
        sa.Column("subject", sa.String(200), nullable=False),
        sa.Column("person", sa.String(16), nullable=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("about", sa.String(64), nullable=False),
        sa.Column("tenant", sa.Text),
        sa.Column("split", sa.String(32), nullable=False),
        sa.Column("rollout_id", sa.String(32)),
        sa.Column("t", sa.Integer),
        sa.Column("valid_from", sa.Float, nullable=False),
        sa.Column("valid_to", sa.Float),
        sa.Column("superseded_by", sa.Integer),
        sa.Column("words", sa.Text().with_variant(TsVector(), "postgresql")),
        sqlite_autoincrement=True,
    )
    op.create_index("facts_of_person", "facts", ["memory", "person", "about"])
    op.create_index("facts_by_rollout", "facts", ["rollout_id"])
    if op.get_bind().dialect.name == "postgresql":
        op.create_index("facts_by_words", "facts", ["words"], postgresql_using="gin")
