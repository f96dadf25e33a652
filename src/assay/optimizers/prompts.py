"""The main job: baseline on val, proposals, the winner by a paired comparison, the gate's decision, the sealed test.

A list of named steps over one `Search`; each writes what it found into the run's state, so that a killed run goes on
where it stopped (`resume`), and everything before is answered from the response cache.
"""

import copy
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.datasets import Splits, Task
from assay.datasets.tasks import content_hash
from assay.errors import BudgetExceeded, ConfigError, ModelError, OptimizerError
from assay.models.meter import ignore
from assay.optimizers.comparison import compare
from assay.optimizers.demonstrations import Demonstration, choose, explore, with_demos
from assay.optimizers.evaluation import Evaluation, evaluate
from assay.optimizers.racing import Candidate, best_of, race
from assay.optimizers.repairs import repaired_dspy
from assay.optimizers.session import Session, Student
from assay.optimizers.statistics import Gain
from assay.optimizers.teleprompters import Proposal, auto_adapters, check_optimizer, propose

__all__ = ["CompileConfig", "CompileOutcome", "compile_prompts"]

AUTO_SEARCH_CALLS = 300
_SIDES = ("baseline", "compiled")
_BLOCK = 6  # val tasks of one round of the race
_REFLECTIVE = 1000  # search calls from which proposals by reflection are worth their price


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """Settings of one compile. `threshold` is the score from which a run counts as a success to learn from, in (0, 1]."""

    optimizer: str = "auto"
    threshold: float = 0.8
    demos: int = 4
    val_size: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise ConfigError(f"threshold={self.threshold!r} must be above 0 and at most 1")
        if not 1 <= self.demos <= 64:
            raise ConfigError(f"demos={self.demos!r} must be between 1 and 64")
        if self.val_size is not None and self.val_size < 1:
            raise ConfigError(f"val_size={self.val_size!r} must be at least 1")
        check_optimizer(self.optimizer)


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
    cap allows; the outcome says so in `stopped`.

    Raises:
        Cancelled: the user stopped the run; its state is kept for `--resume`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "val", "gate"):
        session.know(getattr(splits, split), split)
    search = _Search(student, splits, session, config, folder)
    stopped: str | None = None
    with open(folder / "dspy.log", "a") as log, repaired_dspy(log, session.seed, search.saw):
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
            _decide(outcome, splits, session)
            _report(outcome, splits, session)
        except BudgetExceeded as cap:
            outcome.stopped = str(cap)
            session.progress.say(f"stopped before the report was complete: {cap}")
        except ModelError as error:  # what was searched is kept; the report can be made when the model is back
            outcome.stopped = outcome.broken = str(error)
    return outcome


def _decide(outcome: CompileOutcome, splits: Splits, session: Session) -> None:
    """Whether the result replaces the baseline, on gate."""
    if outcome.compiled is outcome.baseline:
        raced = sum((row["n"] or 0) > 0 for row in outcome.candidates) > 1
        outcome.notes.append(
            "nothing beat the plain program on val; it stays as it is"
            if raced
            else "the cap ended the search before any candidate was compared on val; the plain program stays as it is"
        )
        return
    found = compare(outcome.baseline, outcome.compiled, splits.gate, session, split="gate", names=_SIDES)
    outcome.gate, outcome.replaces = found.gain, found.gain.is_gain


def _report(outcome: CompileOutcome, splits: Splits, session: Session) -> None:
    """The sealed test split, opened here and only here: baseline and result together."""
    found = compare(outcome.baseline, outcome.compiled, splits.unseal(), session, split="test", names=_SIDES)
    outcome.test_baseline, outcome.test_compiled, outcome.test_gain = found.before, found.after, found.gain


class _Search:
    """Finds candidates and races them."""

    def __init__(self, student: Student, splits: Splits, session: Session, config: CompileConfig, folder: Path) -> None:
        self.student, self.splits, self.session, self.config, self.folder = student, splits, session, config, folder
        self.candidates: list[Candidate] = [Candidate("baseline", student, preference=math.inf)]
        self.explored: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.val: list[Task] = splits.val if config.val_size is None else splits.val[: config.val_size]
        self.sighted: Candidate | None = None  # the best program that the optimizer at work has evaluated so far

    def best(self) -> Candidate:
        """The leader on val; the baseline where nothing was evaluated."""
        return best_of(self.candidates) if any(len(c.evaluation) for c in self.candidates) else self.candidates[0]

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
            raise ModelError(f"none of the {len(plain)} val tasks could be scored: {plain.why_unscored}")

    def _named(self, name: str) -> None:
        val = self.val[:50]
        evaluate(self.student, val, self.session, name="val: baseline", into=self.candidates[0].evaluation)
        proposal = Proposal(self.student, self.splits.train, val, self.session, self.config.threshold, self.config.demos)
        self._propose(name, proposal)
        for candidate in self.candidates[1:]:
            evaluate(candidate.student, val, self.session, name=f"val: {candidate.name}", into=candidate.evaluation)

    def saw(self, program: Any, result: Any) -> None:
        """Keeps the best of what a teleprompter evaluates: the program that saw the most tasks, then the highest mean."""
        if not isinstance(program, Student):
            return
        found = Evaluation()
        for example, prediction, _ in result.results:
            task = self.session.tasks.get(content_hash(example.inputs().toDict()))
            if task is not None and hasattr(prediction, "_result"):
                found.take(task, prediction)
        self.session.progress.say(f"  a program of {type(program.program).__name__}: {found.mean:.3f} on {len(found)} tasks")
        best = self.sighted
        if best is None or (len(found), found.mean) > (len(best.evaluation), best.mean):
            self.sighted = Candidate("", copy.deepcopy(program), found)

    def _propose(self, name: str, proposal: Proposal) -> None:
        self.sighted = None
        try:
            with self._calls_shown(f"{name} proposes, LM calls"):
                self.candidates.append(Candidate(name, propose(name, proposal)))
        except BudgetExceeded:
            if self.sighted is not None:
                self.sighted.name = f"{name}, cut short"
                self.candidates.append(self.sighted)
            self.notes.append(f"a cap ended {name} before it was done" + ("; the best program it had evaluated competes" if self.sighted else ""))
            raise
        except ConfigError:
            raise
        except Exception as error:  # a teleprompter that breaks is a lost proposal; the run and its data are kept
            if name == self.config.optimizer:
                raise OptimizerError(f"{name} failed: {type(error).__name__}: {error}") from error
            self.notes.append(f"{name} failed: {type(error).__name__}: {error}")
            self.session.progress.say(f"{name} failed: {type(error).__name__}: {str(error)[:200]}")

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
        """Cheapest first: demonstrations from labels or exploring, then, where the budget carries them, reflection."""
        session = self.session
        adapters, left = auto_adapters(self.student), session.meter.search_calls_left()
        first = self._from_labels(adapters) if self._labels_fit() else self._from_exploring(adapters, left)
        self._race(len(self.val) if left > _REFLECTIVE else 4 * _BLOCK)
        if session.meter.search_calls_left() > _REFLECTIVE:
            for name in ("bootstrap-search", "mipro", *(["gepa"] if session.prompt_lm is not None else [])):
                self._propose(name, self._proposal(first))
            self._race(len(self.val))

    def _from_labels(self, adapters: list[str]) -> str:
        """The data's own answers as demonstrations: they cost no call."""
        name = self.student.program.named_predictors()[0][0]
        train = self.splits.train
        pool = [Demonstration(task, ((name, dict(task.inputs), dict(task.expected)),), 1.0) for task in train]
        for adapter in adapters:
            self._add(pool, 2 * self.config.demos, adapter, diverse=True, what="labels")
        self._add(pool, 4 * self.config.demos, adapters[-1], diverse=True, what="labels")
        self._add(pool, 2 * self.config.demos, adapters[-1], diverse=False, what="labels")
        return adapters[0]

    def _from_exploring(self, adapters: list[str], left: float) -> str:
        """The successes of the program's variants on train as demonstrations, under the adapter that succeeds most."""
        demos, session = self.config.demos, self.session
        found = explore(
            self.student, self.splits.train, session, adapters=adapters, want=4 * demos,
            max_calls=0.25 * left if math.isfinite(left) else 10 * _REFLECTIVE, threshold=self.config.threshold,
        )  # fmt: skip
        self.explored = found.variants
        first, pool = found.adapter or adapters[0], found.demonstrations
        session.progress.say(f"explored: {len(pool)} successes to learn from" + (f", best with the {first} adapter" if pool else ""))
        if pool:
            self._add(pool, demos, first, diverse=True, what="demos")
            for adapter in [first, *(name for name in adapters if name != first and not found.behind(name))]:
                self._add(pool, 2 * demos, adapter, diverse=True, what="demos")
        return first

    def _add(self, pool: list[Demonstration], k: int, adapter: str, *, diverse: bool, what: str) -> None:
        chosen = choose(pool, k, seed=self.session.seed, diverse=diverse)
        name = f"{len(chosen)} {'diverse' if diverse else 'random'} {what}, {adapter}"
        # equal on a few dozen tasks: more demonstrations cover more forms, fewer cost less where tokens are paid for
        preference = len(chosen) if self.session.lm.model.startswith("embedded/") else -len(chosen)
        self.candidates.append(Candidate(name, with_demos(self.student, chosen, adapter=adapter), preference=preference))

    def _proposal(self, adapter: str) -> Proposal:
        student = with_demos(self.student, [], adapter=adapter)
        return Proposal(student, self.splits.train, self.val[:50], self.session, self.config.threshold, self.config.demos)

    def _labels_fit(self) -> bool:
        """Labels are demonstrations by themselves only where one predictor gives all that is expected."""
        predictors, expected = self.student.program.predictors(), set(self.splits.train[0].expected)
        return len(predictors) == 1 and bool(expected) and expected <= set(predictors[0].signature.output_fields)

    def _race(self, most: int) -> None:
        race([c for c in self.candidates if not c.dropped], self.val[:most], self.session, block=_BLOCK)
