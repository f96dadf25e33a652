"""Curricula: stages of data by difficulty, read from YAML or JSON. Does not load the data or run anything.

`assay.datasets.splits` reads the tasks of the stages, `assay.datasets.schedule` decides which stage is next.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.errors import DataError
from assay.support.settings import nearest

if TYPE_CHECKING:
    import yaml

__all__ = ["PREFIX", "SHIPPED", "STAGE", "Curriculum", "Stage", "load_curriculum", "stage_of"]

PREFIX = "curriculum:"  # of the dataset with the tasks of all stages
SHIPPED = ("tool_use",)
STAGE = "curriculum_stage"  # key of a task's metadata
_DEFAULTS = ("data", "promote_at", "min_tasks", "max_steps", "share", "replay")  # keys of a stage, for all of them
_TOP = ("name", "description", "stages", *_DEFAULTS)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of a curriculum.

    Attributes:
        name: unique in the curriculum.
        data: path or spec of its tasks; None: the data of the command.
        where: takes only tasks with these values: `task_type`, a field of the metadata or of the expected outputs ->
            the accepted values.
        promote_at: score on the stage's val tasks, in [0, 1], from which the next stage follows.
        min_tasks: number of train tasks of the stage that must have been run before that; replays do not count.
        max_steps: number of steps after which the next stage follows without it; None: no limit.
        share: the same as a share of all steps of the run.
        replay: share of the tasks of a step that are drawn from earlier stages, in [0, 1).
        where_from: `file:line`, for error messages.
    """

    name: str
    data: str | None = None
    where: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    promote_at: float = 0.8
    min_tasks: int = 0
    max_steps: int | None = None
    share: float | None = None
    replay: float = 0.2
    where_from: str = field(default="", compare=False)

    def limit(self, steps: int | None) -> int | None:
        """Number of steps after which the stage ends without promotion, in a run of `steps`; None: no limit."""
        if self.share is None or steps is None:
            return self.max_steps
        return max(1, round(self.share * steps))


@dataclass(frozen=True, kw_only=True)
class Curriculum:
    """Stages in the order of their difficulty.

    Attributes:
        source: file or shipped name.
        sha256: of the file's content.
    """

    name: str
    stages: tuple[Stage, ...]
    source: str = ""
    sha256: str = ""
    description: str = ""

    @property
    def needs_data(self) -> bool:
        """Whether a stage takes its tasks from the data of the command."""
        return any(stage.data is None for stage in self.stages)

    def __getitem__(self, name: str) -> Stage:
        return next(stage for stage in self.stages if stage.name == name)


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

    path = Path(source)
    if str(source) in SHIPPED:
        path = Path(str(resources.files("assay.datasets"))) / "shipped" / f"{source}.yaml"
    elif not path.exists() and path.suffix.lower() not in (".yaml", ".yml", ".json"):
        near = nearest(str(source), SHIPPED)
        raise DataError(
            f"there is no curriculum {str(source)!r}: name a YAML or JSON file, or a shipped one: {', '.join(SHIPPED)}"
            + (f"; did you mean {near!r}?" if near else "")
        )
    text = read_text(path, "curriculum", DataError)
    label = f"{source}.yaml" if str(source) in SHIPPED else str(source)
    _, node = read_yaml(text, label, DataError)
    reader = _Reader(label, path.parent)
    return reader.curriculum(node, path.stem, str(source), hashlib.sha256(text.encode()).hexdigest())


@dataclass(frozen=True)
class _Reader:
    """Reads the nodes of a file, which have line numbers."""

    label: str
    folder: Path

    def curriculum(self, node: "yaml.Node | None", stem: str, source: str, digest: str) -> Curriculum:
        if node is None:
            raise DataError(f"{self.label}: the file is empty; a curriculum is a mapping with a list of stages")
        top = dict(self._entries(node, _TOP, "a curriculum"))
        if "stages" not in top:
            raise DataError(
                f"{self.label}: there are no stages: a curriculum has a list of them under the key 'stages'"
            )
        line, listed = top["stages"]
        if getattr(listed, "id", "") != "sequence" or not listed.value:
            raise DataError(f"{self.label}:{line}: stages must be a list of at least one stage")
        defaults = {key: top[key] for key in _DEFAULTS if key in top}
        stages = [self._stage(entry, defaults) for entry in listed.value]
        for at, stage in enumerate(stages):
            if stage.name in [earlier.name for earlier in stages[:at]]:
                raise DataError(f"{stage.where_from}: there are two stages {stage.name!r}; names must differ")
        name, description = (self._plain(top[key][1]) if key in top else "" for key in ("name", "description"))
        return Curriculum(
            name=str(name or stem), description=str(description), stages=tuple(stages), source=source, sha256=digest
        )

    def _entries(self, node: "yaml.Node", known: tuple[str, ...], what: str) -> Iterator[tuple[str, tuple[int, Any]]]:
        """Key -> (line, node) of a mapping; refuses unknown and repeated keys."""
        line = node.start_mark.line + 1
        if getattr(node, "id", "") != "mapping":
            raise DataError(f"{self.label}:{line}: {what} is a mapping with the keys {', '.join(known)}")
        seen = set[str]()
        for key_node, value in node.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            if key not in known:
                near = nearest(key, known)
                hint = f"did you mean {near!r}?" if near else f"the keys are {', '.join(known)}"
                raise DataError(f"{self.label}:{line}: {what} has no key {key!r}; {hint}")
            if key in seen:
                raise DataError(f"{self.label}:{line}: the key {key!r} is there twice")
            seen.add(key)
            yield key, (line, value)

    def _stage(self, node: "yaml.Node", defaults: Mapping[str, tuple[int, Any]]) -> Stage:
        known = tuple(item.name for item in fields(Stage) if item.name != "where_from")
        own = dict(self._entries(node, known, "a stage"))
        at = f"{self.label}:{node.start_mark.line + 1}"
        limits = ("max_steps", "share")
        inherited = {key: entry for key, entry in defaults.items() if key not in limits or not own.keys() & {*limits}}
        entries = {**inherited, **own}
        if "name" not in own:
            raise DataError(f"{at}: the stage has no name")
        values = {key: self._value(key, line, value) for key, (line, value) in entries.items()}
        if values.get("max_steps") is not None and values.get("share") is not None:
            raise DataError(f"{at}: the stage has both max_steps and share; give one of them")
        return Stage(**values, where_from=at)

    def _value(self, key: str, line: int, node: Any) -> Any:
        value, at = self._plain(node), f"{self.label}:{line}"
        if key == "where":
            return self._where(value, at)
        if key in ("name", "data"):
            if not isinstance(value, str) or not value.strip():
                raise DataError(f"{at}: {key}={value!r} must be text that is not empty")
            return self._resolved(value) if key == "data" else value
        rule, allowed = _RULES[key]
        integer = key in ("min_tasks", "max_steps")
        if value is None and key in ("max_steps", "share"):
            return None
        if isinstance(value, bool) or not isinstance(value, int if integer else int | float) or not allowed(value):
            raise DataError(f"{at}: {key}={value!r} must be {rule}")
        return value if integer else float(value)

    def _where(self, value: Any, at: str) -> dict[str, tuple[Any, ...]]:
        if not isinstance(value, Mapping) or not value:
            raise DataError(f"{at}: where={value!r} must be a mapping of fields to values, such as {{task_type: sum}}")
        listed = {str(name): wanted if isinstance(wanted, list) else [wanted] for name, wanted in value.items()}
        for name, wanted in listed.items():
            if not wanted or not all(isinstance(item, str | int | float) for item in wanted):
                raise DataError(f"{at}: where {name}={wanted!r} must be text, a number, or a list of these")
        return {name: tuple(wanted) for name, wanted in listed.items()}

    def _resolved(self, data: str) -> str:
        """A path relative to the file, where it exists there; otherwise unchanged."""
        path = self.folder / data
        return str(path) if path.is_file() else data

    def _plain(self, node: Any) -> Any:
        from assay.support.yaml_files import plain_value

        return plain_value(node, self.label, DataError)


_RULES: Mapping[str, tuple[str, Any]] = {
    "promote_at": ("a number above 0 and at most 1", lambda value: 0 < value <= 1),
    "min_tasks": ("an integer of at least 0", lambda value: value >= 0),
    "max_steps": ("an integer of at least 1", lambda value: value >= 1),
    "share": ("a number above 0 and at most 1", lambda value: 0 < value <= 1),
    "replay": ("a number of at least 0 and below 1", lambda value: 0 <= value < 1),
}
