"""The report of a study: one HTML page that loads nothing."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.optimizers.parameters.impact import Impact
from assay.optimizers.parameters.space import in_figures
from assay.reports.files import write_report
from assay.reports.studies import FEWEST, EffectRow, StudyTrial, effect_charts, study_page

if TYPE_CHECKING:
    import optuna


def importance(study: "optuna.Study", objective: int = 0) -> dict[str, dict[str, float]]:
    """Share of an objective's variation that each parameter accounts for, by two evaluators; each sums to 1.

    Pruned trials count with the mean of the tasks they ran. `fanova`: Hutter, Hoos, Leyton-Brown 2014;
    `ped_anova`: Watanabe, Bansal, Hutter 2023, for the best tenth. Empty if there are too few trials or all
    values are equal.
    """
    import optuna

    makers: dict[str, Callable[[], Any]] = {
        "fanova": lambda: optuna.importance.FanovaImportanceEvaluator(seed=0),
        "ped_anova": optuna.importance.PedAnovaImportanceEvaluator,
    }
    scored, importances = with_pruned_trials(study), dict[str, dict[str, float]]()
    if len(scored.trials) < FEWEST or len({trial.values[objective] for trial in scored.trials}) < 2:
        return importances
    for name, make in makers.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                importances[name] = optuna.importance.get_param_importances(
                    scored, evaluator=make(), target=_target(objective)
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
    study: "optuna.Study | None",
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


def trials_in(study: "optuna.Study | None", objectives: Sequence[str]) -> list[StudyTrial]:
    """The finished trials of a study; a pruned one with the mean of the tasks that it ran."""
    trials = []
    for trial in () if study is None else study.get_trials(deepcopy=False):
        state = trial.state.name.lower().replace("fail", "failed")
        if not trial.state.is_finished():
            continue
        results = trial.user_attrs.get("found") or {}
        if state == "complete":
            values = dict(zip(objectives, trial.values, strict=True))
        else:
            mean = _mean_of_tasks(trial)
            values = {} if mean is None else {objectives[0]: mean}
        scores = results.get("first", results.get("scores", {}))
        trials.append(
            StudyTrial(
                number=trial.number, state=state, parameters=_numbers(trial.params), values=values,
                n=len(scores) or None,
            )
        )  # fmt: skip
    return trials


def _numbers(params: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in params.items() if isinstance(value, int | float)}


def _mean_of_tasks(trial: "optuna.trial.FrozenTrial") -> float | None:
    """Mean score of the tasks that a trial ran; None without any."""
    results = trial.user_attrs.get("found") or {}
    scores = [score for score in results.get("first", results.get("scores", {})).values() if score is not None]
    return sum(scores) / len(scores) if scores else None


def with_pruned_trials(study: "optuna.Study") -> "optuna.Study":
    """A copy in which pruned trials are complete, with the mean of their tasks (only single objectives are pruned)."""
    import optuna
    from optuna.trial import TrialState

    copy = optuna.create_study(directions=study.directions)
    for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)):
        mean = None if trial.state == TrialState.COMPLETE else _mean_of_tasks(trial)
        values = trial.values if trial.state == TrialState.COMPLETE else None if mean is None else [mean]
        if values is not None:
            copy.add_trial(
                optuna.trial.create_trial(params=trial.params, distributions=trial.distributions, values=values)
            )
    return copy


def _target(objective: int) -> Callable[[Any], float]:
    return lambda trial: float(trial.values[objective])


def _effects(impact: Impact) -> dict[str, Any]:
    """The effects of each parameter alone, as `StudyPage` has them."""
    names = impact.measured
    idle_note = f" No run changed under {', '.join(impact.without_effect)}." if impact.without_effect else ""
    start = ", ".join(f"{name} {in_figures(value)}" for name, value in impact.start.parameters.items())
    before = ["–" if (value := impact.before[name]["mean"]) is None else in_figures(value) for name in names]
    rows = [EffectRow(parameter=e.parameter, value=in_figures(e.value), cells=list(map(e.cell, names)))
            for e in impact.effects]  # fmt: skip
    return {
        "effects": effect_charts([effect.to_dict() for effect in impact.effects], names),
        "effects_note": f"{impact.n} tasks; bars are 95 % intervals. The start: {start}.{idle_note}",
        "effect_names": names,
        "effect_rows": [EffectRow(parameter="start", value="", cells=before), *rows],
    }
