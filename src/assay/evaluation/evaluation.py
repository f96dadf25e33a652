"""Runs a program over tasks and collects the scores.

Failed runs are counted. Nothing is retried here: retries belong to the model client.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from assay.datasets import Task
from assay.errors import Cancelled, FailureKind
from assay.evaluation.executors import in_threads, pairs_in_threads
from assay.evaluation.failures import FirstRuns
from assay.evaluation.metrics import Budget, TaskRun, figures_of, measure, run_of, thinking_report, tool_use
from assay.evaluation.session import RecordedProgram, Session
from assay.evaluation.statistics import mean_interval
from assay.programs import program_version
from assay.rubrics import Rubric, ScoreResult
from assay.rubrics.scoring import ScoredRun, coverage_report, mean_result
from assay.support.numbers import figure
from assay.support.report import ReportRepr, measure_text
from assay.traces import Rollout, Store
from assay.traces.store.listing import find_rollouts

_BY_TASK = ("results", "task_types", "tokens", "prompt_tokens", "calls", "cost_usd", "_samples")


@dataclass(repr=False)
class Evaluation(ReportRepr):
    """Results by task id, in the order of the tasks. A task that was run several times has the mean over its
    samples."""

    results: dict[str, ScoreResult] = field(default_factory=dict)
    task_types: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, float] = field(default_factory=dict)
    prompt_tokens: dict[str, float] = field(default_factory=dict)  # of them
    calls: dict[str, float] = field(default_factory=dict)
    cost_usd: dict[str, float] = field(default_factory=dict)
    unpriced: set[str] = field(default_factory=set)  # tasks with a call whose price is not known
    runs: dict[tuple[str, int], TaskRun] = field(default_factory=dict)  # by task and sample, for the five metrics
    _samples: dict[str, list[ScoreResult]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.results)

    @property
    def scores(self) -> dict[str, float]:
        """Score by task id; NaN where unscored."""
        return {task_id: result.value for task_id, result in self.results.items()}

    def overrides(self, prompt_format: str | None) -> bool:
        """Whether the program set another prompt format in every run than the one that it was run with."""
        return prompt_format is not None and bool(sent := self.sent_formats) and prompt_format not in sent

    @property
    def sent_formats(self) -> list[str]:
        """Prompt formats of the calls of all runs."""
        return list(dict.fromkeys(name for run in self.runs.values() for name in run.prompt_formats))

    @property
    def mean(self) -> float:
        """Mean over the scored tasks; NaN where none is."""
        values = [value for value in self.scores.values() if not math.isnan(value)]
        return float(np.mean(values)) if values else math.nan

    @property
    def why_unscored(self) -> str | None:
        """Why the first task has no score, where no task has one."""
        if not self.results or self.unscored < len(self):
            return None
        first = next(iter(self.results.values()))
        return first.failed or first.feedback

    @property
    def unscored(self) -> int:
        return sum(math.isnan(value) for value in self.scores.values())

    def _facts(self) -> list[tuple[str, str]]:
        interval = mean_interval(list(self.scores.values())) if len(self) else None
        score = measure_text({"score": None if math.isnan(self.mean) else self.mean, "interval": interval})
        grades = [(name, figure(grade)) for name, grade in self.criteria().items()]
        return [("score", score), *grades, ("tasks", str(len(self))), ("unscored", str(self.unscored))]

    def only(self, task_ids: Collection[str]) -> "Evaluation":
        """The results of some of the tasks."""
        selected = set(task_ids)
        by_task = {
            name: {key: value for key, value in getattr(self, name).items() if key in selected} for name in _BY_TASK
        }
        runs = {key: run for key, run in self.runs.items() if key[0] in selected}
        return Evaluation(**by_task, unpriced=self.unpriced & selected, runs=runs)

    def add_run(self, task: Task, scored_run: ScoredRun) -> None:
        """Takes in a run of one task; another one of the same task is another sample."""
        rollout, result, has_tools = scored_run.rollout, scored_run.scored, scored_run.has_tools
        samples = self._samples.setdefault(task.id, [])
        samples.append(result)
        count = len(samples)
        run = run_of(
            rollout,
            score=result.value if result.scored else None,
            has_tools=has_tools,
            needed=task.metadata.get("tool_calls", task.expected.get("calls")),
            error=None if result.scored else result.failed or result.feedback,
            tool_figures=figures_of(task, rollout) if has_tools else {},
        )
        self.results[task.id] = mean_result(samples)
        self.task_types[task.id] = task.task_type
        prompts = sum(t.prompt_tokens or 0 for t in rollout.transitions)
        for means, value in (
            (self.tokens, run.tokens or 0),
            (self.prompt_tokens, prompts),
            (self.calls, run.steps or 0),
        ):
            means[task.id] = means.get(task.id, 0.0) + (value - means.get(task.id, 0.0)) / count
        self.cost_usd[task.id] = self.cost_usd.get(task.id, 0.0) + (run.cost_usd or 0.0)
        self.unpriced |= {task.id} if rollout.unpriced else set()
        self.runs[task.id, count - 1] = run

    def arrange(self, order: Sequence[str]) -> None:
        """Puts tasks into this order, whichever were done first; others stay before them."""
        last = {task_id: place for place, task_id in enumerate(order)}
        for by_task in (getattr(self, name) for name in _BY_TASK):
            _reorder(by_task, sorted(by_task, key=lambda task_id: last.get(task_id, -1)))
        _reorder(self.runs, sorted(self.runs, key=lambda key: (key[1], last.get(key[0], -1))))

    def criteria(self) -> dict[str, float | None]:
        """Mean grade of each final criterion over the tasks where it was decided."""
        return {name: float(np.mean(values)) if values else None for name, values in self._grades().items()}

    def criteria_intervals(self) -> dict[str, list[float] | None]:
        """95 % interval of each mean in `criteria`; None where there is none."""
        return {name: list(mean_interval(values)) if values else None for name, values in self._grades().items()}

    def _grades(self) -> dict[str, list[float]]:
        """Grades of each final criterion on the tasks where it was decided."""
        grades: dict[str, list[float]] = defaultdict(list)
        for result in self.results.values():
            for name, value in result.grades.items():
                grades[name] += [] if math.isnan(value) else [value]
        return grades

    def coverage(self) -> dict[str, Any]:
        """`coverage` and `undecided` over all runs: see `assay.rubrics.scoring`."""
        return coverage_report(
            result for samples in (self._samples or {"": list(self.results.values())}).values() for result in samples
        )

    def report(self, *, budget: Budget | None = None) -> dict[str, Any]:
        """The evaluation as a JSON-ready mapping.

        Fields: `score`, `interval`, `n`, `unscored`, `failed`, `why_failed`, `coverage`, `undecided`, `criteria`,
        `criteria_intervals`, `metrics`, `thinking`, `tool_use` (None for a program without tools), `task_types`,
        `calls_per_task`, `tokens_per_task`, `cost_usd` (None if a price is unknown).
        """
        by_type: dict[str, list[float]] = defaultdict(list)
        for task_id, value in self.scores.items():
            by_type[self.task_types[task_id]] += [] if math.isnan(value) else [value]
        low, high = mean_interval(list(self.scores.values()))
        thinking = thinking_report(list(self.runs.values()))
        reasons = [result.failed for result in self.results.values() if result.failed is not None]
        return {
            "score": None if math.isnan(self.mean) else self.mean,
            "interval": None if math.isnan(self.mean) else [low, high],
            "n": len(self),
            "unscored": self.unscored,
            "failed": len(reasons),
            "why_failed": Counter(reasons).most_common(1)[0][0] if reasons else None,
            **self.coverage(),
            "criteria": self.criteria(),
            "criteria_intervals": self.criteria_intervals(),
            "metrics": measure(list(self.runs.values()), budget=budget).to_dict(),
            "thinking": None if thinking is None else thinking.to_dict(),
            "tool_use": tool_use(list(self.runs.values())),
            "task_types": {
                kind: float(np.mean(values)) if values else None for kind, values in sorted(by_type.items())
            },
            "calls_per_task": float(np.mean(list(self.calls.values()))) if self.calls else 0.0,
            "tokens_per_task": float(np.mean(list(self.tokens.values()))) if self.tokens else 0.0,
            "cost_usd": None if self.unpriced else math.fsum(self.cost_usd.values()),
        }


def _reorder(values: dict[Any, Any], order: Sequence[Any]) -> None:
    for key in order:
        values[key] = values.pop(key)


def evaluate(
    recorded: RecordedProgram,
    tasks: Sequence[Task],
    session: Session,
    *,
    name: str = "evaluate",
    samples: int = 1,
    into: Evaluation | None = None,
    known: Mapping[tuple[str, int], ScoredRun] | None = None,
) -> Evaluation:
    """Runs and scores `tasks` concurrently.

    Args:
        samples: number of runs of each task.
        into: evaluation that receives the results, also when the call is interrupted; None makes a new one.
        known: runs of an earlier process by (task id, sample), which are not repeated; see
            `finished_runs`.
    Raises:
        BudgetExceeded, Cancelled: finished runs are in the store.
        ProgramFailed: after a preflight, each of the first runs raised an error in the program itself.
    """
    evaluation, execute = Evaluation() if into is None else into, session.executor or in_threads
    first = session.first_runs or FirstRuns(proven=True)
    with session.progress.bar(name, samples * len(tasks)) as advance:
        for sample in range(samples):
            runner = recorded if sample == 0 else recorded.another(sample)
            ahead = {task_id: run for (task_id, number), run in (known or {}).items() if number == sample}
            deciding = first.deciding(tasks)
            for task in tasks:
                if task.id in ahead:
                    evaluation.add_run(task, ahead[task.id])
                    first.done(deciding, task, ahead[task.id])
            try:
                with runner.unchanged():
                    for task, run in execute(runner, [task for task in tasks if task.id not in ahead], session):
                        evaluation.add_run(task, run)  # at once: a run holds whole prompts and answers
                        first.done(deciding, task, run)
                        advance(1)
            except KeyboardInterrupt as stop:
                session.meter.cancel()
                raise Cancelled(f"cancelled {str(stop) or 'by the user'}") from None
            finally:
                evaluation.arrange([task.id for task in tasks])
    return evaluation


def finished_runs(program: RecordedProgram, phase: str, *, errors: bool = False) -> dict[tuple[str, int], ScoredRun]:
    """Runs of one phase that an earlier process recorded, by (task id, sample).

    Only runs of this version of the program, scored with the session's rubric version, are returned.

    Args:
        errors: include runs that failed because of the model or the infrastructure. If False, they are run again.
    """
    session, version = program.session, program_version(program.program, program.settings["adapter"])
    recorder, rubric = session.recorder, f"{session.rubric.name}@{session.rubric.version}"
    store, ended = recorder.store, ("done", "failed", "error") if errors else ("done", "failed")
    if store is None:
        return {}
    equal = {
        "run_id": recorder.run_id, "phase": phase, "rubric": rubric, "source": "program", "program_version": version
    }  # fmt: skip
    found = find_rollouts(store, equal=equal)
    rows = [r for r in found if r.status in ended and r.failure is not FailureKind.CAP and r.task_id]
    return {(r.task_id, r.sample): _run_of(store.rollout(r.id), program.has_tools) for r in rows}


def recorded_runs(
    program: RecordedProgram, store: Store, *, version: str, model: str, runs: Collection[str]
) -> dict[str, ScoredRun]:
    """The newest scored run of each task by its id, of any split, that a version of the program made with a model.

    Args:
        program: has the parameters of these runs; the rubric version of its session scored them.
        version: as the store has it. That of `program_version` differs where another version of DSPy wrote the state.
        runs: ids of the runs of the store that are read.
    """
    rubric, newest = program.session.rubric, dict[str, Rollout]()
    for row in find_rollouts(store, equal={"program_version": version, "model": model, "source": "program"}):
        same = row.parameters == program.settings["parameters"] and row.rubric == f"{rubric.name}@{rubric.version}"
        if same and row.run_id in runs and row.score is not None:
            newest.setdefault(row.task_id, row)
    return {task_id: _run_of(store.rollout(row.id), program.has_tools) for task_id, row in newest.items()}


def scored_otherwise(store: Store, run_id: str, rubric: Rubric) -> int:
    """Number of rollouts of a run that another version of this rubric scored; 0 if any was scored by this one."""
    by_rubric = Counter(row.rubric for row in store.rollouts(run_id=run_id) if row.score is not None)
    if by_rubric[f"{rubric.name}@{rubric.version}"]:
        return 0
    return sum(count for name, count in by_rubric.items() if name.rpartition("@")[0] == rubric.name)


def _run_of(rollout: Rollout, has_tools: bool) -> ScoredRun:
    """Rebuilds a run from its stored rollout."""
    import dspy

    result = ScoreResult(
        value=math.nan if rollout.score is None else rollout.score,
        verdicts=tuple(rollout.verdicts),
        coverage=1.0 if rollout.coverage is None else rollout.coverage,
        feedback=next((verdict.reason for verdict in rollout.verdicts if verdict.grade is None), ""),
        failed=rollout.error if rollout.status in ("failed", "error") else None,
        failure=rollout.failure,
    )
    return ScoredRun(dspy.Prediction(**(rollout.prediction or {})), rollout, has_tools, result)


def evaluate_pairs(
    pairs: Sequence[tuple[RecordedProgram, Task]], session: Session, *, name: str = "evaluate"
) -> list[ScoredRun]:
    """Runs and scores each program on its own task, `session.threads` pairs at a time.

    Returns:
        The runs in the order of `pairs`.

    Raises:
        BudgetExceeded, Cancelled: finished runs are in the store.
    """
    by_place: dict[int, ScoredRun] = {}
    with session.progress.bar(name, len(pairs)) as advance:
        try:
            if session.executor is None:
                for place, run in pairs_in_threads(pairs, session):
                    by_place[place] = run
                    advance(1)
            else:  # hosts are sent one program at a time
                places: dict[int, list[int]] = defaultdict(list)
                for place, (recorded, _) in enumerate(pairs):
                    places[id(recorded)].append(place)
                for group in places.values():
                    by_task = {pairs[place][1].id: place for place in group}
                    for task, run in session.executor(
                        pairs[group[0]][0], [pairs[place][1] for place in group], session
                    ):
                        by_place[by_task[task.id]] = run
                        advance(1)
        except KeyboardInterrupt as stop:
            session.meter.cancel()
            raise Cancelled(f"cancelled {str(stop) or 'by the user'}") from None
    runs = [by_place[place] for place in range(len(pairs))]
    if session.first_runs is not None:
        session.first_runs.add(runs)
    return runs
