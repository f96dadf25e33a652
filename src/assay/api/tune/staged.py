"""A search by the stages of a curriculum: one study per stage, then the best points of all stages on the whole val."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from assay.api.tune.study import study_of
from assay.datasets import Task
from assay.datasets.schedule import Schedule
from assay.errors import BudgetExceeded
from assay.evaluation import Progress
from assay.optimizers.parameters import Point, ProgramObjective, SearchOutcome, Space, outcome_of, search
from assay.runs.curricula import keep_schedule
from assay.runs.jobs import Job
from assay.runs.settings import TuneSettings

if TYPE_CHECKING:
    import optuna


class StagedSearch:
    """Searches stage by stage, then compares the default and the best point of each stage on all val tasks.

    A stage has the trials that are left, or those of its limit, and ends as soon as its best trial reaches
    `promote_at`. Without a limit, a stage that is not passed is the last one. Later stages begin with the best points
    of earlier ones. The studies are in the storage, so that a resumed run continues with the same trials.
    """

    def __init__(
        self, job: Job, objective: ProgramObjective, space: Space, default: Point, config: TuneSettings, url: str,
        schedule: Schedule, progress: Progress,
    ) -> None:  # fmt: skip
        self.job, self.objective, self.space, self.config = job, objective, space, config
        self.url, self.schedule, self.progress = url, schedule, progress
        self.points = [default]  # and the best of each stage
        self.last: SearchOutcome | None = None  # of the newest stage with a complete trial
        self.task_runs, self.states = 0, list[str]()  # of the stages that have ended
        self.report: dict[str, Any] = {}

    def run(self) -> tuple[SearchOutcome, str | None]:
        """The outcome of the comparison, and why the search was stopped, if it was."""
        try:
            self._search()
            return self._noted(self._compared()), None
        except BudgetExceeded as cap:
            if self.last is None:
                raise
            self.progress.say(f"end of the search: {cap}; continuing with the best trial of the last stage")
            return self._noted(self.last), str(cap)
        finally:
            self.report = keep_schedule(self.schedule)

    def _search(self) -> None:
        schedule, used = self.schedule, 0
        while not schedule.complete and used < self.config.trials:
            stage, tasks = schedule.stage, schedule.val_tasks()
            limit = stage.limit(self.config.trials)
            trials = min(self.config.trials - used, limit or self.config.trials)
            self.progress.say(f"stage {stage.name}: up to {trials} trials of {len(tasks)} val tasks")
            outcome = self._searched(stage.name, trials, tasks, stage.promote_at)
            used += len(outcome.trials)
            self.states += outcome.states
            self.task_runs += outcome.task_runs
            if outcome.best.point not in self.points:
                self.points.append(outcome.best.point)
            if not schedule.scored(_top(outcome), used):
                if limit is None or trials < limit:
                    break
                schedule.leave(used)

    def _searched(self, name: str, trials: int, tasks: Sequence[Task], enough: float) -> SearchOutcome:
        study = study_of(self.job, self.config, self.space, self.url, stage=name)
        config, objective = replace(self.config.search, trials=trials), self.objective.named(f"stage {name}, ")
        try:
            search(
                objective, tasks, self.space, config, study, defaults=self.points, progress=self.progress, alone=True,
                until=_reached(enough),
            )  # fmt: skip
        finally:
            if any(trial.state.name == "COMPLETE" for trial in study.get_trials(deepcopy=False)):
                self.last = outcome_of(study, self.space, config, len(tasks))
        assert self.last is not None  # otherwise the search has raised
        return self.last

    def _compared(self) -> SearchOutcome:
        """Each point on all val tasks. The study is that of the run, which the page shows."""
        val = self.job.splits.val
        self.progress.say(f"comparison of the default and the best points of the stages on all {len(val)} val tasks")
        study = study_of(self.job, self.config, self.space, self.url)
        config = replace(self.config.search, trials=len(self.points), pruner="none")
        search(self.objective, val, self.space, config, study, defaults=self.points, progress=self.progress, alone=True)
        return outcome_of(study, self.space, config, len(val))

    def _noted(self, outcome: SearchOutcome) -> SearchOutcome:
        """The outcome of the comparison, or of the last stage, with what the stages add to it."""
        notes = [*outcome.notes, *self.schedule.notes()]
        return replace(outcome, earlier=self.states, task_runs=outcome.task_runs + self.task_runs, notes=notes)


def _top(outcome: SearchOutcome) -> float:
    """The highest score of a complete trial."""
    scores = [trial.values["score"] for trial in outcome.trials if trial.state == "complete"]
    return max((score for score in scores if score is not None), default=math.nan)


def _reached(score: float) -> "Callable[[optuna.Study], bool]":
    def reached(study: "optuna.Study") -> bool:
        complete = [trial.value for trial in study.get_trials(deepcopy=False) if trial.state.name == "COMPLETE"]
        return any(value is not None and value >= score for value in complete)

    return reached
