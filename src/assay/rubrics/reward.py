"""A rubric as a reward function of TRL's trainers: batched, async, None where nothing can be said."""

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from assay.datasets import Task
from assay.rubrics.rubric import Rubric
from assay.rubrics.scoring import grade
from assay.rubrics.steps import fields_in

__all__ = ["trl_reward", "undecided_checks"]

Reward = Callable[..., Coroutine[Any, Any, list[float | None]]]
_NO_COLUMNS = {"trainer_state", "log_extra", "log_metric", "environments"}


def trl_reward(
    rubric: Rubric, *, answer: str = "answer", question: str = "question", inputs: Mapping[str, str] | None = None,
    outputs: Sequence[str] = (), concurrency: int = 8, group: bool = False,
) -> Reward:  # fmt: skip
    """`async reward(prompts, completions, completion_ids=None, **columns) -> list[float | None]` for GRPOTrainer and RLOOTrainer.

    Each completion is the output's field `answer`; its prompt (of a conversation the last message) is the task's input, unless a
    column says it; the dataset's other columns are what the task expects and whatever else the rubric reads. A score that cannot
    be had is None, which TRL leaves out of the mean; it is never 0.

    Args:
        answer: name under which checks find the completion.
        question: name of the task's input.
        inputs: columns that are inputs of the task, with the names that the rubric knows them by.
        outputs: fields that a completion holds, as JSON, `name: value` lines or DSPy's sections; where there is one alone, a
            completion that is none of these is that field.
        concurrency: completions scored at once, in threads.
        group: whether completions of one prompt are scored together (`score_group`), for judges that compare.
    """

    async def reward(prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Any = None, **columns: Any) -> list[float | None]:
        rows = {name: values for name, values in columns.items() if name not in _NO_COLUMNS and _is_column(values, len(prompts))}
        known = inputs or {question: question}
        tasks = [_task(prompt, question, known, {name: values[at] for name, values in rows.items()}) for at, prompt in enumerate(prompts)]
        said = [_output(_said(completion), answer, outputs) for completion in completions]
        gate = asyncio.Semaphore(concurrency)

        async def scored(indices: Sequence[int]) -> list[tuple[int, float | None]]:
            async with gate:
                if group:
                    results = await asyncio.to_thread(rubric.score_group, tasks[indices[0]], [said[at] for at in indices])
                else:
                    results = [await asyncio.to_thread(rubric.score, tasks[indices[0]], said[indices[0]])]
            return [(at, None if math.isnan(r.value) else r.value) for at, r in zip(indices, results, strict=True)]

        groups: dict[str, list[int]] = {}
        for at, task in enumerate(tasks):
            groups.setdefault(task.id if group else str(at), []).append(at)
        found = dict(pair for pairs in await asyncio.gather(*map(scored, groups.values())) for pair in pairs)
        return [found[at] for at in range(len(prompts))]

    reward.__name__ = f"rubric_{rubric.name}"
    return reward


def undecided_checks(rubric: Rubric, answers: Sequence[tuple[Task, str]], outputs: Sequence[str]) -> dict[str, str]:
    """Final checks that decide on none of some completions as a reward reads them, each with the first reason. Checks with a
    condition are left out.

    Args:
        answers: tasks, each with a completion.
        outputs: as of `trl_reward`.
    """
    found: dict[str, str] = {}
    for criterion in rubric.finals if answers else ():
        if criterion.check is not None and not criterion.when:
            verdicts = [grade(criterion, criterion.check, task, _output(text, "answer", outputs), None) for task, text in answers]
            if all(verdict.grade is None for verdict in verdicts):
                found[criterion.name] = verdicts[0].reason
    return found


def _is_column(values: Any, rows: int) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, str) and len(values) == rows


def _output(text: str, answer: str, outputs: Sequence[str]) -> dict[str, Any]:
    found = {name: value for name, value in fields_in(text).items() if name in outputs}
    if not found and len(outputs) == 1:
        found = {outputs[0]: text.strip()}
    return {answer: text, **found}


def _task(prompt: Any, question: str, known: Mapping[str, str], row: Mapping[str, Any]) -> Task:
    inputs = {name: row[column] for column, name in known.items() if row.get(column) is not None} or {question: _said(prompt)}
    expected = {name: value for name, value in row.items() if name not in known and value is not None}
    return Task(id=Task(id="", inputs=inputs, expected=expected).content_hash[:16], inputs=inputs, expected=expected)


def _said(part: Any) -> str:
    """The text of a prompt or completion: as it is, or of the last message with any."""
    if isinstance(part, str):
        return part
    for message in reversed(part):
        content = message.get("content")
        if isinstance(content, str) and content:
            return content
        if isinstance(content, list):
            return "".join(str(piece.get("text", "")) for piece in content)
    return ""
