"""Options: fields of frozen dataclasses. A field with its type, default and docstring is the whole declaration.

The Python function (`function_of`), the command line (`assay.cli`), the keys of `assay.toml` (`assay.commands.project`)
and the reference are derived from these fields. pydantic is loaded when the first object is made, not when a class is
defined. A preset is a TOML file of such settings, shipped in `optimizers/` or a user's own copy.
"""

import ast
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import MISSING, Field, dataclass, field, fields
from itertools import pairwise
from operator import or_
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    ParamSpec,
    Protocol,
    Self,
    TypeAlias,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints as types_of,
)

from annotated_types import BaseMetadata, Ge, Gt, Le

from assay.errors import ConfigError
from assay.support.names import keyword_hint, nearest
from assay.support.package import CONTENT
from assay.support.places import no_such_file

P = ParamSpec("P")
R = TypeVar("R", covariant=True)
T = TypeVar("T")
S = TypeVar("S", bound="Settings")
_SIGNS = {"Ge": ">=", "Gt": ">", "Le": "<=", "Lt": "<"}
_RULES = {  # kinds of errors of pydantic
    "sequence_str": "a list of texts", "finite_number": "a finite number", "string_type": "a text",
    "bool_type": "true or false", "bool_parsing": "true or false", "dict_type": "a mapping",
    "mapping_type": "a mapping", "int_type": "an integer", "int_parsing": "an integer", "int_from_float": "an integer",
    "float_type": "a number", "float_parsing": "a number", "path_type": "a path",
}  # fmt: skip
_LONGEST = 200  # characters of a value in a message
_SCALARS = (bool, int, float, str, Path, NoneType)
LARGEST_SEED = 2**32 - 1  # NumPy and transformers take no larger one, and the store's column has 64 bits


@dataclass(frozen=True)
class Flag:
    """What the command line and the project file need besides name, type, default and docstring of a field.

    Attributes:
        name: the flag, where it is not the field's name; two with a slash for a switch
            (`--demos/--without-demos`), of which the first may be blank.
        metavar: the word for its value in the help.
        env: an environment variable that sets it.
        path: the value may be a path, which the project file gives relative to itself.
        commas: a list is one value with commas; otherwise the flag is repeated.
        key: the project file may set it. False for what one call is about, such as the run whose rollouts are listed.
        stored: a setting of a job that is stored with it although the project file may not set it.
        job: part of what a job is. False: how far and where it runs, so that another value resumes the same job.
        shown: the command line has it. False for objects, which only Python can give.
    """

    name: str = ""
    metavar: str = ""
    env: str = ""
    path: bool = False
    commas: bool = False
    key: bool = True
    stored: bool = False
    job: bool = True
    shown: bool = True


# of a setting that hardly anybody changes: a keyword of Python, and a setting of a preset file
EXPERT = Flag(key=False, stored=True, shown=False)


@dataclass(frozen=True)
class OneOf:
    """The allowed values of a text, where they are known only at run time; otherwise a type is a `Literal`."""

    choices: tuple[str, ...]


@dataclass(frozen=True)
class Parse:
    """Brings a value other than None into its stored form; `function` raises ValueError with the broken rule."""

    function: Callable[[Any], Any]


class _Lenient:
    """Metadata of a tuple, for which pydantic takes a list too, as files have no other."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        return {**handler(source), "strict": False}


Count: TypeAlias = Annotated[int, Ge(0)]
Positive: TypeAlias = Annotated[int, Ge(1)]
Share: TypeAlias = Annotated[float, Ge(0), Le(1)]
Seconds: TypeAlias = Annotated[float, Gt(0), Flag(metavar="SECONDS")]
Pair: TypeAlias = Annotated[tuple[float, float], _Lenient()]
Items: TypeAlias = Annotated[tuple[T, ...], _Lenient()]  # a list is stored as a tuple
Seed: TypeAlias = Annotated[int, Ge(0), Le(LARGEST_SEED)]


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
class Settings:
    """Base of all groups of settings and of all commands: a subclass is a frozen dataclass, checked when it is made.

    Raises:
        ConfigError: a value breaks its rule; `field` names the setting.
    """

    def __init_subclass__(cls) -> None:
        cls.__doc__ = cls.__doc__ or f"{cls.__name__}."  # `python -OO` removes docstrings
        dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for name, value in _stored(options_of(kind), vars(self), _adapter_of(kind)).items():
            object.__setattr__(self, name, value)
        for base in type(self).__mro__[::-1]:
            if rules := vars(base).get("check"):
                rules(self)

    @classmethod
    def of(cls, values: Any) -> Self:
        """The settings in a mapping, as a file has them: None is an empty one. Settings are returned as they are.

        Raises:
            ConfigError: it is not a mapping, or a setting is unknown or breaks its rule; `field` names it, also in
                settings of settings (`steps.0.weight`).
        """
        if isinstance(values, cls):
            return values
        values = {} if values is None else values
        if not isinstance(values, Mapping):
            raise ConfigError(f"must be a mapping of its settings, not {_shown(values)}")
        kind: Any = cls
        known = options_of(kind)
        for name in values:
            if name not in known:
                near = nearest(str(name), known)
                hint = f"Did you mean {near!r}?" if near else f"There are {', '.join(known)}."
                raise ConfigError("is not a setting", field=str(name), hint=hint)
        for name, option in known.items():
            if option.required and name not in values:
                raise ConfigError("is missing", field=name)
        return cls(**values)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Callable[[Any], Any]) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(cls.of)

    def check(self) -> None:
        """Rules about several settings of this class; raises `ConfigError`. Those of its groups hold as well."""

    def scope(self) -> AbstractContextManager[None]:
        """What surrounds `run`, if anything."""
        return nullcontext()

    @classmethod
    def of_file(cls, stored: Mapping[str, Any], given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Those settings of the project file that hold beside the ones given on the command line."""
        return stored

    def part(self, kind: type[S]) -> S:
        """The settings of one of the classes that this one inherits, as an object of it."""
        listed: Any = kind
        return kind(**{name: getattr(self, name) for name in options_of(listed)})

    def changed(self, *names: str) -> list[str]:
        """Those of the named settings whose values are not the defaults."""
        kind: Any = type(self)
        return [name for name in names if not _is_default(options_of(kind)[name], getattr(self, name))]


def _is_default(option: "Option", value: Any) -> bool:
    return bool((tuple(value) if isinstance(value, list) else value) == option.default)


class Command(Protocol[R]):
    """Settings that can be run."""

    def run(self) -> R: ...

    def scope(self) -> AbstractContextManager[None]: ...


def function_of(command: Callable[P, Command[R]], name: str) -> Callable[P, R]:
    """The Python function of a command. Its parameters are the command's fields, also for type checkers.

    It raises `TypeError` for an unknown keyword; the message names the nearest one.
    """
    kind: Any = command

    def call(*args: P.args, **values: P.kwargs) -> R:
        _bound(name, inspect.signature(call), args, values)
        settings = command(*args, **values)
        with settings.scope():
            return settings.run()

    types, signature = types_of(kind), inspect.signature(kind)
    listed = [item.replace(annotation=types[key]) for key, item in signature.parameters.items()]
    signature = signature.replace(parameters=listed, return_annotation=types_of(kind.run)["return"])
    shown = {"signature": signature, "name": name, "qualname": name, "doc": kind.__doc__, "module": kind.__module__}
    for key, value in shown.items():
        setattr(call, f"__{key}__", value)
    return call


def takes(function: Callable[P, T]) -> Callable[P, T]:
    """A public function that is not a command, with its arguments checked.

    Those whose types are scalars are checked as options are: a text in place of a bool would count as True. An unknown
    keyword is a `TypeError` that names the nearest one. For a class, decorate its `__init__`.
    """
    signature = inspect.signature(function)
    options = {
        name: option_of(name, item.annotation, item.default)
        for name, item in signature.parameters.items()
        if all(kind in _SCALARS for kind in (get_args(item.annotation) or (item.annotation,)))
    }
    called = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

    @functools.cache
    def adapter() -> Any:
        return _adapter(called, {name: option.annotation for name, option in options.items()})

    @functools.wraps(function)
    def call(*args: P.args, **values: P.kwargs) -> T:
        bound = _bound(called, signature, args, values)
        bound.apply_defaults()
        _stored(options, {name: bound.arguments[name] for name in options}, adapter())
        return function(*args, **values)

    return call


def _bound(
    name: str, signature: inspect.Signature, args: Sequence[Any], values: Mapping[str, Any]
) -> inspect.BoundArguments:
    """The arguments of a call by name; `TypeError` for an unknown keyword, with the nearest one."""
    known = [key for key in signature.parameters if key != "self"]
    if unknown := [key for key in values if key not in known]:
        near = keyword_hint(unknown[0], known)
        hint = f"Did you mean {near}?" if near else f"It takes {', '.join(known)}."
        raise TypeError(f"{name}() got an unexpected keyword {unknown[0]!r}. {hint}")
    try:
        return signature.bind(*args, **values)
    except TypeError as error:
        raise TypeError(f"{name}(): {error}") from None


@dataclass(frozen=True)
class Option:
    """One field of a settings class, as the surfaces see it."""

    name: str
    type: Any  # without None and without metadata
    annotation: Any  # as it is declared
    default: Any  # MISSING where it is required
    help: str = ""
    group: str = ""  # the first line of the group that declares it; empty for a command's own
    flag: Flag = Flag()
    rule: str = ""  # the bounds as text: ">=0, <1"
    choices: tuple[str, ...] = ()
    parse: Callable[[Any], Any] | None = None
    positional: bool = False

    @property
    def flag_name(self) -> str:
        """The setting as the command line writes it."""
        names = self.flag.name.strip(" /").split("/")
        name = names[0 if self.type is bool else -1]
        return self.name.upper() if self.positional else name or f"--{self.name.replace('_', '-')}"

    @property
    def switch(self) -> str:
        """The words of a switch; two where it is on by default, so that it can be turned off and, over a file, on."""
        return self.flag.name or (f"{self.flag_name}/--no-{self.flag_name[2:]}" if self.default else self.flag_name)

    @property
    def required(self) -> bool:
        return self.default is MISSING

    def checked(self, value: Any) -> Any:
        """A value in its stored form, if it fits type, bounds and choices; otherwise raises `ConfigError`."""
        return _stored({self.name: self}, {self.name: value}, _adapter(self.name, {self.name: self.annotation}))[
            self.name
        ]


@functools.cache
def options_of(kind: Any) -> Mapping[str, Option]:
    """The options that a command or a group of settings declares or inherits, by name."""
    types, helps = types_of(kind, include_extras=True), _docstrings(kind)
    return {item.name: _option(kind, item, types[item.name], helps.get(item.name, "")) for item in fields(kind)}


def _option(kind: Any, item: "Field[Any]", annotation: Any, help: str) -> Option:
    owner = next(base for base in kind.__mro__[::-1] if item.name in getattr(base, "__dataclass_fields__", {}))
    is_own = owner is kind or hasattr(owner, "run")  # a command that inherits another one has its options as own
    group = "" if is_own else str(owner.__doc__).partition("\n")[0].rstrip(".")
    default = item.default if item.default_factory is MISSING else item.default_factory()
    return option_of(item.name, annotation, default, help, group, positional=not item.kw_only)


def option_of(
    name: str, annotation: Any, default: Any, help: str = "", group: str = "", *, positional: bool = False
) -> Option:
    """An option with this annotation."""
    type_, extras = _unpacked(annotation)
    flag = next((extra for extra in extras if isinstance(extra, Flag)), Flag())
    bounds = {type(extra).__name__: extra for extra in extras if isinstance(extra, BaseMetadata)}
    rule = ", ".join(
        f"{sign}{getattr(bounds[kind], kind.lower()):.10g}" for kind, sign in _SIGNS.items() if kind in bounds
    )
    listed = get_args(type_) if get_origin(type_) is Literal else ()
    choices = next((extra.choices for extra in extras if isinstance(extra, OneOf)), listed)
    parse = next((extra.function for extra in extras if isinstance(extra, Parse)), None)
    return Option(name, type_, annotation, default, help, group, flag, rule, choices, parse, positional)


def _unpacked(annotation: Any) -> tuple[Any, list[Any]]:
    """A type without None and metadata, and the metadata of its members, the outermost first."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        kind, extras = _unpacked(arguments[0])
        return kind, [*arguments[:0:-1], *extras]
    if origin in (UnionType, Union):
        parts = [_unpacked(member) for member in arguments if member is not NoneType]
        return functools.reduce(or_, (kind for kind, _ in parts)), [extra for _, extras in parts for extra in extras]
    return annotation, []


def _docstrings(kind: Any) -> Mapping[str, str]:
    """The docstring under each field of a class and of its bases."""
    texts: dict[str, str] = {}
    for base in kind.__mro__[-3::-1]:  # without `Settings` and `object`
        texts |= _docstrings_in(base.__module__).get(base.__name__, {})
    return texts


@functools.cache
def _docstrings_in(module: str) -> Mapping[str, Mapping[str, str]]:
    """The docstring under each field of the classes of a module; empty if its source is not there."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):
        return {}
    return {item.name: dict(_documented(item)) for item in tree.body if isinstance(item, ast.ClassDef)}


def _documented(definition: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for line, below in pairwise(definition.body):
        if isinstance(line, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            yield ast.unparse(line.target), " ".join(str(below.value.value).split())


def _stored(options: Mapping[str, Option], values: Mapping[str, Any], adapter: Any) -> Mapping[str, Any]:
    """Values in their stored form, if they fit their options; raises `ConfigError` about the first that does not."""
    from pydantic import ValidationError

    try:
        fitting = adapter.validate_python({name: _plain(value) for name, value in values.items()})
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        wrong = [item for item in error.errors(include_url=False) if item["loc"][0] == name]
        inner = wrong[0].get("ctx", {}).get("error")
        if isinstance(inner, ConfigError):  # of settings in settings
            place = [*map(str, wrong[0]["loc"]), *filter(None, [inner.field])]
            raise ConfigError(*inner.args, field=".".join(place), hint=inner.hint) from None
        if wrong[0]["type"] == "literal_error":
            raise _not_a_choice(options[name], wrong[0]["input"]) from None
        rules = dict.fromkeys(
            _RULES.get(item["type"])
            or item["msg"].removeprefix("Input should be ").replace("an instance of Path", "a path")
            for item in wrong
        )
        raise ConfigError(f"must be {' or '.join(rules)}, not {_shown(wrong[0]['input'])}", field=name) from None
    for name, value in fitting.items():
        _check_text(options[name], value)
    return {name: _parsed(options[name], value) for name, value in fitting.items()}


def _check_text(option: Option, value: Any) -> None:
    """A text that is blank, which an environment variable that is not set gives, or none of the choices."""
    if option.parse is None and _is_blank(value) and not _is_blank(option.default):
        raise ConfigError("must not be empty", field=option.name)
    if option.choices and isinstance(value, str) and value not in option.choices:
        raise _not_a_choice(option, value)


def _not_a_choice(option: Option, value: Any) -> ConfigError:
    near = nearest(value, option.choices) if isinstance(value, str) else None
    rule = f"must be one of {', '.join(map(str, option.choices))}, not {_shown(value)}"
    return ConfigError(rule, field=option.name, hint=f"Did you mean {near!r}?" if near else "")


def _is_blank(value: Any) -> bool:
    texts = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(text, str) and not text.strip() for text in texts)


def _parsed(option: Option, value: Any) -> Any:
    if option.parse is None or value is None:
        return value
    try:
        return option.parse(value)
    except ValueError as error:
        raise ConfigError(str(error), field=option.name) from None


def _plain(value: Any) -> Any:
    """A scalar of NumPy, or of a package like it, as the value of Python that it is, also in a mapping."""
    if isinstance(value, Mapping) and any(_plain(item) is not item for item in value.values()):
        return {key: _plain(item) for key, item in value.items()}
    return value.item() if getattr(value, "shape", None) == () else value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


@functools.cache
def _adapter_of(kind: Any) -> Any:
    return _adapter(kind.__name__, {name: option.annotation for name, option in options_of(kind).items()})


def _adapter(title: str, types: Mapping[str, Any]) -> Any:
    import typing_extensions  # pydantic refuses the TypedDict of typing before Python 3.12
    from pydantic import ConfigDict, TypeAdapter

    typed_dict: Any = typing_extensions.TypedDict
    shape = typed_dict(title, types)
    shape.__pydantic_config__ = ConfigDict(strict=True, arbitrary_types_allowed=True, allow_inf_nan=False)
    return TypeAdapter(shape)


def flag_of(options: Mapping[str, Option], setting: str) -> str:
    """A setting as it is typed: `max_calls` as `--max-calls`, `resume=True` as `--resume`; others as they are."""
    name, equals, value = setting.partition("=")
    if (option := options.get(name)) is None:
        return setting
    flag = option.flag_name
    if value in ("False", "None"):
        off = option.switch.partition("/")[2] if option.type is bool else ""
        return off or f"no {flag}"
    if not equals or value in ("True", "…"):
        return flag
    return " ".join(f"{flag} {text}" for text in _typed(option, value)) or f"no {flag}"


def _typed(option: Option, value: str) -> list[str]:
    """The repr of a value as it is typed on the command line, once for each time that its flag is given."""
    try:
        parsed = ast.literal_eval(value)
    except (ValueError, SyntaxError):  # a word that stands for a value, such as NAME
        return [value]
    if isinstance(parsed, Mapping):
        return [f"{name}={item}" for name, item in parsed.items()]
    items = parsed if isinstance(parsed, list | tuple) else [parsed]
    # with quotes where a text alone would not be seen, or would break the line
    texts = [
        repr(item) if isinstance(item, str) and not (item.strip() and item.isprintable()) else str(item)
        for item in items
    ]
    return [",".join(texts)] if option.flag.commas else texts


def apply_preset(settings: Settings, field: str, *kinds: Any) -> None:
    """Fills in the settings of the preset that a field names; a setting that is not at its default stays as it is.

    The preset's own value of the field, such as `optimizer = "gepa"`, replaces its name.

    Args:
        field: its value is a path that ends in `.toml`, or the name of a shipped preset; other values are left.
        kinds: the classes whose own settings a preset may have.
    Raises:
        ConfigError: no such file, it is not valid TOML, or it has an unknown setting or a value out of range.
    """
    named = getattr(settings, field)
    owner: Any = type(settings)
    if not isinstance(named, str | Path):
        return
    path = Path(named)
    is_shipped = path.suffix != ".toml"
    if is_shipped:
        path = CONTENT / "optimizers" / f"{named}.toml"
        if not str(named).isidentifier() or not path.is_file():
            return
    values, declared = _read(path), options_of(owner)
    allowed = [name for name in declared if any(name in kind.__annotations__ for kind in kinds)]
    if field not in values:
        if is_shipped:  # a preset of another command
            return
        raise ConfigError(f"{path}: {field} is missing: it says what the settings are for")
    for name, value in values.items():
        if name not in allowed:
            near = nearest(name, allowed)
            hint = f"did you mean {near!r}?" if near else f"it may have {', '.join(allowed)}"
            raise ConfigError(f"{path}: unknown setting {name!r}; {hint}")
        try:
            stored = declared[name].checked(value)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        own = getattr(settings, name)
        if name == field or not settings.changed(name):
            object.__setattr__(settings, name, stored)
        elif isinstance(value, Mapping) and isinstance(own, Mapping):
            object.__setattr__(settings, name, {**value, **own})


def _read(path: Path) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(no_such_file(path)) from None
    except (OSError, ValueError) as error:  # TOMLDecodeError is a ValueError
        raise ConfigError(f"{path} cannot be read: {error}") from None
