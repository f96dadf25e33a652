"""Shipped code checks. Each is called as `check(task, prediction, rollout, **with)` and returns a grade in [0, 1].

`prediction` is a dict of the output fields. `field` names the field to check; the default is the task's only expected
field, not counting columns that are not outputs of the program. Rollouts recorded from outside (gateway, imports) have
one field whose name the recorder chose; without `field`, that field is read whatever its name. A check without the data
it needs raises `NoGrade`; the criterion is unscored. Where null is expected of a field (`assay.datasets.tasks.NULL`), a
check of this field gives 1 for null, otherwise 0. Every check that compares an answer with an expected value does it
here.
"""

import functools
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, time
from decimal import Decimal
from fractions import Fraction
from typing import Annotated, Any, TypeAlias

from annotated_types import Ge

from assay.datasets import Task
from assay.datasets.tasks import OTHER_COLUMNS, UNKNOWN
from assay.rubrics.criteria import Criterion, Grade, NoGrade, arguments_rule, not_expected
from assay.rubrics.tools import calls_of
from assay.support.numbers import parse_number
from assay.support.sections import structure_in, without_thoughts
from assay.support.values import json_value, value_text
from assay.traces.records import RUN_FIELDS, Rollout
from assay.traces.thinking import thinking_of

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3})?", re.ASCII)
_MOMENT = re.compile(r"\d{4}(-?)\d\d\1\d\d[Tt ]\d\d:?\d\d.{0,24}", re.ASCII)
_TIME = re.compile(r"\d\d:\d\d.{0,24}", re.ASCII)


def same(found: Any, expected: Any, *, case: bool = False) -> bool:
    """Whether two values are equal as JSON values (`assay.support.values.json_value`), whatever types they had.

    - Numbers are equal by their value: 3, 3.0 and `Decimal("3")`, and a text that is one number: "3". True and false
      are not numbers; they equal the texts "true" and "false".
    - Texts are equal if they differ in runs of white space or, without `case`, in case only. A date equals its ISO
      text, an enum member its value. Times, with or without a date, are equal if they are the same moment, in any ISO
      form: `2024-02-29T12:30:00Z` and `2024-02-29 13:30+01:00`, `12:30Z` and `13:30:00+01:00`.
    - Objects are equal if each of their fields is, in any order; a field that is null equals a missing one. Lists are
      equal item by item; both also equal a text with their JSON, or with the elements of DSPy's XML format.
    """
    return _same(json_value(found, placeholders=True), json_value(expected, placeholders=True), case)


def equality_of(criteria: Iterable[Criterion]) -> Callable[[Any, Any], bool]:
    """`same` as the checks use it that compare expected values: those with an argument `case`. Without such a check,
    or if one of them is case-sensitive, texts that differ in case only are different."""
    cases = {
        bool(criterion.arguments.get("case", False))
        for criterion in criteria
        if criterion.check is not None and "case" in inspect.signature(criterion.check).parameters
    }
    return functools.partial(same, case=cases != {False})


def _same(a: Any, b: Any, case: bool) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return all(_same(a.get(name), b.get(name), case) for name in a.keys() | b.keys())
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b, [case] * len(a)))
    if isinstance(a, dict | list) or isinstance(b, dict | list):
        structure, other = (a, b) if isinstance(a, dict | list) else (b, a)
        read = structure_in(other) if isinstance(other, str) else None
        return type(read) is type(structure) and _same(read, structure, case)
    if a is None or b is None:
        return a is b
    if isinstance(a, bool) or isinstance(b, bool):
        return type(a) in (bool, str) and type(b) in (bool, str) and _norm(a, False) == _norm(b, False)
    if isinstance(a, str) and isinstance(b, str):
        return _norm(a, case) == _norm(b, case) or ((moment := _moment(a)) is not None and moment == _moment(b))
    numbers = _number(a), _number(b)
    return None not in numbers and numbers[0] == numbers[1]


def _norm(value: Any, case: bool) -> str:
    """A scalar for comparison: `True` of Python and `true` of JSON are one text where one side is a boolean."""
    text = " ".join(value_text(value).split())
    return text if case else text.casefold()


def _number(value: int | float | str) -> Any:
    """The number that a value is; None if it is a text of anything else."""
    if not isinstance(value, str):
        return Decimal(repr(value)) if isinstance(value, float) else value
    return Decimal(text) if _NUMBER.fullmatch(text := value.strip()) else None


def _moment(text: str) -> datetime | time | None:
    """The time, with or without a date, that a text is in ISO 8601; None for any other text."""
    text = text.strip()
    try:
        if _MOMENT.fullmatch(text):
            return datetime.fromisoformat(text)
        return time.fromisoformat(text) if _TIME.fullmatch(text) else None
    except ValueError:
        return None


__all__ = [
    "contains",
    "exact",
    "fields_match",
    "json_schema",
    "length",
    "numeric",
    "one_of",
    "refusal",
    "regex",
    "steps_used",
    "thinking",
    "token_use",
    "tool_adoption",
]

# -- Validates answers against regular expressions and JSON schemas in bounded time.
#
# The package `jsonschema` uses Python's `re`, whose backtracking can take practically forever while holding the GIL,
# and compares list items pairwise for `uniqueItems`. These keywords are replaced here.


Limit: TypeAlias = Annotated[float, Ge(1)]  # of words, calls or tokens
MOST_CHARACTERS = 1_000_000  # of an answer that is validated against a schema
MATCH_TIMEOUT_S = 2.0
_SAFE_DEPTH = 20  # nesting depth that never exhausts the recursion limit by itself


def matches(pattern: str, text: str, *, full: bool = True) -> bool:
    """Whether a text matches a pattern.

    Args:
        full: match the whole text instead of searching in it.
    Raises:
        NoGrade: matching took more than 2 s.
    """
    import regex

    compiled = regex.compile(pattern, regex.DOTALL if full else 0)
    try:
        return (compiled.fullmatch if full else compiled.search)(text, timeout=MATCH_TIMEOUT_S) is not None
    except TimeoutError:
        raise NoGrade(
            f"the pattern {pattern!r} took more than {MATCH_TIMEOUT_S:g} s on {len(text)} characters; "
            "use one with less backtracking"
        ) from None


def is_schema(schema: dict[str, Any], **_: Any) -> None:
    """Validates a schema.

    Raises:
        jsonschema.SchemaError: the schema is invalid.
        ValueError: it combines keywords that have no time limit.
    """
    import jsonschema

    jsonschema.validators.validator_for(schema).check_schema(schema)
    if _has(schema, "unevaluatedProperties") and _has(schema, "patternProperties"):
        raise ValueError(
            "unevaluatedProperties cannot be combined with patternProperties (unbounded time); use additionalProperties"
        )


def names_strings(schema: Any) -> bool:
    """Whether a schema says that the value itself may be a string: by its type, or by a value that it lists."""
    if not isinstance(schema, Mapping):
        return False
    kinds, values = schema.get("type"), [*schema.get("enum", ()), schema.get("const")]
    parts = [part for name in ("anyOf", "oneOf", "allOf") for part in schema.get(name, ())]
    return (
        kinds == "string"
        or (isinstance(kinds, list) and "string" in kinds)
        or any(isinstance(value, str) for value in values)
        or any(map(names_strings, parts))
    )


def _has(part: Any, keyword: str) -> bool:
    if isinstance(part, Mapping):
        return keyword in part or any(_has(inner, keyword) for inner in part.values())
    return isinstance(part, list | tuple) and any(_has(inner, keyword) for inner in part)


def wrong_by(schema: dict[str, Any], value: Any) -> str:
    """Returns why a value is invalid by a schema; empty if it is valid. A value that cannot be checked is invalid.

    Raises:
        NoGrade: a pattern took too long, or the schema has endless self-references.
    """
    import jsonschema

    try:
        wrong = jsonschema.exceptions.best_match(_validator(schema).iter_errors(value))
    except (ArithmeticError, TypeError, ValueError) as error:  # numbers such as Infinity, or keys that are not strings
        return f"It cannot be checked: {str(error)[:200]}."
    except RecursionError:
        if _is_deeper(value, _SAFE_DEPTH):
            return "It is nested too deeply to be checked."
        raise NoGrade("the schema has endless self-references") from None
    return "" if wrong is None else f"{wrong.json_path}: {wrong.message[:300]}."


def _is_deeper(value: Any, levels: int) -> bool:
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return levels == 0 or any(_is_deeper(part, levels - 1) for part in parts)


def _validator(schema: dict[str, Any]) -> Any:
    """The schema's validator with the replaced keywords."""
    import jsonschema

    kind = jsonschema.validators.validator_for(schema)
    extend: Any = jsonschema.validators.extend
    known = {name: function for name, function in _BOUNDED.items() if name in kind.VALIDATORS}
    return extend(kind, known)(schema)


def _pattern(validator: Any, pattern: str, value: Any, _: Any) -> Iterator[Any]:
    import jsonschema

    if validator.is_type(value, "string") and not matches(pattern, value, full=False):
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: Mapping[str, Any], value: Any, _: Any) -> Iterator[Any]:
    if validator.is_type(value, "object"):
        for pattern, inner in patterns.items():
            for name, part in value.items():
                if matches(pattern, name, full=False):
                    yield from validator.descend(part, inner, path=name, schema_path=pattern)


def _additional_properties(validator: Any, allowed: Any, value: Any, schema: Mapping[str, Any]) -> Iterator[Any]:
    import jsonschema

    if not validator.is_type(value, "object"):
        return
    patterns, listed = schema.get("patternProperties", {}), schema.get("properties", {})
    more = [
        name
        for name in value
        if name not in listed and not any(matches(pattern, name, full=False) for pattern in patterns)
    ]
    if validator.is_type(allowed, "object"):
        for name in more:
            yield from validator.descend(value[name], allowed, path=name)
    elif not allowed and more:
        names = ", ".join(repr(name) for name in sorted(more, key=str))
        if patterns:
            regexes = ", ".join(repr(pattern) for pattern in sorted(patterns))
            verb = "does" if len(more) == 1 else "do"
            yield jsonschema.ValidationError(f"{names} {verb} not match any of the regexes: {regexes}")
        else:
            verb = "was" if len(more) == 1 else "were"
            yield jsonschema.ValidationError(f"Additional properties are not allowed ({names} {verb} unexpected)")


def _unique_items(validator: Any, required: bool, value: Any, _: Any) -> Iterator[Any]:
    import jsonschema

    if required and validator.is_type(value, "array") and len({_key(part) for part in value}) < len(value):
        yield jsonschema.ValidationError(f"{value!r} has non-unique elements")


def _key(value: Any) -> str:
    """A string that is the same for values that are equal in JSON: 1 and 1.0, but not 1 and true."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, int | float):
        return repr(value) if isinstance(value, float) and not value.is_integer() else hex(int(value))
    if isinstance(value, Mapping):
        return "{" + ",".join(sorted(f"{_key(name)}:{_key(part)}" for name, part in value.items())) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_key(part) for part in value) + "]"
    return f"<{id(value)}>"


_BOUNDED = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "uniqueItems": _unique_items,
}


def _validate_pattern(pattern: str, **_: Any) -> None:
    import regex

    regex.compile(pattern)


def _validate_texts(text: Any = None, values: Any = None, **_: Any) -> None:
    listed = isinstance(text, list | tuple) and text and all(isinstance(part, str) for part in text)
    if text is not None and not isinstance(text, str) and not listed:
        raise ValueError(f"text={text!r} must be a string or a non-empty list of strings")
    if values is not None and (not isinstance(values, list | tuple) or not values):
        raise ValueError(f"values={values!r} must be a non-empty list")


def _expected(task: Task, field: str | None) -> tuple[str, Any]:
    names = task.expected.keys() - set(task.metadata.get(OTHER_COLUMNS, ())) or task.expected
    only = next(iter(names)) if len(names) == 1 else "answer"
    name = field or str(task.metadata.get(UNKNOWN, only))
    if name not in task.expected:
        raise not_expected(task, name)
    return name, task.expected[name]


def _field_name(prediction: dict[str, Any], rollout: Rollout | None, field: str | None, default: str) -> str:
    """Name of the field to check: `field`, otherwise `default`.

    If neither is present and the gateway (`answer`) or an import (`output`) named the only field, it is that field.
    """
    if field is not None or default in prediction or len(prediction) != 1:
        return field or default
    only = next(iter(prediction))
    unnamed = only in ("answer", "output") if rollout is None else rollout.source != "program"
    return only if unnamed else default


def _value(prediction: dict[str, Any], name: str) -> Any:
    """The answer in a field, without the thoughts in its text; None if there is none."""
    value = prediction.get(name)
    return without_thoughts(value) if isinstance(value, str) else value


def _is_equal(prediction: dict[str, Any], name: str, expected: Any, case: bool) -> bool:
    """Whether a field has the expected value; where null is expected, whether it is null."""
    value = _value(prediction, name)
    if expected is None:
        return value is None and name in prediction
    return value is not None and same(value, expected, case=case)


def _null_grade(task: Task, prediction: dict[str, Any], expected_name: str, name: str) -> Grade | None:
    """The grade of a field where null is expected: 1 if it is null, otherwise 0; None where null is not expected."""
    if task.expected.get(expected_name, "") is not None:
        return None
    return _equality(prediction, name, None, False)


def _equality(prediction: dict[str, Any], name: str, expected: Any, case: bool) -> Grade:
    return Grade.of(_is_equal(prediction, name, expected, case), f"E{_difference(prediction, name, expected)[1:]}.")


def _difference(prediction: dict[str, Any], name: str, expected: Any) -> str:
    """Reason text for a field that differs from the expected value."""
    if name not in prediction:
        fields = sorted(map(value_text, prediction))
        return f"expected {value_text(expected)!r}, and the prediction has no field {name!r}; it has {fields}"
    return f"expected {value_text(expected)!r}, found {value_text(_value(prediction, name))[:200]!r}"


def _field_text(prediction: dict[str, Any], name: str) -> str:
    value = _value(prediction, name)
    return "" if value is None else value_text(value)


def _written(prediction: dict[str, Any], field: str | None) -> list[str]:
    """The text of a field, or of all that the program wrote."""
    values = [prediction.get(field, "")] if field else [v for k, v in prediction.items() if k not in RUN_FIELDS]
    return list(map(value_text, values))


def exact(
    task: Task, prediction: dict[str, Any], rollout: Rollout | None, field: str | None = None, case: bool = False
) -> Grade:
    """Grade 1 if the field equals the expected value, compared by `assay.rubrics.checks.same`.

    Args:
        case: whether texts are compared case-sensitively.
    """
    name, expected = _expected(task, field)
    return _equality(prediction, _field_name(prediction, rollout, field, name), expected, case)


def fields_match(
    task: Task, prediction: dict[str, Any], rollout: Rollout | None, all_or_nothing: bool = False, case: bool = False
) -> Grade:
    """Share of the task's expected fields that equal those of the prediction, compared by
    `assay.rubrics.checks.same`.

    A column of the data that is not an output of the program counts only if the prediction has a field of its name.

    Args:
        all_or_nothing: grade 1 if all fields match, otherwise 0.
        case: whether texts are compared case-sensitively.
    """
    other = set(task.metadata.get(OTHER_COLUMNS, ())) - prediction.keys()
    wanted = {name: value for name, value in task.expected.items() if name not in other}
    if not wanted:
        raise NoGrade(f"task {task.id!r} expects no fields{f' ({task.where})' if task.where else ''}")
    wrong = [
        f"{name}: {_difference(prediction, name, expected)}"
        for name, expected in wanted.items()
        if not _is_equal(prediction, name, expected, case)
    ]
    share = 1 - len(wrong) / len(wanted)
    return Grade(value=float(not wrong) if all_or_nothing else share, reason="; ".join(wrong))


def numeric(
    task: Task,
    prediction: dict[str, Any],
    rollout: Rollout | None,
    field: str | None = None,
    tolerance: Annotated[float | None, Ge(0)] = None,
) -> Grade:
    """Grade 1 if |number - expected| <= tolerance * max(1, |expected|).

    `assay.support.numbers.parse_number` reads both numbers and documents which spellings it reads. An answer
    without a number has the grade 0.

    Args:
        tolerance: default 0 for an expected integer, 1e-6 otherwise.
    """
    name, expected = _expected(task, field)
    found_name = _field_name(prediction, rollout, field, name)
    if (null := _null_grade(task, prediction, name, found_name)) is not None:
        return null
    target = parse_number(expected)
    if target is None:
        raise NoGrade(f"task {task.id!r}: the expected {name}={expected!r} contains no number")
    value = _value(prediction, found_name)
    number = parse_number(value)
    if number is None:
        return Grade.of(False, f"Expected the number {value_text(target)[:200]}, found {value_text(value)[:200]!r}.")
    exact_target = Fraction(target)
    if tolerance is None:
        tolerance = 0.0 if exact_target.denominator == 1 else 1e-6
    correct = abs(Fraction(number) - exact_target) <= Fraction(tolerance) * max(Fraction(1), abs(exact_target))
    return Grade.of(correct, f"Expected {value_text(target)[:200]}, found {value_text(number)[:200]}.")


@arguments_rule(_validate_pattern)
def regex(
    task: Task, prediction: dict[str, Any], rollout: Rollout | None, pattern: str, field: str | None = None
) -> Grade:
    """Grade 1 if the pattern matches the whole field (default `answer`), without spaces at its ends; otherwise 0.

    It is not a search: `.*PATTERN.*` finds a pattern anywhere in the field (`.` matches line ends too).
    """
    name = _field_name(prediction, rollout, field, "answer")
    if (null := _null_grade(task, prediction, field or "answer", name)) is not None:
        return null
    text = _field_text(prediction, name)[:100_000]
    return Grade.of(matches(pattern, text.strip()), f"{text[:200]!r} as a whole does not match {pattern!r}.")


@arguments_rule(_validate_texts)
def contains(
    task: Task,
    prediction: dict[str, Any],
    rollout: Rollout | None,
    text: str | Sequence[str] | None = None,
    field: str | None = None,
) -> Grade:
    """Share of the texts contained in the field (default `answer`), ignoring case. The default is the expected value
    (of the field, if the task has one), or each item of an expected list."""
    own = field if field in task.expected else None
    expected_name, wanted = _expected(task, own) if text is None else (field or "answer", text)
    name = _field_name(prediction, rollout, field, expected_name if text is None else "answer")
    if (null := _null_grade(task, prediction, expected_name, name)) is not None:
        return null
    parts = list(map(value_text, wanted if isinstance(wanted, list | tuple | set) else [wanted]))
    content = _field_text(prediction, _field_name(prediction, rollout, field, "answer")).casefold()
    missing = [part for part in parts if part.casefold() not in content]
    return Grade(value=1 - len(missing) / len(parts), reason=f"Missing: {missing}." if missing else "")


@arguments_rule(_validate_texts)
def one_of(
    task: Task, prediction: dict[str, Any], rollout: Rollout | None, values: Sequence[str], field: str | None = None
) -> Grade:
    """Grade 1 if the field (default `label`) equals one of the values, compared by `assay.rubrics.checks.same`."""
    name = _field_name(prediction, rollout, field, "label")
    if (null := _null_grade(task, prediction, field or "label", name)) is not None:
        return null
    value = _value(prediction, name)
    allowed = any(same(value, option) for option in values)
    return Grade.of(allowed, f"{value_text(value)[:200]!r} is not one of {list(values)}.")


@arguments_rule(is_schema)
def json_schema(
    task: Task, prediction: dict[str, Any], rollout: Rollout | None, schema: dict[str, Any], field: str | None = None
) -> Grade:
    """Grade 1 if the field (default: the whole prediction) is valid by the schema.

    A field that is a text is read as JSON. Where the schema names strings (`"type": "string"`, or a string in `enum` or
    `const`), the text itself may be valid too.
    """
    if field is not None and (null := _null_grade(task, prediction, field, field)) is not None:
        return null
    value = json_value(prediction if field is None else _value(prediction, field), placeholders=True)
    if len(text := value_text(value)) > MOST_CHARACTERS:
        name = field or "The prediction"
        return Grade.of(False, f"{name} has {len(text)} characters; json_schema reads at most {MOST_CHARACTERS}.")
    is_text = field is not None and isinstance(value, str)
    wrong = "It is a text." if is_text and not names_strings(schema) else wrong_by(schema, value)
    if wrong and is_text:
        try:
            wrong = wrong_by(schema, json.loads(text))
        except (ValueError, RecursionError) as error:
            wrong = f"{field} is not JSON: {str(error)[:200]}."
    return Grade.of(not wrong, wrong)


def length(
    task: Task, prediction: dict[str, Any], rollout: Rollout | None, max_tokens: Limit, field: str | None = None
) -> Grade:
    """For a pitfall: 0 up to `max_tokens` words, rising linearly to 1 at twice the limit."""
    words = sum(len(text.split()) for text in _written(prediction, field))
    return Grade.beyond(words, max_tokens, f"{words} words, the limit is {max_tokens}.")


def tool_adoption(task: Task, prediction: dict[str, Any], rollout: Rollout | None, tool: str | None = None) -> Grade:
    """Grade 1 if at least one tool call (of `tool`, if given) ran without an error."""
    calls = [call for call in calls_of(prediction, rollout) if tool is None or call["name"] == tool]
    if any(call["error"] is None for call in calls):
        return Grade(value=1.0)
    if not calls:
        return Grade.of(False, f"{tool} was not called." if tool else "No tool was called.")
    return Grade.of(False, f"Every call of {tool or 'a tool'} failed: {calls[-1]['error']}.")


def steps_used(task: Task, prediction: dict[str, Any], rollout: Rollout | None, budget: Limit) -> Grade:
    """For a pitfall: 0 up to `budget` LM calls, rising linearly to 1 at twice the budget."""
    if rollout is None:
        raise NoGrade("the number of LM calls is unknown without a rollout")
    used = len(rollout.transitions)
    return Grade.beyond(used, budget, f"{used} LM calls, the budget is {budget}.")


def thinking(
    task: Task, prediction: dict[str, Any], rollout: Rollout | None, *, budget: Limit, wasted: bool = False
) -> Grade:
    """1.0 for a run without thinking tokens, 0.0 from `budget` of them on, linear in between; 0.0 for a loop.

    With `wasted`, only the tokens count that were spent after the answer was first stable. Combine it with
    `when: NAME` of a criterion for right answers, so that it does not teach hard tasks to think less.

    Raises:
        NoGrade: no rollout, or a call thought and the server did not count its tokens.
    """
    if rollout is None or not rollout.transitions:
        raise NoGrade("no rollout with recorded calls")
    use = thinking_of(rollout)
    spent = use.after_stable if wasted else use.tokens
    if spent is None:
        raise NoGrade("the server did not report its thinking tokens")
    if use.loops:
        return Grade(value=0.0, reason=f"{use.loops} calls ended in a loop")
    return Grade(value=max(0.0, 1 - spent / budget), reason=f"{spent} thinking tokens of {budget}")


def token_use(task: Task, prediction: dict[str, Any], rollout: Rollout | None, budget: Limit) -> Grade:
    """For a pitfall: 0 up to `budget` tokens, rising linearly to 1 at twice the budget."""
    if rollout is None:
        raise NoGrade("the number of tokens is unknown without a rollout")
    return Grade.beyond(rollout.tokens, budget, f"{rollout.tokens} tokens, the budget is {budget}.")


_REFUSAL = re.compile(
    r"\b(?:sorry|afraid)\b.{0,40}?\b(?:can(?:no|'?)t|unable|not able)"
    r"|\b(?:i|we)\s+(?:can(?:no|'?)t|am unable to|are unable to|am not able to|won'?t|will not|must decline)\b"
    r".{0,40}?\b(?:help|assist|answer|provide|comply|do that|discuss|fulfil)"
    r"|\bas an? (?:ai|language model)\b.{0,80}?\b(?:can(?:no|'?)t|unable|not able)",
    re.IGNORECASE | re.DOTALL,
)


def refusal(task: Task, prediction: dict[str, Any], rollout: Rollout | None, field: str | None = None) -> Grade:
    """For a pitfall: grade 1 if the answer begins with a refusal in English. Reads the first 300 characters."""
    refused = any(_REFUSAL.search(text[:300].replace("’", "'")) for text in _written(prediction, field))
    return Grade(value=float(refused), reason="The answer is a refusal." if refused else "")
