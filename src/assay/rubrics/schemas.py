"""Validates answers against regular expressions and JSON schemas in bounded time.

The package `jsonschema` uses Python's `re`, whose backtracking can take practically forever while holding the GIL, and
compares list items pairwise for `uniqueItems`. These keywords are replaced here.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from assay.rubrics.criteria import NoGrade

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
