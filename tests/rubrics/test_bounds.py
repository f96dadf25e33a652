"""Files and answers that would take the memory or the time of a whole job."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from assay.datasets import make_task
from assay.errors import RubricError
from assay.judges.loading import load_judge
from assay.rubricfiles import portable_rubric
from assay.rubrics import Criterion, Rubric, checks, load_rubric
from assay.rubrics.criteria import Grade, NoGrade

TASK = make_task({"inputs": {"question": "?"}, "expected": {"answer": "1"}})
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))
RUBRIC = "name: r\ncriteria:\n- {name: right, check: exact}\n"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (RUBRIC + BOMB, "aliases written out"),
        ("name: r\ncriteria: &c\n- *c\n", "holds it"),
        (RUBRIC + "m0: &m0 {k: v}\n" + "".join(f"m{i}: &m{i} {{<<: [*m{i - 1}, *m{i - 1}]}}\n" for i in range(1, 40)), "aliases written out"),
        (RUBRIC + "n: " + "1" * 3000, "a number of 3000 characters"),
        (RUBRIC + "n: " + ":".join(["59"] * 100_000), "a number of 299999 characters"),
        (RUBRIC + "t: " + "x" * (3 << 20), "MiB"),
        ("[" * 100_000, "not YAML"),
    ],
)
def test_yaml_that_stands_for_more_than_a_rubric_is_refused_at_once(own_folder: Path, text: str, what: str) -> None:
    Path("r.yaml").write_text(text)
    began = time.monotonic()
    for read in (load_rubric, load_judge, portable_rubric):
        with pytest.raises(RubricError, match=what):
            read("r.yaml")
    assert time.monotonic() - began < 15


@pytest.mark.parametrize(
    "text",
    [
        ".".join(["a"] * 100_000) + " = 1",
        "[" + " . ".join(["a"] * 100_000) + "]",
        "[[criteria]]\ntext = { " + ".".join(['"a b"', "'c'"] * 50_000) + " = 1 }",
        't = """x\\""" # """""\n' + ".".join(["a"] * 100_000) + " = 1",
    ],
    ids=["key", "table", "quoted", "after a text"],
)
def test_toml_with_a_dotted_key_of_thousands_of_parts_is_refused_at_once(own_folder: Path, text: str) -> None:
    """In a process of its own: without the limit it takes hours."""
    Path("r.toml").write_text(text)
    read = (
        "from assay.rubrics import load_rubric\ntry:\n    load_rubric('r.toml')\nexcept Exception as error:\n    print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("RubricError r.toml: a key has more than 16 parts")


@pytest.mark.parametrize("quote", ['"', "'", '"""', "'''"])
def test_dots_in_toml_texts_and_comments_are_no_keys(own_folder: Path, quote: str) -> None:
    dots = ".".join("abcdefghijklmnopqrstuvwxyz")
    Path("r.toml").write_text(f"# it's {dots}\n[[criteria]]\nname = 'a'\ntext = {quote}Is {dots} # 1.2 said?{quote} # {dots}\nweight = 1.5\n")
    judge = load_rubric("r.toml").criteria[0].judge
    assert judge is not None
    assert dots in judge.text


@pytest.mark.parametrize(
    "text", ['"' + '\\"' * 1_000_000, '"""' + '\\"""' * 500_000, "'" * 2_000_001, "a" * 2_000_000, "a . " * 15 + " " * 2_000_000]
)
def test_toml_that_is_not_finished_is_refused_at_once(own_folder: Path, text: str) -> None:
    Path("r.toml").write_text(text)
    began = time.monotonic()
    with pytest.raises(RubricError, match="cannot be read"):
        load_rubric("r.toml")
    assert time.monotonic() - began < 15


def test_aliases_of_an_ordinary_size_are_read(own_folder: Path) -> None:
    Path("r.yaml").write_text(
        "name: r\ncriteria:\n- {name: a, judge: A, scale: &s [no, partly, yes]}\n- {name: b, judge: B, scale: *s}\n- {name: c, judge: C, scale: *s}\n"
    )
    assert [c.judge.scale for c in load_rubric("r.yaml").criteria if c.judge] == [("no", "partly", "yes")] * 3


@pytest.mark.parametrize("value", [10**400, -(10**400), 10**5000], ids=["400", "minus 400", "5000"])
def test_a_check_that_answers_with_a_number_too_large_for_a_float_is_unscored(value: int) -> None:
    result = Rubric("r", [Criterion(name="odd", check=lambda *_: value), Criterion(name="fine", check=lambda *_: 1.0)]).score(TASK, {"answer": "1"})
    assert result.verdicts[0].grade is None
    assert "not between 0 and 1" in result.verdicts[0].reason
    assert result.value == 1.0


@pytest.mark.parametrize("answer", [10**400, 10**5000, "1" + "0" * 1500, "1" + "0" * 5000, "1e400", "1/" + "3" * 900], ids=range(6))
def test_the_numeric_check_decides_on_numbers_of_any_size(answer: Any) -> None:
    assert checks.numeric(TASK, {"answer": answer}, None).value == 0.0
    task = make_task({"inputs": {"question": "?"}, "expected": {"answer": 10**5000}})
    assert checks.numeric(task, {"answer": 10**5000}, None).value == 1.0
    assert checks.exact(task, {"answer": 10**5000 + 1}, None).value == 0.0


def test_a_pattern_that_backtracks_for_ever_leaves_the_criterion_unscored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_MATCH_S", 0.2)
    began = time.monotonic()
    for ask in (
        lambda: checks.regex(TASK, {"answer": "a" * 40 + "!"}, None, pattern=r"(a|aa)+\d"),
        lambda: checks.json_schema(TASK, {"answer": "a" * 40 + "!"}, None, schema={"properties": {"answer": {"pattern": "^(a|a)*$"}}}),
    ):
        with pytest.raises(NoGrade, match="took more than"):
            raise AssertionError(ask())
    assert time.monotonic() - began < 5


def test_patterns_mean_what_they_meant() -> None:
    cases = [(r"\d+", "12", 1.0), (r"\d+", "12 apples", 0.0), (r"a.b", "a\nb", 1.0), (r"[[a-c]+", "[ab", 1.0), (r"(?i)YES|no", "yes", 1.0)]
    for pattern, answer, value in cases:
        assert checks.regex(TASK, {"answer": answer}, None, pattern=pattern) == Grade(value=value, reason="" if value else
                                                                                       f"{answer!r} does not match {pattern!r}.")  # fmt: skip
    schema = {"type": "object", "properties": {"answer": {"type": "string", "pattern": "^[ab]+$"}}}
    assert checks.json_schema(TASK, {"answer": "ab"}, None, schema=schema).value == 1.0
    wrong = checks.json_schema(TASK, {"answer": "ac"}, None, schema=schema)
    assert (wrong.value, wrong.reason) == (0.0, "$.answer: 'ac' does not match '^[ab]+$'.")
