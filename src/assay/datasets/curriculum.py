"""Curricula: stages of data by difficulty, read from YAML or JSON. Does not load the data or run anything.

`assay.datasets.staged` reads the tasks of the stages, `assay.datasets.schedule` decides which stage is next.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.errors import DataError
from assay.support.package import CONTENT
from assay.support.settings import nearest

if TYPE_CHECKING:
    import yaml

__all__ = ["PREFIX", "SHIPPED", "STAGE", "Curriculum", "Stage", "load_curriculum", "stage_of"]

PREFIX = "curriculum:"  # of the dataset with the tasks of all stages
SHIPPED = ("tool_use",)
STAGE = "curriculum_stage"  # key of a task's metadata
_DEFAULTS = ("data", "promote_at", "max_share", "replay")  # keys of a stage; at the top of the file, of all stages
_STAGE_KEYS = ("name", "where", *_DEFAULTS)
_TOP_KEYS = ("stages", *_DEFAULTS)
_LONGEST_NAME = 60  # characters; a name is part of the names of studies


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of a curriculum.

    Attributes:
        name: unique in the curriculum.
        data: path or spec of its tasks; None: the data of the command.
        where: takes only tasks with these values: `task_type`, a field of the metadata or of the expected outputs ->
            the accepted values.
        promote_at: mean score on the stage's val tasks, in (0, 1], from which the next stage follows.
        max_share: share of the steps of a run, in (0, 1], after which the next stage follows without it; None: no
            limit.
        replay: share of the tasks of a step that are drawn from earlier stages, in [0, 1).
        where_from: `file:line`, for error messages.
    """

    name: str
    data: str | None = None
    where: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    promote_at: float = 0.8
    max_share: float | None = None
    replay: float = 0.2
    where_from: str = field(default="", compare=False)

    def limit(self, steps: int) -> int | None:
        """Number of steps after which the stage ends without promotion, in a run of `steps`; None: no limit."""
        return None if self.max_share is None else max(1, round(self.max_share * steps))


@dataclass(frozen=True, kw_only=True)
class Curriculum:
    """Stages in the order of their difficulty.

    Attributes:
        name: the file's name without its ending.
        source: file or shipped name.
        sha256: of the file's content.
    """

    name: str
    stages: tuple[Stage, ...]
    source: str = ""
    sha256: str = ""

    @property
    def needs_data(self) -> bool:
        """Whether a stage takes its tasks from the data of the command."""
        return any(stage.data is None for stage in self.stages)


def stage_of(metadata: Mapping[str, Any]) -> str | None:
    """Name of the stage of a task, from its metadata; None without a curriculum."""
    name = metadata.get(STAGE)
    return name if isinstance(name, str) else None


def load_curriculum(source: str | Path) -> Curriculum:
    """Reads a curriculum from a YAML or JSON file, or by the name of a shipped one.

    Raises:
        DataError: the file cannot be read, a key is unknown or a value out of range; the message names file and line.
    """
    from assay.support.yaml_files import read_text, read_yaml

    path, label = Path(source), str(source)
    if label in SHIPPED:
        path, label = CONTENT / "programs" / "tool_user" / f"{source}.yaml", f"{source}.yaml"
    elif not path.exists() and path.suffix.lower() not in (".yaml", ".yml", ".json"):
        near = nearest(label, SHIPPED)
        raise DataError(
            f"there is no curriculum {label!r}: name a YAML or JSON file, or a shipped one: {', '.join(SHIPPED)}"
            + (f"; did you mean {near!r}?" if near else "")
        )
    text = read_text(path, "curriculum", DataError)
    content, node = read_yaml(text, label, DataError)
    if node is None:
        raise DataError(f"{label}: the file is empty; a curriculum is a mapping with a list of stages")
    stages = _stages(_Entry(_place(label, node), content, node), label, path.parent)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Curriculum(name=path.stem, stages=stages, source=str(source), sha256=digest)


@dataclass(frozen=True)
class _Entry:
    """A value of the file, and its place as `file:line`."""

    place: str
    value: Any
    node: "yaml.Node"


def _place(label: str, node: "yaml.Node") -> str:
    return f"{label}:{node.start_mark.line + 1}"


def _entries(mapping: _Entry, known: tuple[str, ...], what: str, label: str) -> dict[str, _Entry]:
    """The entries of a mapping by key; refuses unknown and repeated keys."""
    if not isinstance(mapping.value, Mapping):
        raise DataError(f"{mapping.place}: {what} is a mapping with the keys {', '.join(known)}")
    entries = dict[str, _Entry]()
    for key_node, node in mapping.node.value:
        key, place = str(key_node.value)[:_LONGEST_NAME], _place(label, key_node)
        if key not in known:
            near = nearest(key, known)
            hint = f"did you mean {near!r}?" if near else f"the keys are {', '.join(known)}"
            raise DataError(f"{place}: {what} has no key {key!r}; {hint}")
        if key in entries:
            raise DataError(f"{place}: the key {key!r} occurs twice")
        entries[key] = _Entry(place, mapping.value.get(key), node)
    return entries


def _stages(whole: _Entry, label: str, folder: Path) -> tuple[Stage, ...]:
    top = _entries(whole, _TOP_KEYS, "a curriculum", label)
    listed = top.pop("stages", None)
    if listed is None:
        raise DataError(f"{label}: there are no stages: a curriculum has a list of them under the key 'stages'")
    if not isinstance(listed.value, list) or not listed.value:
        raise DataError(f"{listed.place}: stages must be a list of at least one stage")
    stages = dict[str, Stage]()
    for value, node in zip(listed.value, listed.node.value, strict=True):
        place = _place(label, node)
        own = _entries(_Entry(place, value, node), _STAGE_KEYS, "a stage", label)
        if "name" not in own:
            raise DataError(f"{place}: the stage has no name")
        stage = Stage(**{key: _value(key, entry, folder) for key, entry in {**top, **own}.items()}, where_from=place)
        if stage.name in stages:
            raise DataError(f"{place}: there are two stages {stage.name!r}; names must differ")
        stages[stage.name] = stage
    return tuple(stages.values())


def _value(key: str, entry: _Entry, folder: Path) -> Any:
    """The value of a key of a stage, checked."""
    value = entry.value
    if key == "where":
        return _where(entry)
    if key == "name":
        if not isinstance(value, str) or not value.isprintable() or not 0 < len(value.strip()) <= _LONGEST_NAME:
            raise DataError(
                f"{entry.place}: name={_short_repr(value)} must be text of 1 to {_LONGEST_NAME} characters in one line"
            )
        return value.strip()
    if key == "data":
        if not isinstance(value, str) or not value.strip():
            raise DataError(f"{entry.place}: data={_short_repr(value)} must be a path or spec")
        path = folder / value  # relative to the file, where it exists there
        return str(path) if path.is_file() else value
    if key == "max_share" and value is None:
        return None
    rule, allowed = _RULES[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not allowed(value):
        raise DataError(f"{entry.place}: {key}={_short_repr(value)} must be {rule}")
    return float(value)


_RULES: Mapping[str, tuple[str, Any]] = {
    "promote_at": ("a number above 0 and at most 1", lambda value: 0 < value <= 1),
    "max_share": ("a number above 0 and at most 1", lambda value: 0 < value <= 1),
    "replay": ("a number of at least 0 and below 1", lambda value: 0 <= value < 1),
}


def _where(entry: _Entry) -> dict[str, tuple[Any, ...]]:
    if not isinstance(entry.value, Mapping) or not entry.value:
        raise DataError(
            f"{entry.place}: where={_short_repr(entry.value)} must be a mapping of fields to values, such as "
            "{task_type: sum}"
        )
    listed = {str(name): wanted if isinstance(wanted, list) else [wanted] for name, wanted in entry.value.items()}
    for name, wanted in listed.items():
        if not wanted or not all(isinstance(item, str | int | float) for item in wanted):
            raise DataError(
                f"{entry.place}: where {name[:80]}={_short_repr(wanted)} must be text, a number, or a list of these"
            )
    return {name: tuple(wanted) for name, wanted in listed.items()}


def _short_repr(value: Any) -> str:
    return f"{value!r:.80}"
