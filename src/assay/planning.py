"""What a job will take, without running it: calls, tokens, dollars and minutes. Asks no model and leaves nothing in the store."""

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import dspy
import sqlalchemy as sa

from assay.given import given_model
from assay.improveorder import check_name, check_order
from assay.improveplan import ImprovePlan, StepPlan, plan_steps, search_runs
from assay.jobs import Job, RunConfig, home_of, open_job, salt_at
from assay.models import Meter, count_tokens
from assay.optimizers import Progress
from assay.optimizers.estimate import calls_per_run, minutes_text, price_of
from assay.optimizers.reserve import forecast_pair, plan_report, too_few_to_score, too_small
from assay.optimizers.weights.config import PolicyConfig, made_of
from assay.programs.loading import full_name
from assay.rubrics import Rubric
from assay.traces import Store, schema, store_url
from assay.traces.sealing import resolve_salt

__all__ = ["Plan", "plan"]

_ANSWER = 40  # tokens of an answer, as long as nothing is known of it
_LATEST = 1000  # rollouts whose calls tell how long one takes


@dataclass(frozen=True, kw_only=True)
class Plan:
    """An estimate. `cost_usd` is None where a model has no known price, `minutes` where the store has no call of the model yet."""

    kind: str
    sizes: Mapping[str, int]
    calls: int
    tokens: int
    cost_usd: float | None
    minutes: float | None
    left_out: str = ""  # rows of the data: duplicates and contradictions
    warnings: Sequence[str] = ()
    steps: Sequence[Mapping[str, Any]] = ()  # of an improvement: `step`, `calls` that it asks for, `share` of the caps (None: does not fit)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        price = "cost unknown for these models" if self.cost_usd is None else f"${self.cost_usd:.2f}"
        minutes = "minutes unknown: the store has no call of this model yet" if self.minutes is None else minutes_text(self.minutes)
        splits = ", ".join(f"{name} {count}" for name, count in self.sizes.items())
        left_out = f" ({self.left_out})" if self.left_out else ""
        return [f"tasks: {splits}{left_out}", f"estimate: {self.calls:,} calls, about {self.tokens:,} tokens, {price}, {minutes}", *self.warnings]


def plan(
    kind: str,
    program: str | dspy.Module,
    *,
    rubric: str | Path | Rubric,
    data: str,
    lm: dspy.LM | None = None,
    store: str | Path | None = None,
    split: str = "val",
    repeats: int = 1,
    trials: int = 0,
    order: Sequence[str] = (),
    sft: Mapping[str, Any] | None = None,
    grpo: Mapping[str, Any] | None = None,
    retain: Sequence[str] = (),
    watch: str | Path | None = None,
    name: str | None = None,
    **options: Any,
) -> Plan:
    """The estimate of `compile`, `tune`, `collect`, `evaluate` or `improve`.

    Args:
        kind: the command's name.
        split, repeats: of `collect` and `evaluate`; `repeats` also the samples of a trial and the rollouts of `sft`.
        trials: of `tune`.
        order, sft, grpo, retain, watch: of `improve`, refused here as they would be refused when run. The judges of what watches a training are
            not in the estimate.
        name: of the improvement, refused where it is taken; None where one of this name is to be resumed.
        options: the fields of `RunConfig`; others are left out.
    Raises:
        AssayError: what was wrong, which rule, what to do.
    """
    program = full_name(program) if isinstance(program, str) else program
    lm, options = given_model(program, lm, options)
    if kind == "improve":
        check_order(
            order, program=str(program), rubric=str(rubric), data=data, model=options.get("model"), judge=options.get("judge_model"),
            sft=sft, grpo=grpo, retain=retain, watch=watch,
        )  # fmt: skip
        if name is not None:
            check_name(name, order, home_of(store) / "improve" / name)
    known = {item.name for item in fields(RunConfig)}
    config = RunConfig.of(program, rubric, data, lm, **{name: value for name, value in options.items() if name in known and value is not None})
    config = replace(config, kind=kind, salt=resolve_salt(config.salt, store, artifact=salt_at(program)))
    need = (split,) if kind in ("collect", "evaluate") else ("val", "gate", "test")
    with (
        tempfile.TemporaryDirectory() as folder,
        open_job(config, program=program, rubric=rubric, lm=lm, progress=Progress(), store=Path(folder) / "plan.db", need=need) as job,
    ):
        each = calls_per_run(job.student.program) + sum(c.judge is not None for c in job.session.rubric.finals)
        sizes, decides = job.splits.sizes(), kind not in ("collect", "evaluate")
        few = too_few_to_score(sizes, split) if kind == "evaluate" else None if kind == "collect" else too_small(sizes)
        warnings, steps = [f"warning: {few}"] if few else [], list[dict[str, Any]]()
        if kind == "improve":
            trained = made_of(PolicyConfig, grpo or {}, "grpo")
            improvement = _improvement(job, plan_steps(order, sizes, config, each=each, rollouts=repeats, grpo=trained, retained=len(retain)))
            caps = replace(config.caps, search_calls=None)
            runs, steps = improvement.runs, improvement.rows(caps)
            warnings += improvement.lines(caps)
        elif decides:
            pair = forecast_pair(job.student.program, job.session)
            report = plan_report(job.splits, job.session.meter, config.decisions, pair=pair, searching=True)
            search = trials * repeats * sizes["val"] if kind == "tune" else search_runs(config, each, sizes["val"])
            runs = search + 2 * report.gate + 2 * report.test
            warnings.append(report.shows)
        else:
            runs = repeats * sizes[split]
        calls = min(int(runs * each), config.max_calls if config.max_calls is not None else math.inf)
        return _plan(job, kind, int(calls), store, warnings, steps)


def _improvement(job: Job, steps: Sequence[StepPlan]) -> ImprovePlan:
    pair = forecast_pair(job.student.program, job.session, cost_per_call=price_of(job.session.lm, 300, 40) or 0.0)
    return ImprovePlan(report=plan_report(job.splits, Meter(), job.config.decisions, pair=pair), steps=steps)


def _plan(job: Job, kind: str, calls: int, store: str | Path | None, warnings: list[str], steps: list[dict[str, Any]]) -> Plan:
    session, tasks = job.session, [*job.splits.train, *job.splits.val, *job.splits.gate]
    shown = count_tokens(session.lm, f"{dict(tasks[0].inputs)} {dict(tasks[0].expected)}") if tasks else 100
    prompt = 120 + shown * (1 + job.config.demos)
    latency = _latency_s(store, session.lm.model)
    return Plan(
        kind=kind, sizes=job.splits.sizes(), calls=calls, tokens=calls * (prompt + _ANSWER), left_out=job.splits.left_out(),
        warnings=warnings, steps=steps,
        cost_usd=price_of(session.lm, calls * prompt, calls * _ANSWER),
        minutes=None if latency is None else calls * latency / max(1, session.threads) / 60,
    )  # fmt: skip


def _latency_s(store: str | Path | None, model: str) -> float | None:
    """Mean seconds of the calls of a model in the latest rollouts of the store; None where there are none."""
    url = store_url(store)
    if url.startswith("sqlite:///") and not Path(url.removeprefix("sqlite:///")).is_file():
        return None
    r, t = schema.rollouts, schema.transitions
    latest = sa.select(r.c.id).order_by(r.c.started_at.desc(), r.c.id.desc()).limit(_LATEST).scalar_subquery()  # by its index
    mean = sa.select(sa.func.avg(t.c.latency_ms)).where(t.c.rollout_id.in_(latest), t.c.model == model, t.c.error.is_(None), t.c.latency_ms > 0)
    with Store(store) as opened, opened.engine.connect() as connection:
        found = connection.execute(mean).scalar()
    return None if found is None else float(found) / 1000
