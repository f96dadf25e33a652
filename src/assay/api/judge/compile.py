"""Public API for `assay judge compile`: `assay.compile_judge`.

Combines labels, model, judge, artifact and reliability card. Does not search prompts:
`assay.optimizers.judges.compile` does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Unpack

import dspy

from assay.api.judge.card import anchor_set, judge_card
from assay.api.judge.items import need_fields, rated_items, with_fields, without_absent_fields
from assay.api.judge.report import JudgeReport, items_of, save_judge, shown_card
from assay.api.judge.session import judge_session
from assay.datasets import SPLITS
from assay.datasets.memory import data_spec
from assay.datasets.rows import RowFindings
from assay.deployment import load_artifact
from assay.deployment.artifact import is_artifact
from assay.errors import BudgetExceeded, ConfigError
from assay.evaluation import Progress, Session, default_progress
from assay.judges import Judge, split_items
from assay.judges.labels import Item, LabelledItems, LabelSplits
from assay.judges.quality.audit import negatives
from assay.optimizers.judges.compile import JudgeConfig, JudgeOutcome, compile_judge_prompts
from assay.optimizers.prompts.given import title_of
from assay.programs import program_version
from assay.rubrics.criteria import JudgeFields
from assay.runs.arguments import resolve_lm
from assay.runs.finished import FinishedRun
from assay.runs.loading import compiled_parts, load_judge
from assay.runs.opening import Run, artifact_place, open_run
from assay.runs.preflight import preflight_judge
from assay.runs.settings import JudgeCompileSettings
from assay.runs.settings.options import JudgeCompileOptions
from assay.sources.trust import trusts
from assay.support.keywords import takes
from assay.support.numbers import counted
from assay.traces.store.sealing import DEFAULT_SALT, Openings, known_splits, open_test, resolve_salt, store_splits

__all__ = ["JudgeReport", "compile_judge"]

_THIN = 20  # items of a split below which there is no interval


def _name_of(judge: str | Judge) -> str:
    """The text that names a judge in the settings of its run."""
    if not isinstance(judge, str | Judge):
        raise ConfigError(
            f"judge={judge!r} must be a YAML file, an artifact's folder, file.py:NAME, a sentence or a Judge"
        )
    return judge if isinstance(judge, str) else judge.spec.text


@takes(JudgeCompileSettings)
@trusts
def compile_judge(
    judge: str | Judge,
    *,
    labels: Any,
    lm: dspy.LM | None = None,
    out: str | Path | None = None,
    store: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    **options: Unpack[JudgeCompileOptions],
) -> JudgeReport:
    """Compiles a judge against human labels and reports it on sealed items, next to the human ceiling.

    If gate does not prove the compiled judge better, the judge of the report and of the artifact is the one that was
    given, measured on gate; the test items stay sealed, and the unproven judge is in the artifact `report.unproven`.

    Args:
        judge: a YAML file, an artifact's folder, `file.py:NAME`, one sentence (with `scale=`), or a judge.
        labels: source of ratings, see `assay.judges.load_labels`.
        out: new folder of the artifact; by default `.assay/artifacts/judge-OPTIMIZER`, with a number if it exists.
        options: the fields of `assay.runs.settings.JudgeCompileSettings`.
    Raises:
        AssayError: what was wrong, which rule, what to do.
        Cancelled: the user stopped the run; call again with `resume=True`.
    """
    name = _name_of(judge)
    settings: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    lm, labels = resolve_lm(lm, settings), data_spec(labels, name="labels")
    config = JudgeCompileSettings(
        judge=name, labels=labels, **{**settings, **({"model": lm.model} if lm is not None else {})}
    )
    name = title_of(config.optimizer).rpartition(":")[2].lower()
    place = artifact_place(store, out, f"judge-{name}", resume=resume)
    search = JudgeConfig(optimizer=config.optimizer, objective=config.objective, demos=config.demos)
    built, progress = _built(judge, config), default_progress(progress)
    parents = compiled_parts(judge) if isinstance(judge, str) else []
    config = replace(config, salt=_salt_of(config, parents, store))
    items = rated_items(labels, built, config.rename, store)
    if isinstance(judge, str) and not config.shows:
        built = without_absent_fields(built, items)
    need_fields(built, items)
    of_parents = {key: split for parent in parents for split, keys in items_of(parent).items() for key in keys}
    splits, rows, keys = _split(items, built, config, {**of_parents, **known_splits(store)})
    with (
        open_run(config, lm=lm, progress=progress, store=store, resume=resume) as run,
        judge_session(run, built, progress, config) as session,
    ):
        run.status = "stopped"  # until the job is complete
        while store_splits(run.store, keys):  # another job has assigned them since they were read
            splits, rows, keys = _split(items, built, config, known_splits(run.store))
        parts = [program_version(built, None), asdict(built.spec)]
        about = {"judge": parts, "ratings": splits.ratings(), "parents": parents}
        finished = FinishedRun(run.folder, caps=config.caps, about=about)
        if run.recorder.resumed and (stored := finished.report(progress, out=out)) is not None:
            run.ended, run.status = True, "done" if stored["stopped"] is None else "stopped"
            return _as_stored(built, run, config, stored)
        notes = [*rows.notes(), *_thin(splits)]
        _announce(splits, items, notes, progress)
        report = _compiled(built, splits, session, search, run, config)
        report.rows, report.notes = rows, [*rows.notes(), *report.notes]
        if items.gaps:
            report.notes.append(f"{counted(items.gaps, 'labels')} missing in {labels}")
        save_judge(report, splits, run, parents, place)
        finished.keep(report.to_dict())
    return report


def _salt_of(config: JudgeCompileSettings, parents: Sequence[str], store: str | Path | None) -> str:
    """The salt of the splits: that of the parents, if there are any.

    Raises:
        ConfigError: a parent has another salt.
    """
    salts = [(parent, load_artifact(parent).manifest["labels"]["salt"]) for parent in parents]
    salt: str = config.salt or (salts[0][1] if salts else resolve_salt(None, store))
    for parent, parent_salt in salts:
        if parent_salt != salt:
            raise ConfigError(
                f"{parent} was compiled with the salt {parent_salt!r}: what it learned from would fall into the new "
                "test split. Use that salt"
            )
    return salt


def _compiled(
    judge: Judge, splits: LabelSplits, session: Session, search: JudgeConfig, run: Run, config: JudgeCompileSettings
) -> JudgeReport:
    """Preflight, search, gate, test, and the measurements of the result."""
    if config.preflight:
        session.progress.say("preflight: each model answers once")
        preflight_judge(judge, splits.val, session, max_cost_usd=config.max_cost_usd)
    opened: list[Openings] = []
    keys = [item.key for item in splits.test]
    outcome = compile_judge_prompts(
        judge, splits, session, search, folder=run.folder,
        on_open=lambda: opened.append(open_test(run.store, run.run_id, data=config.labels, tasks=keys)),
    )  # fmt: skip
    report = JudgeReport(Path(), outcome, {}, run.meter, config, splits.sizes(), openings=next(iter(opened), None))
    if outcome.judged is not None:
        try:
            report.card = shown_card(judge_card(outcome, splits, session))
            report.anchors = anchor_set(outcome, splits, session)
        except BudgetExceeded as cap:
            outcome.stopped = str(cap)
    if outcome.stopped is None:
        run.status = "done"
    return report


def _as_stored(judge: Judge, run: Run, config: JudgeCompileSettings, stored: Mapping[str, Any]) -> JudgeReport:
    """The report of a run that had already ended. Its outcome has no answers of single items."""
    has_unproven = stored["unproven"] and is_artifact(stored["unproven"])
    compiled = load_judge(stored["unproven" if has_unproven else "artifact"], own_model=False)
    assert isinstance(compiled, Judge)
    outcome = JudgeOutcome(
        judge, compiled, stored["objective"], stored["winner"], stored["candidates"], gate=stored["gate"],
        replaces=stored["replaces"],
        stopped=stored["stopped"], gain=stored["test"]["gain"], accuracy_gain=stored["test"]["accuracy_gain"],
        notes=stored["notes"],
    )  # fmt: skip
    return JudgeReport(
        Path(stored["artifact"]),
        outcome,
        shown_card(stored["card"]),
        run.meter,
        config,
        stored["sizes"],
        unproven=Path(stored["unproven"]) if stored["unproven"] else None,
        stored=stored,
    )


def _built(judge: str | Judge, config: JudgeCompileSettings) -> Judge:
    if not isinstance(judge, str):
        return judge
    spec = JudgeFields()
    if config.scale:
        spec["scale"] = tuple(config.scale)
    if config.scale_kind:
        spec["kind"] = config.scale_kind
    built = load_judge(judge, own_model=False, **spec)
    if not isinstance(built, Judge):
        raise ConfigError(
            "a listwise judge cannot be compiled, as labels are of single outputs or pairs; compile the judge of pairs"
        )
    return with_fields(built, config.shows) if config.shows else built


def _split(
    items: Sequence[Item], judge: Judge, config: JudgeCompileSettings, known: Mapping[str, str]
) -> tuple[LabelSplits, RowFindings, dict[str, list[str]]]:
    """The splits with the negatives in train; what is to be said of the items; and their keys by split."""
    splits = split_items(items, salt=config.salt or DEFAULT_SALT, limits=config.sizes, known=known)
    rows, keys = splits.report(), splits.keys()
    if config.negatives:
        splits.train += negatives(splits.train, judge.spec, count=config.negatives)
    return splits, rows, keys


def _announce(splits: LabelSplits, items: LabelledItems, warnings: Sequence[str], progress: Progress) -> None:
    raters = {rating.rater for item in items for rating in item.ratings}
    ratings = sum(len(item.ratings) for item in items)
    sizes = ", ".join(f"{name} {count}" for name, count in splits.sizes().items())
    progress.say(
        f"labels: {ratings:,} ratings of {len(items):,} items by {len(raters):,} raters, {items.gaps:,} missing; "
        f"{sizes}; the test items are sealed"
    )
    for warning in warnings:
        progress.say(f"warning: {warning}")


def _thin(splits: LabelSplits) -> list[str]:
    """Warnings about splits that are too small.

    A hash of its content assigns an item, so few items can fall unevenly.
    """
    warnings = []
    labels = {item.modes[0] for name in SPLITS for item in getattr(splits, name)}
    for name in SPLITS:
        items = getattr(splits, name)
        if missing := sorted(labels - {item.modes[0] for item in items}):
            warnings.append(
                f"{name} has no item that raters called {', '.join(missing)}; label more, or name splits in a field "
                "'split'"
            )
        elif name != "train" and len(items) < _THIN:
            warnings.append(f"{name} has {len(items)} items; below {_THIN} items no gain can be shown; label more")
    return warnings
