"""The fields of a program: which columns of a row are its inputs, and of which types. Rows are converted by them."""

import ast
import base64
import binascii
import dataclasses
import functools
import json
import mimetypes
import re
import sys
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

from assay.errors import DataError
from assay.support.values import json_value

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_UNTYPED = ("data:application/octet-stream", "data:;")  # the bytes show what it is
_MEDIA = ("Image", "Audio", "File", "History")
_BEGIN, _END = "<<CUSTOM-TYPE-START-IDENTIFIER>>", "<<CUSTOM-TYPE-END-IDENTIFIER>>"  # around a medium in DSPy's JSON
_PARTS = {"image_url": "image_url", "input_audio": "input_audio", "file": "file"}  # of messages: type -> field
_LONGEST_LITERAL = 100_000  # characters
_MAGIC = (  # first bytes -> media type
    (b"\x89PNG", "image/png"), (b"\xff\xd8\xff", "image/jpeg"), (b"GIF8", "image/gif"), (b"BM", "image/bmp"),
    (b"II*\0", "image/tiff"), (b"MM\0*", "image/tiff"), (b"ID3", "audio/mp3"), (b"\xff\xfb", "audio/mp3"),
    (b"\xff\xf3", "audio/mp3"), (b"fLaC", "audio/flac"), (b"OggS", "audio/ogg"),
)  # fmt: skip
_KINDS = {  # of containers, by the bytes 8 to 12
    b"WEBP": "image/webp", b"WAVE": "audio/wav", b"avif": "image/avif", b"heic": "image/heic", b"M4A ": "audio/mp4",
}  # fmt: skip


@dataclass(frozen=True)
class Fields:
    """Inputs and outputs of a program by name, each with its type; `Any` where the program declares none.

    Args:
        required: inputs that each row must have.
        optional: inputs with a default, which a row may lack or have no value for.
        outputs: outputs that are declared; none if they are not known.
    """

    required: Mapping[str, Any]
    optional: Mapping[str, Any] = field(default_factory=dict)
    outputs: Mapping[str, Any] = field(default_factory=dict)

    def __deepcopy__(self, memo: object) -> "Fields":
        return self

    @classmethod
    def named(cls, names: Iterable[str]) -> "Fields":
        """Required inputs of no declared type."""
        return cls(dict.fromkeys(names, Any))

    @property
    def inputs(self) -> dict[str, Any]:
        return {**self.required, **self.optional}

    def missing(self, names: Iterable[str]) -> list[str]:
        """Required inputs that are not among the names."""
        return sorted(self.required.keys() - set(names))

    def converted(self, values: Mapping[str, Any], *, where: str, folder: Path | None = None) -> dict[str, Any]:
        """The values with those of declared inputs in their types; inputs without a declared type, and texts that are
        declared as such, stay as they are. An optional input without a value is left out.

        Pydantic converts, in its lax mode: 3 from "3", True from "true", a date from ISO text. A text may also hold the
        JSON of a list or object, and the name of an enum's member. Images, audio and files are made of URLs, data URIs,
        base64, bytes and paths; in the messages of a history too, where a key is the name of a field that holds them.

        Args:
            where: place of the row, for messages.
            folder: of relative paths; None: no local file is read.
        Raises:
            DataError: a value cannot be converted.
        """
        result: dict[str, Any] = {}
        for name, value in values.items():
            if value is None and name in self.optional:
                continue
            annotation = self.inputs.get(name, Any)
            try:
                if "History" in map(_medium, _arguments(annotation)):
                    value = self._with_media(value, folder)
                result[name] = _typed(value, annotation, folder)
            except (ValueError, TypeError, AttributeError, RecursionError, ImportError) as error:
                wanted = getattr(annotation, "__name__", None) if isinstance(annotation, type) else None
                raise DataError(
                    f"{where}: the input {name!r} cannot be read as {wanted or annotation}: {_reason(error)}"
                ) from None
        return result

    def _with_media(self, history: Any, folder: Path | None) -> Any:
        """A history whose messages, which have fields of the program by name, hold images, audio and files as such."""
        for read in _readings(history, Any):
            messages = read.get("messages") if isinstance(read, Mapping) else read
            if isinstance(messages, list) and all(isinstance(message, Mapping) for message in messages):
                kinds = {name: kind for name, kind in {**self.outputs, **self.inputs}.items() if _holds_medium(kind)}
                return [
                    {k: _typed(v, kinds[k], folder) if v is not None and k in kinds else v for k, v in message.items()}
                    for message in messages
                ]
        return history

    def expected(self, values: Mapping[str, Any], folder: Path | None = None) -> dict[str, Any]:
        """Expected outputs in the JSON form that the program's outputs of the declared type have: a list of a set in
        its order, an object with its defaults. A value that is not of the type stays as it is.

        Args:
            folder: see `converted`.
        """
        return {name: _canonical(value, self.outputs.get(name, Any), folder) for name, value in values.items()}


def _canonical(value: Any, annotation: Any, folder: Path | None) -> Any:
    if not isinstance(value, str | int | float | list | dict):
        return value
    try:
        plain = json_value(_typed(value, annotation, folder))
    except (ValueError, TypeError, AttributeError, RecursionError, ImportError):
        return value
    return plain if _keeps(value, plain) else value


def _keeps(value: Any, plain: Any) -> bool:
    """Whether no key of an object was lost, which a model does not declare."""
    if isinstance(value, dict) and isinstance(plain, dict):
        return all(name in plain and _keeps(part, plain[name]) for name, part in value.items())
    return all(map(_keeps, value, plain)) if isinstance(value, list) and isinstance(plain, list) else True


def _reason(error: Exception) -> str:
    if hasattr(error, "errors"):  # of pydantic
        first = error.errors(include_url=False, include_context=False)[0]
        at = ".".join(str(part) for part in first["loc"])
        return f"{at}: {first['msg']}" if at else str(first["msg"])
    return str(error)[:300]


def _arguments(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, otherwise the annotation itself."""
    if get_origin(annotation) is Annotated:
        return _arguments(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(member for part in get_args(annotation) for member in _arguments(part))
    return (annotation,)


def allows_none(annotation: Any) -> bool:
    """Whether None is a value of the type."""
    return any(part in (None, type(None)) for part in _arguments(annotation))


def _typed(value: Any, annotation: Any, folder: Path | None) -> Any:
    parts = [part for part in _arguments(annotation) if part not in (None, type(None))]
    if all(part in (Any, str, object) for part in parts):
        return value
    adapter = _adapter(annotation)
    if adapter is None:
        return value
    first: Exception | None = None
    for candidate in _readings(value, annotation):
        try:
            return adapter.validate_python(_prepared(candidate, annotation, folder))
        except (ValueError, TypeError) as error:
            first = first or error
    raise first or ValueError("it has no value")


def _readings(value: Any, annotation: Any) -> list[Any]:
    """The value, and what else a text in a cell of a table may be: bytes, JSON, or nothing where it is empty."""
    if not isinstance(value, str):
        return [value]
    readings: list[Any] = [value]
    if bytes in _arguments(annotation) and (data := _data_of(value)) is not None:
        readings.insert(0, data)
    if not value.strip() and allows_none(annotation):
        readings.append(None)
    for read in (json.loads, _literal):
        try:
            return [*readings, read(value)]
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return readings


def _literal(text: str) -> Any:
    """A list or object as Python writes it, which is what a data frame's `to_csv` leaves of one."""
    if not text.lstrip().startswith(("[", "{", "(")) or len(text) > _LONGEST_LITERAL:
        raise ValueError("not a list or object")
    return ast.literal_eval(text)


def _adapter(annotation: Any) -> "TypeAdapter[Any] | None":
    """Converts to a type; None for one that pydantic does not know."""
    try:
        return _cached_adapter(annotation)
    except TypeError:  # an annotation that is not hashable
        return _made_adapter(annotation)


def _made_adapter(annotation: Any) -> "TypeAdapter[Any] | None":
    from pydantic import ConfigDict, TypeAdapter
    from pydantic.errors import PydanticUserError

    try:
        return TypeAdapter(annotation)
    except PydanticUserError:
        pass
    try:
        plain = dict[str, Any] if typing.is_typeddict(annotation) else annotation
        return TypeAdapter(plain, config=ConfigDict(arbitrary_types_allowed=True))
    except (PydanticUserError, NameError):
        return None


_cached_adapter = functools.lru_cache(1000)(_made_adapter)


def _prepared(value: Any, annotation: Any, folder: Path | None) -> Any:
    """The value with what pydantic does not read by itself, at any depth: media, and names of an enum's members."""
    parts = _arguments(annotation)
    if len(parts) > 1:
        if isinstance(value, str) and str in parts:
            return value
        fitting = (_prepared(value, part, folder) for part in parts if part is not type(None))
        return next((new for new in fitting if new is not value), value)
    (annotation,) = parts
    if (medium := _medium(annotation)) is not None:
        return _of_medium(value, medium, annotation, folder)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if isinstance(value, list | tuple | set) and arguments:
        if origin is tuple and arguments[-1] is not Ellipsis:
            return [_prepared(item, kind, folder) for item, kind in zip(value, arguments, strict=False)] + list(value)[
                len(arguments) :
            ]
        return [_prepared(item, arguments[0], folder) for item in value]
    if isinstance(value, Mapping):
        if isinstance(origin, type) and issubclass(origin, Mapping) and len(arguments) == 2:
            return {key: _prepared(item, arguments[1], folder) for key, item in value.items()}
        kinds = _members(annotation)
        return {key: _prepared(item, kinds.get(key, Any), folder) for key, item in value.items()} if kinds else value
    if isinstance(annotation, type) and issubclass(annotation, Enum) and isinstance(value, str):
        by_text = annotation.__members__ | {str(member.value): member for member in annotation}
        return by_text.get(value, value)
    return value


def _members(annotation: Any) -> dict[str, Any]:
    """Types of the fields of a model, a data class or a typed dictionary."""
    if not isinstance(annotation, type):
        return {}
    if hasattr(annotation, "model_fields"):
        fields = annotation.model_fields.items()
        return {key: info.annotation for name, info in fields for key in (name, info.alias) if key}
    if dataclasses.is_dataclass(annotation) or typing.is_typeddict(annotation):
        try:
            return typing.get_type_hints(annotation)
        except Exception:
            return {}
    return {}


def _medium(annotation: Any) -> str | None:
    """Name of DSPy's type of a medium. DSPy is not imported here: the annotation exists only where it is."""
    for base in getattr(annotation, "__mro__", ()):
        name = str(base.__name__)
        if name in _MEDIA and base is getattr(sys.modules.get("dspy"), name, None):
            return name
    return None


def _holds_medium(annotation: Any) -> bool:
    """Whether a type is that of a medium, a union with one, or a list, tuple or dictionary of it."""
    return any(
        _medium(part) not in (None, "History") or any(map(_holds_medium, get_args(part)))
        for part in _arguments(annotation)
    )


def _of_medium(value: Any, medium: str, kind: type, folder: Path | None) -> Any:
    """A value in the form that DSPy's type of a medium reads."""
    if isinstance(value, str) and value.startswith(_BEGIN):
        value = json.loads(value.removeprefix(_BEGIN).removesuffix(_END))[0]
    if isinstance(value, Mapping) and value.get("type") in _PARTS:
        value = value[_PARTS[value["type"]]]
        value = {"data": value["data"], "audio_format": value["format"]} if "format" in value else value
    if isinstance(value, Mapping) and value.keys() <= {"bytes", "path"}:  # as tables of Hugging Face have it
        value = value["path"] if value.get("bytes") is None else value["bytes"]
    if medium == "History":
        return {"messages": value} if isinstance(value, Sequence) and not isinstance(value, str) else value
    if type(value).__module__.startswith("PIL."):
        return kind(value)
    for uri in value.values() if isinstance(value, Mapping) else (value,):
        _check_type(uri, medium)
    if isinstance(value, str):
        if value.startswith(("http://", "https://", "gs://")):
            if medium != "Image":
                raise ValueError(f"{value[:80]!r} is a URL; {medium} takes a path, a data URI, base64 or bytes")
            return {"url": value}
        if value.startswith("data:") and not value.startswith(_UNTYPED):
            return _of_uri(value, medium)
        name, value = value, _data_of(value) or _read(value, medium, folder)
        if value is None and medium != "File":  # any content is a file: a name that is none would be taken for base64
            value = _decoded(name)
        if value is None:
            forms = {"Image": "a URL, a data URI or base64", "Audio": "a data URI or base64"}.get(medium, "a data URI")
            places = "; local files are not read here" if folder is None else f", nor a file in {folder}"
            raise ValueError(f"{name[:80]!r} is not {forms} of {medium}{places}")
        return _of_bytes(value, medium, name)
    return _of_bytes(value, medium, "") if isinstance(value, bytes) else value


def _check_type(uri: Any, medium: str) -> None:
    """Refuses a data URI of another medium, such as a page as an image."""
    if medium == "File" or not isinstance(uri, str) or not uri.startswith("data:") or uri.startswith(_UNTYPED):
        return
    kind = re.split("[;,]", uri[len("data:") :], maxsplit=1)[0]
    if not kind.lower().startswith(f"{medium.lower()}/"):
        raise ValueError(f"a data URI of the type {kind[:80]!r} is not {medium} data")


def _of_uri(uri: str, medium: str) -> dict[str, str]:
    head, _, data = uri.partition(",")
    if medium == "Audio":
        return {"data": data, "audio_format": head.partition(";")[0].rpartition("/")[2].removeprefix("x-")}
    return {"url": uri} if medium == "Image" else {"file_data": uri}


def _of_bytes(data: bytes, medium: str, name: str) -> dict[str, str]:
    media_type = next((kind for start, kind in _MAGIC if data.startswith(start)), _KINDS.get(data[8:12]))
    if medium == "File":
        known = media_type or mimetypes.guess_type(name)[0] or "application/octet-stream"
        part = {"filename": Path(name).name} if Path(name).suffix and len(name) < 300 else {}
        return {**_of_uri(f"data:{known};base64,{base64.b64encode(data).decode()}", medium), **part}
    if media_type is None or not media_type.startswith(medium.lower()):
        raise ValueError(f"{name[:80]!r} does not hold {medium.lower()} data" if name else f"it is not {medium} data")
    return _of_uri(f"data:{media_type};base64,{base64.b64encode(data).decode()}", medium)


def _data_of(uri: str) -> bytes | None:
    """The bytes of a base64 data URI, as `json_value` writes bytes; None for another text."""
    head, comma, data = uri.partition(",")
    return _decoded(data) if comma and head.startswith("data:") and head.endswith(";base64") else None


def _decoded(text: str) -> bytes | None:
    try:
        return base64.b64decode("".join(text.split()), validate=True) or None
    except (binascii.Error, ValueError):
        return None


def _read(name: str, medium: str, folder: Path | None) -> bytes | None:
    """The content of a local file, if rows may name one; a `File` of any content must be in the folder itself."""
    if folder is None or len(name) > 1000 or "\0" in name:
        return None
    path = folder / name
    if not path.is_file():
        return None
    if medium == "File" and not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{name!r} is outside of {folder}")
    return path.read_bytes()
