"""The report of a study: one HTML page that needs no network, and its charts as PNGs."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.errors import MissingExtra
from assay.evaluation.metrics import METRICS
from assay.optimizers.parameters.impact import Impact
from assay.optimizers.parameters.space import in_figures
from assay.reports.pages import Charts, write_html

if TYPE_CHECKING:
    import optuna

__all__ = ["importance", "with_pruned_trials", "write_page"]

_FEWEST = 4  # with fewer trials importance and contours would only show sampling noise


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
    if len(scored.trials) < _FEWEST or len({trial.values[objective] for trial in scored.trials}) < 2:
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
) -> tuple[Path, list[Path]]:
    """Writes `study.html`, which is self-contained, and a PNG of each chart into a folder.

    Args:
        facts: values at the top of the page, by name.
        impact: effect of each parameter alone, drawn first.
    Returns:
        The page, and the PNGs.
    Raises:
        MissingExtra: plotly or matplotlib is not installed.
    """
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingExtra(str(error.name), "plots") from error
    folder.mkdir(parents=True, exist_ok=True)
    charts, sections, pictures = Charts(), list[dict[str, Any]](), list[Path]()
    pyplot.switch_backend("agg")
    # must come first: the first chart of the page holds plotly's library
    impact_section = None if impact is None else _impact_section(impact, charts)
    for heading, note, draw, picture in _sections(study, objectives) if study is not None else ():
        with warnings.catch_warnings(), pyplot.rc_context():  # optuna sets a style of its own
            warnings.simplefilter("ignore")
            sections.append({"heading": heading, "note": note, "html": charts.html(draw())})
            axes = picture()
        pictures.append(folder / f"{heading.lower().replace(' ', '-')}.png")
        figure = _tidied(axes)
        figure.savefig(pictures[-1], dpi=110, bbox_inches="tight")
        pyplot.close(figure)
    return write_html(
        folder / "study.html", "study.html", title=title, facts=facts, impact=impact_section, charts=sections
    ), pictures


def _tidied(axes: Any) -> Any:
    """The figure of one or many matplotlib axes, resized, with labels only at its edges."""
    if getattr(axes, "ndim", 0) < 2:
        figure = (axes.flat[0] if hasattr(axes, "flat") else axes).figure
        figure.set_size_inches(9, 4.5)
        return figure
    for row in axes[:-1].flat:
        row.set_xlabel("")
    for column in axes[:, 1:].flat:
        column.set_ylabel("")
    figure = axes.flat[0].figure
    figure.set_size_inches(2.2 * len(axes) + 1, 2.2 * len(axes))
    return figure


def _sections(
    study: "optuna.Study", objectives: Sequence[str]
) -> list[tuple[str, str, Callable[[], Any], Callable[[], Any]]]:
    """Heading, note, plotly figure and matplotlib axes of each chart that the study has enough trials for."""
    import optuna.visualization as interactive
    import optuna.visualization.matplotlib as still
    from optuna.trial import TrialState

    scored, first = with_pruned_trials(study), objectives[0]
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    target: dict[str, Any] = {"target": _target(0), "target_name": first}
    sections: list[tuple[str, str, Callable[[], Any], Callable[[], Any]]] = []

    def section(heading: str, note: str, name: str, *args: Any, **options: Any) -> None:
        sections.append(
            (
                heading,
                note,
                lambda: getattr(interactive, name)(*args, **options),
                lambda: getattr(still, name)(*args, **options),
            )
        )

    if complete:
        section(
            "History",
            "The trials that ran all tasks, and the best so far.",
            "plot_optimization_history",
            study,
            **target,
        )
    if len(objectives) in (2, 3) and complete:
        note = "No trial is better in one objective without being worse in another."
        section("Pareto front", note, "plot_pareto_front", study, target_names=list(objectives))
    weights = importance(study)
    if weights:
        note = (
            f"The share of what {first} varies by that each parameter accounts for: fANOVA over all trials, "
            "PED-ANOVA for the best tenth. From few trials these are rough."
        )
        sections.append(("Importance", note, lambda: _bars(weights), lambda: _still_bars(weights)))
    names = sorted({name for trial in scored.trials for name in trial.params})
    if len(scored.trials) >= _FEWEST:
        note = "Each trial at its value; those that were pruned with the mean of the tasks they ran."
        section("Slices", note, "plot_slice", scored, names, **target)
        if len(names) > 1:
            note = f"{first} over each pair of parameters, interpolated between the trials."
            large = {"height": 200 * len(names) + 100}
            sections.append((
                "Contours", note, lambda: interactive.plot_contour(scored, names, **target).update_layout(**large),
                lambda: still.plot_contour(scored, names, **target),
            ))  # fmt: skip
    return sections


def with_pruned_trials(study: "optuna.Study") -> "optuna.Study":
    """A copy in which pruned trials are complete, with the mean of their tasks (only single objectives are pruned)."""
    import optuna
    from optuna.trial import TrialState

    copy = optuna.create_study(directions=study.directions)
    for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)):
        results = trial.user_attrs.get("found") or {}
        scores = [score for score in results.get("first", results.get("scores", {})).values() if score is not None]
        values = trial.values if trial.state == TrialState.COMPLETE else [sum(scores) / len(scores)] if scores else None
        if values is not None:
            copy.add_trial(
                optuna.trial.create_trial(params=trial.params, distributions=trial.distributions, values=values)
            )
    return copy


def _target(objective: int) -> Callable[[Any], float]:
    return lambda trial: float(trial.values[objective])


def _bars(weights: Mapping[str, Mapping[str, float]]) -> Any:
    from plotly import graph_objects

    bars = [
        graph_objects.Bar(name=name, y=list(values), x=list(values.values()), orientation="h")
        for name, values in weights.items()
    ]
    return graph_objects.Figure(bars).update_layout(
        barmode="group", xaxis_title="importance", yaxis={"autorange": "reversed"}
    )


def _still_bars(weights: Mapping[str, Mapping[str, float]]) -> Any:
    from matplotlib import pyplot

    _, axes = pyplot.subplots()
    names = list(dict.fromkeys(name for values in weights.values() for name in values))
    height = 0.8 / len(weights)
    for at, (label, values) in enumerate(weights.items()):
        axes.barh(
            [row + at * height for row in range(len(names))],
            [values.get(name, 0.0) for name in names],
            height,
            label=label,
        )
    axes.set_yticks([row + 0.4 - height / 2 for row in range(len(names))], names)
    axes.invert_yaxis()
    axes.set_xlabel("importance")
    axes.legend()
    return axes


def _impact_section(impact: Impact, charts: Charts) -> dict[str, Any]:
    """The impact section of `study.html`."""
    names = impact.measured
    idle_note = f" No run changed under {', '.join(impact.without_effect)}." if impact.without_effect else ""
    start = ", ".join(f"{name} {in_figures(value)}" for name, value in impact.start.parameters.items())
    before = ["–" if (value := impact.before[name]["mean"]) is None else in_figures(value) for name in names]
    return {
        "note": f"{impact.n} tasks; bars are 95 % intervals. The start (dashed): {start}.{idle_note}",
        "chart": charts.html(_small_multiples(impact)),
        "head": [name.replace("_", " ") for name in ("parameter", "value", *names)],
        "rows": [
            ["start", "", *before],
            *([e.parameter, in_figures(e.value), *map(e.cell, names)] for e in impact.effects),
        ],
    }


def _small_multiples(impact: Impact) -> Any:
    from plotly import graph_objects
    from plotly.subplots import make_subplots

    parameters = list(dict.fromkeys(effect.parameter for effect in impact.effects))
    rows = impact.measured
    titles = [name.replace("_", " ") for name in parameters]
    figure = make_subplots(
        len(rows),
        len(parameters),
        shared_xaxes="columns",
        shared_yaxes="rows",
        column_titles=titles,
        vertical_spacing=0.03,
    )
    for row, metric in enumerate(rows, 1):
        for column, parameter in enumerate(parameters, 1):
            effects = [e for e in impact.effects if e.parameter == parameter and e.metrics[metric]["mean"] is not None]
            above, below = ([_reach(e.metrics[metric], side) for e in effects] for side in ("high", "low"))
            error = {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1}
            values, means = [e.value for e in effects], [e.metrics[metric]["mean"] for e in effects]
            points = graph_objects.Scatter(
                x=values, y=means, error_y=error, mode="lines+markers", showlegend=False, line={"color": "#1f77b4"}
            )
            figure.add_trace(points, row, column)
            if (before := impact.before[metric]["mean"]) is not None:
                at = [impact.start.parameters[parameter]]
                figure.add_trace(
                    graph_objects.Scatter(x=at, y=[before], mode="markers", showlegend=False, marker={"color": "#444"}),
                    row,
                    column,
                )
            figure.add_vline(
                impact.start.parameters[parameter], line_dash="dash", line_color="#aaa", row=row, col=column
            )
            if parameter in ("context_length", "max_steps"):
                figure.update_xaxes(type="log", row=row, col=column)
        figure.update_yaxes(
            title_text=metric.replace("_", " "), row=row, col=1, range=[-0.03, 1.03] if metric in METRICS else None
        )
    return figure.update_layout(height=170 * len(rows) + 80, margin={"t": 40, "b": 30})


def _reach(interval: Mapping[str, float | None], side: str) -> float:
    mean, end = interval["mean"], interval[side]
    return 0.0 if mean is None or end is None else abs(end - mean)
