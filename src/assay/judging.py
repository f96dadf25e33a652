"""The users' line for judges: `assay.compile_judge`. Joins labels, model, judge, artifact and card."""

import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import dspy

from assay import __version__
from assay.anchors import ANCHORS, freeze
from assay.compilereport import figure, with_interval
from assay.datasets import SPLITS
from assay.datasets.memory import data_spec
from assay.datasets.tasks import content_hash
from assay.deployment import load_artifact, save_artifact
from assay.deployment.artifact import check_loads
from assay.deployment.trust import trusts
from assay.errors import BudgetExceeded, ConfigError, DataError, MissingExtra
from assay.finished import FinishedRun
from assay.given import given_lm, takes
from assay.jobs import CommonConfig, Run, compiled_parts, home_of, load_judge, open_run
from assay.judges import Cascade, Judge, Jury, PointwiseJudge, load_labels, split_items
from assay.judges.agreement import Answers
from assay.judges.audit import negatives, padded
from assay.judges.base import rebuilt
from assay.judges.card import draw_card, reliability_card
from assay.judges.drift import AnchorSet
from assay.judges.labels import Item, LabelSplits, make_items
from assay.judges.loading import AnyJudge
from assay.judges.reading import scale_masses
from assay.models import Meter, sample_scope
from assay.optimizers import Progress, Session
from assay.optimizers.judged import judge_items
from assay.optimizers.judges import JudgeConfig, JudgeOutcome, agreement_rubric, compile_judge_prompts
from assay.preflight import preflight_judge
from assay.programs import program_version
from assay.reprs import Shown
from assay.sourcecode import qualified_name
from assay.traces import Store
from assay.traces.records import person_digest
from assay.traces.sealing import DEFAULT_SALT, Openings, open_test, openings_line, resolve_salt

__all__ = ["JudgeReport", "JudgeRunConfig", "compile_judge", "judge_session", "need_fields", "question_key", "rated_items"]

_THIN = 20  # items of a split under which there is no interval
_RETEST = 30  # test items that are judged a second time
_ANCHORS = 60  # val items whose verdicts are frozen beside a compiled judge


@dataclass(frozen=True, kw_only=True)
class JudgeRunConfig(CommonConfig):
    """Settings of a compile of a judge. `scale` and `kind` are for a judge that is one sentence."""

    kind: str = "judge compile"
    judge: str
    labels: str
    scale: Sequence[str] = ()
    scale_kind: str | None = None
    shows: Sequence[str] = ()
    objective: str | None = None
    demos: int = 2
    negatives: int = 0  # attacks on train items that are added to them, labelled with the worst word

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.negatives < 0:
            raise ConfigError(f"negatives={self.negatives!r} must be at least 0")


@dataclass(repr=False)
class JudgeReport(Shown):
    """What `compile_judge` returns. `to_dict()` is the `--json` object."""

    artifact: Path
    outcome: JudgeOutcome
    card: dict[str, Any]
    meter: Meter
    config: JudgeRunConfig
    sizes: dict[str, int]
    picture: Path | None = None
    anchors: AnchorSet | None = None
    notes: list[str] = field(default_factory=list)
    openings: Openings | None = None  # of the labels' test split
    kept: Mapping[str, Any] | None = None  # of a run that had ended before

    @property
    def judge(self) -> Judge:
        return self.outcome.compiled

    def to_dict(self) -> dict[str, Any]:
        if self.kept is not None:
            return dict(self.kept)
        usage, search, outcome = self.meter.usage, self.meter.of("search"), self.outcome
        return {
            "artifact": str(self.artifact),
            "picture": str(self.picture) if self.picture else None,
            "optimizer": self.config.optimizer,
            "objective": outcome.objective,
            "winner": outcome.winner,
            "replaces": outcome.replaces,
            "gate": outcome.gate,
            "stopped": outcome.stopped,
            "sizes": self.sizes,
            "ceiling": outcome.ceiling.to_dict() if outcome.ceiling else None,
            "test": {
                "baseline": outcome.test_baseline.to_dict() if outcome.test_baseline else None,
                "compiled": outcome.test_compiled.to_dict() if outcome.test_compiled else None,
                "gain": outcome.gain,
                "accuracy_gain": outcome.accuracy_gain,
            },
            "test_openings": self.openings.to_dict() if self.openings else None,
            "card": self.card,
            **(outcome.answers["compiled"].coverage(outcome.compiled) if outcome.answers else {}),
            "candidates": outcome.candidates,
            "notes": [*outcome.notes, *self.notes],
            "search_calls": search.calls,
            "calls": usage.calls,
            "cached": usage.cached,
            "repeated_calls": usage.repeated,
            "tokens": usage.tokens,
            "cost_usd": usage.known_cost_usd,
        }


@trusts
@takes(JudgeRunConfig)
def compile_judge(
    judge: str | Judge,
    *,
    labels: Any,
    lm: dspy.LM | None = None,
    out: str | Path | None = None,
    store: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> JudgeReport:
    """Compiles a judge against people's labels and reports it on sealed items, beside the human ceiling.

    Args:
        judge: a YAML file, an artifact's folder, `file.py:NAME`, one sentence (with `scale=`), or a judge.
        labels: a source of ratings, see `assay.judges.load_labels`.
        out: folder of the artifact; by default `.assay/artifacts/judge-OPTIMIZER`.
        options: the fields of `JudgeRunConfig`.
    Raises:
        AssayError: what was wrong, which rule, what to do.
        Cancelled: the user stopped the run; call again with `resume=True`.
    """
    name = judge if isinstance(judge, str) else judge.spec.text
    lm, labels = given_lm(lm, options), data_spec(labels)
    config = JudgeRunConfig(judge=name, labels=labels, **({"model": lm.model} if lm is not None else {}), **options)
    settings = JudgeConfig(optimizer=config.optimizer, objective=config.objective, demos=config.demos)
    built, shown = _built(judge, config), progress or Progress()
    parents = compiled_parts(judge) if isinstance(judge, str) else []
    salts = [(parent, load_artifact(parent).manifest["labels"]["salt"]) for parent in parents]
    config = replace(config, salt=config.salt or resolve_salt(None, store) if not salts else config.salt or salts[0][1])
    for parent, salt in salts:
        if salt != config.salt:
            raise ConfigError(f"{parent} was compiled with the salt {salt!r}: what it learned from would fall into the new test split. Use that salt")
    items = rated_items(labels, built, config.rename, store)
    if isinstance(judge, str) and not config.shows:
        built = _seeing(built, items)
    need_fields(built, items)
    splits = split_items(items, salt=config.salt or DEFAULT_SALT, limits=config.sizes)
    if config.negatives:
        splits.train += negatives(splits.train, built.spec, count=config.negatives)
    with open_run(config, lm=lm, progress=shown, store=store, resume=resume) as run:
        with judge_session(run, built, shown, config) as session:
            run.status = "stopped"  # until all of it is done
            finished = FinishedRun(run.folder, caps=config.caps, about={"judge": _about(built), "ratings": splits.ratings(), "parents": parents})
            if run.recorder.resumed and (kept := finished.report(shown, out=out)) is not None:
                run.ended, run.status = True, "done" if kept["stopped"] is None else "stopped"
                return _as_kept(built, run, config, kept)
            _announce(splits, items, shown)
            if config.preflight:
                shown.say("preflight: each model answers once")
                preflight_judge(built, splits.val, session, max_cost_usd=config.max_cost_usd)
            opened: list[Openings] = []
            hashes = [item.content_hash for item in splits.test]
            outcome = compile_judge_prompts(
                built, splits, session, settings, folder=run.folder,
                on_open=lambda: opened.append(open_test(run.store, run.run_id, data=labels, tasks=hashes)),
            )  # fmt: skip
            report = JudgeReport(Path(), outcome, {}, run.meter, config, splits.sizes(), openings=next(iter(opened), None))
            if outcome.test_compiled is not None:
                try:
                    report.card = _card(outcome, splits, session)
                    report.anchors = _anchors(outcome, splits, session)
                except BudgetExceeded as cap:
                    outcome.stopped = str(cap)
            if outcome.stopped is None:
                run.status = "done"
        name = f"judge-{config.optimizer.rpartition(':')[2].lower()}"
        _save(report, splits, run, parents, Path(out) if out else home_of(store) / "artifacts" / name)
        finished.keep(report.to_dict())
    return report


def _about(judge: Judge) -> list[Any]:
    return [program_version(judge, None), asdict(judge.spec)]


def _as_kept(judge: Judge, run: Run, config: JudgeRunConfig, kept: Mapping[str, Any]) -> JudgeReport:
    """The report of a run that had ended. Its outcome has no answers of single items."""
    compiled = load_judge(kept["artifact"])
    assert isinstance(compiled, Judge)
    outcome = JudgeOutcome(
        judge, compiled, kept["objective"], kept["winner"], kept["candidates"], gate=kept["gate"], replaces=kept["replaces"],
        stopped=kept["stopped"], gain=kept["test"]["gain"], accuracy_gain=kept["test"]["accuracy_gain"], notes=kept["notes"],
    )  # fmt: skip
    picture = Path(kept["picture"]) if kept["picture"] else None
    return JudgeReport(Path(kept["artifact"]), outcome, kept["card"], run.meter, config, kept["sizes"], picture=picture, kept=kept)


def question_key(judge: AnyJudge) -> str:
    """What labels in the store are kept under: a hash of the question and its scale."""
    return content_hash({"text": judge.spec.text, "scale": list(judge.spec.scale)})[:16]


def rated_items(labels: str, judge: Judge, rename: Mapping[str, str], store: str | Path | None) -> list[Item]:
    """Items with their ratings from a source, or, where it is `store`, from what people said with `assay judge label`."""
    if labels != "store":
        return load_labels(labels, labels=judge.labels, rename=rename, shows=judge.shows)
    with Store(store) as opened:
        rows = [(f"label {at + 1} of the store", row) for at, row in enumerate(opened.labels(question_key(judge)))]
    if not rows:
        raise DataError("the store has no labels for this judge's question and scale; collect some with assay judge label")
    return make_items(rows, labels=judge.labels, spec="the store", shows=judge.shows)


def _built(judge: str | Judge, config: JudgeRunConfig) -> Judge:
    if not isinstance(judge, str):
        return judge
    given = {"scale": tuple(config.scale or ()), "kind": config.scale_kind}
    spec: dict[str, Any] = {name: value for name, value in given.items() if value}
    built = load_judge(judge, **spec)
    if not isinstance(built, Judge):
        raise ConfigError("a judge of lists has no labels of one output or of a pair to be compiled against; compile the judge of pairs")
    return _shown(built, config.shows) if config.shows else built


def _shown(judge: Judge, shows: Sequence[str]) -> Judge:
    """The judge seeing other fields; a jury and a cascade see what their members do."""
    if not isinstance(judge, PointwiseJudge):
        raise ConfigError(f"--shows goes with a judge that asks itself; say it in the files of this {type(judge).__name__.lower()}'s members")
    seeing = rebuilt(type(judge), {**judge.config, "shows": list(shows)})
    for (_, old), (_, new) in zip(judge.named_predictors(), seeing.named_predictors(), strict=True):
        new.demos, new.signature = old.demos, new.signature.with_instructions(old.signature.instructions)
    return seeing


def _seeing(judge: Judge, items: Sequence[Item]) -> Judge:
    """A judge without what no item has: labels of outputs alone need no input."""
    if isinstance(judge, Jury):
        return Jury([_seeing(member, items) for member in judge.members], how=judge.how, weights=judge.weights, calibration=judge.calibration)
    if isinstance(judge, Cascade):
        return Cascade(_seeing(judge.first, items), _seeing(judge.second, items), least=judge.least, calibration=judge.calibration)
    kept = [name for name in judge.shows if any(name in item.shown for item in items)]
    return judge if tuple(kept) == judge.shows or not kept or not isinstance(judge, PointwiseJudge) else _shown(judge, kept)


def need_fields(judge: Judge, items: Sequence[Item], *, optional: Collection[str] = ()) -> None:
    """Raises `ConfigError` where no item has something that the judge sees."""
    for name in judge.shows:
        if name not in optional and not any(name in item.shown for item in items):
            raise ConfigError(f"the judge sees {list(judge.shows)}, but no item has {name!r}; they have {sorted(items[0].shown)}. Rename a column")


def _program(judge: Judge) -> str:
    return qualified_name(judge)


@contextmanager
def judge_session(run: Run, judge: Judge, progress: Progress, config: CommonConfig) -> Iterator[Session]:
    """What `judge_items` needs of an open run."""
    yield Session(
        lm=run.lm, rubric=agreement_rubric(judge.spec), recorder=run.recorder, meter=run.meter, program_name=_program(judge),
        source="judge", seed=config.seed, threads=run.threads, progress=progress, prompt_lm=run.reflection,
        task_timeout=config.task_timeout,
    )  # fmt: skip


def _announce(splits: LabelSplits, items: Sequence[Item], progress: Progress) -> None:
    raters = {rating.rater for item in items for rating in item.ratings}
    ratings = sum(len(item.ratings) for item in items)
    sizes = ", ".join(f"{name} {count}" for name, count in splits.sizes().items())
    progress.say(f"labels: {ratings:,} ratings of {len(items):,} items by {len(raters):,} raters; {sizes}; the test items are sealed")
    for warning in _thin(splits):
        progress.say(f"warning: {warning}")


def _thin(splits: LabelSplits) -> list[str]:
    """What a split is too small to show: the place of an item is decided by its content, so few items may fall unevenly."""
    found = []
    labels = {item.modes[0] for name in SPLITS for item in getattr(splits, name)}
    for name in SPLITS:
        items = getattr(splits, name)
        if missing := sorted(labels - {item.modes[0] for item in items}):
            found.append(f"{name} has no item that people called {', '.join(missing)}; label more, or name splits in a field 'split'")
        elif name != "train" and len(items) < _THIN:
            found.append(f"{name} has {len(items)} items, and under {_THIN} nothing can be claimed; label more")
    return found


def _card(outcome: JudgeOutcome, splits: LabelSplits, session: Session) -> dict[str, Any]:
    """The compiled judge's card on the sealed items; some of them are judged a second time."""
    judged, again = outcome.answers["compiled"], splits.test[:_RETEST]
    with session.phase("test"), sample_scope(1):
        second = judge_items(outcome.compiled, again, session, name="test: once more", split="test")
    first = Answers(judged.answers.verdicts[: len(again)], judged.answers.places[: len(again)])
    longer = None
    if all({"output", "output_b"} & set(item.shown) for item in again):
        with session.phase("test"):
            filled = [replace(item, shown=padded(item.shown)) for item in again]
            longer = judge_items(outcome.compiled, filled, session, name="test: with words that say nothing", split="test")
    assert outcome.test_compiled is not None
    assert outcome.ceiling is not None
    return reliability_card(
        judged.answers, splits.test, outcome.compiled.spec, found=outcome.test_compiled, people=outcome.ceiling, objective=outcome.objective,
        retest=(first, second.answers), padded=(first, longer.answers) if longer else None, masses=scale_masses(judged.raw),
        model=outcome.compiled.model or session.lm.model,
        # what came from the cache was paid for when it was asked first
        cost_usd=None if (price := _price(session)) is None else price * judged.asked,
    )  # fmt: skip


def _price(session: Session) -> float | None:
    """Dollars a call to the model, over the whole run; None where a price is not known."""
    usage = session.meter.usage
    return None if usage.unpriced else usage.cost_usd / usage.calls if usage.calls else 0.0


def _anchors(outcome: JudgeOutcome, splits: LabelSplits, session: Session) -> AnchorSet | None:
    """What the compiled judge says of val items, frozen: replayed once something that decides its verdicts changes. What was
    said of them while searching comes from the cache."""
    if not outcome.compiled.spec.graded:
        return None
    items = splits.val[:_ANCHORS]
    with session.phase("test"):
        first = judge_items(outcome.compiled, items, session, name="anchors", split="val")
        with sample_scope(1):
            again = judge_items(outcome.compiled, items[:_RETEST], session, name="anchors: once more", split="val")
    return freeze(outcome.compiled, items, first.answers, again.answers, session)


def _save(report: JudgeReport, splits: LabelSplits, run: Run, parents: Sequence[str], folder: Path) -> None:
    config, judge = report.config, report.outcome.compiled
    data = {key: value for key, value in report.to_dict().items() if key not in ("artifact", "picture")}
    raters = {person_digest(rating.rater) for name in SPLITS for item in getattr(splits, name) for rating in item.ratings}
    for parent in parents:  # what a parent learned from is in its child
        raters |= set(load_artifact(parent).manifest.get("raters", ()))
    manifest = {
        "assay": __version__,
        "dspy": dspy.__version__,
        "kind": "judge",
        "program": _program(judge),
        "version": program_version(judge, None),
        "settings": {"adapter": None, "parameters": {}},
        "judge": asdict(judge.spec),
        "model": config.model,
        "api_base": config.api_base or run.lm.recording.address,
        "api_key_env": config.api_key_env,
        "weights": run.lm.recording.backend.weights,
        "labels": {"spec": config.labels, "salt": config.salt, "sizes": splits.sizes()},
        "raters": sorted(raters),
        "parents": list(parents),
        "seed": config.seed,
        "run": run.run_id,
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "result": data,
    }
    report.artifact = save_artifact(folder.resolve(), judge, manifest, splits={"ratings": splits.ratings()}, report=_markdown(data))
    run.store.put_artifact(str(report.artifact), sorted(raters))
    if (note := check_loads(report.artifact, judge)) is not None:
        report.notes.append(note)
    if report.card:
        (report.artifact / "card.json").write_text(json.dumps(report.card, indent=1))
        if report.anchors is not None:
            report.anchors.save(report.artifact / ANCHORS)
        try:
            report.picture = draw_card(report.card, report.artifact / "card.png")
        except MissingExtra as error:
            report.notes.append(f"no picture of the card: {error}")


def _markdown(data: dict[str, Any]) -> str:
    lines = [f"# A judge, compiled with {data['optimizer']} for {data['objective']}", "", f"Winner: {data['winner']}.", ""]
    before, after, people = data["test"]["baseline"], data["test"]["compiled"], data["ceiling"]
    if before and after:
        lines += ["| sealed test | baseline | compiled | people |", "|---|---|---|---|"]
        lines += [
            f"| {name} | {figure(before[name])} | {figure(after[name])} | {figure(people[name])} |"
            for name in ("accuracy", "kappa", "weighted_kappa", "alpha", "spearman")
        ]
        verdict = "the compiled judge replaces its parent" if data["replaces"] else "no proof that it agrees better: keep its parent"
        lines += ["", f"Gain in {data['objective']}, paired: {with_interval(data['test']['gain'], 'items')}. Gate: {verdict}."]
        lines += ["", openings_line(data["test_openings"])]
    return "\n".join(lines) + "\n"
