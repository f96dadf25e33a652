"""The benchmark pool: which rollouts become tasks, in which split, and which never do."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from production import two_versions

from assay.cli import group
from assay.commands.pool import collect_pool
from assay.commands.traces import forget_subject
from assay.datasets.splits import load_splits, split_of
from assay.datasets.tasks import task_key
from assay.deployment.pool import PoolReport, manifest_path, read_manifest
from assay.errors import ConfigError, DataError
from assay.traces import Rollout, Store
from assay.traces.store.sealing import DEFAULT_SALT, store_tasks


@pytest.fixture
def store(own_folder: Path) -> Iterator[Store]:
    with Store() as opened:
        two_versions(opened, own_folder)
        yield opened


def put(store: Store, question: str, score: float | None = 1.0, **fields: Any) -> None:
    """A rollout as production writes it."""
    values: dict[str, Any] = {
        "task_id": "x", "task_type": "bills", "status": "done", "phase": "deployed", "version": "support@1",
        "inputs": {"question": question}, "score": score, "started_at": time.time(), "ended_at": time.time(),
    }  # fmt: skip
    store.put_rollout(Rollout(**{**values, **fields}))


def pool(store: Store, out: str | None = None, **settings: Any) -> PoolReport:
    store.flush()
    return collect_pool("support", out=out, **settings)


def rows(path: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_rollouts_become_tasks_once_with_the_split_of_the_store(store: Store) -> None:
    for at in range(40):
        for score in (1.0, 0.0, 0.0):
            put(store, f"question {at}", score if at < 5 else 1.0)
    put(store, "crashed", 0.0, status="failed", task_type="parcels")
    report = pool(store, "pool.jsonl", privacy="off", min_points=41, min_task_types=2)
    pooled = rows("pool.jsonl")
    assert (report.tasks, report.rollouts, report.clean, report.passed) == (41, 121, 1.0, True)
    assert report.hard == 1  # 1/3 is not below 1/3
    assert report.task_types == {"bills": 40, "parcels": 1}
    for row in pooled:
        assert row["split"] == split_of(task_key(row["inputs"]), DEFAULT_SALT)[0]
    assert pooled[0]["metadata"]["production"].keys() == {"rollouts", "score", "failed"}
    assert {row["metadata"]["difficulty"] for row in pooled} == {"easy", "medium", "hard"}
    splits = load_splits("pool.jsonl", need=())
    assert sum(len(splits.parts()[name]) for name in ("train", "val", "gate")) == sum(
        report.splits[name] for name in ("train", "val", "gate")
    )
    assert read_manifest("pool.jsonl")["sha256"] == report.sha256
    again = pool(store, "again.jsonl", privacy="off", against="pool.jsonl")
    assert (again.sha256, again.new_tasks) == (report.sha256, 0)
    assert (again.drift or {})["distance"] == pytest.approx(abs(120 / 121 - 40 / 41))


def test_splits_stay_after_a_job_has_used_the_pool(store: Store) -> None:
    for at in range(60):
        put(store, f"question {at}")
    before = pool(store, "pool.jsonl", privacy="off")
    store_tasks(store, load_splits("pool.jsonl").parts())
    store.flush()
    assert pool(store, "again.jsonl", privacy="off").sha256 == before.sha256


def test_personal_data_is_replaced_and_the_split_stays_that_of_the_recorded_inputs(store: Store) -> None:
    for at in range(20):
        put(store, f"write to anna{at}@mailbox.de", data_subject=f"Anna {at}")
    report = pool(store, "pool.jsonl", privacy="patterns")
    text = Path("pool.jsonl").read_text()
    assert "mailbox.de" not in text
    assert "Anna" not in text + manifest_path("pool.jsonl").read_text()
    expected = sorted(
        split_of(task_key({"question": f"write to anna{at}@mailbox.de"}), DEFAULT_SALT)[0] for at in range(20)
    )
    assert sorted(row["split"] for row in rows("pool.jsonl")) == expected
    assert report.gates[-1]["passed"]
    again = pool(store, "again.jsonl", privacy="patterns", against="pool.jsonl")
    assert again.new_tasks == 0  # one key for all pools: the same surrogates
    assert str(Path("pool.jsonl").absolute()) in forget_subject("anna 3").to_dict()["made_from_them"]
    assert pool(store, privacy="patterns").tasks == 19


def test_tenants_consent_and_other_agents_are_respected(store: Store) -> None:
    put(store, "plain")
    put(store, "of a tenant", tenant="acme")
    put(store, "refused", consent="no")
    put(store, "agreed", consent="yes")
    put(store, "of another agent", version="support-2@1")
    put(store, "of a job", phase="search")
    put(store, "erased", data_subject="Bo")
    store.flush()
    forget_subject("bo")
    put(store, "erased again", data_subject="Bo")
    store.flush()

    def questions(**settings: Any) -> set[str]:
        pool(store, "p.jsonl", replace=True, privacy="off", **settings)
        return {row["inputs"]["question"] for row in rows("p.jsonl")}

    assert questions() == {"plain", "agreed"}
    assert questions(require_consent=True) == {"agreed"}
    assert questions(tenants=["acme"]) == {"plain", "agreed", "of a tenant"}
    assert [row.get("tenant") for row in rows("p.jsonl")].count("acme") == 1
    assert pool(store, privacy="off").left_out == {
        "of other tenants or without consent": 2, "of erased people": 1,
    }  # fmt: skip


def test_hard_tasks_are_kept_and_types_balanced(store: Store) -> None:
    for at in range(50):
        put(store, f"bill {at}", 0.1 if at % 10 == 0 else 1.0)
    for at in range(4):
        put(store, f"parcel {at}", task_type="parcels")
    put(store, "unscored", None)
    put(store, "the model was down", None, status="error")
    report = pool(store, "pool.jsonl", privacy="off", max_tasks=14, min_clean=0.99)
    assert report.task_types == {"bills": 10, "parcels": 4}
    assert report.hard == 5
    assert report.clean == pytest.approx(54 / 56)
    assert [gate["gate"] for gate in report.gates if not gate["passed"]] == ["points", "clean", "task types"]
    assert report.left_out == {
        "tasks beyond max_tasks": 40, "unscored": 1, "ended by an error of a model or judge": 1,
    }  # fmt: skip
    questions = {row["inputs"]["question"] for row in rows("pool.jsonl") if row["task_type"] == "bills"}
    hard, newest = {f"bill {at}" for at in range(0, 50, 10)}, {f"bill {at}" for at in range(45, 50)}
    assert questions == hard | newest


@pytest.mark.slow
def test_drift_against_the_training_data_is_reported(store: Store, own_folder: Path) -> None:
    (own_folder / "old.jsonl").write_text(
        "".join(json.dumps({"inputs": {"question": f"short {at}"}, "task_type": "bills"}) + "\n" for at in range(30))
    )
    for at in range(30):
        put(store, f"a much longer question about a parcel {at}", task_type="parcels")
    drift = pool(store, privacy="off", against="old.jsonl").drift
    assert drift is not None
    assert (drift["distance"], drift["new_task_types"]) == (1.0, ["parcels"])
    assert drift["length"]["p"] < 1e-6
    store.flush()
    printed = CliRunner().invoke(group, ["loop", "pool", "support", "--against", "old.jsonl"], catch_exceptions=False)
    assert "100% of the task types (new: parcels)" in printed.output
    assert "failed  points     30, required 5000" in printed.output


def test_a_pool_is_not_overwritten_nor_used_after_a_change(store: Store, own_folder: Path) -> None:
    with pytest.raises(DataError, match=r"it has no rollouts of assay\.deployed"):
        pool(store, "pool.jsonl")
    put(store, "one")
    pool(store, "pool.jsonl")
    for name in ("pool.jsonl", "pool.csv"):
        with pytest.raises(ConfigError, match="must be a new file"):
            pool(store, name)
    with (own_folder / "pool.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(DataError, match="was changed since it was written"):
        read_manifest("pool.jsonl")
