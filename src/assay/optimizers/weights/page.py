"""What a training did, for people: one HTML page that opens without a network. Reads a report as JSON; trains nothing."""

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from assay.optimizers.pages import Page, table
from assay.traces.sealing import openings_line

__all__ = ["in_numbers", "interval", "of_other_seeds", "write_report"]

_SMOOTH = 5  # steps of the running mean that is drawn over the noise


def write_report(path: Path, told: Mapping[str, Any], others: Sequence[Mapping[str, Any]] = ()) -> Path:
    """Writes the page of a `PolicyReport.to_dict()`.

    Args:
        others: reports of the same training with other seeds, for the share of runs that converged.
    Raises:
        MissingExtra: plotly is not installed.
    """
    config = told["config"]
    converged = {None: "too few steps to tell", True: "yes", False: "no"}[told["converged"]]
    if others:
        runs = [told["converged"], *(one["converged"] for one in others)]
        converged += f"; of {len(runs)} seeds {runs.count(True)} did, {runs.count(False)} did not, {runs.count(None)} took too few steps"
    page = Page(
        f"{config['algorithm']}: {told['name'] or told['path']}",
        {
            "model before": config["model"], "steps": told["steps"], "rollouts": told["rollouts"], "calls trained on": told["calls"],
            "weights of step": told["best_step"], "converged": f"{converged} (mean reward of the last ten steps beside the ten before: Welch's "
            "95 % interval holds 0 and is no wider than 0.1 to either side)",
        },
    )  # fmt: skip
    for text in [*told["alarms"], *([told["stopped"]] if told["stopped"] else [])]:
        page.markup(f"<p><b>{html.escape(text)}</b></p>")
    for bench, modes in told["validation"].items():
        number = next(iter(modes.values()))["before"]["n"]
        page.section(f"Before and after: {bench}", f"{number} sealed tasks; gains are paired, with 95 % intervals")
        page.markup(table(("", "before", "after", "gain"), in_numbers(modes)))
        if openings := (told.get("test_openings") or {}).get(bench):
            page.markup(f"<p>{html.escape(openings_line(openings))}</p>")
    curves = {name: {int(step): value for step, value in curve.items()} for name, curve in told["curves"].items()}
    for heading, note, names in _sections(curves):
        page.section(heading, note)
        page.figure(_figure({name: curves[name] for name in names}))
    if told["samples"]:
        page.section("Sample rollouts", "As they were sampled, with the advantage of each call")
        page.markup("".join(map(_sample, told["samples"])))
    if told["left_out"]:
        page.section("Left out")
        page.markup(table(("what", "count"), list(told["left_out"].items())))
    page.section("Settings")
    page.markup(table(("setting", "value"), list(config.items())))
    return page.write(path)


def of_other_seeds(told: Mapping[str, Any], reports: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those of the reports that tell of the same training but for its seed and the adapters that it began from."""

    def settings(one: Mapping[str, Any]) -> tuple[Any, ...]:
        config = {**one["config"], "seed": None, "model": one["config"]["model"].partition("+")[0]}
        return json.dumps(config, sort_keys=True), sorted(one["validation"])

    alike = [one for one in reports if "converged" in one and settings(one) == settings(told)]
    return [one for one in alike if (one["config"]["seed"], one["config"]["model"]) != (told["config"]["seed"], told["config"]["model"])]


def _sections(curves: Mapping[str, Any]) -> list[tuple[str, str, list[str]]]:
    """Heading, note and curves of each picture that there is something for."""

    def begun(*prefixes: str) -> list[str]:
        return [name for name in sorted(curves) if name.startswith(prefixes)]

    wanted = [
        ("Reward", "Mean return of the rollouts and its deviation, their scores by the rubric, and by one that only watches",
         ["reward", "reward_std", "score", "watched"]),
        ("Held out", "Tasks of val, greedily and sampled, and what was to be retained", begun("held_out_", "retained_")),
        ("Reward by criterion", "Mean grade", begun("criteria/")),
        ("Reward by turn", "Mean reward of the n-th call; the last one holds the score", begun("turn_reward/")),
        ("Entropy and KL", "Nats a token", ["entropy", "kl"]),
        ("Clipped, flat, alike", "Share of tokens clipped, of groups without spread, of answers that differ within a group, cut off, failed",
         ["clip_ratio/region_mean", "flat_groups", "distinct", "cut_off", "failed"]),
        ("Gradient", "Norm before clipping", ["grad_norm"]),
        ("Lengths", "Calls a rollout, tokens a call", ["turns", "tokens"]),
    ]  # fmt: skip
    return [(heading, note, kept) for heading, note, names in wanted if (kept := [name for name in names if curves.get(name)])]


def _figure(curves: Mapping[str, Mapping[int, float]]) -> Any:
    import plotly.graph_objects as go
    from plotly.colors import qualitative

    figure = go.Figure()
    for at, (name, curve) in enumerate(curves.items()):
        steps, colour = sorted(curve), qualitative.Plotly[at % 10]
        values = [curve[step] for step in steps]
        shown = name.replace("clip_ratio/region_mean", "clipped").replace("turn_reward/", "call ").replace("criteria/", "").replace("_", " ")
        long = len(steps) > 3 * _SMOOTH
        figure.add_scatter(x=steps, y=values, name=shown, mode="lines" if long else "lines+markers", line={"color": colour, "width": 1},
                           opacity=0.35 if long else 1, showlegend=not long, legendgroup=shown)  # fmt: skip
        if long:
            means = [sum(part) / len(part) for end in range(len(values)) if (part := values[max(0, end - _SMOOTH + 1) : end + 1])]
            figure.add_scatter(x=steps, y=means, name=shown, mode="lines", line={"color": colour, "width": 2}, legendgroup=shown)
    figure.update_layout(height=320, margin={"l": 50, "r": 20, "t": 30, "b": 40}, xaxis_title="step", template="plotly_white", showlegend=True)
    return figure


def in_numbers(modes: Mapping[str, Any]) -> list[Sequence[str]]:
    """What a comparison says, a row a measure: its name, before, after, and the gain with its interval."""
    rows: list[Sequence[str]] = []
    for mode, found in modes.items():
        before, after = found["before"], found["after"]
        rows.append((f"{mode}: score", _number(before["score"]), _number(after["score"]), interval(found["gain"])))
        for name in after["criteria"]:
            grades = (before["criteria"].get(name), after["criteria"].get(name))
            rows.append((f"{mode}: {name}", *map(_number, grades), interval(found["criteria"].get(name))))
        kinds = after["task_types"] if len(after["task_types"]) > 1 else ()
        for kind in kinds:
            scores = (before["task_types"].get(kind), after["task_types"][kind])
            rows.append((f"{mode}: on {kind}", *map(_number, scores), interval(found["task_types"].get(kind))))
        for name in ("valid_calls", "parsed", "tokens_per_task"):
            rows.append((f"{mode}: {name.replace('_', ' ')}", _number(before[name]), _number(after[name]), ""))
    return rows


def _sample(told: Mapping[str, Any]) -> str:
    advantages = told["advantages"] or []
    calls = "\n".join(
        f"[{call['t']}] advantage {advantages[at]:+.2f}  {call['output']}" if at < len(advantages) else f"[{call['t']}] {call['output']}"
        for at, call in enumerate(told["calls"])
    )
    text = f"step {told['step']}, score {told['score']}\n{json.dumps(told['inputs'], ensure_ascii=False, default=str)}\n{calls}"
    return f"<pre>{html.escape(text)}</pre>"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def interval(gain: Mapping[str, Any] | None) -> str:
    return "" if not gain or gain["mean"] is None else f"{gain['mean']:+.3f} [{gain['low']:+.3f}, {gain['high']:+.3f}]"
