"""`assay judge lint`, `label`, `forget` and `card`: criteria that are likely mistakes, labels of people, and cards."""

import getpass
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar
from urllib.parse import urlencode

from assay.commands.groups import InStore, Output, Trusting, WithPage
from assay.errors import ConfigError, NoArtifact
from assay.jobs.project_file import is_of_project
from assay.support.numbers import counted
from assay.support.options import Flag, Positive, Seed, Settings, function_of
from assay.support.report import Report, Table
from assay.support.terminal import ask, echo, rich_console

if TYPE_CHECKING:
    from assay.judges.loading import AnyJudge
    from assay.judges.questions import ToLabel
    from assay.rubrics.criteria import JudgeFields
    from assay.rubrics.lint import Finding
    from assay.traces.store import Store

_OF_QUESTIONS = ("rater", "task_id", "limit", "rationale", "seed")  # settings without effect on the page


@dataclass(frozen=True, kw_only=True, repr=False)
class LintFindings(Report):
    """Likely mistakes in the criteria of a rubric.

    Attributes:
        findings: each with its `criterion`, the broken `rule` and a `text` with the fix.
    """

    findings: tuple["Finding", ...]

    def lines(self) -> Iterator[str]:
        yield from (f"{finding.criterion}: {finding.rule}: {finding.text}" for finding in self.findings)
        if not self.findings:
            yield "nothing found"

    @property
    def failure(self) -> str:
        return counted(len(self.findings), "findings") if self.findings else ""


class Lint(Trusting):
    """Report criteria in RUBRIC that ask two things, ask about what a judge cannot see, or occur twice. Exit code 1
    if there are any.

    Questions of judges in files of their own, which the rubric names with `use`, are read from those. No model is
    called.

    Raises:
        RubricError: the rubric or one of its judges cannot be loaded.
    """

    rubric: Annotated[Any, Flag(key=False)] = field(kw_only=False)
    """A YAML file, a shipped name, or a rubric."""

    def run(self) -> LintFindings:
        from assay.jobs.loading import load_judge, load_rubric
        from assay.rubrics import lint_rubric

        questions = lint_rubric(load_rubric(self.rubric), used=lambda name: load_judge(name, own_model=False).spec.text)
        return LintFindings(findings=tuple(questions))


@dataclass(frozen=True, kw_only=True, repr=False)
class Labelled(Report):
    """Labels that a rater has given.

    Attributes:
        rater: name of the rater.
        labelled: number of new labels.
        asked: number of outputs that were waiting for one.
    """

    rater: str
    labelled: int
    asked: int

    def lines(self) -> Iterator[str]:
        hint = "; compile with: assay judge compile JUDGE --labels store" if self.labelled else ""
        yield f"{counted(self.labelled, 'labels')} by {self.rater} stored{hint}"


@dataclass(frozen=True, kw_only=True, repr=False)
class LabelPage(Report):
    """Where raters find a question on the page of `assay view`.

    Attributes:
        judge: key of the question.
        path: of its address.
    """

    judge: str
    path: str

    def lines(self) -> Iterator[str]:
        yield f"start assay view, then Judges, or {self.path} of its address"


class Label(Trusting, InStore):
    """Label rollouts of the store with the question and the scale of JUDGE.

    Answer with a label of the scale, its number in the list (if no label is a number), s to skip or q to stop;
    every label is stored immediately. Then compile with assay judge compile JUDGE --labels store.

    Raises:
        ConfigError: `scale` for a judge that has its own, or a listwise judge.
        DataError: there is no such run.
    """

    judge: Annotated[Any, Flag(key=False)] = field(kw_only=False)
    """Judge: a shipped name, a YAML file, an artifact's folder, file.py:NAME, or a question in one sentence."""
    rater: str | None = None
    """Name of the rater; by default your user name."""
    run_id: Annotated[str | None, Flag(name="--run", key=False)] = None
    """Only rollouts of this run."""
    task_id: Annotated[str | None, Flag(name="--task", key=False)] = None
    """Only rollouts of this task."""
    limit: Positive = 20
    """Maximum number of outputs to label."""
    rationale: bool = False
    """Ask for a reason as well; optimizers that reflect read it."""
    seed: Seed = 0
    """Seed of the order in which rollouts are shown."""
    scale: Annotated[Sequence[str] | None, Flag(commas=True)] = None
    """Labels of the scale from worst to best, separated by commas, for a judge given as a sentence. By default
    no,yes."""
    page: Annotated[bool, Flag(key=False)] = False
    """Ask nothing here: add the question to the page of assay view, for raters."""

    def check(self) -> None:
        if self.scale and not isinstance(self.judge, str):
            raise ConfigError("applies only to a judge given as a sentence; this one has its own", field="scale")
        idle = [name for name in self.changed(*_OF_QUESTIONS) if not is_of_project(name, getattr(self, name))]
        if self.page and idle:
            raise ConfigError("would have no effect with `page`", field=idle[0])

    def run(self) -> Labelled | LabelPage:
        from assay.judges.questions import key_of
        from assay.traces.store import Store

        with Store(self.store) as store:
            judge, waiting = self.waiting(store)
            if self.page:
                of_run = f"?{urlencode({'run': self.run_id})}" if self.run_id else ""
                return LabelPage(judge=key_of(judge), path=f"/judges/{key_of(judge)}/label{of_run}")
            if not waiting:
                echo("there is nothing to label: no selected rollout is without your label", err=True)
            labelled = sum(1 for _ in self._labels(store, judge, waiting))
        return Labelled(rater=self._rater, labelled=labelled, asked=len(waiting))

    def waiting(self, store: "Store") -> tuple["AnyJudge", list["ToLabel"]]:
        """Items from stored rollouts that this rater has not judged yet, as the judge would see them, in random order.

        Leaves out rollouts of the sealed test split, of judges, and without an answer. For a pairwise judge the items
        are pairs of different outputs of one task.
        """
        import numpy as np

        from assay.jobs.loading import load_judge
        from assay.judges import ListwiseJudge
        from assay.judges.questions import items_to_label, remember
        from assay.traces.store.listing import check_run

        judge = self.judge
        spec: JudgeFields = {"scale": tuple(self.scale)} if self.scale else {}
        built = load_judge(judge, own_model=False, **spec) if isinstance(judge, str) else judge
        if isinstance(built, ListwiseJudge):
            raise ConfigError("a listwise judge has no labels of its own; label pairs or single outputs")
        key = remember(store, built, judge if isinstance(judge, str) else built.spec.text).key
        judged = {row["item_id"] for row in store.labels(key) if row["rater"] == self._rater}
        check_run(store, self.run_id)
        rollouts = store.rollouts(run_id=self.run_id, task_id=self.task_id)
        entries = [entry for entry in items_to_label(rollouts, built) if entry.item_id not in judged]
        order = np.random.default_rng(self.seed).permutation(len(entries))
        return built, [entries[index] for index in order[: self.limit]]

    @property
    def _rater(self) -> str:
        return self.rater or getpass.getuser()

    def _labels(self, store: "Store", judge: "AnyJudge", waiting: Sequence["ToLabel"]) -> Iterator[str]:
        """Asks for the labels, stores each, and yields those that were given."""
        from assay.judges.questions import key_of

        for at, entry in enumerate(waiting, 1):
            _show_item(at, len(waiting), entry.fields, judge.spec)
            label = _answer(list(judge.spec.scale))
            if label is None:
                return
            if label:
                reason = ask("why? ") or "" if self.rationale else ""
                store.put_label(
                    key_of(judge), entry.item_id, self._rater, label, fields=entry.fields, rationale=reason,
                    rollout_id=entry.rollout_id,
                )  # fmt: skip
                yield label


def _show_item(at: int, count: int, fields: Mapping[str, Any], spec: Any) -> None:
    from rich.panel import Panel
    from rich.text import Text

    rich = rich_console(err=True)
    rich.rule(f"{at} of {count}")
    for name, value in fields.items():
        rich.print(Panel(Text(str(value)), title=Text(str(name)), title_align="left"))
    rich.print(spec.text)
    keys = {word: key for key, word in _numbers(list(spec.scale)).items()}
    for word in spec.scale:
        meaning = f": {spec.anchors[word]}" if word in spec.anchors else ""
        rich.print(f"  {keys.get(word, '')} {word}{meaning}")


def _numbers(words: list[str]) -> dict[str, str]:
    """Scale words by the number that may be typed for them; empty for a scale of numbers."""
    if any(word.strip("+-").replace(".", "").isdigit() for word in words):
        return {}
    return {str(at): word for at, word in enumerate(words, 1)}


def _answer(words: list[str]) -> str | None:
    """The typed word of the scale, "" to skip, None to stop or at the end of the input.

    If s or q is itself a label of the scale, /s skips and /q stops.
    """
    words_by_input = {**_numbers(words), **{word.casefold(): word for word in words}}
    skip, stop = (key if key not in words_by_input else f"/{key}" for key in ("s", "q"))
    while True:
        line = ask(f"your verdict ({skip} skips, {stop} stops): ")
        answer = (line or "").casefold()
        if answer in words_by_input:
            return words_by_input[answer]
        if line is None or answer == stop:
            return None
        if answer == skip:
            return ""
        numbers = f", or 1 to {len(words)}" if _numbers(words) else ""
        echo(f"{line!r} is not on the scale: {', '.join(words)}{numbers}", err=True)


@dataclass(frozen=True, kw_only=True, repr=False)
class ForgottenRater(Report):
    """Labels that were removed.

    Attributes:
        rater: name of the rater.
        removed: number of the removed labels.
        judges: artifacts of the judges that were compiled from them.
    """

    rater: str
    removed: int
    judges: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        yield f"{counted(self.removed, 'labels')} of {self.rater} removed"
        for judge in self.judges:
            yield f"compiled from labels of {self.rater}, compile it again without them: {judge}"


class ForgetRater(InStore):
    """Remove all labels of RATER from the store, and name every judge that was compiled from them."""

    rater: Annotated[str, Flag(key=False)] = field(kw_only=False)
    """Name of the rater."""

    def run(self) -> ForgottenRater:
        from assay.traces.records import person_digest
        from assay.traces.store import Store

        with Store(self.store) as store:
            removed, judges = store.forget_rater(self.rater), store.artifacts_of(person_digest(self.rater))
        return ForgottenRater(rater=self.rater, removed=removed, judges=tuple(judges))


@dataclass(frozen=True, kw_only=True, repr=False)
class CardReport(Report):
    """The reliability card of a compiled judge, as `assay.judges.quality.card.reliability_card` returns it."""

    judge: str
    card: Mapping[str, Any]
    manifest: Mapping[str, Any]  # of the artifact

    def to_dict(self) -> dict[str, Any]:
        return dict(self.card)

    def lines(self) -> Iterator[str | Table]:
        from assay.commands.judging import agreement_table, card_lines

        yield agreement_table(self.card)
        yield from card_lines(self.card)

    def write_page(self, path: str | Path, *, store: str | Path | None = None) -> Path:
        from assay.reports.files import ended_facts, short_name, spent_facts, write_report
        from assay.reports.judges import card_page

        spec, result, labels = self.manifest["judge"], self.manifest["result"], self.manifest["labels"]
        facts = [
            ("Question", spec["text"]), ("Scale", ", ".join(spec["scale"])), ("Model", self.manifest["model"]),
            ("Compiled", f"{self.manifest['created_at']} with {result['optimizer']}, winner {result['winner']}"),
            ("Labels", ", ".join(f"{name} {count}" for name, count in labels["sizes"].items())),
            *spent_facts(result), *ended_facts(result),
        ]  # fmt: skip
        title = f"Reliability card of {spec['text'][:80] or short_name(self.judge)}"
        page = card_page(self.card)
        return write_report(path, "report_card.html", title=title, facts=facts, page=page, notes=result["notes"])


class CardOutput(WithPage, Output):
    """Output."""


class ShowCard(Settings):
    """Show the reliability card of a compiled JUDGE.

    Raises:
        NoArtifact: the judge has no card.
    """

    OUTPUT: ClassVar[Any] = CardOutput

    judge: Annotated[str | Path, Flag(key=False)] = field(kw_only=False)
    """Folder written by assay judge compile."""

    def run(self) -> CardReport:
        from assay.rubrics.loading import shipped_judge
        from assay.sources.artifact_files import read_json, read_manifest

        path = Path(self.judge) / "card.json"
        if not path.is_file():
            if shipped_judge(str(self.judge)):
                raise NoArtifact(
                    f"{self.judge} is a shipped judge, with its cards in judges/README.md of the repository. For the "
                    f"card of your model and labels: assay judge compile {self.judge} --labels D"
                )
            raise NoArtifact(
                f"{self.judge} has no card: it is not a folder written by assay judge compile, or its run was stopped "
                "before it was measured"
            )
        manifest = read_manifest(Path(self.judge))  # one of another format is refused
        return CardReport(judge=str(self.judge), card=read_json(path, path.parent), manifest=manifest)


lint = function_of(Lint, "lint")
label = function_of(Label, "label")
show_card = function_of(ShowCard, "show_card")
forget_rater = function_of(ForgetRater, "forget_rater")
