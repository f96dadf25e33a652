"""The pages of judges: the list, and one judge with its card, disagreements, audits, drift and labels."""

import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import sqlalchemy as sa

from assay.datasets.files import is_data_file
from assay.errors import AssayError, StoreError
from assay.judges.labels import Item, load_labels
from assay.judges.questions import Question, known_questions
from assay.reports.judges import (
    attack_rows,
    card_page,
    disagreements,
    drift_charts,
    drift_facts,
    growth,
    items_of,
    label_rows,
    verdicts_of,
)
from assay.sources.artifact_files import is_artifact
from assay.traces.store import Store, tables as schema
from assay.traces.store.listing import find_run, finished_report, list_runs
from assay.web.next_steps import judge_commands
from assay.web.rendering import View

_KINDS = ("judge compile", "judge audit", "judge drift", "judge score")
_RUNS = 200  # of one kind, the newest
_MOST_JUDGES, _DISAGREEMENTS, _PAST = 100, 40, 20
_MOST_BYTES = 20 << 20  # of a file of labels that the page reads
_WAITING_S = 20


@dataclass(kw_only=True)
class _Judge:
    """A question with the runs of its judges by kind, newest first, and the newest reports.

    Attributes:
        audits: those of the compiled judge, or of any if none is compiled; `other_audits`: of other judges, such as
            before it was compiled again or with another model.
    """

    question: Question
    runs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    compiled: Mapping[str, Any] = field(default_factory=dict)
    compiled_run: Mapping[str, Any] | None = None
    audits: list[tuple[dict[str, Any], Mapping[str, Any]]] = field(default_factory=list)
    other_audits: list[tuple[dict[str, Any], Mapping[str, Any]]] = field(default_factory=list)
    drifts: list[tuple[dict[str, Any], Mapping[str, Any]]] = field(default_factory=list)

    @property
    def card(self) -> Mapping[str, Any]:
        card: Mapping[str, Any] = self.compiled.get("card") or {}
        return card


def judges_view(store: Store) -> View:
    """The judges that the store knows, those with the most labels first."""
    counts = _label_counts(store)
    judges = sorted(_judges(store), key=lambda judge: -counts.get(judge.question.key, (0, 0))[0])
    rows = [_row(judge, counts.get(judge.question.key, (0, 0))) for judge in judges]
    return View(
        template="judges.html",
        title="Judges",
        values={"judges": rows[:_MOST_JUDGES], "left_out": max(0, len(rows) - _MOST_JUDGES)},
        part="judges_part.html",
        every_s=_WAITING_S,
    )


def _row(judge: _Judge, labels: tuple[int, int]) -> dict[str, Any]:
    question, card = judge.question, judge.card
    name = card.get("objective")
    audit = judge.audits[0][1] if judge.audits else None
    drift = judge.drifts[0][1] if judge.drifts else None
    return {
        "key": question.key, "text": question.spec.text, "scale": question.spec.scale, "labels": labels[0],
        "raters": labels[1], "objective": (name or "").replace("_", " "),
        "value": card["agreement"][name] if name else None, "ceiling": card["ceiling"][name] if name else None,
        "alarms": len(card.get("alarms") or ()), "is_compiled": bool(card),
        "audit": None if audit is None else bool(audit["passed"]),
        "drift": None if drift is None else not drift["alarms"],
    }  # fmt: skip


def _label_counts(store: Store) -> dict[str, tuple[int, int]]:
    """Labels and raters by question."""
    table = schema.labels
    query = sa.select(table.c.question, sa.func.count(), sa.func.count(table.c.rater.distinct()))
    with store.engine.connect() as connection:
        rows = connection.execute(query.group_by(table.c.question)).all()
    return {key: (labels, raters) for key, labels, raters in rows}


def _judges(store: Store, only: str = "") -> list[_Judge]:
    """The questions of the store with their runs and reports.

    Args:
        only: the key of one question; empty for all.
    """
    questions = known_questions(store)
    judges = {key: _Judge(question=question) for key, question in questions.items() if only in ("", key)}
    of_run = {run: key for key, judge in judges.items() for run in judge.question.runs}
    for kind in _KINDS:
        for run in list_runs(store, limit=_RUNS, kind=kind):
            key = of_run.get(run["id"])
            if key is not None:
                judges[key].runs.setdefault(kind, []).append(run)
    for judge in judges.values():
        _read_reports(judge, store)
    return list(judges.values())


def _read_reports(judge: _Judge, store: Store) -> None:
    for run in judge.runs.get("judge compile", ()):
        report = finished_report(store, run["id"])
        if report and report.get("card"):
            judge.compiled, judge.compiled_run = report, run
            break
    for kind, reports, needed in (("judge audit", judge.audits, "attacks"), ("judge drift", judge.drifts, "cusum")):
        for run in judge.runs.get(kind, ())[:_PAST]:
            report = finished_report(store, run["id"])
            if report and needed in report:
                reports.append((run, report))
    if judge.card:
        digest, audits = judge.card.get("judge"), judge.audits
        judge.audits = [audit for audit in audits if audit[1].get("judge") == digest]
        judge.other_audits = [audit for audit in audits if audit[1].get("judge") != digest]


def question_of_run(store: Store, run: Mapping[str, Any]) -> Question | None:
    """What the judge of a run was asked; None if the run is not of a single judge."""
    if run["kind"] not in _KINDS:
        return None
    return next((one for one in known_questions(store).values() if run["id"] in one.runs), None)


def found_question(store: Store, key: str) -> Question:
    """A question of the store.

    Raises:
        StoreError: there is none with this key.
    """
    question = known_questions(store).get(key)
    if question is None:
        raise StoreError(f"the store knows no judge {key[:80]!r}; assay judge label JUDGE --page adds one")
    return question


def judge_view(store: Store, key: str, *, store_flag: str | None) -> View:
    """One judge: whether it can be trusted, where it disagrees with raters, its audits and drift.

    Raises:
        StoreError: there is no such judge.
    """
    found_question(store, key)
    (judge,) = _judges(store, only=key)
    question, rows = judge.question, label_rows(store, judge.question)
    labelled = items_of(rows, question)
    sealed = _sealed_items(judge)
    items = [*labelled, *(item for item in sealed if item.id not in {one.id for one in labelled})]
    verdicts = verdicts_of(store, question, items, version=_compiled_version(judge))
    gaps = disagreements(items, question.spec, verdicts)
    differing = [row for row in gaps if row.gap]
    return View(
        template="judge.html",
        title=f"Judge {key}",
        values={
            "question": question, "card": card_page(judge.card) if judge.card else None,
            "compiled_run": judge.compiled_run, "artifact": judge.compiled.get("artifact"),
            "growth": growth(rows, question, verdicts), "disagreements": differing[:_DISAGREEMENTS],
            "differing": len(differing), "compared": len(gaps), "missing_file": _missing_labels(judge),
            "audits": judge.audits, "other_audits": judge.other_audits,
            "attacks": attack_rows(judge.audits[0][1]) if judge.audits else [],
            "drifts": [(run, report, drift_facts(report)) for run, report in judge.drifts],
            "drift_charts": drift_charts([(run["started_at"], report) for run, report in judge.drifts]),
            "commands": list(_commands(store, judge, store_flag)),
        },
    )  # fmt: skip


def _missing_labels(judge: _Judge) -> str:
    """The name of the labels file that the judge was compiled with, if it is not found from here; otherwise empty."""
    name = str((judge.compiled_run["config"] if judge.compiled_run else {}).get("labels") or "")
    return name if is_data_file(name) and not Path(name).is_file() else ""


def _sealed_items(judge: _Judge) -> list[Item]:
    """The items of the labels file that the judge was compiled with; empty if it cannot be read here."""
    config = judge.compiled_run["config"] if judge.compiled_run else {}
    file = Path(str(config.get("labels") or ""))
    try:
        if not is_data_file(file.name) or not file.is_file() or file.stat().st_size > _MOST_BYTES:
            return []
        question = judge.question
        rename = config.get("rename") or {}
        return load_labels(
            str(file), labels=question.spec.scale, rename=rename, shows=question.shows, anchors=question.spec.anchors
        )
    except (AssayError, OSError):
        return []


def _compiled_version(judge: _Judge) -> str:
    """The version in the manifest of the compiled judge; empty if it is not here."""
    manifest = Path(str(judge.compiled.get("artifact") or "")) / "manifest.json"
    try:
        return str(orjson.loads(manifest.read_bytes()).get("version") or "")
    except (OSError, json.JSONDecodeError, AttributeError):
        return ""


def _commands(store: Store, judge: _Judge, store_flag: str | None) -> Iterator[tuple[str, str]]:
    artifact, sentence = str(judge.compiled.get("artifact") or ""), judge.question.spec.text
    source = next((one for one in reversed(judge.question.sources) if not is_artifact(one)), artifact)
    if not source:
        return
    newest = sorted(itertools.chain.from_iterable(judge.runs.values()), key=lambda run: -run["started_at"])
    config = newest[0]["config"] if newest else _config_of(store, judge.question)
    scale = {"scale": list(judge.question.spec.scale)} if source == sentence and " " in source else {"scale": None}
    yield from judge_commands(artifact or source, source, {**config, **scale}, store_flag)


def _config_of(store: Store, question: Question) -> Mapping[str, Any]:
    """The settings of the newest run in which it judged; empty if it is not known."""
    for run_id in question.runs[-1:]:
        with contextlib.suppress(StoreError):
            config: Mapping[str, Any] = find_run(store, run_id)["config"]
            return config
    return {}
