"""Exports: token ids, nested rows, large files and groups; the same from PostgreSQL."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from export_rows import add_rollout, exported, response_of, rows, store as store, turn

from assay.datasets.tasks import task_key
from assay.errors import DataError
from assay.traces import Rollout, Store, Transition
from assay.traces.export.settings import Balance, Selection
from assay.traces.store.erasure import erase_subject
from assay.traces.store.sealing import store_splits


@pytest.mark.slow
def test_exclusions_are_counted_for_the_selected_runs_and_programs_only(store: Store) -> None:
    add_rollout(store, turn(0, "a", "b"), run_id="mine", task="t1")
    add_rollout(store, turn(0, "a", "b"), run_id="mine", task="t2", split="test")
    for status in ("done", "error"):
        add_rollout(store, turn(0, "a", "b"), run_id="other", task="t3", split="gate", status=status, program="q")
    _, manifest = exported(store, "transitions", selection=Selection(runs=("mine",)))
    assert manifest["left_out"] == {"of the gate or test split": 1}
    _, manifest = exported(store, "transitions", "two", selection=Selection(programs=("p",)))
    assert manifest["left_out"] == {"of the gate or test split": 1}
    for selection, message in (
        (Selection(runs=("nosuch",)), "no rollout has the run 'nosuch'.*'mine', 'other'"),
        (Selection(programs=("P",)), "no rollout has the program 'P'.*'p', 'q'"),
    ):
        with pytest.raises(DataError, match=message):
            exported(store, "transitions", "three", selection=selection)


def test_rows_with_the_maximum_nesting_of_the_store_are_exported(store: Store) -> None:
    deep: Any = "x"
    for _ in range(260):
        deep = [deep]
    odd = Transition(
        t=0,
        model="m",
        request={"dialect": "chat", "body": {"messages": [{"role": "user", "content": deep}]}},
        response=response_of("b"),
        output="b",
    )
    add_rollout(store, odd)
    add_rollout(store, turn(0, "a", "b"), task="t2")
    for kind in ("sft", "transitions", "grpo", "preferences"):
        more = {"rubric": "math_qa"} if kind == "grpo" else {"unpaired": True} if kind == "preferences" else {}
        assert len(exported(store, kind, kind, **more)[0]) == 2


def test_large_rows_are_written_in_small_groups(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    import assay.traces.export.files

    monkeypatch.setattr(assay.traces.export.files, "MAX_BUFFERED_BYTES", 50_000)
    for at in range(10):
        add_rollout(store, turn(0, "a" * 20_000, str(at)), task=f"t{at}")
    exported(store, "transitions")
    assert pq.ParquetFile("out/data.parquet").num_row_groups == 4


def test_a_task_collected_twice_is_one_group_if_grouped_by_task(store: Store) -> None:
    for run, score in (("a", 1.0), ("b", 0.0)):
        add_rollout(store, turn(0, "a", f"said in {run}"), run_id=run, group_id=f"{run}/t1", score=score)
    assert [row["advantage"] for row in exported(store, "transitions")[0]] == [0.0, 0.0]
    rows = exported(store, "transitions", "by-task", group_by="task")[0]
    assert sorted(row["advantage"] for row in rows) == pytest.approx([-(2**0.5), 2**0.5], rel=1e-3)
    assert {row["group"] for row in rows} == {"t1"}
    assert len(exported(store, "preferences", "pairs", group_by="task")[0]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("text", ["\\u0000", "\\\\u0000", "C:\\users\\u0000x", "\\"])
def test_texts_that_contain_escape_sequences_are_unchanged(store: Store, text: str) -> None:
    add_rollout(store, turn(0, text, text))
    (row,), _ = exported(store, "transitions")
    assert row["output"] == row["input"]["body"]["messages"][0]["content"] == text
    add_rollout(store, turn(0, "a\0b", "c"), task="nul")
    assert "a\ufffdb" in str(exported(store, "transitions", "nul")[0])


@pytest.mark.slow
def test_an_export_from_postgresql_is_the_same(store: Store, postgres_url: str) -> None:
    def filled(opened: Store) -> None:
        store_splits(opened, {"train": [task_key({"question": f"q{at}"}) for at in range(5)]})
        for at in range(6):
            for sample, score in enumerate((1.0, 0.0)):
                rollout = Rollout(
                    id=f"{0xe0 + at:016x}{sample:016x}", run_id="pg-export", task_id=f"Täsk {at}", group_id=f"g{at}",
                    task_type="ab"[at % 2], status="done", program="p",
                    program_version="v", model="m", score=score, split="test" if at == 5 else "train",
                    inputs={"question": f"q{at}"}, rubric="r@1",
                    data_subject="Ida Pg" if at == 0 else None,
                )  # fmt: skip
                opened.put_rollout(rollout)
                opened.put_transition(
                    rollout.id, turn(0, f"q{at} by jane.doe@corp.com", f"a{sample}", token_ids=(1,), logprobs=(-1.0,))
                )
        opened.flush()

    mine = Selection(runs=("pg-export",))  # other tests write there too
    with Store(postgres_url) as server:
        for opened, out in ((store, "lite"), (server, "pg")):
            filled(opened)
            for kind in ("transitions", "sft", "preferences"):
                exported(
                    opened,
                    kind,
                    f"{kind}-{out}",
                    privacy_key=Path("keys") / "k",
                    balance=Balance(method="down"),
                    selection=mine,
                )
        assert erase_subject(server, "Ida Pg").removed == 2
        assert {row["task"] for row in exported(server, "transitions", "after", selection=mine)[0]} == {
            f"Täsk {at}" for at in range(1, 5)
        }
    for kind in ("transitions", "sft", "preferences"):
        lite, pg = ([json.dumps(row, sort_keys=True) for row in rows(Path(f"{kind}-{out}"))] for out in ("lite", "pg"))
        assert sorted(lite) == sorted(pg)
        assert lite
