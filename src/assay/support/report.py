"""Reports of commands: the fields are the JSON object, the lines are what people read; short `repr` and notebook table.

Texts name settings in backticks, see `assay.errors.spoken`. A report and the exit code of its command say what disks
and stores did not take.
"""

import html
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, astuple, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, get_args, get_origin

from assay.support.numbers import figure, signed
from assay.support.values import json_value

_FIRST = (
    "artifact", "path", "name", "agent", "deployment", "status", "stage", "share", "decision", "action", "split",
    "winner", "best", "replaces",
)  # fmt: skip
_LAST = (
    "rollouts", "rows", "passed", "steps", "best_step", "agreement", "converged", "calls", "cost_usd", "reason",
    "stopped",
)  # fmt: skip
_COMPARED = ("a", "b", "gain")  # scores of two sides, and their difference
_LONGEST = 1_000  # characters of a value that are read
_MOST = 10  # facts of a dictionary
_FEW, _MANY = 3, 8  # facts; a report that has fewer than `_FEW` of the names above shows others


class ReportRepr:
    """Base of reports: `repr` is one line, notebooks show a small table. The data is in `to_dict()`.

    A report without `to_dict`, or whose values are of another form, overrides `_facts`.
    """

    if TYPE_CHECKING:

        def to_dict(self) -> dict[str, Any]: ...

    def _facts(self) -> list[tuple[str, str]]:
        data = self.to_dict()
        facts = [(key, data[key]) for key in _FIRST if data.get(key) is not None]
        compared = ((key, data.get(key)) for key in _COMPARED)
        tested = (data.get("test") or {}).items()
        for key, part in (("score", data.get("result")), *compared, *tested, *_validated(data)):
            if isinstance(part, dict) and ("score" in part or key == "gain"):
                facts.append((key, measure_text(part, change=key == "gain")))
        facts += [(key, data[key]) for key in _LAST if isinstance(data.get(key), str | int | float)]
        facts += [("alarms", len(data["alarms"]))] if data.get("alarms") else []
        if len(facts) < _FEW:
            known = {key for key, _ in facts}
            more = ((key, value) for key, value in data.items() if key not in known)
            facts += [(key, value) for key, value in more if isinstance(value, str | int | float)][:_MANY]
        return [(key, shortened(value)) for key, value in facts]

    @property
    def _name(self) -> str:
        return type(self).__name__

    def __repr__(self) -> str:
        return f"{self._name}({', '.join(f'{key}={value}' for key, value in self._facts())})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th>{html.escape(key)}</th><td>{html.escape(value)}</td></tr>" for key, value in self._facts()
        )
        return f"<table><caption>{html.escape(self._name)}</caption>{rows}</table>"


class ReportDict(ReportRepr, dict[str, Any]):
    """A report that is a dictionary, shown as other reports are.

    Args:
        title: what is shown in place of a class.
        data: its content.
        facts: shown in place of nested values; other numbers and texts are shown, of lists their length.
    """

    def __init__(self, title: str, data: Mapping[str, Any], facts: Mapping[str, Any] | None = None) -> None:
        super().__init__(data)
        self._title, self._more = title, dict(facts or {})

    @property
    def _name(self) -> str:
        return self._title

    def to_dict(self) -> dict[str, Any]:
        return dict(self)

    def _facts(self) -> list[tuple[str, str]]:
        own = [
            (key, len(value) if isinstance(value, list | tuple) else value)
            for key, value in self.items()
            if key not in self._more
            and (isinstance(value, str | int | float) or (isinstance(value, list | tuple) and value))
        ]
        return [(key, shortened(value)) for key, value in [*self._more.items(), *own][:_MOST]]


def _validated(data: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Both sides and the gain of a training, of the first program and sampling."""
    modes: Mapping[str, Any] = next(iter((data.get("validation") or {}).values()), {})
    return list(next(iter(modes.values()), {}).items())


def measure_text(part: dict[str, Any], *, change: bool = False) -> str:
    """A score with its interval, or a difference with its sign."""
    text = signed if change else figure
    value = part.get("score", part.get("mean"))
    low, high = part.get("interval") or (part.get("low"), part.get("high"))
    if value is None:
        return "unscored"
    return text(value) + (f" [{text(low)}, {text(high)}]" if low is not None and high is not None else "")


def shortened(value: Any) -> str:
    """A value as one line of at most 80 characters; of a mapping its names and values, of others invisible characters
    as `[U+202E]`."""
    if isinstance(value, Mapping):
        text = "; ".join(f"{key} {shortened(part)}" for key, part in value.items())
    else:
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
    line = " ".join(text[:_LONGEST].split())
    line = "".join(letter if letter.isprintable() else f"[U+{ord(letter):04X}]" for letter in line)
    return line if len(line) <= 80 else f"{line[:79]}…"


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


FULL_DISK = "the disk of the store is full"  # begins the reason of a run that it stopped


@dataclass(frozen=True)
class Refused:
    """Counts since the start of the process.

    Attributes:
        rows: rows that a store refused (a full disk), or that still waited for its database when it was closed.
        full_disks: times that a disk was found full; the job is stopped then, and its last rows may still fit.
        recovered: rows that earlier processes left in files, and that are in their store now.
    """

    rows: int = 0
    full_disks: int = 0
    recovered: int = 0

    def since(self, before: "Refused") -> "Refused":
        return Refused(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


_lock = threading.Lock()
_refused = Refused()
waiting: dict[str, int] = {}  # rows of other processes that wait in files, by the files' path, for stores opened here


def refused() -> Refused:
    return _refused


def count_refused(*, rows: int = 0, full_disks: int = 0, recovered: int = 0) -> None:
    """Adds to the counts."""
    global _refused
    with _lock:
        _refused = Refused(_refused.rows + rows, _refused.full_disks + full_disks, _refused.recovered + recovered)
