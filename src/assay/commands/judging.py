"""What the commands that call one judge share: settings, the judge with its session, and figures of the report."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias, TypeVar

from assay.commands.groups import InStore, Reported, Trusting
from assay.errors import ConfigError, DataError
from assay.jobs.groups import Budget, KeyedJob, Threads
from assay.support.numbers import calls_text, figure, signed
from assay.support.options import Flag, Parse
from assay.support.report import Report, Table

if TYPE_CHECKING:
    import dspy

    from assay.evaluation import Progress, Session
    from assay.jobs.opening import Run
    from assay.judges import Item, Judge
    from assay.judges.labels import LabelledItems

OPTIONAL = ("task_input",)  # outputs alone can be judged
MEASURES = ("accuracy", "kappa", "weighted_kappa", "alpha", "spearman", "brier")
_JobT = TypeVar("_JobT", bound=KeyedJob)


def _judge(value: Any) -> Any:
    """A judge's name, path or sentence as text; otherwise the judge."""
    if isinstance(value, str | Path) and str(value).strip():
        return str(value)
    from assay.judges import Judge, ListwiseJudge

    if isinstance(value, Judge | ListwiseJudge):
        return value
    raise ValueError(f"must be a YAML file, an artifact's folder, file.py:NAME, a sentence or a judge, not {value!r}")


JudgeSource: TypeAlias = Annotated[Any, Flag(path=True), Parse(_judge)]
Rows: TypeAlias = Annotated[str | None, Flag(metavar="D", path=True, key=False, stored=True)]


class JudgeJob(Reported, Trusting, InStore, Threads, KeyedJob):
    """Judge."""

    ROLE: ClassVar[str] = "judge"
    RUNS: ClassVar[Sequence[str]] = ("judge",)
    lists: ClassVar[bool] = False  # a listwise judge is taken as one of pairs

    judge: JudgeSource = field(kw_only=False)
    """Judge: a shipped name, a YAML file, an artifact's folder, file.py:NAME, or a question in one sentence. In Python
    also a judge."""
    model: str | None = None
    """Language model of the judge; by default that of a compiled judge, otherwise embedded/smollm2-135m."""
    thinking: Budget = None
    """How much the judge may think in a call: a number of tokens, minimal, low, medium, high, xhigh, max, off or auto
    (no limit). By default that of a compiled judge. A model that cannot keep it is refused."""
    scale: Annotated[Sequence[str] | None, Flag(commas=True)] = None
    """Labels of the scale from worst to best, separated by commas, for a judge given as a sentence. By default
    no,yes."""

    def check(self) -> None:
        if self.scale and not isinstance(self.judge, str):
            raise ConfigError("applies only to a judge given as a sentence; this one has its own", field="scale")

    def built(self) -> "Judge":
        """The judge."""
        from assay.jobs.loading import load_judge
        from assay.judges import Judge, ListwiseJudge
        from assay.rubrics.criteria import JudgeFields

        spec: JudgeFields = {"scale": tuple(self.scale)} if self.scale else {}
        judge = load_judge(self.judge, own_model=False, **spec) if isinstance(self.judge, str) else self.judge
        if self.lists and isinstance(judge, ListwiseJudge):
            return judge.as_pairs()
        if not isinstance(judge, Judge):
            raise ConfigError("a listwise judge grades whole groups; use it in a rubric with score_group")
        return judge

    @contextmanager
    def session(self, *, resume: bool = False) -> "Iterator[tuple[Judge, Session, Run]]":
        """Context with the judge, an open session for it, and its run."""
        from assay.deployment.artifact import with_model_of
        from assay.jobs.opening import open_run
        from assay.jobs.preflight import check_prices
        from assay.sources.artifact_files import is_artifact, unproven_note

        own, is_compiled = dict[str, Any](), isinstance(self.judge, str) and is_artifact(self.judge)
        if is_compiled and self.model is None and lm_of(self) is None:
            given = ("api_base", "api_key_env", "thinking")  # a compiled judge has its own model
            own = with_model_of(self.judge, {name: getattr(self, name) for name in given})
        lm, config = with_names(self, judge=name_of(self.judge), **own)
        judge, progress = self.built(), self.reporter
        with (
            open_run(config, lm=lm, progress=progress, store=self.store, resume=resume) as run,
            judge_session(run, judge, progress, config, source=config.judge) as session,
            session.phase(self.kind.removeprefix("judge ")),
        ):
            if is_compiled and (note := unproven_note(self.judge)) is not None:
                progress.say(f"note: {note}")
            check_prices(session, self.max_cost_usd, judge=judge)
            yield judge, session, run


def lm_of(command: KeyedJob) -> "dspy.LM | None":
    """The model object of a command, see `assay.jobs.arguments.resolve_lm`."""
    from assay.jobs.arguments import resolve_lm

    return resolve_lm(command.lm, {"model": command.model})


def with_names(command: _JobT, **changes: Any) -> "tuple[dspy.LM | None, _JobT]":
    """The model object of a command, and its settings with names in place of objects: those that the store has."""
    lm = lm_of(command)
    return lm, replace(command, lm=None, **({} if lm is None else {"model": lm.model}), **changes)


def name_of(judge: "str | Judge") -> str:
    """The text that names a judge in the settings of its run."""
    return judge if isinstance(judge, str) else str(judge.spec.text)


@contextmanager
def judge_session(
    run: "Run", judge: "Judge", progress: "Progress", config: KeyedJob, *, source: str
) -> "Iterator[Session]":
    """The session of an open run for `judge_items`. The store gets the judge's question, for raters."""
    from assay.evaluation import Session
    from assay.judges.questions import remember
    from assay.optimizers.judges import agreement_rubric
    from assay.sources.modules import qualified_name

    remember(run.store, judge, source, run_id=run.run_id)
    yield Session(
        lm=run.lm, rubric=agreement_rubric(judge.spec), recorder=run.recorder, meter=run.meter,
        program_name=qualified_name(judge), source="judge", seed=config.seed, threads=run.threads,
        progress=progress, prompt_lm=run.reflection, task_timeout=config.task_timeout,
    )  # fmt: skip


def preflight_items(judge: "Judge", items: "Sequence[Item]", session: "Session", config: Any) -> None:
    """Calls each model of the judge once, so that a missing one is found before every item waits for it."""
    from assay.jobs.preflight import preflight_judge

    complete = [item for item in items if all(name in item.fields or name in OPTIONAL for name in judge.shows)]
    if config.preflight and complete:
        session.progress.say("preflight: each model answers once")
        preflight_judge(judge, complete, session, max_cost_usd=config.max_cost_usd)


def rated_items(
    labels: str, judge: "Judge", store: str | Path | None, rename: Mapping[str, str] | None = None
) -> "LabelledItems":
    """Loads items with ratings from a source; `store` means the labels made with `assay judge label`."""
    from assay.judges import load_labels
    from assay.judges.labels import make_items
    from assay.judges.questions import key_of
    from assay.traces import Store

    if labels != "store":
        return load_labels(
            labels, labels=judge.labels, rename=rename or {}, shows=judge.shows, anchors=judge.spec.anchors
        )
    with Store(store) as opened:
        rows = [(f"label {index + 1} of the store", row) for index, row in enumerate(opened.labels(key_of(judge)))]
    if not rows:
        raise DataError(
            "the store has no labels for this judge's question and scale; collect some with assay judge label"
        )
    return make_items(rows, labels=judge.labels, spec="the store", shows=judge.shows)


def need_fields(judge: "Judge", items: "Sequence[Item]", *, optional: Collection[str] = ()) -> None:
    """Raises `ConfigError` if no item has a field that the judge needs."""
    for name in judge.shows:
        if name not in optional and not any(name in item.fields for item in items):
            raise ConfigError(
                f"the judge sees {list(judge.shows)}, but no item has {name!r}; they have {sorted(items[0].fields)}. "
                "Rename a column"
            )


@dataclass(frozen=True, kw_only=True, repr=False)
class SpentReport(Report):
    """A report of a run that called models.

    Attributes:
        unrecorded: LM calls that could not be recorded; null if unknown
    """

    calls: int
    cached: int
    repeated_calls: int
    tokens: int
    cost_usd: float | None
    unrecorded: int | None

    @property
    def spent(self) -> str:
        """Calls, tokens and dollars in words."""
        from assay.reports.markdown import cost_words

        calls = calls_text(self.calls, self.cached)
        return f"LM calls: {calls}, {self.tokens:,} tokens, {cost_words(self.cost_usd)}{self.gap}"

    @property
    def gap(self) -> str:
        """The calls that were not recorded, in words; empty without any."""
        from assay.reports.markdown import gap_lines

        return "".join(f"; {line.removeprefix('warning: ')}" for line in gap_lines(vars(self)))


@dataclass(frozen=True, kw_only=True, repr=False)
class JudgedReport(SpentReport):
    """A report on verdicts of a judge: on how many items it gave none, and why."""

    coverage: float | None = None
    undecided: Mapping[str, Any] = field(default_factory=dict)


def spent_by(run: "Run") -> dict[str, Any]:
    """The fields of a `SpentReport`."""
    run.store.settle()
    usage = run.meter.usage
    return {
        "calls": usage.calls, "cached": usage.cached, "repeated_calls": usage.repeated, "tokens": usage.tokens,
        "cost_usd": usage.known_cost_usd, "unrecorded": run.recorder.unrecorded.count,
    }  # fmt: skip


def agreement_table(card: Mapping[str, Any]) -> Table:
    """The judge's agreement with raters, and the raters' agreement with each other."""
    agreement, ceiling = card["agreement"], card["ceiling"]
    rows = [
        (name.replace("_", " "), figure(agreement[name]), interval(agreement, name), figure(ceiling[name]))
        for name in MEASURES
    ]
    return Table(
        title=f"agreement with raters, {agreement['n']} items of {card['split']}",
        header=("", "judge", "95 %", "raters"), rows=rows, strong=(card["objective"].replace("_", " "),),
    )  # fmt: skip


def interval(agreement: Mapping[str, Any], name: str) -> str:
    """`[low, high]` of a measure, or a dash if there is no interval."""
    ends = agreement["intervals"].get(name)
    return "–" if ends is None else f"[{figure(ends[0])}, {figure(ends[1])}]"


def card_lines(card: Mapping[str, Any], *, reported: Collection[str] = ()) -> Iterator[str | Table]:
    """A card without its agreement. `reported`: undefined measures that were reported before."""
    from assay.reports.judges import card_facts

    yield "; ".join(f"{name}: {value}" for name, value in card_facts(card))
    for row in card.get("explained_by") or ():
        yield (
            f"{row['feature']} explains judge minus raters: {signed(row['effect'], 2)} of the scale, 95 % "
            f"[{signed(row['low'], 2)}, {signed(row['high'], 2)}], "
            f"corrected p {row['p']:.3f}, in {row['n']} outputs"
        )
    labels, counts = card["confusion"]["labels"], card["confusion"]["verdicts_by_people"]
    yield Table(
        title="confusion: the judge's verdicts by human labels, items (one with several labels counts in parts)",
        header=("judge", *labels),
        rows=[(label, *(f"{count:.4g}" for count in row)) for label, row in zip(labels, counts, strict=True)],
    )
    for name, reason in sorted((name, reason) for name, reason in card["undefined"].items() if name not in reported):
        yield f"{name.replace('_', ' ')} is undefined: {reason}"
    for alarm in card["alarms"]:
        yield f"alarm: this judge {alarm}"
