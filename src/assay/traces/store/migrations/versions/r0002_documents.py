"""Adds the tables of documents for retrieval: a frozen copy, which does not follow changes of `tables.py`."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.types import UserDefinedType

revision = "0002"
down_revision = "0001"


class TsVector(UserDefinedType[str]):
    cache_ok = True

    def get_col_spec(self, **options: object) -> str:
        return "TSVECTOR"


def upgrade() -> None:
    op.create_table(
        "documents",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("index_name", sa.String(64), nullable=False),
        sa.Column("root", sa.Text, nullable=False),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("mtime_ns", sa.BigInteger, nullable=False),
        sa.Column("read_at", sa.Float, nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("form", sa.String(64), nullable=False),
        sa.Column("ready", sa.Boolean, nullable=False),
    )
    op.create_index("documents_by_path", "documents", ["index_name", "root", "path"])
    op.create_table(
        "passages",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("document_id", sa.Integer, nullable=False),
        sa.Column("key", sa.String(16), nullable=False),
        sa.Column("line", sa.Integer, nullable=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("words", sa.Text().with_variant(TsVector(), "postgresql")),
    )
    op.create_index("passages_of_document", "passages", ["document_id"])
    if op.get_bind().dialect.name == "postgresql":
        op.create_index("passages_by_words", "passages", ["words"], postgresql_using="gin")
    op.create_table(
        "passage_vectors",
        sa.Column("embedder", sa.String(200), primary_key=True),
        sa.Column("passage_id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("vector", sa.LargeBinary, nullable=False),
    )
    op.create_index("vectors_by_passage", "passage_vectors", ["passage_id"])
