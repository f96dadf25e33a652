"""A missing value has one meaning in every source: an unknown input is None, an unknown output is not graded."""

import json
import math
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import dspy
import numpy
import pandas
import pyarrow
import pyarrow.parquet
import pytest

from assay.datasets import iter_rows, load_tasks, make_task
from assay.datasets.memory import data_spec
from assay.datasets.tasks import NULL, known_outputs, written_outputs
from assay.errors import DataError
from assay.rubrics import Criterion, Rubric, checks, conversations
from assay.support.values import is_missing
from assay.traces.gateway.sessions import checked_fields

MISSING = [
    None, math.nan, numpy.nan, numpy.float32("nan"), Decimal("NaN"), pandas.NA, pandas.NaT, numpy.datetime64("NaT"),
]  # fmt: skip


@pytest.mark.parametrize("value", MISSING, ids=repr)
def test_every_form_of_a_missing_value_is_one(value: Any) -> None:
    assert is_missing(value)
    task = make_task({"question": "q", "context": value, "answer": value}, inputs=["question", "context"])
    assert task == make_task({"question": "q", "context": None}, inputs=["question", "context"])
    (in_memory,) = load_tasks(data_spec([{"inputs": {"question": "q"}, "expected": {"answer": value}}]))
    assert in_memory.expected == {}


@pytest.mark.parametrize(
    "value", ["", "NA", "NaN", "null", "None", "-", 0, 0.0, False, [], {}, [None], math.inf, datetime(2024, 2, 29)]
)
def test_other_values_are_not_missing(value: Any) -> None:
    assert not is_missing(value)
    assert not is_missing(numpy.array([math.nan]))
    with pytest.raises(DataError, match="answer"):
        make_task({"question": "q", "answer": math.inf})


def test_a_missing_value_means_the_same_in_every_source(tmp_path: Path) -> None:
    rows = [
        {"question": "a", "context": None, "answer": "1"}, {"question": "b", "context": "c", "answer": None},
        {"question": "c", "context": "NA", "answer": "null"},
    ]  # fmt: skip
    (tmp_path / "a.csv").write_text("question,context,answer\na,,1\nb,c, \nc,NA,null\n")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    frame = pandas.DataFrame(rows)
    sources: list[Any] = [
        *(str(tmp_path / name) for name in ("a.csv", "a.jsonl", "a.parquet")),
        rows, table, frame, frame.convert_dtypes(), frame.replace({None: math.nan}),
        [dspy.Example(**row).with_inputs("question", "context") for row in rows],
    ]  # fmt: skip
    for source in sources:
        tasks = load_tasks(data_spec(source), inputs=["question", "context"])
        assert [task.expected for task in tasks] == [{"answer": "1"}, {}, {"answer": "null"}]
        assert [task.inputs["context"] for task in tasks] == [None, "c", "NA"]


def test_an_output_that_must_be_null_is_written_as_such(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"inputs": {"text": "t"}, "expected": {"end": {"$null": true}}}\n')
    (tmp_path / "a.csv").write_text('text,end\nt,"{""$null"": true}"\n')
    for source in (str(tmp_path / "a.jsonl"), str(tmp_path / "a.csv"), data_spec([{"text": "t", "end": NULL}])):
        (task,) = load_tasks(source, inputs=["text"])
        assert task.expected == {"end": None}
        grades = [checks.fields_match(task, {"end": end}, None).value for end in (None, "2024", "")]
        assert grades == [1, 0, 0]
        assert checks.fields_match(task, {"start": None, "note": "x"}, None).value == 0
    expected = {"end": None, "start": "2024", "parts": [None]}
    assert known_outputs(json.loads(json.dumps(written_outputs(expected)))) == expected


def test_a_client_of_the_gateway_writes_unknown_and_null_outputs_the_same_way() -> None:
    fields = checked_fields({"expected": {"answer": None, "end": {"$null": True}, "start": "2024"}})
    assert fields == {"expected": {"end": None, "start": "2024"}}


@pytest.mark.parametrize(
    "data",
    [
        pandas.DataFrame([["q", "r"]], columns=["question", "question"]),
        pandas.DataFrame([["q", "r"]], columns=[1, "1"]),
        pyarrow.table([["q"], ["r"]], names=["question", "question"]),
        [{1: "q", "1": "r"}],
    ],
)
def test_two_columns_of_one_name_are_refused(data: Any) -> None:
    with pytest.raises(DataError, match=r"'(question|1)'"):
        data_spec(data)


@pytest.mark.parametrize(
    ("check", "arguments"),
    [
        (checks.exact, {}),
        (checks.numeric, {}),
        (checks.contains, {}),
        (checks.contains, {"text": "2024"}),
        (checks.regex, {"pattern": "[0-9]+"}),
        (checks.regex, {"pattern": ".*"}),
        (checks.one_of, {"values": ["2023", "2024"]}),
        (checks.json_schema, {"schema": {"type": "string"}}),
    ],
)
def test_every_check_of_a_field_that_must_be_null_gives_1_for_null_only(check: Any, arguments: Any) -> None:
    task = make_task({"inputs": {"text": "t"}, "expected": {"end": NULL, "start": "2023"}})
    predictions: list[dict[str, Any]] = [{"end": None}, {"end": "2024"}, {"end": ""}, {"start": "2023"}]
    assert [check(task, row, None, field="end", **arguments).value for row in predictions] == [1, 0, 0, 0]


def test_values_in_an_outcome_are_compared_as_values() -> None:
    expected = {"end": None, "people": 3, "day": "Friday"}
    task = make_task({"inputs": {"text": "t"}, "expected": {"outcome": expected}})
    right: dict[str, Any] = {"end": None, "people": "3.0", "day": "friday."}
    assert conversations.completed(task, {"outcome": right}, None).value == 1
    assert conversations.filled(task, {"outcome": {**right, "end": "None"}}, None).value == pytest.approx(2 / 3)


def test_integers_beside_a_missing_value_stay_integers_in_a_parquet_file_of_pandas(tmp_path: Path) -> None:
    frame = pandas.DataFrame(
        {"count": [3, None], "share": [0.5, None], "all": [1.0, 2.0], "huge": [2.0**60, None], "end": [math.inf, None]}
    )
    frame.to_parquet(tmp_path / "a.parquet")
    first, second = (row for _, row in iter_rows(str(tmp_path / "a.parquet")))
    assert [repr(value) for value in first.values()] == ["3", "0.5", "1.0", repr(2.0**60), "inf"]
    assert [second[name] for name in ("count", "share", "huge")] == [None, None, None]
    pyarrow.parquet.write_table(pyarrow.table({"share": [3.0, None]}), tmp_path / "b.parquet")
    assert [repr(row["share"]) for _, row in iter_rows(str(tmp_path / "b.parquet"))] == ["3.0", "None"]


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl"])
def test_a_criterion_on_an_empty_cell_names_the_file_and_the_line(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    rows = [("1", "2"), ("3", "")]
    if name.endswith("csv"):
        file.write_text("question,answer\n" + "".join(f"{question},{answer}\n" for question, answer in rows))
    else:
        file.write_text("".join(json.dumps({"question": q, "answer": a or None}) + "\n" for q, a in rows))
    (_, task) = load_tasks(str(file))
    result = Rubric("r", [Criterion(name="right", check=checks.exact)]).score(task, {"answer": "4"})
    assert f"{file}:{3 if name.endswith('csv') else 2}" in (result.verdicts[0].reason or "")
