"""The page of a training run, its log, and its tasks before and after.

The page is made from the report. The log in the folder of the run has curves, alarms and sample rollouts so far, one
JSON object a line: training appends to it after each step, and the page reads it while the training runs or after it
was killed. Values of a step that is repeated after a resume replace the earlier ones. Samples are ids of rollouts:
their texts are only in the store, where they can be erased. Tasks before and after are the evaluations that the report
names, compared task by task.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
from markupsafe import Markup

from assay.errors import StoreError, spoken
from assay.reports.charts import Line, lines_chart
from assay.reports.files import ROWS, write_report
from assay.reports.sides import FEWEST_TASKS, Sides, sides_of
from assay.support.numbers import figure, signed
from assay.support.values import json_text
from assay.traces.store.evaluations import before_and_after
from assay.traces.store.sealing import openings_line
from assay.traces.store.store import StoreReads

_SMOOTH = 5  # steps of the running mean
_ROWS = 60  # steps of a table
_KINDS = ("first", "second", "third", "fourth")


def curves_of(curves: Mapping[str, Mapping[Any, float]]) -> dict[str, dict[int, float]]:
    """The curves of a stored report or checkpoint, with integer steps.

    Args:
        curves: `curves[name][step]`; steps are strings where they were read from JSON.
    """
    return {name: {int(step): value for step, value in curve.items()} for name, curve in curves.items()}


@dataclass(frozen=True, kw_only=True)
class CurveChart:
    """A chart of some curves. `keys` are kind and name of its lines; `rows` are steps with the value of each curve."""

    heading: str
    note: str
    chart: Markup
    keys: Sequence[tuple[str, str]]
    names: Sequence[str]
    rows: Sequence[tuple[int, Sequence[float | None]]]


@dataclass(frozen=True, kw_only=True)
class ComparisonTable:
    """Before and after on the sealed tasks of one evaluation."""

    name: str
    tasks: int
    rows: Sequence[Sequence[str]]
    openings: str


@dataclass(frozen=True, kw_only=True)
class TrainingPage:
    """What a page shows of a training."""

    facts: Sequence[tuple[str, str]] = ()
    warnings: Sequence[str] = ()
    comparisons: Sequence[ComparisonTable] = ()
    charts: Sequence[CurveChart] = ()
    samples: Sequence[str] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)
    settings: Sequence[tuple[str, str]] = ()


def training_page(report: Mapping[str, Any], others: Sequence[Mapping[str, Any]] = ()) -> TrainingPage:
    """The page of the `to_dict()` of a `PolicyReport` or an `SFTReport`.

    Args:
        others: reports of the same training with other seeds, for the share of runs that converged.
    """
    if "loss" in report:
        curves, facts = (
            curves_of({"loss/training": report["loss"], "loss/held_out": report["held_out_loss"]}),
            {
                "Steps": report["steps"],
                "Rows trained on": report["rows"],
                "Rows held out": report["held_out_rows"],
                "Tasks": report["tasks"],
                "Weights of step": report["best_step"],
            },
        )
        if report["agreement"] is not None:
            facts["Same text in torch and as served"] = f"{report['agreement']:.0%} of the prompts, greedily"
    else:
        curves = curves_of(report["curves"])
        facts = {
            "Steps": report["steps"],
            "Rollouts": report["rollouts"],
            "Calls trained on": report["calls"],
            "Weights of step": report["best_step"],
            "Converged": _convergence(report, others, curves),
        }
    model = {"Model before": report["config"]["model"]}
    if after := report.get("name") or report.get("path"):
        model["Model after"] = after
    warnings = [*report["alarms"], *([report["stopped"]] if report["stopped"] else [])]
    page = unfinished_page(curves, alarms=warnings, facts={**model, **facts})
    return replace(
        page,
        comparisons=[_comparison(name, modes, report) for name, modes in report["validation"].items()],
        samples=list(map(_sample, report.get("samples", ()))),
        left_out=report["left_out"],
        settings=[(name, str(value)) for name, value in report["config"].items()],
    )


def _convergence(
    report: Mapping[str, Any], others: Sequence[Mapping[str, Any]], curves: Mapping[str, Mapping[int, float]]
) -> str:
    """Whether the reward has stopped changing, here and with other seeds."""
    if (reward := constant_reward(curves)) is not None:
        return f"nothing was learned: every rollout had the reward {figure(reward)}"
    converged = {None: "unknown (too few steps)", True: "yes", False: "no"}[report["converged"]]
    if others:
        runs = [report["converged"], *(other["converged"] for other in others)]
        converged += (
            f"; of {len(runs)} seeds {runs.count(True)} converged, {runs.count(False)} did not, "
            f"{runs.count(None)} took too few steps"
        )
    return (
        f"{converged} (mean reward of the last ten steps compared with the ten before: Welch's 95 % interval holds "
        "0 and is within 0.1 to either side, or is within 0.05)"
    )


def constant_reward(curves: Mapping[str, Mapping[int, float]]) -> float | None:
    """The reward that every rollout of a training had, so that no advantage was other than 0; None if rewards differ.

    Args:
        curves: value by step of each curve.
    """
    means, deviations = (set(curves.get(name, {}).values()) for name in ("reward", "reward_std"))
    return means.pop() if len(means) == 1 and deviations == {0.0} else None


def unfinished_page(
    curves: Mapping[str, Mapping[int, float]], *, alarms: Sequence[str], facts: Mapping[str, Any]
) -> TrainingPage:
    """The page of a training that has no report yet, from its curves so far."""
    charts = [_chart(*section, curves) for section in _sections(curves)]
    return TrainingPage(facts=[(name, str(value)) for name, value in facts.items()], warnings=alarms, charts=charts)


def write_training(
    path: Path, report: Mapping[str, Any], others: Sequence[Mapping[str, Any]] = (), tasks: Sequence[Any] = ()
) -> Path:
    """Writes the page of a training as one file.

    Args:
        report, others: as for `training_page`.
        tasks: `assay.reports.training.trained_tasks` of it.
    """
    page, method = training_page(report, others), report["config"].get("algorithm", "sft")
    page = replace(page, warnings=[spoken(text, str) for text in page.warnings])
    return write_report(
        path, "report_training.html", title=f"{method}: {report['name'] or report['path']}", facts=page.facts,
        notes=report.get("notes", []), page=page, tasks=tasks,
    )  # fmt: skip


def _comparison(name: str, modes: Mapping[str, Any], report: Mapping[str, Any]) -> ComparisonTable:
    openings = (report.get("test_openings") or {}).get(name)
    tasks = next(iter(modes.values()))["before"]["n"]
    return ComparisonTable(
        name=name, tasks=tasks, rows=in_numbers(modes), openings=openings_line(openings) if openings else ""
    )


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
            "Loss",
            "Mean negative log-likelihood of a completion's token, on the rows of the step and on the held-out rows",
            [name for name in ("loss/training", "loss/held_out") if name in curves],
        ),
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


def _chart(heading: str, note: str, names: Sequence[str], curves: Mapping[str, Mapping[int, float]]) -> CurveChart:
    """The curves by step. Of long ones the mean of the last steps is drawn, over the values."""
    lines, keys = [], []
    for at, name in enumerate(names):
        kind, label = _KINDS[at] if at < len(_KINDS) else "other", _label(name)
        points = [(float(step), curves[name][step]) for step in sorted(curves[name])]
        if len(points) > 3 * _SMOOTH:
            lines.append(Line(name=label, points=points, kind=f"faint {kind}"))
            points = [(step, _mean(points, end)) for end, (step, _) in enumerate(points)]
        lines.append(Line(name=label, points=points, kind=kind))
        keys.append((kind, label))
    steps = sorted({step for name in names for step in curves[name]})
    rows = steps[:: max(1, -(-len(steps) // _ROWS))]
    values = [value for name in names for value in curves[name].values()]
    return CurveChart(
        heading=heading, note=note, keys=keys, names=[_label(name) for name in names],
        chart=lines_chart(
            lines, label=f"{heading} by step", x_name="step", y_name=heading.lower(),
            unit=bool(values) and min(values) >= 0 and 0.5 < max(values) <= 1,
        ),
        rows=[(step, [curves[name].get(step) for name in names]) for step in rows],
    )  # fmt: skip


def _mean(points: Sequence[tuple[float, float]], end: int) -> float:
    part = [value for _, value in points[max(0, end - _SMOOTH + 1) : end + 1]]
    return sum(part) / len(part)


def _label(name: str) -> str:
    return (
        name.replace("clip_ratio/region_mean", "clipped")
        .replace("turn_reward/", "call ")
        .replace("criteria/", "")
        .replace("loss/", "")
        .replace("_", " ")
    )


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
            if before[name] is not None or after[name] is not None:  # a program without tools has no valid calls
                digits = 1 if name == "tokens_per_task" else 3
                numbers = (_number(side[name], digits) for side in (before, after))
                rows.append((f"{mode}: {name.replace('_', ' ')}", *numbers, ""))
    return rows


def _sample(sample: Mapping[str, Any]) -> str:
    advantages = sample["advantages"] or []
    calls = "\n".join(
        f"[{call['t']}] advantage {signed(advantages[index], 2)}  {call['output']}"
        if index < len(advantages)
        else f"[{call['t']}] {call['output']}"
        for index, call in enumerate(sample["calls"])
    )
    inputs = json_text(sample["inputs"])
    return f"step {sample['step']}, score {sample['score']}\n{inputs}\n{calls}"


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else figure(value, digits)


def interval(gain: Mapping[str, Any] | None) -> str:
    if not gain or gain["mean"] is None:
        return ""
    if gain.get("n", FEWEST_TASKS) < FEWEST_TASKS:
        return f"{signed(gain['mean'])}, too few tasks"
    return f"{signed(gain['mean'])} [{signed(gain['low'])}, {signed(gain['high'])}]"


_FILE = "training.jsonl"
_MOST_BYTES = 8 << 20  # read from the end of a log: about 8,000 steps


class TrainingLog:
    """Appends to the log of a run.

    Args:
        folder: of the run.
        guard: called before each line, so in each step; what it raises ends the training.
    """

    def __init__(self, folder: Path, guard: Callable[[], None] | None = None) -> None:
        self._path, self._guard = folder / _FILE, guard

    def begin(self, steps: int) -> None:
        """Adds the number of steps that the training takes at most."""
        self._append({"step": 0, "steps": steps})

    def values(self, step: int, values: Mapping[str, float], alarms: Mapping[str, str]) -> None:
        """Adds the finite values by curve, and all alarms so far by name."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}  # JSON has no others
        self._append({"step": step, "values": finite, "alarms": dict(alarms)})

    def sample(self, step: int, rollout_id: str, advantages: Sequence[float]) -> None:
        """Adds a sample rollout, with the advantage of each of its calls that was trained on."""
        self._append({"step": step, "sample": rollout_id, "advantages": list(advantages)})

    def _append(self, line: Mapping[str, Any]) -> None:
        if self._guard is not None:
            self._guard()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # The line break comes first: a line that a kill cut off does not join the next one.
        with self._path.open("a", encoding="utf-8") as file:
            file.write("\n" + json.dumps(line))


@dataclass(kw_only=True)
class TrainingProgress:
    """What a log holds.

    Attributes:
        curves: `curves[name][step]`.
        alarms: texts by name.
        samples: id and advantages of the sample rollout by step.
        step: the last step with a value; None if there is none.
        steps: number of steps at most; None if the log does not say it.
        shortened: whether the log is longer than what was read of it, which is its end.
    """

    curves: dict[str, dict[int, float]] = field(default_factory=dict)
    alarms: dict[str, str] = field(default_factory=dict)
    samples: dict[int, tuple[str, list[float]]] = field(default_factory=dict)
    step: int | None = None
    steps: int | None = None
    shortened: bool = False


def read_training_log(folder: Path) -> TrainingProgress | None:
    """What the log of a run's folder holds; None if there is no log. Lines that were cut off are skipped."""
    path, progress = folder / _FILE, TrainingProgress()
    if not path.is_file():
        return None
    curves: dict[str, dict[Any, float]] = {}
    with path.open("rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - _MOST_BYTES)
        file.seek(start)
        lines = file.read(_MOST_BYTES).split(b"\n")
    progress.shortened = start > 0
    for text in lines[1:]:  # the first is empty, or the rest of a line
        try:
            line = orjson.loads(text)
            step = int(line["step"])
            if "sample" in line:
                progress.samples[step] = (str(line["sample"]), [float(value) for value in line["advantages"]])
                continue
            if "steps" in line:
                progress.steps = int(line["steps"])
                continue
            for name, value in line["values"].items():
                curves.setdefault(str(name), {})[step] = float(value)
            progress.alarms = {str(name): str(text) for name, text in line["alarms"].items()}
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
        progress.step = step
    progress.curves = curves_of(curves)
    return progress


_FEWEST_ROWS = 20  # tasks of one comparison, however many comparisons there are


@dataclass(frozen=True, kw_only=True)
class TrainedTasks:
    """A program's tasks before and after; `sides` is None where the store has not the rollouts of both evaluations.

    Attributes:
        mode: how the model was sampled, `greedy` or `sampled`.
    """

    program: str
    mode: str
    sides: Sides | None


def trained_tasks(store: StoreReads, validation: Mapping[str, Any]) -> list[TrainedTasks]:
    """Each comparison of a training by task, the worst change first; of several comparisons fewer tasks each.

    Args:
        validation: of the report of a training.
    """
    compared = list(_compared(validation))
    rows = max(_FEWEST_ROWS, ROWS // max(1, len(compared)))
    return [
        TrainedTasks(program=program, mode=mode, sides=_sides(store, runs, mode, rows))
        for program, mode, runs in compared
    ]


def compared_runs(validation: Mapping[str, Any]) -> list[str]:
    """Ids of the evaluations of all comparisons."""
    return [run for _, _, runs in _compared(validation) for run in runs or ()]


def _compared(validation: Mapping[str, Any]) -> Iterator[tuple[str, str, tuple[str, str] | None]]:
    """Program, mode and runs of each comparison."""
    for program, modes in validation.items():
        for mode, comparison in modes.items():
            runs: Sequence[str] = comparison.get("runs") or ()
            yield program, mode, (runs[0], runs[1]) if len(runs) == 2 else None


def _sides(store: StoreReads, runs: tuple[str, str] | None, mode: str, rows: int) -> Sides | None:
    try:
        pair = None if runs is None else before_and_after(store, runs, mode)
    except StoreError:
        return None
    if runs is None or pair is None:
        return None
    return sides_of(store, runs, *pair, rows=rows, better_first=False)
