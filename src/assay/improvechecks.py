"""What `assay improve` does around its steps: the preflight of all that they will run, the gate that decides on each, and the sealed test.

Does not run steps: `assay.improving` does.
"""

import glob
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from assay.datasets import SPLITS
from assay.errors import BudgetExceeded
from assay.improveplan import ROUNDING, ImprovePlan, plan_steps
from assay.jobs import Job, RunConfig, load_rubric, open_job
from assay.models import Meter
from assay.models.ledger import Ledger
from assay.models.meter import Usage, spent_before
from assay.optimizers import Progress
from assay.optimizers.comparison import Comparison, compare, ended_early
from assay.optimizers.estimate import price_of
from assay.optimizers.reserve import ReportPlan, announce_splits, decision_tasks, forecast_pair, plan_report
from assay.optimizers.sequential import SequentialTest
from assay.optimizers.weights.config import PolicyConfig
from assay.preflight import checked, preflight
from assay.training import Retained

__all__ = ["CAPS", "Trial", "check_start", "compare_on", "ended_by", "left_of", "spent_in"]

CAPS = ("max_calls", "max_tokens", "max_cost_usd")
_WHAT = {"max_calls": "calls", "max_tokens": "tokens", "max_cost_usd": "dollars"}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is tried. `rollouts` are those of each task that `sft` collects; `watch` is the rubric that only watches `grpo`, None without one."""

    program: str
    rubric: str | Path
    data: str
    order: Sequence[str]
    rollouts: int
    grpo: PolicyConfig
    watch: str | Path | None = None
    retained: Sequence[Retained] = ()

    @property
    def split(self) -> str:
        """The one that the first step runs."""
        return "val" if self.order[0] == "prompts" else "train"


def check_start(
    trial: Trial,
    *,
    part: Callable[[str], AbstractContextManager[None]],
    options: Callable[[], Mapping[str, Any]],
    store: str | Path | None,
    progress: Progress,
) -> tuple[list[str], ImprovePlan]:
    """Says how large the splits are, has the program run one task and each judge answer, also those of what is watched and retained.

    Args:
        part: opens a part of the improvement by its name; `options` are its settings with the caps that are left.
    Returns:
        What is wrong with the splits, and what steps, gates and test take where nothing is capped.
    Raises:
        AssayError: as `assay.preflight.preflight`; settings with `preflight=False` try nothing.
    """
    with part("preflight"):
        config = RunConfig.of(trial.program, trial.rubric, trial.data, None, **{**options(), "kind": "improve"})
        with open_job(config, program=trial.program, rubric=load_rubric(trial.rubric), progress=progress, store=store, need=SPLITS) as job:
            warnings = announce_splits(job.splits, progress)
            checked(job, getattr(job.splits, trial.split), split=trial.split)
            _check_watch(job, trial)
            price = price_of(job.session.lm, 300, 40) or 0.0
            pair = forecast_pair(job.student.program, job.session, cost_per_call=price)
            report = plan_report(job.splits, Meter(), job.config.decisions, pair=pair)
            steps = plan_steps(
                trial.order, job.splits.sizes(), job.config, each=pair.calls / 2,
                rollouts=trial.rollouts, grpo=trial.grpo, retained=len(trial.retained),
            )  # fmt: skip
    for at, kept in enumerate(trial.retained if config.preflight else ()):
        with part(f"preflight-{at + 1}"):
            given = {name: value for name, value in options().items() if name not in ("parameters", "sizes", "rename")}
            config = RunConfig.of(kept.program, kept.rubric, kept.data, None, **{**given, "kind": "improve"})
            with open_job(config, program=kept.program, rubric=kept.rubric, progress=progress, store=store, need=("val", "test")) as job:
                checked(job, job.splits.val, split="val")
    return warnings, ImprovePlan(report=report, steps=steps)


def _check_watch(job: Job, trial: Trial) -> None:
    """Has the judges of the watching rubric answer; the program's run comes from the cache."""
    if trial.watch is None or not job.config.preflight:
        return
    watch = job.rubric_beside(trial.watch)
    if watch.needs_judge:
        tasks = getattr(job.splits, trial.split)
        preflight(replace(job.session, rubric=watch), job.student, tasks, split=trial.split, max_cost_usd=job.config.max_cost_usd)


def left_of(options: Mapping[str, Any], spent: Usage, *, kept: Mapping[str, float], least: Mapping[str, float]) -> dict[str, Any]:
    """The options with what is left of their caps, which are of all parts of a job, for one of them.

    Args:
        spent: by the other parts, see `spent_in`.
        kept: what stays for parts that come later, by the names of the caps.
        least: what the part needs, likewise.
    Raises:
        BudgetExceeded: less than that is left, or nothing.
    """
    left = dict(options)
    for name, field in zip(CAPS, ("calls", "tokens", "cost_usd"), strict=True):
        if left.get(name) is None:
            continue
        cap, used, held, needed = left[name], getattr(spent, field), kept.get(name, 0), least.get(name, 0)
        rest = cap - used - held
        if rest <= 0 and used < cap:
            said = f"{used:g} of {cap:g} {_WHAT[name]} of the whole improvement are spent; the rest is kept for its gate and its sealed test"
            raise BudgetExceeded(said, what=_WHAT[name])
        if rest <= 0:
            raise BudgetExceeded(f"the cap of {cap:g} {_WHAT[name]} of the whole improvement is reached", what=_WHAT[name])
        if rest + ROUNDING < needed:
            said = f"{used:g} of {cap:g} {_WHAT[name]} of the whole improvement are spent and {held:g} are kept for its gate and its sealed test"
            raise BudgetExceeded(f"{said}: {rest:g} are left, and its work takes about {needed:g}", what=_WHAT[name])
        left[name] = rest if name == "max_cost_usd" else int(rest + ROUNDING)
    return left


def spent_in(runs: Path, job: str, *, but: str) -> Usage:
    """What the runs of a job of several parts have spent, by their ledgers, which outlive a kill.

    Args:
        runs: the folder of runs, whose names begin with the job's.
        but: a part that is left out: a run that is resumed counts by itself what it had spent.
    """
    total = Usage()
    for path in sorted(runs.glob(f"{glob.escape(job)}.*/calls.db")):
        if path.parent.name.startswith(f"{job}.{but}-"):
            continue
        ledger = Ledger(path)
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
    """Two programs, each with its model, on gate or test; it ends once it has decided, by the sequential test that a compile's gate has.

    Args:
        split: `gate` or `test`. Test is opened once, for both.
        before, after: program and model.
        part, options: as in `check_start`; the caps are of both together.
        opens_as: the job that the opening of test is counted for.
        plan: what a pair of runs takes, so that no more tasks are begun than the caps allow; None where that is not known.
    Returns:
        The comparison, whose `cap` is the one that ended it, and how often test was opened; None of gate.
    Raises:
        BudgetExceeded: a cap was reached before any pair was complete.
        ModelError: one of them could not be scored at all.
    """
    with part(split), ExitStack() as opened:
        given, jobs = options(), list[Job]()
        for side, (program, model) in (("before", before), ("after", after)):
            config = RunConfig.of(program, rubric, data, None, **{**given, "kind": "evaluate", "model": model})
            with part(f"{split}-{side}"):
                job = open_job(config, program=program, rubric=load_rubric(rubric), progress=progress, store=store, need=(split,), opens_as=opens_as)
                jobs.append(opened.enter_context(job))
        first, second = (job.session for job in jobs)
        first.meter.beside(second.meter)
        second.meter.beside(first.meter)
        decisions, splits = jobs[0].config.decisions, jobs[0].splits
        fitting = _fitting(plan, split, first.meter)
        if split == "test":
            splits.unseal()
        wanted = decision_tasks(splits, split, decisions)
        tasks = wanted[:fitting]
        rule = SequentialTest(tasks=len(tasks), difference=decisions.difference) if decisions.early_stop else None
        found = compare(jobs[0].student, jobs[1].student, tasks, first, after_session=second, split=split, names=("before", "after"), rule=rule)
        if len(tasks) < len(wanted) and not found.ended:
            found = replace(found, planned=len(wanted), cap=BudgetExceeded(f"the caps leave {len(tasks)} tasks for {split}"))
    return found, jobs[0].openings.to_dict() if jobs[0].openings is not None else None


def ended_by(found: Comparison, split: str) -> str:
    """A line for the report where not all tasks were run; empty otherwise."""
    return f"{split} ended after {found.gain.n} of {found.planned} tasks: {found.cap}" if found.cap is not None else ended_early(found, split)


def _fitting(plan: ReportPlan | None, split: str, meter: Meter) -> int | None:
    """Tasks of gate or test that the caps allow; None without a plan.

    Raises:
        BudgetExceeded: none.
    """
    if plan is None:
        return None
    fitting = replace(plan, test=0, tested=False).within(meter).gate if split == "gate" else replace(plan, gate=0).within(meter).test
    if fitting < 1:
        raise BudgetExceeded(f"the caps leave nothing for {split}")
    return fitting
