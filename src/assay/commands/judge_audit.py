"""`assay judge audit`: tests a judge for known failure modes."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from assay.commands.groups import JobOutput
from assay.commands.judging import JudgedReport, JudgeJob, Rows, need_fields, rated_items, spent_by
from assay.errors import ConfigError, ModelError
from assay.jobs.groups import Cached
from assay.support.numbers import counted
from assay.support.options import Share, function_of
from assay.support.report import Report, Table

if TYPE_CHECKING:
    from assay.evaluation import Session
    from assay.jobs.opening import Run
    from assay.judges import Item, Judge

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
        from assay.reports.cards import bias_text, required_words, tried_text

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
        """Writes the report to the run's folder. Outputs of labelled items stay in the store, where they can be
        erased."""
        from assay.jobs.finished import FinishedRun

        if self.labels:
            report = replace(report, attacks={name: {**entry, "wrong": []} for name, entry in report.attacks.items()})
        FinishedRun(run.folder, caps=self.caps, about={}).keep(report.to_dict())


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
