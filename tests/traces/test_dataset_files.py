"""Datasets that are put together from rollouts: which tasks may be added, and what the file then holds."""

import json
from pathlib import Path
from typing import Any

import pytest

from assay.errors import ConfigError, DataError
from assay.traces import Rollout, Store
from assay.traces.dataset_files import add_task, dataset_names, why_not_added
from assay.traces.records import subject_digest
from assay.traces.store.erasure import erase_subject


def rollout(number: int = 1, **fields: Any) -> Rollout:
    return Rollout(
        **{
            "id": f"{number:032x}", "task_id": f"t{number}", "task_type": "sums", "split": "train", "status": "done",
            "inputs": {"question": f"{number} + 1?"}, "expected": {"answer": str(number + 1)},
            "prediction": {"answer": "about three"}, **fields,
        }
    )  # fmt: skip


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_same_task_is_replaced(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        add_task(store, rollout(1), tmp_path, "mine")
        add_task(store, rollout(2), tmp_path, "mine")
        added = add_task(store, rollout(1, id="f" * 32), tmp_path, "mine", answer_is_expected=True)
    assert (added.tasks, added.replaced) == (2, True)
    assert [row["expected"] for row in rows_of(added.path)] == [{"answer": "3"}, {"answer": "about three"}]


def test_owners_are_kept_and_erasure_finds_the_file(tmp_path: Path) -> None:
    owned = rollout(1, tenant="north", data_subject="ann", consent="yes", metadata={"level": 2, "tenant": "north"})
    with Store(tmp_path / "s.db") as store:
        path = add_task(store, owned, tmp_path, "mine").path
        add_task(store, rollout(2), tmp_path, "mine")
        (artifact,) = store.artifacts_of(subject_digest("ann"))
    row = rows_of(path)[0]
    assert {name: row[name] for name in ("tenant", "data_subject", "consent", "metadata")} == {
        "tenant": "north", "data_subject": "ann", "consent": "yes", "metadata": {"level": 2},
    }  # fmt: skip
    assert artifact == str(path.resolve())


def test_a_task_of_a_person_erased_for_one_tenant_is_refused(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        for number, tenant in enumerate(("north", "south")):
            store.put_rollout(rollout(number, tenant=tenant, data_subject="ann", consent="yes"))
        erase_subject(store, "ann", tenant="north")
        later = {name: rollout(3, tenant=name, data_subject="ann", consent="yes") for name in ("north", "south")}
        assert why_not_added(store, later["north"]) == "its data was erased"
        assert why_not_added(store, later["south"]) is None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"split": "test"}, "sealed split test"),
        ({"split": "gate"}, "sealed split gate"),
        ({"source": "judge"}, "verdict of a judge"),
        ({"status": "running"}, "still running"),
        ({"consent": "no"}, "consent"),
        ({"inputs": {}}, "no recorded task"),
    ],
)
def test_tasks_that_may_not_be_used_are_refused(tmp_path: Path, fields: dict[str, Any], reason: str) -> None:
    with Store(tmp_path / "s.db") as store, pytest.raises(ConfigError, match=reason):
        add_task(store, rollout(**fields), tmp_path, "mine")
    assert dataset_names(tmp_path) == []


def test_a_broken_file_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text('{"question": "a"}\nnot json\n')
    with Store(tmp_path / "s.db") as store, pytest.raises(DataError, match="line 2 is not JSON"):
        add_task(store, rollout(), tmp_path, "mine")
    assert (tmp_path / "mine.jsonl").read_text() == '{"question": "a"}\nnot json\n'


def test_an_answer_that_is_missing_is_not_expected(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store, pytest.raises(ConfigError, match="has no answer"):
        add_task(store, rollout(prediction=None), tmp_path, "mine", answer_is_expected=True)
