"""The search of `auto`: a bandit over pairs of candidate and task, with new candidates while they promise a gain.

Each round computes a posterior of the candidates' qualities (`assay.optimizers.prompts.surrogate`), draws pairs by
Thompson sampling over the existing candidates and over mutants of the best ones, and evaluates the drawn pairs
concurrently. A round depends only on earlier rounds, so the same seed gives the same search for any number of threads.
Does not open gate or test.
Source: Thompson sampling, Russo et al. 2018 (arXiv 1707.02038); top-two, Russo 2020 (arXiv 1602.08448).
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from assay.datasets import Task
from assay.errors import BudgetExceeded
from assay.evaluation.evaluation import evaluate_pairs
from assay.evaluation.session import Session
from assay.evaluation.statistics import losing_evidence
from assay.evaluation.threads import in_background, in_order
from assay.optimizers.prompts.candidates import Candidate, CandidateSpec, SearchSpace, best_with_fewest_tokens
from assay.optimizers.prompts.instructions import propose_instruction
from assay.optimizers.prompts.proposals import InstructionCheck
from assay.optimizers.prompts.surrogate import Posterior, Score, posterior
from assay.support.numbers import counted

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
        self._proposals = 0  # proposals of instructions

    def run(self) -> None:
        """Runs until the budget, the val tasks or the stopping rule ends it."""
        self._budget, self._spent_before = self.session.meter.search_calls_left(), self._spent()
        self._add_instructions(self._proposed(self._numbers(_PROPOSALS)))
        self.begin()
        size = self._size()
        while pairs := self._drawn(size):
            proposing = in_background(partial(self._proposed, self._numbers(1)))
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
        return runs + self.session.recorder.unrecorded.calls

    def _calls_per_task(self) -> float:
        counts = [count for candidate in self.candidates for count in candidate.evaluation.calls.values()]
        return max(1.0, sum(counts) / len(counts)) if counts else 1.0

    def _most_calls(self) -> float:
        """A high estimate of calls per run. A round that could exceed the cap is not started: where it stopped would be
        random."""
        counts = [count for candidate in self.candidates for count in candidate.evaluation.calls.values()]
        return (
            max(1.0, float(np.quantile(counts, 0.9))) if counts else float(len(self.space.student.program.predictors()))
        )

    def _affordable(self, requested: int) -> int:
        calls_left = self._remaining_calls()
        return requested if math.isinf(calls_left) else min(requested, int(calls_left / self._most_calls()))

    def _out_of_calls(self, reason: str) -> str:
        """Why no more runs are made.

        Only numbers that are the same in a replay are named: cached calls count, so a resumed search repeats its
        rounds.
        """
        calls = self.session.meter.calls_of("search")
        return (
            f"{reason} ({calls} calls of the search count against its cap, answers from the cache included; "
            "gate and test keep their part of the caps)"
        )

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
        candidate = Candidate(spec.name, self.space.build(spec), spec=spec)
        self.candidates.append(candidate)
        return candidate

    def _drawn(self, size: int) -> list[tuple[Candidate, Task]]:
        """The next round's pairs; empty if budget or tasks are used up, or no candidate promises a gain."""
        size = self._affordable(size)
        if size < 1:
            self.stopped = self._out_of_calls("what is left is too little for another run")
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
                self.stopped = f"{candidate.name} has the highest possible score on all val tasks"
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

    def rejections(self) -> list[str]:
        """A note on the proposed instructions that were not taken."""
        rules = Counter(rule for _, rule in self.instruction_check.rejected)
        counts = ", ".join(f"{count} {rule}" for rule, count in sorted(rules.items()))
        return [f"{rules.total()} of {self._proposals} proposed instructions were rejected: {counts}"] if rules else []

    def report_round(self) -> None:
        """Reports the leading candidate and its score as progress."""
        if self._on_round is not None:
            self._on_round()
        best, count = self.best(), sum(len(c.evaluation) for c in self.candidates)
        score = "not scored" if math.isnan(best.evaluation.mean) else f"{best.mean:.2f}"
        self.session.progress.say(
            f"after {count} runs of {len(self.candidates)} candidates: {best.name} {score} on {len(best.evaluation)}"
        )

    def _add_instructions(self, proposed: Sequence[dict[str, str]]) -> None:
        self.space.instructions += [text for text in proposed if text not in self.space.instructions]

    def _numbers(self, count: int) -> list[int]:
        """The numbers of the next proposals, at most `count`: they take a small share of the calls that are left."""
        calls_left = self._remaining_calls()
        numbers = [
            number
            for number in range(self._proposals, self._proposals + count)
            if _PROPOSAL_SHARE * calls_left >= number + 1
        ]
        self._proposals += len(numbers)
        return numbers

    def _proposed(self, numbers: Sequence[int]) -> list[dict[str, str]]:
        """Proposes instructions concurrently; empty if a cap is reached."""

        def propose(number: int) -> dict[str, str] | None:
            return propose_instruction(
                self.space.student,
                self.space.pool,
                self.session,
                number=number,
                instruction_check=self.instruction_check,
            )

        try:
            proposals = in_order(lambda index: propose(numbers[index]), len(numbers), threads=len(numbers))
        except BudgetExceeded:
            return []
        return [text for text in proposals if text is not None]
