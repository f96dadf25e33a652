"""YAML rubrics with errors by line, and the shipped checks."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from assay.datasets import make_task
from assay.errors import RubricError
from assay.rubrics import NoGrade, checks, load_rubric

TASK = make_task({"question": "?", "answer": "1,234.5"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "name: a\ncriteria:\n- {name: x, check: numerik}\n",
            r"r\.yaml:3: criterion 'x': unknown check 'numerik'.*Did you mean 'numeric'",
        ),
        (
            "name: a\ncriteria:\n- {name: x, check: 'nowhere:f'}\n",
            r"r\.yaml:3: criterion 'x': check 'nowhere:f' cannot be imported",
        ),
        (
            "name: a\ncriteria:\n- {name: x, check: numeric, with: {tolerence: 1}}\n",
            r"no argument 'tolerence'.*mean 'tolerance'",
        ),
        ("name: a\ncriteria:\n- {name: x, check: exact, arguments: {}}\n", r"key 'arguments'.*Did you mean 'with'"),
        (
            "name: a\ncriteria:\n- {name: x, check: 'f.py:gone'}\n",
            r"'f\.py:gone' does not exist: f\.py has no 'gone'; it has g$",
        ),
        ("name: a\ncriteria:\n- {name: x, check: 'f.py:gg'}\n", r"has no 'gg'\. Did you mean 'f\.py:g'\?"),
        ("name: a\ncriteria:\n- {name: x, check: 'ff.py:g'}\n", r"no such file: .*ff\.py\. Did you mean 'f\.py:g'\?"),
        ("name: a\ncriteria:\n- {name: x, check: 'lost.py:g'}\n", r"cannot import name 'h' from 'f'"),
        (
            "name: a\ncriteria:\n- {name: x, check: 'assay.rubrics.cheks:exact'}\n",
            r"Did you mean 'assay\.rubrics\.checks:exact', or just 'exact'\?",
        ),
        (
            "name: a\ncriteria:\n- {name: x, check: 'two.py:g'}\n",
            r"is called as check\(task, prediction, rollout\), and has the parameters \(\)",
        ),
        ("name: a\ncriteria:\n- {name: x, check: thinking}\n", r"needs the argument 'budget'; set with: \{budget: …\}"),
        (
            "name: a\ncriteria:\n- {name: x, judge: 3}\n",
            r"criterion 'x': judge must be a string or a mapping, found 3$",
        ),
        ("name: a\ncriteria:\n- {check: exact}\n", r"r\.yaml:3: criterion 1: the key 'name' is missing$"),
        ("name: a\ncriteria:\n- {name: x, check: regex, with: {pattern: '('}}\n", r"r\.yaml:3: .*regex.*missing \)"),
        (
            "name: a\ncriteria:\n- {name: x, check: json_schema, with: {schema: {type: thing}}}\n",
            r"r\.yaml:3: .*'thing'",
        ),
        ("name: a\ncriteria:\n- name: x\n  check: numeric\n  name: y\n", r"r\.yaml:5: duplicate key 'name'"),
        ("name: a\ncriteria:\n- name: x\n  check: numeric\n  essential: {cap: 3}\n", r"r\.yaml:5: .*cap"),
        ("name: a\ncriteria: []\n", r"r\.yaml:2: criteria"),
        ("- 1\n", "a rubric is a mapping"),
        ("name: [a\n", "invalid YAML"),
        ("", "a rubric is a mapping"),
    ],
)
def test_errors_name_file_line_and_what_is_valid(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "r.yaml").write_text(text)
    (tmp_path / "f.py").write_text("def g(task, prediction, rollout): return 1\n")
    (tmp_path / "two.py").write_text("def g(): return 1\n")
    (tmp_path / "lost.py").write_text("from f import h\n")
    with pytest.raises(RubricError, match=message):
        load_rubric(tmp_path / "r.yaml")


@pytest.mark.parametrize(
    ("result", "grade"),
    [
        ("1234.5", 1),
        ("It is 1,234.5.", 1),
        ("#### 1234.50", 1),
        ("2469/2", 1),
        ("1234.6", 0),
        ("none", 0),
        ("", 0),
        (None, 0),
        (1234.5, 1),
        ("2 + 3 = <<2+3=5>>5\n#### 1234.5", 1),  # GSM8K
    ],
)
def test_numeric_compares_numbers_in_text(result: Any, grade: int) -> None:
    assert checks.numeric(TASK, {"answer": result}, None).value == grade


def test_scale_words_may_be_unquoted_yaml(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("name: a\ncriteria:\n- {name: x, judge: 'ok?', scale: [no, partly, yes]}\n")
    assert load_rubric(path).criteria[0].judge.scale == ("no", "partly", "yes")


@given(st.text())
def test_numeric_never_raises_on_text(text: str) -> None:
    assert checks.numeric(TASK, {"answer": text}, None).value in (0.0, 1.0)


def test_a_check_without_input_gives_no_grade() -> None:
    bare = make_task({"inputs": {"question": "?"}})
    for check in (checks.exact, checks.numeric, checks.fields_match):
        with pytest.raises(NoGrade):
            check(bare, {"answer": "1"}, None)
    with pytest.raises(NoGrade):
        checks.tool_adoption(bare, {"answer": "1"}, None)


def test_exact_contains_and_other_checks_grade_as_documented() -> None:
    task = make_task({"text": "?", "label": "Red"})
    assert checks.exact(task, {"label": " red "}, None).value == 1
    assert checks.exact(task, {"label": "red"}, None, case=True).value == 0
    assert checks.regex(task, {"answer": "ab1"}, None, pattern=r"[a-z]+\d").value == 1
    assert checks.contains(task, {"answer": "blue and green"}, None, text=["green", "red"]).value == 0.5
    assert checks.one_of(task, {"label": "RED"}, None, values=["red", "blue"]).value == 1
    schema = {"type": "object", "required": ["a"]}
    assert checks.json_schema(task, {"answer": '{"a": 1}'}, None, schema=schema, field="answer").value == 1
    assert checks.json_schema(task, {"answer": "{"}, None, schema=schema, field="answer").value == 0
    assert checks.length(task, {"answer": "one two three"}, None, max_tokens=2).value == 0.5
    part = checks.regex(task, {"answer": "about 40"}, None, pattern=r"\d+")
    assert (part.value, part.reason) == (0, r"'about 40' as a whole does not match '\\d+'.")
    assert checks.regex(task, {"answer": " about\n40 "}, None, pattern=r".*\d+.*").value == 1
    two = make_task({"inputs": {"text": "?"}, "expected": {"a": "1", "b": "2"}})
    assert checks.fields_match(two, {"a": "1", "b": "3"}, None).value == 0.5
    assert checks.fields_match(two, {"a": "1", "b": "3"}, None, all_or_nothing=True).value == 0


def test_all_errors_of_a_file_are_reported_together(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(
        "name: b\ncriterion: 3\ncriteria:\n"
        "- {name: right, check: exakt, weigth: 2}\n"
        "- {name: right, check: exact, with: {feld: intent}}\n"
        "- {name: nice, judge: x, scale: ['no'], scope: middle}\n"
        "- {name: dear, judge: x, scale: ['no'], when: nosuch}\n"
        "- {name: a b, check: exact, weight: -1, essential: {cap: 0.5}}\n"
        "- {name: typed, chek: exakt, weight: heavy, judge: {txt: ok, scale: 3}}\n"
    )
    with pytest.raises(RubricError) as caught:
        load_rubric(tmp_path / "r.yaml")
    lines = str(caught.value).splitlines()
    for line, part in (
        (2, "unknown key 'criterion'"), (4, "unknown key 'weigth'"), (4, "Did you mean 'weight'"),
        (4, "unknown check 'exakt'"),
        (5, "already a criterion 'right'"), (5, "'feld'"),
        (6, "'final' or 'step'"), (7, "at least two"), (7, "when='nosuch' names no criterion"),
        (8, "letters, digits and underscores"),
        (8, "a pitfall (weight -1) cannot be essential"),
        (9, "criterion 'typed': unknown key 'chek'"), (9, "criterion 'typed': weight must be a number, found 'heavy'"),
        (9, "unknown check 'exakt'"), (9, "criterion 'typed': judge: unknown key 'txt'"),
        (9, "criterion 'typed': judge: scale must be a list, found 3"),
    ):  # fmt: skip
        assert any(f"r.yaml:{line}: " in result and part in result for result in lines), (line, part, lines)
    numbers = [int(line.split(":")[1]) for line in lines]
    assert numbers == sorted(numbers)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ('weight: "1"', "weight must be a number, found '1'. Write 1, without quotes"),
        ("weight: 1e3", "weight must be a number, found '1e3'. Write 1000, without quotes"),
        ("weight: true", "weight must be a number, found True"),
        ('essential: {cap: "0.5"}', "essential: cap must be a number, found '0.5'. Write 0.5, without quotes"),
        ("scope: finale", "scope must be 'final' or 'step', found 'finale'. Did you mean 'final'?"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_the_right_one(entry: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(f"name: b\ncriteria:\n- {{name: a, check: exact, {entry}}}\n")
    with pytest.raises(RubricError) as caught:
        load_rubric(tmp_path / "r.yaml")
    assert str(caught.value).endswith(f"r.yaml:3: criterion 'a': {message}")
