"""Rows of an export as what is trained on and what is held out. Reads files; knows nothing of torch."""

import hashlib
import json
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from assay.errors import DataError

__all__ = ["TrainingData", "checked_manifest", "read_sft"]

_FORMAT = 1  # of an export's manifest
_WANTED = ("prompt", "completion")


@dataclass
class TrainingData:
    """`left_out`: rows that are not trained on, by why. `sha256`: of the file that was read."""

    train: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    tasks: int
    sha256: str
    left_out: Counter[str] = field(default_factory=Counter)
    ungated: bool = False
    folder: Path | None = None  # of the export


def read_sft(source: str | Path, *, min_quality: float, held_out: float, seed: int) -> TrainingData:
    """Rows of an `sft` export (its folder), or of JSON lines with `prompt` and `completion` messages, or with `messages`: a whole conversation,
    up to the assistant's last turn. It is `prompt` and `completion` too, and has `whole`: all turns of the assistant are trained on.

    A share of the tasks is held out by a hash of their names, so that a resumed run holds out the same ones; a row without a
    task is one of its own.

    Raises:
        DataError: no such file, an export of another kind, rows that were changed, or none that is good enough.
    """
    path, ungated = Path(source), False
    if path.is_dir():
        ungated = not checked_manifest(path, "sft")["passed"]
        path = path / "data.jsonl"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}. Make one with: assay export sft --out FOLDER") from None
    left, rows = Counter[str](), list[dict[str, Any]]()
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        row = _row(line, f"{path}, line {number}")
        quality = row.get("quality")
        if quality is not None and not (isinstance(quality, int | float) and math.isfinite(quality) and quality >= min_quality):
            left[f"below the quality of {min_quality:g}"] += 1
        elif not any(str(message.get("content") or message.get("tool_calls") or "").strip() for message in _answers(row)):
            left["with an empty completion"] += 1
        else:
            rows.append(row)
    if not rows:
        raise DataError(f"{path} has no row to train on: {dict(left) or 'it is empty'}. Collect better rollouts, or lower --min-quality")
    kept = [(str(row.get("task") or _digest(row)), {name: row[name] for name in (*_WANTED, "tools", "whole") if name in row}) for row in rows]
    names = sorted({task for task, _ in kept}, key=lambda name: hashlib.sha256(f"{seed}:{name}".encode("utf-8", "replace")).digest())
    out = set(names[: max(1, round(held_out * len(names))) if held_out and len(names) > 1 else 0])
    return TrainingData(
        [row for task, row in kept if task not in out], [row for task, row in kept if task in out], len(names),
        hashlib.sha256(content).hexdigest(), left, ungated,
        folder=Path(source),
    )  # fmt: skip


def checked_manifest(folder: Path, wanted: str) -> dict[str, Any]:
    """The manifest of an export of the wanted kind, whose data is as it was written."""
    try:
        told: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        kind, version, files, _ = told["kind"], told["format"], told["files"], told["passed"]
    except FileNotFoundError:
        raise DataError(f"{folder} is no export: it has no manifest.json. Make one with: assay export {wanted} --out FOLDER") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder}/manifest.json cannot be read: {type(error).__name__}: {error}") from error
    if version > _FORMAT:
        raise DataError(f"{folder} has format {version}, this assay reads up to {_FORMAT}: update assay")
    if kind != wanted:
        raise DataError(f"{folder} is an export for {kind}; what is needed is one of: assay export {wanted}")
    with open(folder / "data.jsonl", "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != files.get("data.jsonl", {}).get("sha256"):
            raise DataError(f"{folder}/data.jsonl was changed after the export: what its gates and its privacy say is no longer true of it")
    return told


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row: dict[str, Any] = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{where} is no JSON: {error}") from None
    if isinstance(row, dict) and "messages" in row and "prompt" not in row:
        said = row.pop("messages")
        at = max((at for at, one in enumerate(said) if isinstance(one, dict) and one.get("role") == "assistant"), default=0)
        if not at:
            raise DataError(f"{where}: 'messages' must have an assistant's answer after the first message")
        row["prompt"], row["completion"], row["whole"] = said[:at], said[at : at + 1], True
    for name in _WANTED:
        messages = row.get(name) if isinstance(row, dict) else None
        if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) and "role" in one for one in messages):
            raise DataError(f"{where}: {name!r} must be a list of messages with a role, as `assay export sft` writes them")
    return row


def _answers(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages that are trained on."""
    return row["completion"] + [message for message in row["prompt"] if row.get("whole") and message["role"] == "assistant"]


def _digest(row: dict[str, Any]) -> str:
    return hashlib.sha256(orjson.dumps(row["prompt"])).hexdigest()
