"""Report of a search over agent parameters: as JSON and as the artifact's page."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from assay.datasets.rows import NO_ROWS, RowFindings
from assay.evaluation.comparison import Comparison
from assay.evaluation.metrics import Budget, before_and_after
from assay.evaluation.session import RecordedProgram
from assay.evaluation.statistics import mean_difference
from assay.models import Meter
from assay.optimizers.parameters import SearchOutcome, in_figures
from assay.reports.markdown import cost_words, gain_claim, models_text, why_sealed, with_interval
from assay.runs.settings import TuneSettings
from assay.support.numbers import figure
from assay.support.reprs import ReportRepr
from assay.traces.store.sealing import Openings, openings_line


@dataclass(repr=False)
class TuneReport(ReportRepr):
    """What `tune` returns. `to_dict()` is the `--json` object."""

    artifact: Path
    config: TuneSettings
    outcome: SearchOutcome
    best: dict[str, Any]
    meter: Meter
    gate: Comparison | None = None
    test: Comparison | None = None
    replaces: bool = False
    kept: RecordedProgram | None = None  # the default, if gate did not prove the best parameters better
    unproven: Path | None = None  # artifact of the best parameters then
    coverage: Mapping[str, Any] | None = None  # of the rubric, on the tasks that were run first
    openings: Openings | None = None  # of the test split
    stopped: str | None = None
    page: Path | None = None
    importance: dict[str, dict[str, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    curriculum: Mapping[str, Any] | None = None  # see `assay.datasets.schedule.Schedule.report`
    stored: Mapping[str, Any] | None = None  # of a run that had ended before
    rows: RowFindings = NO_ROWS
    called: Mapping[str, Any] = field(default_factory=dict)  # see `Job.models`

    def to_dict(self) -> dict[str, Any]:
        if self.stored is not None:
            return dict(self.stored)
        usage, search, outcome, test = self.meter.usage, self.meter.of("search"), self.outcome, self.test
        budget = Budget(**self.config.budget)
        states = outcome.states
        return {
            "artifact": str(self.artifact),
            "unproven": None if self.unproven is None else str(self.unproven),
            "page": None if self.page is None else str(self.page),
            "importance": self.importance,
            "method": self.config.method,
            "best": self.best,
            "level_with_best": outcome.level,
            "program": outcome.best.point.program,
            "trials": len(states),
            "complete": states.count("complete"),
            "pruned": states.count("pruned"),
            "failed": states.count("failed"),
            "task_runs": outcome.task_runs,
            "task_runs_saved": outcome.saved,
            "objectives": list(self.config.objectives),
            "front": [trial.to_dict() for trial in outcome.trials if trial.number in outcome.front],
            "replaces": self.replaces,
            "gate": None
            if self.gate is None
            else {**self.gate.gain.to_dict(), "tokens": saving(self.gate), **self._inferiority(self.gate)},
            "test": dict.fromkeys(("default", "tuned", "gain", "tokens", "table"))
            if test is None
            else {
                "default": test.before.report(budget=budget),
                "tuned": test.after.report(budget=budget),
                "gain": test.gain.to_dict(),
                "tokens": saving(test),
                "table": before_and_after(list(test.before.runs.values()), list(test.after.runs.values())),
            },
            "history": [{**trial.to_dict(), "expected": outcome.expected.get(trial.number)} for trial in outcome.trials]
            if outcome.policy_training is None
            else outcome.policy_training["episodes"],
            "confirmed": None if outcome.policy_training is None else outcome.policy_training["confirmed"],
            "stopped": self.stopped,
            "searched": self.coverage if test is None else None,
            "test_openings": self.openings.to_dict() if self.openings else None,
            "notes": [*outcome.notes, *self.notes],
            "curriculum": self.curriculum,
            "data": self.rows.to_dict(),
            "search_calls": search.calls,
            "calls": usage.calls,
            "cached": usage.cached,
            "repeated_calls": usage.repeated,
            "tokens": usage.tokens,
            "cost_usd": usage.known_cost_usd,
            "model": self.called.get("model"),
            "models": self.called.get("models", []),
        }

    def _inferiority(self, gate: Comparison) -> dict[str, Any]:
        return {"margin": self.config.margin, "not_inferior": gate.gain.low > -self.config.margin}


def cheaper(gate: Comparison, margin: float) -> bool:
    """Whether the tuned program uses fewer tokens and is not inferior, by both 95 % intervals; score above -margin."""
    fewer = saving(gate)
    return gate.gain.low > -margin and fewer["high"] is not None and fewer["high"] < 0


def saving(comparison: Comparison) -> dict[str, float | None]:
    """Relative change of tokens per task, with a paired 95 % interval; negative if fewer are used."""
    before, after = comparison.before.tokens, comparison.after.tokens
    mean = float(np.mean(list(before.values()))) if before else 0.0
    if not mean:
        return {"mean": None, "low": None, "high": None}
    gap = mean_difference([after[key] - before[key] for key in before.keys() & after.keys()])
    return {
        name: None if value is None or math.isnan(value) else value / mean
        for name, value in zip(("mean", "low", "high"), gap, strict=True)
    }


def as_page(data: Mapping[str, Any]) -> str:
    """The report in Markdown."""
    settings = ", ".join(f"{name} {in_figures(value)}" for name, value in data["best"].items())
    lines = ["# Tuned agent parameters", "", f"Best: {settings}.", ""]
    before, after = data["test"]["default"], data["test"]["tuned"]
    if before and after:
        lines += [
            "| sealed test | default | tuned |",
            "|---|---|---|",
            f"| score | {figure(before['score'])} | {figure(after['score'])} |",
        ]
        lines += [f"| tokens a task | {before['tokens_per_task']:.1f} | {after['tokens_per_task']:.1f} |"]
        lines += [
            f"| {name} | {figure(before['metrics'][name])} | {figure(after['metrics'][name])} |"
            for name in after["metrics"]
        ]
        gain = data["test"]["gain"]
        claim = "" if gain["low"] is None else f": {gain_claim(gain['low'], gain['high'], data['test_openings'])}"
        lines += ["", f"Gain, paired: {with_interval(gain)}{claim}.", "", openings_line(data["test_openings"])]
    else:
        lines += [why_sealed(data)]
    if data["gate"]:
        verdict = (
            "the tuned parameters replace the default"
            if data["replaces"]
            else "no proof that they are better: the default is kept; the unproven parameters are stored beside the "
            "artifact"
        )
        lines += ["", f"Gate: {with_interval(data['gate'])}: {verdict}."]
    lines += [
        "",
        f"{data['trials']} trials, {data['pruned']} of them pruned; {data['calls']} calls, {data['tokens']} tokens, "
        f"{cost_words(data['cost_usd'])}.",
        *(["", f"LM calls by model: {text}."] if (text := models_text(data)) else []),
    ]
    return "\n".join(lines) + "\n"
