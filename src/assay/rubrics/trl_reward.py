"""A rubric as a reward function for TRL's trainers: batched and async, None for unscored completions."""

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from assay.datasets import Task
from assay.datasets.tasks import task_key
from assay.errors import RubricError
from assay.rubrics.protocols import Scorer
from assay.rubrics.scoring import ScoreResult, grade
from assay.support.numbers import counted
from assay.support.sections import answer_fields, nested_outputs
from assay.traces.messages.parts import object_of
from assay.traces.records import Verdict

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
    It raises `RubricError` at its first call if a criterion is unscored on all completions. The mean grade of each
    criterion goes to TRL's log as RUBRIC/CRITERION.

    The completion is the output field `answer`, or has it in a prompt format. The prompt (its last message, if it is a
    conversation) is the task's input, unless a column provides it. The other columns of the dataset are the task's
    expected fields. An unscored completion is None, which TRL excludes from the mean; it is never 0.

    Args:
        answer: output field that holds the completion.
        question: name of the task's input.
        inputs: column -> name of the task's input. By default the column `question`.
        outputs: fields of a completion, in any prompt format or in a tool call. If there is only one, a completion in
            no format is its value.
        concurrency: maximum number of completions scored at the same time, in threads.
        group: score completions of one prompt together (`score_group`), for judges that compare.
    """

    tried = False  # whether some completions were scored

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
        predictions = [
            completion_fields(completion, outputs, answer, prompt=prompt)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        gate = asyncio.Semaphore(concurrency)

        async def scored(indices: Sequence[int]) -> list[tuple[int, ScoreResult]]:
            async with gate:
                if group:
                    results = await asyncio.to_thread(
                        rubric.score_group, tasks[indices[0]], [predictions[at] for at in indices]
                    )
                else:
                    results = [await asyncio.to_thread(rubric.score, tasks[indices[0]], predictions[indices[0]])]
            return list(zip(indices, results, strict=True))

        groups: dict[str, list[int]] = {}
        for at, task in enumerate(tasks):
            groups.setdefault(task.id if group else str(at), []).append(at)
        by_place = dict(pair for pairs in await asyncio.gather(*map(scored, groups.values())) for pair in pairs)
        results = [by_place[at] for at in range(count)]
        nonlocal tried
        if not tried:
            tried = _require_decided(results, sorted(rows))
        if (log := columns.get("log_metric")) is not None:
            for criterion, mean in _mean_grades(results).items():
                log(f"{rubric.name}/{criterion}", mean)
        return [None if math.isnan(result.value) else result.value for result in results]

    reward.__name__ = f"rubric_{rubric.name}"
    return reward


def _require_decided(results: Sequence[ScoreResult], columns: Sequence[str]) -> bool:
    """Raises where a criterion was unscored on every completion; False if no completion had an answer to score.

    Raises:
        RubricError: names the criterion, the reason and the keywords of `trl_reward`.
    """
    answered = [result for result in results if result.failed is None]
    for name, grades in _verdicts(answered).items():
        if all(verdict.grade is None and verdict.applies for verdict in grades):
            raise RubricError(
                f"criterion {name!r} was unscored on all of {counted(len(grades), 'completions')} of the first call: "
                f"{grades[0].reason}. A reward has the completion and the dataset's columns "
                f"({', '.join(columns) or 'none'}), not the rollout. trl_reward(question=…, inputs={{COLUMN: INPUT}}, "
                "outputs=[FIELD], answer=…) names them, and group=True is for judges that compare; a criterion that "
                "needs the rollout is trained on with assay train grpo"
            )
    return bool(answered)


def _mean_grades(results: Sequence[ScoreResult]) -> dict[str, float]:
    """Mean grade of each criterion that was scored."""
    graded = {
        name: [verdict.grade for verdict in verdicts if verdict.grade is not None]
        for name, verdicts in _verdicts(results).items()
    }
    return {name: math.fsum(grades) / len(grades) for name, grades in graded.items() if grades}


def _verdicts(results: Sequence[ScoreResult]) -> dict[str, list[Verdict]]:
    by_name: dict[str, list[Verdict]] = {}
    for verdict in (verdict for result in results for verdict in result.verdicts):
        by_name.setdefault(verdict.criterion, []).append(verdict)
    return by_name


def undecided_checks(rubric: Scorer, answers: Sequence[tuple[Task, dict[str, Any]]]) -> dict[str, str]:
    """Returns final checks that score none of the answers: name -> first reason. Checks with `when` are skipped.

    Args:
        answers: pairs of task and prediction.
    """
    undecided: dict[str, str] = {}
    for criterion in rubric.finals if answers else ():
        if criterion.check is not None and not criterion.when:
            verdicts = [grade(criterion, criterion.check, task, fields, None) for task, fields in answers]
            if all(verdict.grade is None and verdict.applies for verdict in verdicts):
                undecided[criterion.name] = verdicts[0].reason
    return undecided


def completion_fields(
    completion: Any, outputs: Sequence[str], answer: str = "answer", *, prompt: Any = ""
) -> dict[str, Any]:
    """The prediction that a completion (a text or messages) stands for; see `trl_reward`.

    Args:
        prompt: a text or messages. One in XML says which fields are objects or lists; else they are texts.
    """
    text, names = _text(completion), outputs or (answer,)
    nested = nested_outputs(prompt if isinstance(prompt, str) else _text(prompt[:1])) & {*names}
    fields = {name: v for name, v in answer_fields(text, _calls(completion), names, nested).items() if name in names}
    if not fields and len(outputs) == 1:
        fields = {outputs[0]: text.strip()}
    return {answer: text, **fields}


def _calls(completion: Any) -> list[tuple[str, dict[str, Any]]]:
    """Name and arguments of the tool calls in the last message of a completion."""
    message = completion[-1] if completion and not isinstance(completion, str) else {}
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function.get("arguments") or {}
        calls.append((str(function.get("name")), object_of(arguments) if isinstance(arguments, str) else arguments))
    return calls


def _is_column(values: Any, rows: int) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, str) and len(values) == rows


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
