"""Reads YAML files with size limits, also into pydantic models.

A few lines of nested aliases can expand to billions of nodes, which any code that traverses the result would visit. The
nodes are therefore counted with aliases expanded before objects are constructed. All problems of a file are reported at
once, with their lines and the nearest valid names.
"""

import math
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pydantic
import yaml

from assay.errors import AssayError, ConfigError
from assay.support.names import nearest
from assay.support.options import Settings
from assay.support.places import no_such_file

MOST_BYTES = 2 * 2**20  # per file
_MOST_NODES = 100_000  # with aliases expanded
_MOST_DIGITS = 400  # of a number; longer ones take quadratic time to parse or overflow a float


class _Loader(yaml.SafeLoader):
    """Uses YAML 1.2 booleans: `no` and `yes` are strings, so that a scale can be written as `[no, partly, yes]`."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"true|false", re.IGNORECASE), list("tTfF"))


def read_yaml(text: str, source: str, error: type[AssayError]) -> tuple[Any, yaml.Node | None]:
    """Parses YAML text. Returns the content and the root node, which has line numbers.

    Args:
        source: file name, for error messages.
        error: raised for invalid YAML, or if a size limit is exceeded.
    """
    if len(text) > MOST_BYTES:
        raise error(f"{source}: the file has {len(text) / 2**20:.1f} MiB; the maximum is {MOST_BYTES >> 20} MiB")
    try:
        loader = _Loader(text)
    except yaml.YAMLError as problem:  # a character that YAML does not allow
        raise error(_invalid(source, problem)) from None
    try:
        node = loader.get_single_node()
        if node is None:
            return None, None
        _check_size(node, source, error)
        return loader.construct_document(node), node
    except (yaml.YAMLError, RecursionError, ValueError) as problem:
        if isinstance(problem, error):
            raise
        raise error(_invalid(source, problem)) from None
    finally:
        loader.dispose()


def _check_size(root: yaml.Node, source: str, error: type[AssayError]) -> None:
    """Raises `error` for too many nodes (aliases expanded), too long numbers and recursive aliases."""
    sizes: dict[int, int] = {}  # by node id; 0 while the node is being counted

    def size(node: yaml.Node) -> int:
        known = sizes.get(id(node))
        if known == 0:
            raise error(f"{source}:{node.start_mark.line + 1}: an alias refers to a node that contains it")
        if known is not None:
            return known
        sizes[id(node)] = 0
        count = 1
        if isinstance(node, yaml.MappingNode):
            count += sum(size(part) for pair in node.value for part in pair)
        elif isinstance(node, yaml.SequenceNode):
            count += sum(map(size, node.value))
        elif node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float") and len(node.value) > _MOST_DIGITS:
            raise error(
                f"{source}:{node.start_mark.line + 1}: a number has {len(node.value)} characters; "
                f"the maximum is {_MOST_DIGITS}"
            )
        if count > _MOST_NODES:
            raise error(f"{source}:{node.start_mark.line + 1}: more than {_MOST_NODES} values after expanding aliases")
        sizes[id(node)] = count
        return count

    size(root)


def _invalid(source: str, problem: Exception) -> str:
    """Message about text that is not YAML: place and problem, without PyYAML's name of the text."""
    mark = getattr(problem, "problem_mark", None)
    if mark is None:
        return f"{source}: invalid YAML: {problem}"
    return f"{source}:{mark.line + 1}: invalid YAML: {getattr(problem, 'problem', None)}, column {mark.column + 1}"


def read_text(path: Path, kind: str, error: type[AssayError]) -> str:
    """Reads a text file.

    Args:
        kind: what the file is, for error messages.
        error: raised if the file does not exist, is not UTF-8 text, or is too large.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise error(f"{path}: the file is larger than {MOST_BYTES >> 20} MiB, the maximum for a {kind}")
        return content.decode("utf-8")
    except FileNotFoundError:
        raise error(no_such_file(path)) from None
    except (OSError, UnicodeDecodeError) as problem:
        raise error(f"{path}: cannot be read: {problem}") from None


Problem = tuple[int, str]  # line (from 1) and message
Location = tuple[Any, ...]  # keys and positions, as in pydantic's errors

_ENTRIES = {"criteria": "criterion", "stages": "stage"}  # list of a file -> what its entries are called
# Names of the Python classes and of other tools, and the keys that they have in a file.
_OTHER_NAMES = {"arguments": "with", "args": "with", "kwargs": "with", "prompt": "text", "question": "text"}
_KINDS = {
    "dict_type": "a mapping",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "int_from_float": "an integer",
    "int_parsing": "an integer",
    "int_type": "an integer",
    "list_type": "a list",
    "model_type": "a mapping",
    "bool_parsing": "true or false",
}
_MOST_SHOWN = 100


Model = TypeVar("Model", bound=pydantic.BaseModel)
S = TypeVar("S", bound=Settings)


class StrictModel(pydantic.BaseModel):
    """Base of the models of files; unknown keys are errors."""

    model_config = pydantic.ConfigDict(extra="forbid", populate_by_name=True)


def parse_yaml(
    text: str, source: str, model: type[Model], expected: str, error: type[AssayError]
) -> tuple[Model, yaml.Node | None]:
    """Validates YAML text against a model. Returns the instance and the YAML node, which has line numbers.

    Args:
        source: file name, for error messages.
        expected: description of the expected mapping, for the error message.
        error: raised for invalid YAML, an unknown or repeated key, or an invalid value; each with its line.
    """
    data, node = read_mapping(text, source, expected, error)
    parsed, problems = validated(data, node, model)
    if problems or parsed is None:
        raise error(as_text(source, problems))
    return parsed, node


def load_settings(path: str | Path, kind: type[S], what: str) -> S:
    """Reads settings from a YAML file with their names as keys.

    Args:
        what: the file is, for error messages.
    Raises:
        ConfigError: there is no such file, it is not YAML, or a setting breaks its rule; the message names the line.
    """
    text = read_text(Path(path), what, ConfigError)
    data, node = read_mapping(text, str(path), f"a {what} is a mapping of its settings", ConfigError)
    if problems := list(_duplicate_keys(node)):
        raise ConfigError(as_text(str(path), problems))
    try:
        return kind.of(data)
    except ConfigError as error:
        place = tuple(int(part) if part.isdigit() else part for part in error.field.split("."))
        line = f":{line_of(node, place)}" if error.field else ""
        raise ConfigError(f"{path}{line}: {error}") from None


def read_mapping(
    text: str, source: str, expected: str, error: type[AssayError]
) -> tuple[dict[str, Any], yaml.Node | None]:
    """The unvalidated content of a file and its YAML node; see `parse_yaml`."""
    data, node = read_yaml(text, source, error)
    if not isinstance(data, dict):
        found = "an empty file" if node is None else type(data).__name__
        raise error(f"{source}:1: {expected}, found {found}")
    return data, node


def validated(data: dict[str, Any], node: yaml.Node | None, model: type[Model]) -> tuple[Model | None, list[Problem]]:
    """The model instance, or None if the content is invalid, and all problems, each with its line."""
    problems = list(_duplicate_keys(node))
    try:
        return model.model_validate(data), problems
    except pydantic.ValidationError as error:
        return None, [*_model_problems(error, data, node, model), *problems]


def as_text(source: str, problems: Iterable[Problem]) -> str:
    """The problems of a file in the order of their lines, one per line."""
    return "\n".join(f"{source}:{line}: {message}" for line, message in sorted(problems, key=lambda one: one[0]))


def corrected_key(name: str, valid: Iterable[str]) -> str | None:
    """The valid key that an unknown one was probably meant to be."""
    listed = list(valid)
    other = _OTHER_NAMES.get(name)
    return other if other in listed else nearest(name, listed)


def did_you_mean(near: str | None) -> str:
    """A hint with the nearest valid name; empty if there is none."""
    return f" Did you mean {near!r}?" if near else ""


def _model_problems(
    error: pydantic.ValidationError, data: Mapping[str, Any], node: yaml.Node | None, model: type[pydantic.BaseModel]
) -> Iterator[Problem]:
    """The problems that a model found in the content of a file."""
    for problem in error.errors():
        location = _location(problem["loc"], data, missing=problem["type"] == "missing")
        either = problem["loc"][-1] != location[-1]  # a string or a mapping is allowed; the last part says which
        if either and problem["type"] == ("string_type" if isinstance(problem["input"], Mapping) else "model_type"):
            continue  # of the other form
        yield line_of(node, location), _message(problem, location, data, model, either=either)


def _location(place: Location, data: Any, *, missing: bool) -> Location:
    """The keys and positions of an error, without the names of types that pydantic puts between them."""
    location: list[Any] = []
    for at, part in enumerate(place):
        if (isinstance(data, Mapping) and part in data) or (isinstance(data, list) and isinstance(part, int)):
            data = data[part]
        elif not (missing and at == len(place) - 1):
            continue
        location.append(part)
    return tuple(location)


def _message(problem: Any, location: Location, data: Any, model: type[pydantic.BaseModel], *, either: bool) -> str:
    where, key = _place(location[:-1], data), location[-1]
    if problem["type"] == "extra_forbidden":
        valid = _keys_at(location[:-1], model)
        hint = did_you_mean(corrected_key(str(key), valid))
        return f"{where}unknown key {key!r}; valid keys are {', '.join(valid)}.{hint}"
    if problem["type"] == "missing":
        return f"{where}the key {key!r} is missing"
    name = f"entry {key + 1}" if isinstance(key, int) else str(key)
    if len(location) == 2 and location[0] in _ENTRIES:
        where, name = "", f"{_ENTRIES[location[0]]} {key + 1}"
    value = repr(problem["input"])
    value = value if len(value) <= _MOST_SHOWN else f"{value[:_MOST_SHOWN]}…"
    return f"{where}{name} {_rule(problem, either=either)}, found {value}{_hint(problem, location, model)}"


def _hint(problem: Any, location: Location, model: type[pydantic.BaseModel]) -> str:
    """The value that was probably meant, where it can be computed."""
    value = problem["input"]
    if problem["type"] in ("float_type", "int_type") and isinstance(value, str):
        try:  # YAML reads "1" and 1e3 as texts
            return f". Write {float(value):g}, without quotes" if math.isfinite(float(value)) else ""
        except ValueError:
            return ""
    if problem["type"] == "literal_error" and isinstance(value, str):
        near = nearest(value, typing.get_args(_field_at(location, model).annotation))
        return "." + did_you_mean(near) if near else ""
    return ""


def _rule(problem: Any, *, either: bool) -> str:
    """What a value must be: pydantic's rule, in the words of YAML."""
    if either:
        return "must be a string or a mapping"
    if problem["type"] in _KINDS:
        return f"must be {_KINDS[problem['type']]}"
    if problem["type"] == "too_short":
        return "must have at least 1 entry"
    text = str(problem["msg"]).removeprefix("Value error, ")
    return re.sub("^(Input|String) should ", "must ", text).replace("must be a valid ", "must be a ")


def _place(location: Location, data: Any) -> str:
    """Where in a file a key is, before a message: `criterion 'right': judge: `."""
    words: list[str] = []
    if len(location) > 1 and (kind := _ENTRIES.get(location[0])) is not None:
        entry = data[location[0]][location[1]]
        name = entry.get("name") if isinstance(entry, Mapping) else None
        words.append(f"{kind} {name!r}" if isinstance(name, str) else f"{kind} {location[1] + 1}")
        location = location[2:]
    words += [f"entry {part + 1}" if isinstance(part, int) else str(part) for part in location]
    return "".join(f"{word}: " for word in words)


def _field_at(location: Location, model: type[pydantic.BaseModel]) -> Any:
    """The field of a model that a location in a file leads to."""
    fields = {field.alias or name: field for name, field in _model_at(location[:-1], model).model_fields.items()}
    return fields[location[-1]]


def _keys_at(location: Location, model: type[pydantic.BaseModel]) -> list[str]:
    """The valid keys of the mapping at a location."""
    return [field.alias or name for name, field in _model_at(location, model).model_fields.items()]


def _model_at(location: Location, model: type[pydantic.BaseModel]) -> type[pydantic.BaseModel]:
    """The model of the mapping at a location."""
    for part in location:
        fields = {field.alias or name: field for name, field in model.model_fields.items()}
        if part in fields and (inner := _model_in(fields[part].annotation)) is not None:
            model = inner
    return model


def _model_in(kind: Any) -> type[pydantic.BaseModel] | None:
    """The model in a type such as `list[Model]` or `str | Model | None`."""
    if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel):
        return kind
    return next((inner for part in typing.get_args(kind) if (inner := _model_in(part)) is not None), None)


def _duplicate_keys(node: yaml.Node | None) -> Iterator[Problem]:
    """Keys that occur twice in one mapping, with the second one's line. PyYAML silently uses the last."""
    if isinstance(node, yaml.MappingNode):
        keys = set()
        for key, value in node.value:
            if key.value in keys:
                yield key.start_mark.line + 1, f"duplicate key {key.value!r}"
            keys.add(key.value)
            yield from _duplicate_keys(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _duplicate_keys(item)


def line_of(node: yaml.Node | None, location: Location) -> int:
    """Line (from 1) of the deepest part of `location` that exists in the file."""
    line = 1 if node is None else node.start_mark.line + 1
    for part in location:
        child = None
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.value == part:
                    line, child = key.start_mark.line + 1, value
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            child = node.value[part]
            line = child.start_mark.line + 1
        if child is None:
            break
        node = child
    return line
