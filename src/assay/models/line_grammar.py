"""Grammars for answers of one `name: value` line per field: the prompt format `lean`. Does not sample."""

import json
import re
from typing import Any

LINES = "x-assay-lines"  # schema keyword: one `name: value` line per property, in order

# of patterns in a grammar: a character class, or a character that has no meaning in regular expressions
_ATOM, _TIMES = r"(?:\[(?:[^\]\\]|\\.)+\]|[A-Za-z0-9 ,:;_=/-])", r"(?:\{\d+(?:,\d+)?\}|[+*?])?"


def lines_grammar(schema: dict[str, Any]) -> str:
    """GBNF grammar for an object schema, written as one `name: value` line per property, in order, all required.

    Enums, numbers, booleans, and strings whose `pattern` is a sequence of characters and character classes with
    repetitions are constrained exactly, and so are objects and arrays. Any other value is one line of text, to be
    validated after parsing.
    """
    if any(_is_nested(value) for value in schema["properties"].values()):
        return _nested_lines_grammar(schema)
    rows = [f"{json.dumps(f'{name}: ')} {_value_rule(value)}" for name, value in schema["properties"].items()]
    # The optional last newline is needed by models trained to end a turn with one: they do not stop without it.
    return "root ::= " + ' "\\n" '.join(rows) + ' "\\n"?'


def _is_nested(schema: dict[str, Any]) -> bool:
    return schema.get("type") in ("object", "array")


def _nested_lines_grammar(schema: dict[str, Any]) -> str:
    """As `lines_grammar`, with objects and arrays as JSON on one line, in llguidance's dialect of Lark."""
    compact = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    rows, rules = [], []
    for number, (name, value) in enumerate(schema["properties"].items()):
        rows.append(f"{json.dumps(f'{name}: ', ensure_ascii=False)} v{number}")
        if _is_nested(value):
            rules.append(f"v{number}: %json {json.dumps({**value, 'x-guidance': compact}, ensure_ascii=False)}")
        elif "enum" in value or "const" in value:
            choices = value.get("enum", [value.get("const")])
            rules.append(f"v{number}: " + " | ".join(json.dumps(str(one), ensure_ascii=False) for one in choices))
        else:
            rules.append(f"v{number}: /{_line_pattern(value)}/")
    return "\n".join(["%llguidance {}", "start: " + ' "\\n" '.join(rows) + ' "\\n"?', *rules])


def _line_pattern(schema: dict[str, Any]) -> str:
    """Regular expression of a number, boolean or text on one line."""
    kinds = {"integer": "-?[0-9]{1,18}", "number": r"-?[0-9]{1,18}(\.[0-9]{1,12})?", "boolean": "(true|false)"}
    return kinds.get(schema.get("type", ""), f"[^\\n]{{1,{schema.get('maxLength', 2000)}}}")


def _value_rule(schema: dict[str, Any]) -> str:
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return "(" + " | ".join(json.dumps(str(value)) for value in values) + ")"
    kind = schema.get("type")
    if kind == "integer":
        return '"-"? [0-9]{1,18}'
    if kind == "number":
        return '"-"? [0-9]{1,18} ("." [0-9]{1,12})?'
    if kind == "boolean":
        return '("true" | "false")'
    pattern = schema.get("pattern", "")
    if re.fullmatch(rf"\^(?:{_ATOM}{_TIMES})+\$", pattern):
        return " ".join(
            f"{atom if len(atom) > 1 else json.dumps(atom)}{times}"
            for atom, times in re.findall(f"({_ATOM})({_TIMES})", pattern[1:-1])
        )
    return f"[^\\n]{{1,{schema.get('maxLength', 2000)}}}"
