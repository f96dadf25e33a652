"""Values of a program's fields as text in prompts, and back: as DSPy's adapters write and read them."""

import ast
import enum
import json
import types
from typing import Any, Literal, Union, get_args, get_origin

import dspy
import json_repair
import pydantic

from assay.support.values import value_text


def text_of_value(value: Any, annotation: Any) -> str:
    """A value in a prompt: JSON, or a text as it is. A list for a text is numbered."""
    if isinstance(value, list) and annotation is str:
        quoted = [_quoted(item) for item in value]
        if len(quoted) < 2:
            return quoted[0] if quoted else "N/A"
        return "\n".join(f"[{number}] {text}" for number, text in enumerate(quoted, 1))
    try:
        plain = pydantic.TypeAdapter(type(value)).dump_python(value, mode="json", fallback=value_text)
    except Exception:  # of a class that pydantic does not know
        return value_text(value)
    return json.dumps(plain, ensure_ascii=False) if isinstance(plain, dict | list) else str(plain)


def _quoted(text: Any) -> str:
    if not any(mark in text for mark in "\n«»"):
        return f"«{text}»"
    lines = text.replace("\n", "\n    ")
    return f"«««\n    {lines}\n»»»"


def value_in(text: Any, annotation: Any) -> Any:
    """The value that a text of an answer stands for, in the type of its field.

    Raises:
        ValueError: it is none of this type.
    """
    if annotation is str:
        return str(text)
    if isinstance(annotation, enum.EnumMeta):
        return _member(annotation, text)
    kind, choices = get_origin(annotation), get_args(annotation)
    if kind is Literal:
        for written in (text, _unquoted(text)):
            if written in choices:
                return written
        text = _unquoted(text)
    adapter = pydantic.TypeAdapter(annotation)
    optional_text = kind in (Union, types.UnionType) and str in choices and type(None) in choices
    if not isinstance(text, str) or optional_text:
        return adapter.validate_python(text)
    try:
        return adapter.validate_python(_read(text))
    except pydantic.ValidationError:
        if isinstance(annotation, type) and issubclass(annotation, dspy.Type):  # which may read a text itself
            return adapter.validate_python(text)
        raise


def _member(kind: Any, written: Any) -> Any:
    for member in kind:
        if member.value == written:
            return member
    if isinstance(written, str) and written in kind.__members__:
        return kind[written]
    raise ValueError(f"{written!r} is neither a value nor a name of {kind.__name__}")


def _unquoted(text: Any) -> Any:
    """A choice without the forms in which models quote it: `Literal['a']`, `str[a]`, `'a'`."""
    if not isinstance(text, str):
        return text
    text = text.strip()
    if text.startswith(("Literal[", "str[")) and text.endswith("]"):
        text = text[text.find("[") + 1 : -1]
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def _read(text: str) -> Any:
    """The JSON in a text, also if it is damaged; else the Python literal; else the text."""
    value = json_repair.loads(text)
    if value != "" or text == "":
        return value
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
