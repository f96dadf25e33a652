"""The main job: baseline on val, proposals, the winner by a paired comparison, the gate's decision, the sealed test.

A list of named steps over one `Search`; each writes what it found into the run's state, so that a killed run goes on
where it stopped (`resume`), and everything before is answered from the response cache.
"""

import copy
import json
import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.datasets import Splits, Task
from assay.datasets.tasks import content_hash
from assay.errors import AssayError, BudgetExceeded, ConfigError, ModelError, OptimizerError, Unscored
from assay.models.meter import ignore
from assay.optimizers.budgets import named_val, of_all, too_few_calls
from assay.optimizers.candidates import Candidate, SearchSpace, best_with_fewest_tokens
from assay.optimizers.comparison import Comparison, compare, ended_early
from assay.optimizers.demonstrations import Demonstration, explore
from assay.optimizers.estimate import price_of
from assay.optimizers.evaluation import Evaluation, evaluate
from assay.optimizers.proposals import Watch
from assay.optimizers.repairs import repaired_dspy
from assay.optimizers.reserve import FEWEST, Decisions, ReportPlan, forecast_pair, pair_of, plan_report
from assay.optimizers.search import AutoSearch
from assay.optimizers.sequential import LEAST_SPREAD, WORST_SPREAD, SequentialTest, spread_of
from assay.optimizers.session import CONTINUES, Session, Student
from assay.optimizers.statistics import Gain, differences_of
from assay.optimizers.teleprompters import Proposal, auto_adapters, check_optimizer, propose
from assay.programs import program_version
from assay.scrubbing import scrubbed

__all__ = ["CompileConfig", "CompileOutcome", "compile_prompts"]

AUTO_SEARCH_CALLS = 300
_SIDES = ("baseline", "compiled")
_BOOTSTRAPPED = 4  # demonstrations from runs of its own that a named optimizer shows, as in DSPy
_EXPLORED = 24  # successes that exploring looks for
_SAID = 500  # characters of an optimizer's error that a note quotes; its traceback has the whole
_TRIED = 4  # tasks that a program must have run on to compete where its optimizer was cut


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """Settings of one compile. `threshold` is the score from which a run counts as a success to learn from, in (0, 1].

    Without `test` the test split stays sealed: the compile is a part of a job that reports on it. `token_margin`, in [0, 1): see
    `assay.optimizers.candidates.best_with_fewest_tokens`.
    """

    optimizer: str = "auto"
    threshold: float = 0.8
    demos: int = 16
    val_size: int | None = None
    test: bool = True
    decisions: Decisions = field(default_factory=Decisions)
    settings: Mapping[str, Any] = field(default_factory=dict)
    token_margin: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise ConfigError(f"threshold={self.threshold!r} must be above 0 and at most 1")
        if not 0 <= self.token_margin < 1:
            raise ConfigError(f"token_margin={self.token_margin!r} must be at least 0 and below 1: how much expected score fewer tokens may cost")
        if not 1 <= self.demos <= 64:
            raise ConfigError(f"demos={self.demos!r} must be between 1 and 64")
        if self.val_size is not None and self.val_size < 1:
            raise ConfigError(f"val_size={self.val_size!r} must be at least 1")
        check_optimizer(self.optimizer, self.settings)


@dataclass
class CompileOutcome:
    """What a compile found. `replaces`: on gate, the interval of the paired gain lies above zero."""

    baseline: Student
    compiled: Student
    winner: str
    candidates: list[dict[str, Any]]
    explored: list[dict[str, Any]]
    stopped: str | None = None
    broken: str | None = None  # why gate or test could not be scored at all
    replaces: bool = False
    gate: Gain | None = None
    test_baseline: Evaluation | None = None
    test_compiled: Evaluation | None = None
    test_gain: Gain | None = None
    notes: list[str] = field(default_factory=list)


def compile_prompts(student: Student, splits: Splits, session: Session, config: CompileConfig, *, folder: Path) -> CompileOutcome:
    """Compiles `student` and reports it on the sealed test split.

    A cap that is reached while searching ends the search, and the best so far goes on to gate and test as far as the
    cap allows; the outcome says so in `stopped`. The same where a named optimizer breaks; then `notes` say so.

    Raises:
        OptimizerError: the optimizer broke, and no program has been evaluated.
        Cancelled: the user stopped the run; its state is kept for `--resume`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "val", "gate"):
        session.know(getattr(splits, split), split)
    search = _Search(student, splits, session, config, folder)
    price = price_of(session.lm, 300, 40) or 0.0
    plan = plan_report(splits, session.meter, config.decisions, pair=forecast_pair(student.program, session, cost_per_call=price), searching=True)
    plan.hold(session.meter)
    if config.decisions.gate:
        session.progress.say(f"warning: {plan.short}" if plan.short else plan.shows)
    if (few := too_few_calls(config.optimizer, config.settings, student, len(search.val), session)) is not None:
        search.notes.append(few)
        session.progress.say(f"warning: {few}")
    stopped: str | None = None
    with (
        scrubbed(open(folder / "dspy.log", "a")) as log,
        repaired_dspy(log, session.seed, search.saw, search.watch, search.ran),
        search.watch.listening(session.lm, session.prompt_lm),
    ):
        try:
            with session.phase("search"):
                search.run()
        except BudgetExceeded as cap:
            # the search's own budget is the normal end of auto, which spends what it is given; others are cut short
            stopped = None if cap.what == "search calls" and config.optimizer == "auto" else str(cap)
            session.progress.say(f"end of the search: {cap}; the best so far goes on")
        search.finish()
        winner = search.best()
        outcome = CompileOutcome(
            student, winner.student, winner.name, [c.summary() for c in search.candidates], search.explored, stopped, notes=search.notes
        )
        try:
            plan = _planned(search.candidates[0], winner, splits, session, config.decisions)
            outcome.stopped = outcome.stopped or plan.short
            _decide(outcome, splits.gate[: plan.gate], session, config.decisions)
            if config.test:
                _report(outcome, splits.unseal()[: plan.test], session, config.decisions)
        except BudgetExceeded as cap:
            outcome.stopped = str(cap)
            session.progress.say(f"stopped before the report was complete: {cap}")
        except ModelError as error:  # what was searched is kept; the report can be made when the model is back
            outcome.stopped = outcome.broken = str(error)
    return outcome


def _planned(baseline: Candidate, winner: Candidate, splits: Splits, session: Session, decisions: Decisions) -> ReportPlan:
    """Tasks of gate and test by what val showed of spread and calls; what they will take is kept from here on."""
    before, after = baseline.evaluation, winner.evaluation
    spread = WORST_SPREAD
    if winner is not baseline:  # it was chosen on val, which shows less spread than there is
        spread = max(LEAST_SPREAD, spread_of(list(differences_of(before.scores, after.scores))))
    pair = pair_of(before, after, session) if len(before) and len(after) else forecast_pair(winner.student.program, session)
    plan = plan_report(splits, session.meter, decisions, pair=pair, spread=spread)
    plan.hold(session.meter)
    return plan


def _decide(outcome: CompileOutcome, tasks: list[Task], session: Session, decisions: Decisions) -> None:
    """Whether the result replaces the baseline, on gate; nothing where somebody else decides."""
    if outcome.compiled is outcome.baseline:
        compared = sum((row["n"] or 0) > 0 for row in outcome.candidates) > 1
        why = (
            "the cap ended the search before any candidate was compared on val"
            if outcome.stopped
            else "nothing else than the plain program was proposed"
        )
        outcome.notes.append("nothing beat the plain program on val; it stays as it is" if compared else f"{why}; it stays as it is")
        return
    if not decisions.gate:
        return
    found = _compared(outcome, tasks, session, decisions, "gate")
    outcome.gate, outcome.replaces = found.gain, found.gain.is_gain


def _report(outcome: CompileOutcome, tasks: list[Task], session: Session, decisions: Decisions) -> None:
    """The sealed test split, opened here and only here: baseline and result together."""
    found = _compared(outcome, tasks, session, decisions, "test")
    outcome.test_baseline, outcome.test_compiled, outcome.test_gain = found.before, found.after, found.gain


def _compared(outcome: CompileOutcome, tasks: list[Task], session: Session, decisions: Decisions, split: str) -> Comparison:
    if not tasks:
        raise BudgetExceeded(f"the caps leave nothing for {split}")
    rule = SequentialTest(tasks=len(tasks), difference=decisions.difference) if decisions.early_stop else None
    found = compare(outcome.baseline, outcome.compiled, tasks, session, split=split, names=_SIDES, rule=rule)
    if said := ended_early(found, split):
        outcome.notes.append(said)
    if found.cap is not None and (found.gain.is_gain if split == "gate" else found.gain.n >= FEWEST):
        outcome.notes.append(f"{split} ended after {found.gain.n} of {found.planned} tasks: {found.cap}")
    elif found.cap is not None:
        outcome.stopped = str(found.cap)
    return found


def _same(one: Student, other: Student) -> bool:
    return program_version(one.program, one.settings["adapter"]) == program_version(other.program, other.settings["adapter"])


class _Search:
    """Finds candidates: a named optimizer's one, or the many of `auto`."""

    def __init__(self, student: Student, splits: Splits, session: Session, config: CompileConfig, folder: Path) -> None:
        self.student, self.splits, self.session, self.config, self.folder = student, splits, session, config, folder
        self.candidates: list[Candidate] = [Candidate("baseline", student)]
        self._chosen: Callable[[], Candidate] = self._highest
        self.explored: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.val: list[Task] = splits.val if config.val_size is None else splits.val[: config.val_size]
        self.watch = Watch(student.program, session.lm)
        self.sighted: Candidate | None = None  # the best program that the optimizer at work has evaluated so far
        self._runs: dict[str, tuple[Student, list[float]]] = {}  # of programs that it ran on single tasks, with their scores

    def best(self) -> Candidate:
        """The winner on val; the baseline where nothing was evaluated, and among equals."""
        return self._chosen()

    def _highest(self) -> Candidate:
        """Highest mean over the tasks that all evaluated candidates ran; among equals the plain program."""
        running = [c for c in self.candidates if len(c.evaluation)] or self.candidates[:1]
        common = set.intersection(*(set(c.evaluation.results) for c in running))

        def mean(candidate: Candidate) -> float:
            scores = [value for key, value in candidate.evaluation.scores.items() if key in common and not math.isnan(value)]
            return sum(scores) / len(scores) if scores else -1.0

        return best_with_fewest_tokens(running, [mean(c) for c in running], self.config.token_margin)

    def run(self) -> None:
        if self.config.optimizer == "auto":
            self._auto()
        else:
            self._named(self.config.optimizer)

    def finish(self) -> None:
        """Writes the state.

        Raises:
            ModelError: no task of the plain program could be scored: the run measured the server, not the program.
        """
        state = {"candidates": [c.summary() for c in self.candidates], "explored": self.explored, "notes": self.notes}
        (self.folder / "search.json").write_text(json.dumps(state, indent=1))
        plain = self.candidates[0].evaluation
        if plain.why_unscored is not None:
            raise ModelError(f"none of the {len(plain)} val tasks could be scored: {plain.why_unscored}. {CONTINUES}", flag="--resume")

    def _named(self, name: str) -> None:
        val = self.val[: named_val(name, len(self.val), self.session, self.student)]
        evaluate(self.student, val, self.session, name="val: baseline", into=self.candidates[0].evaluation)
        proposal = Proposal(
            self.student, self.splits.train, val, self.session, self.config.threshold, min(_BOOTSTRAPPED, self.config.demos), self.config.demos,
            self.config.settings,
        )  # fmt: skip
        cut: BudgetExceeded | None = None
        try:
            with self.session.meter.aside(of_all(self.candidates[0].evaluation)):
                self._propose(name, proposal)
        except BudgetExceeded as cap:
            cut = cap
        for candidate in self.candidates[1:]:
            if not len(candidate.evaluation):
                evaluate(candidate.student, val, self.session, name=f"val: {candidate.name}", into=candidate.evaluation)
        if cut is not None:
            raise cut

    def saw(self, program: Any, result: Any) -> None:
        """Keeps the best of what a teleprompter evaluates: the program that saw the most tasks, then the highest mean."""
        if not isinstance(program, Student):
            return
        found = Evaluation()
        for example, prediction, _ in result.results:
            task = self.session.tasks.get(content_hash(example.inputs().toDict()))
            if task is not None and hasattr(prediction, "_result"):
                found.take(task, prediction)
        if not len(found):  # the traced batches of GEPA: their predictions are pairs with traces
            return
        self.session.progress.say(f"  a program of {type(program.program).__name__}: {found.mean:.3f} on {len(found)} tasks")
        best = self.sighted
        if best is None or (len(found), found.mean) > (len(best.evaluation), best.mean):
            self.sighted = Candidate("", copy.deepcopy(program), found)

    def _propose(self, name: str, proposal: Proposal) -> None:
        self.sighted = None
        try:
            with self._calls_shown(f"{name} proposes, LM calls"):
                proposed = propose(name, proposal)
                self.notes += self.watch.checked(proposed.program, self.student.program, self.splits.train)
            if _same(proposed, self.student):
                return
            self.candidates.append(Candidate(f"{name}, cut short" if proposal.cut else name, proposed))
            if proposal.cut is not None:
                raise proposal.cut
        except BudgetExceeded:
            self.notes.append(f"a cap ended {name} before it was done{self._take_best(name)}")
            raise
        except Exception as error:
            if isinstance(error, AssayError) and not isinstance(error, ModelError | Unscored):
                raise  # a setting, a package, the store: the user's to mend, and never a lost proposal
            self._failed(name, error)

    def _take_best(self, name: str) -> str:
        """Has the best program of an optimizer that ended early compete, where it got so far; what a note says about that."""
        if len(self.candidates) == 1 and (best := self.sighted or self._tried_most()) is not None:
            best.name = f"{name}, cut short"
            self.candidates.append(best)
        return "; its best so far competes" if len(self.candidates) > 1 else ""

    def _failed(self, name: str, error: Exception) -> None:
        """An optimizer that breaks has lost its proposal; what was paid for until then is kept, and reported.

        Raises:
            OptimizerError: no program has been evaluated, so there is nothing to report.
        """
        said = f"{name} failed: {type(error).__name__}: {' '.join(str(error).split())[:_SAID]}"
        if not len(self.candidates[0].evaluation):
            raise OptimizerError(said) from error
        with open(self.folder / "dspy.log", "a") as log:
            traceback.print_exception(error, file=log)
        kept = self._take_best(name) or "; the plain program goes on alone"
        self.notes.append(f"{said}{kept} (traceback: {self.folder / 'dspy.log'})")
        self.session.progress.say(f"warning: {said}{kept}")

    def ran(self, program: Any, score: float) -> None:
        """Keeps what a teleprompter runs on single tasks, outside of an evaluation."""
        if isinstance(program, Student):
            key = json.dumps([(p.signature.instructions, p.demos) for p in program.predictors()], default=str)
            self._runs.setdefault(key, (program, []))[1].append(score)

    def _tried_most(self) -> Candidate | None:
        """The best of the programs that a teleprompter ran on several tasks; it is still to be evaluated on val."""
        tried = [(sum(scores) / len(scores), program) for program, scores in self._runs.values() if len(scores) >= _TRIED]
        for _, program in sorted(tried, key=lambda entry: -entry[0]):
            best = copy.deepcopy(program)
            for predictor in best.predictors():
                predictor.lm = None  # a teleprompter sets its own
            if not _same(best, self.student):
                return Candidate("", best)
        return None

    @contextmanager
    def _calls_shown(self, name: str) -> Iterator[None]:
        """A bar of LM calls: what a teleprompter does inside is its own, but each of its calls passes the meter."""
        left, meter = self.session.meter.search_calls_left(), self.session.meter
        with self.session.progress.bar(name, int(left) if math.isfinite(left) else None) as advance:
            meter.on_call = advance
            try:
                yield
            finally:
                meter.on_call = ignore

    def _auto(self) -> None:
        """Demonstrations from labels, which cost no call, or from exploring; then the search over what may be made of them."""
        adapters, left = auto_adapters(self.student), self.session.meter.search_calls_left()
        pool = self._labels() if self._labels_fit() else []
        if not pool or not self._labels_suffice():
            explored, adapters = self._explored(adapters, left)
            pool = explored or pool
        space = SearchSpace(self.student, pool, adapters, most=self.config.demos, seed=self.session.seed)
        auto = AutoSearch(space, self.candidates[0], self.val, self.session, self.watch)
        self.candidates, self._chosen = auto.candidates, lambda: auto.best(token_margin=self.config.token_margin)
        auto.run()
        self.notes.append(f"the search ended after {sum(len(c.evaluation) for c in self.candidates)} runs: {auto.stopped}")
        self.notes += auto.rejections()

    def _labels(self) -> list[Demonstration]:
        """The data's own answers as demonstrations: they cost no call."""
        name = self.student.program.named_predictors()[0][0]
        return [Demonstration(task, ((name, dict(task.inputs), dict(task.expected)),), 1.0) for task in self.splits.train if task.expected]

    def _explored(self, adapters: list[str | None], left: float) -> tuple[list[Demonstration], list[str | None]]:
        """The successes of the program's variants on train, and the prompt formats that succeeded most, the best first."""
        session = self.session
        found = explore(
            self.student, self.splits.train, session, adapters=adapters, want=_EXPLORED,
            max_calls=0.25 * left if math.isfinite(left) else 10 * _EXPLORED, threshold=self.config.threshold,
        )  # fmt: skip
        self.explored = found.variants
        first = found.adapter if found.teacher is not None else adapters[0]
        session.progress.say(f"explored: {len(found.demonstrations)} successes to learn from")
        return found.demonstrations, [first, *(name for name in adapters if name != first and not found.behind(name))]

    def _labels_fit(self) -> bool:
        """Labels are demonstrations by themselves only where one predictor gives all that is expected."""
        predictors, expected = self.student.program.predictors(), set(self.splits.train[0].expected)
        return len(predictors) == 1 and bool(expected) and expected <= set(predictors[0].signature.output_fields)

    def _labels_suffice(self) -> bool:
        """Whether labels give all outputs: a program that reasons first also learns from runs of its own."""
        outputs = set(self.student.program.predictors()[0].signature.output_fields)
        return outputs <= set(self.splits.train[0].expected)
