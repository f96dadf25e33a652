"""The users' lines for judges at work: audit one, score rows with it, replay its anchors, collect people's labels."""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import dspy
import numpy as np

from assay.anchors import ANCHORS, items_of, replay, replay_changed, values_of
from assay.anchors import freeze as freeze_set
from assay.datasets.sources import iter_rows
from assay.datasets.splits import renamed
from assay.datasets.tasks import content_hash
from assay.deployment.artifact import is_artifact, with_model_of
from assay.deployment.trust import trusts
from assay.errors import BudgetExceeded, ConfigError, ModelError
from assay.given import given_lm, takes
from assay.jobs import CommonConfig, load_judge, open_run
from assay.judges import Item, Judge, ListwiseJudge, PointwiseJudge
from assay.judges.attacks import load_attacks
from assay.judges.audit import BASES, PASS_AT, asks_for_quality, assess, audit_cases, audit_items, bases_of, load_bases, not_tried, plain_rows
from assay.judges.deciding import one_of, output_of
from assay.judges.drift import AnchorSet
from assay.judges.inference import FEWEST_PEOPLE, corrected_mean
from assay.judges.labels import make_items
from assay.judges.loading import AnyJudge
from assay.judging import judge_session, need_fields, question_key, rated_items
from assay.models import sample_scope
from assay.models.scope import refusals_end_at_once
from assay.optimizers import Progress, Session, mean_interval
from assay.optimizers.judged import Judged, judge_items
from assay.preflight import check_prices, preflight_judge
from assay.rubrics import Rubric
from assay.scrubbing import results
from assay.traces import Rollout, Store
from assay.traces.records import person_digest

__all__ = ["ToLabel", "audit_judge", "corrected_by_people", "forget_rater", "replay_anchors", "score_rows", "to_label"]

_SHOWN_REASONS = 3
_OPTIONAL = ("task_input",)  # outputs alone can be judged
_FEWEST = 5  # verdicts under which no interval is claimed


@dataclass(frozen=True, kw_only=True)
class _UseConfig(CommonConfig):
    judge: str
    data: str = ""
    scale: Sequence[str] | None = None


def _judge(judge: str | AnyJudge, scale: Sequence[str] | None = None, *, lists: bool = False) -> Judge:
    """The judge; `scale` goes with one that is given as a sentence; with `lists` a judge of lists is asked about lists of two."""
    if scale and not isinstance(judge, str):
        raise ConfigError("scale goes with a judge that is given as a sentence; this one has its own")
    spec: dict[str, Any] = {"scale": tuple(scale)} if scale else {}
    built = load_judge(judge, **spec) if isinstance(judge, str) else judge
    if lists and isinstance(built, ListwiseJudge):
        return built.as_pairs()
    if not isinstance(built, Judge):
        raise ConfigError("a judge of lists grades whole groups; use it in a rubric with score_group")
    return built


@contextmanager
def _at_work(
    kind: str, judge: str | AnyJudge, lm: dspy.LM | None, progress: Progress, store: Any, resume: bool, data: str, options: Any
) -> Iterator[tuple[Judge, Session]]:
    built, name = _judge(judge, options.get("scale"), lists=kind == "audit"), judge if isinstance(judge, str) else judge.spec.text
    lm = given_lm(lm, options)
    if lm is None and options.get("model") is None and isinstance(judge, str) and is_artifact(judge):
        options = with_model_of(judge, options)
    options = {key: value for key, value in options.items() if value is not None}
    config = _UseConfig(kind=f"judge {kind}", judge=name, data=data, **({"model": lm.model} if lm is not None else {}), **options)
    with (
        open_run(config, lm=lm, progress=progress, store=store, resume=resume) as run,
        judge_session(run, built, progress, config) as session,
        session.phase(kind),
    ):
        check_prices(session, config.max_cost_usd, judge=built)
        yield built, session


def _preflight(judge: Judge, items: Sequence[Item], session: Session, options: Mapping[str, Any]) -> None:
    """Each model of the judge answers once, before all items wait for it one after the other; unless the settings turn it off."""
    whole = [item for item in items if all(name in item.shown or name in _OPTIONAL for name in judge.shows)]
    if options.get("preflight", True) and whole:
        session.progress.say("preflight: each model answers once")
        preflight_judge(judge, whole, session, max_cost_usd=options.get("max_cost_usd"))


@trusts
@takes(_UseConfig)
def audit_judge(
    judge: str | AnyJudge, *, cases: str | None = None, labels: str | None = None, attack: str | None = None, profile: str | None = None,
    pass_at: float = PASS_AT,
    lm: dspy.LM | None = None, store: str | Path | None = None, progress: Progress | None = None, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Tries the ways judges are known to fail, and says which of them this judge withstands.

    Args:
        cases: a dataset with `good` and `bad` outputs (and `input`) to make the attacks from; shipped ones where None.
        attack: a dataset of attacks of one's own to try as well: rows with `text` (holding `{output}`, else added after it) and `name`.
        labels: ratings instead, whose best and worst outputs are taken; `store` for those of the store.
        profile: `quality` or `property`, see `assay.judges.audit.audit_cases`. Where None it is `property` for a nominal scale, and for the
            shipped cases of a judge whose question does not ask whether an output is right or good; else `quality`.
        pass_at: share of an attack's cases that must come out right, in [0, 1].
    Returns:
        `passed`, `notes` on the cases that were run, and
        by attack the number of cases, how many came out right, and what was said to some of the others.
    Raises:
        AssayError: what was wrong, which rule, what to do; no verdict at all is a `ModelError`.
    """
    if not 0 <= pass_at <= 1:
        raise ConfigError(f"pass_at={pass_at!r} must be between 0 and 1")
    if cases and labels:
        raise ConfigError("an audit takes its cases from cases=… or from labels=…, not from both")
    built, shown = _judge(judge, options.get("scale"), lists=True), progress or Progress()
    bases = load_bases(iter_rows(cases)) if cases else bases_of(rated_items(labels, built, {}, store), built.spec) if labels else BASES
    own = load_attacks(iter_rows(attack)) if attack else []
    source = "cases" if cases else "labels" if labels else "shipped"
    unasked = source == "shipped" and not asks_for_quality(built.spec)
    kind = profile or ("property" if built.spec.kind == "nominal" or unasked else "quality")
    pack = audit_cases(built, bases, attacks=own, profile=kind)
    with _at_work("audit", judge, lm, shown, store, False, cases or labels or "", options) as (judge_, session):
        items = audit_items(pack, judge_)
        need_fields(judge_, items)
        with refusals_end_at_once():  # a pack has hundreds of verdicts: waiting for a server that is not there takes minutes
            judged = judge_items(judge_, items, session, name="audit", split="audit")
        if judged.unscored == len(items):
            raise ModelError(f"the judge gave no verdict at all: {next((r for r in judged.reasons if r), 'no reason was given')}")
        found = assess(pack, items, judged.answers, judge_, pass_at=pass_at)
        return {
            **found,
            "profile": kind,
            "cases": {"source": source, "n": len(bases)},
            "notes": _audit_notes(source, len(bases), kind, profile),
            "not_tried": not_tried(pack, profile=kind, attacks=own),
            **judged.coverage(judge_, plain_rows(pack, items)),
            "verdicts": len(items),
            "unscored": judged.unscored,
            **_spent(session),
        }


def _audit_notes(source: str, count: int, kind: str, asked: str | None) -> list[str]:
    """Which cases an audit ran, and which do not apply to the judge."""
    made = {
        "shipped": f"{count} shipped questions, each with a right and a wrong answer",
        "cases": f"{count} good and bad outputs of the given cases",
        "labels": f"{count} pairs of the outputs that the labels call best and worst",
    }[source]
    tried = "all attacks" if kind == "quality" else "attacks that must not change a verdict"
    notes = [f"cases: {made}; {tried} (profile {kind})"]
    if source == "shipped" and kind == "property":
        why = "its question does not ask whether an output is right" if asked is None else "the profile is property"
        notes.append(
            f"cases about correctness do not apply to this judge ({why}) and were left out, so whether it tells good from bad was not tried. "
            "Give good and bad outputs for its own question with cases=… or labels=…"
            + ("; profile='quality' runs all cases" if asked is None else "")
        )
    return notes


def _spent(session: Session) -> dict[str, Any]:
    usage = session.meter.usage
    return {"calls": usage.calls, "cached": usage.cached, "repeated_calls": usage.repeated, "tokens": usage.tokens, "cost_usd": usage.known_cost_usd}


@trusts
@takes(_UseConfig)
def score_rows(
    judge: str | Judge, *, data: str, out: str | Path | None = None, lm: dspy.LM | None = None, store: str | Path | None = None,
    resume: bool = False, progress: Progress | None = None, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Judges every item of a dataset, and reports the mean value with a 95 % interval. Rows that show the same thing, such as the
    ratings of several people, are one item: it is judged and counted once.

    Rows are those of a labels file; labels that stand beside some of them correct the mean (prediction-powered inference).

    Args:
        out: a JSONL file for one line an item: what was shown, `verdict`, `value`, `confidence`, or `reason` where there is none.
        options: `preflight=False` skips the check that each model of the judge answers.
    Raises:
        ModelError: a model of the judge did not answer.
    """
    rename: Mapping[str, str] = options.get("rename") or {}
    built, shown = _judge(judge, options.get("scale")), progress or Progress()
    rows = [(where, renamed(row, rename, where) if rename else row) for where, row in iter_rows(data)]
    items = make_items(rows, labels=built.labels, spec=data, unrated=True, shows=built.shows)
    need_fields(built, items, optional=_OPTIONAL)
    if not built.spec.graded:
        shown.say("note: the words of this scale have no grades, so there is no mean value")
    with _at_work("score", judge, lm, shown, store, resume, data, options) as (judge_, session):
        try:
            _preflight(judge_, items, session, options)
            alarms = replay_changed(judge, judge_, session)
            judged = judge_items(judge_, items, session, name="score")
        except BudgetExceeded as cap:
            raise BudgetExceeded(f"{cap}; add --resume with a higher cap to go on from here") from None
        spent = _spent(session)
    values = values_of(judged.answers, judge_)
    if out is not None:
        _write(Path(out), items, judged, values)
    reasons = list(dict.fromkeys(reason for reason in judged.reasons if reason))
    return {
        "n": len(items), "rows": len(rows), "unscored": judged.unscored, "why_unscored": reasons[:_SHOWN_REASONS],
        **judged.coverage(judge_), "out": str(out) if out else None,
        "labelled": sum(bool(item.ratings) for item in items), "alarms": alarms,
        "verdicts": {label: judged.answers.verdicts.count(label) for label in judge_.labels}, **_means(items, values, judge_), **spent,
    }  # fmt: skip


def _means(items: Sequence[Item], values: Sequence[float | None], judge: Judge) -> dict[str, Any]:
    scored = [value for value in values if value is not None]
    if not scored:
        return {"mean": None, "interval": None, "corrected": None}
    people, beside, others = [], [], []
    for item, value in zip(items, values, strict=True):
        if value is None:
            continue
        if item.ratings:
            people.append(math.fsum(judge.spec.grade(label) * share for label, share in item.shares.items()))
            beside.append(value)
        else:
            others.append(value)
    corrected = asdict(corrected_mean(people, beside, others)) if len(people) >= FEWEST_PEOPLE and len(others) > 1 else None
    return {"mean": float(np.mean(scored)), "interval": list(mean_interval(scored)) if len(scored) >= _FEWEST else None, "corrected": corrected}


def _write(path: Path, items: Sequence[Item], judged: Judged, values: Sequence[float | None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    answers = judged.answers
    with path.open("w", encoding="utf-8") as file:
        for at, item in enumerate(items):
            given, verdict = answers.probabilities[at], answers.verdicts[at]
            sure = given[verdict] if given and verdict else None
            said = {"verdict": verdict, "value": values[at], "confidence": sure, "reason": judged.reasons[at] or None}
            line = {"item_id": item.id, **item.shown, **said}
            file.write(json.dumps(results(line), ensure_ascii=False, default=str) + "\n")


@trusts
@takes(_UseConfig)
def replay_anchors(
    judge: str | Judge, *, anchors: str | Path | None = None, freeze: str | None = None, lm: dspy.LM | None = None,
    store: str | Path | None = None, progress: Progress | None = None, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Freezes what a judge says of a set of things, or replays them and says whether it still says so. The model is always
    asked: an answer from the cache could not have drifted.

    Args:
        anchors: the JSON file of the frozen set; a compiled judge's own where None.
        freeze: a dataset to freeze from (rows as for `score_rows`); None replays what is there.
    Returns:
        `frozen`: how many, or `alarms`, `changed`, `cusum`, `psi` and `mean_difference`, see `assay.judges.drift.compare`.
    """
    if anchors is None:
        if not isinstance(judge, str) or not is_artifact(judge):
            raise ConfigError("only a compiled judge has anchors of its own; name a file with --anchors")
        anchors = Path(judge) / ANCHORS
    path, shown, options = Path(anchors), progress or Progress(), {**options, "cache": False}
    frozen = None if freeze else AnchorSet.load(path)
    if freeze and path.exists():
        raise ConfigError(f"{path} is there already; an anchor set is frozen once. Delete it, or name another file")
    built = _judge(judge, options.get("scale"))
    if not built.spec.graded:
        raise ConfigError("drift is measured on values, and the words of this judge's scale have no grades")
    with _at_work("drift", judge, lm, shown, store, False, freeze or str(path), options) as (judge_, session):
        if frozen is not None:
            _preflight(judge_, items_of(frozen), session, options)
            return {**replay(judge_, frozen, session), **_spent(session)}
        items = make_items(iter_rows(str(freeze)), labels=judge_.labels, spec=str(freeze), unrated=True, shows=judge_.shows)
        need_fields(judge_, items, optional=_OPTIONAL)
        _preflight(judge_, items, session, options)
        judged = judge_items(judge_, items, session, name="freeze")
        first = judged.answers
        with sample_scope(1):
            again = judge_items(judge_, items, session, name="freeze: once more").answers
        kept = freeze_set(judge_, items, first, again, session)
        kept.save(path)
        return {"frozen": len(kept.anchors), "anchors": str(path), "noise": kept.noise, **judged.coverage(judge_), **_spent(session)}


@dataclass(frozen=True)
class ToLabel:
    """One thing for a person to judge."""

    item_id: str
    shown: Mapping[str, Any]
    rollout_id: str


def to_label(
    judge: str | AnyJudge, store: Store, *, rater: str, run_id: str | None = None, task_id: str | None = None, limit: int = 20, seed: int = 0,
    scale: Sequence[str] | None = None,
) -> tuple[AnyJudge, list[ToLabel]]:  # fmt: skip
    """What this person has not judged yet of the store's rollouts, as the judge would see it; mixed by the seed.

    Rollouts of the sealed test split, of judges, and without an answer are left out; a pairwise judge gets pairs of
    different outputs of one task.
    """
    spec: dict[str, Any] = {"scale": tuple(scale)} if scale else {}
    built = load_judge(judge, **spec) if isinstance(judge, str) else judge
    if isinstance(built, ListwiseJudge):
        raise ConfigError("a judge of lists has no labels of its own; label pairs, or single outputs")
    known = {row["item_id"] for row in store.labels(question_key(built)) if row["rater"] == rater}
    seen: dict[str, ToLabel] = {}
    rollouts = (
        r
        for r in store.rollouts(run_id=run_id, task_id=task_id)
        if r.prediction and r.source != "judge" and r.split != "test" and r.task_type != "verdict"
    )
    for entry in _pairs(rollouts) if built.compares else (_single(rollout, built) for rollout in rollouts):
        if entry is not None and entry.item_id not in known:
            seen.setdefault(entry.item_id, entry)
    order = np.random.default_rng(seed).permutation(len(seen))
    waiting = list(seen.values())
    return built, [waiting[at] for at in order[:limit]]


def _single(rollout: Rollout, judge: AnyJudge) -> ToLabel | None:
    """A rollout as the judge would see it; None where it has nothing that was answered, or not all that the judge sees."""
    prediction = rollout.prediction or {}
    seen = {**prediction, **rollout.inputs, "task_input": one_of(rollout.inputs), "output": output_of(prediction)}
    names = getattr(judge, "shows", ("task_input", "output"))
    if seen["output"] in ("", {}, None) or any(name not in seen for name in names):
        return None
    shown = {name: seen[name] for name in names}
    return ToLabel(content_hash(shown)[:16], shown, rollout.id)


def _pairs(rollouts: Iterator[Rollout]) -> Iterator[ToLabel]:
    groups: dict[str, dict[str, Rollout]] = defaultdict(dict)
    for rollout in rollouts:
        groups[json.dumps(rollout.inputs, sort_keys=True, default=str)].setdefault(str(output_of(rollout.prediction or {})), rollout)
    for group in groups.values():
        members = sorted(
            group.values(), key=lambda r: content_hash({"output": output_of(r.prediction or {})})
        )  # neither the newest nor the longest first
        for first, second in zip(members[::2], members[1::2], strict=False):
            shown = {
                "task_input": one_of(first.inputs),
                "output_a": output_of(first.prediction or {}),
                "output_b": output_of(second.prediction or {}),
            }
            yield ToLabel(content_hash(shown)[:16], shown, first.id)


def forget_rater(rater: str, *, store: str | Path | None = None) -> dict[str, Any]:
    """Removes a person's labels from the store, and names every judge that was compiled from labels of that name."""
    with Store(store) as opened:
        return {"rater": rater, "removed": opened.forget_rater(rater), "judges": opened.artifacts_of(person_digest(rater))}


def corrected_by_people(rubric: Rubric, store: Store, run_id: str) -> dict[str, dict[str, Any]]:
    """Means of a run's judge criteria, corrected by what people said of some of its outputs with `assay judge label`.

    By criterion, `assay.judges.inference.CorrectedMean` as a mapping. A criterion with fewer than 20 such outputs, or fewer than
    two without a label, is left out.
    """
    asked = {c.name: load_judge(c.judge.use) if c.judge.use else PointwiseJudge(c.judge) for c in rubric.finals if c.judge is not None}
    said: dict[str, dict[str, list[float]]] = {}
    for name, judge in asked.items():
        labels: dict[str, list[float]] = defaultdict(list)
        for row in store.labels(question_key(judge)) if judge.spec.graded else ():
            labels[row["item_id"]].append(judge.spec.grade(row["label"]))
        if len(labels) >= FEWEST_PEOPLE:
            said[name] = labels
    if not said:
        return {}
    columns: dict[str, tuple[list[float], list[float], list[float]]] = {name: ([], [], []) for name in said}
    latest: dict[str, Rollout] = {}
    for rollout in store.rollouts(run_id=run_id):  # the newest come first
        if rollout.source != "judge" and rollout.prediction:
            latest.setdefault(rollout.task_id, rollout)
    for rollout in latest.values():
        grades = {verdict.criterion: verdict.grade for verdict in rollout.verdicts if verdict.grade is not None}
        for name in columns.keys() & grades.keys():
            people, beside, others = columns[name]
            entry = _single(rollout, asked[name])
            if entry is not None and entry.item_id in said[name]:
                people.append(float(np.mean(said[name][entry.item_id])))
                beside.append(grades[name])
            else:
                others.append(grades[name])
    return {
        name: asdict(corrected_mean(*found)) for name, found in columns.items() if len(found[0]) >= FEWEST_PEOPLE and len(found[2]) > 1
    }  # fmt: skip
