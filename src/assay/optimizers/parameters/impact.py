"""Effect of each parameter on every metric: one parameter varies over its range, the others are fixed."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.trial import FrozenTrial, TrialState, create_trial

from assay.errors import ProgramError
from assay.evaluation.metrics import METRICS, Budget, TaskRun, measure
from assay.evaluation.progress import Progress, SilentProgress
from assay.optimizers.parameters.objective import Objective, runs_by_task
from assay.optimizers.parameters.results import first_by_task, state_name
from assay.optimizers.parameters.space import Point, Space, in_figures
from assay.reports.files import write_report
from assay.reports.studies import FEWEST, EffectRow, StudyTrial, effect_charts, study_page
from assay.support.values import json_value

_RESAMPLES = 200
_EXTRA = ("tokens", "seconds")


@dataclass(frozen=True)
class Effect:
    """One value of a parameter: each metric and its change from the start, with 95 % intervals.

    An interval is None if fewer than five tasks, or no run, measure the metric.
    """

    parameter: str
    value: float
    metrics: dict[str, dict[str, float | None]]
    changes: dict[str, dict[str, float | None]]

    def cell(self, name: str) -> str:
        """A metric as a table cell, with a star if the interval of its change excludes 0."""
        value, change = self.metrics[name]["mean"], self.changes[name]
        if value is None:
            return "–"
        moved = change["low"] is not None and change["high"] is not None and change["low"] * change["high"] > 0
        return (f"{value:.2f}" if name in METRICS else f"{value:.0f}") + ("*" if moved else "")


@dataclass(frozen=True)
class Impact:
    """Effects of all parameters.

    `before` are the metrics at the start. `without_effect` are parameters at whose values every run was the same as at
    the start. `failed` has the reasons why the agent could not take a value.
    """

    start: Point
    n: int
    effects: list[Effect]
    without_effect: list[str]
    before: dict[str, dict[str, float | None]]
    failed: list[str]

    @property
    def measured(self) -> list[str]:
        """Names of the metrics (and tokens) that at least one run measured."""
        return [
            name
            for name in (*METRICS, "tokens")
            if any(effect.metrics[name]["mean"] is not None for effect in self.effects)
        ]

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = json_value(self)
        data["start"]["metrics"] = data.pop("before")
        return data


def impact(
    objective: Objective,
    tasks: Sequence[Any],
    space: Space,
    start: Point,
    *,
    levels: int = 5,
    budget: Budget | None = None,
    progress: Progress | None = None,
) -> Impact:
    """Runs the agent on the tasks at `levels` values of each parameter.

    Args:
        start: values of the fixed parameters; it has a value for every searched parameter.
    """
    progress, budget = progress or SilentProgress(), budget or Budget()
    names = space.searched(start.program)
    plans = {name: sorted({space.at(name, place) for place in np.linspace(0, 1, levels)}) for name in names}
    before = objective.run(start, tasks)
    effects, without_effect, failed = list[Effect](), list[str](), list[str]()
    with progress.bar("values", sum(map(len, plans.values()))) as advance:
        for name, values in plans.items():
            traces = []
            for value in values:
                advance(1)
                try:
                    runs = objective.run(Point(start.program, {**start.parameters, name: value}), tasks)
                except ProgramError as error:
                    failed.append(f"{name}={value}: {error}")
                    continue
                traces.append(_trace(runs))
                metrics, changes = _measured(before, runs, budget)
                effects.append(Effect(name, float(value), metrics, changes))
            if traces and all(trace == _trace(before) for trace in traces):
                without_effect.append(name)
    return Impact(start, len(tasks), effects, without_effect, _measured(before, before, budget)[0], failed)


def _trace(runs: Sequence[TaskRun]) -> list[Any]:
    scores = [None if run.score is not None and np.isnan(run.score) else run.score for run in runs]
    return [
        (run.task_id, run.sample, score, run.steps, run.tokens, run.answer)
        for run, score in zip(runs, scores, strict=True)
    ]


def _values(runs: Sequence[TaskRun], budget: Budget) -> dict[str, float]:
    metrics = measure(runs, budget=budget).to_dict()
    for name in _EXTRA:
        measured = [value for run in runs if (value := getattr(run, name)) is not None]
        metrics[name] = float(np.mean(measured)) if measured else None
    return {name: np.nan if value is None else value for name, value in metrics.items()}


def _measured(
    before: Sequence[TaskRun], after: Sequence[TaskRun], budget: Budget
) -> tuple[dict[str, dict[str, float | None]], dict[str, dict[str, float | None]]]:
    """Metrics of `after` and their change from `before`, with 95 % bootstrap intervals over the tasks."""
    sides = [runs_by_task(before), runs_by_task(after)]
    tasks = sorted(sides[0].keys() & sides[1].keys())
    rng = np.random.default_rng(0)
    draws = [rng.integers(0, len(tasks), len(tasks)) for _ in range(_RESAMPLES)] if len(tasks) >= 5 else []
    point = [_values(runs, budget) for runs in (before, after)]
    # each draw counts as a new task, so that a task drawn twice does not raise the coherence
    drawn = [
        [
            _values([replace(run, task_id=str(k)) for k, at in enumerate(rows) for run in side[tasks[at]]], budget)
            for rows in draws
        ]
        for side in sides
    ]
    names = (*METRICS, *_EXTRA)
    metrics = {name: _interval(point[1][name], [draw[name] for draw in drawn[1]]) for name in names}
    changes = {
        name: _interval(point[1][name] - point[0][name], [b[name] - a[name] for a, b in zip(*drawn, strict=True)])
        for name in names
    }
    return metrics, changes


def _interval(value: float, draws: Sequence[float]) -> dict[str, float | None]:
    if np.isnan(value):
        return {"mean": None, "low": None, "high": None}
    valid = np.array([draw for draw in draws if not np.isnan(draw)])
    if len(valid) < 0.9 * _RESAMPLES:
        return {"mean": float(value), "low": None, "high": None}
    low, high = np.percentile(valid, [2.5, 97.5])
    return {"mean": float(value), "low": float(low), "high": float(high)}


# -- The report of a study: one HTML page that loads nothing.


def importance(study: optuna.Study) -> dict[str, dict[str, float]]:
    """Share of the first objective's variation that each parameter accounts for, by two evaluators; each sums to 1.

    Pruned trials count with the mean of the tasks they ran. `fanova`: Hutter, Hoos, Leyton-Brown 2014;
    `ped_anova`: Watanabe, Bansal, Hutter 2023, for the best tenth. Empty if there are too few trials or all
    values are equal.
    """
    makers: dict[str, Callable[[], Any]] = {
        "fanova": lambda: optuna.importance.FanovaImportanceEvaluator(seed=0),
        "ped_anova": optuna.importance.PedAnovaImportanceEvaluator,
    }
    scored, importances = with_pruned_trials(study), dict[str, dict[str, float]]()
    if len(scored.trials) < FEWEST or len({trial.values[0] for trial in scored.trials}) < 2:
        return importances
    for name, make in makers.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                importances[name] = optuna.importance.get_param_importances(
                    scored, evaluator=make(), target=lambda trial: float(trial.values[0])
                )
            except (RuntimeError, ValueError):  # no variance at all; too few distinct values
                continue
    return {
        name: {key: float(value) for key, value in values.items()}
        for name, values in importances.items()
        if sum(values.values()) > 0
    }


def write_page(
    folder: Path,
    study: optuna.Study | None,
    objectives: Sequence[str],
    *,
    title: str,
    facts: Mapping[str, Any],
    impact: Impact | None = None,
) -> Path:
    """Writes `study.html`, which loads nothing, into a folder.

    Args:
        facts: values at the top of the page, by name.
        impact: effect of each parameter alone, drawn first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    page = study_page(trials_in(study, objectives), objectives, importance={} if study is None else importance(study))
    if impact is not None:
        page = replace(page, **_effects(impact))
    return write_report(
        folder / "study.html", "report_study.html", title=title, notes=[], page=page, result=[],
        facts=[(name.capitalize(), str(value)) for name, value in facts.items()],
    )  # fmt: skip


def trials_in(study: optuna.Study | None, objectives: Sequence[str]) -> list[StudyTrial]:
    """The finished trials of a study; a pruned one with the mean of the tasks that it ran."""
    trials = []
    for trial in () if study is None else study.get_trials(deepcopy=False):
        if not trial.state.is_finished():
            continue
        if trial.state == TrialState.COMPLETE:
            values = dict(zip(objectives, trial.values, strict=True))
        else:
            mean = _mean_of_tasks(trial)
            values = {} if mean is None else {objectives[0]: mean}
        parameters = {name: value for name, value in trial.params.items() if isinstance(value, int | float)}
        trials.append(
            StudyTrial(
                number=trial.number, state=state_name(trial), parameters=parameters, values=values,
                n=len(first_by_task(trial)) or None,
            )
        )  # fmt: skip
    return trials


def _mean_of_tasks(trial: FrozenTrial) -> float | None:
    """Mean score of the tasks that a trial ran; None without any."""
    scores = [score for score in first_by_task(trial).values() if score is not None]
    return sum(scores) / len(scores) if scores else None


def with_pruned_trials(study: optuna.Study) -> optuna.Study:
    """A copy in which pruned trials are complete, with the mean of their tasks (only single objectives are pruned)."""
    copy = optuna.create_study(directions=study.directions)
    for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)):
        mean = None if trial.state == TrialState.COMPLETE else _mean_of_tasks(trial)
        values = trial.values if trial.state == TrialState.COMPLETE else None if mean is None else [mean]
        if values is not None:
            copy.add_trial(create_trial(params=trial.params, distributions=trial.distributions, values=values))
    return copy


def _effects(impact: Impact) -> dict[str, Any]:
    """The effects of each parameter alone, as `StudyPage` has them."""
    names = impact.measured
    idle_note = f" No run changed under {', '.join(impact.without_effect)}." if impact.without_effect else ""
    start = ", ".join(f"{name} {in_figures(value)}" for name, value in impact.start.parameters.items())
    before = ["–" if (value := impact.before[name]["mean"]) is None else in_figures(value) for name in names]
    rows = [EffectRow(parameter=e.parameter, value=in_figures(e.value), cells=list(map(e.cell, names)))
            for e in impact.effects]  # fmt: skip
    return {
        "effects": effect_charts(list(map(vars, impact.effects)), names),
        "effects_note": f"{impact.n} tasks; bars are 95 % intervals. The start: {start}.{idle_note}",
        "effect_names": names,
        "effect_rows": [EffectRow(parameter="start", value="", cells=before), *rows],
    }
