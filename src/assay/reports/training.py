"""The HTML page of a training run, made from its report. Does not train."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from assay.reports.pages import Charts, write_html
from assay.traces.store.sealing import openings_line

__all__ = ["current_curves", "in_numbers", "interval", "of_other_seeds", "write_report"]

_SMOOTH = 5  # steps of the running mean
# Reports and checkpoints written by earlier versions are still read: their name of a curve -> the name of today.
_RENAMED_CURVES = {"flat_groups": "zero_variance_groups", "watched": "monitor"}


def current_curves(curves: Mapping[str, Mapping[Any, float]]) -> dict[str, dict[int, float]]:
    """The curves of a stored report or checkpoint, with integer steps and the curve names of this version.

    Args:
        curves: `curves[name][step]`; steps are strings where they were read from JSON.
    """
    current: dict[str, dict[int, float]] = {}
    for name, curve in curves.items():
        values = {int(step): value for step, value in curve.items()}
        current.setdefault(_RENAMED_CURVES.get(name, name), {}).update(values)
    return current


def write_report(path: Path, report: Mapping[str, Any], others: Sequence[Mapping[str, Any]] = ()) -> Path:
    """Writes the page of a `PolicyReport.to_dict()`.

    Args:
        others: reports of the same training with other seeds, for the share of runs that converged.
    Raises:
        MissingExtra: plotly is not installed.
    """
    config = report["config"]
    converged = {None: "too few steps to tell", True: "yes", False: "no"}[report["converged"]]
    if others:
        runs = [report["converged"], *(other["converged"] for other in others)]
        converged += (
            f"; of {len(runs)} seeds {runs.count(True)} did, {runs.count(False)} did not, "
            f"{runs.count(None)} took too few steps"
        )
    curves = current_curves(report["curves"])
    charts = Charts()
    return write_html(
        path,
        "training.html",
        title=f"{config['algorithm']}: {report['name'] or report['path']}",
        facts={
            "model before": config["model"],
            "steps": report["steps"],
            "rollouts": report["rollouts"],
            "calls trained on": report["calls"],
            "weights of step": report["best_step"],
            "converged": f"{converged} (mean reward of the last ten steps beside the ten before: Welch's "
            "95 % interval holds 0 and is no wider than 0.1 to either side)",
        },
        warnings=[*report["alarms"], *([report["stopped"]] if report["stopped"] else [])],
        comparisons=[_comparison(name, modes, report) for name, modes in report["validation"].items()],
        charts=[
            {"heading": heading, "note": note, "html": charts.html(_figure({name: curves[name] for name in names}))}
            for heading, note, names in _sections(curves)
        ],
        samples=list(map(_sample, report["samples"])),
        left_out=report["left_out"],
        settings=config,
    )


def _comparison(name: str, modes: Mapping[str, Any], report: Mapping[str, Any]) -> dict[str, Any]:
    openings = (report.get("test_openings") or {}).get(name)
    tasks = next(iter(modes.values()))["before"]["n"]
    return {
        "name": name,
        "tasks": tasks,
        "rows": in_numbers(modes),
        "openings": openings_line(openings) if openings else "",
    }


def of_other_seeds(report: Mapping[str, Any], reports: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The reports of the same training with another seed or other starting adapters."""

    def settings(report: Mapping[str, Any]) -> tuple[Any, ...]:
        config = {**report["config"], "seed": None, "model": report["config"]["model"].partition("+")[0]}
        return json.dumps(config, sort_keys=True), sorted(report["validation"])

    alike = [other for other in reports if "converged" in other and settings(other) == settings(report)]
    return [
        other
        for other in alike
        if (other["config"]["seed"], other["config"]["model"]) != (report["config"]["seed"], report["config"]["model"])
    ]


def _sections(curves: Mapping[str, Any]) -> list[tuple[str, str, list[str]]]:
    """Heading, note and curves of each chart that has data."""

    def starting_with(*prefixes: str) -> list[str]:
        return [name for name in sorted(curves) if name.startswith(prefixes)]

    sections = [
        (
            "Reward",
            "Mean return of the rollouts and its deviation, their scores by the rubric, and by the monitor rubric",
            ["reward", "reward_std", "score", "monitor"],
        ),
        (
            "Held out",
            "Tasks of val, greedily and sampled, and the retention tasks",
            starting_with("held_out_", "retained_"),
        ),
        ("Reward by criterion", "Mean grade", starting_with("criteria/")),
        ("Reward by turn", "Mean reward of the n-th call; the last one holds the score", starting_with("turn_reward/")),
        ("Entropy and KL", "Nats a token", ["entropy", "kl"]),
        (
            "Clipped, zero-variance, distinct",
            "Shares: clipped tokens, zero-variance groups, distinct answers of a group, truncated and failed runs",
            ["clip_ratio/region_mean", "zero_variance_groups", "distinct", "cut_off", "failed"],
        ),
        ("Gradient", "Norm before clipping", ["grad_norm"]),
        ("Lengths", "Calls a rollout, tokens a call", ["turns", "tokens"]),
    ]
    return [
        (heading, note, present)
        for heading, note, names in sections
        if (present := [name for name in names if curves.get(name)])
    ]


def _figure(curves: Mapping[str, Mapping[int, float]]) -> Any:
    import plotly.graph_objects as go
    from plotly.colors import qualitative

    figure = go.Figure()
    for index, (name, curve) in enumerate(curves.items()):
        steps, colour = sorted(curve), qualitative.Plotly[index % 10]
        values = [curve[step] for step in steps]
        label = (
            name.replace("clip_ratio/region_mean", "clipped")
            .replace("turn_reward/", "call ")
            .replace("criteria/", "")
            .replace("_", " ")
        )
        long = len(steps) > 3 * _SMOOTH
        figure.add_scatter(
            x=steps,
            y=values,
            name=label,
            mode="lines" if long else "lines+markers",
            line={"color": colour, "width": 1},
            opacity=0.35 if long else 1,
            showlegend=not long,
            legendgroup=label,
        )
        if long:
            means = [
                sum(part) / len(part)
                for end in range(len(values))
                if (part := values[max(0, end - _SMOOTH + 1) : end + 1])
            ]
            figure.add_scatter(
                x=steps, y=means, name=label, mode="lines", line={"color": colour, "width": 2}, legendgroup=label
            )
    figure.update_layout(
        height=320,
        margin={"l": 50, "r": 20, "t": 30, "b": 40},
        xaxis_title="step",
        template="plotly_white",
        showlegend=True,
    )
    return figure


def in_numbers(modes: Mapping[str, Any]) -> list[Sequence[str]]:
    """A comparison as rows, one per measure: its name, before, after, and the gain with its interval."""
    rows: list[Sequence[str]] = []
    for mode, comparison in modes.items():
        before, after = comparison["before"], comparison["after"]
        rows.append((f"{mode}: score", _number(before["score"]), _number(after["score"]), interval(comparison["gain"])))
        for name in after["criteria"]:
            grades = (before["criteria"].get(name), after["criteria"].get(name))
            rows.append((f"{mode}: {name}", *map(_number, grades), interval(comparison["criteria"].get(name))))
        kinds = after["task_types"] if len(after["task_types"]) > 1 else ()
        for kind in kinds:
            scores = (before["task_types"].get(kind), after["task_types"][kind])
            rows.append((f"{mode}: on {kind}", *map(_number, scores), interval(comparison["task_types"].get(kind))))
        for name in ("valid_calls", "parsed", "tokens_per_task"):
            rows.append((f"{mode}: {name.replace('_', ' ')}", _number(before[name]), _number(after[name]), ""))
    return rows


def _sample(sample: Mapping[str, Any]) -> str:
    advantages = sample["advantages"] or []
    calls = "\n".join(
        f"[{call['t']}] advantage {advantages[index]:+.2f}  {call['output']}"
        if index < len(advantages)
        else f"[{call['t']}] {call['output']}"
        for index, call in enumerate(sample["calls"])
    )
    inputs = json.dumps(sample["inputs"], ensure_ascii=False, default=str)
    return f"step {sample['step']}, score {sample['score']}\n{inputs}\n{calls}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def interval(gain: Mapping[str, Any] | None) -> str:
    return "" if not gain or gain["mean"] is None else f"{gain['mean']:+.3f} [{gain['low']:+.3f}, {gain['high']:+.3f}]"
