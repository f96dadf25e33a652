"""Adding rollouts of the page to datasets, files of tasks next to the store."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from assay.traces.dataset_files import DatasetFile, add_task, dataset_names, why_not_added
from assay.traces.records import Rollout
from assay.traces.store import Store
from assay.traces.store.location import store_file

__all__ = ["add_to_dataset", "dataset_values"]

_FIRST_NAME = "picked"


def _folder(where: str | Path | None) -> Path:
    """The folder of datasets next to a store."""
    file = store_file(where)
    return (file.parent if file is not None else Path(".assay")) / "datasets"


def dataset_values(
    store: Store, rollout: Rollout, where: str | Path | None, added: DatasetFile | None = None
) -> dict[str, Any]:
    """What the form for adding a rollout to a dataset shows."""
    names = dataset_names(_folder(where))
    reason = why_not_added(store, rollout)
    return {
        "why_not_added": reason, "datasets": names, "dataset": names[0] if names else _FIRST_NAME, "added": added,
        "has_answer": bool(rollout.prediction),
    }  # fmt: skip


def add_to_dataset(store: Store, rollout: Rollout, form: Mapping[str, Any], *, where: str | Path | None) -> DatasetFile:
    """Adds the rollout's task to the dataset that the form names.

    Raises:
        ConfigError, DataError: as `add_task`.
    """
    name, expected = str(form.get("dataset", "")).strip(), form.get("expected") == "answer"
    return add_task(store, rollout, _folder(where), name, answer_is_expected=expected)
