"""Curricula: stages of data by difficulty, read from YAML or JSON, and the schedule of a run: which tasks are next.

The stage of each step follows from promotion on val and replay of earlier stages. The state of a schedule is the order
of the tasks and the moves so far, so that a resumed run continues with the same order. Gate and test are never read.
Does not run tasks.
"""

import dataclasses
import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
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
    from assay.support.yaml_files import line_of, parse_yaml, read_text

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


_LOST = 0.2  # share of the val tasks that may be unscored, as in a trial of `assay tune`


def promotion_score(scores: Collection[float]) -> float:
    """Mean of the scores of val tasks; NaN, which promotes no stage, if more than a fifth are unscored."""
    known = [score for score in scores if not math.isnan(score)]
    if not known or len(known) < (1 - _LOST) * len(scores):
        return math.nan
    return math.fsum(known) / len(known)


@dataclass(frozen=True)
class Drawn:
    """A task of a step. `stage` is the one it was drawn from; it differs from the current one for a replay."""

    step: int
    stage: str
    task: str
    replayed: bool = False


@dataclass(frozen=True)
class Event:
    """An evaluation of a stage on val, or its end.

    Attributes:
        step: number of steps before it.
        kind: `scored`: evaluated and not passed; `passed`: reached `promote_at`; `limit`: ended by its limit.
        score: mean on the stage's val tasks, in [0, 1]; None if it was not scored.
        reason: why, as text.
    """

    step: int
    stage: str
    kind: str
    score: float | None
    reason: str


@dataclass
class Schedule:
    """The order of the tasks of a run.

    Args:
        train: tasks by stage.
        val: tasks by stage, on which promotion is decided.
        log: file of the report, which `assay.jobs.curricula` writes.
        steps: number of steps of the run, for stages with a share of it; None if each stage is one step.
        say: called with a line of text for each move.
    """

    curriculum: Curriculum
    train: Mapping[str, Sequence[Task]]
    val: Mapping[str, Sequence[Task]]
    log: Path
    seed: int = 0
    steps: int | None = None
    say: Callable[[str], None] = lambda _: None
    order: list[Drawn] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    @property
    def _moves(self) -> list[Event]:
        return [event for event in self.events if event.kind != "scored"]

    @property
    def position(self) -> int:
        """Index of the current stage; the last one remains current after it was passed."""
        return min(len(self._moves), len(self.curriculum.stages) - 1)

    @property
    def stage(self) -> Stage:
        return self.curriculum.stages[self.position]

    @property
    def complete(self) -> bool:
        """Whether the last stage has ended."""
        return len(self._moves) >= len(self.curriculum.stages)

    @property
    def _began(self) -> int:
        """The step at which the current stage began."""
        earlier = self._moves[: len(self.curriculum.stages) - 1]
        return earlier[-1].step if earlier else 0

    def tasks_of_step(self, step: int, size: int) -> list[Task]:
        """The tasks of a step, drawn once. A step that is run again, after an interruption, gets the same tasks.

        Each task of the current stage is drawn once before any repeats, and no task is twice in a step if there are
        enough. Each place of a step is given to a task of an earlier stage with the probability `replay`.
        """
        self.order = [entry for entry in self.order if entry.step < step]
        if not self.complete and self._at_limit(step):
            self.leave(step)
        position, rng = self.position, random.Random(f"{self.seed}/{step}")
        drawn = Counter((entry.stage, entry.task) for entry in self.order if not entry.replayed)
        chosen: dict[tuple[str, str], Task] = {}
        tasks = list[Task]()
        for _ in range(size):
            replayed = position > 0 and rng.random() < self.stage.replay
            name = self.curriculum.stages[rng.randrange(position)].name if replayed else self.stage.name
            free = [task for task in self.train[name] if (name, task.id) not in chosen] or list(self.train[name])
            task = rng.choice(free) if replayed else self._next(name, free, drawn)
            drawn[name, task.id] += not replayed
            chosen[name, task.id] = task
            tasks.append(task)
            self.order.append(Drawn(step, name, task.id, replayed))
        return tasks

    def whole_stage(self, step: int) -> list[Task]:
        """All train tasks of the current stage, and tasks of earlier stages, so that these are `replay` of all."""
        stage, rng = self.stage, random.Random(f"{self.seed}/{step}")
        tasks = list(self.train[stage.name])
        earlier = [(s.name, task) for s in self.curriculum.stages[: self.position] for task in self.train[s.name]]
        wanted = round(len(tasks) * stage.replay / (1 - stage.replay))
        replayed = rng.sample(earlier, min(wanted, len(earlier)))
        self.order += [Drawn(step, stage.name, task.id) for task in tasks]
        self.order += [Drawn(step, name, task.id, True) for name, task in replayed]
        return [*tasks, *(task for _, task in replayed)]

    def _next(self, name: str, tasks: Sequence[Task], drawn: Mapping[tuple[str, str], int]) -> Task:
        """The task that was drawn least often; of several, one by a hash, so that each round has its own order."""

        def rank(task: Task) -> tuple[int, bytes]:
            times = drawn.get((name, task.id), 0)
            return times, hashlib.sha256(f"{self.seed}/{name}/{times}/{task.id}".encode()).digest()

        return min(tasks, key=rank)

    def _at_limit(self, step: int) -> bool:
        limit = None if self.steps is None else self.stage.limit(self.steps)
        last = self.position == len(self.curriculum.stages) - 1
        return limit is not None and not last and step - self._began >= limit

    def val_tasks(self, most: int | None = None) -> list[Task]:
        """The val tasks of the current stage, `most` of them."""
        return list(self.val[self.stage.name])[:most]

    def scored(self, score: float, step: int) -> bool:
        """Records the score on the current stage's val tasks after `step` steps, and moves on if it is enough.

        Args:
            score: in [0, 1]; NaN if it is unknown, see `promotion_score`.
        Returns:
            Whether the stage has ended.
        """
        if self.complete:
            return False
        needed = self.stage.promote_at
        if math.isnan(score):
            self._add("scored", step, None, "val could not be scored, or more than a fifth of it could not")
            return False
        if score < needed:
            self._add("scored", step, score, f"val {score:.3f} is below {needed:g}")
            return False
        self._move("passed", step, score, f"val {score:.3f} reaches {needed:g}")
        return True

    def leave(self, step: int) -> None:
        """Ends the current stage, whose limit is reached, without promotion."""
        best = self._best(self.stage.name)
        scores = "it was never scored on val" if best is None else f"its best val score is {best:.3f}"
        self._move("limit", step, None, f"limit reached without promotion at {self.stage.promote_at:g}; {scores}")

    def _move(self, kind: str, step: int, score: float | None, reason: str) -> None:
        name, following = self.stage.name, self.curriculum.stages[self.position + 1 :]
        self._add(kind, step, score, reason)
        then = f"continuing with stage {following[0].name!r}" if following else "it was the last stage"
        self.say(f"curriculum, step {step}: stage {name!r}: {reason}; {then}")

    def _add(self, kind: str, step: int, score: float | None, reason: str) -> None:
        self.events.append(Event(step, self.stage.name, kind, score, reason))

    def _best(self, name: str) -> float | None:
        scores = [event.score for event in self.events if event.stage == name and event.score is not None]
        return max(scores, default=None)

    # -- state and report

    def state(self) -> dict[str, Any]:
        """The state as JSON."""
        return {"order": [asdict(entry) for entry in self.order], "events": [asdict(event) for event in self.events]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from `state()` of an earlier process with the same curriculum."""
        self.order = [Drawn(**entry) for entry in state["order"]]
        self.events = [Event(**event) for event in state["events"]]

    def report(self) -> dict[str, Any]:
        """For the report: each stage with its tasks and its end, the events, and the order of the tasks."""
        ends = dict(zip((stage.name for stage in self.curriculum.stages), self._moves, strict=False))
        reached = {stage.name for stage in self.curriculum.stages[: self.position + 1]}
        stages = [
            {
                "name": stage.name,
                "status": _status(ends.get(stage.name), stage.name in reached),
                "best_val": self._best(stage.name),
                "promote_at": stage.promote_at,
                "drawn": sum(entry.stage == stage.name and not entry.replayed for entry in self.order),
                "replayed": sum(entry.stage == stage.name and entry.replayed for entry in self.order),
                "train": len(self.train[stage.name]),
                "val": len(self.val[stage.name]),
            }
            for stage in self.curriculum.stages
        ]
        return {
            "name": self.curriculum.name,
            "sha256": self.curriculum.sha256,
            "stage": self.stage.name,
            "stages": stages,
            "path": str(self.log),
            **self.state(),
        }

    def notes(self) -> list[str]:
        """What a user should know at the end: stages that were not passed, and stages that were not reached."""
        rows = self.report()["stages"]
        notes = []
        for row in rows:
            if row["status"] == "not passed":
                best = "not scored on val" if row["best_val"] is None else f"best val score {row['best_val']:.3f}"
                notes.append(f"stage {row['name']!r} was not passed: {best}, needed is {row['promote_at']:g}")
        if missed := [row["name"] for row in rows if row["status"] == "not reached"]:
            notes.append(
                f"stages not reached: {', '.join(missed)}. Lower promote_at, set max_share, or take more steps"
            )
        return notes


def _status(end: Event | None, reached: bool) -> str:
    if not reached:
        return "not reached"
    return "passed" if end is not None and end.kind == "passed" else "not passed"
