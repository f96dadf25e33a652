"""Old weights against new ones by running programs: greedily and sampled, task by task, in pairs."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import dspy

from assay.datasets import Task
from assay.models import supports
from assay.optimizers.evaluation import Evaluation, evaluate
from assay.optimizers.session import Session, Student
from assay.optimizers.statistics import paired_gain
from assay.optimizers.weights.engines import PolicyEngine
from assay.optimizers.weights.work import rank
from assay.programs.agent import WRITTEN_DECISIONS

__all__ = ["MODES", "Bench", "compared", "look"]

MODES = ("greedy", "sampled")


@dataclass
class Bench:
    """A program with the tasks it is measured on: `val` along the way, `test` once at the end. `trained` is False for what the policy is
    never trained on."""

    name: str
    student: Student
    session: Session
    val: Sequence[Task]
    test: Sequence[Task]
    trained: bool = True
    opens: Callable[[], Any] | None = None  # called before `test` is run; returns how often it was opened


def look(bench: Bench, engine: PolicyEngine, tasks: Sequence[Task], mode: str, *, phase: str, scope: str) -> Evaluation:
    """The program on tasks under the weights that are served: at the temperature that is trained at, or greedily. Where the engine gives no
    probabilities of decisions they are taken as written, as in training: stating them would be another prompt. Of several processes the first
    one runs them all.

    Args:
        scope: tells this look from the others at the same tasks, so that one that comes again after a stop overwrites what it had recorded.
    """
    inside: AbstractContextManager[Any] = engine.greedy() if mode == "greedy" else nullcontext()
    written = not supports(engine.lm, "top_logprobs")
    recorder = bench.session.recorder
    with inside, recorder.within(f"{scope}, {mode}"), bench.session.phase(phase), dspy.context(**{WRITTEN_DECISIONS: written}):
        return evaluate(bench.student, tasks if not rank() else [], bench.session, name=f"{phase}: {bench.name}, {mode}")


def told(found: Evaluation) -> dict[str, Any]:
    """The report of an evaluation with the share of its tool calls that were eligible, ran and were used (`valid_calls`)."""
    report = found.report()
    made = sum(run.tools_made for run in found.runs.values())
    good = sum(run.tools_good for run in found.runs.values())
    parsed = 1 - report["failed"] / report["n"] if report["n"] else None
    kept = {
        name: report[name]
        for name in (
            "score",
            "interval",
            "n",
            "unscored",
            "failed",
            "why_failed",
            "coverage",
            "undecided",
            "criteria",
            "task_types",
            "tokens_per_task",
        )
    }
    return {**kept, "tool_calls": made, "valid_calls": good / made if made else None, "parsed": parsed}


def compared(before: Evaluation, after: Evaluation, *, level: float = 0.05, guarded: bool = False) -> dict[str, Any]:
    """`before`, `after`, and the paired `gain` of the score, of each criterion (`criteria`) and of each task type (`task_types`).

    Args:
        level, guarded: of all intervals, see `assay.optimizers.statistics.paired_gain`.
    """
    paired = functools.partial(paired_gain, level=level, guarded=guarded)
    grades: dict[str, Any] = {}
    for name in before.criteria():
        pair = [{task: result.grades.get(name, math.nan) for task, result in found.results.items()} for found in (before, after)]
        grades[name] = paired(*pair).to_dict()
    kinds = {
        kind: paired(*({task: score for task, score in found.scores.items() if found.task_types[task] == kind} for found in (before, after)))
        for kind in sorted(set(before.task_types.values()) & set(after.task_types.values()))
    }
    gain: Mapping[str, Any] = paired(before.scores, after.scores).to_dict()
    by_kind = {kind: one.to_dict() for kind, one in kinds.items()}
    return {"before": told(before), "after": told(after), "gain": gain, "criteria": grades, "task_types": by_kind}
