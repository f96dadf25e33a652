"""Checks in code. Each is called as `check(task, prediction, rollout, **with)` and answers a grade in [0, 1].

`prediction` is a dict of the output fields; `field` names the one that is looked at, and is by default the one
expected output of the task. A check that has nothing to look at raises `NoGrade`, and the criterion is unscored.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from assay.datasets import Task
from assay.rubrics.criteria import Grade, NoGrade, arguments_rule
from assay.rubrics.schemas import MOST_CHARACTERS, is_schema, matches, wrong_by
from assay.traces.records import Rollout

__all__ = [
    "contains",
    "exact",
    "fields_match",
    "json_schema",
    "length",
    "numeric",
    "one_of",
    "regex",
    "steps_used",
    "token_use",
    "tool_adoption",
]

_UNWRITABLE = (Exception, SystemExit, GeneratorExit)  # what `__str__` of an agent's own class may raise
_MOST_BITS = 14_000  # of a number that is written out in decimal
_NUMBER = re.compile(r"[-+\u2212]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3})?(?:\s*/\s*\d+(?:\.\d+)?)?")


def _is_pattern(pattern: str, **_: Any) -> None:
    import regex

    regex.compile(pattern)


def _is_number(value: Any, at_least: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and at_least <= value < math.inf


def _is_tolerance(tolerance: float | None = None, **_: Any) -> None:
    if tolerance is not None and not _is_number(tolerance, 0):
        raise ValueError(f"tolerance={tolerance!r} must be a number of at least 0")


def _is_limit(**limits: Any) -> None:
    for name, value in limits.items():
        if name in ("max_tokens", "budget") and not _is_number(value, 1):
            raise ValueError(f"{name}={value!r} must be a number of at least 1")


def _are_texts(text: Any = None, values: Any = None, **_: Any) -> None:
    listed = isinstance(text, list | tuple) and text and all(isinstance(part, str) for part in text)
    if text is not None and not isinstance(text, str) and not listed:
        raise ValueError(f"text={text!r} must be a text or a list of texts that is not empty")
    if values is not None and (not isinstance(values, list | tuple) or not values):
        raise ValueError(f"values={values!r} must be a list that is not empty")


def _expected(task: Task, field: str | None) -> tuple[str, Any]:
    name = field or (next(iter(task.expected)) if len(task.expected) == 1 else "answer")
    if name not in task.expected:
        raise NoGrade(f"task {task.id!r} has no expected {name!r}; it has {sorted(task.expected)}", wanted=name)
    return name, task.expected[name]


def _found(prediction: dict[str, Any], name: str) -> Any:
    if name not in prediction or prediction[name] is None:
        return None
    return prediction[name]


def _differs(prediction: dict[str, Any], name: str, wanted: Any) -> str:
    """What is wrong where a field is not what was expected."""
    if name not in prediction:
        return f"expected {_text(wanted)!r}, and the prediction has no field {name!r}; it has {sorted(map(_text, prediction))}"
    return f"expected {_text(wanted)!r}, found {_text(_found(prediction, name))[:200]!r}"


def _text(value: Any) -> str:
    """A value as text. What an agent answers can always be written, so that no answer leaves a criterion unscored."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return hex(value)  # Python writes no number out in decimal that has more than 4300 digits
    try:
        try:
            return json.dumps(value, ensure_ascii=False, default=str)
        except ValueError:
            return json.dumps(_long_as_hex(value), ensure_ascii=False, default=str)
    except _UNWRITABLE:  # equal to nothing but itself
        return f"<{type(value).__name__} at {id(value):x}, which cannot be written as text>"


def _long_as_hex(value: Any) -> Any:
    if isinstance(value, dict):
        return {_long_as_hex(name): _long_as_hex(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_long_as_hex(part) for part in value]
    return hex(value) if isinstance(value, int) and value.bit_length() > _MOST_BITS else value


def _words(prediction: dict[str, Any], name: str) -> str:
    found = _found(prediction, name)
    return "" if found is None else _text(found)


def _norm(value: Any, case: bool) -> str:
    text = " ".join(_text(value).split())
    return text if case else text.casefold()


def exact(task: Task, prediction: dict[str, Any], rollout: Rollout | None, field: str | None = None, case: bool = False) -> Grade:
    """1 where the field equals the expected text, white space folded; without `case`, letter case too."""
    name, wanted = _expected(task, field)
    found = _found(prediction, name)
    same = found is not None and _norm(found, case) == _norm(wanted, case)
    return Grade(value=float(same), reason="" if same else f"E{_differs(prediction, name, wanted)[1:]}.")


def fields_match(task: Task, prediction: dict[str, Any], rollout: Rollout | None, all_or_nothing: bool = False, case: bool = False) -> Grade:
    """The share of the task's expected fields that the prediction has exactly; with `all_or_nothing`, 1 only for all."""
    if not task.expected:
        raise NoGrade(f"task {task.id!r} expects no fields")
    wrong = [
        f"{name}: {_differs(prediction, name, wanted)}"
        for name, wanted in task.expected.items()
        if (found := _found(prediction, name)) is None or _norm(found, case) != _norm(wanted, case)
    ]
    share = 1 - len(wrong) / len(task.expected)
    return Grade(value=float(not wrong) if all_or_nothing else share, reason="; ".join(wrong))


def parse_number(value: Any) -> float | int | None:
    """The number in a text: after `####` if there, else the last one; `1,200`, `3/4`, `$5`, `12 %` are read. None if none.

    Whole numbers are exact however long they are.
    """
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    try:
        whole = str(value)
    except _UNWRITABLE:
        return None
    text = whole.rpartition("####")[2] or whole
    matches = _NUMBER.findall(text[-2000:])
    if not matches:
        return None
    digits = matches[-1].replace(",", "").replace("\u2212", "-")
    try:
        top, _, bottom = digits.partition("/")
        if digits.lstrip("+-").isdigit():
            return int(digits)
        number = float(Fraction(top.strip()) / Fraction(bottom.strip())) if bottom else float(top)
    except (ValueError, ZeroDivisionError, OverflowError):
        return None
    return number if math.isfinite(number) else None


@arguments_rule(_is_tolerance)
def numeric(task: Task, prediction: dict[str, Any], rollout: Rollout | None, field: str | None = None, tolerance: float | None = None) -> Grade:
    """1 where the numbers differ by at most `tolerance`, relative to the expected one where that is above 1.

    Without a tolerance whole numbers must be equal, others agree to one part in a million.
    """
    name, wanted = _expected(task, field)
    target = parse_number(wanted)
    if target is None:
        raise NoGrade(f"task {task.id!r}: the expected {name}={wanted!r} holds no number")
    found = _found(prediction, name)
    number = parse_number(found)
    if number is None:
        return Grade(value=0.0, reason=f"Expected the number {_text(target)[:200]}, found {_text(found)[:200]!r}.")
    exact_target = Fraction(target)
    if tolerance is None:
        tolerance = 0.0 if exact_target.denominator == 1 else 1e-6
    right = abs(Fraction(number) - exact_target) <= Fraction(tolerance) * max(Fraction(1), abs(exact_target))
    return Grade(value=float(right), reason="" if right else f"Expected {_text(target)[:200]}, found {_text(number)[:200]}.")


@arguments_rule(_is_pattern)
def regex(task: Task, prediction: dict[str, Any], rollout: Rollout | None, pattern: str, field: str = "answer") -> Grade:
    """1 where the whole field matches the pattern."""
    found = _words(prediction, field)[:100_000]
    match = matches(pattern, found.strip())
    return Grade(value=float(match), reason="" if match else f"{found[:200]!r} does not match {pattern!r}.")


@arguments_rule(_are_texts)
def contains(
    task: Task, prediction: dict[str, Any], rollout: Rollout | None, text: str | Sequence[str] | None = None, field: str = "answer"
) -> Grade:
    """The share of the texts (by default the task's expected one) that stand in the field, letter case ignored."""
    wanted = [text] if isinstance(text, str) else list(text) if text is not None else [_text(_expected(task, None)[1])]
    found = _words(prediction, field).casefold()
    missing = [part for part in wanted if part.casefold() not in found]
    return Grade(value=1 - len(missing) / len(wanted), reason=f"Missing: {missing}." if missing else "")


@arguments_rule(_are_texts)
def one_of(task: Task, prediction: dict[str, Any], rollout: Rollout | None, values: Sequence[str], field: str = "label") -> Grade:
    """1 where the field is one of the values, letter case ignored."""
    found = _norm(_words(prediction, field), False)
    allowed = found in {_norm(value, False) for value in values}
    return Grade(value=float(allowed), reason="" if allowed else f"{found[:200]!r} is not one of {list(values)}.")


@arguments_rule(is_schema)
def json_schema(task: Task, prediction: dict[str, Any], rollout: Rollout | None, schema: dict[str, Any], field: str | None = None) -> Grade:
    """1 where the field (or the whole prediction) holds JSON that the schema accepts."""
    value: Any = prediction if field is None else _found(prediction, field)
    if len(text := _text(value)) > MOST_CHARACTERS:
        return Grade(value=0.0, reason=f"{field or 'The prediction'} has {len(text)} characters; json_schema reads at most {MOST_CHARACTERS}.")
    if field is not None and isinstance(value, str):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            return Grade(value=0.0, reason=f"{field} is not JSON: {str(error)[:200]}.")
    wrong = wrong_by(schema, value)
    return Grade(value=0.0, reason=wrong) if wrong else Grade(value=1.0)


@arguments_rule(_is_limit)
def length(task: Task, prediction: dict[str, Any], rollout: Rollout | None, max_tokens: int, field: str | None = None) -> Grade:
    """For a pitfall: how far the output is over `max_tokens` words, 0 up to the limit and 1 at twice of it."""
    texts = [prediction.get(field, "")] if field else [v for k, v in prediction.items() if k != "steps"]
    words = sum(len(_text(text).split()) for text in texts)
    over = min(1.0, max(0.0, words / max_tokens - 1))
    return Grade(value=over, reason=f"{words} words, the limit is {max_tokens}." if over else "")


def _tools(prediction: dict[str, Any], rollout: Rollout | None) -> list[dict[str, Any]]:
    if rollout is not None and rollout.transitions:
        return [{"name": t.name, "error": t.error} for t in rollout.tools]
    steps = prediction.get("steps")
    if steps is None:
        raise NoGrade("neither a rollout nor the prediction's 'steps' tells which tools were called")
    listed = steps if isinstance(steps, list | tuple) else ()
    return [{"name": step.get("tool"), "error": step.get("error")} for step in listed if isinstance(step, Mapping)]


def tool_adoption(task: Task, prediction: dict[str, Any], rollout: Rollout | None, tool: str | None = None) -> Grade:
    """1 where at least one tool call (of `tool`, if named) ran without an error."""
    calls = [call for call in _tools(prediction, rollout) if tool is None or call["name"] == tool]
    if any(call["error"] is None for call in calls):
        return Grade(value=1.0)
    what = f"Every call of {tool or 'a tool'} failed: {calls[-1]['error']}." if calls else f"{tool or 'No tool'} was not called."
    return Grade(value=0.0, reason=what)


@arguments_rule(_is_limit)
def steps_used(task: Task, prediction: dict[str, Any], rollout: Rollout | None, budget: int) -> Grade:
    """For a pitfall: the share of the LM-call budget that was overrun, 0 within the budget and 1 at twice of it."""
    if rollout is None:
        raise NoGrade("no rollout tells how many steps were used")
    used = len(rollout.transitions)
    return Grade(value=min(1.0, max(0.0, used / budget - 1)), reason=f"{used} LM calls, the budget is {budget}.")


@arguments_rule(_is_limit)
def token_use(task: Task, prediction: dict[str, Any], rollout: Rollout | None, budget: int) -> Grade:
    """For a pitfall: the share of the token budget that was overrun, 0 within the budget and 1 at twice of it."""
    if rollout is None:
        raise NoGrade("no rollout tells how many tokens were used")
    return Grade(value=min(1.0, max(0.0, rollout.tokens / budget - 1)), reason=f"{rollout.tokens} tokens, the budget is {budget}.")
