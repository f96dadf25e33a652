"""Text to SQL on PostgreSQL: what a query may do, and its limits."""

from collections.abc import Iterator

import psycopg
import pytest
import sqlalchemy as sa

from assay.errors import ConfigError, EnvironmentFailed
from assay.programs import open_database
from assay.programs.sql import QueryError, QueryLimits

LIMITS = QueryLimits()


@pytest.fixture
def reader_url(postgres_url: str) -> Iterator[str]:
    """The database as a role that owns nothing."""
    with psycopg.connect(postgres_url, autocommit=True) as owner:
        owner.execute("CREATE ROLE reader LOGIN PASSWORD 'reader'")
        yield sa.make_url(postgres_url).set(username="reader", password="reader").render_as_string(hide_password=False)
        owner.execute("DROP OWNED BY reader")
        owner.execute("DROP ROLE reader")


@pytest.mark.timeout(300)
def test_postgresql_reads_with_limits_and_blocks(postgres_url: str, reader_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as owner:
        owner.execute("DROP TABLE IF EXISTS book CASCADE")
        owner.execute("CREATE TABLE book (id integer PRIMARY KEY, title text)")
        owner.execute("INSERT INTO book SELECT n, 'Book ' || n FROM generate_series(1, 20000) n")
        owner.execute("GRANT SELECT ON book TO reader")
        with pytest.raises(ConfigError, match="is a superuser"):
            open_database(postgres_url).query("SELECT 1", LIMITS)
    database = open_database(reader_url)
    one, every = (database.query(sql, LIMITS) for sql in ("SELECT title FROM book WHERE id = 7", "SELECT id FROM book"))
    assert one.rows == (("Book 7",),)
    assert (len(every.rows), every.truncated) == (200, True)
    assert (every.cost or 0) > 10 * (one.cost or 0) > 0
    for sql, kind in (
        ("DELETE FROM book", "write"),
        ("WITH x AS (DELETE FROM book RETURNING id) SELECT * FROM x", "write"),
        ("SELECT 1; DELETE FROM book", "syntax"),
        ("SELECT pg_terminate_backend(pid) FROM pg_stat_activity", "write"),
        ('SELECT "pg_cancel_backend"(1)', "write"),
        ("SELECT '/*', pg_advisory_lock(1), '*/'", "write"),
        ("SELECT query_to_xml('SELECT pg_termi' || 'nate_backend(1)', true, true, '')", "write"),
        ('SELECT U&"pg_\\0074erminate_backend"(1)', "write"),
        ("SELECT titel FROM book", "column"),
        ("SELECT title FROM books", "table"),
        ("SELECT pg_sleep(600)", "limit"),
        ("SELECT COUNT(*) FROM book a, book b, book c", "limit"),
    ):
        with pytest.raises(QueryError) as raised:
            database.query(sql, QueryLimits(seconds=1.0))
        assert raised.value.kind == kind
    with psycopg.connect(postgres_url) as owner:
        assert owner.execute("SELECT COUNT(*) FROM book").fetchone() == (20000,)


def test_a_query_cannot_change_its_limits_for_the_measurement_of_its_cost(postgres_url: str, reader_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as owner:
        owner.execute("CREATE SEQUENCE counter")
        owner.execute("GRANT ALL ON SEQUENCE counter TO reader")
    database = open_database(reader_url)
    writes = (
        "SELECT CASE WHEN current_setting('{0}') = 'off' THEN setval('counter', 9) END, set_config('{0}', 'off', {1})"
    )
    for setting, local in (("default_transaction_read_only", "false"), ("transaction_read_only", "true")):
        with pytest.raises(QueryError, match=r"read-only transaction|read-write mode"):
            database.query(writes.format(setting, local), LIMITS)
    sleeps = (
        "SELECT CASE WHEN current_setting('statement_timeout') = '0' THEN pg_sleep(600) END, "
        "set_config('statement_timeout', '0', false)"
    )
    database.query(sleeps, QueryLimits(seconds=1.0))
    with psycopg.connect(postgres_url, autocommit=True) as owner:
        assert owner.execute("SELECT last_value FROM counter").fetchone() == (1,)
        owner.execute("DROP SEQUENCE counter")


def test_a_server_that_is_away_is_not_the_agents_failure(reader_url: str) -> None:
    away = sa.make_url(reader_url).set(database="none").render_as_string(hide_password=False)
    database = open_database(away)
    with pytest.raises(EnvironmentFailed, match="cannot be used"):
        database.tables()
    with pytest.raises(EnvironmentFailed, match="cannot be used"):
        database.query("SELECT 1", LIMITS)
