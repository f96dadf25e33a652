"""The calculator, prompt formats, and programs built from data."""

from math import isfinite
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from assay.errors import ConfigError, ProgramError
from assay.programs import Classify, Extract, MathQA
from assay.programs.calculator import CalculatorError, calculator


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(3/5)^(-2)", "2.777777778"),
        ("sqrt(7)", "2.645751311"),
        ("12/(3*4)", "1"),
        ("0.1+0.2", "0.3"),
        ("2**10", "1024"),
        ("5 - (-3) = 9", "8"),
        ("1/3*3", "1"),
        ("1000000000000/7", "142857142857.143"),
    ],
)
def test_the_calculator_evaluates_expressions(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "hostile",
    [
        "9**9**9**9",
        "1/0",
        "__import__('os').system('ls')",
        "(1).__class__",
        "a",
        "",
        "1" * 300,
        "((((1" * 20,
        "sqrt(-1)",
        "[1]*9",
        "'a'*9",
        "1<2",
        "True+1",
        "1e999",
        "lambda: 1",
    ],
)
@pytest.mark.timeout(60)
def test_the_calculator_refuses_invalid_and_expensive_expressions(hostile: str) -> None:
    with pytest.raises(CalculatorError):
        calculator(hostile)


@settings(max_examples=200)
@given(st.text(alphabet="0123456789+-*/^(). sqrt=e", max_size=60))
def test_the_calculator_answers_or_refuses_any_text(text: str) -> None:
    try:
        assert isfinite(float(calculator(text)))
    except CalculatorError:
        pass


@pytest.mark.parametrize(("name", "hint"), [("jsn", "json"), ("Lean", "lean"), (None, ""), (["json"], "")])
def test_an_unknown_prompt_format_is_refused_by_the_name_of_the_argument(name: Any, hint: str) -> None:
    with pytest.raises(ConfigError, match=r"^prompt_format=.* must be one of json, lean, xml, chat") as refused:
        MathQA(prompt_format=name)
    assert str(refused.value).endswith(f"Did you mean {hint!r}?" if hint else "chat")


def test_classify_and_extract_infer_their_fields_from_the_data() -> None:
    from assay.datasets import make_task

    labels = [make_task({"text": str(i), "label": name}) for i, name in enumerate(["red", "blue", "red"])]
    assert Classify.from_tasks(labels).config == {"labels": ["blue", "red"]}
    with pytest.raises(ProgramError, match="at least two labels"):
        Classify.from_tasks(labels[:1])
    fields = [make_task({"inputs": {"text": "x"}, "expected": {"year": 2001, "name": "a"}})]
    assert Extract.from_tasks(fields).config == {"fields": {"name": "string", "year": "integer"}}
