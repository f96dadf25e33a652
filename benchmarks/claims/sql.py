"""Text to SQL on a schema that the compile run never saw: a library's questions compile, a clinic's are reported.

Both databases are made here, with the same four kinds of question in words of their own. The plain and the compiled
`text_to_sql` answer the same questions about the clinic.
"""

import random
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import assay
from claims.storing import Lines, Measured, Setting

ROWS, PER_KIND, TEST = 120, 24, 40
SEARCH_CALLS, DEMOS = 80, 6
CITIES = ("Porto", "Oslo", "Lyon", "Graz", "Bari", "Cork", "Turku", "Ghent", "Brno", "Vaasa", "Lund", "Split")


@dataclass(frozen=True)
class Schema:
    """Two tables: `one` has a text and a number, `many` refers to it. Words are those of the questions."""

    one: str
    name: str
    number: str
    many: str
    ones: str  # plural of `one`, in words
    manies: str


LIBRARY = Schema("Author", "City", "BirthYear", "Book", "authors", "books")
CLINIC = Schema("Patient", "Town", "Weight", "Visit", "patients", "visits")


def made(schema: Schema, path: Path, seed: int) -> None:
    """Writes the database."""
    path.unlink(missing_ok=True)  # of a measurement that was cut off
    rng = random.Random(f"{schema.one}/{seed}")
    key = f"{schema.one}Id"
    with closing(sqlite3.connect(path)) as opened:
        opened.execute(
            f"CREATE TABLE {schema.one} ({key} INTEGER PRIMARY KEY, {schema.name} TEXT, {schema.number} INTEGER)"
        )
        opened.execute(
            f"CREATE TABLE {schema.many} ({schema.many}Id INTEGER PRIMARY KEY, "
            f"{key} INTEGER REFERENCES {schema.one}({key}))"
        )
        opened.executemany(
            f"INSERT INTO {schema.one} VALUES (?, ?, ?)",
            [(at, rng.choice(CITIES), rng.randint(40, 2000)) for at in range(1, ROWS + 1)],
        )
        opened.executemany(
            f"INSERT INTO {schema.many} VALUES (?, ?)", [(at, rng.randint(1, ROWS)) for at in range(1, 5 * ROWS)]
        )
        opened.commit()


def questions(
    schema: Schema, path: Path, seed: int, splits: tuple[str, ...], per_kind: int = PER_KIND
) -> Iterator[dict[str, Any]]:
    """Tasks of each kind, all different, whose splits are taken in turn."""
    rng = random.Random(f"questions/{schema.one}/{seed}")
    key, one, many = f"{schema.one}Id", schema.one, schema.many
    asked: set[str] = set()
    for _ in range(per_kind):
        city, at = rng.choice(CITIES), rng.randint(1, ROWS)
        for kind, question, sql in (
            (
                "count",
                f"How many {schema.ones} are from {city}?",
                f"SELECT COUNT(*) FROM {one} WHERE {schema.name} = '{city}'",
            ),
            (
                "lookup",
                f"What is the {schema.number} of {one} {at}?",
                f"SELECT {schema.number} FROM {one} WHERE {key} = {at}",
            ),
            (
                "most",
                f"What is the highest {schema.number} of {schema.ones} from {city}?",
                f"SELECT MAX({schema.number}) FROM {one} WHERE {schema.name} = '{city}'",
            ),
            (
                "related",
                f"How many {schema.manies} has {one} {at}?",
                f"SELECT COUNT(*) FROM {many} WHERE {key} = {at}",
            ),
        ):
            if question in asked:
                continue
            yield {
                "inputs": {"question": question, "database": str(path)},
                "expected": {"sql": sql},
                "task_type": kind,
                "split": splits[len(asked) % len(splits)],
            }
            asked.add(question)


def measure(setting: Setting) -> Measured:
    report = assay.compile(
        "text_to_sql",
        data=list(
            questions(LIBRARY, database(LIBRARY, setting), setting.seed, ("train", "train", "val", "gate", "test"))
        ),
        max_search_calls=SEARCH_CALLS,
        demos=DEMOS,
        gate=False,  # the winner on val is reported, whatever it is
        test=False,
        out=setting.scratch / "sql",
        **_common(setting, setting.model),
    )
    sides = {"before": ("text_to_sql", setting.model), "after": (report.artifact, setting.model)}
    return Measured(values=on_clinic(setting, sides), facts={"winner": report.outcome.winner})


def database(schema: Schema, setting: Setting) -> Path:
    """Writes the database of a schema."""
    path = setting.scratch / f"{schema.one}.sqlite"
    made(schema, path, setting.seed)
    return path


def on_clinic(setting: Setting, sides: Mapping[str, tuple[Any, str]]) -> dict[str, Any]:
    """Grades of the same questions about the clinic by criterion and side, each a program with its model."""
    asked = list(questions(CLINIC, database(CLINIC, setting), setting.seed, ("test",)))
    evaluations = {
        side: assay.evaluate(
            program, data=asked, split="test", sizes={"test": TEST}, **_common(setting, model)
        ).evaluation
        for side, (program, model) in sides.items()
    }
    return {
        criterion: {
            side: {task: result.grades.get(criterion, float("nan")) for task, result in evaluation.results.items()}
            for side, evaluation in evaluations.items()
        }
        for criterion in ("rows_match", "query_runs")
    }


def _common(setting: Setting, model: str) -> dict[str, Any]:
    return {
        "rubric": "text_to_sql",
        "model": model,
        "prompt_format": "lean",
        "parameters": {"temperature": 0.1, "max_steps": 3},
        "seed": setting.seed,
        "store": setting.scratch / "sql.db",
        "threads": 1,
        "progress": Lines(),
    }
