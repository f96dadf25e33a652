"""A race of candidates over blocks of val tasks: a paired test drops what is losing, the budget decides how far it goes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from assay.datasets import Task
from assay.errors import BudgetExceeded
from assay.optimizers.evaluation import Evaluation, evaluate
from assay.optimizers.session import Session, Student
from assay.optimizers.statistics import losing_p

__all__ = ["Candidate", "best_of", "race"]

_ALPHA = 0.1


@dataclass
class Candidate:
    """A program in the race, what it is, and how it did on val so far."""

    name: str
    student: Student
    evaluation: Evaluation = field(default_factory=Evaluation)
    dropped: str = ""
    preference: float = 0.0  # among equals the higher one wins

    @property
    def mean(self) -> float:
        value = self.evaluation.mean
        return -1.0 if math.isnan(value) else value

    @property
    def calls_per_task(self) -> float:
        return sum(self.evaluation.calls.values()) / max(1, len(self.evaluation))

    def summary(self) -> dict[str, Any]:
        score = None if math.isnan(self.evaluation.mean) else self.evaluation.mean
        return {"name": self.name, "val_score": score, "n": len(self.evaluation), "dropped": self.dropped}


def race(candidates: Sequence[Candidate], tasks: Sequence[Task], session: Session, *, block: int) -> Candidate:
    """Evaluates the candidates block by block and returns the best.

    A candidate is dropped when a one-sided paired t test against the leader gives p < 0.1. A block that would pass the
    cap on search calls is not begun.

    Raises:
        BudgetExceeded: not even the first candidate could be evaluated on anything.
    """
    alive = list(candidates)
    for start in range(0, len(tasks), block):
        part = tasks[start : start + block]
        for candidate in list(alive):
            expected = (candidate.calls_per_task or 1.0) * len(part)
            if len(candidate.evaluation) and expected > session.meter.search_calls_left():
                return best_of(candidates)
            try:
                candidate.evaluation.add(evaluate(candidate.student, part, session, name=f"race: {candidate.name}"))
            except BudgetExceeded:
                if not any(len(c.evaluation) for c in candidates):
                    raise
                return best_of(candidates)
        leader = best_of(alive)
        for candidate in list(alive):
            p = losing_p(leader.evaluation.scores, candidate.evaluation.scores)
            if candidate is not leader and p < _ALPHA:
                candidate.dropped = f"behind {leader.name} after {len(candidate.evaluation)} tasks (p = {p:.2g})"
                alive.remove(candidate)
        session.progress.say(f"after {start + len(part)} val tasks: " + ", ".join(f"{c.name} {c.mean:.2f}" for c in alive))
        if len(alive) == 1:
            break
    return best_of(candidates)


def best_of(candidates: Sequence[Candidate]) -> Candidate:
    """Highest mean over the tasks that all running candidates saw; among equals, highest preference."""
    running = [c for c in candidates if not c.dropped and len(c.evaluation)]
    common = set.intersection(*(set(c.evaluation.results) for c in running))

    def rank(candidate: Candidate) -> tuple[float, float]:
        keys = [key for key in candidate.evaluation.results if key in common]
        scores = [s for key in keys if not math.isnan(s := candidate.evaluation.scores[key])]
        return sum(scores) / len(scores) if scores else -1.0, candidate.preference

    return max(running, key=rank)
