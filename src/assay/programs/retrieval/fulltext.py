"""Full-text search of passages: FTS5 on SQLite, `tsvector` on PostgreSQL. Words are stemmed as English on both."""

import math
import re
from typing import Any

import sqlalchemy as sa

from assay.errors import StoreError
from assay.traces.store import tables as schema

__all__ = ["TOKENIZER", "WORDS", "is_prepared", "match_of", "prepare", "ranked", "searched", "words_of"]

TOKENIZER = "porter unicode61 remove_diacritics 2"
WORDS = sa.func.to_tsvector("english", sa.bindparam("text_of_words"))
_MOST_WORDS = 64  # of a query; more make it slower and hardly better
_WORD = re.compile(r"[^\W_]+")
# Words that occur in most passages. They rank nothing, and would make a passage count as long.
_COMMON = frozenset(
    [
        "a",
        "an",
        "and",
        "are",
        "as",
        "at",
        "be",
        "by",
        "can",
        "do",
        "does",
        "for",
        "from",
        "has",
        "have",
        "how",
        "i",
        "in",
        "is",
        "it",
        "its",
        "me",
        "my",
        "of",
        "on",
        "or",
        "that",
        "the",
        "their",
        "there",
        "this",
        "to",
        "was",
        "were",
        "what",
        "when",
        "where",
        "which",
        "who",
        "why",
        "will",
        "with",
        "you",
        "your",
    ]
)
_CREATE = (
    f"CREATE VIRTUAL TABLE IF NOT EXISTS passages_fts USING fts5(words, content='passages', content_rowid='id', "
    f"tokenize='{TOKENIZER}')",
    "CREATE TRIGGER IF NOT EXISTS passages_added AFTER INSERT ON passages BEGIN "
    "INSERT INTO passages_fts(rowid, words) VALUES (new.id, new.words); END",
    "CREATE TRIGGER IF NOT EXISTS passages_removed AFTER DELETE ON passages BEGIN "
    "INSERT INTO passages_fts(passages_fts, rowid, words) VALUES ('delete', old.id, old.words); END",
)


def prepare(engine: sa.Engine) -> None:
    """Creates the FTS5 table of a SQLite store, which other commands do not need.

    Raises:
        StoreError: this SQLite was built without FTS5.
    """
    if engine.dialect.name != "sqlite":
        return
    with engine.begin() as connection:
        if not connection.execute(sa.text("SELECT count(*) FROM pragma_module_list WHERE name = 'fts5'")).scalar():
            raise StoreError(
                "this Python's SQLite has no full-text search (FTS5): use another build of Python, or PostgreSQL as "
                "the store (store='postgresql://…')"
            )
        for statement in _CREATE:
            connection.exec_driver_sql(statement)


def is_prepared(connection: sa.Connection) -> bool:
    """Whether an index was ever built in the store."""
    return connection.dialect.name != "sqlite" or sa.inspect(connection).has_table("passages_fts")


def words_of(query: str) -> list[str]:
    """The distinct words of a query that are searched for; none if it has only common ones."""
    words = dict.fromkeys(_WORD.findall(query.lower()[:10_000]))
    return [word for word in words if word not in _COMMON][:_MOST_WORDS]


def searched(text: str) -> str:
    """The words of a passage for SQLite's index: without common ones, as PostgreSQL leaves them out by itself."""
    return " ".join(word for word in _WORD.findall(text) if word.lower() not in _COMMON)


def match_of(words: list[str]) -> str:
    """An FTS5 query for any of the words. In quotes they are words, not operators."""
    return " OR ".join(f'"{word}"' for word in words)


def ranked(connection: sa.Connection, index: str, query: str, most: int) -> list[int]:
    """Ids of the passages that have a word of the query, best first."""
    words = words_of(query)
    if not words:
        return []
    if connection.dialect.name == "sqlite":
        return _ranked_sqlite(connection, index, words, most)
    return _ranked_postgres(connection, index, words, most)


def _ranked_sqlite(connection: sa.Connection, index: str, words: list[str], most: int) -> list[int]:
    """By BM25, FTS5's own rank.

    FTS5 is fast as long as it is not joined, so the best passages of all indexes are filtered by index. Only if others
    take their places, all are.
    """
    of_index = (
        "FROM {found} JOIN passages p ON p.id = f.rowid JOIN documents d ON d.id = p.document_id "
        "WHERE d.index_name = :index AND d.ready {more} ORDER BY f.rank, p.id LIMIT :most"
    )
    best = "(SELECT rowid, rank FROM passages_fts WHERE passages_fts MATCH :match ORDER BY rank LIMIT :first) f"
    values = {"match": match_of(words), "index": index, "most": most, "first": 4 * most}
    ids = list(connection.execute(sa.text(f"SELECT p.id {of_index.format(found=best, more='')}"), values).scalars())
    if len(ids) == most:
        return ids
    whole = of_index.format(found="passages_fts f", more="AND passages_fts MATCH :match")
    del values["first"]
    return list(connection.execute(sa.text(f"SELECT p.id {whole}"), values).scalars())


def _ranked_postgres(connection: sa.Connection, index: str, words: list[str], most: int) -> list[int]:
    """By the sum of `ts_rank` over the words, each weighted by how rare it is: `ts_rank` alone ignores that."""
    p, d = schema.passages, schema.documents
    total = connection.execute(sa.select(sa.func.count()).select_from(p)).scalar_one()
    lexemes = connection.execute(
        sa.text("SELECT DISTINCT plainto_tsquery('english', w)::text FROM unnest(CAST(:words AS text[])) AS w"),
        {"words": words},
    ).scalars()
    terms: list[tuple[Any, float]] = []
    for lexeme in sorted(lexeme for lexeme in lexemes if lexeme):
        term = sa.cast(sa.literal(lexeme), sa.Text).op("::")(sa.text("tsquery"))
        n = connection.execute(sa.select(sa.func.count()).select_from(p).where(p.c.words.op("@@")(term))).scalar_one()
        if n:  # the weight of BM25, with 1 added so that it is never negative
            terms.append((term, float(math.log((total - n + 0.5) / (n + 0.5) + 1))))
    if not terms:
        return []
    rank = sum((sa.func.ts_rank(p.c.words, term, 1) * weight for term, weight in terms), sa.literal(0.0))
    statement = (
        sa.select(p.c.id)
        .join(d, d.c.id == p.c.document_id)
        .where(sa.or_(*(p.c.words.op("@@")(term) for term, _ in terms)), d.c.index_name == index, d.c.ready)
        .order_by(rank.desc(), p.c.id)
        .limit(most)
    )
    return list(connection.execute(statement).scalars())
