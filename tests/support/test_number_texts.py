"""Which number a text states: spellings of numbers, and what is not a number."""

from datetime import date
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, strategies as st

from assay.datasets import make_task
from assay.evaluation.metrics import TaskRun, measure
from assay.rubrics import checks
from assay.rubrics.documents import answer_correct
from assay.support.numbers import parse_number, whole_number
from assay.support.sections import without_thoughts


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,5", 1.5), ("12,34", 12.34), ("0,125", 0.125), ("1234,567", 1234.567), ("1,234", 1234), ("1.234", 1.234),
        ("1,234,567.5", 1234567.5), ("1.234,5", 1234.5), ("1.234.567", 1234567), ("1.234.567,89", 1234567.89),
        ("1,00,000", 100000), ("1 000 000", 10**6), ("1\u00a0234,5", 1234.5), ("1\u2009000\u202f000", 10**6),
        ("1'000", 1000), ("1’000", 1000), ("1_000", 1000), ("10 20 300", 300), ("in 2024 500 people", 500),
        ("3/4", 0.75), ("3 / 4", 0.75),
        ("1 1/2", 1.5), ("1 1 / 2", 1.5), ("½", 0.5), ("2½", 2.5), (r"\frac{3}{4}", 0.75), (r"-\dfrac{7}{2}", -3.5),
        (r"3\frac12", 3.5), (r"\(\boxed{\tfrac{1}{4}}\) and not 7", 0.25), (r"5\text{ km}", 5), (r"50\%", 50),
        ("1{,}234", 1234), (r"1\,234", 1234), (r"30^\circ", 30), (r"5 \times 10^{3}", 5000), ("5 x 10^3", 5000),
        ("1e-3", 0.001), ("1.5E+03", 1500), ("10^6", 10**6), ("10**6", 10**6), ("10⁶", 10**6), ("10⁻³", 0.001),
        ("−5", -5), ("–5", -5), ("+5", 5), ("x = -5", -5), ("-$1,234.50", -1234.5), ("$-5", -5), ("USD500", 500),
        ("1.234,50 €", 1234.5), ("50 %", 50), ("3 million", 3_000_000), ("$2.5 billion", 2_500_000_000), ("5km", 5),
        ("12th", 12), ("No.5", 5), (".5", 0.5), ("5.", 5), ("1.5.", 1.5), ("(5)", 5), ("**42**", 42), ("20 m²", 20),
        ("٤٢", 42), ("४२", 42), ("１２３", 123), ("١٬٢٣٤٫٥", 1234.5), ("答案是42。", 42), ("Answer:5", 5),
        ("minus 4", -4), ("Negative 4.", -4), ("– 4", -4), ("− 4", -4), ("x = - 4", -4), ("it is – 4 °C", -4),
        (r"\boxed{- 4}", -4), ("− $4", -4), ("minus 1 1/2", -1.5), ("1.5k", 1500), ("2M", 2_000_000), ("-4k", -4000),
        ("3 Mio.", 3_000_000), ("$5M", 5_000_000), ("$5 M", 5_000_000), ("5m €", 5_000_000), ("5m", 5), ("5mm", 5),
        ("7B", 7 * 10**9), ("$2.5bn", 2.5e9), ("3 hundred million", 3e8), ("2 dozen", 24), ("3 Milliarden", 3e9),
        ("3万人", 30_000), ("4 and a half million", 4_500_000), ("Rest:\n- 4", 4), ("Answer — 4", 4),
        ("Step 1: 42", 42), ("10 - 5 = 5", 5), ("In 2024, 500 people", 500), ("non-negative 4", 4),
        ("3 + 4 = 7", 7), ("f(3)=9", 9), ("#### 1,200", 1200), ("42 on 2024-02-29 at 12:30", 42),
    ],
)  # fmt: skip
def test_a_number_is_read_in_the_spellings_that_people_use(text: str, number: float) -> None:
    assert parse_number(text) == pytest.approx(number, rel=1e-12)


@pytest.mark.parametrize(
    "text",
    [
        "2024-02-29", "2024/02/29", "2024 / 02 / 29", "1 000/4",
        "29.02.2024", "2024年2月29日", "2024-02-29T12:30:00Z", "12:30", "1.2.3", "v1.2",
        "192.168.0.1", "555-123-4567", "5–7", "5-7", "$5-$7", "10-5", "3+4", "1,2,3", "12,345,67", "1/0", "GPT-4",
        "10 - 5", "10 − 5", "10 -5", "10 minus 5", "3 x 4", "50 % of 80", "5 – 7", "5 to 7", "4 or 5", "$5M - $7M",
        "2024 - 02 - 29", "1-1/2", "1, 2, 3", "1, 2", "(1, 2)", "1 and 2", "1, 2 and 3", "4 out of 5",
        "5k-7k", "4 of 5", "5 ± 2", "±5", "7 apples – 4", "minus -4", "5 M", "7 and 300 K", "3 hundredths",
        "2 million 300 thousand", "1万5千",
        "H2O", "0x1F", "x²", "x^2", r"2\pi", "2π", r"\sqrt{2}", "√2", r"\frac{\sqrt{3}}{2}", r"\frac{1}{2}\pi",
        r"\log_2 8", "9^9^9", "10^99999", "five", "", r"\boxed{\text{none}} of 5", [1, 2, 3], {"a": 1}, True, None,
        date(2024, 2, 29), float("nan"), float("inf"),
    ],
)  # fmt: skip
def test_what_is_not_one_number_is_not_read(text: Any) -> None:
    assert parse_number(text) is None


@pytest.mark.parametrize("value", [3, 3.0, Decimal("3.00"), Fraction(3), "3", "3.0"])
def test_numbers_of_any_type_are_read(value: Any) -> None:
    assert parse_number(value) == 3


@given(st.integers(), st.sampled_from(["{:,}", "{:_}", "{}", "It is {:,}.", "{:,} of them", "x={}"]))
def test_integers_are_exact_in_any_spelling(number: int, spelling: str) -> None:
    assert parse_number(spelling.format(number)) == number


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("<think>It is 5", ""), ("<think>7</think>5", "5"), ("7</think>5", "5"), ("<Thinking>\n5", ""),
        ("5 <think>or is it 7", "5"), ("[THINK]7[/THINK]5", "5"), ("[THINK]5", ""), ("◁think▷5", ""),
        ("◁think▷7◁/think▷5", "5"), ("<|channel|>analysis<|message|>5", ""), ("<seed:think>5", ""),
        ("<|channel|>analysis<|message|>7<|end|><|start|>assistant<|channel|>final<|message|>5", "5"),
        ("<think>7<think>8</think>9</think>5", "5"), ("<|START_THINKING|>5", ""), ("<reasoning>5", ""),
        ("The mark `<think>` opens 5", "The mark `<think>` opens 5"), ("a < b", "a < b"),
    ],
)  # fmt: skip
def test_thoughts_are_no_part_of_an_answer(text: str, rest: str) -> None:
    assert without_thoughts(text) == rest


def test_an_answer_inside_an_unclosed_thought_has_the_grade_0_in_every_check() -> None:
    task = make_task({"question": "?", "answer": "5"})
    for check, arguments in (
        (checks.numeric, {}), (checks.exact, {}), (checks.contains, {}), (checks.fields_match, {}),
        (checks.one_of, {"values": ["<think>5"], "field": "answer"}), (checks.regex, {"pattern": ".*5"}),
        (checks.json_schema, {"schema": {"type": "integer"}, "field": "answer"}),
    ):  # fmt: skip
        assert check(task, {"answer": "<think>5"}, None, **arguments).value == 0, check
        if check is not checks.one_of:
            assert check(task, {"answer": "<think>It is 7.</think>\n5"}, None, **arguments).value == 1, check


@pytest.mark.parametrize(
    ("expected", "answer", "grade"),
    [
        ("15", "1,5", 0), ("1.5", "1,5", 1), ("0", "1 000 000", 0), ("1000000", "1 000 000", 1),
        ("4", r"\frac{3}{4}", 0), ("0.75", r"\frac{3}{4}", 1), ("-29", "2024-02-29", 0), ("2", r"2\pi", 0),
        ("-4", "GPT-4", 0), ("4", "minus 4", 0), ("-4", "minus 4", 1), ("4", "– 4", 0), ("2", "2M", 0),
        ("1500", "1.5k", 1), ("5", "4 out of 5", 0), ("5", "10 - 5", 0), ("3", "1, 2, 3", 0), ("3", [1, 2, 3], 0),
    ],
)  # fmt: skip
def test_the_numeric_check_compares_values(expected: str, answer: Any, grade: int) -> None:
    task = make_task({"question": "?", "answer": expected})
    assert checks.numeric(task, {"answer": answer}, None).value == grade


@pytest.mark.parametrize(
    ("expected", "answer", "grade"),
    [
        ("15", "1,5", 0), ("1.5", "1,5 metres", 1), ("1000000", "1 000 000 people", 1), ("-5", "5", 0),
        ("-5", "−5 degrees", 1), (0, 0, 1), ("15", "<think>15", 0),
    ],
)  # fmt: skip
def test_an_answer_from_documents_compares_numbers_by_value(expected: Any, answer: Any, grade: int) -> None:
    task = make_task({"inputs": {"question": "?"}, "expected": {"answer": expected, "passages": ["p"]}})
    assert answer_correct(task, {"answer": answer}, None).value == grade


@pytest.mark.parametrize(("text", "number"), [("$1,5", 1.5), ("5 %", 5), ("5.", 5), ("5 apples", None), ("a 5", None)])
def test_a_whole_number_has_nothing_beside_it(text: str, number: float | None) -> None:
    assert whole_number(text) == number


@pytest.mark.parametrize(
    ("reasoning", "answer", "follows"),
    [
        ("So it costs 1 000 000.", "1,000,000", 1.0),
        ("So x is 1,5", "1.5", 1.0),
        ("on 2024-02-29 we got 29", "-29", 0.0),
    ],
)
def test_an_answer_follows_from_a_number_in_another_spelling(reasoning: str, answer: str, follows: float) -> None:
    runs = [TaskRun(task_id="a", score=None, answer=answer, reasoning=reasoning)]
    assert measure(runs).coherence == follows
