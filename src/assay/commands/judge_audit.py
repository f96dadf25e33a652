"""`assay judge audit`, `drift` and `fidelity`: test a judge, freeze and replay its verdicts, test a simulated user."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from assay.commands.groups import InStore, JobOutput, Reported, Trusting
from assay.commands.judging import (
    OPTIONAL,
    JudgedReport,
    JudgeJob,
    Rows,
    SpentReport,
    need_fields,
    preflight_items,
    rated_items,
    spent_by,
    with_names,
)
from assay.errors import ConfigError, DataError, ModelError
from assay.jobs.groups import Budget, Cached, KeyedJob, Preflight
from assay.models.limits import DEFAULT_S
from assay.support.names import one_of
from assay.support.numbers import counted
from assay.support.options import Flag, Parse, Positive, Seconds, Share, function_of
from assay.support.report import Report, Table

if TYPE_CHECKING:
    from assay.evaluation import Session
    from assay.jobs.opening import Run
    from assay.judges import Item, Judge
    from assay.judges.quality.fidelity import Interview
    from assay.programs import UserProgram
    from assay.traces.recorder import Recorder

_BIAS_ITEMS = 60


@dataclass(frozen=True, kw_only=True, repr=False)
class Audit(JudgedReport):
    """What an audit of a judge found.

    Attributes:
        judge: digest of the judge and its model, as in its card.
        passed: whether no attack and no bias failed.
        pass_at: share of the cases of an attack that must be right.
        attacks: by attack the number of cases, the number and share of right verdicts, and examples of wrong ones.
        flip_alarms: attacks that move more verdicts than allowed.
        biases: by edit of labelled outputs what it does to verdicts; empty without labels.
        profile: what the scale measures: `quality` or `property`.
        cases: where the cases are from, and their number.
        notes: what was tried, and what does not apply to the judge.
        not_tried: attacks for which no case is fit.
        verdicts: number of verdicts.
        unscored: those that are missing.
    """

    judge: str
    passed: bool
    pass_at: float
    attacks: Mapping[str, Any]
    flip_alarms: Sequence[str]
    biases: Mapping[str, Any]
    profile: str
    cases: Mapping[str, Any]
    notes: Sequence[str]
    not_tried: Sequence[str]
    verdicts: int
    unscored: int

    @property
    def failed(self) -> list[str]:
        """Attacks and biases that failed."""
        biases = [f"bias: {name}" for name, entry in self.biases.items() if entry["passed"] is False]
        return [*(name for name, entry in self.attacks.items() if not entry["passed"]), *biases]

    def _facts(self) -> list[tuple[str, str]]:
        failed = ", ".join(self.failed) or "none"
        return [("attacks", str(len(self.attacks))), ("failed", failed), *super()._facts()]

    @property
    def failure(self) -> str:
        return "" if self.passed else f"the audit failed: {', '.join(self.failed)}"

    def lines(self) -> Iterator[str | Table]:
        from assay.reports.judges import bias_text, required_words, tried_text

        yield Table(
            title=f"audit: an attack is passed if at least {self.pass_at:.0%} of its cases are right",
            header=("attack", "right", "cases", "verdicts moved", ""),
            rows=[
                (
                    name, f"{entry['share']:.0%}", str(entry["n"]),
                    "" if entry["flip_rate"] is None else f"{entry['flip_rate']:.0%}",
                    "passed" if entry["passed"] else "FAILED",
                )
                for name, entry in self.attacks.items()
            ],
            strong=self.failed,
        )  # fmt: skip
        yield from (f"bias: {bias_text(name, entry)}" for name, entry in self.biases.items())
        yield from (f"note: {note}" for note in self.notes)
        for name in self.not_tried:
            reason = "in every case the text of the attack contains the right answer"
            if name == "truncation":
                reason = "for no good output is it known that its first half lacks the answer; add a column 'answer'"
            yield f"note: {name} was not tried: {reason}"
        yield from (f"alarm: {alarm}" for alarm in self.flip_alarms)
        for name, entry in self.attacks.items():
            for wrong in [] if entry["passed"] else entry["wrong"][:1]:
                value = "none" if wrong["value"] is None else f"{wrong['value']:.2f}"
                yield f"{name}: {wrong['output']!r} got {value}; required: {required_words(wrong)}"
        yield tried_text(self.to_dict())
        verdict = "passed" if self.passed else "FAILED"
        alarms = f" (alarms: {len(self.flip_alarms)})" if self.flip_alarms else ""
        yield f"{verdict}{alarms}; {counted(self.verdicts, 'verdicts')}, {self.unscored} unscored; {self.spent}"


@dataclass(frozen=True, kw_only=True, repr=False)
class UnscoredAudit(Report):
    """An audit without a verdict.

    Attributes:
        passed: null: nothing was decided.
        error: why.
    """

    passed: None = None
    error: str


class AuditJudge(Cached, JudgeJob):
    """Test JUDGE for known failure modes: attacks on cases and, with labels, biases on up to 60 of the items. Exit code
    1 if it fails one, for use in CI.

    Raises:
        ModelError: all cases are unscored.
        AssayError: what was wrong, which rule, what to do.
    """

    OUTPUT: ClassVar[Any] = JobOutput
    kind: ClassVar[str] = "judge audit"
    lists: ClassVar[bool] = True

    cases: Rows = None
    """Rows with good and bad outputs (and input) to make the attacks from; shipped ones by default."""
    labels: Rows = None
    """Human labels whose best and worst outputs are the cases, instead of `cases`; 'store': the labels in the store."""
    attack: Rows = None
    """Additional attacks: rows with name and text, which contains {output} or is appended to the output."""
    profile: Literal["quality", "property"] | None = None
    """What the scale measures. quality: how good an output is; property: a property of it, such as its tone. By
    default derived from the scale and the question."""
    pass_at: Share = 0.8
    """Share of the cases of an attack that the judge must decide correctly."""

    def check(self) -> None:
        if self.cases is not None and self.labels is not None:
            raise ConfigError("an audit takes its cases from `cases` or from `labels`, not from both")

    def run(self) -> Audit:
        from assay.datasets.sources import iter_rows
        from assay.evaluation.judged import judge_items
        from assay.jobs.anchors import made_by
        from assay.judges.quality import audit
        from assay.models.scope import refusals_end_at_once, without_answers_of
        from assay.support.values import digest_of

        built = self.built()
        rated = rated_items(self.labels, built, self.store) if self.labels else []
        bases: Sequence[audit.Base] = audit.BASES
        if self.cases:
            bases = audit.load_bases(iter_rows(self.cases))
        elif self.labels:
            bases = audit.bases_of(rated, built.spec)
        attacks = audit.load_attacks(iter_rows(self.attack)) if self.attack else []
        source = "cases" if self.cases else "labels" if self.labels else "shipped"
        unasked = source == "shipped" and not audit.judges_quality(built.spec)
        kind = self.profile or ("property" if built.spec.kind == "nominal" or unasked else "quality")
        pack = audit.audit_cases(built, bases, attacks=attacks, profile=kind)
        with self.session() as (judge, session, run):
            items = audit.audit_items(pack, judge)
            need_fields(judge, items)
            # a pack has hundreds of verdicts: retrying an unreachable server for each would take minutes
            with refusals_end_at_once(), without_answers_of(ModelError):
                judged = judge_items(judge, items, session, name="audit", split="audit")
            if judged.unscored == len(items):
                reason = next((reason for reason in judged.reasons if reason), "no reason was given")
                text = f"all {len(items)} cases are unscored: the judge returned no verdict: {reason}"
                error = ModelError(text)
                error.report = UnscoredAudit(error=text)
                raise error
            assessment = audit.assess(pack, items, judged.answers, judge, pass_at=self.pass_at)
            biases = _biases(judge, rated, kind, session) if rated else {}
            biased = any(entry["passed"] is False for entry in biases.values())
            report = Audit(
                **{**assessment, "passed": assessment["passed"] and not biased},
                judge=digest_of(made_by(judge, session)), biases=biases, profile=kind,
                cases={"source": source, "n": len(bases)},
                notes=_notes(source, len(bases), kind, self.profile),
                not_tried=audit.not_tried(pack, profile=kind, attacks=attacks),
                verdicts=len(items), unscored=judged.unscored,
                **judged.coverage(judge, audit.plain_rows(pack, items)), **spent_by(run),
            )  # fmt: skip
            self._keep(report, run)
            return report

    def _keep(self, report: Audit, run: "Run") -> None:
        """Stores the report. Outputs of labelled items stay in the rollouts alone."""
        from assay.jobs.ending import FinishedRun

        if self.labels:
            report = replace(report, attacks={name: {**entry, "wrong": []} for name, entry in report.attacks.items()})
        FinishedRun(run.store, run.run_id, caps=self.caps, about={}).keep(report.to_dict())


def _biases(judge: "Judge", rated: "Sequence[Item]", profile: str, session: "Session") -> dict[str, Any]:
    """Judges some of the rated items twice and with each edit; see `assay.judges.quality.fidelity`."""
    from assay.evaluation.judged import judge_again, judge_items
    from assay.judges.quality.fidelity import assess_biases, edited, edits

    rng = random.Random(session.seed)
    items = rng.sample(list(rated), min(_BIAS_ITEMS, len(rated)))
    original = judge_items(judge, items, session, name="biases: as they are", split="audit").answers
    again = judge_again(judge, items, session, name="biases: once more", split="audit").answers
    changed = {
        name: judge_items(
            judge, [edited(item, text) for item in items], session, name=f"biases: {name}", split="audit"
        ).answers
        for name, text in edits(profile, judge.model or session.lm.model).items()
    }
    return assess_biases(original, again, changed, judge.spec, seed=session.seed)


def _notes(source: str, count: int, kind: str, profile: str | None) -> list[str]:
    """Notes on the cases that an audit ran, and on those that do not apply to the judge."""
    origin = {
        "shipped": f"{count} shipped questions, each with a right and a wrong answer",
        "cases": f"{count} good and bad outputs of the given cases",
        "labels": f"{count} pairs of the outputs that the labels call best and worst",
    }[source]
    tried = "all attacks" if kind == "quality" else "attacks that must not change a verdict"
    notes = [f"cases: {origin}; {tried} (profile {kind})"]
    if source == "shipped" and kind == "property":
        reason = (
            "its question does not ask whether an output is right" if profile is None else "the profile is property"
        )
        notes.append(
            f"cases about correctness do not apply to this judge ({reason}) and were left out, so whether it tells "
            "good from bad was not tried. Give good and bad outputs for its own question with `cases` or `labels`"
            + ("; `profile` quality runs all cases" if profile is None else "")
        )
    return notes


audit_judge = function_of(AuditJudge, "audit_judge")


@dataclass(frozen=True, kw_only=True, repr=False)
class FrozenAnchors(JudgedReport):
    """An anchor set that was frozen.

    Attributes:
        frozen: number of anchors.
        anchors: the file.
        noise: how much two runs of the judge differ, as a share of the scale.
    """

    frozen: int
    anchors: str
    noise: float

    def lines(self) -> Iterator[str]:
        yield (
            f"froze {self.frozen} verdicts in {self.anchors}; two runs differ by {self.noise:.3f} of the scale; "
            f"{self.spent}"
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class Replay(JudgedReport):
    """Verdicts on an anchor set, compared with the frozen ones.

    Attributes:
        alarms: what has drifted, each with what changed.
        changed: what the verdicts depend on and is another than when they were frozen: old and new value.
        n: anchors with a verdict both times.
        lost: anchors that are unscored now.
        mean_difference: mean change of the verdicts, as a share of the scale.
        mean_square: mean of the squared changes.
        mean_square_error: its standard error.
        noise: how much two runs of the judge differed when the set was frozen.
        flips: number, directions and p values of changed verdicts, for values of few levels; otherwise null.
        cusum: highest CUSUM statistic, for other values; otherwise null.
        cusum_limit: above it there is an alarm.
        psi: population stability index; null for few anchors.
        psi_limit: above it there is an alarm.
    """

    alarms: Sequence[str]
    changed: Mapping[str, Any]
    n: int
    lost: int
    mean_difference: float | None
    mean_square: float | None
    mean_square_error: float | None
    noise: float
    flips: Mapping[str, Any] | None
    cusum: float | None
    cusum_limit: float | None
    psi: float | None
    psi_limit: float | None

    def lines(self) -> Iterator[str]:
        from assay.reports.judges import drift_facts  # imports numpy

        for name, (before, after) in self.changed.items():
            yield f"changed: {name}: {before} -> {after}"
        yield drift_facts(self.to_dict())
        yield from (f"ALARM: {alarm}" for alarm in self.alarms)
        yield f"{'drifted' if self.alarms else 'no drift'}; {self.spent}"

    @property
    def failure(self) -> str:
        return f"the judge has drifted: {counted(len(self.alarms), 'alarms')}" if self.alarms else ""


class ReplayAnchors(Preflight, JudgeJob):
    """Replay a frozen set of verdicts on JUDGE, and raise an alarm that names what changed. Exit code 1 on an alarm.

    Never uses the response cache: a cached answer cannot show drift.

    Raises:
        ConfigError: there is no such set; with `freeze`, there is one already.
    """

    OUTPUT: ClassVar[Any] = JobOutput
    kind: ClassVar[str] = "judge drift"

    anchors: Annotated[str | Path | None, Flag(metavar="FILE", key=False, stored=True), Parse(str)] = None
    """The frozen set, a .json file; by default the one next to a compiled judge."""
    freeze: Rows = None
    """Freeze the verdicts of JUDGE on these rows, which are as for assay judge score."""

    @property
    def cache(self) -> bool:
        return False

    def run(self) -> FrozenAnchors | Replay:
        from assay.jobs.anchors import items_of, replay
        from assay.jobs.ending import FinishedRun
        from assay.judges.quality.drift import AnchorSet
        from assay.support.places import check_writable

        path = self._path()
        if self.freeze and path.exists():
            raise ConfigError(f"{path} is there already; an anchor set is frozen once. Delete it, or name another file")
        frozen = None if self.freeze else AnchorSet.load(path)
        if not self.built().spec.graded:
            raise ConfigError("drift is measured on values, and the words of this judge's scale have no grades")
        if self.freeze:
            check_writable(path, "anchors")
        with self.session() as (judge, session, run):
            if frozen is None:
                return self._frozen(judge, session, run, path)
            preflight_items(judge, items_of(frozen), session, self)
            report = Replay(**replay(judge, frozen, session), **spent_by(run))
            FinishedRun(run.store, run.run_id, caps=self.caps, about={}).keep(report.to_dict())
            return report

    def _path(self) -> Path:
        from assay.jobs.anchors import ANCHORS
        from assay.sources.artifact_files import is_artifact

        if self.anchors is not None:
            return Path(self.anchors)
        if not isinstance(self.judge, str) or not is_artifact(self.judge):
            raise ConfigError("only a compiled judge has anchors of its own; name a file with `anchors`")
        return Path(self.judge) / ANCHORS

    def _frozen(self, judge: Any, session: Any, run: Any, path: Path) -> FrozenAnchors:
        from assay.datasets.sources import iter_rows
        from assay.evaluation.judged import judge_again, judge_items
        from assay.jobs.anchors import freeze
        from assay.judges.labels import make_items

        spec = str(self.freeze)
        items = make_items(iter_rows(spec), labels=judge.labels, spec=spec, unrated=True, shows=judge.shows)
        need_fields(judge, items, optional=OPTIONAL)
        preflight_items(judge, items, session, self)
        judged = judge_items(judge, items, session, name="freeze")
        repeat = judge_again(judge, items, session, name="freeze: once more")
        anchor_set = freeze(judge, items, judged.answers, repeat.answers, session)
        run.store.put_searched(path)
        anchor_set.save(path)
        return FrozenAnchors(
            frozen=len(anchor_set.anchors), anchors=str(path), noise=anchor_set.noise, **judged.coverage(judge),
            **spent_by(run),
        )  # fmt: skip


replay_anchors = function_of(ReplayAnchors, "replay_anchors")


@dataclass(frozen=True, kw_only=True, repr=False)
class Fidelity(SpentReport):
    """The card of a simulated user.

    Attributes:
        user: its name.
        n: runs in which it did not fail.
        failed: runs in which it raised an error, or exceeded the time limit.
        turns: mean number of messages of a run.
        faults: by fault the share of runs with it, its exact 95 % interval, and an example.
        faithful: share of runs without a fault.
        fail_over: highest share of runs with a fault.
        passed: whether no run failed, and no fault is more frequent.
        why_failed: up to three reasons of failed runs.
    """

    user: str
    n: int
    failed: int
    turns: float | None
    faults: Mapping[str, Any]
    faithful: Mapping[str, Any]
    fail_over: float
    passed: bool
    why_failed: Sequence[str]

    def lines(self) -> Iterator[str | Table]:
        from assay.judges.quality.fidelity import FAULTS

        yield Table(
            title=f"fidelity of the user {self.user}",
            header=("fault", "runs", "95 %", "the user"),
            rows=[
                (
                    name, "–" if fault["share"] is None else f"{fault['share']:.0%}",
                    f"{fault['low']:.0%} to {fault['high']:.0%}", FAULTS.get(name, "made no fault"),
                )
                for name, fault in [*self.faults.items(), ("faithful", self.faithful)]
            ],
        )  # fmt: skip
        for name, fault in self.faults.items():
            if fault["share"] is not None and fault["share"] > self.fail_over:
                yield f"{name}: {' | '.join(fault['example'])}"
        yield from (f"note: the user failed: {reason}" for reason in self.why_failed)
        verdict = "passed" if self.passed else "FAILED"
        counts = f"{counted(self.n, 'runs')}, {self.failed} in which the user failed"
        yield f"{verdict}: at most {self.fail_over:.0%} of the runs with a fault; {counts}; {self.spent}"

    @property
    def failure(self) -> str:
        return "" if self.passed else "the simulated user failed the audit"


def _user(value: Any) -> Any:
    if not (isinstance(value, str | Path) or callable(value)):
        raise ValueError(f"must be callable as user(profile=…, messages=…), or its name, not {value!r}")
    return str(value) if isinstance(value, Path) else value


class AuditUser(Reported, Trusting, InStore, Cached, KeyedJob):
    """Audit the simulated USER of conversations: it talks with an interviewer that follows rules, on each task. Exit
    code 1 if it fails.

    Raises:
        DataError: a task has no `user`, or the user returned something else than a message.
    """

    ROLE: ClassVar[str] = "judge"
    kind: ClassVar[str] = "judge fidelity"

    user: Annotated[Any, Flag(path=True), Parse(_user)] = field(kw_only=False)
    """Simulated user: rules, model, or file.py:Class. In Python also an `assay.programs.UserProgram`."""
    data: Annotated[str, Flag(metavar="D", path=True, key=False, stored=True)]
    """Tasks with an input 'user', such as conversations:?size=40. Use tasks that are not in the test split."""
    model: str | None = None
    """Language model of the user; by default embedded/smollm2-135m."""
    thinking: Budget = None
    """How much the user may think in a call: a number of tokens, minimal, low, medium, high, xhigh, max, off or auto
    (no limit). A model or program that cannot keep it is refused."""
    tasks: Positive = 40
    """Maximum number of tasks."""
    task_timeout: Annotated[Seconds, Flag(metavar="SECONDS", job=False)] = DEFAULT_S
    """Time limit of one interview in seconds. A user that exceeds it has failed."""
    fail_over: Share = 0.05
    """Maximum share of runs with a fault; above it the exit code is 1."""

    def run(self) -> Fidelity:
        import dspy

        from assay.datasets import load_tasks
        from assay.jobs.opening import open_run
        from assay.judges.quality.fidelity import fidelity_card
        from assay.models.limits import limited
        from assay.support.scrubbing import error_text

        name = self.user if isinstance(self.user, str) else type(self.user).__name__
        lm, config = with_names(self, user=name)
        program, tasks = self._program(), load_tasks(self.data)[: self.tasks]
        if lacking := next((task.id for task in tasks if "user" not in task.inputs), None):
            raise DataError(f"task {lacking!r} has no input 'user' with a goal and facts")
        progress = self.reporter
        with open_run(config, lm=lm, progress=progress, store=self.store) as run:
            runs: list[Interview | None] = []
            problems: list[str] = []
            in_run = dspy.context(lm=run.lm, trace=[])
            with run.recorder.active(), in_run, progress.bar("interview", len(tasks)) as advance:
                for task in tasks:
                    try:
                        with limited(self.task_timeout):
                            runs.append(_recorded(run.recorder, program, task, name))
                    except DataError:
                        raise
                    except (Exception, SystemExit) as error:  # the user's own failure is a figure of its card
                        runs.append(None)
                        problems.append(error_text(error))
                    advance(1)
            card = fidelity_card(runs, fail_over=self.fail_over)
            return Fidelity(user=name, **card, why_failed=list(dict.fromkeys(problems))[:3], **spent_by(run))

    def _program(self) -> "UserProgram":
        from assay.programs import RuleBasedUser, SimulatedUser, load_program

        if not isinstance(self.user, str):
            given: UserProgram = self.user
            return given
        shipped: Mapping[str, Any] = {"rules": RuleBasedUser, "model": SimulatedUser}
        if self.user not in shipped and ":" not in self.user and not self.user.endswith(".py"):
            raise ConfigError(f"{self.user!r} {one_of(self.user, shipped, other='file.py:Class')}", field="user")
        program: UserProgram = shipped[self.user]() if self.user in shipped else load_program(self.user)
        return program


def _recorded(recorder: "Recorder", user: "UserProgram", task: Any, name: str) -> "Interview":
    from assay.judges.quality.fidelity import interview
    from assay.models.limits import within_limit
    from assay.traces.records import Rollout

    own = Rollout(
        task_id=task.id, task_type=task.task_type, group_id=task.id, source="simulated_user", program=name[:200]
    )
    own.inputs = dict(task.inputs)
    with recorder.rollout(own):
        conversation = within_limit(lambda: interview(user, task), "the interview")
        own.prediction = {"messages": conversation.messages, "ended": conversation.ended}
    return conversation


audit_user = function_of(AuditUser, "audit_user")
