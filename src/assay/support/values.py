"""The border where values leave Python: `json_value` makes JSON values of them. Missing values, stored forms.

Does not import dspy, numpy, pandas or pydantic: a value of their types exists only where they are loaded.
"""

import base64
import dataclasses
import hashlib
import json
import math
import re
import sys
from collections import UserString
from collections.abc import Callable, Mapping, Sequence, Set
from datetime import date, time
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from itertools import pairwise
from pathlib import PurePath
from typing import Any

from assay.errors import AssayError, NoJsonForm

_DEEPEST = 200
_LONGEST_PATH = 300  # characters
_MOST_DIGITS = 400  # of a decimal as a number
_MOST_BITS = 14_000  # of an integer: about 4,300 digits, the limit of Python's int-to-str conversion
_TABLES = ("jaxlib", "numpy", "pandas", "polars", "pyarrow", "torch")  # packages of arrays, tables and their items
_MISSING = ("NAType", "NaTType")  # of pandas
_LISTING = ("to_dicts", "to_pylist", "to_list", "as_py", "tolist")  # methods that give built-in values
_MARK = "<<CUSTOM-TYPE-START-IDENTIFIER>>"  # DSPy serializes its media types to a part of a prompt, which starts so
_RAISED = (Exception, SystemExit, GeneratorExit)  # by methods of a program's own classes


def json_value(value: Any, *, placeholders: bool = False) -> Any:
    """A value as JSON: None, bool, int, finite float, str, and lists and dictionaries of them, with text as keys.

    - Members of enums become their values. Tuples (named ones too), sequences and arrays become lists, sets sorted
      lists. Data classes, attrs classes, pydantic models and `dspy.Example`s become objects of their fields; a model's
      own serializers are used.
    - Dates and times become ISO 8601 text, durations too (`PT1H30M`). UUIDs, paths, URLs and addresses become text,
      bytes a data URI (`data:application/octet-stream;base64,…`), an exception its type and message.
    - A `Decimal` or `Fraction` becomes a number if the JSON number has exactly its value, otherwise text.
    - NaN, infinities and the missing values of pandas become null. Integers of more than about 4,300 digits become
      hexadecimal text, lone surrogates U+FFFD.
    - `dspy.Image`, `Audio` and `File` become objects of their fields. DSPy's other types become what DSPy serializes
      them to: `History` an object of its messages, `Code` and `Reasoning` their text.

    Args:
        placeholders: write a short text in brackets in place of a value that has no JSON form. For records of what
            happened, which must not fail.
    Raises:
        NoJsonForm: the value or a part of it has no JSON form, contains itself or is nested more than 200 deep, or two
            keys of a mapping have the same text. The message gives the path and the type.
    """
    return _Conversion(placeholders).plain(value)


def digest_of(value: Any) -> str:
    """16 hexadecimal digits that identify settings and other values exactly. Tasks are compared by their keys."""
    return hashlib.sha256(json_text(value, sort_keys=True).encode()).hexdigest()[:16]


def json_text(value: Any, *, sort_keys: bool = False, indent: int | None = None) -> str:
    """A value as JSON text, in the form of `json_value` with placeholders. It can be encoded as UTF-8."""
    return json.dumps(
        json_value(value, placeholders=True), ensure_ascii=False, allow_nan=False, sort_keys=sort_keys, indent=indent
    )


def value_text(value: Any) -> str:
    """A value as text: a text as it is (also that of a date, or an enum's member), any other value as JSON text."""
    if type(value) is str:
        return value
    plain = json_value(value, placeholders=True)
    return plain if isinstance(plain, str) else json_text(plain)


def unicode_text(text: str) -> str:
    """The text with U+FFFD in place of lone surrogates, which no encoding, model or database takes."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class _NoForm(Exception):
    """An object has no JSON form."""


class _Conversion:
    """State of one call: the path of the current value, and the ids of the values that contain it."""

    def __init__(self, placeholders: bool) -> None:
        self.placeholders = placeholders
        self.path: list[str | int] = []
        self.around: set[int] = set()

    def plain(self, value: Any) -> Any:
        if value is None or type(value) in (str, bool, int, float):
            return _scalar(value)
        if id(value) in self.around:
            return self.refused("contains itself", "contains itself")
        if len(self.around) >= _DEEPEST:
            return self.refused(f"is nested more than {_DEEPEST} deep", "nested too deep")
        self.around.add(id(value))
        try:
            inner = value if type(value) in (dict, list) else self.opened(value)
            if type(inner) is dict:
                return self.mapping(inner)
            if type(inner) is not list:
                return inner if inner is None or type(inner) in (str, bool, int, float) else self.plain(inner)
            items = self.sequence(inner)
            return _sorted(items) if isinstance(value, Set) else items
        finally:
            self.around.discard(id(value))

    def opened(self, value: Any) -> Any:
        """One level of a value as built-in types: a scalar, or a `dict` or `list` of parts that are not converted."""
        try:
            return _scalar(_opened(value))
        except _RAISED as error:  # a program's own class may raise anything where it is read
            raised = "" if isinstance(error, _NoForm) else f" ({type(error).__name__})"
            return self.refused(f"has the type {_name(value)}, which has no JSON form{raised}", _no_form(value))

    def mapping(self, values: dict[Any, Any]) -> dict[str, Any]:
        plain: dict[str, Any] = {}
        for key, item in values.items():
            self.path.append("a key")
            name = _scalar(key) if type(key) is str else self.key(key)
            self.path[-1] = name
            if name in plain:
                plain[name] = self.refused("has two keys of this text in its mapping", "two keys have this text")
            else:
                plain[name] = self.plain(item)
            self.path.pop()
        return plain

    def sequence(self, values: list[Any]) -> list[Any]:
        items = []
        for at, item in enumerate(values):
            self.path.append(at)
            items.append(self.plain(item))
            self.path.pop()
        return items

    def key(self, key: Any) -> str:
        plain = self.plain(key)
        if isinstance(plain, dict | list):
            return self.refused(f"has the type {_name(key)}, which cannot be a key in JSON", _no_form(key))
        return plain if isinstance(plain, str) else json.dumps(plain)

    def refused(self, why: str, placeholder: str) -> str:
        if self.placeholders:
            return f"[{placeholder}]"
        parts = (f"[{part}]" if isinstance(part, int) else f".{part[:80]}" for part in self.path)
        path = "".join(parts).removeprefix(".")
        path = path if len(path) <= _LONGEST_PATH else f"{path[:_LONGEST_PATH]}…"
        raise NoJsonForm(f"the value at {path} {why}" if path else f"the value {why}", path=path)


def _name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _no_form(value: Any) -> str:
    return f"no JSON form: {_name(value)}"


def _scalar(value: Any) -> Any:
    """A scalar of a built-in type in a form that JSON has; other values unchanged."""
    kind = type(value)
    if kind is str:
        return unicode_text(value)
    if kind is float:
        return value if math.isfinite(value) else None
    return hex(value) if kind is int and value.bit_length() > _MOST_BITS else value


def _opened(value: Any) -> Any:  # one case per kind of value
    """See `_Conversion.opened`. Raises `_NoForm` for an object without a JSON form."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str | UserString):
        return str(value) if isinstance(value, UserString) else str.__str__(value)
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, Decimal | Fraction):
        return _number(value)
    if isinstance(value, date | time):
        return value.isoformat() if value == value else None  # `NaT` of pandas differs from itself
    if isinstance(value, bytes | bytearray | memoryview):
        return f"data:application/octet-stream;base64,{base64.b64encode(value).decode()}"
    if hasattr(type(value), "__pydantic_serializer__") and hasattr(value, "model_dump"):
        return _of_model(value)
    if type(value).__module__.partition(".")[0] in _TABLES:
        return _of_table(value)
    example = getattr(sys.modules.get("dspy"), "Example", None)
    if isinstance(value, Mapping) or (example is not None and isinstance(value, example)):
        return dict(value.items())
    if isinstance(value, Sequence | Set):
        return list(value)
    if isinstance(value, type):
        raise _NoForm
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(type(value), "__attrs_attrs__"):
        return {field.name: getattr(value, field.name) for field in value.__attrs_attrs__}
    if hasattr(type(value), "__fields__") and hasattr(value, "dict"):  # a model of pydantic 1
        return value.dict()
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    if hasattr(value, "__next__"):  # reading an iterator would empty it
        raise _NoForm
    return _by_pydantic(value)


def _by_pydantic(value: Any) -> Any:
    """Durations, UUIDs, URLs, addresses and what else pydantic knows."""
    from pydantic_core import PydanticSerializationError, to_jsonable_python

    try:
        return to_jsonable_python(value)
    except PydanticSerializationError:
        raise _NoForm from None


def _number(value: Decimal | Fraction) -> int | float | str | None:
    if isinstance(value, Decimal) and not value.is_finite():
        return None
    if isinstance(value, Decimal) and abs(value.adjusted()) > _MOST_DIGITS:  # slow to write out
        return str(value)
    if value == (whole := int(value)) and whole.bit_length() <= _MOST_BITS:
        return whole
    number = float(value)
    same = type(value)(repr(number)) == value if math.isfinite(number) else False
    return number if same else str(value)


def _of_model(model: Any) -> Any:
    """What a model's serializers make of it, except for the fields that hold media types of DSPy."""
    own = model.__pydantic_decorators__
    serializers = [*own.field_serializers.values(), *own.model_serializers.values()]
    for_json = any(str(serializer.info.when_used).startswith("json") for serializer in serializers)
    # by alias, because validation reads that
    dumped = model.model_dump(mode="json" if for_json else "python", by_alias=True)
    if not _is_marked(dumped):
        return dumped
    if not isinstance(dumped, dict):
        return getattr(model, "root", dict(model))
    fields = type(model).model_fields.items()
    names: dict[Any, str] = {info.serialization_alias or info.alias or name: name for name, info in fields}
    return {
        key: getattr(model, names.get(key) or str(key), part) if _is_marked(part) else part
        for key, part in dumped.items()
    }


def _is_marked(value: Any) -> bool:
    if isinstance(value, str):
        return value.startswith(_MARK)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ()
    return any(_is_marked(part) for part in parts)


def _of_table(value: Any) -> Any:
    """An array, a table or one of their items as built-in values."""
    if type(value).__name__ in _MISSING:
        return None
    dtype_kind = getattr(getattr(value, "dtype", None), "kind", "")
    if dtype_kind in ("M", "m") and hasattr(value, "astype"):  # `numpy.datetime64`, `timedelta64` and their arrays
        if getattr(value, "ndim", 0):
            return list(value)
        item = value[()].item() if value == value else None
        return value.astype(f"{dtype_kind}8[us]").item() if isinstance(item, int) else item  # nanoseconds
    if hasattr(value, "columns") and hasattr(value, "to_dict") and not hasattr(value, "to_dicts"):  # of pandas
        return value.to_dict(orient="records")
    method = next((name for name in _LISTING if hasattr(value, name)), None)
    return _by_pydantic(value) if method is None else getattr(value, method)()


def _sorted(items: list[Any]) -> list[Any]:
    try:
        return sorted(items)
    except TypeError:  # of several types
        return sorted(items, key=lambda item: json.dumps(item, sort_keys=True))


def is_missing(value: Any) -> bool:
    """Whether a value means that it is not known: None, NaN of any type, and NaT and NA of pandas.

    The empty cell of a CSV file and null in JSON are read as None. Texts are values, also empty ones and `NA`.
    """
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    if isinstance(value, Decimal):
        return value.is_nan()
    if isinstance(value, float | date) or (hasattr(value, "dtype") and not getattr(value, "ndim", 1)):
        return bool(value != value)
    return False


_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.S)  # the last string may be truncated


def is_json(text: str) -> bool:
    """Whether a text starts like a JSON object or list."""
    return text.lstrip()[:1] in ("{", "[")


def with_values(text: str, changed: Callable[[str, str], str]) -> str:
    """The text with all string values of JSON fields, at any depth, replaced by `changed`. The JSON may be truncated.

    Args:
        changed: called with the name and the value of a field; the text is unchanged where it returns an equal value.
    """
    strings = list(_STRING.finditer(text))
    parts, at = [], 0
    for named, valued in pairwise(strings):
        if text[named.end() : valued.start()].strip() != ":":
            continue
        value = _read(valued[0])
        if (new := changed(_read(named[0]), value)) != value:
            parts += [text[at : valued.start()], json.dumps(new, ensure_ascii=valued[0].isascii())]
            at = valued.end()
    return "".join([*parts, text[at:]]) if parts else text


def _read(written: str) -> str:
    if len(written) < 2 or not written.endswith('"'):
        return written[1:]
    try:
        return str(json.loads(written, strict=False))
    except ValueError:
        return written[1:-1]


def rewritten(text: str, value: Any, new: Any) -> str:
    """`new` as JSON in the format in which `text` writes `value`: spaces, line breaks and escapes."""
    for indent in (None, 2, 4, 1, "\t"):
        for separators in ((", ", ": "), (",", ":")) if indent is None else ((",", ": "),):
            for ascii_alone in (True, False):
                if json.dumps(value, indent=indent, separators=separators, ensure_ascii=ascii_alone) == text:
                    return json.dumps(new, indent=indent, separators=separators, ensure_ascii=ascii_alone)
    return json.dumps(new, ensure_ascii=text.isascii())


def check_format(
    what: str, found: object, current: int | str, *, remake: str, error: type[AssayError] = AssayError
) -> None:
    """Refuses a stored form that this version does not write. Nothing converts one form into another.

    Args:
        what: the stored thing, for the message.
        found: its format; whatever was read from the file.
        remake: how to make it again, as an imperative.
    Raises:
        AssayError: of the class `error`; `found` is not `current`.
    """
    if type(found) is type(current) and found == current:
        return
    newer = isinstance(found, int) and isinstance(current, int) and found > current
    way_out = f"Update assay, or {remake}" if newer else f"{remake[0].upper()}{remake[1:]}"
    form = "no format" if found is None else f"format {found!r}"
    raise error(f"{what} has {form}, and this version of assay reads only format {current!r}. {way_out}")
