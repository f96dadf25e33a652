"""Text to SQL: databases that are only read, errors with the way out, large schemas, and the cost of a query."""

import itertools
import json
import math
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import dspy
import pytest

import assay
from assay.datasets import Task
from assay.errors import ConfigError, EnvironmentFailed, FailureKind
from assay.programs import TextToSQL, open_database
from assay.programs.sql import QueryError, QueryLimits, Table, schema_text
from assay.rubrics import NoGrade
from assay.shipped.programs.text_to_sql.checks import query_cost, query_runs, rows_match
from assay.testing import scripted_lm
from assay.traces import Store

LIMITS = QueryLimits()


@pytest.fixture
def library(tmp_path: Path) -> str:
    path = tmp_path / "library.sqlite"
    with closing(sqlite3.connect(path)) as made:
        made.executescript(
            """
            CREATE TABLE Author (AuthorId INTEGER PRIMARY KEY, Name TEXT, Country TEXT);
            CREATE TABLE Book (BookId INTEGER PRIMARY KEY, Title TEXT, Pages INTEGER,
              AuthorId INTEGER REFERENCES Author(AuthorId));
            CREATE INDEX by_author ON Book(AuthorId);
            """
        )
        made.executemany(
            "INSERT INTO Author VALUES (?, ?, ?)", [(n, f"Author {n}", "PT" if n % 2 else "NO") for n in range(40)]
        )
        made.executemany(
            "INSERT INTO Book VALUES (?, ?, ?, ?)", [(n, f"Book {n}", 100 + n, n % 40) for n in range(2000)]
        )
        made.commit()
    return str(path)


def refused(database: str, sql: str, limits: QueryLimits = LIMITS) -> QueryError:
    with pytest.raises(QueryError) as raised:
        open_database(database).query(sql, limits)
    return raised.value


# The database


def test_rows_and_cost_of_a_query(library: str) -> None:
    database = open_database(library)
    result = database.query("SELECT Name, Country FROM Author WHERE AuthorId = 3;", LIMITS)
    assert (result.columns, result.rows) == (("Name", "Country"), (("Author 3", "PT"),))
    scan, search = (
        database.query(f"SELECT COUNT(*) FROM Book WHERE {where}", LIMITS).cost
        for where in ("AuthorId + 0 = 3", "AuthorId = 3")
    )
    assert scan is not None
    assert search is not None
    assert scan > 10 * search
    again = database.query("SELECT COUNT(*) FROM Book WHERE AuthorId + 0 = 3", LIMITS).cost
    assert again == pytest.approx(scan, abs=100)


WRITES = (
    "INSERT INTO Author VALUES (99, 'x', 'y')",
    "UPDATE Author SET Name = 'x'",
    "DELETE FROM Author",
    "DROP TABLE Author",
    "CREATE TABLE x (a)",
    "ATTACH '{folder}/other.sqlite' AS other",
    "VACUUM INTO '{folder}/other.sqlite'",
    "PRAGMA writable_schema = 1",
    "WITH x AS (SELECT 1) INSERT INTO Author SELECT 99, 'x', 'y'",
    "SELECT 1; DELETE FROM Author",
    "EXPLAIN SELECT 1",
    "/* SELECT */ DELETE FROM Author",
    "-- SELECT\nDELETE FROM Author",
    "BEGIN",
    "SELECT load_extension('{folder}/x')",
    "SELECT * FROM pragma_database_list",
)


@pytest.mark.parametrize("sql", WRITES)
def test_nothing_can_be_written_or_attached(library: str, sql: str) -> None:
    folder = Path(library).parent
    before, content = sorted(folder.iterdir()), Path(library).read_bytes()
    refused(library, sql.format(folder=folder))
    assert sorted(folder.iterdir()) == before
    assert Path(library).read_bytes() == content


ENDLESS = (
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n",
    "SELECT COUNT(*) FROM Book a, Book b, Book c, Book d",
    "SELECT SUM(LENGTH(a.Title || b.Title || c.Title)) FROM Book a, Book b, Book c ORDER BY 1",
    "SELECT LENGTH(randomblob(1000000000))",
    "SELECT hex(zeroblob(90000)) || hex(zeroblob(90000)) FROM Book",
    "SELECT GROUP_CONCAT(a.Title) FROM Book a, Book b",
)


@pytest.mark.parametrize("sql", ENDLESS)
@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_query_that_would_run_for_an_hour_is_stopped(library: str, sql: str) -> None:
    assert refused(library, sql, QueryLimits(seconds=1.0)).kind == "limit"


@pytest.mark.parametrize("quote", ["{}", '"{}"', "[{}]"])
@pytest.mark.timeout(60)
def test_tables_of_with_that_are_written_out_2_to_the_40_times_are_refused(library: str, quote: str) -> None:
    names = [quote.format(f"t{at}") for at in range(40)]
    tables = ", ".join(
        f"{name} AS/**/(SELECT x.a FROM {before} x, {before} y)" for before, name in itertools.pairwise(names)
    )
    sql = f"WITH {names[0]} AS (SELECT 1 a), {tables} SELECT COUNT(*) FROM {names[-1]}"
    assert "name each other too often" in str(refused(library, sql))


def test_rows_and_size_are_limited(library: str) -> None:
    database = open_database(library)
    result = database.query("SELECT BookId FROM Book", QueryLimits(rows=7))
    assert (len(result.rows), result.truncated) == (7, True)
    assert not database.query("SELECT AuthorId FROM Author", LIMITS).truncated
    assert "larger than 1000 bytes" in str(refused(library, "SELECT * FROM Book", QueryLimits(size=1000)))
    assert refused(library, f"SELECT '{'x' * 3000}'").kind == "limit"
    assert refused(library, "SELECT '\0'").kind == "syntax"
    with pytest.raises(ConfigError, match="rows: must be greater"):
        QueryLimits(rows=0)


def test_errors_say_the_names_that_exist(library: str) -> None:
    for sql, kind, message in (
        ("SELECT Name FROM Authors", "table", "no such table: Authors; there is Author"),
        ("SELECT Nam FROM Author", "column", "no such column: Nam; there is Author.Name"),
        ("SELECT Pages FROM Author", "column", "no such column: Pages; Pages is a column of Book"),
        ("SELECT b.Name FROM Book b", "column", "no such column: b.Name; Name is a column of Author"),
        ("SELECT AuthorId FROM Book, Author", "ambiguous", "write it as TABLE.COLUMN"),
        ("SELECT FROM Book", "syntax", "syntax error"),
        ("SELECT COUNT( FROM Book", "syntax", "syntax error"),
    ):
        error = refused(library, sql)
        assert message in str(error)
        assert error.kind == kind


def test_a_database_that_fails_is_not_the_agents_failure(library: str, tmp_path: Path) -> None:
    (tmp_path / "text.sqlite").write_text("no database at all, but text of some length" * 20)
    damaged = str(tmp_path / "text.sqlite")
    with pytest.raises(EnvironmentFailed, match="cannot be used: file is not a database"):
        open_database(damaged).query("SELECT 1 FROM sqlite_master", LIMITS)
    with pytest.raises(NoGrade, match="cannot be used"):
        query_runs(Task(id="1", inputs={"database": damaged}), {"sql": "SELECT 1 FROM sqlite_master"}, None)
    rows = [
        {"inputs": {"question": "How many?", "database": path}, "expected": {"sql": "SELECT 1"}, "split": "test"}
        for path in (library, damaged)
    ]
    lm = scripted_lm(lambda request: json.dumps({"sql": "SELECT 1"}))
    evaluation = assay.evaluate(
        "text_to_sql", rubric="text_to_sql", data=rows, split="test", lm=lm, store=tmp_path / "a.db", preflight=False
    ).evaluation
    assert evaluation.unscored == 1
    assert sorted(map(math.isnan, evaluation.scores.values())) == [False, True]
    with Store(tmp_path / "a.db") as store:
        assert {rollout.failure for rollout in store.rollouts()} == {None, FailureKind.ENVIRONMENT}


# Schemas


def many_tables() -> list[Table]:
    tables = [Table(name=f"Log{at}", columns=tuple(f"Field{at}x{column}" for column in range(12))) for at in range(498)]
    tables.append(
        Table(name="CustomerOrder", columns=("OrderId", "CustomerId"), references=(("CustomerId", "Customer"),))
    )
    tables.append(Table(name="Customer", columns=("CustomerId", "City", "Email")))
    return tables


def test_the_tables_of_the_question_are_shown_of_five_hundred() -> None:
    text = schema_text(many_tables(), "How many orders have customers in Porto?", 2000)
    assert "Customer(CustomerId, City, Email)" in text
    assert "CustomerOrder(OrderId, CustomerId -> Customer)" in text
    assert "other tables: Log0" in text
    assert text.endswith("more")
    assert len(text) <= 2000


# The agent


def answering(*queries: str) -> tuple[Any, list[str]]:
    prompts: list[str] = []
    turns = iter(queries)

    def script(request: Any) -> str:
        prompts.append("\n".join(message.text or "" for message in request.messages))
        return json.dumps({"sql": next(turns)})

    return scripted_lm(script), prompts


def test_errors_of_the_database_are_read_and_the_query_written_anew(library: str) -> None:
    lm, prompts = answering("SELECT Nam FROM Author", "DELETE FROM Author", "SELECT Name FROM Author LIMIT 1")
    with dspy.context(lm=lm):
        result = TextToSQL()(question="Name an author.", database=library)
    assert result.rows == [["Author 0"]]
    assert [step["error"] is None for step in result.steps] == [False, False, True]
    assert "no such column: Nam; there is Author.Name" in prompts[1]
    assert "only reading queries" in prompts[2]


# The rubric


def task(library: str, sql: str = "SELECT COUNT(*) FROM Book WHERE AuthorId = 3") -> Task:
    return Task(id="1", inputs={"question": "?", "database": library}, expected={"sql": sql})


def test_rows_are_compared_by_running_both_queries(library: str) -> None:
    for sql, grade in (
        ("SELECT COUNT(BookId) AS n FROM Book WHERE AuthorId = 3", 1),
        ("SELECT COUNT(*) * 1.0 FROM Book WHERE AuthorId + 0 = 3", 1),
        ("SELECT 51", 0),
        ("SELECT Pages FROM Book", 0),
        ("SELECT x FROM Book", 0),
        ("", 0),
    ):
        assert rows_match(task(library), {"sql": sql, "rows": [[50]]}, None).value == grade
    names = task(library, "SELECT Name FROM Author ORDER BY Name")
    backwards = {"sql": "SELECT Name FROM Author ORDER BY Name DESC"}
    assert rows_match(names, backwards, None).value == 1
    assert rows_match(names, backwards, None, ordered=True).value == 0


def test_cost_is_graded_by_the_logarithm_of_its_ratio(library: str) -> None:
    same = {"sql": "SELECT COUNT(*) FROM Book WHERE AuthorId = 3"}
    scan = {"sql": "SELECT COUNT(*) FROM Book WHERE AuthorId + 0 = 3"}
    assert query_cost(task(library), same, None).value == 0.5
    assert query_cost(task(library), scan, None).value == 0
    dear = task(library, scan["sql"])
    assert query_cost(dear, same, None).value == 1
    database = open_database(library)
    costs = [database.query(query["sql"], LIMITS).cost or 0 for query in (same, scan)]
    grade = query_cost(task(library), scan, None, factor=1000).value
    assert grade == pytest.approx(0.5 - math.log(costs[1] / costs[0], 1000) / 2)


def test_a_guided_run_shows_the_expected_query_with_the_tables(library: str) -> None:
    lm, prompts = answering("no query")
    guide = {"assay_guide": {"sql": "SELECT COUNT(*)\nFROM Author"}}
    with dspy.context(lm=lm, trace=[], **guide):
        result = TextToSQL()(question="How many authors?", database=library)
        ((_, inputs, output),) = dspy.settings.trace
    assert (result.rows, prompts) == ([[40]], [])
    assert "Author(AuthorId, Name, Country)" in inputs["tables"]
    assert (inputs["question"], output.sql) == ("How many authors?", "SELECT COUNT(*) FROM Author")


@pytest.fixture
def indexed(tmp_path: Path) -> str:
    with closing(sqlite3.connect(tmp_path / "notes.db")) as made, made:
        made.execute("CREATE TABLE notes_data (body TEXT)")  # a name as that of an index, and a table of the user's
        for module in ("fts4", "fts5"):
            made.execute(f"CREATE VIRTUAL TABLE search_{module} USING {module}(body)")
            made.execute(f"INSERT INTO search_{module} VALUES ('the red fox'), ('a blue bird')")
    return str(tmp_path / "notes.db")


def test_a_full_text_index_is_searched_and_not_written(indexed: str) -> None:
    database = open_database(indexed)
    for table in ("search_fts4", "search_fts5"):
        result = database.query(f"SELECT body FROM {table} WHERE {table} MATCH 'fox'", QueryLimits())
        assert result.rows == (("the red fox",),)
        with pytest.raises(QueryError) as refused:
            database.query(f"INSERT INTO {table}({table}) VALUES ('optimize')", QueryLimits())
        assert refused.value.kind == "write"
