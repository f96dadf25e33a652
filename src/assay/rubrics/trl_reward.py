"""A rubric as a reward function for TRL's trainers: batched and async, None for unscored completions."""

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from assay.datasets import Task
from assay.datasets.tasks import task_key
from assay.rubrics.protocols import Scorer
from assay.rubrics.scoring import grade
from assay.rubrics.steps import fields_in

__all__ = ["trl_reward", "undecided_checks"]

Reward = Callable[..., Coroutine[Any, Any, list[float | None]]]
_NO_COLUMNS = {"trainer_state", "log_extra", "log_metric", "environments"}


def trl_reward(
    rubric: Scorer,
    *,
    answer: str = "answer",
    question: str = "question",
    inputs: Mapping[str, str] | None = None,
    outputs: Sequence[str] = (),
    concurrency: int = 8,
    group: bool = False,
) -> Reward:
    """Returns a reward function for GRPOTrainer and RLOOTrainer.

    Its signature is `async reward(prompts, completions, completion_ids=None, **columns) -> list[float | None]`.
    The completion is the output field `answer`. The prompt (its last message, if it is a conversation) is the task's
    input, unless a column provides it. The other columns of the dataset are the task's expected fields. An unscored
    completion is None, which TRL excludes from the mean; it is never 0.

    Args:
        answer: output field that holds the completion.
        question: name of the task's input.
        inputs: column -> name of the task's input. By default the column `question`.
        outputs: fields of a completion (JSON, `name: value` lines or DSPy's sections). If there is only one, a
            completion in none of these formats is its value.
        concurrency: maximum number of completions scored at the same time, in threads.
        group: score completions of one prompt together (`score_group`), for judges that compare.
    """

    async def reward(
        prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Any = None, **columns: Any
    ) -> list[float | None]:
        count = len(prompts)
        rows = {key: v for key, v in columns.items() if key not in _NO_COLUMNS and _is_column(v, count)}
        known = inputs or {question: question}
        tasks = [
            _task(prompt, question, known, {name: values[at] for name, values in rows.items()})
            for at, prompt in enumerate(prompts)
        ]
        predictions = [_output(_text(completion), answer, outputs) for completion in completions]
        gate = asyncio.Semaphore(concurrency)

        async def scored(indices: Sequence[int]) -> list[tuple[int, float | None]]:
            async with gate:
                if group:
                    results = await asyncio.to_thread(
                        rubric.score_group, tasks[indices[0]], [predictions[at] for at in indices]
                    )
                else:
                    results = [await asyncio.to_thread(rubric.score, tasks[indices[0]], predictions[indices[0]])]
            return [(at, None if math.isnan(r.value) else r.value) for at, r in zip(indices, results, strict=True)]

        groups: dict[str, list[int]] = {}
        for at, task in enumerate(tasks):
            groups.setdefault(task.id if group else str(at), []).append(at)
        rewards = dict(pair for pairs in await asyncio.gather(*map(scored, groups.values())) for pair in pairs)
        return [rewards[at] for at in range(count)]

    reward.__name__ = f"rubric_{rubric.name}"
    return reward


def undecided_checks(rubric: Scorer, answers: Sequence[tuple[Task, str]], outputs: Sequence[str]) -> dict[str, str]:
    """Returns final checks that score none of the completions: name -> first reason.

    Such a check adds nothing to the reward. Checks with `when` are skipped.

    Args:
        answers: pairs of task and completion.
        outputs: see `trl_reward`.
    """
    undecided: dict[str, str] = {}
    for criterion in rubric.finals if answers else ():
        if criterion.check is not None and not criterion.when:
            verdicts = [
                grade(criterion, criterion.check, task, _output(text, "answer", outputs), None)
                for task, text in answers
            ]
            if all(verdict.grade is None for verdict in verdicts):
                undecided[criterion.name] = verdicts[0].reason
    return undecided


def _is_column(values: Any, rows: int) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, str) and len(values) == rows


def _output(text: str, answer: str, outputs: Sequence[str]) -> dict[str, Any]:
    fields = {name: value for name, value in fields_in(text).items() if name in outputs}
    if not fields and len(outputs) == 1:
        fields = {outputs[0]: text.strip()}
    return {answer: text, **fields}


def _task(prompt: Any, question: str, known: Mapping[str, str], row: Mapping[str, Any]) -> Task:
    inputs = {name: row[column] for column, name in known.items() if row.get(column) is not None}
    inputs = inputs or {question: _text(prompt)}
    expected = {name: value for name, value in row.items() if name not in known and value is not None}
    return Task(id=task_key(inputs), inputs=inputs, expected=expected)


def _text(part: Any) -> str:
    """Text of a prompt or completion: the string itself, or the content of the last message that has any."""
    if isinstance(part, str):
        return part
    for message in reversed(part):
        content = message.get("content")
        if isinstance(content, str) and content:
            return content
        if isinstance(content, list):
            return "".join(str(piece.get("text", "")) for piece in content)
    return ""
