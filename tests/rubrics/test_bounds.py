"""Files and answers that would take the memory or the time of a whole job."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from steps import calls_in

from assay.datasets import make_task
from assay.errors import RubricError
from assay.jobs.loading import portable_rubric
from assay.judges.loading import load_judge
from assay.models.limits import limited
from assay.rubrics import Criterion, Rubric, checks, checks as schemas, load_rubric
from assay.rubrics.criteria import Grade, NoGrade

TASK = make_task({"inputs": {"question": "?"}, "expected": {"answer": "1"}})
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
)
RUBRIC = "name: r\ncriteria:\n- {name: right, check: exact}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "what"),
    [
        (RUBRIC + BOMB, "after expanding aliases"),
        ("name: r\ncriteria: &c\n- *c\n", "refers to a node that contains it"),
        (
            RUBRIC
            + "m0: &m0 {k: v}\n"
            + "".join(f"m{i}: &m{i} {{<<: [*m{i - 1}, *m{i - 1}]}}\n" for i in range(1, 40)),
            "after expanding aliases",
        ),
        (RUBRIC + "n: " + "1" * 3000, "a number has 3000 characters"),
        (RUBRIC + "n: " + ":".join(["59"] * 100_000), "a number has 299999 characters"),
        (RUBRIC + "t: " + "x" * (3 << 20), "MiB"),
        ("[" * 100_000, "invalid YAML"),
    ],
)
@pytest.mark.timeout(120)
def test_yaml_that_expands_beyond_the_limit_is_refused_at_once(own_folder: Path, text: str, what: str) -> None:
    Path("r.yaml").write_text(text)
    for read in (load_rubric, load_judge, portable_rubric) if BOMB in text else (load_rubric,):
        with pytest.raises(RubricError, match=what):
            read("r.yaml")


DOTTED = (
    ".".join(["a"] * 100_000) + " = 1",
    "[" + " . ".join(["a"] * 100_000) + "]",
    "[[criteria]]\ntext = { " + ".".join(['"a b"', "'c'"] * 50_000) + " = 1 }",
    't = """x\\""" # """""\n' + ".".join(["a"] * 100_000) + " = 1",
)
READ_ALL = """
from assay.rubrics import load_rubric
for at in range(4):
    try:
        load_rubric(f'{at}.toml')
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_toml_with_a_dotted_key_of_thousands_of_parts_is_refused_at_once(own_folder: Path) -> None:
    """In a process of its own: without the limit it takes hours."""
    for at, text in enumerate(DOTTED):
        Path(f"{at}.toml").write_text(text)
    done = subprocess.run([sys.executable, "-c", READ_ALL], capture_output=True, text=True, timeout=60, check=True)
    for at, line in enumerate(done.stdout.splitlines()):
        assert line.startswith(f"RubricError {at}.toml: a key has more than 16 dotted parts")
    assert len(done.stdout.splitlines()) == len(DOTTED)


@pytest.mark.parametrize("quote", ['"', "'", '"""', "'''"])
def test_dots_in_toml_strings_and_comments_are_allowed(own_folder: Path, quote: str) -> None:
    dots = ".".join("abcdefghijklmnopqrstuvwxyz")
    Path("r.toml").write_text(
        f"# it's {dots}\n[[criteria]]\nname = 'a'\ntext = {quote}Is {dots} # 1.2 said?{quote} # {dots}\nweight = 1.5\n"
    )
    judge = load_rubric("r.toml").criteria[0].judge
    assert judge is not None
    assert dots in judge.text


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        '"' + '\\"' * 100_000,
        '"""' + '\\"""' * 50_000,
        "'" * 200_001,
        "a" * 200_000,
        "a . " * 15 + " " * 200_000,
    ],
)
@pytest.mark.timeout(120)
def test_incomplete_toml_is_refused_at_once(own_folder: Path, text: str) -> None:
    Path("r.toml").write_text(text)
    with pytest.raises(RubricError, match="cannot be read"):
        load_rubric("r.toml")


@pytest.mark.parametrize("value", [10**400, -(10**400), 10**5000], ids=["400", "minus 400", "5000"])
def test_a_check_result_too_large_for_a_float_is_out_of_range(value: int) -> None:
    with pytest.raises(RubricError, match="not between 0 and 1"):
        Rubric("r", [Criterion(name="odd", check=lambda *_: value)]).score(TASK, {"answer": "1"})


@pytest.mark.parametrize(
    "answer", [10**400, 10**5000, "1" + "0" * 1500, "1" + "0" * 5000, "1e400", "1/" + "3" * 900], ids=range(6)
)
def test_the_numeric_check_decides_on_numbers_of_any_size(answer: Any) -> None:
    assert checks.numeric(TASK, {"answer": answer}, None).value == 0.0
    task = make_task({"inputs": {"question": "?"}, "expected": {"answer": 10**5000}})
    assert checks.numeric(task, {"answer": 10**5000}, None).value == 1.0
    assert checks.exact(task, {"answer": 10**5000 + 1}, None).value == 0.0
    listed = make_task({"inputs": {"question": "?"}, "expected": {"answer": [10**5000]}})
    assert checks.exact(listed, {"answer": [10**5000]}, None).value == 1.0
    assert checks.exact(listed, {"answer": [10**5000 + 1]}, None).value == 0.0


@pytest.mark.timeout(120)
def test_a_pattern_with_unbounded_backtracking_is_unscored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemas, "MATCH_TIMEOUT_S", 0.2)
    for ask in (
        lambda: checks.regex(TASK, {"answer": "a" * 40 + "!"}, None, pattern=r"(a|aa)+\d"),
        lambda: checks.json_schema(
            TASK, {"answer": "a" * 40 + "!"}, None, schema={"properties": {"answer": {"pattern": "^(a|a)*$"}}}
        ),
    ):
        with pytest.raises(NoGrade, match="took more than"):
            raise AssertionError(ask())


def fits(schema: dict[str, Any], answer: Any) -> Grade:
    text = answer if isinstance(answer, str) else json.dumps(answer)
    return checks.json_schema(TASK, {"answer": text}, None, schema=schema, field="answer")


def test_bounded_schema_keywords_validate_like_unbounded_ones() -> None:
    properties = {"properties": {"id": {"type": "integer"}}, "patternProperties": {"^x_": {"type": "string"}}}
    named, unique = {"type": "object", **properties}, {"uniqueItems": True}
    closed, typed = ({**named, "additionalProperties": more} for more in (False, {"type": "null"}))
    cases: list[tuple[dict[str, Any], Any, bool]] = [
        (named, {"x_a": "b", "y": 1}, True), (named, {"x_a": 1}, False), (named, [], False),
        (closed, {"id": 1, "x_a": "b"}, True), (closed, {"y": 1}, False), (closed, {"id": "1"}, False),
        (typed, {"y": None, "x_b": "b"}, True), (typed, {"y": 1}, False),
        (unique, [1, True, 0, False, None, "1", [1], {"a": 1}, {"a": 2}], True), (unique, [1, 1.0], False),
        (unique, [[1], [1.0]], False),
        (unique, [{"a": 1, "b": 2}, {"b": 2, "a": 1}], False), (unique, ["a", "a"], False),
        (unique, [[True], [1]], True), (unique, '"text"', True),
        ({"uniqueItems": False}, [1, 1], True),
    ]  # fmt: skip
    for schema, answer, right in cases:
        assert bool(fits(schema, answer).value) is right, (schema, answer)
        plain = jsonschema.validators.validator_for(schema)(schema)
        wrong = jsonschema.exceptions.best_match(plain.iter_errors(answer))
        assert fits(schema, answer).reason == ("" if wrong is None else f"{wrong.json_path}: {wrong.message}.")


def test_a_list_of_many_objects_is_searched_once() -> None:
    items = [{"a": [at]} for at in range(3000)]
    assert fits({"uniqueItems": True}, items).value == 1.0
    assert calls_in(lambda: fits({"uniqueItems": True}, items)) < 100 * len(items)


def test_a_schema_that_cannot_be_bounded_is_refused() -> None:
    schema = {"patternProperties": {"^a": {}}, "unevaluatedProperties": False}
    with pytest.raises(RubricError, match="use additionalProperties"):
        Rubric("r", [Criterion(name="c", check=checks.json_schema, arguments={"schema": schema})])


@pytest.mark.timeout(120)
def test_the_schema_check_has_the_time_limit() -> None:
    both = {
        "anyOf": [{"items": {"$ref": "#"}, "type": "array"}, {"items": {"$ref": "#"}, "type": "array", "maxItems": 1}]
    }
    rubric = Rubric("r", [Criterion(name="c", check=checks.json_schema, arguments={"schema": both, "field": "answer"})])
    with limited(0.5):
        result = rubric.score(TASK, {"answer": "[" * 30 + "1" + "]" * 30})
    assert "took longer than the limit" in result.verdicts[0].reason


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


class Unwritable:
    def __str__(self) -> str:
        raise SystemExit(3)

    __repr__ = __str__


@pytest.mark.parametrize(
    ("schema", "answer"),
    [
        ({"type": "array"}, "[" * 100_000), ({"type": "integer"}, "1" * 5000),
        ({"type": "string"}, '"' + "x" * 2_000_000 + '"'),
        ({"multipleOf": 0.01}, "1e999"), ({"multipleOf": 0.5}, "NaN"), ({"multipleOf": 0.01}, "1" * 400),
        ({"type": "array", "items": {"$ref": "#"}}, "[" * 800 + "]" * 800),
    ],
    ids=["deep", "digits", "long", "infinite", "nan", "large", "deep for its schema"],
)  # fmt: skip
def test_every_answer_is_validated_by_a_schema(schema: dict[str, Any], answer: str) -> None:
    rubric = Rubric(
        "r", [Criterion(name="c", check=checks.json_schema, arguments={"schema": schema, "field": "answer"})]
    )
    score = rubric.score(TASK, {"answer": answer})
    assert score.value == 0.0
    assert score.verdicts[0].reason


@pytest.mark.parametrize("check", [checks.exact, checks.contains, checks.fields_match, checks.numeric])
@pytest.mark.parametrize(
    "answer",
    [[10**5000], CYCLE, Unwritable(), {("a", "b"): 1}, {"a": {1: [10**5000], "b": Unwritable()}}],
    ids=range(5),
)
def test_an_answer_that_cannot_be_serialized_is_graded(check: Any, answer: Any) -> None:
    task = make_task({"inputs": {"question": "?"}, "expected": {"answer": "7777777"}})
    score = Rubric("r", [Criterion(name="c", check=check)]).score(task, {"answer": answer})
    assert score.value == 0.0
    assert score.verdicts[0].reason


def test_an_endless_schema_is_reported_as_a_schema_error() -> None:
    with pytest.raises(NoGrade, match="has endless self-references"):
        fits({"$ref": "#"}, [1])
