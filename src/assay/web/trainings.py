"""What the page of a run shows of a training: its report, or its log while it runs; and sample rollouts over steps."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from assay.reports.texts import Budget, Clipped, preview
from assay.reports.training import TrainingPage, sft_page, training_page, unfinished_page
from assay.reports.training_log import TrainingProgress, read_training_log
from assay.traces.store import Store
from assay.traces.store import tables as schema

__all__ = ["Sample", "ShownTraining", "training_of"]

_SAMPLES, _CALLS = 12, 8  # rollouts of a page, and calls of each
_OUTPUT = 600  # characters of a call
_INPUTS = 400  # characters read of a rollout's inputs


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A rollout that was trained on. `calls` are advantage, where it is known, and text; `more` calls are left out."""

    step: int
    rollout_id: str
    score: float | None
    task: str
    calls: list[tuple[float | None, Clipped]]
    more: int


@dataclass(frozen=True, kw_only=True)
class ShownTraining:
    """A training: what its report or its log says, and its sample rollouts, the last step first."""

    page: TrainingPage
    samples: list[Sample]


def training_of(
    store: Store, run: Mapping[str, Any], report: Mapping[str, Any], folder: Path, *, words: Callable[[str], str] = str
) -> ShownTraining | None:
    """The training of a run; None if the run is none, or has no step yet.

    Args:
        report: of the run; empty while it runs, or if it was killed.
        folder: of the run, with its log.
        words: puts the flags of the command into alarms, in place of Python arguments.
    """
    shown = _training_of(store, run, report, folder)
    if shown is None:
        return None
    return replace(shown, page=replace(shown.page, warnings=[words(text) for text in shown.page.warnings]))


def _training_of(store: Store, run: Mapping[str, Any], report: Mapping[str, Any], folder: Path) -> ShownTraining | None:
    if run["kind"] != "train":
        return None
    log = read_training_log(folder)
    samples = [] if log is None else _samples(store, log)
    if report.get("curves"):
        return ShownTraining(page=training_page(report), samples=samples)
    if "held_out_loss" in report:
        return ShownTraining(page=sft_page(report), samples=[])
    if log is None or not log.curves:
        return None
    return ShownTraining(page=_unfinished(run, log), samples=samples)


def _unfinished(run: Mapping[str, Any], log: TrainingProgress) -> TrainingPage:
    config = run["config"]
    most = log.steps or config.get("steps")
    steps = f"{log.step} of {most}" if most else str(log.step)
    facts = {
        "Adapter": config.get("adapter_name"),
        "Model before": config.get("model"),
        "Method": config.get("algorithm"),
        "Step": steps,
    }
    if log.shortened:
        facts["Shown"] = "the last steps: the log is too long for a page"
    texts = {name: str(value) for name, value in facts.items() if value}
    return unfinished_page(log.curves, alarms=list(log.alarms.values()), facts=texts)


def _samples(store: Store, log: TrainingProgress) -> list[Sample]:
    """Some of the sample rollouts that the store still has, evenly over the steps."""
    steps = sorted(log.samples, reverse=True)
    steps = steps[:: max(1, -(-len(steps) // _SAMPLES))]
    ids = [log.samples[step][0] for step in steps]
    table, calls = schema.rollouts, schema.transitions
    inputs = sa.func.substr(table.c.inputs_json, 1, _INPUTS)
    rows = sa.select(table.c.id, table.c.score, inputs).where(table.c.id.in_(ids))
    outputs = sa.select(calls.c.rollout_id, calls.c.t, calls.c.output).where(calls.c.rollout_id.in_(ids))
    with store.engine.connect() as connection:
        stored = {rollout_id: (score, text) for rollout_id, score, text in connection.execute(rows)}
        texts: dict[str, list[str]] = {}
        for rollout_id, _, text in connection.execute(outputs.order_by(calls.c.rollout_id, calls.c.t)):
            texts.setdefault(rollout_id, []).append(text)
    budget = Budget(20_000, most=_OUTPUT, least=80)
    return [
        Sample(
            step=step, rollout_id=rollout_id, score=stored[rollout_id][0], task=preview(stored[rollout_id][1], 120),
            calls=[
                (advantages[at] if at < len(advantages) else None, budget.clip(text))
                for at, text in enumerate(texts.get(rollout_id, [])[:_CALLS])
            ],
            more=max(0, len(texts.get(rollout_id, [])) - _CALLS),
        )
        for step in steps
        for rollout_id, advantages in (log.samples[step],)
        if rollout_id in stored
    ]  # fmt: skip
