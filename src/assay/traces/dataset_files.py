"""Datasets that a person puts together from recorded rollouts: a file of tasks in JSON lines for each.

A row is a task as any command takes it with `--data`: id, type, inputs, expected outputs, metadata and the owner of
the data. Splits are not written: those of the store's salt apply, as to the recorded task. Does not anonymize: the
files are next to the store, which has the same texts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from assay.datasets.tasks import OWNERS, task_key, written_outputs
from assay.errors import ConfigError, DataError
from assay.support.names import check_name, is_name, place_in
from assay.support.places import write_whole
from assay.support.values import json_value
from assay.traces.export.selection import consents
from assay.traces.records import Rollout, subject_digest, why_not_rated
from assay.traces.store import Store

_MOST_BYTES = 32 << 20  # of a file that is read whole to add a task
_MOST_NAMES = 50


@dataclass(frozen=True, kw_only=True)
class DatasetFile:
    """A dataset after a task was added. `replaced`: it had a task with the same inputs, which was replaced."""

    path: Path
    tasks: int
    replaced: bool


def dataset_names(folder: Path) -> list[str]:
    """Names of the datasets in a folder, the one that was changed last first."""
    if not folder.is_dir():
        return []
    files = sorted(folder.glob("*.jsonl"), key=lambda file: -file.stat().st_mtime)
    return [file.stem for file in files if is_name(file.stem, plain=True)][:_MOST_NAMES]


def why_not_added(store: Store, rollout: Rollout) -> str | None:
    """Why a rollout's task may not be added to a dataset; None if it may.

    Sealed tasks are refused: a person who has seen their results would select by them.
    """
    if (reason := why_not_rated(rollout)) is not None:
        return reason
    if not rollout.inputs:
        return f"{rollout.id} has no recorded task"
    if rollout.consent is not None and not consents(rollout.consent):
        return "consent to the use of its data was not given"
    if rollout.data_subject and store.forgotten().covers(subject_digest(rollout.data_subject), rollout.tenant):
        return "its data was erased"
    return None


def add_task(
    store: Store, rollout: Rollout, folder: Path, name: str, *, answer_is_expected: bool = False
) -> DatasetFile:
    """Adds the task of a rollout to the dataset `folder/NAME.jsonl`, which is created if it is missing.

    The file is registered with the data subjects whose data it has, so that `assay traces forget` names it.

    Args:
        answer_is_expected: the rollout's prediction becomes the expected output.
    Raises:
        ConfigError: the name is invalid, the rollout may not be added, or has no answer.
        DataError: the file is too large, or no file of JSON lines.
    """
    path = place_in(folder, check_name(name, "dataset", plain=True), ending=".jsonl")
    if (reason := why_not_added(store, rollout)) is not None:
        raise ConfigError(f"not added: {reason}")
    if answer_is_expected and not rollout.prediction:
        raise ConfigError(f"not added: {rollout.id} has no answer that could be the expected one")
    from filelock import FileLock

    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f".{name}.lock"):
        rows, row = list(_rows(path)), _row(rollout, answer_is_expected=answer_is_expected)
        others = [other for other in rows if other.get("inputs") != row["inputs"]]
        others.append(row)
        people = {subject_digest(str(row["data_subject"])) for row in others if row.get("data_subject")}
        store.put_artifact(str(path.resolve()), sorted(people))  # first, so that erasure finds it after a kill too
        write_whole(path, b"".join(orjson.dumps(json_value(row, placeholders=True)) + b"\n" for row in others))
    return DatasetFile(path=path, tasks=len(others), replaced=len(others) == len(rows))


def _row(rollout: Rollout, *, answer_is_expected: bool) -> dict[str, Any]:
    owners = {"tenant": rollout.tenant, "data_subject": rollout.data_subject, "consent": rollout.consent}
    metadata = {name: value for name, value in rollout.metadata.items() if name not in OWNERS}
    expected = rollout.prediction if answer_is_expected else rollout.expected
    return {
        "id": rollout.task_id or task_key(rollout.inputs), "task_type": rollout.task_type,
        "inputs": dict(rollout.inputs), "expected": written_outputs(expected or {}), "metadata": metadata,
        **{name: value for name, value in owners.items() if value is not None},
    }  # fmt: skip


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        return
    if path.stat().st_size > _MOST_BYTES:
        raise DataError(f"{path} has more than {_MOST_BYTES >> 20} MB: add the task to another dataset")
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise DataError(f"{path}, line {number} is not JSON: {error}. Correct it before a task is added") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number} is not an object. Correct it before a task is added")
        yield row
