"""Estimates of a job without running it: calls, tokens, dollars and minutes. Calls no model and stores nothing."""

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import dspy
import sqlalchemy as sa

from assay.datasets.rows import near_notes
from assay.evaluation import SilentProgress
from assay.jobs.arguments import named
from assay.jobs.groups import ProgramJob
from assay.jobs.job import Job, open_job, salt_at
from assay.optimizers.budget import cost_text, estimated, forecast_pair, minutes_text, plan_report, run_calls, too_small
from assay.rubrics.loading import RubricSource
from assay.support.numbers import counted
from assay.support.report import OBJECT, Report
from assay.traces import Store, store_address
from assay.traces.store import tables as schema
from assay.traces.store.sealing import known_splits, resolve_salt

ALL_STAGES = "the estimate is of a run that reaches every stage of the curriculum"
_LATEST = 1000  # rollouts whose calls give the mean latency


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(Report):
    """An estimate.

    `cost_usd`: None if a price is unknown. `minutes`: None if the store has no call of the model yet.
    """

    kind: str
    sizes: Mapping[str, int]
    calls: int
    tokens: int
    cost_usd: float | None
    minutes: float | None
    data: Mapping[str, Any]  # see `assay.datasets.rows.RowFindings`
    cautions: Sequence[str] = field(default=(), metadata=OBJECT)  # `warnings` of the JSON object
    # of an improvement: `step`, requested `calls`, `share` of the caps (None: does not fit)
    steps: Sequence[Mapping[str, Any]] = ()

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "warnings": list(self.cautions)}

    def lines(self) -> Iterator[str]:
        minutes = (
            "minutes unknown: the store has no call of this model yet"
            if self.minutes is None
            else minutes_text(self.minutes)
        )
        splits = ", ".join(f"{name} {count}" for name, count in self.sizes.items())
        yield f"tasks: {splits}"
        yield (
            f"estimate: {counted(self.calls, 'calls')}, about {counted(self.tokens, 'tokens')}, "
            f"{cost_text(self.cost_usd)}, {minutes}"
        )
        yield from self.cautions
        yield from (f"note: {note}" for note in near_notes(self.data))


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a job requests without caps.

    Attributes:
        runs: of the program.
        notes: lines for the user.
        steps: of an improvement, JSON-ready.
    """

    runs: float
    notes: Sequence[str] = ()
    steps: Sequence[Mapping[str, Any]] = ()


def with_report(job: Job, search: float, *notes: str) -> Request:
    """The request of a job whose search makes so many runs, with those of gate and test."""
    pair = forecast_pair(job.recorded.program, job.session)
    plan = plan_report(job.splits, job.session.meter, job.config.decisions, pair=pair, searching=True)
    small = too_small(job.splits.sizes())
    warnings = [] if small is None else [f"warning: {small}"]
    return Request(runs=search + plan.runs, notes=[*warnings, *notes, plan.detectable_gain])


def plan_of(command: ProgramJob) -> Plan:
    """Estimates the job of a command, which has a method `request(job, each)`.

    It returns what the job requests; `each` is the number of LM calls of a run.

    Raises:
        AssayError: what was wrong, which rule, what to do.
    """
    config: Any
    settings = command.prepared()
    program, lm, config = named(settings)
    return planned(config, program, settings.needed, config.request, rubric=command.rubric, lm=lm, store=config.store)


def planned(
    config: ProgramJob, program: Any, need: tuple[str, ...], request: Callable[[Job, float], Request], *,
    rubric: RubricSource, lm: dspy.LM | None, store: str | Path | None,
) -> Plan:  # fmt: skip
    """Estimates a job.

    Args:
        need: splits that must not be empty.
        request: see `plan_of`.
    """
    config = replace(config, salt=resolve_salt(config.salt, store, artifact=salt_at(program)))
    with (
        tempfile.TemporaryDirectory() as folder,
        open_job(
            config,
            program=program,
            rubric=rubric,
            lm=lm,
            progress=SilentProgress(),
            store=Path(folder) / "plan.db",
            need=need,
            known=known_splits(store),
        ) as job,
    ):
        each = sum(run_calls(job.recorded.program, job.session))
        requested = request(job, each)
        calls = int(min(int(requested.runs * each), config.max_calls if config.max_calls is not None else math.inf))
        latency, demos = _latency_s(store, job.session.lm.model), job.config.shown_demos
        guess = estimated(calls, job.recorded.program, job.splits, job.session, demos=demos, latency_s=latency)
        cautions = [*(f"warning: {warning}" for warning in job.warnings), *requested.notes]
        return Plan(
            kind=config.kind, sizes=job.splits.sizes(), data=job.rows.to_dict(), cautions=cautions,
            steps=requested.steps, **asdict(guess),
        )  # fmt: skip


def _latency_s(store: str | Path | None, model: str) -> float | None:
    """Mean seconds per call of a model in the latest rollouts of the store; None if there are none."""
    if not store_address(store).exists:
        return None
    r, t = schema.rollouts, schema.transitions
    # ordered as the index is, so that a large store is not sorted
    latest = sa.select(r.c.id).order_by(r.c.started_at.desc(), r.c.id.desc()).limit(_LATEST).scalar_subquery()
    mean = sa.select(sa.func.avg(t.c.latency_ms)).where(
        t.c.rollout_id.in_(latest), t.c.model == model, t.c.error.is_(None), t.c.latency_ms > 0
    )
    with Store(store) as opened, opened.engine.connect() as connection:
        mean_ms = connection.execute(mean).scalar()
    return None if mean_ms is None else float(mean_ms) / 1000
