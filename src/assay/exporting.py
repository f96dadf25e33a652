"""The users' lines around training data in Python: `assay.export`, `assay.collect`, `forget_subject`. The command line calls these."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import dspy

from assay.errors import BudgetExceeded, ConfigError, RubricError
from assay.jobs import Job, RunConfig, load_rubric, open_job
from assay.models import Meter, get_lm
from assay.optimizers import Evaluation, Progress, Student
from assay.optimizers import evaluate as run_evaluation
from assay.recording import score_rollout, task_of
from assay.rubrics import SHIPPED, Rubric
from assay.traces import Recorder, Store
from assay.traces.balance import Balance
from assay.traces.export import ExportConfig, ExportReport, export_traces
from assay.traces.gates import Gates
from assay.traces.records import subject_digest
from assay.traces.selection import Selection

__all__ = ["CollectReport", "collect", "export", "forget_subject", "score_rollouts"]


def export(
    kind: str,
    out: str | Path,
    *,
    store: str | Path | None = None,
    rubric: str | Path | None = None,
    progress: Progress | None = None,
    selection: Selection | None = None,
    gates: Gates | None = None,
    balance: Balance | None = None,
    **options: Any,
) -> ExportReport:
    """Training data of one `kind` (`sft`, `grpo`, `preferences`, `transitions`) from the store into the new folder `out`.

    Args:
        rubric: for `grpo`: the name or file of the rubric that completions are scored by.
        options: the other fields of `assay.traces.export.ExportConfig`.
    Raises:
        DataError: nothing fits, or a gate failed; nothing was written.
    """
    if unknown := sorted(set(options) - {item.name for item in fields(ExportConfig)}):
        raise ConfigError(f"{unknown} are no settings of an export; there are {', '.join(item.name for item in fields(ExportConfig))}")
    config = ExportConfig(kind=kind, selection=selection or Selection(), gates=gates or Gates(), balance=balance or Balance(), **options)
    shown = progress or Progress()
    path = _portable(rubric) if rubric is not None else None
    with Store(store) as opened:
        return export_traces(opened, out, config, rubric=path, bar=lambda total: shown.bar(f"export {kind}", total))


def _portable(rubric: str | Path) -> Path:
    """The rubric's file, which must work from another folder as well: its checks are named by module."""
    path = Path(__file__).parent / "rubrics" / "shipped" / f"{rubric}.yaml" if rubric in SHIPPED else Path(rubric)
    load_rubric(path)
    for line in path.read_text(encoding="utf-8").splitlines():
        if ".py:" in line.partition("#")[0] or re.search(r"\buse:\s*\S+\.ya?ml", line):
            raise RubricError(
                f"{line.strip()!r} is a file of this folder, which does not travel with an export; name a check as package.module:function"
            )
    return path


@dataclass(frozen=True, kw_only=True)
class CollectConfig(RunConfig):
    """Settings of `assay.collect`, see there."""

    kind: str = "collect"
    n: int = 8
    split: str = "train"
    over: Sequence[Mapping[str, Any]] = ()
    untruncated: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n < 1:
            raise ConfigError(f"n={self.n!r} must be at least 1")
        if self.split not in ("train", "val"):
            raise ConfigError(f"split={self.split!r} must be train or val: what comes of the other splits may never be trained on")
        if self.untruncated and not self.model.startswith("embedded/"):
            raise ConfigError(f"untruncated would have no effect on {self.model}: its server has limits of its own. Set them there")

    @property
    def generation(self) -> dict[str, Any]:
        return {"top_p": 1.0} if self.untruncated else {}


@dataclass
class CollectReport:
    """What `collect` did: one evaluation over all rollouts, and how many of them were there before."""

    evaluation: Evaluation
    meter: Meter
    run_id: str
    rollouts: int
    kept: int
    stopped: str | None = None
    unseen: int = 0

    def to_dict(self) -> dict[str, Any]:
        usage, result = self.meter.usage, self.evaluation.report()
        values = [result.value for result in self.evaluation.results.values()]
        spread = [len({round(s.value, 9) for s in samples}) > 1 for samples in self.evaluation._samples.values() if len(samples) > 1]
        return {
            "run": self.run_id, "rollouts": self.rollouts, "kept_from_before": self.kept, "tasks": len(values), "result": result,
            "groups_with_spread": sum(spread), "calls": usage.calls, "cached": usage.cached, "tokens": usage.tokens, "cost_usd": usage.cost_usd,
            "stopped": self.stopped, "unseen_calls": self.unseen,
        }  # fmt: skip


def collect(
    program: str | dspy.Module,
    *,
    rubric: str | Path | Rubric,
    data: str,
    n: int = 8,
    split: str = "train",
    over: Sequence[Mapping[str, Any]] = (),
    untruncated: bool = False,
    lm: dspy.LM | None = None,
    store: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> CollectReport:
    """`n` scored rollouts of each task of a split, in groups, into the store.

    The response cache keeps the rollouts of a task apart, so a seeded run replays. `resume` goes on with an unfinished run: what it
    had finished is not run again.

    Args:
        split: `train` or `val`; the others are sealed from training.
        over: agent parameters that the rollouts of a task take in turn: `[{"temperature": 0.3}, {"temperature": 1.0}]`.
        untruncated: an embedded model samples from the whole distribution, of which the log-probabilities that are kept are. A policy
            gradient on the export wants that; llama.cpp leaves unlikely tokens out by default, and fewer rollouts fail for it.
        options: the fields of `RunConfig`.
    Raises:
        AssayError: what was wrong, which rule, what to do.
    """
    config = CollectConfig.of(program, rubric, data, lm, n=n, split=split, over=tuple(over), untruncated=untruncated, **options)
    assert isinstance(config, CollectConfig)
    shown = progress or Progress()
    evaluation, stopped, kept = Evaluation(), None, 0
    with open_job(config, program=program, rubric=rubric, lm=lm, progress=shown, store=store, resume=resume, need=(split,)) as job:
        tasks = getattr(job.splits, split)
        job.session.know(tasks, split)
        done = _finished(job) if resume else set()
        try:
            with job.session.phase("collect"):
                for sample in range(n):
                    left = [task for task in tasks if (task.id, sample) not in done]
                    kept += len(tasks) - len(left)
                    run_evaluation(_sampler(job, sample, over), left, job.session, name=f"collect: rollout {sample + 1} of {n}", into=evaluation)
        except BudgetExceeded as cap:
            job.status, stopped = "stopped", str(cap)
    return CollectReport(evaluation, job.session.meter, job.run_id, len(evaluation.runs) + kept, kept, stopped, job.session.recorder.unseen)


def _sampler(job: Job, sample: int, over: Sequence[Mapping[str, Any]]) -> Student:
    """The program for the `sample`-th rollout of every task, with the parameters whose turn it is; its rollouts are one group."""
    student = job.student.another(sample)
    if over:
        student.program = student.program.deepcopy()
        student.set_parameters(over[sample % len(over)])
    student.group = job.run_id
    return student


def _finished(job: Job) -> set[tuple[str, int]]:
    """Tasks and samples that the run has scored already; those that were cut off, or failed by the machinery, run again."""
    return {
        (r.task_id, r.sample) for r in job.store.rollouts(run_id=job.run_id) if r.phase == "collect" and r.status in ("done", "failed") and r.rubric
    }


def score_rollouts(
    rubric: str | Path | Rubric,
    *,
    store: str | Path | None = None,
    runs: Sequence[str] = (),
    again: bool = False,
    judge_model: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Scores what is in the store by a rubric, step rewards included: rollouts of the gateway, of imports, of other rubrics.

    Args:
        runs: only these; all where empty.
        again: those that have a score already as well; it is replaced.
        judge_model: decides criteria that need a judge; without one they are not decided.
    Returns:
        `scored`, `unscored` (the rubric could not decide), `skipped` (a score was there), and the `mean`.
    """
    judge = get_lm(judge_model, temperature=0.1) if judge_model else None
    measure, shown = load_rubric(rubric, judge_lm=judge), progress or Progress()
    counts, values = Counter[str](), []
    wanted: list[str | None] = [*runs] or [None]
    with Store(store) as opened:
        found = [
            r.id for run in wanted for r in opened.rollouts(run_id=run) if r.status in ("done", "failed") and r.source not in ("outside", "judge")
        ]
        with shown.bar(f"score: {measure.name}", len(found)) as advance:
            for rollout_id in found:
                rollout = opened.rollout(rollout_id)
                if rollout.score is not None and not again:
                    counts["skipped"] += 1
                else:
                    value = score_rollout(measure, task_of(rollout), rollout, Recorder(opened))
                    counts["unscored" if math.isnan(value) else "scored"] += 1
                    values += [] if math.isnan(value) else [value]
                advance(1)
    return {name: counts[name] for name in ("scored", "unscored", "skipped")} | {"mean": math.fsum(values) / len(values) if values else None}


def forget_subject(subject: str, *, store: str | Path | None = None) -> dict[str, Any]:
    """Removes all rollouts of a data subject from the store, and names what was made from them before."""
    with Store(store) as opened:
        return {"subject": subject, "removed": opened.forget_subject(subject), "made_from_them": opened.artifacts_of(subject_digest(subject))}
