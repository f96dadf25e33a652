"""What a study found, for people: one HTML page that opens without a network, and the same pictures as PNGs."""

import html
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.errors import MissingExtra
from assay.optimizers.metrics import METRICS
from assay.optimizers.pages import Page
from assay.optimizers.parameters.impact import Impact
from assay.optimizers.parameters.space import in_figures

if TYPE_CHECKING:
    import optuna

__all__ = ["importance", "write_page"]

_FEWEST = 4  # trials under which importance and contours would show nothing but chance


def importance(study: "optuna.Study", objective: int = 0) -> dict[str, dict[str, float]]:
    """How much of an objective's variation each parameter accounts for, by two evaluators; each adds up to 1.

    Pruned trials count with the mean of the tasks they ran. `fanova`: Hutter, Hoos, Leyton-Brown 2014;
    `ped_anova`: Watanabe, Bansal, Hutter 2023, for the best tenth. Empty where there are too few trials, or all are alike.
    """
    import optuna

    makers: dict[str, Callable[[], Any]] = {
        "fanova": lambda: optuna.importance.FanovaImportanceEvaluator(seed=0),
        "ped_anova": optuna.importance.PedAnovaImportanceEvaluator,
    }
    seen, found = _seen(study), dict[str, dict[str, float]]()
    if len(seen.trials) < _FEWEST or len({trial.values[objective] for trial in seen.trials}) < 2:
        return found
    for name, make in makers.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found[name] = optuna.importance.get_param_importances(seen, evaluator=make(), target=_target(objective))
            except (RuntimeError, ValueError):  # no variance at all; too few distinct values
                continue
    return {name: {key: float(value) for key, value in values.items()} for name, values in found.items() if sum(values.values()) > 0}


def write_page(
    folder: Path, study: "optuna.Study | None", objectives: Sequence[str], *, title: str, facts: Mapping[str, Any], impact: Impact | None = None
) -> tuple[Path, list[Path]]:
    """Writes `study.html` and a PNG of each picture into a folder; the page holds all it needs.

    Args:
        facts: what stands at its head, by name.
        impact: what each parameter does alone, drawn first.
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
    page, pictures = Page(title, facts), list[Path]()
    pyplot.switch_backend("agg")
    if impact is not None:
        page.section("Each parameter moved alone")
        page.markup(_impact_note(impact))
        page.figure(_small_multiples(impact))
        page.markup(_impact_table(impact))
    for heading, note, draw, picture in _sections(study, objectives) if study is not None else ():
        page.section(heading, note)
        with warnings.catch_warnings(), pyplot.rc_context():  # optuna sets a style of its own
            warnings.simplefilter("ignore")
            page.figure(draw())
            axes = picture()
        pictures.append(folder / f"{heading.lower().replace(' ', '-')}.png")
        figure = _tidied(axes)
        figure.savefig(pictures[-1], dpi=110, bbox_inches="tight")
        pyplot.close(figure)
    return page.write(folder / "study.html"), pictures


def _tidied(axes: Any) -> Any:
    """The figure of one or many matplotlib axes, large enough, with labels at its edges alone."""
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


def _sections(study: "optuna.Study", objectives: Sequence[str]) -> list[tuple[str, str, Callable[[], Any], Callable[[], Any]]]:
    """Heading, note, plotly figure and matplotlib axes of each picture that the study has enough trials for."""
    import optuna.visualization as interactive
    import optuna.visualization.matplotlib as still
    from optuna.trial import TrialState

    seen, first = _seen(study), objectives[0]
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    one: dict[str, Any] = {"target": _target(0), "target_name": first}
    found: list[tuple[str, str, Callable[[], Any], Callable[[], Any]]] = []

    def section(heading: str, note: str, name: str, *args: Any, **options: Any) -> None:
        found.append((heading, note, lambda: getattr(interactive, name)(*args, **options), lambda: getattr(still, name)(*args, **options)))

    if complete:
        section("History", "The trials that ran all tasks, and the best so far.", "plot_optimization_history", study, **one)
    if len(objectives) in (2, 3) and complete:
        section("Pareto front", "No trial is better in one objective without being worse in another.", "plot_pareto_front", study,
                target_names=list(objectives))  # fmt: skip
    weights = importance(study)
    if weights:
        note = (
            f"The share of what {first} varies by that each parameter accounts for: fANOVA over all trials, PED-ANOVA for the best tenth. "
            "From few trials these are rough."
        )
        found.append(("Importance", note, lambda: _bars(weights), lambda: _still_bars(weights)))
    names = sorted({name for trial in seen.trials for name in trial.params})
    if len(seen.trials) >= _FEWEST:
        note = "Each trial at its value; those that were pruned with the mean of the tasks they ran."
        section("Slices", note, "plot_slice", seen, names, **one)
        if len(names) > 1:
            note = f"{first} over each pair of parameters, interpolated between the trials."
            large = {"height": 200 * len(names) + 100}
            found.append((
                "Contours", note, lambda: interactive.plot_contour(seen, names, **one).update_layout(**large),
                lambda: still.plot_contour(seen, names, **one),
            ))  # fmt: skip
    return found


def _seen(study: "optuna.Study") -> "optuna.Study":
    """A copy in which pruned trials are finished ones, with the mean of the tasks they ran (only one objective is ever pruned)."""
    import optuna
    from optuna.trial import TrialState

    copy = optuna.create_study(directions=study.directions)
    for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)):
        kept = trial.user_attrs.get("found") or {}
        scores = [score for score in kept.get("first", kept.get("scores", {})).values() if score is not None]
        values = trial.values if trial.state == TrialState.COMPLETE else [sum(scores) / len(scores)] if scores else None
        if values is not None:
            copy.add_trial(optuna.trial.create_trial(params=trial.params, distributions=trial.distributions, values=values))
    return copy


def _target(objective: int) -> Callable[[Any], float]:
    return lambda trial: float(trial.values[objective])


def _bars(weights: Mapping[str, Mapping[str, float]]) -> Any:
    from plotly import graph_objects

    bars = [graph_objects.Bar(name=name, y=list(values), x=list(values.values()), orientation="h") for name, values in weights.items()]
    return graph_objects.Figure(bars).update_layout(barmode="group", xaxis_title="importance", yaxis={"autorange": "reversed"})


def _still_bars(weights: Mapping[str, Mapping[str, float]]) -> Any:
    from matplotlib import pyplot

    _, axes = pyplot.subplots()
    names = list(dict.fromkeys(name for values in weights.values() for name in values))
    height = 0.8 / len(weights)
    for at, (label, values) in enumerate(weights.items()):
        axes.barh([row + at * height for row in range(len(names))], [values.get(name, 0.0) for name in names], height, label=label)
    axes.set_yticks([row + 0.4 - height / 2 for row in range(len(names))], names)
    axes.invert_yaxis()
    axes.set_xlabel("importance")
    axes.legend()
    return axes


def _impact_note(found: Impact) -> str:
    still = f" No run changed under {', '.join(found.without_effect)}." if found.without_effect else ""
    start = ", ".join(f"{name} {in_figures(value)}" for name, value in found.start.parameters.items())
    return f"<p class=note>{found.n} tasks; bars are 95 % intervals. The start (dashed): {html.escape(start)}.{html.escape(still)}</p>"


def _small_multiples(found: Impact) -> Any:
    from plotly import graph_objects
    from plotly.subplots import make_subplots

    parameters = list(dict.fromkeys(effect.parameter for effect in found.effects))
    rows = found.measured
    titles = [name.replace("_", " ") for name in parameters]
    figure = make_subplots(len(rows), len(parameters), shared_xaxes="columns", shared_yaxes="rows", column_titles=titles, vertical_spacing=0.03)
    for row, metric in enumerate(rows, 1):
        for column, parameter in enumerate(parameters, 1):
            effects = [e for e in found.effects if e.parameter == parameter and e.metrics[metric]["mean"] is not None]
            above, below = ([_reach(e.metrics[metric], side) for e in effects] for side in ("high", "low"))
            error = {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1}
            values, means = [e.value for e in effects], [e.metrics[metric]["mean"] for e in effects]
            points = graph_objects.Scatter(x=values, y=means, error_y=error, mode="lines+markers", showlegend=False, line={"color": "#1f77b4"})
            figure.add_trace(points, row, column)
            if (before := found.before[metric]["mean"]) is not None:
                at = [found.start.parameters[parameter]]
                figure.add_trace(graph_objects.Scatter(x=at, y=[before], mode="markers", showlegend=False, marker={"color": "#444"}), row, column)
            figure.add_vline(found.start.parameters[parameter], line_dash="dash", line_color="#aaa", row=row, col=column)
            if parameter in ("context_length", "max_steps"):
                figure.update_xaxes(type="log", row=row, col=column)
        figure.update_yaxes(title_text=metric.replace("_", " "), row=row, col=1, range=[-0.03, 1.03] if metric in METRICS else None)
    return figure.update_layout(height=170 * len(rows) + 80, margin={"t": 40, "b": 30})


def _reach(interval: Mapping[str, float | None], side: str) -> float:
    mean, end = interval["mean"], interval[side]
    return 0.0 if mean is None or end is None else abs(end - mean)


def _impact_table(found: Impact) -> str:
    names = found.measured
    head = "".join(f"<th>{html.escape(name.replace('_', ' '))}</th>" for name in ("parameter", "value", *names))
    start = "".join(f"<td>{'–' if (value := found.before[name]['mean']) is None else in_figures(value)}</td>" for name in names)
    rows = [f"<tr><td>start</td><td></td>{start}</tr>"]
    for effect in found.effects:
        cells = "".join(f"<td>{effect.cell(name)}</td>" for name in names)
        rows.append(f"<tr><td>{html.escape(effect.parameter)}</td><td>{in_figures(effect.value)}</td>{cells}</tr>")
    return f"<p class=note>* differs from the start, 95 %: one star in twenty comes by chance</p><table><tr>{head}</tr>{''.join(rows)}</table>"
