"""Rows of a transitions export: one schema, written by the export and read by the policy gradient.

Does not select rollouts, anonymize or compute credit.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypedDict, get_args, get_origin

import orjson

from assay.errors import DataError
from assay.support.values import check_format
from assay.traces.export.selection import Episode, Turn
from assay.traces.records import Transition

# -- Reads and checks the manifest of an export. `assay.traces.export.pipeline` writes it.


FORMAT = 1


def checked_manifest(folder: Path, required_kind: str) -> dict[str, Any]:
    """Read the manifest of an export and check its kind, its format and the hash of its data file.

    Args:
        folder: Folder of the export.
        required_kind: Required kind of export, such as `sft` or `transitions`.
    Raises:
        DataError: The folder is not an export, or it has another kind, another format or changed data.
    """
    manifest: Any = None
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        kind, version, files, _ = manifest["kind"], manifest["format"], manifest["files"], manifest["passed"]
    except FileNotFoundError:
        raise DataError(
            f"{folder} is not an export: it has no manifest.json. "
            f"Create one with: assay export {required_kind} --out FOLDER"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(manifest, dict) and "program" in manifest:
            raise DataError(
                f"{folder} is an artifact, not an export. Create one with: assay export {required_kind} --out FOLDER"
            ) from None
        raise DataError(
            f"{folder}/manifest.json cannot be read as the manifest of an export: {type(error).__name__}: {error}. "
            f"Create one with: assay export {required_kind} --out FOLDER"
        ) from error
    check_format(f"the export {folder}", version, FORMAT, remake="export again", error=DataError)
    if kind != required_kind:
        raise DataError(
            f"{folder} is an export of {kind}, not of {required_kind}. "
            f"Create one with: assay export {required_kind} --out FOLDER"
        )
    with open(folder / "data.jsonl", "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != files.get("data.jsonl", {}).get("sha256"):
            raise DataError(
                f"{folder}/data.jsonl was changed after the export, so its gates and privacy checks no longer apply. "
                f"Export again"
            )
    return dict(manifest)


# -- Transitions.


# functional form, because "return" is a keyword
TransitionRow = TypedDict(
    "TransitionRow",
    {
        "rollout": str,  # id of the rollout
        "group": str,  # rollouts of one group share a baseline
        "task": str,
        "task_type": str,
        "t": int,  # position of the call in its rollout, from 0
        "input": Any,  # the exact request
        "output": str,  # the text of the answer
        "reasoning": str,
        "refusal": str,
        "tools": Any,  # tool calls with results or errors
        "constrained": bool,  # whether a grammar or schema limited the output
        "cached": bool,
        "agent": str,  # that made the call; empty without names
        "model": str,
        "weights": str,  # sha256 of the model's weights; empty where unknown
        "adapters": Any,  # sha256 of each LoRA adapter, in order
        "prompt_tokens": int | None,
        "completion_tokens": int | None,
        "token_ids": list[int] | None,  # of the sampled tokens; null if the engine returns none
        "logprobs": list[float] | None,  # natural logarithm per sampled token; null if the engine returns none
        "step_rewards": Any,  # reward by criterion
        "reward": float,
        "return": float,
        "advantage": float,
        "weight": float,  # 1 / number of calls of the rollout, so that all rollouts have equal weight
        "score": float | None,  # of the rollout, in [0, 1]; null where unscored
        "human_rating": float | None,
        "status": str,
        "program": str,
        "program_version": str,
    },
)


_TYPES: dict[str, Any] = {
    name: next((part for part in get_args(kind) if part is not NoneType), kind) if isinstance(kind, UnionType) else kind
    for name, kind in TransitionRow.__annotations__.items()
}
# JSON text in Parquet, plain JSON in JSON lines
JSON_COLUMNS = tuple(name for name, kind in _TYPES.items() if kind is Any or get_origin(kind) is list)
_FREE_TEXT = (
    "group",
    "task",
    "task_type",
    "input",
    "output",
    "reasoning",
    "refusal",
    "tools",
    "step_rewards",
    "program",
)
WITHOUT_TEXT = frozenset(_TYPES.keys() - {*_FREE_TEXT})  # columns that need no anonymization


def parquet_schema() -> list[tuple[str, Any]]:
    """Names and types of the columns in Parquet, which has no names of agents."""
    import pyarrow as pa

    types = {
        str: pa.string(),
        Any: pa.string(),
        int: pa.int64(),
        float: pa.float64(),
        bool: pa.bool_(),
        list[int]: pa.list_(pa.int64()),
        list[float]: pa.list_(pa.float64()),
    }
    return [(name, types[kind]) for name, kind in _TYPES.items() if name != "agent"]


def transition_row(episode: Episode, turn: Turn) -> dict[str, Any]:
    """One LM call as a `TransitionRow`. `JSON_COLUMNS` have the JSON text of the store; `RowWriter` converts them."""
    rollout = episode.rollout
    return {
        "rollout": rollout.id,
        "group": episode.group,
        "task": rollout.task_id,
        "task_type": rollout.task_type,
        "t": turn.t,
        "input": turn.request_json,
        "output": turn.output,
        "reasoning": turn.reasoning,
        "refusal": turn.refusal,
        "tools": turn.tools_json,
        "constrained": turn.constrained,
        "cached": turn.cached,
        "agent": turn.agent,
        "model": turn.model,
        "weights": turn.weights,
        "adapters": turn.adapters_json,
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": turn.completion_tokens,
        "token_ids": turn.token_ids_json or "null",
        "logprobs": turn.logprobs_json or "null",
        "step_rewards": turn.step_rewards_json,
        "reward": turn.reward,
        "return": turn.credited,
        "advantage": turn.advantage,
        "weight": 1 / len(episode.usable),
        "score": rollout.score,
        "human_rating": rollout.human_rating,
        "status": rollout.status,
        "program": rollout.program,
        "program_version": rollout.program_version,
    }


def transition_of_row(row: Mapping[str, Any]) -> Transition:
    """`Transition` of a row, with the fields that a policy gradient needs. Reads both forms of `JSON_COLUMNS`."""
    request, ids, logprobs, adapters = (_value(row[name]) for name in ("input", "token_ids", "logprobs", "adapters"))
    return Transition(
        t=row["t"],
        agent=row["agent"],
        model=row["model"],
        weights=row["weights"],
        adapters=tuple(adapters or ()),
        request=request,
        output=row["output"],
        constrained=bool(row["constrained"]),
        cached=bool(row["cached"]),
        prompt_tokens=row["prompt_tokens"],
        completion_tokens=row["completion_tokens"],
        token_ids=tuple(ids) if ids else None,
        logprobs=tuple(logprobs) if logprobs else None,
    )


def read_transitions(folder: Path) -> Iterator[dict[str, Any]]:
    """Iterate over the `TransitionRow`s of an export in file order.

    Raises:
        DataError: The folder is not a transitions export, has another format or changed data, or a row lacks a column.
    """
    checked_manifest(folder, "transitions")
    with open(folder / "data.jsonl", "rb") as file:
        for number, line in enumerate(file, 1):
            row: dict[str, Any] = orjson.loads(line)
            if missing := [name for name in _TYPES if name not in row]:
                raise DataError(
                    f"{folder}/data.jsonl, line {number}: missing columns {', '.join(missing)}. Export again with: "
                    f"assay export transitions"
                )
            yield row


def _value(value: Any) -> Any:
    return orjson.loads(value) if isinstance(value, str) else value
