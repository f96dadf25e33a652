"""The users' lines around training data in Python: `assay.export`, `assay.collect`, `forget_subject`. The command line calls these."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import dspy

from assay.deployment.trust import trusts
from assay.errors import BudgetExceeded, ConfigError
from assay.given import given_model, given_program, takes
from assay.jobs import Job, RunConfig, home_of, load_rubric, open_job
from assay.models import Meter, ResponseCache, get_lm
from assay.models.adapters import list_adapters
from assay.models.limits import DEFAULT_S, check_limit, limited
from assay.models.roles import Endpoint, is_embedded
from assay.optimizers import Evaluation, Progress, Student
from assay.optimizers import evaluate as run_evaluation
from assay.preflight import checked
from assay.recording import task_of
from assay.reprs import Shown
from assay.rescoring import Rescoring, threads_for
from assay.rubricfiles import portable_rubric
from assay.rubrics import Rubric
from assay.rubrics.reward import undecided_checks
from assay.running import cancelled_by_signals
from assay.traces import Store
from assay.traces.balance import Balance
from assay.traces.erasure import erase_subject
from assay.traces.export import ExportConfig, ExportReport, export_traces
from assay.traces.gates import Gates
from assay.traces.missed import NOTHING, Unrecorded
from assay.traces.records import subject_digest
from assay.traces.selection import Selection

__all__ = ["CollectReport", "collect", "export", "forget_subject", "score_rollouts"]


@trusts
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
    gates = gates or Gates()
    if options.get("privacy") == "off":  # chosen: there is nothing left for a gate to ask
        gates = replace(gates, privacy="off")
    config = ExportConfig(kind=kind, selection=selection or Selection(), gates=gates, balance=balance or Balance(), **options)
    shown = progress or Progress()
    carried = portable_rubric(rubric) if rubric is not None else None
    with Store(store) as opened:
        report = export_traces(opened, out, config, rubric=carried, bar=lambda total: shown.bar(f"export {kind}", total))
    if rubric is not None:
        measure = load_rubric(rubric)
        report.notes = [*_undecided(measure, report), *_not_in_reward(measure)]
    return report


def _not_in_reward(rubric: Rubric) -> list[str]:
    """Notes on the criteria that `reward.py` computes only with a judge's model, or not at all."""
    judged = [c.name for c in rubric.finals if c.judge is not None and rubric.decider(c.name) is None]
    steps = [c.name for c in rubric.criteria if c.scope == "step"]
    notes = []
    if judged:
        notes.append(
            f"reward.py asks the model named by the environment variable ASSAY_JUDGE_MODEL about {', '.join(map(repr, judged))}. Without that "
            "variable these criteria are not computed, and the policy is trained on the score of the others"
        )
    if steps:
        notes.append(f"step criteria are graded on recorded rollouts and are no part of reward.py: {', '.join(map(repr, steps))}")
    return notes


def _undecided(rubric: Rubric, report: ExportReport) -> list[str]:
    """A note for each check that the exported reward cannot decide, and so leaves out."""
    outputs = report.manifest["columns"]["outputs"]
    found = undecided_checks(rubric, [(task_of(rollout), text) for rollout, text in report.answers], outputs)
    return [
        f"criterion {name!r} is not computed by reward.py: its check gave no grade on any of {len(report.answers)} exported answers ({reason}). A "
        f"reward sees the completion and the task's columns, not the rollout; of the prediction it has {', '.join(outputs) or 'answer'}. The "
        f"policy is trained on the score of the other criteria{_essential(rubric, name)}"
        for name, reason in found.items()
    ]


def _essential(rubric: Rubric, name: str) -> str:
    """What it means that a criterion is left out which caps the score."""
    essential = next(criterion.essential for criterion in rubric.criteria if criterion.name == name)
    return "; as it is essential, these rewards are unscored (NaN) and nothing is learned from them" if essential else ""


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
        if self.untruncated and not is_embedded(self.model):
            raise ConfigError(f"untruncated would have no effect on {self.model}: its server has limits of its own. Set them there")

    @property
    def generation(self) -> dict[str, Any]:
        return {"top_p": 1.0} if self.untruncated else {}


@dataclass(repr=False)
class CollectReport(Shown):
    """What `collect` did: one evaluation over all rollouts, and how many of them were there before."""

    evaluation: Evaluation
    meter: Meter
    run_id: str
    rollouts: int
    kept: int
    stopped: str | None = None
    unrecorded: Unrecorded = NOTHING

    def to_dict(self) -> dict[str, Any]:
        usage, result = self.meter.usage, self.unrecorded.priced(self.evaluation.report())
        values = [result.value for result in self.evaluation.results.values()]
        spread = [len({round(s.value, 9) for s in samples}) > 1 for samples in self.evaluation._samples.values() if len(samples) > 1]
        return {
            "run": self.run_id, "rollouts": self.rollouts, "kept_from_before": self.kept, "tasks": len(values), "result": result,
            "groups_with_spread": sum(spread), "calls": usage.calls, "cached": usage.cached, "repeated_calls": usage.repeated,
            "tokens": usage.tokens, "cost_usd": self.unrecorded.cost(usage.known_cost_usd),
            "stopped": self.stopped, **self.unrecorded.to_dict(),
        }  # fmt: skip


@trusts
@takes(CollectConfig)
def collect(
    program: Any,
    *,
    rubric: str | Path | Rubric,
    data: Any,
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

    The response cache keeps the rollouts of a task apart, so a seeded run replays. `resume` continues an unfinished run: what it
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
    program = given_program(program)
    lm, options = given_model(program, lm, options)
    config = CollectConfig.of(program, rubric, data, lm, n=n, split=split, over=tuple(over), untruncated=untruncated, **options)
    assert isinstance(config, CollectConfig)
    shown = progress or Progress()
    evaluation, stopped, kept = Evaluation(), None, 0
    with open_job(config, program=program, rubric=rubric, lm=lm, progress=shown, store=store, resume=resume, need=(split,)) as job:
        tasks = getattr(job.splits, split)
        job.session.know(tasks, split)
        done = job.runs_before("collect")
        try:
            if any((task.id, sample) not in done for task in tasks for sample in range(n)):
                checked(job, tasks, split=split, student=_sampler(job, 0, over))
            with job.session.phase("collect"):
                for sample in range(n):
                    known = {(task.id, 0): done[task.id, sample] for task in tasks if (task.id, sample) in done}
                    kept += len(known)
                    name = f"collect: rollout {sample + 1} of {n}"
                    run_evaluation(_sampler(job, sample, over), tasks, job.session, name=name, into=evaluation, known=known)
        except BudgetExceeded as cap:
            job.status, stopped = "stopped", str(cap)
    return CollectReport(evaluation, job.session.meter, job.run_id, len(evaluation.runs), kept, stopped, job.session.recorder.unrecorded)


def _sampler(job: Job, sample: int, over: Sequence[Mapping[str, Any]]) -> Student:
    """The program for the `sample`-th rollout of every task, with the parameters whose turn it is; its rollouts are one group."""
    student = job.student.another(sample)
    if over:
        student.program = student.program.deepcopy()
        student.set_parameters(over[sample % len(over)])
    student.group = job.run_id
    return student


@trusts
def score_rollouts(
    rubric: str | Path | Rubric,
    *,
    store: str | Path | None = None,
    runs: Sequence[str] = (),
    again: bool = False,
    judge_model: str | None = None,
    judge_api_base: str | None = None,
    judge_api_key_env: str | None = None,
    threads: int | None = None,
    task_timeout: float = DEFAULT_S,
    preflight: bool = True,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Scores what is in the store by a rubric, step rewards included: rollouts of the gateway, of imports, of other rubrics.

    Of a rollout on which a final criterion could not be decided nothing is stored: it keeps the score that it had, or none. Several are
    scored at once, and stored in their order; an interrupt keeps what has been scored.

    Args:
        runs: only these; all where empty.
        again: those that have a score already as well; it is replaced.
        judge_model: decides criteria that need a judge and name no model of their own.
        judge_api_base: address of its server; the provider's own where None.
        judge_api_key_env: environment variable with its key.
        threads: rollouts that are scored at once; by default as many as the judges' engine gains from.
        task_timeout: seconds that a check or a judge may take; beyond it the criterion is unscored.
        preflight: stops where a judge gives no verdict on any of the first three rollouts with an answer.
    Returns:
        `scored`, `unscored` (the rubric could not decide), `skipped` (a score was there), `skipped_of_other_rubrics` (those of them that
        another rubric scored, by its name and version: `again=True` replaces them), `running` (not ended, so not scored), the `mean`, the
        `rubric`, and of what was scored now `coverage` and `undecided`, see `assay.rubrics.coverage`.
    Raises:
        ConfigError: a criterion needs a judge, and no model was named for it.
        ModelError: a judge did not answer.
    """
    check_limit(task_timeout)
    meter = Meter()
    judge = (
        get_lm(judge_model, temperature=0.1, meter=meter, **Endpoint(judge_api_base, judge_api_key_env).client(judge_model)) if judge_model else None
    )
    measure, shown = load_rubric(rubric, judge_lm=judge, own_models=judge is None), progress or Progress()
    if unasked := [c.name for c in measure.finals if not c.when and measure.decider(c.name) is None]:
        raise ConfigError(
            f"the rubric {measure.name!r} has a judge decide {', '.join(map(repr, unasked))}, and no model was named for it: no rollout could be "
            "scored. Name one as judge_model, or in the judge's own file",
            flag="--judge-model NAME",
        )
    at_once, name = threads_for(measure, threads), f"{measure.name}@{measure.version}"
    wanted: list[str | None] = [*runs] or [None]
    with Store(store) as opened, cancelled_by_signals(meter), limited(task_timeout):
        stored = (r for run in wanted for r in opened.rollouts(run_id=run) if r.source not in ("outside", "judge"))
        own = {r.id: (r.status, r.rubric if r.score is not None else None) for r in stored}
        ended = {rollout_id: scored_by for rollout_id, (status, scored_by) in own.items() if status in ("done", "failed")}
        asked = [rollout_id for rollout_id, scored_by in ended.items() if again or scored_by is None]
        with shown.bar(f"score: {measure.name}", len(asked)) as advance:
            scoring = Rescoring(measure, opened, advance)
            scoring.run((opened.rollout(rollout_id) for rollout_id in asked), threads=at_once, preflight=preflight)
    skipped = [] if again else [scored_by for scored_by in ended.values() if scored_by is not None]
    others = dict(Counter(scored_by for scored_by in skipped if scored_by != name))
    running = sum(status == "running" for status, _ in own.values())
    return {**scoring.report(), "rubric": name, "skipped": len(skipped), "skipped_of_other_rubrics": others, "running": running}


def forget_subject(subject: str, *, store: str | Path | None = None) -> dict[str, Any]:
    """Removes a data subject's rollouts from the store, their tasks from the prompts of others, and the answers to both from the
    response cache.

    Returns:
        `removed` (rollouts), `prompts_emptied` (calls of others that showed a task of theirs), `cached_answers_removed`,
        `unowned_answers_removed` (all cached answers whose request is not on record, as older versions kept them), and `made_from_them`:
        artifacts, exports, and adapters trained on either or after such an adapter. They are not changed: delete them, or make them anew.
    Raises:
        CacheError: the response cache could not be written.
    """
    with Store(store) as opened:
        erased = erase_subject(opened, subject)
        person = subject_digest(subject)
        made = opened.artifacts_of(person)
    cache = home_of(store) / "cache" / "responses.db"
    known = bool(erased.removed or erased.tasks or erased.prompts)
    answers, unowned = _forget_answers(cache, [request for request, _, _ in erased.calls]) if cache.is_file() and known else (0, 0)
    return {
        "subject": subject, "removed": erased.removed, "prompts_emptied": erased.prompts, "cached_answers_removed": answers,
        "unowned_answers_removed": unowned, "made_from_them": [*made, *_adapters_of(person, made)],
    }  # fmt: skip


def _adapters_of(person: str, made: Sequence[str]) -> list[str]:
    """Paths of adapters that were trained on a person's data, and of those that were trained after one of them."""
    found, paths = set[str](), list[str]()
    for adapter in sorted(list_adapters(), key=lambda one: len(one.after)):
        if _made_from(adapter.made, person, made) or found & set(adapter.after):
            found.add(adapter.sha256)
            paths.append(str(adapter.path))
    return sorted(paths)


def _forget_answers(path: Path, requests: Sequence[dict[str, Any]]) -> tuple[int, int]:
    cache = ResponseCache(path)
    try:
        return cache.forget(requests), cache.forget_unowned()
    finally:
        cache.close()


def _made_from(made: Mapping[str, Any], person: str, folders: Sequence[str]) -> bool:
    """Whether an adapter was trained on a person's tasks, or on an export that holds them."""
    text = json.dumps(made, default=str)
    return person in (made.get("people") or ()) or any(json.dumps(folder) in text for folder in folders)
