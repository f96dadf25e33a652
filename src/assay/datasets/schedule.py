"""Which tasks of a curriculum are next: the stage of each step, promotion on val, replay of earlier stages.

The state is the order of the tasks and the moves so far, so that a resumed run continues with the same order. Gate and
test are never read. Does not run tasks.
"""

import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from assay.datasets.curriculum import Curriculum, Stage
from assay.datasets.tasks import Task

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
