"""The improvement of a cycle: `assay.compile`, `assay.improve` or a function of the user's own."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from assay.api.compile import compile as compile_program
from assay.api.improve.run import improve
from assay.errors import ConfigError
from assay.evaluation.progress import Progress
from assay.reports.markdown import with_interval
from assay.runs.settings.loop import LoopSettings
from assay.runs.unused import settings_of_another_job
from assay.sources.modules import attribute_of
from assay.support.values import json_text
from assay.traces import Store
from assay.traces.store import tables as schema

_HACKING = "being gamed"  # of the alarm of `assay.optimizers.finetuning.monitoring`, in notes and logs


@dataclass(frozen=True, kw_only=True)
class Order:
    """What is to be improved.

    Attributes:
        champion: folder of the artifact.
        data: file of the pool.
        out: folder of the result.
        began: when the improvement began, seconds since the epoch.
        max_calls, max_cost_usd: what the budget leaves; None without a limit.
    """

    name: str
    champion: Path
    data: Path
    out: Path
    store: Any
    began: float
    max_calls: int | None
    max_cost_usd: float | None


def improved(settings: LoopSettings, order: Order, progress: Progress | None) -> dict[str, Any]:
    """Runs the improvement, or continues the one that was killed.

    Returns:
        `artifact` (None if nothing better was found), `reason`, `calls`, `cost_usd`, `converged` and `hacks`.
    """
    with settings_of_another_job():  # the options of the loop outlive the rubric of one cycle
        if settings.method == "compile":
            return _compiled(settings, order, progress)
        if settings.method == "improve":
            return _improved(settings, order, progress)
    return _by_function(settings, order)


def _options(settings: LoopSettings, order: Order) -> dict[str, Any]:
    """The method's options, with the caps that the budget leaves."""
    options = dict(settings.options or {})
    for name in ("max_calls", "max_cost_usd"):
        limits = [value for value in (options.get(name), getattr(order, name)) if value is not None]
        if limits:
            options[name] = min(limits)
    return options


def _compiled(settings: LoopSettings, order: Order, progress: Progress | None) -> dict[str, Any]:
    report = compile_program(
        str(order.champion), rubric=settings.rubric, data=str(order.data), out=order.out, store=order.store,
        resume=True, progress=progress, **_options(settings, order),
    ).to_dict()  # fmt: skip
    better = bool(report["replaces"])
    return {
        "artifact": report["artifact"] if better else None,
        "reason": _decided(report),
        "calls": report["calls"],
        "cost_usd": report["cost_usd"],
        "converged": report["stopped"] is None,
        "hacks": _hacks(report),
        "test": report["test"],
    }


def _decided(report: Mapping[str, Any]) -> str:
    """Why a compiled program replaces the champion, or does not."""
    if report["gate"] is not None:
        return f"gate: {with_interval(report['gate'])}"
    if report["winner"] == "baseline":
        return "the baseline is the best that was found"
    return f"the gate was not decided{': ' if report['stopped'] else ''}{report['stopped'] or ''}"


def _improved(settings: LoopSettings, order: Order, progress: Progress | None) -> dict[str, Any]:
    report = improve(
        str(order.champion), rubric=settings.rubric, data=str(order.data), name=order.name, out=order.out,
        store=order.store, resume=True, progress=progress, **_options(settings, order),
    ).to_dict()  # fmt: skip
    better = any(step["kept"] for step in report["steps"])
    settled = all(step.get("converged") is not False for step in report["steps"])
    calls, cost = usage_since(order.store, order.began)
    return {
        "artifact": report["artifact"] if better else None,
        "reason": "; ".join(map(_outcome, report["steps"])),
        "calls": calls,
        "cost_usd": cost,
        "converged": report["stopped"] is None and settled,
        "hacks": _hacks(report),
        "test": report["test"],
    }


def _outcome(step: Mapping[str, Any]) -> str:
    """A step of an improvement in a few words."""
    settled = ", not converged" if step.get("converged") is False else ""
    return f"{step['step']} {'kept' if step['kept'] else 'not kept'}{settled}"


def usage_since(store: Any, began: float) -> tuple[int, float]:
    """LM calls and dollars of all jobs of the store since a time, without those of production.

    For improvements without counts of their own that outlive a kill or failure. Calls of another job at the same time
    are counted too, so that the budget holds.
    """
    calls, rollouts = schema.transitions.c, schema.rollouts.c
    query = (
        sa.select(sa.func.count(), sa.func.sum(calls.cost_usd))
        .select_from(schema.transitions.join(schema.rollouts, rollouts.id == calls.rollout_id))
        .where(calls.started_at >= began, sa.not_(calls.cached), rollouts.phase.not_in(("deployed", "shadow")))
    )
    with Store(store) as opened, opened.engine.connect() as connection:
        count, cost = connection.execute(query).one()
    return int(count), float(cost or 0.0)


def _hacks(report: Mapping[str, Any]) -> int:
    """Alarms that a rubric was gamed, in notes and steps."""
    return json_text([report.get("notes"), report.get("steps")]).count(_HACKING)


def _by_function(settings: LoopSettings, order: Order) -> dict[str, Any]:
    """A function of the user's own; it runs the code of its file."""
    function = attribute_of(settings.method)
    result = function(
        str(order.champion), rubric=settings.rubric, data=str(order.data), out=str(order.out),
        **_options(settings, order),
    )  # fmt: skip
    if result is None:
        return {"artifact": None, "reason": "the function found nothing better", "converged": True, "hacks": 0}
    report = dict(result) if isinstance(result, Mapping) else {"artifact": str(result)}
    known = ("artifact", "reason", "calls", "cost_usd", "converged", "hacks")
    if unknown := sorted(report.keys() - set(known)):
        raise ConfigError(f"{settings.method} returned {unknown[0]!r}; a result has {', '.join(known)}")
    artifact = report.get("artifact")
    return {
        "reason": "",
        "converged": True,
        "hacks": 0,
        **report,
        "artifact": None if artifact is None else str(artifact),
    }
