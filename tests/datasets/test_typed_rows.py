"""Rows are converted by a program's types, the same from every kind of file, before anything is run."""

import base64
import datetime
import enum
import json
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import dspy
import pydantic
import pytest

from assay.datasets import load_splits, make_task
from assay.datasets.fields import Fields
from assay.datasets.tasks import task_key
from assay.errors import DataError
from assay.support.values import json_value

PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGNgYGAAAAAEAAH2FzhVAAAAAElFTkSuQmCC")
URI = "data:image/png;base64," + base64.b64encode(PNG).decode()


class Kind(enum.Enum):
    FIRM = "firm"
    PERSON = "person"


class Level(enum.Enum):
    LOW = 1
    HIGH = 2


class Item(pydantic.BaseModel):
    picture: dspy.Image
    kind: Kind = Kind.PERSON


@dataclass
class Line:
    amount: Decimal
    day: datetime.date | None = None


def read(value: Any, annotation: Any, folder: Path | None = None) -> Any:
    row = {"x": value, "question": "q"}
    return make_task(row, inputs=Fields({"x": annotation, "question": str}), folder=folder).inputs["x"]


READ = [
    ("3", int, 3),
    ("3.5", float, 3.5),
    ("true", bool, True),
    ("no", bool, False),
    ("12.50", Decimal, Decimal("12.50")),
    (12.5, Decimal, Decimal("12.5")),
    ("2024-02-29", datetime.date, datetime.date(2024, 2, 29)),
    ("2024-02-29T10:00:00", datetime.datetime, datetime.datetime(2024, 2, 29, 10)),
    ("P1DT2H", datetime.timedelta, datetime.timedelta(days=1, hours=2)),
    ("firm", Kind, Kind.FIRM),
    ("FIRM", Kind, Kind.FIRM),
    ("2", Level, Level.HIGH),
    (["LOW", 2], list[Level], [Level.LOW, Level.HIGH]),
    ("2", Literal[1, 2], 2),
    ("", int | None, None),
    ('["b", "a"]', set[str], {"a", "b"}),
    ('{"a": "1.5"}', dict[str, float], {"a": 1.5}),
    ('[1, "x"]', tuple[int, str], (1, "x")),
    ("['a', 'b']", list[str], ["a", "b"]),
    ({"amount": "0.10", "day": "2024-01-02"}, Line, Line(Decimal("0.10"), datetime.date(2024, 1, 2))),
    ("data:application/octet-stream;base64,/w==", bytes, b"\xff"),
    ([{"question": "a", "answer": "b"}], dspy.History, dspy.History(messages=[{"question": "a", "answer": "b"}])),
    (URI, dspy.Image, dspy.Image(URI)),
    ("https://a.example/b.png", dspy.Image, dspy.Image("https://a.example/b.png")),
    (PNG, dspy.Image, dspy.Image(URI)),
    (base64.b64encode(PNG).decode(), dspy.Image, dspy.Image(URI)),
    ({"bytes": PNG, "path": None}, dspy.Image, dspy.Image(URI)),
    ({"type": "image_url", "image_url": {"url": URI}}, dspy.Image, dspy.Image(URI)),
    (dspy.Image(URI).model_dump(), dspy.Image, dspy.Image(URI)),
    ([URI], list[dspy.Image] | None, [dspy.Image(URI)]),
    ([{"picture": URI, "kind": "FIRM"}], list[Item], [Item(picture=dspy.Image(URI), kind=Kind.FIRM)]),
    ("data:audio/wav;base64,QQ==", dspy.Audio, dspy.Audio(data="QQ==", audio_format="wav")),
    ("x = 1", dspy.Code, dspy.Code(code="x = 1")),
    (3, str, 3),
    ("[1]", str, "[1]"),
    ({"a": 1}, Any, {"a": 1}),
]


@pytest.mark.parametrize(("value", "annotation", "form"), READ, ids=range(len(READ)))
def test_a_value_is_read_by_its_declared_type(value: Any, annotation: Any, form: Any) -> None:
    found = read(value, annotation)
    assert found == form
    assert type(found) is type(form)
    stored = json.loads(json.dumps(json_value({"x": form})))  # read back, it is the same task
    assert Fields({"x": annotation}).converted(stored, where="the store") == {"x": form}
    assert task_key(stored) == task_key({"x": form})


WRONG = [
    ("three", int),
    ("perhaps", bool),
    ("2024-02-30", datetime.date),
    ("other", Kind),
    (None, dspy.Image),
    ("picture.png", dspy.Image),
    ("hello there", dspy.Image),
    ("data:text/html;base64,PGI+aGk8L2I+", dspy.Image),
    ("data:audio/wav;base64,UklGRg==", dspy.Image),
    ({"url": "data:application/pdf;base64,JVBERi0="}, dspy.Image),
    ("data:image/png;base64,iVBORw0KGgo=", dspy.Audio),
    ("https://a.example/b.wav", dspy.Audio),
    ("report.pdf", dspy.File),
    ("a text", dspy.History),
    ({"kind": "firm"}, Item),
    ("a, b", list[str]),
]


@pytest.mark.parametrize(("value", "annotation"), WRONG, ids=range(len(WRONG)))
def test_a_value_that_cannot_be_converted_is_an_error_with_row_and_field(value: Any, annotation: Any) -> None:
    with pytest.raises(DataError, match=r"rows\.csv:7.*'x'"):
        make_task({"x": value, "question": "q"}, where="rows.csv:7", inputs=Fields({"x": annotation, "question": str}))


def test_a_path_is_relative_to_the_data_file_and_is_read_only_where_rows_may_name_files(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "a.png").write_bytes(PNG)
    (folder / "secret.png").write_text("key = 1")
    (tmp_path / "outside.pdf").write_bytes(b"%PDF")
    (folder / "rows.jsonl").write_text(json.dumps({"picture": "a.png", "answer": "x"}) + "\n")
    fields = Fields({"picture": dspy.Image})
    parts = load_splits(str(folder / "rows.jsonl"), inputs=fields, need=()).parts()
    (task,) = [task for part in parts.values() for task in part]
    assert task.inputs["picture"] == dspy.Image(URI)
    for value, annotation in (("secret.png", dspy.Image), ("../outside.pdf", dspy.File)):
        with pytest.raises(DataError):
            read(value, annotation, folder)
    with pytest.raises(DataError):
        read(str(folder / "a.png"), dspy.Image, None)


def test_an_expected_picture_may_be_named_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    fields = Fields({"question": str}, outputs={"drawing": dspy.Image})
    row = {"question": "q", "drawing": "a.png"}
    assert make_task(row, inputs=fields, folder=tmp_path).expected == {"drawing": {"url": URI}}
    assert make_task(row, inputs=fields).expected == {"drawing": "a.png"}


def test_an_input_without_a_json_form_is_refused_with_row_and_field() -> None:
    with pytest.raises(DataError, match=r"data\[0\].*connection"):
        make_task({"connection": object(), "answer": "x"}, where="data[0]")


def test_no_column_is_lost_beside_metadata_that_is_a_text() -> None:
    row = {"inputs": {"question": "q"}, "expected": "x", "metadata": "a note", "source": "page 3"}
    assert make_task(row).metadata == {"value": "a note", "source": "page 3"}
