"""The example on a database: queries, answers, errors, and that nothing is written."""

import contextlib
import importlib.util
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import dspy
import pytest

from assay.datasets import Task
from assay.programs import AgentParameters
from assay.rubrics import load_rubric
from assay.testing import scripted_lm

EXAMPLE = Path(__file__).parent.parent / "examples" / "text_to_sql"
ROWS: dict[str, list[tuple[Any, ...]]] = {
    "Artist": [(1, "AC/DC"), (2, "Accept")],
    "Album": [(1, "Balls to the Wall", 2), (2, "Let There Be Rock", 1), (3, "Big Ones", 1)],
    "Genre": [(1, "Rock")],
    "Track": [(at, f"track {at}", 1, 1, 1000 * at, 0.99) for at in range(1, 301)],
    "Customer": [(1, "Silva", "Oslo", "Norway", "a@b.example"), (2, "Berg", "Bergen", "Norway", "c@d.example")],
    "Invoice": [(1, 1, "Oslo", 1.98), (2, 1, "Oslo", 3.96)],
}


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The example's module over a shop of its own, in a folder `shop` beside `small.sqlite`."""
    folder = tmp_path_factory.mktemp("sql")
    spec = importlib.util.spec_from_file_location("shop_agent", EXAMPLE / "agent.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with contextlib.closing(sqlite3.connect(folder / "small.sqlite")) as made, made:
        for table, columns in module.TABLES.items():
            made.execute(f"CREATE TABLE {table} ({', '.join(columns)})")
            made.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(columns))})", ROWS[table])
    words = [sys.executable, str(EXAMPLE / "agent.py"), "--database", "small.sqlite", "--out", "shop"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "300 tracks" in done.stdout
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHINOOK", str(folder / "shop" / "chinook.sqlite"))
        yield module


def shop() -> Path:
    return Path(os.environ["CHINOOK"]).parent


@pytest.mark.slow
def test_every_question_has_rows_that_answer_it(agent: ModuleType) -> None:
    tasks = [json.loads(line) for line in (shop() / "questions.jsonl").read_text().splitlines()]
    assert {task["task_type"] for task in tasks} == set(agent.QUESTIONS)
    assert all(agent.query(task["expected"]["sql"]) for task in tasks)
    assert next(task for task in tasks if "Norway" in task["inputs"]["question"])["task_type"] == "customers"


@pytest.mark.slow
def test_the_agent_retries_with_the_error_of_the_database(agent: ModuleType) -> None:
    queries, asked = (
        iter(["SELECT COUNT(*) FROM Client", "SELECT COUNT(*) FROM Customer WHERE Country = 'Norway'"]),
        list[str](),
    )

    def write(request: Any) -> str:
        asked.append(str(request))
        return json.dumps({"sql": next(queries)})

    with dspy.context(lm=scripted_lm(write)):
        prediction = agent.SqlAgent(AgentParameters(max_steps=3))(question="How many customers are from Norway?")
    assert prediction.rows == [[2]]
    assert ["no such table: Client" in text for text in asked] == [False, True]
    task = Task(id="t", inputs={"question": "?"}, expected={"sql": "SELECT 2"})
    rubric = load_rubric(EXAMPLE / "rubric.yaml")
    assert rubric.score(task, dict(prediction)).value == 1.0
    assert rubric.score(task, {"sql": "x", "rows": [[3]]}).value == pytest.approx(0.2)
    assert rubric.score(task, {"sql": "x", "rows": None}).value == 0.0


@pytest.mark.slow
def test_queries_that_write_or_do_not_end_are_refused_and_no_more_than_200_rows_come_back(agent: ModuleType) -> None:
    for sql in (
        "DELETE FROM Album",
        "DROP TABLE Album",
        "ATTACH 'other.sqlite' AS other",
        "VACUUM INTO 'copy.sqlite'",
        "PRAGMA journal_mode = WAL",
        "",
        "SELECT 1; DELETE FROM Album",
        "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT COUNT(*) FROM n",
    ):
        with pytest.raises((sqlite3.Error, sqlite3.Warning)):
            agent.query(sql)
    assert agent.query("SELECT COUNT(*) FROM Album") == [[3]]
    assert list(Path().iterdir()) == []
    assert len(agent.query("SELECT * FROM Track")) == 200
