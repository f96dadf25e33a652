"""Text to SQL: training tasks are run with their expected query, so that demonstrations have its tables."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import dspy
import pytest

from assay.programs import TextToSQL
from assay.testing import scripted_lm


@pytest.fixture
def library(tmp_path: Path) -> str:
    path = tmp_path / "library.sqlite"
    with closing(sqlite3.connect(path)) as made:
        made.execute("CREATE TABLE Author (AuthorId INTEGER PRIMARY KEY, Name TEXT, Country TEXT)")
        made.executemany("INSERT INTO Author VALUES (?, ?, ?)", [(n, f"Author {n}", "PT") for n in range(40)])
        made.commit()
    return str(path)


def answering(query: str) -> tuple[Any, list[str]]:
    prompts: list[str] = []

    def script(request: Any) -> str:
        prompts.append("\n".join(message.text or "" for message in request.messages))
        return json.dumps({"sql": query})

    return scripted_lm(script), prompts


def test_a_guided_run_shows_the_expected_query_with_the_tables(library: str) -> None:
    lm, prompts = answering("no query")
    guide = {"assay_guide": {"sql": "SELECT COUNT(*)\nFROM Author"}}
    with dspy.context(lm=lm, trace=[], **guide):
        result = TextToSQL()(question="How many authors?", database=library)
        ((_, inputs, output),) = dspy.settings.trace
    assert (result.rows, prompts) == ([[40]], [])
    assert "Author(AuthorId, Name, Country)" in inputs["tables"]
    assert (inputs["question"], output.sql) == ("How many authors?", "SELECT COUNT(*) FROM Author")


@pytest.mark.parametrize("expected", [{}, {"sql": ""}, {"sql": None}, {"sql": 3}, {"rows": [[40]]}])
def test_a_task_without_an_expected_query_is_not_guided(library: str, expected: dict[str, Any]) -> None:
    lm, prompts = answering("SELECT COUNT(*) FROM Author")
    with dspy.context(lm=lm, trace=[], assay_guide=expected):
        assert TextToSQL()(question="How many authors?", database=library).rows == [[40]]
    assert len(prompts) == 1


def test_an_expected_query_that_fails_is_written_anew(library: str) -> None:
    lm, prompts = answering("SELECT COUNT(*) FROM Author")
    with dspy.context(lm=lm, trace=[], assay_guide={"sql": "SELECT COUNT(*) FROM Nowhere"}):
        assert TextToSQL()(question="How many authors?", database=library).rows == [[40]]
    assert len(prompts) == 1
