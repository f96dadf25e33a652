"""Virtual tables of an SQLite file, such as full-text indexes: they are read, and what is inside of them is hidden."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from assay.programs import open_database
from assay.programs.sql.database import QueryError, QueryLimits


@pytest.fixture
def indexed(tmp_path: Path) -> str:
    with closing(sqlite3.connect(tmp_path / "notes.db")) as made, made:
        made.execute("CREATE TABLE notes_data (body TEXT)")  # a name as that of an index, and a table of the user's
        for module in ("fts4", "fts5"):
            made.execute(f"CREATE VIRTUAL TABLE search_{module} USING {module}(body)")
            made.execute(f"INSERT INTO search_{module} VALUES ('the red fox'), ('a blue bird')")
    return str(tmp_path / "notes.db")


def test_tables_inside_of_a_full_text_index_are_not_in_the_schema(indexed: str) -> None:
    tables = {table.name: table.columns for table in open_database(indexed).tables()}
    assert tables == dict.fromkeys(("notes_data", "search_fts4", "search_fts5"), ("body",))


def test_a_full_text_index_is_searched_and_not_written(indexed: str) -> None:
    database = open_database(indexed)
    for table in ("search_fts4", "search_fts5"):
        result = database.query(f"SELECT body FROM {table} WHERE {table} MATCH 'fox'", QueryLimits())
        assert result.rows == (("the red fox",),)
        with pytest.raises(QueryError) as refused:
            database.query(f"INSERT INTO {table}({table}) VALUES ('optimize')", QueryLimits())
        assert refused.value.kind == "write"
