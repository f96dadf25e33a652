"""Parts of dataset specs: their options, and kinds whose rows come from a higher package."""

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any
from urllib.parse import parse_qsl

from assay.errors import DataError
from assay.support.settings import nearest

__all__ = ["Row", "number_of", "options_of", "register_kind", "registered"]

Row = tuple[str, dict[str, Any]]  # (place for error messages, fields)
_readers: dict[str, str] = {}


def register_kind(kind: str, reader: str) -> None:
    """Registers the reader of specs that begin with `kind:`.

    Args:
        reader: `module:function`, imported at first use. The function takes the rest of the spec and returns rows.
    """
    _readers[kind] = reader


def registered(kind: str) -> Callable[[str], Iterator[Row]] | None:
    """The reader of a registered kind, None for any other."""
    if kind not in _readers:
        return None
    module, _, name = _readers[kind].partition(":")
    reader: Callable[[str], Iterator[Row]] = getattr(import_module(module), name)
    return reader


def options_of(text: str, allowed: Iterable[str], spec: str) -> dict[str, str]:
    """Options of a spec, `NAME=VALUE&NAME=VALUE`.

    Raises:
        DataError: another form, or an unknown name.
    """
    try:
        options = dict(parse_qsl(text.replace("+", "%2B"), keep_blank_values=True, strict_parsing=bool(text)))
    except ValueError:
        raise DataError(f"{spec}: {text!r} is not NAME=VALUE&NAME=VALUE") from None
    if unknown := sorted(options.keys() - (allowed := set(allowed))):
        close = nearest(unknown[0], allowed)
        hint = f" Did you mean {close!r}?" if close else ""
        raise DataError(f"{spec}: unknown option {unknown[0]!r}.{hint} The options are {', '.join(sorted(allowed))}")
    return options


def number_of(options: dict[str, str], name: str, default: int, *, at_least: int = 0) -> int:
    """An option that is an integer.

    Raises:
        DataError: no integer, or too small.
    """
    try:
        value = int(options.get(name, default))
    except ValueError:
        value = at_least - 1
    if value < at_least:
        raise DataError(f"the data's option {name} is {options[name]!r}: it must be an integer >= {at_least}")
    return value
