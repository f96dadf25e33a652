"""Programs with typed inputs and outputs, from the rows of a file to the scores of stored rollouts."""

import base64
import datetime
import enum
import json
from pathlib import Path
from typing import Any, Literal

import dspy
import pydantic
import pytest
from click.testing import CliRunner
from dspy.utils.exceptions import AdapterParseError

import assay
from assay.cli import group
from assay.commands.deployed import LoadedVersion
from assay.commands.scoring import score_rollouts
from assay.datasets import Task
from assay.deployment import save_artifact
from assay.errors import DataError
from assay.evaluation import SilentProgress
from assay.jobs.recording import opened_store
from assay.programs import load_program
from assay.programs.adapters import text_of_value, value_in
from assay.rubrics import Criterion, Rubric, checks
from assay.testing import scripted_lm
from assay.traces import Store

PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGNgYGAAAAAEAAH2FzhVAAAAAElFTkSuQmCC")
URI = "data:image/png;base64," + base64.b64encode(PNG).decode()
PROGRAM = '''
import dataclasses, datetime, enum
from decimal import Decimal
import dspy, pydantic

class Kind(enum.Enum):
    FIRM = "firm"
    PERSON = "person"

class Money(pydantic.BaseModel):
    amount: Decimal
    currency: str = "EUR"
    note: str | None = None

@dataclasses.dataclass
class Place:
    city: str

class Sig(dspy.Signature):
    """Read an invoice."""
    picture: dspy.Image = dspy.InputField()
    day: datetime.date = dspy.InputField()
    history: dspy.History = dspy.InputField()
    kind: Kind = dspy.OutputField()
    lines: list[Money] = dspy.OutputField()
    due: datetime.date = dspy.OutputField()
    tags: set[str] = dspy.OutputField()

class Reader(dspy.Module):
    def __init__(self):
        super().__init__()
        self.read = dspy.Predict(Sig)

    def forward(self, picture, day, history, sender=None, *, extra: int = 0):
        assert isinstance(picture, dspy.Image) and isinstance(history, dspy.History)
        return dspy.Prediction(
            kind=Kind.FIRM, lines=[Money(amount=Decimal("12.50"))], due=day + datetime.timedelta(days=1 + extra),
            tags={"b", "a"}, place=Place("Bonn"), sender=sender,
        )
'''
EXPECTED = {"kind": "FIRM", "lines": [{"amount": "12.50"}], "tags": ["b", "a"]}


@pytest.fixture
def rows(own_folder: Path) -> Path:
    (own_folder / "reader.py").write_text(PROGRAM)
    (own_folder / "set").mkdir()
    (own_folder / "set" / "a.png").write_bytes(PNG)
    lines = [
        {
            "id": f"row{at}", "picture": "a.png", "day": f"2024-02-{at + 10}", "sender": f"sender {at}",
            "history": [{"question": "who?", "answer": str(at)}], **EXPECTED, "due": f"2024-02-{at + 11}",
            "split": ("train", "val", "gate", "test")[at % 4], "tenant": "t",
        }
        for at in range(8)
    ]  # fmt: skip
    (own_folder / "set" / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return own_folder / "set" / "rows.jsonl"


class Said(SilentProgress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def right() -> Rubric:
    return Rubric("right", [Criterion(name="all", check=checks.fields_match)])


def test_typed_answers_are_right_stored_as_json_and_right_when_scored_again(rows: Path) -> None:
    said = Said()
    report = assay.evaluate(
        "reader.py:Reader", rubric=right(), data=str(rows), lm=scripted_lm(str), progress=said
    ).to_dict()["result"]
    assert (report["score"], report["n"], report["unscored"]) == (1.0, 2, 0)
    with Store() as store:
        stored = [store.rollout(row.id) for row in store.rollouts() if row.phase == "evaluate"]
        before = {row.id: row.score for row in stored}
        assert stored[0].prediction == {
            "kind": "firm", "lines": [{"amount": 12.5, "currency": "EUR", "note": None}], "tags": ["a", "b"],
            "due": stored[0].expected["due"], "place": {"city": "Bonn"}, "sender": stored[0].inputs["sender"],
        }  # fmt: skip
        assert stored[0].inputs["picture"] == {"url": URI}
        assert stored[0].inputs["history"]["messages"][0]["question"] == "who?"
        score_rollouts(rubric=right(), store=store.url, again=True)
        store.flush()
    with Store() as store:
        assert {row.id: row.score for row in store.rollouts() if row.id in before} == before
    shown = CliRunner().invoke(group, ["traces", "show", stored[0].id]).stdout.splitlines()
    (inputs,) = (line.partition("): ")[2] for line in shown if line.startswith("task "))
    (answer,) = (line.partition(": ")[2] for line in shown if line.startswith("prediction: "))
    assert (json.loads(inputs), json.loads(answer)) == (stored[0].inputs, stored[0].prediction)
    first = next(line for line in said.lines if "sender" in line)
    assert said.lines.index(first) < 3
    assert all(name in first for name in ("picture", "day", "history", "kind", "lines", "due", "tags"))
    assert any("tenant" in line for line in said.lines)


def test_a_row_that_cannot_be_converted_ends_the_job_before_anything_is_run(rows: Path) -> None:
    text = rows.read_text().replace("2024-02-13", "13 February")
    rows.write_text(text)
    lm = scripted_lm(str)
    with pytest.raises(DataError, match=r"rows\.jsonl:4.*day"):
        assay.evaluate("reader.py:Reader", rubric=right(), data=str(rows), lm=lm)
    assert lm.scripted.calls == 0


def artifact(folder: Path) -> Path:
    manifest = {
        "program": f"{folder}/reader.py:Reader",
        "model": "openai/none",
        "settings": {"adapter": None, "parameters": {}},
    }
    return save_artifact(folder / "made", load_program(manifest["program"]), manifest, splits={}, report="")


def test_a_request_is_converted_and_opens_no_local_file(rows: Path, own_folder: Path) -> None:
    loaded = LoadedVersion(artifact(own_folder))
    inputs = {"day": "2024-02-28", "history": {"messages": []}}
    store = str(own_folder / "s.db")
    prediction = loaded.run(Task(id="a", inputs={**inputs, "picture": URI}), rubric=None, store=store)
    assert str(prediction.due) == "2024-02-29"
    with pytest.raises(DataError):
        loaded.run(Task(id="a", inputs={**inputs, "picture": str(own_folder / "set/a.png")}), rubric=None, store=store)
    opened_store(store)[0].flush()
    with Store(store) as opened:
        (stored,) = opened.rollouts()
        whole = opened.rollout(stored.id)
        assert (whole.prediction or {})["kind"] == "firm"
        again = loaded.run(Task(id="a", inputs=whole.inputs), rubric=None, store=store)
    assert again.due == prediction.due


class Color(enum.Enum):
    RED = "red"
    BLUE = 2


class Point(pydantic.BaseModel):
    x: int
    name: str | None = None


_KINDS: tuple[Any, ...] = (
    *(str, int, float, bool, list[str], list[int], dict[str, int], Any, Color, Point, list[Point], tuple[int, str]),
    *(Literal["a", "b"], Literal[1, 2], str | None, int | None, int | str, datetime.date, dspy.Image, dspy.Code),
)
_TEXTS: tuple[Any, ...] = (
    *("", "a", "'a'", '"b"', "Literal[a]", "str['b']", "1", " 2 ", "1.5", "True", "true", "null", "[1, 2", "['a','b']"),
    *("{'a': 1}", '{"x": "1", "name": null}', '[{"x":1}]', "red", "RED", "BLUE", "2026-01-01", "http://x/y.png"),
    *("```python\nx=1\n```", "(1,'b')", "garbage {", "-3", 5, None, True, 1.5, ["a"], {"x": 1}),
)


@pytest.mark.parametrize("kind", _KINDS, ids=str)
def test_a_text_is_read_as_dspy_reads_it(kind: Any) -> None:
    signature = dspy.Signature({"given": (str, dspy.InputField()), "value": (kind, dspy.OutputField())}, "Do.")
    for text in _TEXTS:
        try:
            expected = dspy.JSONAdapter().parse(signature, json.dumps({"value": text}))["value"]
        except (AdapterParseError, TypeError, ValueError):
            with pytest.raises(ValueError):  # noqa: PT011
                value_in(text, kind)
            continue
        assert repr(value_in(text, kind)) == repr(expected)


@pytest.mark.parametrize("kind", [str, list[str], Any], ids=str)
@pytest.mark.parametrize(
    "value",
    [
        *("a", "x\ny", [], ["a"], ["a", "b\nc"], ["«q»", "z"], {"é": [1]}, None, 1, True, (1, 2)),
        *(Point(x=1), [Point(x=1)], Color.RED, datetime.date(2026, 1, 1), dspy.Code(code="x")),
    ],
    ids=str,
)
def test_a_value_is_written_as_dspy_writes_it(kind: Any, value: Any) -> None:
    signature = dspy.Signature({"value": (kind, dspy.InputField()), "answer": (str, dspy.OutputField())}, "Do.")
    content = dspy.ChatAdapter().format_user_message_content(signature, {"value": value})
    assert content.partition("]]\n")[2] == text_of_value(value, kind)
