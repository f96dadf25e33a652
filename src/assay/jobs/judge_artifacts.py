"""The artifact of a compiled judge: reliability card and anchor set of the result, measured on held-out items."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import dspy

from assay.datasets import SPLITS
from assay.deployment import load_artifact, save_artifact
from assay.deployment.artifact import loaded_again
from assay.evaluation import Session
from assay.evaluation.judged import judge_again, judge_items
from assay.jobs.anchors import freeze, made_by
from assay.jobs.artifacts import of_earlier_attempt
from assay.jobs.opening import Run
from assay.judges import Judge
from assay.judges.labels import Item, LabelSplits, output_name
from assay.judges.quality.agreement import Answers
from assay.judges.quality.audit import padded
from assay.judges.quality.card import reliability_card
from assay.judges.quality.drift import AnchorSet
from assay.judges.questions import key_of
from assay.judges.reading import scale_masses
from assay.models.meter import Meter
from assay.optimizers.judges.compile import JudgeOutcome
from assay.programs import program_version
from assay.sources.modules import qualified_name
from assay.support.package import __version__
from assay.support.values import digest_of
from assay.traces.records import person_digest, subject_digest

_RETEST = 30  # test items that are judged a second time
_ANCHORS = 60  # val items whose verdicts are stored with a compiled judge


def judge_card(outcome: JudgeOutcome, splits: LabelSplits, session: Session) -> dict[str, Any]:
    """The reliability card of the result on the items that it was measured on; some of them are judged twice."""
    judge, judged, split = outcome.result, outcome.judged, outcome.split
    assert judged is not None
    assert outcome.agreement is not None
    assert outcome.ceiling is not None
    items: list[Item] = getattr(splits, split)
    retested = items[:_RETEST]
    with session.phase(split):
        second = judge_again(judge, retested, session, name=f"{split}: once more", split=split)
    first = Answers(judged.answers.verdicts[: len(retested)], judged.answers.places[: len(retested)])
    longer = None
    if all(output_name(item.fields) in item.fields for item in retested):
        with session.phase(split):
            filled = [replace(item, fields=padded(item.fields)) for item in retested]
            longer = judge_items(judge, filled, session, name=f"{split}: with words that say nothing", split=split)
    card = reliability_card(
        judged.answers, items, judge.spec, agreement=outcome.agreement, ceiling=outcome.ceiling,
        objective=outcome.objective, split=split,
        retest=(first, second.answers), padded=(first, longer.answers) if longer else None,
        masses=scale_masses(judged.raw),
        model=judge.model or session.lm.model,
        # cached answers were paid for when they were first requested
        cost_usd=None if (price := price_per_call(session.meter)) is None else price * judged.calls,
    )  # fmt: skip
    return {"judge": digest_of(made_by(judge, session)), **card}


def price_per_call(meter: Meter) -> float | None:
    """Mean dollars per call over the whole run; None if a price is unknown."""
    usage = meter.usage
    return None if usage.unpriced else usage.cost_usd / usage.calls if usage.calls else 0.0


def anchor_set(outcome: JudgeOutcome, splits: LabelSplits, session: Session) -> AnchorSet | None:
    """Anchor set of the result's verdicts on val items, for replays after a change of judge or model.

    The response cache has the verdicts from the search.
    """
    judge, items = outcome.result, splits.val[:_ANCHORS]
    if not judge.spec.graded:
        return None
    with session.phase(outcome.split):
        first = judge_items(judge, items, session, name="anchors", split="val")
        repeat = judge_again(judge, items, session, name="anchors: once more", split="val")
    return freeze(judge, items, first.answers, repeat.answers, session)


def items_of(artifact: str | Path) -> dict[str, list[str]]:
    """Keys of the items that a judge's artifact was made with, by split."""
    splits = json.loads((Path(artifact) / "splits.json").read_text(encoding="utf-8"))
    return dict(splits.get("items") or {})


def save_judge(
    judge: Judge, splits: LabelSplits, run: Run, folder: Path, *, config: Any, parents: Sequence[str],
    result: Mapping[str, Any], report: str, unproven: bool = False,
) -> tuple[Path, list[str]]:  # fmt: skip
    """Writes an artifact: the judge, its manifest and its report.

    Args:
        config: settings of the compile.
        result: the report for its manifest; `report`: the same as Markdown.
    Returns:
        Its folder, and notes on what it lacks.
    """
    raters = {
        person_digest(rating.rater) for name in SPLITS for item in getattr(splits, name) for rating in item.ratings
    }
    for parent in parents:  # the child contains what its parent learned from
        raters |= set(load_artifact(parent).manifest.get("raters", ()))
    manifest = {
        "assay": __version__,
        "dspy": dspy.__version__,
        "kind": "judge",
        "program": qualified_name(judge),
        "version": program_version(judge, None),
        "settings": {"adapter": None, "parameters": {}},
        "judge": asdict(judge.spec),
        "model": config.model_name,
        "api_base": config.api_base or run.lm.recording.address,
        "api_key_env": config.api_key_env,
        **({} if config.thinking is None else {"thinking": config.thinking}),
        "weights": run.lm.recording.backend.weights,
        "labels": {"spec": config.labels, "salt": config.salt, "sizes": splits.sizes()},
        "raters": sorted(raters),
        "parents": list(parents),
        "seed": config.seed,
        "run": run.run_id,
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "result": dict(result),
        **({"unproven": True} if unproven else {}),
    }
    lists = {"ratings": splits.ratings(), "items": splits.keys()}
    earlier = of_earlier_attempt(folder.resolve(), run.recorder, run.store)
    path = save_artifact(folder.resolve(), judge, manifest, splits=lists, report=report, replaces=earlier)
    shown = run.store.labelled_subjects(key_of(judge)) if config.labels == "store" else ()
    run.store.put_artifact(str(path), sorted({*raters, *map(subject_digest, shown)}))
    _, note = loaded_again(path, judge)
    return path, [] if note is None else [note]
