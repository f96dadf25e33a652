"""Results of a study of agent parameters: its trials, and the best of them. Runs nothing."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import optuna
from optuna.trial import FrozenTrial

from assay.errors import ModelError
from assay.optimizers.parameters.space import Point, Space
from assay.optimizers.settings import OBJECTIVES, SearchConfig
from assay.support.report import ReportRepr, shortened

# -- Expected scores of trials, smoothed over similar parameters. Does not choose a trial.


_FEWEST = 10  # trials; with fewer, their own means are used
_NOISE = 1e-4  # smallest variance of a run's sampling noise
_ROUNDS = 20


@dataclass(frozen=True)
class Expected:
    """Of a trial: its own mean, adjusted for the tasks it did not run, the standard error, and the smoothed mean."""

    adjusted: float
    error: float
    mean: float


def smoothed_scores(points: Sequence[Point], values: Sequence[Mapping[str, float]], space: Space) -> list[Expected]:
    """Expected score of each trial: posterior mean of a Gaussian process over the space.

    Source: Rasmussen and Williams 2006, ch. 2; kernel Matérn 5/2. All trials run the same tasks, so the difficulty of a
    task is not noise: means and noise are those of the additive model value = trial + task + noise, fitted by least
    squares. A pruned trial counts with the tasks it ran.

    Args:
        values: by trial, the value of each task; no trial is empty.
    Returns:
        One per trial. With fewer than ten trials, or where all means are equal, each has its own mean.
    """
    adjusted, noise = _means(values)
    counts = np.array([len(trial) for trial in values])
    errors = np.sqrt(noise / np.maximum(counts, 1))
    spread = float(adjusted.std()) if len(adjusted) else 0.0
    means = (
        adjusted if len(adjusted) < _FEWEST or spread < 1e-9 else _posterior(points, adjusted, errors, spread, space)
    )
    return [
        Expected(float(at), float(error), float(mean)) for at, error, mean in zip(adjusted, errors, means, strict=True)
    ]


def _means(values: Sequence[Mapping[str, float]]) -> tuple[np.ndarray, float]:
    """Each trial's mean, adjusted for missing tasks, and the residual variance of the additive model."""
    names = sorted({task for trial in values for task in trial})
    table = np.array([[trial.get(task, np.nan) for task in names] for trial in values]).reshape(len(values), len(names))
    ran = ~np.isnan(table)
    filled, trials, tasks = np.where(ran, table, 0.0), np.zeros(len(values)), np.zeros(len(names))
    for _ in range(_ROUNDS):  # backfitting: each effect is the mean of what the other leaves
        trials = (filled - tasks * ran).sum(axis=1) / np.maximum(ran.sum(axis=1), 1)
        tasks = (filled - trials[:, None] * ran).sum(axis=0) / np.maximum(ran.sum(axis=0), 1)
        tasks -= tasks.mean() if len(tasks) else 0.0
    residuals = np.where(ran, table - trials[:, None] - tasks, 0.0)
    free = ran.sum() - len(values) - len(names) + 1
    return trials, max(float((residuals**2).sum() / free) if free > 0 else _NOISE, _NOISE)


def _posterior(
    points: Sequence[Point], adjusted: np.ndarray, errors: np.ndarray, spread: float, space: Space
) -> np.ndarray:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern

    kernel = ConstantKernel(1.0, (1e-2, 10.0)) * Matern(0.5, (0.05, 5.0), nu=2.5)
    process = GaussianProcessRegressor(kernel, alpha=(errors / spread) ** 2)
    places, centre = np.array([_place(point, space) for point in points]), float(adjusted.mean())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a length at a bound is a valid fit
        fitted = process.fit(places, (adjusted - centre) / spread)
    return np.asarray(fitted.predict(places) * spread + centre)


def _place(point: Point, space: Space) -> list[float]:
    """Coordinates in [0, 1]: the parameters (0.5 for one without effect in the program), then one per program."""
    parameters = [
        space.place(name, point.parameters[name]) if name in space.searched(point.program) else 0.5
        for name in space.ranges
    ]
    return [
        *parameters,
        *([float(point.program == program) for program in space.programs] if len(space.programs) > 1 else []),
    ]


# -- Results.


REQUEUED = "put_back"  # marks an interrupted trial whose point was enqueued again under another number
_STATES = ("complete", "pruned", "failed")
_LEVEL = 0.01  # scores this close to the best are a tie, which the fewest tokens decide


@dataclass(frozen=True)
class TrialResult:
    """One finished trial.

    `state` is `complete`, `pruned` or `failed` (with `error`). `scores` are by task, None if unscored. `runs` counts
    the runs of all tasks.
    """

    number: int
    point: Point
    state: str
    values: Mapping[str, float | None]
    scores: Mapping[str, float | None]
    metrics: Mapping[str, float | None]
    tokens: float | None
    error: str | None = None
    runs: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "number": self.number,
            **vars(self.point),
            "state": self.state,
            "values": dict(self.values),
            "n": len(self.scores),
            "metrics": dict(self.metrics),
            "tokens": self.tokens,
            "error": self.error,
        }


@dataclass(repr=False)
class SearchOutcome(ReportRepr):
    """Result of a search.

    `expected` is the score of each trial by number, smoothed over its neighbours; `best` is chosen by it if the score
    is the first objective. `policy_training` has a policy's episodes and confirmed points. `saved` is the share of task
    runs that pruning saved. `front` has the numbers of the Pareto front's trials; with one objective only the best.
    `earlier` has the states of the trials of a curriculum's stages, which are not among `trials`.
    """

    best: TrialResult
    default: TrialResult | None
    trials: list[TrialResult]
    task_runs: int
    saved: float
    front: list[int]
    level: list[int] = field(default_factory=list)  # complete trials whose own first objective ties with the best's
    expected: dict[int, float] = field(default_factory=dict)
    policy_training: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    earlier: list[str] = field(default_factory=list)

    @property
    def states(self) -> list[str]:
        """States of all trials: `complete`, `pruned` or `failed`."""
        return [*self.earlier, *(trial.state for trial in self.trials)]

    def _facts(self) -> list[tuple[str, str]]:
        facts = {"best": self.best.number, "trials": len(self.trials), "task_runs": self.task_runs, "saved": self.saved}
        return [(key, shortened(value)) for key, value in facts.items()]


def outcome_of(study: optuna.Study, space: Space, config: SearchConfig, tasks: int) -> SearchOutcome:
    """The trials of a study and its best point.

    Args:
        tasks: number of tasks that a complete trial has run.
    Raises:
        ModelError: no trial is complete.
    """
    stored = study.get_trials(deepcopy=False)
    finished, replaced = [trial for trial in stored if trial.state.is_finished()], _replaced(stored)
    trials = [_result(trial, space, config) for trial in finished if trial.number not in replaced]
    complete = [trial for trial in trials if trial.state == "complete"]
    if not complete:
        reasons = [trial.error for trial in trials if trial.error]
        raise ModelError(
            f"none of {len(trials)} trials could be scored: {reasons[-1] if reasons else 'all were cut short'}"
        )
    ran, done = sum(trial.runs for trial in trials), [trial for trial in trials if trial.state != "failed"]
    first = [trial for trial in finished if trial.user_attrs.get("default")]
    default = min(
        (_result(trial, space, config) for trial in first), key=lambda trial: _STATES.index(trial.state), default=None
    )
    front = [trial.number for trial in study.best_trials]
    expected = _expected(done, space) if config.objectives[0] == "score" else {}
    best = _best(
        [trial for trial in complete if len(config.objectives) == 1 or trial.number in front], config, expected
    )
    saved, notes = (
        1 - sum(len(t.scores) for t in done) / max(1, tasks * len(done)),
        _close_trials_note(best, complete, expected),
    )
    means = {number: estimate.mean for number, estimate in expected.items()}
    return SearchOutcome(
        best,
        default,
        trials,
        ran,
        saved,
        [best.number] if len(config.objectives) == 1 else front,
        _level_with(best, complete, config),
        means,
        notes=notes,
    )


def first_by_task(trial: FrozenTrial) -> Mapping[str, float | None]:
    """Values of the first objective by task, of those that a trial ran."""
    stored = trial.user_attrs.get("found") or {}
    values: Mapping[str, float | None] = stored.get("first", stored.get("scores", {}))
    return values


def state_name(trial: FrozenTrial) -> str:
    """`complete`, `pruned` or `failed`."""
    return {"FAIL": "failed"}.get(trial.state.name, trial.state.name.lower())


def _replaced(trials: Sequence[FrozenTrial]) -> set[int]:
    """Numbers of the interrupted trials that were re-run under another number, by us or by Optuna."""
    rerun = {trial.system_attrs.get("failed_trial") for trial in trials} | {
        n for t in trials for n in t.system_attrs.get("retry_history", ())
    }
    return {trial.number for trial in trials if trial.user_attrs.get(REQUEUED) or trial.number in rerun}


def _level_with(best: TrialResult, trials: Sequence[TrialResult], config: SearchConfig) -> list[int]:
    """Trials that tie with the best: within 0.01 in the score, equal in any other first objective."""
    slack, top = (_LEVEL if config.objectives[0] == "score" else 0.0), best.values[config.objectives[0]]
    level = [
        t.number
        for t in trials
        if top is not None and (value := t.values[config.objectives[0]]) is not None and abs(value - top) <= slack
    ]
    return [number for number in level if number != best.number]


def _expected(trials: Sequence[TrialResult], space: Space) -> dict[int, Expected]:
    scored = [
        (t, values)
        for t in trials
        if (values := {task: value for task, value in t.scores.items() if value is not None})
    ]
    return dict(
        zip(
            (t.number for t, _ in scored),
            smoothed_scores([t.point for t, _ in scored], [values for _, values in scored], space),
            strict=True,
        )
    )


def _close_trials_note(best: TrialResult, trials: Sequence[TrialResult], expected: Mapping[int, Expected]) -> list[str]:
    """A note if the best trial is not the one with the highest measured score."""
    top = max(trials, key=lambda trial: trial.values.get("score") or 0.0)
    if not expected or (top.values["score"] or 0.0) - (best.values["score"] or 0.0) <= _LEVEL:
        return []
    scores = (
        f"trial {top.number} scored highest, {top.values['score']:.3g}, "
        f"and trial {best.number} scored {best.values['score']:.3g}"
    )
    high, chosen = expected[top.number].mean, expected[best.number].mean
    if high - chosen > _LEVEL or best.tokens is None or top.tokens is None or chosen - high > _LEVEL:
        return [f"{scores}; by the trials around them {high:.3g} is expected of the one, {chosen:.3g} of the other"]
    return [
        f"{scores}; by the trials around them the two are level, "
        f"and {best.tokens:.0f} tokens a task are fewer than {top.tokens:.0f}"
    ]


def _best(trials: Sequence[TrialResult], config: SearchConfig, expected: Mapping[int, Expected]) -> TrialResult:
    """The best trial by the first objective; of those that tie with it the one with the fewest tokens.

    Scores are compared by their expected values. A trial whose measured score is more than a standard error below that
    of the best one does not tie with it.
    """
    first = config.objectives[0]
    sign = 1 if OBJECTIVES[first] == "maximize" else -1
    scored = [(sign * value, trial) for trial in trials if (value := trial.values[first]) is not None]
    worth = {
        trial.number: expected[trial.number].mean if trial.number in expected else value for value, trial in scored
    }
    measured = {trial.number: value for value, trial in scored}
    top = max((trial for _, trial in scored), key=lambda trial: (worth[trial.number], measured[trial.number]))
    doubt = expected[top.number].error if top.number in expected else 0.0
    slack = _LEVEL if first == "score" else 0.0
    level = [
        trial
        for value, trial in scored
        if worth[trial.number] >= worth[top.number] - slack and value >= measured[top.number] - max(doubt, slack)
    ]
    return min(
        level,
        key=lambda trial: (
            math.inf if trial.tokens is None else trial.tokens,
            -worth[trial.number],
            -measured[trial.number],
            trial.number,
        ),
    )


def _result(trial: FrozenTrial, space: Space, config: SearchConfig) -> TrialResult:
    stored = trial.user_attrs.get("found") or {"scores": {}, "metrics": {}, "tokens": None}
    values = dict(zip(config.objectives, trial.values or [None] * len(config.objectives), strict=True))
    return TrialResult(
        trial.number, space.point(trial.params), state_name(trial), values, stored["scores"], stored["metrics"],
        stored["tokens"], trial.user_attrs.get("error"), stored.get("runs", len(stored["scores"])),
    )  # fmt: skip
