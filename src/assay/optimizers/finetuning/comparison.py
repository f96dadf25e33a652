"""Compares the weights before and after training by running programs, greedily and sampled, paired by task."""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import dspy

from assay.datasets import Task
from assay.evaluation.comparison import gains_by_criterion
from assay.evaluation.evaluation import Evaluation, evaluate
from assay.evaluation.session import RecordedProgram, Session
from assay.evaluation.statistics import paired_gain
from assay.models import supports
from assay.optimizers.finetuning.engines import PolicyEngine
from assay.optimizers.finetuning.run_folder import rank
from assay.programs.agent import WRITTEN_DECISIONS

MODES = ("greedy", "sampled")


@dataclass
class EvalTask:
    """A program with the tasks it is evaluated on: `val` during training, `test` once at the end.

    `trained` is False for a retention task: the policy is never trained on it.
    """

    name: str
    recorded: RecordedProgram
    session: Session
    val: Sequence[Task]
    test: Sequence[Task]
    trained: bool = True
    opens: Callable[[], Any] | None = None  # called before `test` is run; returns how often it was opened


def evaluate_weights(
    eval_task: EvalTask, engine: PolicyEngine, tasks: Sequence[Task], mode: str, *, phase: str, scope: str
) -> Evaluation:
    """Evaluates the program on tasks under the weights that are served. The first process runs all tasks.

    If the engine gives no probabilities of decisions, decisions are taken as written, as in training: asking for
    probabilities would change the prompt.

    Args:
        mode: `greedy`, or `sampled` at the training temperature.
        scope: identifies this evaluation of the tasks, so that a re-run after an interruption overwrites its records.
            With the mode it is the prefix of the rollouts' group ids, which tells the evaluations of a run apart.
    """
    inside: AbstractContextManager[Any] = engine.greedy() if mode == "greedy" else nullcontext()
    written = not supports(engine.lm, "top_logprobs")
    recorded, recorder, condition = copy.copy(eval_task.recorded), eval_task.session.recorder, f"{scope}, {mode}"
    recorded.group = condition
    with (
        inside,
        recorder.within(condition),
        eval_task.session.phase(phase),
        dspy.context(**{WRITTEN_DECISIONS: written}),
    ):
        return evaluate(
            recorded,
            tasks if not rank() else [],
            eval_task.session,
            name=f"{phase}: {eval_task.name}, {mode}",
        )


def compare_weights(eval_task: EvalTask, engine: PolicyEngine) -> dict[str, dict[str, Any]]:
    """The comparison of the weights before and after training on the test tasks, by mode, under the task's name.

    `runs` has the id of the run that holds both evaluations, once for each side, as `assay.commands.train` has.
    Without test tasks it is empty; in processes other than the first one it has no modes.
    """
    result: dict[str, Any] = {}
    for mode in MODES if eval_task.test else ():
        with engine.before():
            before = evaluate_weights(eval_task, engine, eval_task.test, mode, phase="test", scope="before")
        after = evaluate_weights(eval_task, engine, eval_task.test, mode, phase="test", scope="after")
        if not rank():
            result[mode] = {**compared(before, after), "runs": [eval_task.session.recorder.run_id] * 2}
    return {eval_task.name: result} if result or rank() else {}


def evaluation_report(evaluation: Evaluation) -> dict[str, Any]:
    """The report of an evaluation, with `valid_calls`.

    That is the share of tool calls that were eligible, ran and were used.
    """
    report = evaluation.report()
    calls = sum(run.tools_made for run in evaluation.runs.values())
    valid = sum(run.tools_good for run in evaluation.runs.values())
    parsed = 1 - report["failed"] / report["n"] if report["n"] else None
    fields = {
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
    return {
        **fields,
        "tool_calls": calls,
        "valid_calls": valid / calls if calls else None,
        "parsed": parsed,
    }


def compared(before: Evaluation, after: Evaluation, *, level: float = 0.05) -> dict[str, Any]:
    """`before`, `after`, and the paired `gain` of the score, of each of `criteria` and of each of `task_types`.

    Args:
        level: of all intervals; see `assay.evaluation.statistics.paired_gain`.
    """
    paired = functools.partial(paired_gain, level=level)
    by_criterion = gains_by_criterion(before, after, level=level)
    kinds = {
        kind: paired(
            *(
                {task: score for task, score in evaluation.scores.items() if evaluation.task_types[task] == kind}
                for evaluation in (before, after)
            )
        )
        for kind in sorted(set(before.task_types.values()) & set(after.task_types.values()))
    }
    gain: Mapping[str, Any] = paired(before.scores, after.scores).to_dict()
    by_kind = {kind: gain_of_kind.to_dict() for kind, gain_of_kind in kinds.items()}
    return {
        "before": evaluation_report(before),
        "after": evaluation_report(after),
        "gain": gain,
        "criteria": {name: change.to_dict() for name, change in by_criterion.items()},
        "task_types": by_kind,
    }
