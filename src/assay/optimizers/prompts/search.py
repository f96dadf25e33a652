"""The candidates of one compile: the proposal of a named DSPy optimizer, or those of the `auto` search.

Does not open gate or test.
"""

import copy
import math
import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from assay.datasets import Splits, Task
from assay.errors import AssayError, BudgetExceeded, ModelError, OptimizerError, Unscored
from assay.evaluation.evaluation import Evaluation, evaluate, evaluate_pairs
from assay.evaluation.executors import in_background, in_order
from assay.evaluation.session import CONTINUES, RecordedProgram, Session
from assay.evaluation.statistics import losing_evidence
from assay.models.meter import ignore
from assay.optimizers.budget import calls_per_run, of_all
from assay.optimizers.prompts.candidates import (
    Candidate,
    CandidateSpec,
    Posterior,
    Score,
    SearchSpace,
    best_with_fewest_tokens,
    posterior,
    searched_program,
    with_models_of,
)
from assay.optimizers.prompts.demonstrations import Demonstration, Exploration, Run, explore
from assay.optimizers.prompts.edits import Parent, propose_text
from assay.optimizers.prompts.given import title_of
from assay.optimizers.prompts.named import Proposal
from assay.optimizers.prompts.proposals import InstructionCheck, Proposed, propose_instruction
from assay.optimizers.prompts.teleprompters import auto_prompt_formats, named_val, propose
from assay.optimizers.settings import CompileConfig
from assay.programs import program_version
from assay.programs.compose import EnsembleProgram
from assay.programs.foreign_agent import TextAgent
from assay.rubrics.dspy_metric import example_fields
from assay.rubrics.scoring import ScoredRun
from assay.support.numbers import counted
from assay.support.places import write_whole
from assay.support.values import json_text

# -- The search of `auto`: a bandit over pairs of candidate and task, with new candidates while they promise a gain.
#
# Each round computes a posterior of the candidates' qualities (`assay.optimizers.prompts.candidates`), draws pairs by
# Thompson sampling over the existing candidates and over mutants of the best ones, and evaluates the drawn pairs
# concurrently. A round depends only on earlier rounds, so the same seed gives the same search for any number of
# threads. Does not open gate or test. Source: Thompson sampling, Russo et al. 2018 (arXiv 1707.02038); top-two, Russo
# 2020 (arXiv 1602.08448).


_ROUNDS = 12  # of a search that spends its budget
_SMALLEST, _LARGEST = 8, 64  # pairs of a round
_MUTANTS = 24  # new candidates that are considered in each round
_NEW_SHARE = 0.34  # of a round's pairs that may go to new candidates
_SECOND = 0.3  # probability that a pair goes to the second best of a draw
_FIRST_TASKS = 2  # tasks that each of the first candidates runs
_ENOUGH = 0.005  # expected gain of the best candidate over the chosen one, under which the search stops
_ALPHA = 0.05  # probability that the best candidate is ever dropped
# Fewest tasks that a winner has run on: this number, or this share of the most that any candidate ran on.
_PROVEN, _PROVEN_SHARE = 8, 0.4
_CONFIRMING = 0.25  # of the budget, at its end: no new candidates, the best ones run on more tasks
_PARENTS = 6
OVERRIDDEN = "the program sets its own"
_PROPOSALS = 2  # instructions proposed at the start, and one a round later
_PROPOSAL_SHARE = 0.06  # of the calls left, at most


class AutoSearch:
    """Searches one space. `candidates[0]` is the plain program: it is evaluated like the others and never dropped.

    Args:
        tasks: the val tasks, all of which may be used.
        instruction_check: checks the instructions that are proposed.
        on_round: called after each round.
    """

    def __init__(
        self,
        space: SearchSpace,
        plain: Candidate,
        tasks: Sequence[Task],
        session: Session,
        instruction_check: InstructionCheck | None = None,
        on_round: Callable[[], None] | None = None,
    ) -> None:
        self.space, self.session = space, session
        self.instruction_check = instruction_check or InstructionCheck(space.student.program, session.lm)
        self.candidates = [plain]
        self.tasks = list(tasks)
        random.Random(f"tasks {session.seed}").shuffle(self.tasks)
        self.rng = np.random.default_rng([session.seed, 20])
        self.choices = random.Random(f"search {session.seed}")
        plain.spec = CandidateSpec(prompt_format=space.prompt_formats[0])
        self.stopped, self._on_round = "", on_round
        self._budget = math.inf
        self._spent_before = 0.0  # runs and unrecorded calls of before the search

    def run(self) -> None:
        """Runs until the budget, the val tasks or the stopping rule ends it."""
        self._budget, self._spent_before = self.session.meter.search_calls_left(), self._spent()
        self._add_instructions(self._proposed(self._numbers(_PROPOSALS), self._parent()))
        self.begin()
        size = self._size()
        while pairs := self._drawn(size):
            proposing = in_background(partial(self._proposed, self._numbers(1), self._parent()))
            continues = self.evaluate_round(pairs)
            self._add_instructions(proposing())
            if not continues:
                break
            self.drop_losing()
            self.report_round()
        for candidate, value in zip(self.candidates, self._posterior(self.candidates).mean, strict=True):
            candidate.expected = min(1.0, float(value))

    def best(self, *, token_margin: float = -1.0) -> Candidate:
        """The candidate with the highest expected score among those with enough tasks; the plain program on ties.

        Args:
            token_margin: see `best_with_fewest_tokens`; a negative value ignores tokens.
        """
        running = [c for c in self.candidates if len(c.evaluation) and not c.dropped]
        if not running:
            return self.candidates[0]
        enough = min(_PROVEN, _PROVEN_SHARE * max(len(c.evaluation) for c in running))
        means = np.minimum(
            self._posterior(running).mean, 1.0
        )  # scores are at most 1; the posterior's mean is unbounded
        values = [value if len(c.evaluation) >= enough else -math.inf for c, value in zip(running, means, strict=True)]
        return best_with_fewest_tokens(running, values, token_margin)

    # -- rounds

    def _size(self) -> int:
        """Pairs of a round: the budget in `_ROUNDS` parts, whatever the number of threads."""
        affordable = self._remaining_calls() / self._calls_per_task()
        return _LARGEST if math.isinf(affordable) else max(_SMALLEST, min(_LARGEST, int(affordable / _ROUNDS)))

    def _remaining_calls(self) -> float:
        """Calls that the search may still make.

        A run counts as at least one call, and unrecorded calls count too; otherwise a program whose calls cannot be
        recorded would be searched without end.
        """
        return min(self.session.meter.search_calls_left(), self._budget - (self._spent() - self._spent_before))

    def _spent(self) -> float:
        runs = sum(max(1.0, count) for candidate in self.candidates for count in candidate.evaluation.calls.values())
        return runs + self.session.recorder.missed.calls

    def _calls_per_task(self) -> float:
        counts = [count for candidate in self.candidates for count in candidate.evaluation.calls.values()]
        return max(1.0, sum(counts) / len(counts)) if counts else 1.0

    def _most_calls(self) -> float:
        """A high estimate of calls per run. A round that could exceed the cap is not started: where it stopped would be
        random."""
        counts = [count for candidate in self.candidates for count in candidate.evaluation.calls.values()]
        return max(1.0, float(np.quantile(counts, 0.9))) if counts else float(calls_per_run(self.space.student.program))

    def _affordable(self, requested: int) -> int:
        calls_left = self._remaining_calls()
        return requested if math.isinf(calls_left) else min(requested, int(calls_left / self._most_calls()))

    def _out_of_calls(self, reason: str) -> str:
        """Why no more runs are made.

        Only numbers that are the same in a replay are named: cached calls count, so a resumed search repeats its
        rounds.
        """
        calls = self.session.meter.calls_of("search")
        return f"{reason} ({calls} calls used, cached answers included; gate and test keep their part of the caps)"

    def begin(self) -> None:
        """Runs the first candidates on the same few tasks, as many as fit into a third of the budget."""
        specs = self.space.first()
        if specs:
            specs += [replace(specs[0], draw=0, instruction=i) for i in range(1, len(self.space.instructions))]
        fit = self._affordable(_FIRST_TASKS * (1 + len(specs)))
        calls_left = self._remaining_calls()
        if math.isfinite(calls_left):
            fit = min(fit, max(_FIRST_TASKS, int(calls_left / self._most_calls() / 3)))
        for spec in specs[: max(0, fit // _FIRST_TASKS - 1)]:
            self._add(spec)
        first = self.tasks[:_FIRST_TASKS]
        self.evaluate_round([(candidate, task) for candidate in self.candidates for task in first][: max(fit, 1)])

    def _add(self, spec: CandidateSpec) -> Candidate:
        why = self.space.reasons[spec.instruction]
        candidate = Candidate(spec.name, self.space.build(spec), spec=spec, why=why)
        self.candidates.append(candidate)
        return candidate

    def _drawn(self, size: int) -> list[tuple[Candidate, Task]]:
        """The next round's pairs; empty if budget or tasks are used up, or no candidate promises a gain."""
        size = self._affordable(size)
        if size < 1:
            self.stopped = self._out_of_calls("the search cap does not allow another run")
            return []
        running = [c for c in self.candidates if not c.dropped]
        existing = {c.spec for c in self.candidates}
        values = self._posterior(running).mean
        parents = [running[i].spec for i in np.argsort(-values)[:_PARENTS]]
        confirming = math.isfinite(self._budget) and self._remaining_calls() < _CONFIRMING * self._budget
        mutants = [] if confirming else self.space.mutants(parents, _MUTANTS, self.choices)
        new = [spec for spec in mutants if spec not in existing]
        belief = self._posterior(running, new)
        if self._settled(belief, running):
            return []
        return self._allotted(belief, running, new, size)

    def _settled(self, belief: Posterior, running: Sequence[Candidate]) -> bool:
        for candidate in running:
            scores = candidate.evaluation.scores.values()
            if len(scores) == len(self.tasks) and min(scores) >= 1.0:  # False for NaN
                self.stopped = (
                    f"{candidate.name} has the highest possible score on all val tasks; the winner has the highest "
                    "expected score, or fewer tokens where that makes no difference"
                )
                return True
        drawn = np.clip(belief.draws(512, np.random.default_rng(self.session.seed)), 0.0, 1.0)
        evaluated = [i for i, c in enumerate(running) if len(c.evaluation)]
        chosen = max(evaluated, key=lambda i: belief.mean[i])
        gain = float((drawn.max(axis=1) - drawn[:, chosen]).mean())
        if gain < _ENOUGH:
            self.stopped = f"no candidate promises a gain of {_ENOUGH:g}"
        return gain < _ENOUGH

    def _allotted(
        self, belief: Posterior, running: list[Candidate], new: list[CandidateSpec], size: int
    ) -> list[tuple[Candidate, Task]]:
        candidates: dict[int, Candidate] = dict(enumerate(running))
        waiting = {i: [t for t in self.tasks if t.id not in c.evaluation.results] for i, c in candidates.items()}
        pairs: list[tuple[Candidate, Task]] = []
        fresh = 0
        for draw in belief.draws(4 * size, self.rng):
            if len(pairs) >= size:
                break
            order = [int(i) for i in np.argsort(-draw) if waiting.get(int(i), self.tasks)]
            order = [i for i in order if i in candidates or fresh < _NEW_SHARE * size]
            if not order:
                break
            place = order[1] if len(order) > 1 and self.rng.random() < _SECOND else order[0]
            if place not in candidates:
                candidates[place] = self._add(new[place - len(running)])
                waiting[place] = list(self.tasks)
            fresh += place >= len(running)
            pairs.append((candidates[place], waiting[place].pop(0)))
        if not pairs:
            self.stopped = "all candidates have run on all val tasks"
        return pairs

    def evaluate_round(self, pairs: Sequence[tuple[Candidate, Task]]) -> bool:
        """Runs the pairs; returns whether the search continues.

        The results of a round that a cap interrupted are dropped: which runs were finished would be random.
        """
        try:
            runs = evaluate_pairs(
                [(c.student, task) for c, task in pairs],
                self.session,
                name=f"search: {counted(len(self.candidates), 'candidates')}",
            )
        except BudgetExceeded as cap:
            if not any(len(c.evaluation) for c in self.candidates):
                raise
            self.stopped = self._out_of_calls(f"the cap on {cap.what} ended a round")
            return False
        for (candidate, task), run in zip(pairs, runs, strict=True):
            candidate.evaluation.add_run(task, run)
        self._drop_overridden()
        return True

    # -- decisions

    def _posterior(self, candidates: Sequence[Candidate], new: Sequence[CandidateSpec] = ()) -> Posterior:
        scores = [
            Score(i, task, value)
            for i, c in enumerate(candidates)
            for task, value in c.evaluation.scores.items()
            if not math.isnan(value)
        ]
        return posterior(scores, self.space.kernel([*(c.spec for c in candidates), *new]))

    def drop_losing(self) -> None:
        """Drops candidates that are worse than the best by an anytime-valid test, corrected for the number of
        candidates."""
        best = self.best()
        for candidate in self.candidates[1:]:
            if candidate is best or candidate.dropped:
                continue
            evidence = losing_evidence(
                best.evaluation.scores, candidate.evaluation.scores, order=[t.id for t in self.tasks]
            )
            if evidence >= len(self.candidates) / _ALPHA:
                candidate.dropped = (
                    f"behind {best.name} on {len(candidate.evaluation)} tasks (evidence {evidence:.3g} to 1)"
                )

    def _drop_overridden(self) -> None:
        """Drops candidates whose prompt format the program overrides; it is varied no longer."""
        own = self.space.student.settings["adapter"]
        for candidate in self.candidates[1:]:
            varied = candidate.spec.prompt_format
            if varied != own and not candidate.dropped and candidate.evaluation.overrides(varied):
                candidate.dropped = OVERRIDDEN
                self.space.prompt_formats = [name for name in self.space.prompt_formats if name == own] or [own]

    def overridden(self) -> list[str]:
        """A note where the program sets its own prompt format."""
        found = any(candidate.dropped == OVERRIDDEN for candidate in self.candidates)
        return [f"prompt formats were not varied: {OVERRIDDEN}"] if found else []

    def report_round(self) -> None:
        """Reports the leading candidate and its score as progress."""
        if self._on_round is not None:
            self._on_round()
        best, count = self.best(), sum(len(c.evaluation) for c in self.candidates)
        tasks = counted(len(best.evaluation), "tasks")
        score = "not scored" if math.isnan(best.evaluation.mean) else f"score {best.mean:.2f}"
        self.session.progress.say(
            f"after {count} runs of {len(self.candidates)} candidates, best: {best.name}, {score} on {tasks}"
        )

    def _add_instructions(self, proposed: Sequence[Proposed]) -> None:
        new = [one for one in proposed if one.texts not in self.space.instructions]
        self.space.instructions += [dict(one.texts) for one in new]
        self.space.reasons += [one.why for one in new]

    def _numbers(self, count: int) -> list[int]:
        """The numbers of the next proposals, at most `count`: they take a small share of the calls that are left."""
        calls_left = self._remaining_calls()
        numbers = [
            number
            for number in range(self.instruction_check.proposed, self.instruction_check.proposed + count)
            if _PROPOSAL_SHARE * calls_left >= number + 1
        ]
        self.instruction_check.proposed += len(numbers)
        return numbers

    def _proposed(self, numbers: Sequence[int], parent: Parent | None = None) -> list[Proposed]:
        """Proposes instructions concurrently; empty if a cap is reached."""

        def propose(number: int) -> Proposed | None:
            if parent is None:
                return propose_instruction(
                    self.space.student, self.space.pool, self.session, number=number,
                    instruction_check=self.instruction_check,
                )  # fmt: skip
            return propose_text(
                parent, self.space.train, self.session, number=number, check=self.instruction_check,
                threshold=self.space.threshold,
            )  # fmt: skip

        try:
            proposals = in_order(lambda index: propose(numbers[index]), len(numbers), threads=len(numbers))
        except BudgetExceeded:
            return []
        return [one for one in proposals if one is not None]

    def _parent(self) -> Parent | None:
        """What the next version of an agent's texts is made from; None for a program."""
        space = self.space
        if not isinstance(space.student.program, TextAgent):
            return None
        if not len(self.candidates[0].evaluation):  # before the first runs on val
            return Parent(student=space.student, texts={}, failures=space.failures)
        best = self.best()
        return Parent(student=best.student, texts=space.instructions[best.spec.instruction])


# -- Search.


_BOOTSTRAPPED = 4  # bootstrapped demonstrations that a named optimizer shows, as in DSPy
_EXPLORED = 24  # successful runs after which exploring ends
_QUOTED = 500  # characters of an optimizer's error that a note quotes; its traceback has the whole
_TRIED = 4  # tasks that a program must have run on to compete if its optimizer was interrupted


def _same(program: RecordedProgram, other: RecordedProgram) -> bool:
    return program_version(program.program, program.settings["adapter"]) == program_version(
        other.program, other.settings["adapter"]
    )


class PromptSearch:
    """Makes and evaluates candidates: one of a named optimizer, or many of `auto`."""

    def __init__(
        self, student: RecordedProgram, splits: Splits, session: Session, config: CompileConfig, folder: Path
    ) -> None:
        self.splits, self.session, self.config, self.folder = splits, session, config, folder
        self.student = searched_program(student)
        self.candidates: list[Candidate] = [Candidate("baseline", student)]
        self._best: Callable[[float], Candidate] = self._highest  # takes the token margin
        self.explored: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.failed: str | None = None  # why the optimizer ended with an error
        self.val: list[Task] = splits.val
        self.instruction_check = InstructionCheck(self.student.program, session.lm)
        self.incumbent: Candidate | None = None  # the best program that the optimizer at work has evaluated so far
        # Programs that a teleprompter ran on single tasks, with their scores; by instructions and demonstrations.
        self._runs: dict[str, tuple[RecordedProgram, list[float]]] = {}

    def best(self) -> Candidate:
        """The best candidate on val; the baseline on ties and if nothing was evaluated.

        A note says why it is not the one with the highest score.
        """
        chosen, highest = self._best(self.config.token_margin), self._best(-1.0)
        if chosen is not highest:
            self.notes.append(
                f"{chosen.name} wins on val: no significant difference in score from {highest.name}, with "
                f"{chosen.prompt_tokens:,.0f} prompt tokens a task instead of {highest.prompt_tokens:,.0f}"
            )
        return chosen

    def _highest(self, token_margin: float) -> Candidate:
        """The highest mean over the tasks that all evaluated candidates ran; the plain program on ties."""
        running = [c for c in self.candidates if len(c.evaluation)] or self.candidates[:1]
        common = set.intersection(*(set(c.evaluation.results) for c in running))

        def mean(candidate: Candidate) -> float:
            scores = [
                value for key, value in candidate.evaluation.scores.items() if key in common and not math.isnan(value)
            ]
            return sum(scores) / len(scores) if scores else -1.0

        return best_with_fewest_tokens(running, [mean(c) for c in running], token_margin)

    def run(self) -> None:
        if self.config.optimizer == "auto":
            self._auto()
        else:
            self._named(self.config.optimizer)

    def finish(self) -> None:
        """Writes the state.

        Raises:
            ModelError: no val task of the plain program could be scored, so no candidate can be compared.
        """
        self._save()
        baseline = self.candidates[0].evaluation
        if baseline.why_unscored is not None:
            raise ModelError(
                f"none of the {len(baseline)} val tasks could be scored: {baseline.why_unscored}. {CONTINUES}"
            )

    def summaries(self) -> list[dict[str, Any]]:
        """The candidates as reports list them."""
        return [candidate.summary(self.candidates[0]) for candidate in self.candidates]

    def _save(self) -> None:
        """Writes the state for pages that show the search, also while it is in progress."""
        state = {"candidates": self.summaries(), "explored": self.explored, "notes": self.notes}
        write_whole(self.folder / "search.json", json_text(state, indent=1))

    def _named(self, name: str) -> None:
        val = self.val[: named_val(name, len(self.val), self.session, self.student)]
        baseline = self.candidates[0]
        evaluate(baseline.student, val, self.session, name="val: baseline", into=baseline.evaluation)
        proposal = Proposal(
            self.student,
            self.splits.train,
            val,
            self.session,
            self.config.threshold,
            min(_BOOTSTRAPPED, self.config.demos),
            self.config.demos,
            self.config.optimizer_settings or {},
        )
        cut: BudgetExceeded | None = None
        try:
            with self.session.meter.aside(of_all(self.candidates[0].evaluation)):
                self._propose(title_of(name), proposal)
        except BudgetExceeded as cap:
            cut = cap
        for candidate in self.candidates[1:]:
            if not len(candidate.evaluation):
                evaluate(candidate.student, val, self.session, name=f"val: {candidate.name}", into=candidate.evaluation)
        if cut is not None:
            raise cut

    def keep_if_best(self, program: Any, result: Any) -> None:
        """Keeps the best program that a teleprompter evaluates: the one with most tasks, then the highest mean."""
        if not isinstance(program, RecordedProgram):
            return
        evaluation = Evaluation()
        for example, prediction, _ in result.results:
            task, run = self.session.tasks.find(*example_fields(example)), ScoredRun.of(prediction)
            if task is not None and run is not None and run.result is not None:
                evaluation.add_run(task, run)
        if not len(evaluation):  # the traced batches of GEPA: their predictions are pairs with traces
            return
        self.session.progress.say(
            f"  a program of {type(program.program).__name__}: {evaluation.mean:.3f} on {len(evaluation)} tasks"
        )
        best = self.incumbent
        if best is None or (len(evaluation), evaluation.mean) > (len(best.evaluation), best.mean):
            self.incumbent = Candidate("", copy.deepcopy(program), evaluation)

    def _propose(self, name: str, proposal: Proposal) -> None:
        self.incumbent = None
        try:
            with self._calls_bar(f"{name} proposes, LM calls"):
                proposed = propose(self.config.optimizer, proposal)
                self.notes += self.instruction_check.checked(proposed.program, self.splits.train)
            if _same(proposed, self.student):
                return
            self.candidates.append(Candidate(f"{name}, cut short" if proposal.cut else name, proposed))
            if proposal.cut is not None:
                raise proposal.cut
        except BudgetExceeded:
            self.notes.append(f"a cap ended {name} before it was done{self._add_best(name)}")
            raise
        except Exception as error:
            if isinstance(error, AssayError) and not isinstance(error, ModelError | OptimizerError | Unscored):
                raise  # a setting, a package, the store: the user has to correct it; it is not a failed proposal
            self._failed(name, error)
        finally:
            self.notes += [*proposal.notes, *self.instruction_check.rejections()]

    def _add_best(self, name: str) -> str:
        """Adds the best program of an interrupted optimizer to the candidates, if there is one; returns text for a
        note."""
        if len(self.candidates) == 1 and (best := self.incumbent or self._tried_most()) is not None:
            best.name = f"{name}, cut short"
            self.candidates.append(best)
        return "; its best so far competes" if len(self.candidates) > 1 else ""

    def _failed(self, name: str, error: Exception) -> None:
        """Records the failure of an optimizer; the best program it evaluated before that competes.

        Raises:
            OptimizerError: no program has been evaluated, so there is nothing to report.
        """
        failure = f"{name} failed: {type(error).__name__}: {' '.join(str(error).split())[:_QUOTED]}"
        if not len(self.candidates[0].evaluation):
            raise OptimizerError(failure) from error
        with open(self.folder / "dspy.log", "a") as log:
            traceback.print_exception(error, file=log)
        self.failed = failure
        consequence = self._add_best(name) or "; continuing with the plain program only"
        self.notes.append(f"{failure}{consequence} (traceback: {self.folder / 'dspy.log'})")
        self.session.progress.say(f"warning: {failure}{consequence}")

    def record_run(self, program: Any, score: float) -> None:
        """Keeps the score of a run that a teleprompter makes on a single task, outside of an evaluation."""
        if isinstance(program, RecordedProgram):
            key = json_text([(p.signature.instructions, p.demos) for p in program.predictors()])
            self._runs.setdefault(key, (program, []))[1].append(score)

    def _tried_most(self) -> Candidate | None:
        """The best of the programs that a teleprompter ran on several tasks, not yet evaluated on val."""
        tried = [
            (sum(scores) / len(scores), program) for program, scores in self._runs.values() if len(scores) >= _TRIED
        ]
        for _, program in sorted(tried, key=lambda entry: -entry[0]):
            best = with_models_of(copy.deepcopy(program), self.student)  # a teleprompter sets its own
            if not _same(best, self.student):
                return Candidate("", best)
        return None

    @contextmanager
    def _calls_bar(self, name: str) -> Iterator[None]:
        """A progress bar of LM calls: a teleprompter does not report progress, but each of its calls passes the
        meter."""
        calls_left, meter = self.session.meter.search_calls_left(), self.session.meter
        with self.session.progress.bar(name, int(calls_left) if math.isfinite(calls_left) else None) as advance:
            meter.on_call = advance
            try:
                yield
            finally:
                meter.on_call = ignore

    def _auto(self) -> None:
        """Collects demonstrations from labels (no calls) or by exploring; then searches over candidates made of
        them."""
        calls_left = self.session.meter.search_calls_left()
        prompt_formats = auto_prompt_formats(self.student, calls_left)
        pool, failures = self._labels(), list[Run]()
        if not pool or not self._labels_suffice():
            exploration, prompt_formats = self._explored(prompt_formats, calls_left)
            pool, failures = exploration.demonstrations or pool, exploration.failures
        space = SearchSpace(
            self.student, pool, prompt_formats, most=self.config.demos, seed=self.session.seed, failures=failures,
            train=self.splits.train, threshold=self.config.threshold,
        )  # fmt: skip
        auto = AutoSearch(space, self.candidates[0], self.val, self.session, self.instruction_check, self._save)
        self.candidates, self._best = auto.candidates, lambda margin: auto.best(token_margin=margin)
        auto.run()
        self.notes.append(
            f"the search ended after {sum(len(c.evaluation) for c in self.candidates)} runs: {auto.stopped}"
        )
        self.notes += [*auto.overridden(), *self.instruction_check.rejections()]

    def _labels(self) -> list[Demonstration]:
        """The expected outputs of the data as demonstrations; this needs no call. Empty where they are none."""
        names = self._labelled()
        return [Demonstration.of_label(task, names) for task in self.splits.train if task.expected and names]

    def _explored(self, prompt_formats: list[str | None], calls_left: float) -> tuple[Exploration, list[str | None]]:
        """Runs of the program's variants on train, and the prompt formats by success rate, best first."""
        session = self.session
        exploration = explore(
            self.student,
            self.splits.train,
            session,
            prompt_formats=prompt_formats,
            target=_EXPLORED,
            max_calls=0.25 * calls_left if math.isfinite(calls_left) else 10 * _EXPLORED,
            threshold=self.config.threshold,
        )
        self.explored = exploration.variants
        if exploration.overridden:
            self.notes.append(f"prompt formats were not varied: {OVERRIDDEN}")
            prompt_formats = prompt_formats[:1]
        first = exploration.prompt_format if exploration.teacher is not None else prompt_formats[0]
        session.progress.say(f"explored: {len(exploration.demonstrations)} successes to learn from")
        return exploration, [
            first,
            *(name for name in prompt_formats if name != first and not exploration.behind(name)),
        ]

    def _labelled(self) -> list[str]:
        """The predictors whose demonstrations can be labels: the only one of a program, or of each ensemble member,
        if it has all expected fields as outputs. Empty if there are others, and for an agent's texts: an example shows
        what the agent said."""
        if isinstance(self.student.program, TextAgent):
            return []
        program, expected = self.student.program, set(self.splits.train[0].expected)
        predictors = program.named_predictors()
        members = program.members if isinstance(program, EnsembleProgram) else [program]
        single = all(len(member.predictors()) == 1 for member in members) and len(predictors) == len(members)
        fit = expected and all(expected <= set(predictor.signature.output_fields) for _, predictor in predictors)
        return [name for name, _ in predictors] if single and fit else []

    def _labels_suffice(self) -> bool:
        """Whether a task has all fields of a demonstration. A program that reasons first, or that looks something up
        and asks with it, also learns from runs of its own: a label has neither the thought nor what was found."""
        signature, task = self.student.program.predictors()[0].signature, self.splits.train[0]
        outputs, inputs = set(signature.output_fields), set(signature.input_fields)
        return outputs <= set(task.expected) and inputs <= set(task.inputs)
