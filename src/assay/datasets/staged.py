"""Tasks of the stages of a curriculum: reads the data of each stage, filters it, and marks each task with its stage."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from assay.datasets.curriculum import PREFIX, STAGE, Curriculum, Stage, stage_of
from assay.datasets.tasks import Task
from assay.errors import DataError
from assay.support.settings import nearest

__all__ = ["check_stages", "staged_tasks"]

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
            raise DataError(f"{stage.where_from}: stage {stage.name!r}: {error}", flag=error.flag) from None
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
            "'data' to the stage, or give the data that its filter selects from",
            flag="--data D",
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
                    f"of them with sizes={{{split!r}: N}}"
                )
