"""`assay judge compile`: `assay.compile_judge`.

Combines labels, model, judge, artifact and reliability card. Does not search prompts:
`assay.optimizers.judges` does.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from assay.commands.groups import InStore, JobOutput, NewArtifact, Reported, Trusting
from assay.commands.judging import (
    MEASURES,
    JudgedReport,
    JudgeSource,
    agreement_table,
    card_lines,
    interval,
    judge_session,
    name_of,
    need_fields,
    rated_items,
    spent_by,
    with_names,
)
from assay.errors import BudgetExceeded, ConfigError
from assay.jobs.groups import (
    Budget,
    Cached,
    FourSplits,
    KeyedJob,
    Preflight,
    ReflectionModel,
    Resumable,
    Threads,
)
from assay.jobs.job_report import EndedReport
from assay.optimizers.settings import JudgeConfig
from assay.support.numbers import counted, figure, signed
from assay.support.options import Count, Flag, Parse, function_of
from assay.support.report import OBJECT, ReportDict, Table, measure_text, shortened

if TYPE_CHECKING:
    from assay.datasets.rows import RowFindings
    from assay.evaluation import Session
    from assay.jobs.opening import Run
    from assay.judges import Item, Judge
    from assay.judges.labels import LabelledItems, LabelSplits
    from assay.judges.quality.drift import AnchorSet
    from assay.optimizers.judges import JudgeOutcome
    from assay.traces.store.sealing import Openings

_THIN = 20  # items of a split below which there is no interval
UNPROVEN = "no proof that it agrees better: the baseline is kept; the unproven judge is stored beside the artifact"


@dataclass(frozen=True, kw_only=True, repr=False)
class JudgeReport(JudgedReport, EndedReport):
    """What `compile_judge` returns.

    Attributes:
        artifact: folder with the result: the compiled judge if gate proved it better, otherwise the one that was given.
        unproven: artifact of the winner on val, if gate did not prove it better; the artifact then has the judge as it
            was.
        objective: agreement measure that was maximised.
        gate: paired gain of the objective on the gate split; null if no candidate was better before it.
        sizes: number of labels in each split.
        ceiling: agreement among the human raters of the items of the card, see [Agreement](#agreement).
        test: agreement of the judge as it was (`baseline`) and of the compiled judge (`compiled`), see
            [Agreement](#agreement), the paired `gain`, and the difference in accuracy (`accuracy_gain`).
        card: the reliability card of the artifact's judge; `split` is that of its items, gate where the test stays
            sealed.
    """

    artifact: Path
    unproven: Path | None
    optimizer: str
    objective: str
    winner: str
    replaces: bool
    gate: Mapping[str, Any] | None
    sizes: Mapping[str, int]
    ceiling: Mapping[str, Any] | None
    test: Mapping[str, Any]
    card: Mapping[str, Any]
    candidates: Sequence[Mapping[str, Any]]
    search_calls: int
    outcome: "JudgeOutcome" = field(metadata=OBJECT)

    @property
    def judge(self) -> "Judge":
        """The result: unless gate proved the compiled judge better, the one that was given."""
        return self.outcome.result

    def _facts(self) -> list[tuple[str, str]]:
        test, measure = self.test, self.objective
        sides = {"baseline": test["baseline"] or {}, "compiled": test["compiled"] or {}, "raters": self.ceiling or {}}
        facts = {
            "artifact": self.artifact, "winner": self.winner, "replaces": self.replaces,
            "measure": measure.replace("_", " "),
            **{name: figure(side.get(measure)) for name, side in sides.items()},
            **({"gain": measure_text(test["gain"], change=True)} if test["gain"] else {}),
            **{key: value for key in ("calls", "cost_usd", "stopped") if (value := getattr(self, key)) is not None},
            **({"alarms": len(self.card["alarms"])} if self.card.get("alarms") else {}),
        }  # fmt: skip
        return [(key, shortened(value)) for key, value in facts.items()]

    def lines(self) -> Iterator[str | Table]:
        from assay.reports.markdown import cost_words, gain_claim, why_sealed
        from assay.support.numbers import calls_text

        before, after, card = self.test["baseline"], self.test["compiled"], self.card
        if before and after:
            yield self._sealed(before, after)
            for prefix, side in (("", after), ("raters' ", self.ceiling or {})):
                for name, reason in sorted(side["undefined"].items()):
                    if not prefix or name != "brier":  # raters give no probabilities
                        yield f"{prefix}{name.replace('_', ' ')} is undefined: {reason}"
            gain, accuracy = self.test["gain"], self.test["accuracy_gain"]
            claim = "" if gain["low"] is None else f": {gain_claim(gain['low'], gain['high'], self.test_openings)}"
            measure = self.objective.replace("_", " ")
            yield f"gain in {measure}: {_gain_text(gain)}{claim}; in accuracy: {_gain_text(accuracy)}"
            yield from card_lines(card, reported=after["undefined"])
            yield from self.opened()
        else:
            if card:
                yield agreement_table(card)
                yield from card_lines(card)
            yield why_sealed(vars(self))
        if self.gate:
            verdict = "the compiled judge replaces the baseline" if self.replaces else UNPROVEN
            yield f"gate ({counted(self.gate['n'], 'items')}): {_gain_text(self.gate)}: {verdict}"
        calls = calls_text(self.calls, self.cached)
        yield f"winner: {self.winner}; LM calls: {calls}, {cost_words(self.cost_usd)}{self.gap}"
        yield from self.limits()
        for name, path in (("artifact", self.artifact), ("unproven judge", self.unproven)):
            if path and path != Path():
                yield f"{name}: {path}"

    def _sealed(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> Table:
        """Agreement on the sealed items."""
        ceiling = self.ceiling or {}
        rows = [
            (
                name.replace("_", " "), figure(before[name]), figure(after[name]), interval(after, name),
                figure(ceiling[name]),
            )
            for name in MEASURES
        ]  # fmt: skip
        return Table(
            title=f"agreement with raters, {after['n']} sealed items",
            header=("", "baseline", "compiled", "95 %", "raters"),
            rows=[*rows, ("unscored", str(before["unscored"]), str(after["unscored"]), "", "")],
            strong=(self.objective.replace("_", " "),),
        )


def _gain_text(gain: Mapping[str, Any]) -> str:
    """A gain with its 95 % interval."""
    if gain["mean"] is None:
        return "undefined"
    ends = "no interval (under 20 items)"
    if gain["low"] is not None:
        ends = f"95 % [{signed(gain['low'])}, {signed(gain['high'])}]"
    return f"{signed(gain['mean'])}, {ends}"


def _labels(value: Any) -> Any:
    """A file or spec, or rows of Python."""
    if isinstance(value, bool | int | float) or (isinstance(value, str) and not value.strip()):
        raise ValueError(f"must be a file of rows, hf:…, 'store', a data frame or a list of rows, not {value!r}")
    return value


class CompileJudge(
    Reported, Trusting, InStore, NewArtifact, JudgeConfig, Resumable, Cached, Preflight, Threads, FourSplits,
    ReflectionModel, KeyedJob,
):  # fmt: skip
    """Compile JUDGE against human labels, and report its agreement on sealed items next to the human ceiling.

    If gate does not prove the compiled judge better, the judge of the report and of the artifact is the one that was
    given, measured on gate; the test items stay sealed, and the unproven judge has an artifact of its own.

    Raises:
        AssayError: what was wrong, which rule, what to do.
        Cancelled: the user stopped the run; `resume` continues it.
    """

    OUTPUT: ClassVar[Any] = JobOutput
    ROLE: ClassVar[str] = "judge"
    RUNS: ClassVar[Sequence[str]] = ()  # an artifact is compiled with the model that is named
    kind: ClassVar[str] = "judge compile"

    judge: JudgeSource = field(kw_only=False)
    """Judge: a shipped name, a YAML file, an artifact's folder, file.py:NAME, or one sentence that says what to judge.
    In Python also a judge."""
    labels: Annotated[Any, Flag(metavar="D", path=True), Parse(_labels)]
    """Human labels: a .jsonl, .json, .csv or .parquet file, hf:…, or 'store'."""
    model: str | None = None
    """Language model of the judge; by default embedded/smollm2-135m."""
    thinking: Budget = None
    """How much the judge may think in a call: a number of tokens, minimal, low, medium, high, xhigh, max, off or auto
    (no limit). It is stored with the compiled judge. A model that cannot keep it is refused."""
    scale: Annotated[Sequence[str], Flag(commas=True)] = ()
    """Labels of the scale from worst to best, separated by commas, for a judge given as a sentence: no,partly,yes."""
    negatives: Count = 0
    """Number of attacks on train items to add to the training set, with the worst label."""
    max_search_calls: Annotated[Count | None, Flag(job=False)] = None
    """Maximum number of LM calls of the search; by default no limit."""

    @property
    def stored_salt(self) -> str | None:
        return self.salt

    @property
    def stored_sizes(self) -> Mapping[str, int]:
        sizes: Mapping[str, int] = self.sizes
        return sizes

    @property
    def endpoints(self) -> dict[str, tuple[str | None, str | None, str | None]]:
        return {"reflection": (self.reflection_model, self.reflection_api_base, self.reflection_api_key_env)}

    def run(self) -> JudgeReport:
        from assay.datasets.memory import data_spec
        from assay.jobs.artifacts import items_of
        from assay.jobs.ending import FinishedRun
        from assay.jobs.loading import compiled_parts
        from assay.jobs.opening import artifact_place, open_run
        from assay.optimizers.prompts.given import title_of
        from assay.programs import program_version
        from assay.traces.store.sealing import known_splits, store_splits

        lm, config = with_names(self, judge=name_of(self.judge), labels=data_spec(self.labels, name="labels"))
        name = title_of(self.optimizer).rpartition(":")[2].lower()
        place = artifact_place(self.store, self.out, f"judge-{name}", resume=self.resume)
        built, progress = self._built(), self.reporter
        parents = compiled_parts(self.judge) if isinstance(self.judge, str) else []
        config = replace(config, salt=self._salt(parents))
        items = rated_items(config.labels, built, self.store, self.rename)
        if isinstance(self.judge, str):
            built = _without_absent_fields(built, items)
        need_fields(built, items)
        of_parents = {key: split for parent in parents for split, keys in items_of(parent).items() for key in keys}
        splits, rows, keys = _split(items, built, config, {**of_parents, **known_splits(self.store)})
        with (
            open_run(config, lm=lm, progress=progress, store=self.store, resume=self.resume) as run,
            judge_session(run, built, progress, config, source=config.judge) as session,
        ):
            run.status = "stopped"  # until the job is complete
            while store_splits(run.store, keys):  # another job has assigned them since they were read
                splits, rows, keys = _split(items, built, config, known_splits(run.store))
            parts = [program_version(built, None), asdict(built.spec)]
            about = {"judge": parts, "ratings": splits.ratings(), "parents": parents}
            finished = FinishedRun(run.store, run.run_id, caps=config.caps, about=about)
            if run.recorder.resumed and (stored := finished.report(progress, out=self.out)) is not None:
                run.ended, run.status = True, "done" if stored["stopped"] is None else "stopped"
                return _as_stored(built, stored)
            notes = [*rows.notes(), *_thin(splits)]
            progress.say(_announced(splits, items))
            for note in notes:
                progress.say(f"warning: {note}")
            missing = [f"{counted(items.gaps, 'labels')} missing in {config.labels}"] if items.gaps else []
            report, anchors = _compiled(built, splits, session, run, config)
            report = replace(report, data=rows.to_dict(), notes=[*report.notes, *rows.notes(), *missing])
            report = _saved(report, anchors, splits, run, config, parents, place)
            finished.keep(report.to_dict())
        return report

    def _built(self) -> "Judge":
        from assay.jobs.loading import load_judge
        from assay.judges import Judge
        from assay.rubrics.criteria import JudgeFields

        if not isinstance(self.judge, str):
            built = self.judge
        else:
            spec = JudgeFields()
            if self.scale:
                spec["scale"] = tuple(self.scale)
            built = load_judge(self.judge, own_model=False, **spec)
        if not isinstance(built, Judge):
            raise ConfigError(
                "a listwise judge cannot be compiled, as labels are of single outputs or pairs; compile the judge of "
                "pairs"
            )
        return built

    def _salt(self, parents: Sequence[str]) -> str:
        """The salt of the splits: that of the parents, if there are any.

        Raises:
            ConfigError: a parent has another salt.
        """
        from assay.deployment import load_artifact
        from assay.traces.store.sealing import resolve_salt

        salts = [(parent, load_artifact(parent).manifest["labels"]["salt"]) for parent in parents]
        salt: str = self.salt or (salts[0][1] if salts else resolve_salt(None, self.store))
        for parent, parent_salt in salts:
            if parent_salt != salt:
                raise ConfigError(
                    f"{parent} was compiled with the salt {parent_salt!r}: what it learned from would fall into the "
                    "new test split. Use that salt"
                )
        return salt


def _compiled(
    judge: "Judge", splits: "LabelSplits", session: "Session", run: "Run", config: CompileJudge
) -> "tuple[JudgeReport, AnchorSet | None]":
    """Preflight, search, gate, test, and the measurements of the result."""
    from assay.jobs.artifacts import anchor_set, judge_card
    from assay.jobs.preflight import preflight_judge
    from assay.optimizers.judges import compile_judge_prompts
    from assay.traces.store.sealing import open_test

    if config.preflight:
        session.progress.say("preflight: each model answers once")
        preflight_judge(judge, splits.val, session, max_cost_usd=config.max_cost_usd)
    opened: list[Openings] = []
    keys = [item.key for item in splits.test]
    outcome = compile_judge_prompts(
        judge, splits, session, config, folder=run.folder,
        on_open=lambda: opened.append(open_test(run.store, run.run_id, data=config.labels, tasks=keys)),
    )  # fmt: skip
    card, anchors = ReportDict("ReliabilityCard", {}), None
    if outcome.judged is not None:
        try:
            card = _shown_card(judge_card(outcome, splits, session))
            anchors = anchor_set(outcome, splits, session)
        except BudgetExceeded as cap:
            outcome.stopped = str(cap)
    if outcome.stopped is None:
        run.status = "done"
    sides = {"baseline": outcome.test_baseline, "compiled": outcome.test_compiled}
    report = JudgeReport(
        artifact=Path(), unproven=None, optimizer=config.optimizer, objective=outcome.objective, winner=outcome.winner,
        replaces=outcome.replaces, gate=outcome.gate, stopped=outcome.stopped, sizes=splits.sizes(),
        ceiling=outcome.ceiling.to_dict() if outcome.ceiling else None,
        test={
            **{name: None if side is None else side.to_dict() for name, side in sides.items()},
            "gain": outcome.gain, "accuracy_gain": outcome.accuracy_gain,
        },
        test_openings=opened[0].to_dict() if opened else None, card=card,
        **(outcome.judged.coverage(outcome.result) if outcome.judged else {}),
        candidates=outcome.candidates, notes=outcome.notes, data={}, search_calls=run.meter.of("search").calls,
        **spent_by(run), outcome=outcome,
    )  # fmt: skip
    return report, anchors


def _saved(
    report: JudgeReport, anchors: "AnchorSet | None", splits: "LabelSplits", run: "Run", config: CompileJudge,
    parents: Sequence[str], place: Path,
) -> JudgeReport:  # fmt: skip
    """Writes the artifact of the result with its card and anchor set, and one of a winner on val that is unproven."""
    from assay.jobs.anchors import ANCHORS
    from assay.jobs.artifacts import save_judge
    from assay.reports.markdown import markdown
    from assay.support.places import write_whole

    outcome, notes, unproven = report.outcome, list(report.notes), None
    data = {key: value for key, value in report.to_dict().items() if key not in ("artifact", "unproven")}
    title = f"A judge, compiled with {report.optimizer} for {report.objective.replace('_', ' ')}"
    text = markdown(report, title=title, about=f"Winner: {report.winner}.")
    made: dict[str, Any] = {"config": config, "parents": parents, "report": text}
    if outcome.unproven:
        beside = place.with_name(f"{place.name}-unproven")
        unmeasured = {**data, "card": {}}  # the card is that of the result
        unproven, lacks = save_judge(outcome.compiled, splits, run, beside, result=unmeasured, unproven=True, **made)
        notes += lacks
    artifact, lacks = save_judge(outcome.result, splits, run, place, result=data, **made)
    if report.card:
        write_whole(artifact / "card.json", json.dumps(report.card, indent=1))
        if anchors is not None:
            anchors.save(artifact / ANCHORS)
    return replace(report, artifact=artifact, unproven=unproven, notes=[*notes, *lacks])


def _as_stored(judge: "Judge", stored: Mapping[str, Any]) -> JudgeReport:
    """The report of a run that had already ended. Its outcome has no answers of single items."""
    from assay.jobs.loading import load_judge
    from assay.judges import Judge
    from assay.optimizers.judges import JudgeOutcome
    from assay.sources.artifact_files import is_artifact

    artifacts = [place for place in (stored["unproven"], stored["artifact"]) if place and is_artifact(place)]
    # without one, those of another machine: a note says so
    compiled = load_judge(artifacts[0], own_model=False) if artifacts else judge
    assert isinstance(compiled, Judge)
    outcome = JudgeOutcome(
        judge, compiled, stored["objective"], stored["winner"], stored["candidates"], gate=stored["gate"],
        replaces=stored["replaces"],
        stopped=stored["stopped"], gain=stored["test"]["gain"], accuracy_gain=stored["test"]["accuracy_gain"],
        notes=stored["notes"],
    )  # fmt: skip
    return JudgeReport.read({**stored, "card": _shown_card(stored["card"])}, {"outcome": outcome})


def _shown_card(card: Mapping[str, Any]) -> ReportDict:
    """A reliability card with a short `repr`: agreement with raters, theirs with each other, alarms."""
    facts: dict[str, Any] = {}
    if measure := card.get("objective"):
        facts = {
            "objective": measure.replace("_", " "),
            "agreement": figure(card["agreement"][measure]),
            "raters": figure(card["ceiling"][measure]),
            "alarms": len(card["alarms"]),
        }
    return ReportDict("ReliabilityCard", card, facts)


def _split(
    items: "Sequence[Item]", judge: "Judge", config: CompileJudge, known: Mapping[str, str]
) -> "tuple[LabelSplits, RowFindings, dict[str, list[str]]]":
    """The splits with the negatives in train; what is to be said of the items; and their keys by split."""
    from assay.judges import split_items
    from assay.judges.quality.audit import negatives
    from assay.traces.store.sealing import DEFAULT_SALT

    splits = split_items(items, salt=config.salt or DEFAULT_SALT, limits=config.sizes, known=known)
    rows, keys = splits.report(), splits.keys()
    if config.negatives:
        splits.train += negatives(splits.train, judge.spec, count=config.negatives)
    return splits, rows, keys


def _announced(splits: "LabelSplits", items: "LabelledItems") -> str:
    raters = {rating.rater for item in items for rating in item.ratings}
    ratings = sum(len(item.ratings) for item in items)
    sizes = ", ".join(f"{name} {count}" for name, count in splits.sizes().items())
    return (
        f"labels: {ratings:,} ratings of {len(items):,} items by {len(raters):,} raters, {items.gaps:,} missing; "
        f"{sizes}; the test items are sealed"
    )


def _thin(splits: "LabelSplits") -> list[str]:
    """Warnings about splits that are too small.

    A hash of its content assigns an item, so few items can fall unevenly.
    """
    from assay.datasets import SPLITS

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


def _without_absent_fields(judge: "Judge", items: "Sequence[Item]") -> "Judge":
    """The judge without inputs that no item has: labels of outputs alone need no input."""
    from assay.judges import Cascade, Jury, PointwiseJudge
    from assay.judges.base import rebuilt
    from assay.judges.questions import is_needed

    if isinstance(judge, Jury):
        return Jury(
            [_without_absent_fields(member, items) for member in judge.members],
            how=judge.how,
            weights=judge.weights,
            calibration=judge.calibration,
        )
    if isinstance(judge, Cascade):
        return Cascade(
            _without_absent_fields(judge.first, items),
            _without_absent_fields(judge.second, items),
            least=judge.least,
            calibration=judge.calibration,
        )
    present = [name for name in judge.shows if is_needed(name) or any(name in item.fields for item in items)]
    if tuple(present) == judge.shows or not present or not isinstance(judge, PointwiseJudge):
        return judge
    seeing = rebuilt(type(judge), {**judge.config, "shows": present})
    for (_, old), (_, new) in zip(judge.named_predictors(), seeing.named_predictors(), strict=True):
        new.demos, new.signature = old.demos, new.signature.with_instructions(old.signature.instructions)
    return seeing


compile_judge = function_of(CompileJudge, "compile_judge")
