"""Curricula: stages of data by difficulty, read from YAML or JSON. Does not load the data or run anything.

`assay.datasets.curriculum` reads the tasks of the stages, `assay.datasets.schedule` decides which stage is next.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.datasets.tasks import Task
from assay.errors import DataError, unspoken
from assay.support.names import nearest
from assay.support.package import CONTENT

PREFIX = "curriculum:"  # of the dataset with the tasks of all stages
SHIPPED = ("tool_use",)
STAGE = "curriculum_stage"  # key of a task's metadata


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
    from assay.datasets.curriculum_file import CurriculumFile
    from assay.support.yaml_files import read_text
    from assay.support.yaml_models import line_of, parse_yaml

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
    parsed, node = parse_yaml(text, label, CurriculumFile, "a curriculum is a mapping with a list of stages", DataError)
    stages = dict[str, Stage]()
    for at, own in enumerate(parsed.stages):
        place = f"{label}:{line_of(node, ('stages', at))}"
        if own.name in stages:
            raise DataError(f"{place}: there are two stages {own.name!r}; names must differ")
        values = {name: getattr(part, name) for part in (parsed, own) for name in part.model_fields_set - {"stages"}}
        if (data := values.get("data")) is not None and (path.parent / data).is_file():
            values["data"] = str(path.parent / data)  # relative to the file, where it exists there
        stages[own.name] = Stage(**values, where_from=place)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Curriculum(name=path.stem, stages=tuple(stages.values()), source=str(source), sha256=digest)


# -- Tasks of the stages of a curriculum: reads the data of each stage, filters it, and marks each task with its stage.


_LISTED = 8  # values that an error lists


def staged_tasks(curriculum: Curriculum, data: str | None, read: Callable[[str], Iterator[Task]]) -> Iterator[Task]:
    """The tasks of all stages in their order, each with its stage in the metadata.

    A task of type `default` gets the stage as its type, so that samples are balanced over stages and reports show
    each. A task of several stages belongs to the first of them.

    Args:
        data: spec of the tasks of stages that name no data.
        read: the tasks of a spec.
    Raises:
        DataError: a stage has no tasks, or its data cannot be read; the message names the line of the stage.
    """
    stage_of_task = dict[str, str]()  # by key; a sample of the first stage may have dropped the task
    for stage in curriculum.stages:
        spec = _spec_of(stage, data)
        matched = own = 0
        selection = _Selection(stage, spec)
        try:
            for task in read(spec):
                if selection.takes(task):
                    matched += 1
                    if stage_of_task.setdefault(task.key, stage.name) == stage.name:
                        own += 1
                        yield _marked(task, stage)
        except DataError as error:
            raise DataError(f"{stage.where_from}: stage {stage.name!r}: {unspoken(error)}") from None
        if not matched:
            raise selection.nothing()
        if not own:
            raise DataError(
                f"{stage.where_from}: every task of the stage {stage.name!r} is in an earlier stage too, to which it "
                "belongs: select other tasks with 'where', or remove the stage"
            )


def _spec_of(stage: Stage, data: str | None) -> str:
    spec = stage.data if stage.data is not None else data
    if spec is None or (stage.data is None and spec.startswith(PREFIX)):
        raise DataError(
            f"{stage.where_from}: the stage {stage.name!r} names no data, and the command was given none: add "
            "'data' to the stage, or give `data`, which its filter selects from"
        )
    if spec.startswith(PREFIX):
        raise DataError(
            f"{stage.where_from}: the data of stage {stage.name!r} is a curriculum ({spec}): name the path or spec of "
            "tasks"
        )
    return spec


def _marked(task: Task, stage: Stage) -> Task:
    return dataclasses.replace(
        task,
        task_type=stage.name if task.task_type == "default" else task.task_type,
        metadata={**task.metadata, STAGE: stage.name},
    )


class _Selection:
    """Filters the rows of a stage. Collects the values in the data, for the error if no row matches."""

    def __init__(self, stage: Stage, spec: str) -> None:
        self.stage, self.spec = stage, spec
        self.names: dict[str, None] = {}
        self.values: dict[str, dict[str, None]] = {name: {} for name in stage.where}

    def takes(self, task: Task) -> bool:
        if not self.stage.where:
            return True
        fields = {**task.expected, **task.metadata, "task_type": task.task_type}
        self.names.update(dict.fromkeys(fields))
        for name, values in self.values.items():
            if name in fields and len(values) <= _LISTED:
                values[str(fields[name])] = None
        return all(_is_among(fields.get(name), wanted) for name, wanted in self.stage.where.items())

    def nothing(self) -> DataError:
        start = f"{self.stage.where_from}: the stage {self.stage.name!r} has no tasks"
        if not self.names:
            return DataError(f"{start}: {self.spec} has no rows")
        for name, values in self.values.items():
            if not values:
                near = nearest(name, self.names)
                hint = f"did you mean {near!r}?" if near else f"there are {', '.join(sorted(self.names))}"
                return DataError(f"{start}: no row of {self.spec} has a field {name!r}; {hint}")
        listed = "; ".join(f"{name} is {_list(list(values))}" for name, values in self.values.items())
        wanted = ", ".join(f"{name}={_list(list(map(str, w)))}" for name, w in self.stage.where.items())
        return DataError(f"{start}: no row of {self.spec} has {wanted}. In the data {listed}")


def _is_among(value: Any, wanted: Sequence[Any]) -> bool:
    """Whether a value is one of the wanted ones; values of CSV files are text."""
    return any(value == item or (value is not None and str(value) == str(item)) for item in wanted)


def _list(values: Sequence[str]) -> str:
    return " or ".join(values[:_LISTED]) + (" or others" if len(values) > _LISTED else "")


def check_stages(curriculum: Curriculum, parts: Mapping[str, Sequence[Task]], splits: Sequence[str]) -> None:
    """Checks that each stage has tasks in these splits.

    Raises:
        DataError: one has none, with the way out.
    """
    for stage in curriculum.stages:
        for split in splits:
            if not any(stage_of(task.metadata) == stage.name for task in parts[split]):
                raise DataError(
                    f"{stage.where_from}: the stage {stage.name!r} has no {split} task: add tasks to it, or take more "
                    f"of them (`{split}_size`)"
                )
