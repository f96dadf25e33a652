"""Optuna search over agent parameters, with pruning by task; several processes can share one study."""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from assay.errors import Cancelled, ModelError, ProgramError, StopRun, StoreError
from assay.evaluation.metrics import TaskRun, measure
from assay.evaluation.progress import Progress, SilentProgress
from assay.optimizers.parameters.objective import Objective
from assay.optimizers.parameters.results import REQUEUED, SearchOutcome, outcome_of
from assay.optimizers.parameters.space import Point, Space, in_figures
from assay.optimizers.parameters.study import RETRIES
from assay.optimizers.search_settings import SearchConfig

if TYPE_CHECKING:
    import optuna

# -- Optuna's Wilcoxon pruner, paired by task: compares a trial with the best trial on the tasks that both have run.


_FEWEST = 5  # pairs
# pairs for which scipy's exact test with ties takes up to seconds (2^n evaluations)
_SLOW = range(8, 14)


def is_worse_paired(
    study: "optuna.Study", values: Mapping[str, float | None], best: Mapping[str, float], *, p: float
) -> bool:
    """Whether a trial with these values by task is significantly worse than the best.

    Optuna's pruner compares the two trials in a temporary study: in the study's own storage each value would be a
    transaction.

    Args:
        p: largest one-sided p-value at which a trial is pruned.
    """
    import optuna
    from optuna.trial import TrialState, create_trial

    pairs = [(value, best[task]) for task, value in values.items() if value is not None and task in best]
    if len(pairs) < _FEWEST or len(pairs) in _SLOW:
        return False
    comparison = optuna.create_study(direction=study.direction)
    leader = create_trial(
        value=sum(best.values()) / len(best), intermediate_values=dict(enumerate(against for _, against in pairs))
    )
    comparison.add_trial(leader)
    trial = create_trial(state=TrialState.RUNNING, intermediate_values=dict(enumerate(value for value, _ in pairs)))
    return optuna.pruners.WilcoxonPruner(p_threshold=p).prune(comparison, trial)


# -- Search.


_LOST = 0.2  # share of a trial's runs that may be unscored


def search(
    objective: Objective,
    tasks: Sequence[Any],
    space: Space,
    config: SearchConfig,
    study: "optuna.Study",
    *,
    defaults: Sequence[Point] = (),
    progress: Progress | None = None,
    helping: bool = False,
    alone: bool = False,
    until: "Callable[[optuna.Study], bool]" = lambda _: False,
) -> SearchOutcome:
    """Runs trials until the study has `config.trials` finished ones, the defaults first.

    Args:
        helping: another process completes the study. This one stops as soon as finished and running trials are enough.
        alone: no other process works on this study, now or later. An interrupted trial is then re-run under its own
            number on resuming, so that the study ends with the same trials as without the interruption.
        until: ends the search before `config.trials` as soon as it is true of the study.
    Raises:
        BudgetExceeded, Cancelled: the running trial is re-run on resuming; finished trials are in the study.
        ModelError: no trial could be scored at all.
    """
    import optuna
    from optuna.trial import TrialState

    progress = progress or SilentProgress()
    evaluator = _TrialEvaluator(objective, list(tasks), space, config, progress, alone=alone)
    for point in defaults if not study.get_trials(deepcopy=False) else ():
        study.enqueue_trial(space.trial_parameters(point), user_attrs={"default": True}, skip_if_exists=True)

    def states() -> Counter[Any]:
        return Counter(trial.state for trial in study.get_trials(deepcopy=False))

    def enough(study: "optuna.Study", _: Any) -> None:
        advance(1)
        counts = states()
        done, failed = counts[TrialState.COMPLETE] + counts[TrialState.PRUNED], counts[TrialState.FAIL] - before
        working = counts[TrialState.RUNNING] if helping else 0
        failing = failed > config.trials or (failed >= RETRIES + 2 and not done)
        if failing or done + working >= config.trials or until(study):
            study.stop()

    with progress.bar("trials", config.trials) as advance, warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        counts = states()
        done, before = counts[TrialState.COMPLETE] + counts[TrialState.PRUNED], counts[TrialState.FAIL]
        advance(done)
        cut_off = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)) if alone else []
        if done < config.trials or cut_off:
            with _storage_errors():
                for trial in cut_off:
                    _rerun(study, trial, evaluator)
                    advance(1)
                if done + len(cut_off) < config.trials and not until(study):
                    _optimized(study, evaluator, enough)
    return outcome_of(study, space, config, len(tasks))


@contextmanager
def _storage_errors() -> Iterator[None]:
    """Raises errors of the study's storage as `StoreError`."""
    try:
        yield
    except Exception as error:
        storage_error = _of_the_storage(error)
        if storage_error is None:
            raise
        reason = str(storage_error).partition("\n")[0]
        raise StoreError(f"the study's storage is gone: {reason}. Start it, and continue with `resume=True`") from error


def _of_the_storage(error: BaseException | None) -> BaseException | None:
    """The database error that caused this one, if any: Optuna raises a later error, of its own clean-up."""
    import optuna
    import sqlalchemy as sa

    while error is not None:
        if isinstance(error, optuna.exceptions.StorageInternalError | sa.exc.DBAPIError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _optimized(study: "optuna.Study", evaluator: Any, enough: Callable[..., None]) -> None:
    """Optuna's loop. It continues if another process marked a trial of this one as failed."""
    import optuna

    ended = list[int]()  # id of a trial after its evaluation: later errors are Optuna's, not the objective's

    def watched(trial: Any) -> Any:
        ended.clear()
        try:
            value = evaluator(trial)
        except (optuna.TrialPruned, optuna.exceptions.UpdateFinishedTrialError):
            ended.append(trial._trial_id)
            raise
        ended.append(trial._trial_id)
        return value

    while True:
        try:
            study.optimize(watched, callbacks=[enough], catch=(ProgramError, ModelError))
            return
        except optuna.exceptions.UpdateFinishedTrialError:
            continue
        except ValueError:
            # Optuna raises it for a trial that is no longer running; ask the storage, the study's list is an old copy
            if not ended or study._storage.get_trial(ended[0]).state != optuna.trial.TrialState.FAIL:
                raise


class _TrialEvaluator:
    """Runs one trial in blocks of tasks, until all are done or the trial is pruned."""

    def __init__(
        self,
        objective: Objective,
        tasks: list[Any],
        space: Space,
        config: SearchConfig,
        progress: Progress,
        *,
        alone: bool,
    ) -> None:
        self.objective, self.tasks, self.space = objective, tasks, space
        self.config, self.progress, self.alone = config, progress, alone

    def __call__(self, trial: Any) -> Any:
        with self.objective.within(f"trial {trial.number}"):
            return self._value(trial)

    def _value(self, trial: Any) -> Any:
        import optuna

        point = self.space.suggest(trial)
        best = _best_by_task(trial.study) if self.config.prunes == "wilcoxon" else {}
        runs: list[TaskRun] = []
        try:
            for step, start in enumerate(range(0, len(self.tasks), self.config.block)):
                runs += self.objective.run(point, self.tasks[start : start + self.config.block])
                if start + self.config.block < len(self.tasks) and self._losing(trial, step, runs, best):
                    self._keep(trial, runs)
                    if (
                        best
                        and (measured := _values(runs, self.config.objectives)[self.config.objectives[0]]) is not None
                    ):
                        trial.report(measured, step)  # the sampler uses it for pruned trials
                    raise optuna.TrialPruned
        except StopRun:
            self._requeue(trial)
            raise
        except KeyboardInterrupt as stop:
            self._requeue(trial)
            raise Cancelled(f"cancelled {str(stop) or 'by the user'}") from None
        except (ProgramError, ModelError) as error:
            trial.set_user_attr("error", str(error))
            raise
        self._keep(trial, runs)
        values = _values(runs, self.config.objectives)
        lost = sum(run.score is None or not math.isfinite(run.score) for run in runs)
        missing = [name for name, value in values.items() if value is None] or (
            ["score"] if lost > _LOST * len(runs) else []
        )
        if missing:
            reason = next((run.error for run in runs if run.error), "no reason was given")
            text = f"{', '.join(missing)} could not be measured on {lost or len(runs)} of {len(runs)} runs: {reason}"
            trial.set_user_attr("error", text)
            raise ModelError(text)
        self.progress.say(f"  trial {trial.number}: {_result_text(point, values)}")
        return list(values.values())

    def _losing(self, trial: Any, step: int, runs: Sequence[TaskRun], best: Mapping[str, float]) -> bool:
        first = self.config.objectives[0]
        if self.config.prunes == "wilcoxon":
            return is_worse_paired(trial.study, _by_task(runs, first), best, p=self.config.prune_at)
        value = _values(runs, self.config.objectives)[first]
        if self.config.prunes == "none" or value is None:
            return False
        trial.report(value, step)
        return bool(trial.should_prune())

    def _keep(self, trial: Any, runs: Sequence[TaskRun]) -> None:
        first, scores = self.config.objectives[0], _by_task(runs, "score")
        paired = {} if first == "score" else {"first": _by_task(runs, first)}
        metrics, tokens = measure(runs, budget=self.config.run_budget).to_dict(), _mean([run.tokens for run in runs])
        trial.set_user_attr(
            "found", {"scores": scores, "metrics": metrics, "tokens": tokens, "runs": len(runs), **paired}
        )

    def _requeue(self, trial: Any) -> None:
        if not self.alone:
            _requeue(trial.study, trial)


def _requeue(study: "optuna.Study", trial: Any) -> None:
    """Ends an interrupted trial and enqueues its point again."""
    from optuna.trial import TrialState

    study.enqueue_trial(
        trial.params, user_attrs={key: value for key, value in trial.user_attrs.items() if key == "default"}
    )
    study._storage.set_trial_user_attr(trial._trial_id, REQUEUED, True)
    study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)


def _rerun(study: "optuna.Study", cut_off: Any, evaluator: "_TrialEvaluator") -> None:
    """Re-runs an interrupted trial under its own number, with the parameters it had already drawn."""
    import optuna
    from optuna.trial import TrialState

    trial = optuna.trial.Trial(study, cut_off._trial_id)
    # the warning that these steps were reported before; `search` restores the filters
    warnings.simplefilter("ignore", UserWarning)
    try:
        values = evaluator(trial)
    except optuna.TrialPruned:
        study.tell(trial, state=TrialState.PRUNED)
    except (ProgramError, ModelError):
        study.tell(trial, state=TrialState.FAIL)
    else:
        study.tell(trial, values)


def requeue_all(study: "optuna.Study") -> None:
    """Enqueues all running trials again. Call it only if no other process works on the study."""
    from optuna.trial import TrialState

    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        _requeue(study, trial)


def _by_task(runs: Sequence[TaskRun], objective: str) -> dict[str, float | None]:
    """Mean of an objective over the samples of each task."""
    grouped: dict[str, list[TaskRun]] = {}
    for run in runs:
        grouped.setdefault(run.task_id, []).append(run)
    return {task: _values(task_runs, (objective,))[objective] for task, task_runs in grouped.items()}


def _best_by_task(study: "optuna.Study") -> dict[str, float]:
    """Values of the first objective by task, of the best trial; empty if there is no trial yet."""
    try:
        stored = study.best_trial.user_attrs.get("found", {})
    except ValueError:
        return {}
    return {task: value for task, value in stored.get("first", stored.get("scores", {})).items() if value is not None}


def _mean(values: Sequence[float | int | None]) -> float | None:
    finite = [float(value) for value in values if value is not None and math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else None


def _values(runs: Sequence[TaskRun], objectives: Sequence[str]) -> dict[str, float | None]:
    """Means of the objectives per run; None if no run has a value."""
    columns: dict[str, list[float | int | None]] = {
        "score": [run.score for run in runs],
        "tokens": [run.tokens for run in runs],
        "latency": [run.seconds for run in runs],
        "cost": [run.cost_usd for run in runs],
    }
    return {name: _mean(columns[name]) for name in objectives}


def _result_text(point: Point, values: Mapping[str, float | None]) -> str:
    settings = ", ".join(f"{name} {in_figures(value)}" for name, value in point.parameters.items())
    results = ", ".join(f"{name} {in_figures(value)}" for name, value in values.items() if value is not None)
    return f"{results} with {settings}"
