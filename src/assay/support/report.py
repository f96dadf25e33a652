"""Reports of commands: the fields are the JSON object, the lines are what people read.

Texts name settings in backticks, see `assay.errors.spoken`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, get_args, get_origin

from assay.support.reprs import ReportRepr
from assay.support.values import json_value

OBJECT = {"object": True}  # metadata of a field that only Python has


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of a report, which the terminal, Markdown and HTML draw.

    Attributes:
        title: the line above it.
        rows: the cells of each row, the name of the row first.
        header: a cell for each column; none for a table of names and values.
        strong: names of the rows that stand out.
    """

    title: str
    rows: Sequence[Sequence[str]]
    header: Sequence[str] = ()
    strong: Sequence[str] = ()


class Report(ReportRepr):
    """What a command returns: a dataclass, frozen unless the report grows while the command runs."""

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    is_list: ClassVar[bool] = False  # each line is an item; in a terminal it is cut at the right edge
    is_data: ClassVar[bool] = False  # its lines are data, in which no setting is named as a surface writes it
    is_stream: ClassVar[bool] = False  # its items were written as they came: it has no JSON object
    none: ClassVar[str] = ""  # said where there are no lines
    has_key: ClassVar[bool] = False  # a key that was made for the user, and is not masked

    def to_dict(self) -> dict[str, Any]:
        shown = [field.name for field in fields(self) if field.metadata != OBJECT]
        return {name: json_value(getattr(self, name)) for name in shown}

    @classmethod
    def read(cls, stored: Mapping[str, Any], objects: Mapping[str, Any] | None = None) -> Self:
        """The report whose `to_dict()` was stored.

        Args:
            objects: values of fields that only Python has, by default None; names that the report lacks are unused.
        """
        values = {**dict.fromkeys(_required(cls, only_python=True)), **(objects or {}), **stored}
        types = {item.name: item.type for item in fields(cls)}
        report: Callable[..., Self] = cls
        return report(**{name: _restored(value, types[name]) for name, value in values.items() if name in types})

    @classmethod
    def reads(cls, stored: Mapping[str, Any]) -> bool:
        """Whether a stored object has the keys of this report; one of another command or version may not."""
        return stored.keys() >= _required(cls, only_python=False)

    def lines(self) -> Iterator[str | Table]:
        """What people see of the report, in order."""
        yield from ()

    def warnings(self) -> Iterator[str]:
        """What people are told besides, on standard error."""
        yield from ()

    def write_page(self, path: str | Path, *, store: str | Path | None = None) -> Path:
        """Writes the report as one HTML file, which loads nothing and shows no whole rollout.

        Raises:
            ConfigError: the file cannot be written.
            StoreError: the run is not in the store, or too large for a page.
        """
        raise NotImplementedError(f"{type(self).__name__} has no page")

    @property
    def failure(self) -> str:
        """Why the command line ends with code 1; empty if it does not."""
        return ""


def _required(kind: type[Report], *, only_python: bool) -> set[str]:
    """Fields without a default."""
    needed = (item for item in fields(kind) if item.default is MISSING and item.default_factory is MISSING)
    return {item.name for item in needed if (item.metadata == OBJECT) is only_python}


def _restored(value: Any, kind: Any) -> Any:
    """A value of a stored report in the type of its field: paths, and integers as keys, are text in JSON."""
    if kind in (Path, Path | None) and value is not None:
        return Path(value)
    if get_origin(kind) is dict:
        key, item = get_args(kind)
        return {key(name): _restored(part, item) for name, part in value.items()}
    return value
