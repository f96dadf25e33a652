"""The search of `auto`: a bandit over one pool of candidate and task pairs, and new candidates for as long as they promise something.

In rounds: a posterior over the candidates' qualities (`assay.optimizers.surrogate`), Thompson sampling over the candidates that exist
and over mutants of the best that do not yet, and one concurrent evaluation of the pairs that were drawn. What a round decides depends
on the rounds before it alone, so the same seed gives the same search whatever the number of threads. Does not open gate or test.
Source: Thompson sampling, Russo et al. 2018 (arXiv 1707.02038); top-two, Russo 2020 (arXiv 1602.08448).
"""

import contextvars
import math
import random
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from assay.datasets import Task
from assay.errors import BudgetExceeded
from assay.optimizers.candidates import Candidate, CandidateSpec, SearchSpace, best_with_fewest_tokens
from assay.optimizers.evaluation import evaluate_pairs
from assay.optimizers.instructions import propose_instruction
from assay.optimizers.proposals import Watch
from assay.optimizers.session import Session
from assay.optimizers.statistics import losing_evidence
from assay.optimizers.surrogate import Posterior, Score, posterior

__all__ = ["AutoSearch"]

_ROUNDS = 12  # of a search that spends its budget
_SMALLEST, _LARGEST = 8, 64  # pairs of a round
_MUTANTS = 24  # candidates that are considered beside the existing ones in each round
_NEW_SHARE = 0.34  # of a round's pairs that may go to new candidates
_SECOND = 0.3  # probability that a pair goes to the second best of a draw
_FIRST_TASKS = 2  # tasks that each of the first candidates runs
_ENOUGH = 0.005  # expected gain of the best candidate over the chosen one, under which the search stops
_ALPHA = 0.05  # probability that the best candidate is ever dropped
_PROVEN, _PROVEN_SHARE = 8, 0.4  # tasks that a winner has run on at least: so many, or this share of the most that any ran on
_CONFIRMING = 0.25  # of the budget, at its end: no new candidates, the best ones run on more tasks
_PARENTS = 6
_PROPOSALS = 2  # instructions proposed at the start, and one a round later
_PROPOSAL_SHARE = 0.06  # of the calls left, at most


class AutoSearch:
    """Searches one space. `candidates[0]` is the plain program: it is evaluated like the others and never dropped.

    Args:
        tasks: the val tasks, all of which may be used.
        watch: checks the instructions that are proposed.
    """

    def __init__(self, space: SearchSpace, plain: Candidate, tasks: Sequence[Task], session: Session, watch: Watch | None = None) -> None:
        self.space, self.session = space, session
        self.watch = watch or Watch(space.student.program, session.lm)
        self.candidates = [plain]
        self.tasks = list(tasks)
        random.Random(f"tasks {session.seed}").shuffle(self.tasks)
        self.rng = np.random.default_rng([session.seed, 20])
        self.choices = random.Random(f"search {session.seed}")
        plain.spec = CandidateSpec(adapter=space.adapters[0])
        self.stopped = ""
        self._budget = math.inf
        self._spent_before = 0.0  # runs and unrecorded calls of before the search
        self._asked = 0  # proposals of instructions

    def run(self) -> None:
        """Runs until the budget, the val tasks or the stopping rule ends it."""
        self._budget, self._spent_before = self.session.meter.search_calls_left(), self._spent()
        self._take_in(self._proposed(self._numbers(_PROPOSALS)))
        self._begin()
        size = self._size()
        while pairs := self._drawn(size):
            with ThreadPoolExecutor(max_workers=1) as beside:
                proposing = beside.submit(contextvars.copy_context().run, self._proposed, self._numbers(1))
                go_on = self._evaluate(pairs)
                self._take_in(proposing.result())
            if not go_on:
                break
            self._drop()
            self._tell()
        for candidate, value in zip(self.candidates, self._posterior(self.candidates).mean, strict=True):
            candidate.expected = min(1.0, float(value))

    def best(self, *, token_margin: float = -1.0) -> Candidate:
        """The candidate of which most is expected, among those that ran on enough tasks; the plain program among equals.

        Args:
            token_margin: see `best_with_fewest_tokens`; below 0 tokens do not count.
        """
        running = [c for c in self.candidates if len(c.evaluation) and not c.dropped]
        if not running:
            return self.candidates[0]
        enough = min(_PROVEN, _PROVEN_SHARE * max(len(c.evaluation) for c in running))
        means = np.minimum(self._posterior(running).mean, 1.0)  # a score has an end, the posterior's mean has none
        values = [value if len(c.evaluation) >= enough else -math.inf for c, value in zip(running, means, strict=True)]
        return best_with_fewest_tokens(running, values, token_margin)

    # -- rounds

    def _size(self) -> int:
        """Pairs of a round: the budget in `_ROUNDS` parts, whatever the number of threads."""
        left = self._left() / self._calls_per_task()
        return _LARGEST if math.isinf(left) else max(_SMALLEST, min(_LARGEST, int(left / _ROUNDS)))

    def _left(self) -> float:
        """Calls that the search may still make. A run counts as one at least, and calls that went past the recorder count as well: a
        program whose calls cannot be recorded would otherwise be searched for ever."""
        return min(self.session.meter.search_calls_left(), self._budget - (self._spent() - self._spent_before))

    def _spent(self) -> float:
        runs = sum(max(1.0, count) for candidate in self.candidates for count in candidate.evaluation.calls.values())
        return runs + self.session.recorder.unrecorded.calls

    def _calls_per_task(self) -> float:
        counts = [count for candidate in self.candidates for count in candidate.evaluation.calls.values()]
        return max(1.0, sum(counts) / len(counts)) if counts else 1.0

    def _most_calls(self) -> float:
        """Calls that a run may well take: a round that could pass the cap is not begun, as where it broke off would be chance."""
        counts = [count for candidate in self.candidates for count in candidate.evaluation.calls.values()]
        return max(1.0, float(np.quantile(counts, 0.9))) if counts else float(len(self.space.student.program.predictors()))

    def _affordable(self, wanted: int) -> int:
        left = self._left()
        return wanted if math.isinf(left) else min(wanted, int(left / self._most_calls()))

    def _out_of_calls(self, why: str) -> str:
        """Why no more runs are made. It names numbers that are the same when the search is replayed: calls answered by the cache count, so that
        a resumed search takes the same turns."""
        asked = self.session.meter.asked("search")
        return (
            f"{why} ({asked} calls of the search count against its cap, answers from the cache included; gate and test keep their part of the caps)"
        )

    def _begin(self) -> None:
        """The first candidates on the same few tasks, as many as fit into a third of the budget."""
        specs = self.space.first()
        specs += [CandidateSpec(specs[0].selection, specs[0].count, adapter=specs[0].adapter, instruction=i, parameters=specs[0].parameters)
                  for i in range(1, len(self.space.instructions))] if specs else []  # fmt: skip
        fit = self._affordable(_FIRST_TASKS * (1 + len(specs)))
        left = self._left()
        if math.isfinite(left):
            fit = min(fit, max(_FIRST_TASKS, int(left / self._most_calls() / 3)))
        for spec in specs[: max(0, fit // _FIRST_TASKS - 1)]:
            self._add(spec)
        first = self.tasks[:_FIRST_TASKS]
        self._evaluate([(candidate, task) for candidate in self.candidates for task in first][: max(fit, 1)])

    def _add(self, spec: CandidateSpec) -> Candidate:
        candidate = Candidate(spec.name, self.space.build(spec), spec=spec)
        self.candidates.append(candidate)
        return candidate

    def _drawn(self, size: int) -> list[tuple[Candidate, Task]]:
        """The next round's pairs; none where budget, tasks or promise are at an end."""
        size = self._affordable(size)
        if size < 1:
            self.stopped = self._out_of_calls("what is left is too little for another run")
            return []
        running = [c for c in self.candidates if not c.dropped]
        known = {c.spec for c in self.candidates}
        values = self._posterior(running).mean
        parents = [running[i].spec for i in np.argsort(-values)[:_PARENTS]]
        confirming = math.isfinite(self._budget) and self._left() < _CONFIRMING * self._budget
        mutants = [] if confirming else self.space.mutants(parents, _MUTANTS, self.choices)
        new = [spec for spec in mutants if spec not in known]
        belief = self._posterior(running, new)
        if self._settled(belief, running):
            return []
        return self._allotted(belief, running, new, size)

    def _settled(self, belief: Posterior, running: Sequence[Candidate]) -> bool:
        for candidate in running:
            if len(candidate.evaluation) == len(self.tasks) and min(candidate.evaluation.scores.values()) >= 1.0:  # False for NaN
                self.stopped = f"{candidate.name} has the highest possible score on all val tasks"
                return True
        drawn = np.clip(belief.draws(512, np.random.default_rng(self.session.seed)), 0.0, 1.0)
        evaluated = [i for i, c in enumerate(running) if len(c.evaluation)]
        chosen = max(evaluated, key=lambda i: belief.mean[i])
        gain = float((drawn.max(axis=1) - drawn[:, chosen]).mean())
        if gain < _ENOUGH:
            self.stopped = f"no candidate promises a gain of {_ENOUGH:g}"
        return gain < _ENOUGH

    def _allotted(self, belief: Posterior, running: list[Candidate], new: list[CandidateSpec], size: int) -> list[tuple[Candidate, Task]]:
        made: dict[int, Candidate] = dict(enumerate(running))
        waiting = {i: [t for t in self.tasks if t.id not in c.evaluation.results] for i, c in made.items()}
        pairs: list[tuple[Candidate, Task]] = []
        fresh = 0
        for draw in belief.draws(4 * size, self.rng):
            if len(pairs) >= size:
                break
            order = [int(i) for i in np.argsort(-draw) if waiting.get(int(i), self.tasks)]
            order = [i for i in order if i in made or fresh < _NEW_SHARE * size]
            if not order:
                break
            place = order[1] if len(order) > 1 and self.rng.random() < _SECOND else order[0]
            if place not in made:
                made[place] = self._add(new[place - len(running)])
                waiting[place] = list(self.tasks)
            fresh += place >= len(running)
            pairs.append((made[place], waiting[place].pop(0)))
        if not pairs:
            self.stopped = "all candidates have run on all val tasks"
        return pairs

    def _evaluate(self, pairs: Sequence[tuple[Candidate, Task]]) -> bool:
        """Runs the pairs; whether the search may go on. Of a round that a cap broke off nothing counts: which runs were finished is chance."""
        try:
            found = evaluate_pairs([(c.student, task) for c, task in pairs], self.session, name=f"search: {len(self.candidates)} candidates")
        except BudgetExceeded as cap:
            if not any(len(c.evaluation) for c in self.candidates):
                raise
            self.stopped = self._out_of_calls(f"the cap on {cap.what} ended a round")
            return False
        for (candidate, task), prediction in zip(pairs, found, strict=True):
            candidate.evaluation.take(task, prediction)
        return True

    # -- decisions

    def _posterior(self, candidates: Sequence[Candidate], new: Sequence[CandidateSpec] = ()) -> Posterior:
        scores = [Score(i, task, value) for i, c in enumerate(candidates) for task, value in c.evaluation.scores.items() if not math.isnan(value)]
        return posterior(scores, self.space.kernel([*(c.spec for c in candidates), *new]))

    def _drop(self) -> None:
        """Drops what loses against the best by an exact test that holds at every look, corrected for the number of candidates."""
        best = self.best()
        for candidate in self.candidates[1:]:
            if candidate is best or candidate.dropped:
                continue
            evidence = losing_evidence(best.evaluation.scores, candidate.evaluation.scores, order=[t.id for t in self.tasks])
            if evidence >= len(self.candidates) / _ALPHA:
                candidate.dropped = f"behind {best.name} on {len(candidate.evaluation)} tasks (evidence {evidence:.3g} to 1)"

    def rejections(self) -> list[str]:
        """A note on the proposed instructions that were not taken."""
        rules = Counter(rule for _, rule in self.watch.rejected)
        why = ", ".join(f"{count} {rule}" for rule, count in sorted(rules.items()))
        return [f"{rules.total()} of {self._asked} proposed instructions were rejected: {why}"] if rules else []

    def _tell(self) -> None:
        best, count = self.best(), sum(len(c.evaluation) for c in self.candidates)
        self.session.progress.say(f"after {count} runs of {len(self.candidates)} candidates: {best.name} {best.mean:.2f} on {len(best.evaluation)}")

    def _take_in(self, proposed: Sequence[dict[str, str]]) -> None:
        self.space.instructions += [text for text in proposed if text not in self.space.instructions]

    def _numbers(self, count: int) -> list[int]:
        """The numbers of the next proposals, at most `count`: they take a small share of the calls that are left."""
        left = self._left()
        numbers = [number for number in range(self._asked, self._asked + count) if _PROPOSAL_SHARE * left >= number + 1]
        self._asked += len(numbers)
        return numbers

    def _proposed(self, numbers: Sequence[int]) -> list[dict[str, str]]:
        """Instructions, asked for at once; none where a cap ends it."""

        def one(number: int) -> dict[str, str] | None:
            return propose_instruction(self.space.student, self.space.pool, self.session, number=number, watch=self.watch)

        with ThreadPoolExecutor(max_workers=max(1, len(numbers))) as pool:
            futures = [pool.submit(contextvars.copy_context().run, one, number) for number in numbers]
            try:
                return [text for future in futures if (text := future.result()) is not None]
            except BudgetExceeded:
                return []
