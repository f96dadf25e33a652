"""Checks compare values: an answer of a program's own types is right where its JSON value is."""

import enum
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from decimal import Decimal
from fractions import Fraction
from typing import Any

import dspy
import pydantic
import pytest

from assay.datasets import Task
from assay.rubrics import Criterion, Rubric, checks
from assay.rubrics.checks import same


class Kind(enum.Enum):
    FIRM = "firm"
    PERSON = "person"


class Entity(pydantic.BaseModel):
    kind: Kind
    value: str
    note: str | None = None


@dataclass
class Line:
    amount: Decimal


EQUAL = [
    (3, 3.0),
    (Decimal("3"), 3),
    (Decimal("3.0"), "3"),
    ("3.0", 3),
    (0.1, Decimal("0.1")),
    (Decimal("0.1000000000000000000001"), "0.1000000000000000000001"),
    (Fraction(1, 4), 0.25),
    (True, "True"),
    (False, "false"),
    (Kind.FIRM, "firm"),
    (Kind.FIRM, " FIRM "),
    (date(2024, 2, 29), "2024-02-29"),
    (datetime(2024, 2, 29, tzinfo=UTC), "2024-02-29T00:00:00+00:00"),
    (datetime(2024, 2, 29, 12, 30, tzinfo=UTC), "2024-02-29T12:30:00Z"),
    (datetime(2024, 2, 29, 12, 30), "2024-02-29 12:30"),
    ("2024-02-29T12:30:00.000Z", "2024-02-29 13:30:00+01:00"),
    (datetime(2024, 2, 29, 12, 30, tzinfo=UTC), "2024-02-29T13:30:00+01:00"),
    ("20240229T123000Z", "2024-02-29T12:30Z"),
    (time(12, 30, tzinfo=UTC), "13:30+01:00"),
    (time(12, 30), "12:30"),
    (Entity(kind=Kind.FIRM, value="Acme"), {"value": "acme", "kind": "firm"}),
    ([Entity(kind=Kind.FIRM, value="Acme")], [{"kind": "firm", "value": "Acme", "note": None}]),
    ([Entity(kind=Kind.FIRM, value="Acme")], '[{"kind": "firm", "value": "Acme"}]'),
    (Line(Decimal("12.50")), {"amount": 12.5}),
    ((1, "a"), [1, "a"]),
    ({"b", "a"}, ["a", "b"]),
    ({1: "x"}, {"1": "x"}),
    (dspy.Code(code="x = 1"), "x = 1"),
    (10**400, 10**400),
    ("New  York", "new york"),
]
DIFFERENT = [
    (True, 1),
    (0, False),
    (3, "3a"),
    (3, "٣"),
    (3, "1_0"),
    (15, "1,5"),
    ("3", "3.0"),
    ([1, 2], [2, 1]),
    ([1], [1, 1]),
    ({"a": 1}, {"a": 1, "b": 2}),
    ({"a": 1}, [1]),
    (Kind.FIRM, "person"),
    (None, ""),
    (None, 0),
    (0.1, 0.1000001),
    (datetime(2024, 2, 29, 12, 30), "2024-02-29T12:30:00Z"),
    ("2024-02-29T12:30", "2024-02-29T12:31"),
    ("2024-02-30T12:30:00Z", "2024-02-30 12:30:00Z"),
    (object(), "object"),
]


@pytest.mark.parametrize(("found", "expected"), EQUAL, ids=range(len(EQUAL)))
def test_equal_values_are_the_same_in_both_directions(found: Any, expected: Any) -> None:
    assert same(found, expected)
    assert same(expected, found)
    assert same({"a": [found]}, {"a": [expected]})


@pytest.mark.parametrize(("found", "expected"), DIFFERENT, ids=range(len(DIFFERENT)))
def test_different_values_are_not_the_same(found: Any, expected: Any) -> None:
    assert not same(found, expected)
    assert not same(expected, found)


def test_case_counts_only_where_it_is_asked_for() -> None:
    assert not same({"a": ["Acme"]}, {"a": ["acme"]}, case=True)
    assert same(True, "True", case=True)


ANSWER = dspy.Prediction(
    kind=Kind.FIRM,
    entities=[Entity(kind=Kind.FIRM, value="Acme")],
    due=date(2024, 2, 29),
    amount=Decimal("12.50"),
    days=3,
)
EXPECTED = {
    "kind": "firm",
    "entities": [{"value": "Acme", "kind": "firm"}],
    "due": "2024-02-29",
    "amount": 12.5,
    "days": "3",
}
ENTITIES = {
    "type": "array",
    "items": {"type": "object", "properties": {"kind": {"enum": ["firm", "person"]}, "value": {"type": "string"}}},
}
RIGHT = [
    (checks.fields_match, {}),
    *((checks.exact, {"field": name}) for name in EXPECTED),
    (checks.one_of, {"field": "kind", "values": ["person", "firm"]}),
    (checks.one_of, {"field": "days", "values": [1, 3]}),
    (checks.contains, {"field": "entities", "text": "Acme"}),
    (checks.regex, {"field": "due", "pattern": r"\d{4}-\d\d-\d\d"}),
    (checks.numeric, {"field": "amount"}),
    (checks.json_schema, {"field": "entities", "schema": ENTITIES}),
    (checks.json_schema, {"field": "kind", "schema": {"enum": ["firm", "person"]}}),
    (checks.json_schema, {"field": "amount", "schema": {"type": "number"}}),
    (checks.json_schema, {"schema": {"type": "object", "required": ["kind", "due"]}}),
]


@pytest.mark.parametrize(("check", "arguments"), RIGHT, ids=lambda part: getattr(part, "__name__", ""))
def test_shipped_checks_give_one_for_right_typed_answers(check: Any, arguments: dict[str, Any]) -> None:
    task = Task(id="a", inputs={"text": "x"}, expected=EXPECTED)
    rubric = Rubric("r", [Criterion(name="right", check=check, arguments=arguments)])
    assert rubric.score(task, ANSWER).value == 1.0
    wrong = Task(id="a", inputs={"text": "x"}, expected=dict.fromkeys(EXPECTED, "other"))
    if check in (checks.exact, checks.fields_match):
        assert rubric.score(wrong, ANSWER).value == 0.0


def test_a_users_own_check_gets_the_programs_objects() -> None:
    def is_firm(task: Task, prediction: dict[str, Any], rollout: Any) -> float:
        return float(prediction["entities"][0].kind is Kind.FIRM)

    rubric = Rubric("r", [Criterion(name="firm", check=is_firm)])
    assert rubric.score({"inputs": {"text": "x"}}, ANSWER).value == 1.0


def test_a_metric_of_dspy_scores_examples_and_predictions_with_typed_fields() -> None:
    metric = Rubric("r", [Criterion(name="right", check=checks.fields_match)]).metric()
    example = dspy.Example(picture=dspy.Image("https://a.example/b.png"), kind=Kind.FIRM).with_inputs("picture")
    assert metric(example, dspy.Prediction(kind="firm")) == 1.0
    assert metric(example, dspy.Prediction(kind=Kind.PERSON)) == 0.0
