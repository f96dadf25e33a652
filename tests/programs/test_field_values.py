"""Values of fields as text and back, as DSPy's adapters write and read them."""

import datetime
import enum
import json
from typing import Any, Literal

import dspy
import pydantic
import pytest
from dspy.utils.exceptions import AdapterParseError

from assay.programs.adapters import text_of_value, value_in


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
