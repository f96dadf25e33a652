"""Public API for `assay judge audit`: tests a judge for known failure modes."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

import dspy

from assay.api.judge.items import need_fields, rated_items
from assay.api.judge.session import at_work, built_judge, judge_settings, spent_by
from assay.datasets.sources import iter_rows
from assay.errors import ModelError
from assay.evaluation import Progress, Session, default_progress
from assay.evaluation.judged import judge_again, judge_items
from assay.judges import Item, Judge
from assay.judges.loading import AnyJudge
from assay.judges.quality.audit import (
    BASES,
    assess,
    audit_cases,
    audit_items,
    bases_of,
    judges_quality,
    load_attacks,
    load_bases,
    not_tried,
    plain_rows,
)
from assay.judges.quality.fidelity import assess_biases, edited, edits
from assay.models.scope import refusals_end_at_once, without_answers_of
from assay.runs.anchors import made_by
from assay.runs.finished import FinishedRun
from assay.runs.opening import Run
from assay.runs.settings import JudgeAuditSettings
from assay.runs.settings.options import JudgeAuditOptions
from assay.sources.trust import trusts
from assay.support.keywords import takes
from assay.support.reprs import ReportDict
from assay.support.values import digest_of

_BIAS_ITEMS = 60


@takes(JudgeAuditSettings)
@trusts
def audit_judge(
    judge: str | AnyJudge, *, cases: str | None = None, labels: str | None = None, attack: str | None = None,
    lm: dspy.LM | None = None, store: str | Path | None = None, progress: Progress | None = None,
    **options: Unpack[JudgeAuditOptions],
) -> dict[str, Any]:  # fmt: skip
    """Tests a judge for known failure modes: attacks on cases and, with `labels`, biases on up to 60 of the items.

    Args:
        cases: dataset with `good` and `bad` outputs (and `input`) for the attacks; None for the shipped cases.
        attack: dataset of additional attacks: rows with `name` and `text`, which contains `{output}` or is appended to
            the output.
        labels: ratings to use instead of `cases`: their best and worst outputs. `store`: the labels in the store.
        options: the fields of `assay.runs.settings.JudgeAuditSettings`. `profile`: see
            `assay.judges.quality.audit.audit_cases`. If None: `property` for a nominal scale, and for shipped cases if
            the judge's question is not about correctness or quality; otherwise `quality`.
    Returns:
        `judge`: digest of the judge and its model, as in its card; `passed`; `notes` on the cases; by attack the number
        of cases, the number of correct verdicts, and examples of wrong ones; `biases`, see
        `assay.judges.quality.fidelity.assess_biases`.
    Raises:
        ModelError: all cases are unscored.
        AssayError: what was wrong, which rule, what to do.
    """
    named = {"cases": cases, "labels": labels, "attack": attack}
    config, lm = judge_settings(JudgeAuditSettings, judge, lm, cases or labels or "", {**options, **named})
    built, progress = built_judge(judge, config.scale, lists=True), default_progress(progress)
    rated = rated_items(labels, built, {}, store) if labels and not cases else []
    bases = load_bases(iter_rows(cases)) if cases else bases_of(rated, built.spec) if labels else BASES
    attacks = load_attacks(iter_rows(attack)) if attack else []
    source = "cases" if cases else "labels" if labels else "shipped"
    unasked = source == "shipped" and not judges_quality(built.spec)
    kind = config.profile or ("property" if built.spec.kind == "nominal" or unasked else "quality")
    pack = audit_cases(built, bases, attacks=attacks, profile=kind)
    with at_work(config, judge, lm, progress, store) as (judge_, session, run):
        items = audit_items(pack, judge_)
        need_fields(judge_, items)
        # a pack has hundreds of verdicts: retrying an unreachable server for each would take minutes
        with refusals_end_at_once(), without_answers_of(ModelError):
            judged = judge_items(judge_, items, session, name="audit", split="audit")
            if judged.unscored == len(items):
                reason = next((reason for reason in judged.reasons if reason), "no reason was given")
                raise ModelError(f"all {len(items)} cases are unscored: the judge returned no verdict: {reason}")
        assessment = assess(pack, items, judged.answers, judge_, pass_at=config.pass_at)
        biases = _biases(judge_, rated, kind, session) if rated else {}
        biased = [name for name, entry in biases.items() if entry["passed"] is False]
        report = {
            "judge": digest_of(made_by(judge_, session)),
            **assessment,
            "passed": assessment["passed"] and not biased,
            "biases": biases,
            "profile": kind,
            "cases": {"source": source, "n": len(bases)},
            "notes": _audit_notes(source, len(bases), kind, config.profile),
            "not_tried": not_tried(pack, profile=kind, attacks=attacks),
            **judged.coverage(judge_, plain_rows(pack, items)),
            "verdicts": len(items),
            "unscored": judged.unscored,
            **spent_by(session),
        }
        return _stored(report, run, config)


def _biases(judge: Judge, rated: Sequence[Item], profile: str, session: Session) -> dict[str, Any]:
    """Judges some of the rated items twice and with each edit; see `assay.judges.quality.fidelity`."""
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


def _stored(report: dict[str, Any], run: Run, config: JudgeAuditSettings) -> dict[str, Any]:
    """Writes the report to the run's folder. Outputs of labelled items stay in the store, where they can be erased."""
    attacks = {name: {**entry, "wrong": []} for name, entry in report["attacks"].items()}
    stored = {**report, "attacks": attacks} if config.labels else report
    FinishedRun(run.folder, caps=config.caps, about={}).keep(stored)
    failed = [name for name, entry in attacks.items() if not entry["passed"]]
    failed += [f"bias: {name}" for name, entry in report["biases"].items() if entry["passed"] is False]
    return ReportDict("Audit", report, {"attacks": len(attacks), "failed": ", ".join(failed) or "none"})


def _audit_notes(source: str, count: int, kind: str, profile: str | None) -> list[str]:
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
            "good from bad was not tried. "
            "Give good and bad outputs for its own question with cases=… or labels=…"
            + ("; profile='quality' runs all cases" if profile is None else "")
        )
    return notes
