"""Training and held-out rows of an `sft` export. Reads files; does not import torch."""

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from assay.datasets.files import attempted_rows
from assay.datasets.tasks import task_key
from assay.errors import DataError
from assay.support.places import no_such_file
from assay.support.values import value_text
from assay.traces.export.transitions import checked_manifest

# -- Token ids and loss labels of training rows. Does not import torch; tokens without a loss have the label -100.


Message = dict[str, Any]
Tokens = dict[str, list[int]]  # `input_ids` and `labels`, of the same length
_NO_LOSS = -100  # index that torch's cross entropy ignores


def has_loss(message: Message) -> bool:
    """Whether a message is trained on: OpenAI's format marks answers without a loss with `weight: 0`."""
    return message.get("weight") != 0


def trained_turns(messages: Sequence[Message]) -> list[int]:
    """Indices of the messages of a whole conversation that are trained on: those of the assistant but the first."""
    return [at for at, message in enumerate(messages) if at and message["role"] == "assistant" and has_loss(message)]


def completion_row(
    prompt: Sequence[Message], completion: Sequence[Message], tools: Sequence[Any], tokenizer: Any
) -> Tokens:
    """Tokens of a prompt and its completion, with labels on the completion.

    As in TRL, the completion begins at the first token that differs from the prompt with its generation prompt.
    """
    ids = _ids([*prompt, *completion], tools, tokenizer)
    start = _common_prefix(_ids(prompt, tools, tokenizer, generate=True), ids)
    return {"input_ids": ids, "labels": [*([_NO_LOSS] * start), *ids[start:]]}


def conversation_rows(messages: Sequence[Message], tools: Sequence[Any], tokenizer: Any) -> Iterator[Tokens]:
    """Tokens of a conversation, with labels on every trained turn, its end-of-turn token included.

    Some chat templates render a turn differently once later messages follow (Qwen3 removes earlier thoughts). Such a
    turn becomes a row of its own, rendered as the model wrote it.
    """
    ids = _ids(messages, tools, tokenizer)
    labels, rewritten = [_NO_LOSS] * len(ids), list[int]()
    for index in trained_turns(messages):
        prefix = _ids(messages[: index + 1], tools, tokenizer)
        if ids[: len(prefix)] != prefix:
            rewritten.append(index)
            continue
        start = _common_prefix(_ids(messages[:index], tools, tokenizer, generate=True), ids)
        labels[start : len(prefix)] = ids[start : len(prefix)]
    if any(label != _NO_LOSS for label in labels):
        yield {"input_ids": ids, "labels": labels}
    for index in rewritten:
        yield completion_row(messages[:index], [messages[index]], tools, tokenizer)


def _ids(messages: Sequence[Message], tools: Sequence[Any], tokenizer: Any, *, generate: bool = False) -> list[int]:
    encoded = tokenizer.apply_chat_template(
        list(messages), tools=list(tools) or None, add_generation_prompt=generate, tokenize=True, return_dict=True
    )
    return list(encoded["input_ids"])


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


# -- Data.


_REQUIRED = ("prompt", "completion")
_HINT = "Make one with: assay export sft --out FOLDER"
_SPEAKERS = {  # of ShareGPT's format
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bing", "bard"), "assistant"),
    "system": "system",
}


@dataclass
class TrainingData:
    """Rows of an export, split by task.

    Attributes:
        tasks: number of tasks, held-out ones included.
        sha256: of the file that was read.
        held_out_tasks: number of tasks that are held out.
        unused_ids: number of values of a column `task` that does not decide what is held out.
        left_out: number of rows that are not trained on, by reason.
        ungated: whether the export did not pass its gates.
        folder: path of the export.
    """

    train: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    tasks: int
    sha256: str
    held_out_tasks: int = 0
    unused_ids: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    ungated: bool = False
    folder: Path | None = None


def read_sft(source: str | Path, *, min_quality: float, eval_fraction: float, seed: int) -> TrainingData:
    """Reads rows of an `sft` export.

    Args:
        source: an export's folder, or a file of rows that `assay.datasets.files` reads. Each row has `prompt` and
            `completion` messages, or `messages`: a whole conversation, of which all turns of the assistant are trained
            on, except those with `weight: 0`. Such a row gets `prompt` and `completion` (split before the last turn
            that is trained on) and `whole`. Rows in the formats of ShareGPT (`conversations`) and Alpaca
            (`instruction`, `input`, `output`) are converted; `system` is their first message.
        min_quality: lowest `quality` of a row, in [0, 1]; rows without one are taken.
        eval_fraction: share of the tasks that is held out, in [0, 0.5]. Rows with one prompt are of one task, and of an
            export also those with one `task`; in other files a column of that name may be a category. Tasks are chosen
            by a hash of their names, so a resumed run holds out the same ones.
    Raises:
        DataError: the file does not exist, is an export of another kind, was changed after the export, has a row that
            is not a conversation, or has no row of sufficient quality.
    """
    path, ungated = Path(source), False
    if path.is_dir():
        ungated = not checked_manifest(path, "sft")["passed"]
        path = path / "data.jsonl"
    if not path.exists():
        raise DataError(f"{no_such_file(path)}. {_HINT}")
    rows, excluded = _usable(path, min_quality)
    if not rows:
        if not excluded:
            raise DataError(f"{path} has no row to train on: it is empty. {_HINT}")
        reasons = ", ".join(f"{count} {reason}" for reason, count in excluded.items())
        raise DataError(
            f"{path} has no row to train on: of its rows, {reasons}. Collect better rollouts, or lower `min_quality`"
        )
    names_of: dict[str, str] = {}  # by prompt: rows of two tasks with one prompt are of one task, in any spelling
    task_ids = [
        (
            names_of.setdefault(key := _prompt_key(row), _exported_task(row) or key),
            {name: row[name] for name in (*_REQUIRED, "tools", "whole") if name in row},
        )
        for row in rows
    ]
    names = sorted(
        {task for task, _ in task_ids},
        key=lambda name: hashlib.sha256(f"{seed}:{name}".encode("utf-8", "replace")).digest(),
    )
    # at least one task is held out where there are two, or there would be no held-out loss
    eval_ids = set(names[: max(1, round(eval_fraction * len(names))) if eval_fraction and len(names) > 1 else 0])
    with open(path, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return TrainingData(
        train=[row for task, row in task_ids if task not in eval_ids],
        held_out=[row for task, row in task_ids if task in eval_ids],
        tasks=len(names),
        sha256=sha256,
        held_out_tasks=len(eval_ids),
        unused_ids=len({value_text(row["task"]) for row in rows if "task" in row and not _exported_task(row)}),
        left_out=excluded,
        ungated=ungated,
        folder=Path(source),
    )


def _usable(path: Path, min_quality: float) -> tuple[list[dict[str, Any]], Counter[str]]:
    """Rows of sufficient quality with a completion, and the number of other rows by reason."""
    excluded, rows = Counter[str](), list[dict[str, Any]]()
    for where, row in attempted_rows(path, default=".jsonl"):
        if isinstance(row, DataError):
            raise row
        row = _conversation(row, where)
        quality = row.get("quality")
        if quality is not None and not (
            isinstance(quality, int | float) and math.isfinite(quality) and quality >= min_quality
        ):
            excluded[f"below the quality of {min_quality:g}"] += 1
        elif not (answers := _answers(row)):
            excluded["with `weight: 0` on every answer"] += 1
        elif not any(str(answer.get("content") or answer.get("tool_calls") or "").strip() for answer in answers):
            excluded["with an empty completion"] += 1
        else:
            rows.append(row)
    return rows, excluded


def _conversation(row: dict[str, Any], where: str) -> dict[str, Any]:
    """The row with `prompt` and `completion`, checked."""
    row = _in_messages(row, where)
    given = ("messages",) if "messages" in row and not row.keys() >= {*_REQUIRED} else _REQUIRED
    if missing := [name for name in given if name not in row]:
        raise DataError(
            f"{where}: {' and '.join(map(repr, missing))} missing among {', '.join(map(repr, row)) or 'no fields'}. "
            "A row needs 'messages', or 'prompt' and 'completion': lists of messages with role and content; or texts "
            "of ShareGPT ('conversations') or Alpaca ('instruction', 'input', 'output')"
        )
    for name in given:
        _check_messages(row[name], name, where)
    if "functions" in row:
        raise DataError(f"{where}: 'functions' is the former name of tools in OpenAI's API: write them as 'tools'")
    if given == _REQUIRED:
        if len({has_loss(message) for message in row["completion"]}) == 2:
            raise DataError(f"{where}: 'completion' has answers of `weight` 0 and 1: write the row as 'messages'")
        return row
    messages = row["messages"]
    answers = [at for at, message in enumerate(messages) if at and message["role"] == "assistant"]
    if not answers:
        raise DataError(f"{where}: 'messages' must have an assistant's answer after the first message")
    last = (trained_turns(messages) or answers)[-1]  # what follows the last trained turn cannot be trained on
    return {**row, "prompt": messages[:last], "completion": messages[last : last + 1], "whole": True}


def _in_messages(row: dict[str, Any], where: str) -> dict[str, Any]:
    """The row with messages as OpenAI's, from the formats of ShareGPT and Alpaca too. `system` is the first message."""
    asked, more, said = (row.get(name) for name in ("instruction", "input", "output"))
    first = "prompt"
    if row.keys() >= {*_REQUIRED}:
        pass
    elif isinstance(spoken := row.get("messages", row.get("conversations")), list):
        row, first = {**row, "messages": [_spoken(message, where) for message in spoken]}, "messages"
    elif isinstance(asked, str) and isinstance(said, str) and isinstance(more, str | None) and not row.get("history"):
        text = f"{asked}\n\n{more}" if more else asked
        answer = {"role": "assistant", "content": said}
        row = {**row, "prompt": [{"role": "user", "content": text}], "completion": [answer]}
    if row.get("system") and isinstance(row.get(first), list):
        row = {**row, first: [{"role": "system", "content": row["system"]}, *row[first]]}
    return row


def _spoken(message: Any, where: str) -> Any:
    """A message of ShareGPT's format as OpenAI's."""
    if not isinstance(message, dict) or "from" not in message:
        return message
    if (role := _SPEAKERS.get(message["from"])) is None:
        raise DataError(
            f"{where}: 'conversations' has a message from {message['from']!r}, not from {', '.join(_SPEAKERS)}. Write "
            "the row as 'messages', with tool calls in 'tool_calls' and results in messages of the role 'tool'"
        )
    return {"role": role, "content": message.get("value"), **{k: message[k] for k in ("weight",) if k in message}}


def _check_messages(messages: Any, name: str, where: str) -> None:
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages)
    ):
        raise DataError(
            f"{where}: {name!r} must be a list of messages with role and content, such as "
            '{"role": "user", "content": "…"}'
        )
    for message in messages:
        content = message.get("content")
        if not isinstance(content, str | list | None) or (content is None and message["role"] in ("system", "user")):
            raise DataError(f"{where}: the content of a message from {message['role']!r} is {content!r}, not a text")
        if message.get("weight") not in (None, 0, 1):
            raise DataError(f"{where}: `weight` of a message must be 0 or 1, not {message['weight']!r}")
        if message.get("function_call") or message["role"] == "function":
            raise DataError(
                f"{where}: a function call in the former form of OpenAI's API: write it as 'tool_calls', "
                "and its result as a message of the role 'tool'"
            )


def _answers(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages that are trained on."""
    messages = [*row["prompt"], *row["completion"]]
    if row.get("whole"):
        return [messages[at] for at in trained_turns(messages)]
    return [message for message in row["completion"] if has_loss(message)]


def _exported_task(row: dict[str, Any]) -> str:
    """The task of a row that `assay export` wrote, which names rollout and call too; "" of another row."""
    return str(row["task"] or "") if row.keys() >= {"task", "rollout", "t"} else ""


def _prompt_key(row: dict[str, Any]) -> str:
    return task_key({"prompt": row["prompt"]})
