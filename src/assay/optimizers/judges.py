"""Compiles a judge against people's labels: prompts, reading, calibration; chosen on val, decided on gate, reported on test."""

import copy
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
from assay.judges import Cascade, Judge, Jury, PointwiseJudge, reliability_weights
from assay.judges.agreement import MEASURES, Agreement, agreement, ceiling, kappas, measure_gain, objective_of, oriented
from assay.judges.audit import ATTACK
from assay.judges.base import rebuilt
from assay.judges.calibration import METHODS, Calibration, expected_step, fit
from assay.judges.labels import Item, LabelSplits
from assay.judges.panel import RULES
from assay.judges.reading import STYLES, shown_as, tell_apart
from assay.optimizers.judged import Judged, joined, judge_items, only, recalibrated
from assay.optimizers.proposals import Watch
from assay.optimizers.repairs import repaired_dspy
from assay.optimizers.session import Session, Student
from assay.optimizers.teleprompters import OPTIMIZERS, Proposal, check_optimizer, propose
from assay.rubrics import Criterion, Grade, Rubric
from assay.rubrics.criteria import JudgeSpec
from assay.scrubbing import scrubbed
from assay.traces import Rollout

__all__ = ["JudgeConfig", "JudgeOutcome", "agreement_rubric", "compile_judge_prompts", "item_tasks"]

_Calibrate = Callable[[Judged, Sequence[Item]], Calibration | None]
_CUTS = 25  # places tried for each cut of an ordered scale
_LEASTS = (0.5, 0.6, 0.7, 0.8, 0.9)  # confidences of the first judge of a cascade, the cheapest first
_SLACK = 0.005  # how much better a costlier candidate must be on val
_FOLDS = 5
_LOST = 0.02  # share of the items on which one judge may give fewer verdicts than another that it is held against
_NO_JUDGES = ("knn", "ensemble")  # optimizers whose result is no judge


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """`optimizer` is `auto` (prompt forms, demonstrations and calibration), `calibrate` (calibration alone), or any of the
    main job's by name. `objective` None: by the scale, see `objective_of`."""

    optimizer: str = "auto"
    objective: str | None = None
    demos: int = 2  # of each label

    def __post_init__(self) -> None:
        if self.objective is not None and self.objective not in MEASURES:
            raise ConfigError(f"objective={self.objective!r} must be one of {', '.join(MEASURES)}")
        if not 1 <= self.demos <= 16:
            raise ConfigError(f"demos={self.demos!r} of each label must be between 1 and 16")
        if self.optimizer in _NO_JUDGES:
            raise ConfigError(f"{self.optimizer} makes another program around the judge; take auto, calibrate, or another of {', '.join(OPTIMIZERS)}")
        if self.optimizer not in ("auto", "calibrate"):
            check_optimizer(self.optimizer)


@dataclass
class JudgeOutcome:
    """What a compile of a judge found; agreement and gains are on the sealed test items."""

    baseline: Judge
    compiled: Judge
    objective: str
    winner: str
    candidates: list[dict[str, Any]]
    gate: dict[str, Any] | None = None
    replaces: bool = False
    stopped: str | None = None
    test_baseline: Agreement | None = None
    test_compiled: Agreement | None = None
    answers: dict[str, Judged] = field(default_factory=dict)  # of the test items: `baseline` and `compiled`
    gain: dict[str, Any] | None = None
    accuracy_gain: dict[str, Any] | None = None
    ceiling: Agreement | None = None
    notes: list[str] = field(default_factory=list)


def item_tasks(items: Sequence[Item], judge: Judge) -> list[Task]:
    """Items as tasks of the judge as a program: what it sees goes in, the label most raters gave is expected."""
    return [
        Task(
            id=item.id[:200], task_type=item.modes[0], inputs={name: item.shown.get(name) for name in judge.shows},
            expected={"verdict": item.modes[0]}, metadata={"shares": item.shares, "rationales": item.rationales},
        )
        for item in items
    ]  # fmt: skip


def agreement_rubric(spec: JudgeSpec) -> Rubric:
    """Scores one verdict for teleprompters: the share of raters who gave it, or, on an ordered scale, one minus the mean
    squared distance to theirs. The raters' rationales are its feedback text."""
    steps = dict(zip(spec.scale, spec.steps, strict=True))
    width = (spec.steps[-1] - spec.steps[0]) or 1.0

    def agrees(task: Task, prediction: dict[str, Any], rollout: Rollout | None) -> Grade:
        shares, verdict = task.metadata["shares"], prediction["verdict"]
        if spec.kind == "nominal" or len(spec.scale) == 2:
            grade = shares.get(verdict, 0.0)
        else:
            grade = 1 - math.fsum(share * ((steps[verdict] - steps[label]) / width) ** 2 for label, share in shares.items())
        said = ", ".join(f"{label} ({100 * share:.0f} %)" for label, share in sorted(shares.items(), key=lambda entry: -entry[1]))
        why = f" Their reasons: {' | '.join(task.metadata['rationales'][:3])}" if task.metadata["rationales"] else ""
        return Grade(value=min(1.0, max(0.0, grade)), reason=f"The judge said {verdict!r}; people said {said}.{why}")

    return Rubric("agreement", [Criterion(name="agrees", check=agrees)])


def compile_judge_prompts(
    judge: Judge, splits: LabelSplits, session: Session, config: JudgeConfig, *, folder: Path | None = None, on_open: Callable[[], Any] | None = None
) -> JudgeOutcome:  # fmt: skip
    """Compiles a judge against people's labels and reports it on the sealed test items.

    A cap that is reached while searching ends the search; the best so far goes on as far as the cap allows.

    Args:
        folder: where what DSPy's optimizers print is kept; None drops it.
        on_open: called before the test items are judged.
    Raises:
        ModelError: no verdict could be read at all: the model or its server is at fault.
        Cancelled: the user stopped the run; what was judged is in the response cache.
    """
    search = _Search(judge, splits, session, config, folder)
    stopped = None
    with session.phase("search"):
        try:
            search.run()
        except BudgetExceeded as cap:
            stopped = str(cap)
            session.progress.say(f"end of the search: {cap}; the best so far goes on")
    winner = search.best()
    outcome = JudgeOutcome(
        judge, winner.judge, search.objective, winner.name, [c.summary() for c in search.candidates], stopped=stopped, notes=search.notes
    )
    outcome.ceiling = ceiling(splits.test, judge.spec, seed=session.seed)
    try:
        _decide(outcome, splits, session)
        if on_open is not None:
            on_open()
        _report(outcome, splits, session)
    except BudgetExceeded as cap:
        outcome.stopped = str(cap)
    return outcome


def _decide(outcome: JudgeOutcome, splits: LabelSplits, session: Session) -> None:
    if outcome.compiled is outcome.baseline:
        outcome.notes.append("nothing agreed better with people before the gate; the judge stays as it is")
        return
    with session.phase("gate"):
        before, after = _both(outcome, splits.gate, session, "gate")
    outcome.gate = measure_gain(outcome.objective, before.answers, after.answers, splits.gate, outcome.baseline.spec)
    lost = (after.unscored - before.unscored) / len(splits.gate)
    if lost > _LOST:
        outcome.notes.append(f"on gate it gives no verdict on {lost:.0%} more of the items than its parent: it does not replace it")
    outcome.replaces = outcome.gate["low"] is not None and outcome.gate["low"] > 0 and lost <= _LOST


def _report(outcome: JudgeOutcome, splits: LabelSplits, session: Session) -> None:
    spec = outcome.baseline.spec
    with session.phase("test"):
        before, after = _both(outcome, splits.test, session, "test")
    outcome.answers = {"baseline": before, "compiled": after}
    outcome.test_baseline = agreement(before.answers, splits.test, spec)
    outcome.test_compiled = agreement(after.answers, splits.test, spec)
    outcome.gain = measure_gain(outcome.objective, before.answers, after.answers, splits.test, spec)
    outcome.accuracy_gain = measure_gain("accuracy", before.answers, after.answers, splits.test, spec)


def _both(outcome: JudgeOutcome, items: Sequence[Item], session: Session, split: str) -> tuple[Judged, Judged]:
    before = judge_items(outcome.baseline, items, session, name=f"{split}: baseline", split=split)
    if outcome.compiled is outcome.baseline:
        return before, before
    return before, judge_items(outcome.compiled, items, session, name=f"{split}: compiled", split=split)


@dataclass
class _Candidate:
    name: str
    judge: Judge
    score: float = -math.inf  # the objective on held-out items of train and val
    unscored: int = 0
    n: int = 0

    def summary(self) -> dict[str, Any]:
        return {"name": self.name, "agreement": self.score if math.isfinite(self.score) else None, "n": self.n, "unscored": self.unscored}


class _Search:
    """Prompts first, each with and without calibration; the simplest of those that agree best on val."""

    def __init__(self, judge: Judge, splits: LabelSplits, session: Session, config: JudgeConfig, folder: Path | None) -> None:
        self.judge, self.splits, self.session, self.config, self.folder = judge, splits, session, config, folder
        self.objective = config.objective or objective_of(judge.spec)
        self.candidates: list[_Candidate] = []
        self.notes: list[str] = []

    def run(self) -> None:
        self._try("as it is", self.judge)
        if all(c.unscored == c.n for c in self.candidates):
            raise ModelError(f"none of {self.candidates[0].n} items got a verdict: {self._first_reason}")
        if self.config.optimizer == "auto":
            for name, judge in self._forms():
                self._try(name, judge)
        elif self.config.optimizer != "calibrate":
            self._try(self.config.optimizer, self._proposed(self.config.optimizer))

    def best(self) -> _Candidate:
        """The candidate that agrees best on held-out items of train and val; of those within half a hundredth the one that came
        first. A judge that says nothing of what is hard agrees well on the rest: those that give fewer verdicts than others
        do not compete."""
        if not self.candidates:
            return _Candidate("as it is", self.judge)
        fewest = min(c.unscored / max(1, c.n) for c in self.candidates)
        open_ = [c for c in self.candidates if c.unscored / max(1, c.n) - fewest <= _LOST]
        top = max(c.score for c in open_)
        return next(c for c in open_ if c.score >= top - _SLACK)

    def _forms(self) -> list[tuple[str, Judge]]:
        """Other ways to put the same question: letters for words, and demonstrations from people's labels; other votes of a
        jury, and other thresholds of a cascade. What a member was asked before is answered from the cache."""
        if isinstance(self.judge, Jury):
            return self._votes(self.judge)
        if isinstance(self.judge, Cascade):
            first, second = self.judge.first, self.judge.second
            return [(f"second judge under {least:g}", Cascade(first, second, least=least)) for least in _LEASTS if least != self.judge.least]
        if not isinstance(self.judge, PointwiseJudge):
            return []
        shown = self._demonstrations()
        forms: list[tuple[str, Judge]] = []
        for style in STYLES[1:] if tell_apart(self.judge.labels) else STYLES[2:]:
            for demos in ([], shown):
                try:
                    judge = self._variant(style, demos)
                except ConfigError as error:  # a class of one's own that has one style
                    self.notes.append(f"no other style was tried: {error}")
                    continue
                if demos or style != self.judge.style:
                    forms.append((f"{style}{f', {len(demos)} labelled demos' if demos else ''}", judge))
        return forms

    def _votes(self, jury: Jury) -> list[tuple[str, Judge]]:
        train = [judge_items(member, self.splits.train, self.session, name="train: a member", split="train") for member in jury.members]
        reliable = reliability_weights([judged.answers.verdicts for judged in train], self.splits.train, len(jury.labels))
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
        """Of each label the train items on which people agree most, mixed, so that no label comes last."""
        groups: dict[str, list[Item]] = defaultdict(list)
        people = [item for item in self.splits.train if ATTACK not in item.id]
        for item in sorted(people, key=lambda item: -max(item.shares.values())):
            groups[item.modes[0]].append(item)
        chosen = [item for group in groups.values() for item in group[: self.config.demos]]
        np.random.default_rng(self.session.seed).shuffle(chosen)
        return [{**{name: shown_as(item.shown.get(name)) for name in self.judge.shows}, "verdict": item.modes[0]} for item in chosen]

    def _proposed(self, name: str) -> Judge:
        train, val = item_tasks(self.splits.train, self.judge), item_tasks(self.splits.val[:50], self.judge)
        self.session.know(train, "train")
        self.session.know(val, "val")
        proposal = Proposal(Student(copy.deepcopy(self.judge), self.session), train, val, self.session, threshold=0.5, demos=self.config.demos * 2)
        watch = Watch(self.judge, self.session.lm)
        log = self.folder / "dspy.log" if self.folder is not None else Path(os.devnull)
        with (
            scrubbed(open(log, "a")) as file,
            repaired_dspy(file, self.session.seed, watch=watch),
            watch.listening(self.session.lm, self.session.prompt_lm),
        ):
            compiled = propose(name, proposal).program
        if not isinstance(compiled, Judge):
            raise ConfigError(f"{name} makes another program around the judge, and what is compiled must be a judge")
        self.notes += watch.checked(compiled, self.judge, train)
        return compiled

    def _try(self, name: str, judge: Judge) -> None:
        """Judges val, and train where there is something to calibrate, once; keeps the judge plain and under each calibration
        that its readings allow."""
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
        pool, fixed = self._held_out(judge, name)
        self._add(name, judge, only(read, pool), [items[row] for row in pool])
        for method in METHODS:
            for cuts in (False, True) if _cuttable(judge) else (False,):
                calibrate = functools.partial(_fitted, method, cuts, judge=judge, objective=self.objective, seed=session.seed)
                found = self._cross_fitted(calibrate, read, items, pool, fixed, judge)
                if found is not None:
                    kept = copy.deepcopy(judge)
                    kept.calibration = calibrate(read, items)  # for the gate: all labels but gate's and test's
                    self._add(f"{name}, {method}{' with cuts' if cuts else ''}", kept, found, [items[row] for row in pool])

    def _held_out(self, judge: Judge, name: str) -> tuple[list[int], list[int]]:
        """Rows of train and val on which candidates are compared, each judged by a calibration that did not see it, and rows
        that a calibration always sees. What was proposed from train is compared on val alone; what a prompt shows as a
        demonstration, and attacks that were added to train, are never compared on."""
        train, val = self.splits.train, self.splits.val
        proposed = name == self.config.optimizer
        shown = {json.dumps({key: demo.get(key) for key in judge.shows}) for predictor in judge.predictors() for demo in predictor.demos}
        pool, fixed = list[int](), list[int]()
        for row, item in enumerate(train):
            if json.dumps({key: shown_as(item.shown.get(key)) for key in judge.shows}) in shown:
                continue
            (fixed if proposed or ATTACK in item.id else pool).append(row)
        return [*pool, *range(len(train), len(train) + len(val))], fixed

    def _cross_fitted(
        self,
        calibrate: Callable[..., Calibration | None],
        read: Judged,
        items: Sequence[Item],
        pool: Sequence[int],
        fixed: Sequence[int],
        judge: Judge,
    ) -> Judged | None:
        """What the judge says of the pool's items, each under a calibration that was fitted on the others."""
        fold_of = dict(zip(np.random.default_rng(self.session.seed).permutation(pool).tolist(), itertools.cycle(range(_FOLDS)), strict=False))
        parts: dict[int, tuple[list[int], Judged]] = {}
        for fold in sorted(set(fold_of.values())):
            held, rest = [row for row in pool if fold_of[row] == fold], [*fixed, *(row for row in pool if fold_of[row] != fold)]
            calibration = calibrate(only(read, rest), [items[row] for row in rest])
            if calibration is None:
                return None
            parts[fold] = held, recalibrated(only(read, held), calibration, judge)
        order = [row for held, _ in parts.values() for row in held]
        return only(joined([found for _, found in parts.values()]), [order.index(row) for row in pool])

    def _add(self, name: str, judge: Judge, judged: Judged, items: Sequence[Item]) -> None:
        found = agreement(judged.answers, items, judge.spec, intervals=False)
        value = found.values[self.objective]
        self.candidates.append(_Candidate(name, judge, -math.inf if value is None else oriented(self.objective, value), judged.unscored, len(items)))
        if value is None:
            self.notes.append(f"{name}: {self.objective} is undefined before the gate: {found.why[self.objective]}")
        self.session.progress.say(f"  {name}: {self.objective} {'undefined' if value is None else f'{value:.3f}'} on {len(items)} held-out items")


def _cuttable(judge: Judge) -> bool:
    """Whether cuts can lie between the words: a pair's verdict is taken from both orders instead."""
    return len(judge.spec.scale) > 2 and judge.spec.kind != "nominal" and not judge.compares


def _fitted(method: str, cuts: bool, judged: Judged, items: Sequence[Item], *, judge: Judge, objective: str, seed: int) -> Calibration | None:
    pairs = zip(judged.raw, items, strict=True)
    rows = [row for raw, item in pairs if raw is not None for row in judge.fit_rows(raw, item.shares)]
    if not rows or len({label for _, shares in rows for label in shares}) < 2:
        return None
    raw, shares = [r for r, _ in rows], [s for _, s in rows]
    found = fit(method, raw, shares, judge.labels, seed=seed)
    if not cuts or found is None:
        return found
    places = [expected_step(list(found.map(r, judge.labels).values()), judge.spec) for r in raw]
    return replace(found, cuts=_cuts(places, shares, judge.spec, objective))


def _cuts(places: Sequence[float], said: Sequence[Mapping[str, float]], spec: JudgeSpec, objective: str) -> list[float]:
    """Cuts between the words, one after the other moved to where the objective is best; rising throughout."""
    tried = sorted(set(np.quantile(places, np.linspace(0.02, 0.98, _CUTS)).tolist()))
    cuts = np.quantile(places, np.linspace(0, 1, len(spec.scale) + 1)[1:-1]).tolist()
    shares = np.array([[given.get(label, 0.0) for label in spec.scale] for given in said])
    at, eye = np.array(places), np.eye(len(spec.scale))

    def value(chosen: list[float]) -> float:
        verdicts = np.searchsorted(chosen, at, side="right")
        if objective == "accuracy":
            return float(shares[np.arange(len(at)), verdicts].mean())
        found = kappas((eye[verdicts].T @ shares)[None], quadratic=objective != "kappa")[0]  # cuts do not move a rank correlation
        return float(found) if math.isfinite(found) else -math.inf

    for _ in range(2):
        for index in range(len(cuts)):
            low, high = cuts[index - 1] if index else -math.inf, cuts[index + 1] if index + 1 < len(cuts) else math.inf
            options = [[*cuts[:index], place, *cuts[index + 1 :]] for place in tried if low <= place <= high]
            cuts = max([cuts, *options], key=value)
    return [float(cut) for cut in cuts]
