"""Compiles a judge against human labels: selected on val, decided on gate, reported on the sealed test items.

If gate does not prove the compiled judge better, the baseline is the result. It is measured on gate, and the test items
stay sealed. The candidates are forms of the judge's prompt, each with and without calibration; the search does not open
gate or test.
"""

import functools
import itertools
import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from assay.datasets import Task
from assay.errors import BudgetExceeded, ConfigError, ModelError
from assay.evaluation.judged import Judged, joined, judge_items, measure_gain, only, recalibrated
from assay.evaluation.session import RecordedProgram, Session
from assay.judges import Cascade, Judge, Jury, PointwiseJudge, reliability_weights
from assay.judges.base import rebuilt
from assay.judges.calibration import METHODS, Calibration, expected_step, fit
from assay.judges.labels import Item, LabelSplits
from assay.judges.panel import RULES
from assay.judges.quality.agreement import Agreement, agreement, ceiling, kappas, objective_of, oriented
from assay.judges.quality.audit import ATTACK
from assay.judges.reading import STYLES, fenced_text, have_distinct_first_tokens
from assay.optimizers.prompts.dspy_patches import repaired_dspy
from assay.optimizers.prompts.given import title_of
from assay.optimizers.prompts.named import Proposal
from assay.optimizers.prompts.proposals import InstructionCheck
from assay.optimizers.prompts.teleprompters import propose
from assay.optimizers.settings import JudgeConfig
from assay.programs.isolation import copied
from assay.rubrics import Criterion, Grade, Rubric
from assay.rubrics.criteria import JudgeSpec
from assay.support.numbers import figure
from assay.support.report import ReportRepr, shortened
from assay.support.scrubbing import scrubbed
from assay.traces import Rollout

# -- Fits a calibration to readings and human labels, with or without cuts between the words of an ordered scale.


_CUTS = 25  # places tried for each cut of an ordered scale


def cuttable(judge: Judge) -> bool:
    """Whether cuts can be fitted: only on an ordered scale of three or more words, and not for pairwise judges."""
    return len(judge.spec.scale) > 2 and judge.spec.kind != "nominal" and not judge.compares


class Fits:
    """Calibrations of one judge's readings. The fits with and without cuts share what costs most, the regression.

    Args:
        read: the judge's readings of the items, in their order.
    """

    def __init__(self, judge: Judge, read: Judged, items: Sequence[Item], *, objective: str, seed: int) -> None:
        self._judge, self._read, self._items, self._objective, self._seed = judge, read, items, objective, seed
        self._fitted: dict[tuple[str, tuple[int, ...]], Calibration | None] = {}

    def calibration(self, method: str, rows: Sequence[int], *, cuts: bool) -> Calibration | None:
        """Fits a calibration to some of the items; None if their readings or labels are too few."""
        readings = [
            pair
            for row in rows
            if (raw := self._read.raw[row]) is not None
            for pair in self._judge.fit_rows(raw, self._items[row].shares)
        ]
        if len({label for _, shares in readings for label in shares}) < 2:
            return None
        raws, shares = [raw for raw, _ in readings], [share for _, share in readings]
        key = (method, tuple(rows))
        if key not in self._fitted:
            self._fitted[key] = fit(method, raws, shares, self._judge.labels, seed=self._seed)
        fitted = self._fitted[key]
        if not cuts or fitted is None:
            return fitted
        spec = self._judge.spec
        places = [expected_step(list(fitted.map(raw, self._judge.labels).values()), spec) for raw in raws]
        return replace(fitted, cuts=_cuts(places, shares, spec, self._objective))


def _cuts(
    places: Sequence[float], labelled: Sequence[Mapping[str, float]], spec: JudgeSpec, objective: str
) -> list[float]:
    """Ascending cuts between the words; coordinate ascent moves one cut at a time to its best position, in two
    passes."""
    tried = sorted(set(np.quantile(places, np.linspace(0.02, 0.98, _CUTS)).tolist()))
    cuts = np.quantile(places, np.linspace(0, 1, len(spec.scale) + 1)[1:-1]).tolist()
    shares = np.array([[raters.get(label, 0.0) for label in spec.scale] for raters in labelled])
    readings, eye = np.array(places), np.eye(len(spec.scale))

    def value(chosen: list[float]) -> float:
        verdicts = np.searchsorted(chosen, readings, side="right")
        if objective == "accuracy":
            return float(shares[np.arange(len(readings)), verdicts].mean())
        # Cuts do not change a rank correlation, so the quadratic kappa replaces the other objectives.
        kappa = kappas((eye[verdicts].T @ shares)[None], quadratic=objective != "kappa")[0]
        return float(kappa) if math.isfinite(kappa) else -math.inf

    for _ in range(2):
        for index in range(len(cuts)):
            low, high = cuts[index - 1] if index else -math.inf, cuts[index + 1] if index + 1 < len(cuts) else math.inf
            options = [[*cuts[:index], place, *cuts[index + 1 :]] for place in tried if low <= place <= high]
            cuts = max([cuts, *options], key=value)
    return [float(cut) for cut in cuts]


# -- Search.


_LEASTS = (0.5, 0.6, 0.7, 0.8, 0.9)  # confidences of the first judge of a cascade, the cheapest first
_SLACK = 0.005  # how much better a costlier candidate must be on val
_FOLDS = 5
LOST = 0.02  # largest share of items by which a judge may give fewer verdicts than the one that it is compared with


@dataclass
class JudgeCandidate:
    """A judge of the search. `n` items were judged, of which `unscored` have no verdict; `score` is -inf before."""

    name: str
    judge: Judge
    score: float = -math.inf  # the objective on held-out items of train and val
    unscored: int = 0
    n: int = 0

    def summary(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "agreement": self.score if math.isfinite(self.score) else None,
            "n": self.n,
            "unscored": self.unscored,
        }


class JudgeSearch:
    """Makes prompt forms, each with and without calibration; selects the simplest of those that agree best."""

    def __init__(
        self, judge: Judge, splits: LabelSplits, session: Session, config: JudgeConfig, folder: Path | None
    ) -> None:
        self.judge, self.splits, self.session, self.config, self.folder = judge, splits, session, config, folder
        self.objective = config.objective or objective_of(judge.spec)
        self.candidates: list[JudgeCandidate] = []
        self.notes: list[str] = []

    def run(self) -> None:
        self._try("as it is", self.judge)
        reason, silent = self._first_reason, all(c.unscored == c.n for c in self.candidates)
        if self.config.optimizer == "auto":
            for name, judge in self._forms():
                self._try(name, judge)
        if all(c.unscored == c.n for c in self.candidates):
            raise ModelError(f"none of {self.candidates[0].n} items got a verdict: {reason}")
        if silent:
            self.notes.append(f"as it is, the judge gave no verdict: {reason}")
        if self.config.optimizer not in ("auto", "calibrate"):
            self._try(title_of(self.config.optimizer), self._proposed(self.config.optimizer))

    def best(self) -> JudgeCandidate:
        """The candidate that agrees best on held-out items of train and val; within 0.005, the first one.

        Candidates that leave more items unscored than others are excluded: a judge without verdicts on hard items
        agrees well on the rest.
        """
        if not self.candidates:
            return JudgeCandidate("as it is", self.judge)
        fewest = min(c.unscored / max(1, c.n) for c in self.candidates)
        open_ = [c for c in self.candidates if c.unscored / max(1, c.n) - fewest <= LOST]
        top = max(c.score for c in open_)
        return next(c for c in open_ if c.score >= top - _SLACK)

    def _forms(self) -> list[tuple[str, Judge]]:
        """Variants of the judge: letters instead of words, demonstrations from human labels, voting rules of a jury,
        thresholds of a cascade. Calls that a member made before are answered from the cache."""
        if isinstance(self.judge, Jury):
            return self._votes(self.judge)
        if isinstance(self.judge, Cascade):
            first, second = self.judge.first, self.judge.second
            return [
                (f"second judge under {least:g}", Cascade(first, second, least=least))
                for least in _LEASTS
                if least != self.judge.least
            ]
        if not isinstance(self.judge, PointwiseJudge):
            return []
        labelled = self._demonstrations()
        forms: list[tuple[str, Judge]] = []
        for style in STYLES[1:] if have_distinct_first_tokens(self.judge.labels) else STYLES[2:]:
            for demos in ([], labelled):
                try:
                    judge = self._variant(style, demos)
                except ConfigError as error:  # a user's class with a single style
                    self.notes.append(f"no other style was tried: {error}")
                    continue
                if demos or style != self.judge.style:
                    forms.append((f"{style}{f', {len(demos)} labelled demos' if demos else ''}", judge))
        return forms

    def _votes(self, jury: Jury) -> list[tuple[str, Judge]]:
        train = [
            judge_items(member, self.splits.train, self.session, name="train: a member", split="train")
            for member in jury.members
        ]
        reliable = reliability_weights(
            [judged.answers.verdicts for judged in train], self.splits.train, len(jury.labels)
        )
        rules = [how for how in RULES if how != "median" or jury.spec.kind != "nominal"]
        kinds = [(how, weights) for how in rules for weights in ((), tuple(reliable))]
        return [
            (f"{how}{', weighted by reliability' if weights else ''}", Jury(jury.members, how=how, weights=weights))
            for how, weights in kinds
            if (how, weights) != (jury.how, jury.weights)
        ]

    def _variant(self, style: str, demos: Sequence[Mapping[str, Any]]) -> PointwiseJudge:
        assert isinstance(self.judge, PointwiseJudge)
        judge = rebuilt(type(self.judge), {**self.judge.config, "style": style})
        assert isinstance(judge, PointwiseJudge)
        judge.load_state(self.judge.dump_state())
        judge.decide.demos = [dict(demo) for demo in demos] or judge.decide.demos
        return judge

    def _demonstrations(self) -> list[dict[str, Any]]:
        """The train items of each label on which raters agree most, shuffled, so that no label is always last."""
        groups: dict[str, list[Item]] = defaultdict(list)
        labelled = [item for item in self.splits.train if ATTACK not in item.id]
        for item in sorted(labelled, key=lambda item: -max(item.shares.values())):
            groups[item.modes[0]].append(item)
        chosen = [item for group in groups.values() for item in group[: self.config.demos]]
        np.random.default_rng(self.session.seed).shuffle(chosen)
        return [
            {**{name: fenced_text(item.fields.get(name)) for name in self.judge.shows}, "verdict": item.modes[0]}
            for item in chosen
        ]

    def _proposed(self, name: str) -> Judge:
        train = item_tasks(self.splits.train, self.judge, "train")
        val = item_tasks(self.splits.val[:50], self.judge, "val")
        proposal = Proposal(
            RecordedProgram(copied(self.judge), self.session),
            train,
            val,
            self.session,
            threshold=0.5,
            demos=self.config.demos * 2,
        )
        instruction_check = InstructionCheck(self.judge, self.session.lm)
        log = self.folder / "dspy.log" if self.folder is not None else Path(os.devnull)
        with (
            scrubbed(open(log, "a")) as file,
            repaired_dspy(file, self.session.seed, instruction_check=instruction_check),
            instruction_check.listening(self.session.lm, self.session.prompt_lm),
        ):
            compiled = propose(name, proposal).program
        self.notes += proposal.notes
        if not isinstance(compiled, Judge):
            raise ConfigError(f"{name} makes another program around the judge, and what is compiled must be a judge")
        self.notes += instruction_check.checked(compiled, train)
        return compiled

    def _try(self, name: str, judge: Judge) -> None:
        """Judges val, and train if the model gives probabilities; adds the judge as it is and with each calibration."""
        session, splits = self.session, self.splits
        val = judge_items(judge, splits.val, session, name=f"val: {name}", split="val")
        self._first_reason = next((reason for reason in val.reasons if reason), "")
        if all(raw is None for raw in val.raw):
            if name == "as it is":
                self.notes.append("the model gives no probabilities, so there is nothing to calibrate")
            self._add(name, judge, val, splits.val)
            return
        train = judge_items(judge, splits.train, session, name=f"train: {name}", split="train")
        read, items = joined([train, val]), [*splits.train, *splits.val]
        pool, fixed = self._comparison_rows(judge, name)
        self._add(name, judge, only(read, pool), [items[row] for row in pool])
        fits = Fits(judge, read, items, objective=self.objective, seed=session.seed)
        for method in METHODS:
            for cuts in (False, True) if cuttable(judge) else (False,):
                calibrate = functools.partial(fits.calibration, method, cuts=cuts)
                cross_fitted = self._cross_fitted(calibrate, read, pool, fixed, judge)
                if cross_fitted is not None:
                    calibrated = copied(judge)
                    # fitted on all labels but those of gate and test
                    calibrated.calibration = calibrate(range(len(items)))
                    self._add(
                        f"{name}, {method}{' with cuts' if cuts else ''}",
                        calibrated,
                        cross_fitted,
                        [items[row] for row in pool],
                    )

    def _comparison_rows(self, judge: Judge, name: str) -> tuple[list[int], list[int]]:
        """Rows of train and val on which candidates are compared, and rows that only calibrations are fitted on.

        A compared row is judged under a calibration that was not fitted on it. A judge proposed from train is compared
        on val alone. Demonstrations and attacks added to train are never compared on.
        """
        train, val = self.splits.train, self.splits.val
        proposed = name == title_of(self.config.optimizer)
        demonstrated = {
            json.dumps({key: demo.get(key) for key in judge.shows})
            for predictor in judge.predictors()
            for demo in predictor.demos
        }
        pool, fixed = list[int](), list[int]()
        for row, item in enumerate(train):
            if json.dumps({key: fenced_text(item.fields.get(key)) for key in judge.shows}) in demonstrated:
                continue
            (fixed if proposed or ATTACK in item.id else pool).append(row)
        return [*pool, *range(len(train), len(train) + len(val))], fixed

    def _cross_fitted(
        self,
        calibrate: Callable[..., Calibration | None],
        read: Judged,
        pool: Sequence[int],
        fixed: Sequence[int],
        judge: Judge,
    ) -> Judged | None:
        """The judge's verdicts on the pool, each under a calibration fitted on the other folds; None if one cannot be
        fitted."""
        fold_of = dict(
            zip(
                np.random.default_rng(self.session.seed).permutation(pool).tolist(),
                itertools.cycle(range(_FOLDS)),
                strict=False,
            )
        )
        parts: dict[int, tuple[list[int], Judged]] = {}
        for fold in sorted(set(fold_of.values())):
            fold_rows, rest = (
                [row for row in pool if fold_of[row] == fold],
                [*fixed, *(row for row in pool if fold_of[row] != fold)],
            )
            calibration = calibrate(rest)
            if calibration is None:
                return None
            parts[fold] = fold_rows, recalibrated(only(read, fold_rows), calibration, judge)
        order = [row for fold_rows, _ in parts.values() for row in fold_rows]
        return only(joined([judged for _, judged in parts.values()]), [order.index(row) for row in pool])

    def _add(self, name: str, judge: Judge, judged: Judged, items: Sequence[Item]) -> None:
        result = agreement(judged.answers, items, judge.spec, intervals=False)
        value, measure = result.values[self.objective], self.objective.replace("_", " ")
        self.candidates.append(
            JudgeCandidate(
                name,
                judge,
                -math.inf if value is None else oriented(self.objective, value),
                judged.unscored,
                len(items),
            )
        )
        if value is None:
            self.notes.append(f"{name}: {measure} is undefined before the gate: {result.why[self.objective]}")
        self.session.progress.say(
            f"  {name}: {measure} {'undefined' if value is None else figure(value)} on {len(items)} held-out items"
        )


def item_tasks(items: Sequence[Item], judge: Judge, split: str) -> list[Task]:
    """Items as tasks of the judge as a program: what it sees goes in, the label most raters gave is expected."""
    return [
        Task(
            id=item.id[:200], task_type=item.modes[0], inputs={name: item.fields.get(name) for name in judge.shows},
            expected={"verdict": item.modes[0]}, metadata={"shares": item.shares, "rationales": item.rationales},
            split=split,
        )
        for item in items
    ]  # fmt: skip


@dataclass(repr=False)
class JudgeOutcome(ReportRepr):
    """The result of compiling a judge.

    Attributes:
        replaces: whether the whole interval of the paired gain on gate is above zero, or the baseline gave no verdict.
        split: whose items the result was measured on: `test`, or `gate` if the baseline is the result; empty if the
            compile was stopped before.
        judged, agreement: the result's verdicts on these items, and their agreement with the raters.
        ceiling: agreement of their raters with each other.
    """

    baseline: Judge
    compiled: Judge
    objective: str
    winner: str
    candidates: list[dict[str, Any]]
    gate: dict[str, Any] | None = None
    replaces: bool = False
    stopped: str | None = None
    split: str = ""
    judged: Judged | None = None
    agreement: Agreement | None = None
    ceiling: Agreement | None = None
    before: Judged | None = None  # the baseline's verdicts on the test items; the fields below are of test too
    test_baseline: Agreement | None = None
    gain: dict[str, Any] | None = None
    accuracy_gain: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def unproven(self) -> bool:
        """Whether the winner on val was not proven better on gate, so that the baseline is the result."""
        return self.compiled is not self.baseline and not self.replaces

    @property
    def result(self) -> Judge:
        return self.compiled if self.replaces else self.baseline

    @property
    def test_compiled(self) -> Agreement | None:
        return self.agreement if self.split == "test" else None

    def _facts(self) -> list[tuple[str, str]]:
        facts = {"winner": self.winner, "replaces": self.replaces, "objective": self.objective, "stopped": self.stopped}
        return [(key, shortened(value)) for key, value in facts.items() if value is not None]


def agreement_rubric(spec: JudgeSpec) -> Rubric:
    """A rubric that scores one verdict for teleprompters, in [0, 1]; higher is better.

    The score is the share of raters who gave the verdict or, on an ordered scale, one minus the mean squared distance
    to their labels. The feedback text quotes the raters' rationales.
    """
    steps = dict(zip(spec.scale, spec.steps, strict=True))
    width = (spec.steps[-1] - spec.steps[0]) or 1.0

    def agrees(task: Task, prediction: dict[str, Any], rollout: Rollout | None) -> Grade:
        shares, verdict = task.metadata["shares"], prediction["verdict"]
        if spec.kind == "nominal" or len(spec.scale) == 2:
            grade = shares.get(verdict, 0.0)
        else:
            grade = 1 - math.fsum(
                share * ((steps[verdict] - steps[label]) / width) ** 2 for label, share in shares.items()
            )
        labels = ", ".join(
            f"{label} ({100 * share:.0f} %)" for label, share in sorted(shares.items(), key=lambda entry: -entry[1])
        )
        note = f" Their reasons: {' | '.join(task.metadata['rationales'][:3])}" if task.metadata["rationales"] else ""
        return Grade(value=min(1.0, max(0.0, grade)), reason=f"The judge said {verdict!r}; people said {labels}.{note}")

    return Rubric("agreement", [Criterion(name="agrees", check=agrees)])


def compile_judge_prompts(
    judge: Judge,
    splits: LabelSplits,
    session: Session,
    config: JudgeConfig,
    *,
    folder: Path | None = None,
    on_open: Callable[[], Any] | None = None,
) -> JudgeOutcome:
    """Compiles a judge against human labels. A judge that gate proves better is reported on the sealed test items.

    If a cap is reached during the search, the best candidate so far is decided on and reported as far as the caps
    allow.

    Args:
        folder: receives the printed output of DSPy's optimizers; None drops it.
        on_open: called before the test items are judged.
    Raises:
        ModelError: no verdict could be read at all: the model or its server is at fault.
        Cancelled: the user stopped the run; what was judged is in the response cache.
    """
    search = JudgeSearch(judge, splits, session, config, folder)
    stopped = None
    with session.phase("search"):
        try:
            search.run()
        except BudgetExceeded as cap:
            stopped = str(cap)
            session.progress.say(f"end of the search: {cap}; continuing with the best candidate so far")
    winner = search.best()
    outcome = JudgeOutcome(
        judge,
        winner.judge,
        search.objective,
        winner.name,
        [c.summary() for c in search.candidates],
        stopped=stopped,
        notes=search.notes,
    )
    try:
        _decide(outcome, splits, session)
        if outcome.replaces:
            if on_open is not None:
                on_open()
            _report(outcome, splits, session)
    except BudgetExceeded as cap:
        outcome.stopped = str(cap)
    return outcome


def _decide(outcome: JudgeOutcome, splits: LabelSplits, session: Session) -> None:
    """Compares the compiled judge with the baseline on gate. If it does not replace it, the baseline is measured."""
    with session.phase("gate"):
        before = judge_items(outcome.baseline, splits.gate, session, name="gate: baseline", split="gate")
    if outcome.compiled is outcome.baseline:
        outcome.notes.append("no candidate agreed better with the raters before the gate; the judge is unchanged")
    else:
        with session.phase("gate"):
            after = judge_items(outcome.compiled, splits.gate, session, name="gate: compiled", split="gate")
        spec = outcome.baseline.spec
        outcome.gate = measure_gain(outcome.objective, before.answers, after.answers, splits.gate, spec)
        lost = (after.unscored - before.unscored) / len(splits.gate)
        if lost > LOST:
            outcome.notes.append(
                f"on gate it leaves {lost:.0%} more of the items unscored than its parent: it does not replace it"
            )
        outcome.replaces = outcome.gate["low"] is not None and outcome.gate["low"] > 0 and lost <= LOST
        if before.unscored == len(splits.gate) > after.unscored:
            outcome.replaces = True
            outcome.notes.append("on gate the judge as it was gave no verdict, so there was nothing to compare with")
        elif not outcome.replaces and outcome.gate["low"] is not None:
            outcome.notes.append(
                "more labels can show a smaller gain: four times as many gate items halve the interval"
            )
    if not outcome.replaces:
        _measure(outcome, before, splits.gate, session, "gate")


def _report(outcome: JudgeOutcome, splits: LabelSplits, session: Session) -> None:
    spec, items = outcome.baseline.spec, splits.test
    with session.phase("test"):
        before = judge_items(outcome.baseline, items, session, name="test: baseline", split="test")
        after = judge_items(outcome.compiled, items, session, name="test: compiled", split="test")
    _measure(outcome, after, items, session, "test")
    outcome.before = before
    outcome.test_baseline = agreement(before.answers, items, spec)
    outcome.gain = measure_gain(outcome.objective, before.answers, after.answers, items, spec)
    outcome.accuracy_gain = measure_gain("accuracy", before.answers, after.answers, items, spec)


def _measure(outcome: JudgeOutcome, judged: Judged, items: Sequence[Item], session: Session, split: str) -> None:
    outcome.split, outcome.judged = split, judged
    outcome.agreement = agreement(judged.answers, items, outcome.baseline.spec)
    outcome.ceiling = ceiling(items, outcome.baseline.spec, seed=session.seed)
