"""`json_value`: what each kind of value is in JSON, and which values are refused."""

import collections
import dataclasses
import enum
import fractions
import ipaddress
import json
import math
import pathlib
import uuid
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import attr
import dspy
import numpy as np
import pandas as pd
import pyarrow as pa
import pydantic
import pytest
from hypothesis import given, strategies as st

from assay.errors import NoJsonForm
from assay.support.values import json_value

PIXEL = "data:image/png;base64,iVBORw0KGgo="


class Kind(enum.Enum):
    FIRM = "firm"
    NUMBER = 2


class Level(enum.IntEnum):
    HIGH = 3


class Entity(pydantic.BaseModel):
    kind: Kind
    value: str
    tags: set[str] = set()
    amount: Decimal | None = None
    raw: bytes | None = None


class Page(pydantic.BaseModel):
    picture: dspy.Image = pydantic.Field(alias="image")
    taken: date


class Stamped(pydantic.BaseModel):
    at: datetime

    @pydantic.field_serializer("at", when_used="json")
    def year(self, at: datetime) -> int:
        return at.year


@dataclasses.dataclass
class Node:
    name: str
    next: Any = None


@attr.s(auto_attribs=True)
class Point:
    x: int


Pair = collections.namedtuple("Pair", "left right")
ENTITY = Entity(kind=Kind.FIRM, value="Acme", tags={"b", "a"}, amount=Decimal("12.50"), raw=b"\xff")
BYTES = "data:application/octet-stream;base64,/w=="

FORMS = [
    (Kind.FIRM, "firm"),
    (Level.HIGH, 3),
    ({Kind.FIRM: Kind.NUMBER}, {"firm": 2}),
    (ENTITY, {"kind": "firm", "value": "Acme", "tags": ["a", "b"], "amount": 12.5, "raw": BYTES}),
    (Stamped(at=datetime(2024, 1, 2)), {"at": 2024}),
    (pydantic.RootModel[list[Kind]]([Kind.FIRM]), ["firm"]),
    (Node("a", Node("b")), {"name": "a", "next": {"name": "b", "next": None}}),
    (Point(1), {"x": 1}),
    (Pair(1, (2, 3)), [1, [2, 3]]),
    (date(2024, 2, 29), "2024-02-29"),
    (datetime(2024, 2, 29, 1, 2, tzinfo=UTC), "2024-02-29T01:02:00+00:00"),
    (time(1, 2), "01:02:00"),
    (timedelta(days=1, hours=2), "P1DT2H"),
    (Decimal("3.0"), 3),
    (Decimal("0.1"), 0.1),
    (Decimal("0.1000000000000000000001"), "0.1000000000000000000001"),
    (Decimal("1E+99999999"), "1E+99999999"),
    (Decimal("NaN"), None),
    (fractions.Fraction(1, 4), 0.25),
    (fractions.Fraction(1, 3), "1/3"),
    (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
    (pathlib.PurePosixPath("a/b"), "a/b"),
    (ipaddress.ip_address("10.0.0.1"), "10.0.0.1"),
    (b"\xff", BYTES),
    ({3, 20, 1}, [1, 3, 20]),
    (frozenset({"b", 1}), ["b", 1]),
    (collections.deque([1]), [1]),
    (range(2), [0, 1]),
    (collections.OrderedDict(a=1), {"a": 1}),
    ({1: "a", None: "b", 2.5: "c", False: "d"}, {"1": "a", "null": "b", "2.5": "c", "false": "d"}),
    ([math.nan, math.inf, -math.inf], [None, None, None]),
    ("a\ud800", "a\ufffd"),
    ("\ud83d\ude00", "\U0001f600"),
    (10**5000, hex(10**5000)),
    (ValueError("no"), "ValueError: no"),
    (np.int64(3), 3),
    (np.float32(0.5), 0.5),
    (np.bool_(True), True),
    (np.array([[1, 2]]), [[1, 2]]),
    (np.datetime64("2024-01-02"), "2024-01-02"),
    (np.array(["2024-01-02", "NaT"], dtype="M8[ns]"), ["2024-01-02T00:00:00", None]),
    ([pd.NA, pd.NaT], [None, None]),
    (pd.Timestamp("2024-01-02"), "2024-01-02T00:00:00"),
    (pd.Series([1, 2]), [1, 2]),
    (pd.DataFrame({"a": [1, 2]}), [{"a": 1}, {"a": 2}]),
    (pa.scalar(Decimal("1.5")), 1.5),
    (dspy.Image(PIXEL), {"url": PIXEL}),
    (dspy.Audio(data="QQ==", audio_format="wav"), {"data": "QQ==", "audio_format": "wav"}),
    (Page(image=dspy.Image(PIXEL), taken=date(2024, 1, 2)), {"image": {"url": PIXEL}, "taken": "2024-01-02"}),
    (
        dspy.History(messages=[{"question": "a", "picture": dspy.Image(PIXEL)}]),
        {"messages": [{"question": "a", "picture": {"url": PIXEL}}]},
    ),
    (dspy.Code(code="x = 1"), "x = 1"),
    (dspy.Reasoning(content="why"), "why"),
    (dspy.Prediction(kind=Kind.FIRM), {"kind": "firm"}),
    (dspy.Example(question="a").with_inputs("question"), {"question": "a"}),
]


@pytest.mark.parametrize(("value", "form"), FORMS, ids=range(len(FORMS)))
def test_each_kind_of_value_has_its_json_form(value: Any, form: Any) -> None:
    found = json_value({"field": [value]})["field"][0]
    assert found == form
    assert type(found) is type(form)
    json.dumps(found, allow_nan=False).encode()


class Silent:
    def __str__(self) -> str:
        raise AssertionError("a value is never written as its text")

    __repr__ = __str__


class Raising(pydantic.BaseModel):
    a: int = 1

    @pydantic.model_serializer()
    def dump(self) -> None:
        raise SystemExit(3)


@pytest.mark.parametrize(
    "value", [Silent(), Silent, len, iter("ab"), Raising(), {(1, 2): 3}, {1: 2, "1": 3}], ids=lambda v: type(v).__name__
)
def test_a_value_without_a_json_form_is_refused_with_its_path(value: Any) -> None:
    with pytest.raises(NoJsonForm) as caught:
        json_value({"answer": {"steps": [0, value]}})
    assert caught.value.path.startswith("answer.steps[1]")
    json.dumps(json_value({"answer": [value]}, placeholders=True))


def test_values_that_contain_themselves_or_are_nested_too_deep_are_refused() -> None:
    node = Node("a")
    node.next = [node]
    cycle: dict[str, Any] = {}
    cycle["again"] = cycle
    deep: list[Any] = []
    for _ in range(5_000):
        deep = [deep]
    for value in (node, cycle, deep):
        with pytest.raises(NoJsonForm):
            json_value(value)
        json.dumps(json_value(value, placeholders=True))
    shared = [1]
    assert json_value([shared, shared]) == [[1], [1]]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(JSON)
def test_json_stays_as_it_is_and_is_copied(value: Any) -> None:
    written = json_value(value)
    assert json.dumps(written) == json.dumps(value)
    if isinstance(value, dict | list):
        assert written is not value


@given(st.decimals(allow_nan=False, allow_infinity=False))
def test_a_decimal_keeps_its_exact_value(value: Decimal) -> None:
    assert Decimal(str(json_value(value))) == value
