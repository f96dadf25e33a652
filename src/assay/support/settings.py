"""Settings: frozen dataclasses whose fields are declared once, with type, default, rule and help.

From these declarations come the keywords of the Python functions (`assay.support.keywords`), the flags of the command
line (`assay.cli.flags`) and the keys of `assay.toml` (`assay.runs.project`). Reads no file and loads no heavy package.
"""

import dataclasses
import difflib
import math
import numbers
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Self

from assay.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Declared:
    """Declaration of a field besides its type and default.

    Attributes:
        ge, gt, le, lt: bounds of a number.
        choices: allowed values of a string.
        why: what the bounds are about, added to the error.
        flag: of the command line, where it is not the field's name; two with a slash for a switch
            (`--early-stop/--no-early-stop`).
        many: a sequence is given by repeating the flag; otherwise by one flag with commas.
        job: part of what the job is. False: how far and where it runs, so that another value resumes the same job.
        flag_help: help text of the flag, where the flag says the opposite of the field (`--no-cache` of `cache`).
        file: the value may be a path, which `assay.toml` gives relative to itself.
        parse: brings a value other than None into its stored form; raises ValueError with the broken rule.
        project: `assay.toml` may set it. False for what one call is about, such as the run whose rollouts are listed.
        named: a name of what the Python function takes as an argument of its own, such as the program; the command
            line has no flag for it unless `flag` is given.
    """

    help: str = ""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    choices: tuple[str, ...] = ()
    why: str = ""
    flag: str = ""
    metavar: str | None = None
    many: bool = False
    job: bool = True
    flag_help: str = ""
    file: bool = False
    named: bool = False
    project: bool = True
    parse: Callable[[Any], Any] | None = None

    @property
    def rule(self) -> str:
        """The bounds as text; empty where there are none."""
        low, high = self.gt if self.ge is None else self.ge, self.lt if self.le is None else self.le
        at_least = None if low is None else f"{'above' if self.ge is None else 'at least'} {low:.10g}"
        at_most = None if high is None else f"{'below' if self.le is None else 'at most'} {high:.10g}"
        if self.ge is not None and self.le is not None:
            return f"between {low:.10g} and {high:.10g}"
        return " and ".join(part for part in (at_least, at_most) if part)

    def allows(self, value: float) -> bool:
        """Whether a number is within the bounds."""
        return (
            (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )


class DeclaredFields(typing.TypedDict, total=False):
    """The attributes of `Declared`, besides its help, as keywords."""

    ge: float | None
    gt: float | None
    le: float | None
    lt: float | None
    choices: tuple[str, ...]
    why: str
    flag: str
    metavar: str | None
    many: bool
    job: bool
    flag_help: str
    file: bool
    named: bool
    project: bool
    parse: Callable[[Any], Any] | None


def setting(
    default: Any = MISSING,
    help: str = "",
    *,
    factory: Callable[[], Any] | Any = MISSING,
    **declared: typing.Unpack[DeclaredFields],
) -> Any:
    """A field of a settings class. `declared`: the attributes of `Declared`."""
    metadata = {"setting": Declared(help=help, **declared)}
    if factory is not MISSING:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return (
        dataclasses.field(metadata=metadata)
        if default is MISSING
        else dataclasses.field(default=default, metadata=metadata)
    )


def named_setting(help: str = "", **declared: typing.Unpack[DeclaredFields]) -> Any:
    """A required field that holds the name of an argument of the Python function: program, rubric, data or judge."""
    declared["named"] = True
    return setting(help=help, **declared)


@dataclass(frozen=True)
class Setting:
    """A declared field of a settings class."""

    name: str
    type: Any
    default: Any  # MISSING where it is required
    declared: Declared

    @property
    def required(self) -> bool:
        return self.default is MISSING

    @property
    def plain(self) -> Any:
        """The type without None: `int` of `int | None`."""
        kinds = [kind for kind in members_of_type(self.type) if kind is not type(None)]
        return kinds[0] if len(kinds) == 1 else self.type


_known: dict[Any, dict[str, Setting]] = {}


def settings_of(kind: type[Any]) -> Mapping[str, Setting]:
    """The declared fields of a settings class by name, in their order; fields without `setting` are internal."""
    if kind not in _known:
        _known[kind] = _settings_of(kind)
    return _known[kind]


def _settings_of(kind: type[Any]) -> dict[str, Setting]:
    types_of = typing.get_type_hints(kind)
    settings = {}
    for item in dataclasses.fields(kind):
        if (declared := item.metadata.get("setting")) is not None:
            default = item.default if item.default_factory is MISSING else item.default_factory()
            settings[item.name] = Setting(item.name, types_of[item.name], default, declared)
    return settings


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of all settings classes. Each field is checked against its type and rule when an object is made.

    Raises:
        ConfigError: a value breaks its rule; the message says field, value and rule.
        TypeError: there is no such field; the message names the nearest one.
    """

    def __new__(cls, *args: Any, **values: Any) -> Self:
        known = [field.name for field in dataclasses.fields(cls)]
        for name in values.keys() - set(known):
            hint = f"Did you mean {near!r}?" if (near := nearest(name, known)) else f"It has {', '.join(known)}."
            raise TypeError(f"{cls.__name__} has no field {name!r}. {hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for setting in settings_of(type(self)).values():
            value = getattr(self, setting.name)
            if (plain := _plain(value)) is not value:
                object.__setattr__(self, setting.name, plain)
            stored = check_value(setting, plain)
            if stored is not plain:
                object.__setattr__(self, setting.name, stored)

    def changed(self, *names: str) -> list[str]:
        """Those of the named settings whose values are not the defaults."""
        declared = settings_of(type(self))
        return [name for name in names if _as_tuple(getattr(self, name)) != _as_tuple(declared[name].default)]


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """NumPy numbers as Python numbers, also in a mapping: settings are stored as JSON. Other values are unchanged."""
    if isinstance(value, Mapping) and any(_plain(item) is not item for item in value.values()):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, numbers.Integral) and not isinstance(value, int):
        return int(value)
    if isinstance(value, numbers.Real) and not isinstance(value, int | float):
        return float(value)
    return value


def check_value(setting: Setting, value: Any) -> Any:
    """Checks a value of a field.

    Returns:
        The value in its stored form, see `Declared.parse`.
    Raises:
        ConfigError: it is of another type than the field, empty, out of its bounds, or none of its choices.
    """
    assignment, declared = f"{setting.name}={value!r}", setting.declared
    if not _fits(value, setting.type):
        raise ConfigError(f"{assignment} must be {_words(setting.type)}")
    if declared.parse is None and _is_blank(value) and not _is_blank(setting.default):
        raise ConfigError(f"{assignment} must not be empty")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{assignment} must be a finite number{f' {declared.rule}' if declared.rule else ''}")
    if isinstance(value, int | float) and not isinstance(value, bool) and not declared.allows(value):
        raise ConfigError(f"{assignment} must be {declared.rule}{f': {declared.why}' if declared.why else ''}")
    if declared.choices and isinstance(value, str) and value not in declared.choices:
        raise ConfigError(f"{assignment} {one_of(value, declared.choices)}")
    if declared.parse is None or value is None:
        return value
    try:
        return declared.parse(value)
    except ValueError as error:
        raise ConfigError(f"{assignment} {error}") from None


def _is_blank(value: Any) -> bool:
    """Whether a text is empty, or one in a list; a flag gets one from an environment variable that is not set."""
    texts = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(text, str) and not text.strip() for text in texts)


LARGEST_SEED = 2**32 - 1  # NumPy and transformers take no larger one, and the store's column has 64 bits


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that an unknown one was probably meant to be."""
    by_text = {text.lower(): text for text in known}  # case is not a difference: GEPA is near to gepa
    close = difflib.get_close_matches(name.lower(), list(by_text), 1)
    return by_text[close[0]] if close else None


def one_of(value: object, choices: Iterable[str], *, other: str = "") -> str:
    """The rule that a value breaks which is none of the choices, with the nearest one: the end of an error message.

    Args:
        other: text that says what is allowed besides the choices.
    """
    listed = [str(choice) for choice in choices]
    near = nearest(value, listed) if isinstance(value, str) else None
    hint = f". Did you mean {near!r}?" if near else ""
    return f"must be one of {', '.join(listed)}{f', or {other}' if other else ''}{hint}"


def members_of_type(kind: Any) -> tuple[Any, ...]:
    """The members of a union; any other type alone."""
    return (
        typing.get_args(kind)
        if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
        else (kind,)
    )


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a type. An integer is a number; True and False are not."""
    members = members_of_type(kind)
    if len(members) > 1:
        return any(_fits(value, member) for member in members)
    if kind is Any:
        return True
    origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin in (int, float):
        return isinstance(value, (int, float) if origin is float else int) and not isinstance(value, bool)
    if origin is Mapping:
        return isinstance(value, Mapping) and (
            not arguments or all(_fits(key, arguments[0]) and _fits(item, arguments[1]) for key, item in value.items())
        )
    if origin is Sequence:
        return isinstance(value, list | tuple) and (not arguments or all(_fits(item, arguments[0]) for item in value))
    if origin is tuple:
        return isinstance(value, list | tuple) and len(value) == len(arguments) and all(map(_fits, value, arguments))
    return isinstance(value, origin)


_WORDS = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "True or False",
    type(None): "None",
    Any: "any value",
    Path: "a Path",
}
_PLURALS = {int: "integers", float: "numbers", str: "strings", Any: "values"}


def _words(kind: Any) -> str:
    """A type as text: `an integer or None`."""
    members = members_of_type(kind)
    if len(members) > 1:
        return " or ".join(map(_words, members))
    origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is Mapping:
        return f"a mapping of {_plural(arguments[0])} to {_plural(arguments[1])}"
    if origin is Sequence:
        return f"a list or tuple of {_plural(arguments[0])}"
    if origin is tuple:
        return f"{len(arguments)} {_plural(arguments[0])}"
    return str(_WORDS.get(kind) or getattr(kind, "__name__", kind))


def _plural(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return f"pairs of {_plural(arguments[0])}"
    if origin is Mapping:
        return "mappings"
    return _PLURALS.get(kind) or _words(kind)
