"""Training and held-out rows of an `sft` export. Reads files; does not import torch."""

import hashlib
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from assay.datasets.tasks import task_key
from assay.errors import DataError
from assay.traces.export.manifest import checked_manifest

__all__ = ["TrainingData", "read_sft"]

_REQUIRED = ("prompt", "completion")
_HINT = "Make one with: assay export sft --out FOLDER"


@dataclass
class TrainingData:
    """Rows of an export, split by task.

    Attributes:
        tasks: number of tasks, held-out ones included.
        sha256: of the file that was read.
        left_out: number of rows that are not trained on, by reason.
        ungated: whether the export did not pass its gates.
        folder: path of the export.
    """

    train: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    tasks: int
    sha256: str
    left_out: Counter[str] = field(default_factory=Counter)
    ungated: bool = False
    folder: Path | None = None


def read_sft(source: str | Path, *, min_quality: float, eval_fraction: float, seed: int) -> TrainingData:
    """Reads rows of an `sft` export.

    Args:
        source: an export's folder, or a JSON Lines file. Each row has `prompt` and `completion` messages, or
            `messages`: a whole conversation, of which all turns of the assistant are trained on. Such a row gets
            `prompt` and `completion` (split before the assistant's last turn) and `whole`.
        min_quality: lowest `quality` of a row, in [0, 1]; rows without one are taken.
        eval_fraction: share of the tasks that is held out, in [0, 0.5]. Tasks are chosen by a hash of their names, so a
            resumed run holds out the same ones. A row without a task is a task of its own.
    Raises:
        DataError: the file does not exist, is an export of another kind, was changed after the export, or has no row of
            sufficient quality.
    """
    path, ungated = Path(source), False
    if path.is_dir():
        ungated = not checked_manifest(path, "sft")["passed"]
        path = path / "data.jsonl"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}. {_HINT}") from None
    rows, excluded = _usable(content, path, min_quality)
    if not rows:
        if not excluded:
            raise DataError(f"{path} has no row to train on: it is empty. {_HINT}")
        reasons = ", ".join(f"{count} {reason}" for reason, count in excluded.items())
        raise DataError(
            f"{path} has no row to train on: of its rows, {reasons}. Collect better rollouts, or lower min_quality"
        )
    names_of: dict[str, str] = {}  # by prompt: rows of two tasks with one prompt are of one task, in any spelling
    task_ids = [
        (
            names_of.setdefault(key := _prompt_key(row), str(row.get("task") or key)),
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
    return TrainingData(
        train=[row for task, row in task_ids if task not in eval_ids],
        held_out=[row for task, row in task_ids if task in eval_ids],
        tasks=len(names),
        sha256=hashlib.sha256(content).hexdigest(),
        left_out=excluded,
        ungated=ungated,
        folder=Path(source),
    )


def _usable(content: bytes, path: Path, min_quality: float) -> tuple[list[dict[str, Any]], Counter[str]]:
    """Rows of sufficient quality with a completion, and the number of other rows by reason."""
    excluded, rows = Counter[str](), list[dict[str, Any]]()
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        row = _row(line, f"{path}, line {number}")
        quality = row.get("quality")
        if quality is not None and not (
            isinstance(quality, int | float) and math.isfinite(quality) and quality >= min_quality
        ):
            excluded[f"below the quality of {min_quality:g}"] += 1
        elif not any(str(answer.get("content") or answer.get("tool_calls") or "").strip() for answer in _answers(row)):
            excluded["with an empty completion"] += 1
        else:
            rows.append(row)
    return rows, excluded


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row: dict[str, Any] = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{where} is not JSON: {error}") from None
    if isinstance(row, dict) and "messages" in row and "prompt" not in row:
        messages = row.pop("messages")
        # what follows the assistant's last turn cannot be trained on
        last = max(
            (
                i
                for i, message in enumerate(messages)
                if isinstance(message, dict) and message.get("role") == "assistant"
            ),
            default=0,
        )
        if not last:
            raise DataError(f"{where}: 'messages' must have an assistant's answer after the first message")
        row["prompt"], row["completion"], row["whole"] = messages[:last], messages[last : last + 1], True
    for name in _REQUIRED:
        messages = row.get(name) if isinstance(row, dict) else None
        if (
            not isinstance(messages, list)
            or not messages
            or not all(isinstance(message, dict) and "role" in message for message in messages)
        ):
            raise DataError(
                f"{where}: {name!r} must be a list of messages with a role, as `assay export sft` writes them"
            )
    return row


def _answers(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages that are trained on."""
    return row["completion"] + [
        message for message in row["prompt"] if row.get("whole") and message["role"] == "assistant"
    ]


def _prompt_key(row: dict[str, Any]) -> str:
    return task_key({"prompt": row["prompt"]})
