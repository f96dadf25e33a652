"""Full-text search of passages: FTS5 on SQLite, `tsvector` on PostgreSQL. Words are stemmed as English on both."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import sqlalchemy as sa

from assay.errors import StoreError
from assay.traces.store import tables as schema

# -- Prefers passages in which neighbouring words of the query are neighbours too. Does not search.
#
# "Marlow station" says more than that a passage has Marlow and a station somewhere. The bonus of a pair is the smaller
# of both words' weights (Rasolofo and Savoy 2003, Term proximity scoring for keyword-based retrieval systems) times
# `_SHARE`.


# Measured with generated questions of seeds 10 to 19 and with the docstrings of some libraries: a share of 0.5 raised
# recall at 5 of the former by 2.1 points [0.9, 3.3] (n = 623) and changed that of the latter by -0.3 [-1.7, 1.1]
# (n = 600); 1 by +2.6 and -0.8. A bonus for words in the same form lowered the latter by 1.7 to 2.2 points.
_SHARE = 0.5


@dataclass(frozen=True)
class Candidate:
    """A passage that was found.

    Attributes:
        score: sum over the words of the query; higher is better.
        words: of the passage, as in `assay.programs.retrieval.fulltext.words_in`.
        unit: what a word of weight 1 that occurs once adds to the score.
    """

    id: int
    score: float
    words: Sequence[str]
    unit: float = 1.0


def pairs_of(words: Sequence[str]) -> dict[tuple[str, str], None]:
    """The distinct pairs of neighbouring words."""
    return dict.fromkeys((one, two) for one, two in pairwise(words) if one != two)


def inverse_frequency(found: int, total: int) -> float:
    """The weight of a word that `found` of `total` passages have, as in FTS5's BM25; 0 if none has it."""
    return max(math.log((total - found + 0.5) / (found + 0.5)), 0.0) if found else 0.0


def by_proximity(
    candidates: Sequence[Candidate], query: Sequence[str], weight: Callable[[str], float]
) -> list[Candidate]:
    """The candidates, best first; equal ones in their order.

    Args:
        query: its words in their order.
        weight: of a word.
    """
    pairs = pairs_of(query)
    weights: Mapping[str, float] = {
        word: weight(word) for word in dict.fromkeys(word for pair in pairs for word in pair)
    }
    bonuses = {pair: _SHARE * min(weights[pair[0]], weights[pair[1]]) for pair in pairs}

    def total(candidate: Candidate) -> float:
        own = set(pairwise(candidate.words))
        return candidate.score + candidate.unit * sum(bonus for pair, bonus in bonuses.items() if pair in own)

    return sorted(candidates, key=lambda candidate: -total(candidate)) if pairs else list(candidates)


TOKENIZER = "porter unicode61 remove_diacritics 2"
WORDS = sa.func.to_tsvector("english", sa.bindparam("text_of_words"))
_MOST_WORDS = 64  # of a query; more make it slower and hardly better
_CANDIDATES = 4  # passages that are ranked by proximity too, for each one that is wanted
# What PostgreSQL does for a query; more takes seconds to minutes:
MOST_RANKS = 100_000  # passages times words that are ranked, as far as they suffice
MOST_COUNTED = 10_000  # passages with a word that are counted; above, their number is estimated from a sample
_SAMPLE = 64  # one of so many pages
_TS_RANK = 0.0607927  # `ts_rank` of a word that occurs once, before it is divided by 1 + log(length)
_Ranking = tuple[list[tuple[int, float]], Callable[[str], float]]
"""Passages with their scores, best first, and the weight of each word of the query."""
_WORD = re.compile(r"[^\W_]+")
# Words that occur in most passages. They rank nothing, and would make a passage count as long.
_COMMON = frozenset(
    _WORD.findall(
        "a an and are as at be by can do does for from has have how i in is it its me my of on or that the "
        "their there this to was were what when where which who why will with you your"
    )
)


def _created(table: str, columns: Sequence[str]) -> tuple[str, ...]:
    """Statements that create the FTS5 index of a table, with the triggers that keep it up to date."""
    index, names = f"{table}_fts", ", ".join(columns)
    new, old = (", ".join(f"{row}.{column}" for column in columns) for row in ("new", "old"))
    return (
        f"CREATE VIRTUAL TABLE IF NOT EXISTS {index} USING fts5({names}, content='{table}', content_rowid='id', "
        f"tokenize='{TOKENIZER}')",
        f"CREATE TRIGGER IF NOT EXISTS {table}_added AFTER INSERT ON {table} BEGIN "
        f"INSERT INTO {index}(rowid, {names}) VALUES (new.id, {new}); END",
        f"CREATE TRIGGER IF NOT EXISTS {table}_removed AFTER DELETE ON {table} BEGIN "
        f"INSERT INTO {index}({index}, rowid, {names}) VALUES ('delete', old.id, {old}); END",
    )


def prepare(engine: sa.Engine, table: str = "passages", columns: Sequence[str] = ("words",)) -> None:
    """Creates the full-text index of a table of a SQLite store, which other commands do not need.

    Raises:
        StoreError: this SQLite was built without FTS5.
    """
    if engine.dialect.name != "sqlite":
        return
    with engine.begin() as connection:
        if not connection.execute(sa.text("SELECT count(*) FROM pragma_module_list WHERE name = 'fts5'")).scalar():
            raise StoreError(
                "this Python's SQLite has no full-text search (FTS5): use another build of Python, or PostgreSQL as "
                "the store (`store='postgresql://…'`)"
            )
        for statement in _created(table, columns):
            connection.exec_driver_sql(statement)


def is_prepared(connection: sa.Connection) -> bool:
    """Whether an index was ever built in the store."""
    return connection.dialect.name != "sqlite" or sa.inspect(connection).has_table("passages_fts")


def words_of(query: str) -> list[str]:
    """The distinct words of a query that are searched for; none if it has only common ones."""
    return list(dict.fromkeys(words_in(query[:10_000])))[:_MOST_WORDS]


def in_order(query: str) -> list[str]:
    """Words of `words_of` in the order of the query, repeated as there."""
    return words_in(query[:10_000])[:_MOST_WORDS]


def words_in(text: str) -> list[str]:
    """The words of a text in their order, without common ones."""
    return [word for word in _WORD.findall(text.lower()) if word not in _COMMON]


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
    of_dialect = _ranked_sqlite if connection.dialect.name == "sqlite" else _ranked_postgres
    if len(words) == 1:
        return [number for number, _ in of_dialect(connection, index, words, most)[0]]
    scores, weight = of_dialect(connection, index, words, _CANDIDATES * most)
    p = schema.passages
    chosen = sa.select(p.c.id, p.c.text).where(p.c.id.in_([number for number, _ in scores]))
    texts = {row.id: words_in(row.text) for row in connection.execute(chosen)}
    candidates = [
        Candidate(number, score, texts.get(number, ()), _unit(connection, len(texts.get(number, ()))))
        for number, score in scores
    ]
    return [candidate.id for candidate in by_proximity(candidates, in_order(query), weight)[:most]]


def _unit(connection: sa.Connection, length: int) -> float:
    """What a word of weight 1 that a passage has once adds to its score: 1 in BM25 at the mean length."""
    return 1.0 if connection.dialect.name == "sqlite" else _TS_RANK / (1 + math.log(max(1, length)))


def _ranked_sqlite(connection: sa.Connection, index: str, words: list[str], most: int) -> _Ranking:
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
    first = sa.text(f"SELECT p.id, -f.rank {of_index.format(found=best, more='')}")
    rows = connection.execute(first, values).all()
    if len(rows) < most:
        whole = of_index.format(found="passages_fts f", more="AND passages_fts MATCH :match")
        del values["first"]
        rows = connection.execute(sa.text(f"SELECT p.id, -f.rank {whole}"), values).all()
    count = sa.text("SELECT count(*) FROM passages_fts WHERE passages_fts MATCH :match")
    total = connection.execute(sa.select(sa.func.count()).select_from(schema.passages)).scalar_one()

    def weight(word: str) -> float:
        return inverse_frequency(connection.execute(count, {"match": match_of([word])}).scalar_one(), total)

    return [(int(number), float(score)) for number, score in rows], weight


def _ranked_postgres(connection: sa.Connection, index: str, words: list[str], most: int) -> _Ranking:
    """By the sum of `ts_rank` over the words, each weighted by how rare it is: `ts_rank` alone ignores that."""
    p, d = schema.passages, schema.documents
    total = connection.execute(sa.select(sa.func.count()).select_from(p)).scalar_one()
    lexemes = connection.execute(
        sa.text("SELECT w, plainto_tsquery('english', w)::text FROM unnest(CAST(:words AS text[])) AS w"),
        {"words": words},
    ).all()
    found = _frequencies(connection, sorted({lexeme for _, lexeme in lexemes if lexeme}), total)
    # the weight of BM25, with 1 added so that it is never negative
    weights = {lexeme: float(math.log((total - n + 0.5) / (n + 0.5) + 1)) for lexeme, n in found.items()}
    by_word = {word: weights.get(lexeme, 0.0) for word, lexeme in lexemes}
    rank = sum((sa.func.ts_rank(p.c.words, _term(lexeme), 1) * w for lexeme, w in weights.items()), sa.literal(0.0))
    rows: Sequence[Any] = []
    for chosen in dict.fromkeys((rarest(found, most), tuple(found))):
        if chosen and len(rows) < most:
            statement = (
                sa.select(p.c.id, rank)
                .join(d, d.c.id == p.c.document_id)
                .where(sa.or_(*(p.c.words.op("@@")(_term(lexeme)) for lexeme in chosen)))
                .where(d.c.index_name == index, d.c.ready)
                .order_by(rank.desc(), p.c.id)
                .limit(most)
            )
            rows = connection.execute(statement).all()
    return [(int(number), float(score)) for number, score in rows], by_word.__getitem__


def _frequencies(connection: sa.Connection, lexemes: Sequence[str], total: int) -> dict[str, int]:
    """Number of passages that have each word, without words that none has."""
    p, sampled = schema.passages, dict[str, int]()
    if total > MOST_COUNTED and lexemes:
        sample = p.tablesample(sa.func.system(100 / _SAMPLE), name="sample", seed=sa.literal(0))
        counts = [sa.func.count().filter(sample.c.words.op("@@")(_term(lexeme))) for lexeme in lexemes]
        rows = connection.execute(sa.select(*counts).select_from(sample)).one()
        sampled = {lexeme: _SAMPLE * n for lexeme, n in zip(lexemes, rows, strict=True) if _SAMPLE * n > MOST_COUNTED}
    found: dict[str, int] = {}
    for lexeme in lexemes:
        having = sa.select(sa.func.count()).select_from(p).where(p.c.words.op("@@")(_term(lexeme)))
        if n := min(sampled[lexeme], total) if lexeme in sampled else connection.execute(having).scalar_one():
            found[lexeme] = n
    return found


def rarest(found: Mapping[str, int], most: int) -> tuple[str, ...]:
    """The rarest words whose passages may all be ranked; more if these are fewer than `most` passages.

    A passage that has only more frequent words of the query would hardly be among the best.
    """
    chosen, passages, limit = [], 0, MOST_RANKS / max(1, len(found))
    for lexeme in sorted(found, key=lambda lexeme: (found[lexeme], lexeme)):
        if passages >= most and passages + found[lexeme] > limit:
            break
        chosen.append(lexeme)
        passages += found[lexeme]
    return tuple(sorted(chosen))


def _term(lexeme: str) -> Any:
    return sa.cast(sa.literal(lexeme), sa.Text).op("::")(sa.text("tsquery"))
