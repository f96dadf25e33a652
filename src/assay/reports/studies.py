"""What a page shows of a search over agent parameters: history, Pareto front, importance, slices, and effects.

Reads the trials of a report, and neither Optuna nor the store.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from markupsafe import Markup

from assay.reports.charts import Axis, Dot, Line, points_chart, share_bar
from assay.reports.markdown import MORE_TASKS
from assay.reports.sides import Decision, gain_in_words, tone_of

FEWEST = 4  # trials under which importance and slices would only show sampling noise
_MOST_TRIALS = 300  # rows of the table
_SMALL, _LOW = 300, 170  # pixels of one of several small charts
_LOGARITHMIC = ("context_length", "max_steps")
_HIGHER = ("score", "overall")  # objectives of which more is better; less is better of all others
_UNITS = ("score", "overall", "accuracy", "efficiency", "coherence", "adaptability", "tool_usage")  # values in [0, 1]
_EVALUATORS = {"fanova": "fANOVA, all trials", "ped_anova": "PED-ANOVA, the best tenth"}


@dataclass(frozen=True, kw_only=True)
class StudyTrial:
    """A trial. `state` is `complete`, `pruned` or `failed`; a pruned one has the mean of the tasks that it ran."""

    number: int
    state: str
    parameters: Mapping[str, float]
    values: Mapping[str, float]
    n: int | None = None
    program: str = ""


@dataclass(frozen=True, kw_only=True)
class EffectRow:
    """A value of a parameter that was moved alone, with its metrics as they are shown."""

    parameter: str
    value: str
    cells: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class StudyPage:
    """A study.

    Attributes:
        pareto: charts of pairs of objectives.
        importance: parameter, then for each evaluator its share and a bar.
        slices: parameter and chart.
        effects: metric and its charts, one for each parameter.
    """

    objectives: Sequence[str]
    trials: list[StudyTrial] = field(default_factory=list)
    left_out: int = 0
    parameters: Sequence[str] = ()
    best: StudyTrial | None = None
    is_chosen: bool = False
    history: Markup = field(default_factory=Markup)
    pareto: list[Markup] = field(default_factory=list)
    front: frozenset[int] = frozenset()
    evaluators: Sequence[str] = ()
    importance: list[tuple[str, list[tuple[float, Markup]]]] = field(default_factory=list)
    slices: list[tuple[str, Markup]] = field(default_factory=list)
    effects: list[tuple[str, list[Markup]]] = field(default_factory=list)
    effects_note: str = ""
    effect_names: Sequence[str] = ()
    effect_rows: Sequence[EffectRow] = ()


def trials_of(report: Mapping[str, Any]) -> list[StudyTrial]:
    """The trials of the report of `assay tune`; of a policy its episodes."""
    trials = []
    for at, trial in enumerate(report.get("history") or ()):
        values = trial.get("values") or {"overall": trial.get("overall")}
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        if "tokens" not in numbers and isinstance(trial.get("tokens"), int | float):
            numbers["tokens"] = trial["tokens"]
        trials.append(
            StudyTrial(
                number=trial.get("number", at), state=trial.get("state", "complete"), values=numbers, n=trial.get("n"),
                parameters=trial.get("parameters") or {}, program=trial.get("program") or "",
            )
        )  # fmt: skip
    return trials


def tuned_page(report: Mapping[str, Any]) -> StudyPage:
    """The page of the report of `assay tune`."""
    objectives = ["overall"] if report["method"] == "policy" else report["objectives"]
    chosen = report.get("best") or {}
    return study_page(trials_of(report), objectives, importance=report.get("importance") or {}, chosen=chosen)


def tuned_words(report: Mapping[str, Any]) -> list[Decision]:
    """What gate and test decided about the tuned parameters."""
    gains = {"Gate": (report.get("gate"), None)}
    gains["Test"] = (report.get("test") or {}).get("gain"), report.get("test_openings")
    lines = [
        Decision(text=f"{name}: {gain_in_words(gain, openings)}", tone=tone_of(gain))
        for name, (gain, openings) in gains.items()
        if gain and gain.get("mean") is not None
    ]
    if report.get("gate"):
        outcome = (
            "The tuned parameters replace the default." if report["replaces"] else f"The default stays. {MORE_TASKS}"
        )
        lines.append(Decision(text=outcome, tone="better" if report["replaces"] else ""))
    return lines


def study_page(
    trials: Sequence[StudyTrial], objectives: Sequence[str], *, importance: Mapping[str, Mapping[str, float]],
    chosen: Mapping[str, float] | None = None,
) -> StudyPage:  # fmt: skip
    """A study as its page shows it.

    Args:
        importance: share of the first objective's variation that each parameter accounts for, by evaluator.
        chosen: parameters of the trial that was chosen; by default the one with the best value.
    """
    first = objectives[0]
    scored = [trial for trial in trials if first in trial.values]
    complete = [trial for trial in scored if trial.state == "complete"]
    names = list(dict.fromkeys(name for trial in scored for name in trial.parameters))
    best = next((trial for trial in complete if chosen and _is_at(trial, chosen)), None)
    is_chosen = best is not None
    best = best or max(complete, key=lambda trial: _rank(first, trial.values[first]), default=None)
    front = _front(complete, objectives)
    evaluators = [name for name in _EVALUATORS if importance.get(name)]
    order = sorted({name for of in importance.values() for name in of}, key=lambda name: -_weight(importance, name))
    return StudyPage(
        objectives=objectives,
        trials=list(trials[:_MOST_TRIALS]),
        left_out=max(0, len(trials) - _MOST_TRIALS),
        parameters=names,
        best=best,
        is_chosen=is_chosen,
        history=_history(scored, first, best),
        pareto=[_pareto(complete, pair, front) for pair in combinations(objectives, 2)] if complete else [],
        front=front,
        evaluators=[_EVALUATORS[name] for name in evaluators],
        importance=[(name, [_share(importance[by].get(name, 0.0), by) for by in evaluators]) for name in order],
        slices=[(name, _slice(scored, first, name, best)) for name in names] if len(scored) >= FEWEST else [],
    )


def _is_at(trial: StudyTrial, chosen: Mapping[str, float]) -> bool:
    """Whether a trial had the chosen parameters, where it has them."""
    return bool(trial.parameters) and all(chosen.get(name) == value for name, value in trial.parameters.items())


def _weight(importance: Mapping[str, Mapping[str, float]], name: str) -> float:
    return sum(shares.get(name, 0.0) for shares in importance.values())


def _share(value: float, evaluator: str) -> tuple[float, Markup]:
    return value, share_bar(value, kind="first" if evaluator == "fanova" else "second")


def _rank(objective: str, value: float) -> float:
    return value if objective in _HIGHER else -value


def _front(trials: Sequence[StudyTrial], objectives: Sequence[str]) -> frozenset[int]:
    """Numbers of the trials that no other one equals in all objectives and exceeds in one."""
    places = {
        trial.number: [_rank(name, trial.values[name]) for name in objectives]
        for trial in trials
        if all(name in trial.values for name in objectives)
    }
    return frozenset(
        number
        for number, place in places.items()
        if not any(
            other != place and all(b >= a for a, b in zip(place, other, strict=True)) for other in places.values()
        )
    )


def _kind(trial: StudyTrial, best: StudyTrial | None) -> str:
    return "second" if trial is best else "first" if trial.state == "complete" else "other"


def _name(trial: StudyTrial, objective: str) -> str:
    values = ", ".join(f"{name} {value:.4g}" for name, value in trial.parameters.items())
    return f"trial {trial.number}, {trial.state}: {objective} {trial.values[objective]:.4g}; {values}"


def _axis(objective: str) -> Axis:
    return Axis(name=objective, low=0.0, high=1.0) if objective in _UNITS else Axis(name=objective)


def _history(trials: Sequence[StudyTrial], objective: str, best: StudyTrial | None) -> Markup:
    """The trials in order, and the best complete one so far."""
    reached: list[tuple[float, float]] = []
    for trial in trials:
        if trial.state == "complete":
            value = trial.values[objective]
            if reached and _rank(objective, reached[-1][1]) > _rank(objective, value):
                value = reached[-1][1]
            if reached:
                reached.append((trial.number, reached[-1][1]))
            reached.append((trial.number, value))
    dots = [
        Dot(x=trial.number, y=trial.values[objective], name=_name(trial, objective), kind=_kind(trial, best))
        for trial in trials
    ]
    steps = [Line(name="best so far", points=reached, kind="second")] if len(reached) > 1 else []
    return points_chart(
        dots, label=f"{objective} of the trials in order, and the best so far", x=Axis(name="trial"),
        y=_axis(objective), steps=steps,
    )  # fmt: skip


def _pareto(trials: Sequence[StudyTrial], pair: tuple[str, str], front: frozenset[int]) -> Markup:
    dots = [
        Dot(
            x=trial.values[pair[1]], y=trial.values[pair[0]], name=_name(trial, pair[0]),
            kind="second" if trial.number in front else "other",
        )
        for trial in trials
        if set(pair) <= trial.values.keys()
    ]  # fmt: skip
    label = f"{pair[0]} and {pair[1]} of the trials, with the Pareto front"
    return points_chart(dots, label=label, x=Axis(name=pair[1]), y=_axis(pair[0]))


def _slice(trials: Sequence[StudyTrial], objective: str, name: str, best: StudyTrial | None) -> Markup:
    dots = [
        Dot(x=trial.parameters[name], y=trial.values[objective], name=_name(trial, objective), kind=_kind(trial, best))
        for trial in trials
        if name in trial.parameters
    ]
    axis = Axis(name=name.replace("_", " "), log=name in _LOGARITHMIC)
    label = f"{objective} by {name}"
    return points_chart(dots, label=label, x=axis, y=_axis(objective), width=_SMALL, height=_LOW)


def effect_charts(effects: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[tuple[str, list[Markup]]]:
    """Small charts of the effect of each parameter alone, by metric.

    Args:
        effects: fields of `assay.optimizers.parameters.impact.Effect` of each value.
        names: of the metrics.
    """
    parameters = list(dict.fromkeys(effect["parameter"] for effect in effects))
    effect_charts = []
    for metric in names:
        charts = []
        for parameter in parameters:
            dots = [
                Dot(
                    x=effect["value"], y=measured["mean"], low=measured["low"], high=measured["high"], kind="first",
                    name=f"{parameter} {effect['value']:.4g}: {measured['mean']:.4g}",
                )
                for effect in effects
                if effect["parameter"] == parameter and (measured := effect["metrics"][metric])["mean"] is not None
            ]  # fmt: skip
            axis = Axis(name=parameter.replace("_", " "), log=parameter in _LOGARITHMIC)
            label = f"{metric} by {parameter}, alone"
            charts.append(points_chart(dots, label=label, x=axis, y=_axis(metric), width=_SMALL, height=_LOW))
        effect_charts.append((metric.replace("_", " "), [chart for chart in charts if chart]))
    return effect_charts
