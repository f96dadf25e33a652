"""Preflight, gates and sealed test of `assay improve`.

Does not run steps: `assay.api.improve.run` does.
"""

import glob
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from assay.api.improve.caps import ROUNDING, ImprovePlan, plan_steps
from assay.api.train import Retained
from assay.datasets import SPLITS
from assay.errors import BudgetExceeded
from assay.evaluation import Progress
from assay.evaluation.comparison import Comparison, compare, ended_early
from assay.evaluation.sequential import SequentialTest
from assay.models import Meter
from assay.models.ledger import Ledger
from assay.models.meter import Usage, spent_before
from assay.optimizers.finetuning.settings import PolicySettings
from assay.optimizers.prompts.estimate import price_of
from assay.optimizers.prompts.reserve import ReportPlan, announce_splits, decision_tasks, forecast_pair, plan_report
from assay.rubrics import Rubric
from assay.runs.arguments import program_settings
from assay.runs.jobs import Job, open_job
from assay.runs.loading import load_rubric
from assay.runs.preflight import checked, preflight, require_predictors
from assay.runs.settings import CompileSettings
from assay.runs.unused import unused_settings
from assay.support.numbers import counted

__all__ = ["CAPS", "Trial", "check_start", "compare_on", "ended_by", "of_part", "remaining_caps", "spent_in"]

CAPS = ("max_calls", "max_tokens", "max_cost_usd")
_CAP_UNITS = {"max_calls": "calls", "max_tokens": "tokens", "max_cost_usd": "dollars"}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What the preflight checks.

    `rollouts`: per task, collected by `sft`. `monitor`: monitor rubric of `grpo`, or None.
    """

    program: str
    rubric: str | Path
    data: str
    order: Sequence[str]
    rollouts: int
    grpo: PolicySettings
    monitor: str | Path | None = None
    retained: Sequence[Retained] = ()

    @property
    def split(self) -> str:
        """The split that the first step runs."""
        return "val" if self.order[0] == "prompts" else "train"


def check_start(
    trial: Trial,
    *,
    part: Callable[[str], AbstractContextManager[None]],
    options: Callable[[], Mapping[str, Any]],
    store: str | Path | None,
    progress: Progress,
) -> tuple[list[str], ImprovePlan, dict[str, Any]]:
    """Reports the split sizes, runs the program on one task and asks each judge once.

    Includes the judges of the monitor rubric and of retention tasks.

    Args:
        part: opens a part of the improvement by its name; `options` are its settings with the caps that are left.
    Returns:
        Warnings about the data, the runs of steps, gates and test without caps, and the `RowFindings` of the data.
    Raises:
        AssayError: as `assay.runs.preflight.preflight`; settings with `preflight=False` try nothing.
    """
    with part("preflight"):
        config = of_part("improve", trial.program, trial.rubric, trial.data, options())
        with open_job(
            config, program=trial.program, rubric=load_rubric(trial.rubric), progress=progress, store=store, need=SPLITS
        ) as job:
            warnings = [
                *announce_splits(job.splits, progress),
                *job.warnings,
                *unused_settings(job, rubrics=_others(job, trial), order=trial.order),
            ]
            rows = job.rows.to_dict()
            if "prompts" in trial.order:
                require_predictors(job)
            checked(job, getattr(job.splits, trial.split), split=trial.split)
            _check_monitor(job, trial)
            price = price_of(job.session.lm, 300, 40) or 0.0
            pair = forecast_pair(job.recorded.program, job.session, cost_per_call=price)
            report = plan_report(job.splits, Meter(), job.config.decisions, pair=pair)
            steps = plan_steps(
                trial.order, job.splits.sizes(), config, each=pair.calls / 2,
                rollouts=trial.rollouts, grpo=trial.grpo, retained=len(trial.retained),
            )  # fmt: skip
    for at, retention_task in enumerate(trial.retained if config.preflight else ()):
        with part(f"preflight-{at + 1}"):
            # a retention task has its own program, to whose parameters and fields these settings do not belong
            settings = {
                name: value for name, value in options().items() if name not in ("parameters", "sizes", "rename")
            }
            config = of_part("improve", retention_task.program, retention_task.rubric, retention_task.data, settings)
            with open_job(
                config,
                program=retention_task.program,
                rubric=retention_task.rubric,
                progress=progress,
                store=store,
                need=("val", "test"),
            ) as job:
                checked(job, job.splits.val, split="val")
    return warnings, ImprovePlan(report=report, steps=steps), rows


def _others(job: Job, trial: Trial) -> list[Rubric]:
    """The rubrics of the monitor and of the retention tasks."""
    sources = [trial.monitor] if trial.monitor is not None else []
    return [job.additional_rubric(source) for source in [*sources, *(task.rubric for task in trial.retained)]]


def of_part(kind: str, program: str, rubric: str | Path, data: str, options: Mapping[str, Any]) -> CompileSettings:
    """The settings of a part that runs a program: those of a compile, under the part's own kind of run."""
    return replace(program_settings(CompileSettings, program, rubric, data, None, options), kind=kind)


def _check_monitor(job: Job, trial: Trial) -> None:
    """Asks the judges of the monitor rubric once; the program's run comes from the response cache."""
    if trial.monitor is None or not job.config.preflight:
        return
    monitor = job.additional_rubric(trial.monitor)
    if monitor.needs_judge:
        tasks = getattr(job.splits, trial.split)
        preflight(
            replace(job.session, rubric=monitor),
            job.recorded,
            tasks,
            split=trial.split,
            max_cost_usd=job.config.max_cost_usd,
        )


def remaining_caps(
    options: Mapping[str, Any], spent: Usage, *, reserved: Mapping[str, float], least: Mapping[str, float]
) -> dict[str, Any]:
    """Options for one part of a job, with its caps reduced to what the other parts leave.

    Args:
        spent: by the other parts, see `spent_in`.
        reserved: amounts reserved for later parts, by the names of the caps.
        least: minimum that the part needs, by the names of the caps.
    Raises:
        BudgetExceeded: less than that is left, or nothing.
    """
    remaining = dict(options)
    for name, field in zip(CAPS, ("calls", "tokens", "cost_usd"), strict=True):
        if remaining.get(name) is None:
            continue
        cap, used, later, needed = remaining[name], getattr(spent, field), reserved.get(name, 0), least.get(name, 0)
        unspent = cap - used - later
        if unspent <= 0 and used < cap:
            reason = (
                f"{used:g} of {cap:g} {_CAP_UNITS[name]} of the whole improvement are spent; the rest is kept for "
                "its gate and its sealed test"
            )
            raise BudgetExceeded(reason, what=_CAP_UNITS[name])
        if unspent <= 0:
            raise BudgetExceeded(
                f"the cap of {counted(cap, _CAP_UNITS[name])} of the whole improvement is reached",
                what=_CAP_UNITS[name],
            )
        if unspent + ROUNDING < needed:
            reason = (
                f"{used:g} of {cap:g} {_CAP_UNITS[name]} of the whole improvement are spent and {later:g} are kept "
                "for its gate and its sealed test"
            )
            raise BudgetExceeded(
                f"{reason}: {unspent:g} are left, and its work takes about {needed:g}", what=_CAP_UNITS[name]
            )
        remaining[name] = unspent if name == "max_cost_usd" else int(unspent + ROUNDING)
    return remaining


def spent_in(runs: Path, job: str, *, but: str) -> Usage:
    """Usage of the runs of a job with several parts, from their ledgers, which survive a kill.

    Args:
        runs: the folder of runs, whose names begin with the job's.
        but: a part that is left out: a run that is resumed counts by itself what it had spent.
    """
    total = Usage()
    for path in sorted(runs.glob(f"{glob.escape(job)}.*/calls.db")):
        if path.parent.name.startswith(f"{job}.{but}-"):
            continue
        ledger = Ledger(path)  # a report would be missing after a kill; the ledger is written with each call
        for usage in spent_before(ledger).values():
            for name, value in vars(usage).items():
                setattr(total, name, getattr(total, name) + value)
        ledger.close()
    return total


def compare_on(
    split: str,
    before: tuple[str, str],
    after: tuple[str, str],
    *,
    rubric: str | Path,
    data: str,
    part: Callable[[str], AbstractContextManager[None]],
    options: Callable[[], Mapping[str, Any]],
    store: str | Path | None,
    progress: Progress,
    opens_as: str,
    plan: ReportPlan | None,
) -> tuple[Comparison, dict[str, int] | None]:
    """Compares two programs, each with its model, on gate or test.

    Ends early once the sequential test has decided, as the gate of a compile does.

    Args:
        split: `gate` or `test`. Test is opened once, for both.
        before, after: program and model.
        part, options: as in `check_start`; the caps are of both together.
        opens_as: the job that the opening of test is counted for.
        plan: usage of a pair of runs, which limits the tasks to what the caps allow; None if unknown.
    Returns:
        The comparison, whose `cap` is the one that ended it, and how often test was opened; None of gate.
    Raises:
        BudgetExceeded: a cap was reached before any pair was complete.
        ModelError: one of them could not be scored at all.
    """
    with part(split), ExitStack() as opened:
        settings, jobs = options(), list[Job]()
        for side, (program, model) in (("before", before), ("after", after)):
            config = of_part("evaluate", program, rubric, data, {**settings, "model": model})
            with part(f"{split}-{side}"):
                job = open_job(
                    config,
                    program=program,
                    rubric=load_rubric(rubric),
                    progress=progress,
                    store=store,
                    need=(split,),
                    opens_as=opens_as,
                )
                jobs.append(opened.enter_context(job))
        comparison = _compare_jobs(jobs[0], jobs[1], split, plan)
    return comparison, jobs[0].openings.to_dict() if jobs[0].openings is not None else None


def _compare_jobs(before: Job, after: Job, split: str, plan: ReportPlan | None) -> Comparison:
    """Compares the programs of two open jobs on as many tasks of the split as their common caps allow."""
    first, second = before.session, after.session
    # each side has a meter of its own, and the caps are of both together
    first.meter.share_caps_with(second.meter)
    second.meter.share_caps_with(first.meter)
    decisions, splits = before.config.decisions, before.splits
    fitting = _fitting(plan, split, first.meter)
    if split == "test":
        splits.unseal()
    planned = decision_tasks(splits, split, decisions)
    tasks = planned[:fitting]
    rule = SequentialTest(tasks=len(tasks), difference=decisions.difference) if decisions.early_stop else None
    comparison = compare(
        before.recorded,
        after.recorded,
        tasks,
        first,
        after_session=second,
        split=split,
        names=("before", "after"),
        rule=rule,
    )
    if len(tasks) < len(planned) and not comparison.ended:
        cap = BudgetExceeded(f"the caps leave {counted(len(tasks), 'tasks')} for {split}")
        comparison = replace(comparison, planned=len(planned), cap=cap)
    return comparison


def ended_by(comparison: Comparison, split: str) -> str:
    """A line for the report where not all tasks were run; empty otherwise."""
    return (
        f"{split} ended after {comparison.gain.n} of {counted(comparison.planned, 'tasks')}: {comparison.cap}"
        if comparison.cap is not None
        else ended_early(comparison, split)
    )


def _fitting(plan: ReportPlan | None, split: str, meter: Meter) -> int | None:
    """Tasks of gate or test that the caps allow; None without a plan.

    Raises:
        BudgetExceeded: none.
    """
    if plan is None:
        return None
    fitting = (
        replace(plan, test=0, tested=False).within(meter).gate
        if split == "gate"
        else replace(plan, gate=0).within(meter).test
    )
    if fitting < 1:
        raise BudgetExceeded(f"the caps leave nothing for {split}")
    return fitting
