"""Exports: advantages, the selection of rollouts, sealed and erased data, settings; the same from PostgreSQL."""

import json
import math
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa
from export_rows import LOOSE, add_rollout, exported, rows, store as store, turn
from hypothesis import given, strategies as st

import assay
from assay.datasets.tasks import task_key
from assay.errors import ConfigError, DataError
from assay.traces import Rollout, Store
from assay.traces.export.settings import Balance, Sampler, Selection, targets
from assay.traces.store.erasure import erase_subject
from assay.traces.store.sealing import store_splits

# -- rows


def test_transitions_have_rewards_returns_and_advantages_in_both_files(store: Store) -> None:
    for score in (1.0, 0.0):
        first = turn(0, "a", "b", step_rewards={"ran": 0.25}, token_ids=(1, 2), logprobs=(-0.5, -1.0))
        add_rollout(store, first, turn(1, "c", "d"), score=score)
    rows, manifest = exported(store, "transitions")
    good = [row for row in rows if row["score"] == 1.0]
    assert [(row["t"], row["reward"], row["return"], row["weight"]) for row in good] == [
        (0, 0.25, 1.25, 0.5),
        (1, 1.0, 1.0, 0.5),
    ]
    # turn 0: 1.25 against 0.25, turn 1: 1 against 0; the deviation of the returns 1.25 and 0.25 is sqrt(0.5)
    assert [row["advantage"] for row in good] == pytest.approx([1 / (math.sqrt(0.5) + 1e-4)] * 2)
    assert good[0]["input"]["body"]["messages"][0]["content"] == "a"
    assert manifest["files"]["data.jsonl"]["rows"] == 4
    table = pq.read_table("out/data.parquet").to_pylist()
    assert [row["advantage"] for row in table] == [row["advantage"] for row in rows]
    assert json.loads(table[0]["input"]) == rows[0]["input"]
    assert table[0]["token_ids"] == good[0]["token_ids"] == [1, 2]


@pytest.mark.parametrize("how", ["group", "batch", "none"])
def test_advantages_are_relative_to_the_group_or_the_batch(store: Store, how: str) -> None:
    for task, score in (("easy", 1.0), ("easy", 1.0), ("hard", 0.0), ("hard", 0.0)):
        add_rollout(store, turn(0, task, "x"), task=task, score=score)
    rows, manifest = exported(store, "transitions", advantage=how)
    signs = {row["task"]: math.copysign(1, row["advantage"]) if row["advantage"] else 0 for row in rows}
    assert signs == ({"easy": 1, "hard": -1} if how == "batch" else {"easy": 0, "hard": 0})
    assert manifest["groups_without_spread"] == (2 if how == "group" else 0)


def test_advantages_do_not_depend_on_the_ids_of_rollouts(tmp_path: Path) -> None:
    by_score = []
    scores = [0.1, 0.7, 0.3, 0.9, 0.2, 0.6, 0.45]
    for name, order in (("one", scores), ("other", scores[::-1])):
        with Store(tmp_path / name / ".assay" / "assay.db") as store:
            for at, score in enumerate(order):
                add_rollout(store, turn(0, "a", f"b {score}"), id=f"r{at}", score=score)
            rows, _ = exported(store, "transitions", str(tmp_path / f"{name}-out"))
            by_score.append({row["score"]: row["advantage"] for row in rows})
    assert by_score[0] == by_score[1]  # to the last bit
    assert len(by_score[0]) == 7


def test_a_task_collected_twice_is_one_group_if_grouped_by_task(store: Store) -> None:
    for run, score in (("a", 1.0), ("b", 0.0)):
        add_rollout(store, turn(0, "a", f"said in {run}"), run_id=run, group_id=f"{run}/t1", score=score)
    assert [row["advantage"] for row in exported(store, "transitions")[0]] == [0.0, 0.0]
    rows = exported(store, "transitions", "by-task", group_by="task")[0]
    assert sorted(row["advantage"] for row in rows) == pytest.approx([-(2**0.5), 2**0.5], rel=1e-3)
    assert {row["group"] for row in rows} == {"t1"}
    assert len(exported(store, "preferences", "pairs", group_by="task")[0]) == 1


def test_texts_that_contain_escape_sequences_are_unchanged(store: Store) -> None:
    texts = ["\\u0000", "\\\\u0000", "C:\\users\\u0000x", "\\", "\U0001f600 \u2028", '</s> {"a": 1}']
    for at, text in enumerate(texts):
        add_rollout(store, turn(0, text, text), task=f"t{at}")
    add_rollout(store, turn(0, "a\0b \ud800", "c"), task="nul")
    *rows, odd = sorted(exported(store, "transitions")[0], key=lambda row: row["task"] == "nul")
    assert sorted(row["output"] for row in rows) == sorted(texts)
    assert all(row["output"] == row["input"]["body"]["messages"][0]["content"] for row in rows)
    assert "a\ufffdb" in str(odd)


def test_rows_with_the_maximum_nesting_of_the_store_are_exported(store: Store) -> None:
    deep: Any = "x"
    for _ in range(260):
        deep = [deep]
    odd = turn(0, deep, "b")
    add_rollout(store, odd)
    add_rollout(store, turn(0, "a", "b"), task="t2")
    for kind, more in (
        ("sft", {}),
        ("transitions", {}),
        ("grpo", {"rubric": "math_qa"}),
        ("preferences", {"unpaired": True}),
    ):
        assert len(exported(store, kind, kind, **more)[0]) == 2


def test_large_rows_are_written_in_small_groups(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("assay.traces.export.files.MAX_BUFFERED_BYTES", 50_000)
    for at in range(10):
        add_rollout(store, turn(0, "a" * 20_000, str(at)), task=f"t{at}")
    exported(store, "transitions")
    assert pq.ParquetFile("out/data.parquet").num_row_groups == 4


# -- which rollouts


def test_sealed_rollouts_and_their_inputs_are_never_exported(store: Store) -> None:
    for task, more in (
        ("mine", {}),
        ("sealed", {"split": "test"}),
        ("again", {"split": "", "inputs": {"question": "sealed"}}),  # the same question, asked outside a split
        ("gated", {"split": "gate"}),
        ("loud", {"split": "Test "}),
    ):
        add_rollout(store, turn(0, "a", "b"), task=task, **more)
    rows, manifest = exported(store, "transitions")
    assert {row["task"] for row in rows} == {"mine"}
    assert manifest["left_out"] == {"of the gate or test split": 3, "with the inputs of a sealed task": 1}


def test_text_that_overlaps_with_sealed_text_is_measured_and_named(store: Store) -> None:
    long = "the quick brown fox jumps over the lazy dog and runs far away from here"
    other = "something else entirely that has nothing to do with animals at all, ever"
    for task, question, split in (
        ("near", f"{long} today", "train"),
        ("far", other, "train"),
        ("sealed", long, "test"),
    ):
        add_rollout(store, turn(0, "a", "b"), task=task, inputs={"question": question}, split=split)
    overlap = exported(store, "transitions")[1]["overlap"]
    assert (overlap["tasks"], overlap["shared"], overlap["worst"][0]["task"]) == (2, 1, "near")
    assert overlap["worst"][0]["share"] == pytest.approx(8 / 9, abs=1e-4)  # 16 words: 9 n-grams of 8, one of them new


def test_tenants_consent_and_ratings_limit_the_selection(store: Store) -> None:
    for task, more in (
        ("free", {"human_rating": 0.9}),
        ("acme", {"tenant": "acme"}),
        ("other", {"tenant": "other"}),
        ("no", {"consent": "Withdrawn"}),
        ("yes", {"consent": "given"}),
        ("judged", {"source": "judge", "score": None}),
    ):
        add_rollout(store, turn(0, "a", "b"), task=task, **more)
    rows, manifest = exported(store, "transitions", selection=Selection(tenants=("acme",)))
    assert {row["task"] for row in rows} == {"free", "acme", "yes"}
    assert manifest["left_out"] == {"of a tenant that was not selected": 1, "with a consent that was not given": 1}
    assert (manifest["tenants"], manifest["problems"]) == (["acme"], {})
    rows, _ = exported(store, "transitions", "out2", selection=Selection(require_consent=True))
    assert {row["task"] for row in rows} == {"yes"}
    rows, manifest = exported(store, "transitions", "out3", selection=Selection(rated=True))
    assert {row["task"] for row in rows} == {"free"}
    assert manifest["left_out"]["without a human rating"] > 0


def test_exclusions_are_counted_for_the_selected_runs_and_programs_only(store: Store) -> None:
    add_rollout(store, turn(0, "a", "b"), run_id="mine", task="t1")
    add_rollout(store, turn(0, "a", "b"), run_id="mine", task="t2", split="test")
    for status in ("done", "error"):
        add_rollout(store, turn(0, "a", "b"), run_id="other", task="t3", split="gate", status=status, program="q")
    for out, selection in (("one", Selection(runs=("mine",))), ("two", Selection(programs=("p",)))):
        _, manifest = exported(store, "transitions", out, selection=selection)
        assert manifest["left_out"] == {"of the gate or test split": 1}
    for selection, message in (
        (Selection(runs=("nosuch",)), "no rollout has the run 'nosuch'.*'mine', 'other'"),
        (Selection(programs=("P",)), "no rollout has the program 'P'.*'p', 'q'"),
    ):
        with pytest.raises(DataError, match=message):
            exported(store, "transitions", "three", selection=selection)


def test_a_cached_copy_of_an_exported_answer_is_left_out_and_fails_no_gate(store: Store) -> None:
    add_rollout(store, turn(0, "a", "b"), run_id="search")
    for _ in range(9):  # a later run that the response cache answers
        add_rollout(store, turn(0, "a", "b", cached=True), run_id="collect")
    add_rollout(store, turn(0, "a", "b"))  # sampled anew, and the same: that is data
    rows, manifest = exported(store, "transitions")
    assert (len(rows), manifest["problems"]) == (2, {})
    assert manifest["left_out"] == {"cached copies of calls that are exported": 9}


def test_bad_numbers_and_unscored_rollouts_are_named_counted_and_left_out(store: Store) -> None:
    add_rollout(store, turn(0, "a", "b", step_rewards={"x": float("nan")}))
    add_rollout(store, turn(0, "a", "b", step_rewards={"x": 1e308, "y": 1e308}))
    for score in (5.0, None, 0.5, 0.0):
        add_rollout(store, turn(0, "a", "b"), score=score)
    rows, manifest = exported(store, "transitions")
    assert sorted(row["score"] for row in rows) == [0.0, 0.5]
    assert manifest["left_out"] == {"without an outcome or with a non-finite reward": 2, "unscored": 2}
    assert manifest["problems"]["unscored"] == 2


def test_an_export_without_rows_names_the_excluded_rollouts_and_how_to_include_them(
    store: Store, tmp_path: Path
) -> None:
    fields = [{"score": 0.2}, {"score": 0.1}, {"score": None}, {"tenant": "acme"}, {"status": "running"}]
    for at, more in enumerate(fields):
        add_rollout(store, turn(0, f"Q{at}", "a"), task=f"t{at}", **more)
    add_rollout(store, turn(0, "Q", "a"), task="t", split="test")
    add_rollout(store, turn(0, "Q", "a"), task="again", split="", inputs={"question": "t"})
    with pytest.raises(DataError) as caught:
        exported(store, "sft")
    for part in (
        "no rows for sft: 7 rollouts; ",
        "inputs with this hash are in the gate or test split; record other inputs)",
        "2 left out: below the quality of 0.8 (a lower min_quality includes them)",
        "1 left out: unscored (`assay traces score --rubric R` scores them)",
        "1 left out: of a tenant that was not selected (select it with tenants=…)",
        "1 left out: still running (`assay traces close` ends open rollouts)",
        "1 left out: of the gate or test split (these are never exported; `assay collect` makes rollouts of train "
        "tasks)",
    ):
        assert part in str(caught.value), str(caught.value)
    with pytest.raises(DataError, match="leave out rated=True"):
        exported(store, "sft", selection=Selection(rated=True))
    Store(tmp_path / "empty.db").close()
    with pytest.raises(DataError, match="no rollout of an agent was selected"):
        assay.export("sft", "out", store=tmp_path / "empty.db", gates=LOOSE)


@pytest.mark.slow
def test_an_export_reads_a_snapshot_of_the_store(store: Store) -> None:
    for at in range(100):
        add_rollout(store, turn(0, "a", f"b{at}"), task=f"t{at:02}")
    store.flush()
    stop = threading.Event()
    flip = "UPDATE rollouts SET status = CASE status WHEN 'done' THEN 'running' ELSE 'done' END WHERE task_id = 't10'"
    delete = "DELETE FROM transitions WHERE rollout_id IN (SELECT id FROM rollouts WHERE task_id = 't20')"

    def disturb() -> None:
        with Store(store.url) as other:
            while not stop.is_set():
                with other.engine.begin() as connection:
                    connection.execute(sa.text(flip))
                    connection.execute(sa.text(delete))
                time.sleep(0.001)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        counts = [len(exported(store, "transitions", f"o{n}")[0]) for n in range(4)]
    finally:
        stop.set()
        thread.join()
    assert all(98 <= count <= 100 for count in counts), counts


@pytest.mark.slow
def test_an_export_from_postgresql_is_the_same(store: Store, empty_postgres_url: str) -> None:
    def filled(opened: Store) -> None:
        store_splits(opened, {"train": [task_key({"question": f"q{at}"}) for at in range(5)]})
        for at in range(6):
            for sample, score in enumerate((1.0, 0.0)):
                rollout = Rollout(
                    id=f"{0xe0 + at:016x}{sample:016x}", task_id=f"Täsk {at}", group_id=f"g{at}",
                    task_type="ab"[at % 2], status="done", program="p",
                    program_version="v", model="m", score=score, split="test" if at == 5 else "train",
                    inputs={"question": f"q{at}"}, rubric="r@1",
                    data_subject="Ida Pg" if at == 0 else None,
                )  # fmt: skip
                opened.put_rollout(rollout)
                opened.put_transition(
                    rollout.id, turn(0, f"q{at} by jane.doe@corp.com", f"a{sample}", token_ids=(1,), logprobs=(-1.0,))
                )

    kinds = ("transitions", "sft", "preferences")
    balance = Balance(method="down")
    with Store(empty_postgres_url) as server:
        for opened, out in ((store, "lite"), (server, "pg")):
            filled(opened)
            for kind in kinds:
                exported(opened, kind, f"{kind}-{out}", privacy_key=Path("keys") / "k", balance=balance)
        assert erase_subject(server, "Ida Pg").removed == 2
        tasks = {row["task"] for row in exported(server, "transitions", "after")[0]}
    assert tasks == {f"Täsk {at}" for at in range(1, 5)}
    for kind in kinds:
        lite, pg = ([json.dumps(row, sort_keys=True) for row in rows(Path(f"{kind}-{out}"))] for out in ("lite", "pg"))
        assert sorted(lite) == sorted(pg)
        assert lite


# -- settings


def test_an_export_never_writes_over_another(store: Store) -> None:
    add_rollout(store, turn(0, "a", "b"))
    exported(store, "transitions")
    before = (Path("out") / "data.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="already exists"):
        exported(store, "transitions")
    assert (Path("out") / "data.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("kind", "options", "match"),
    [
        ("transitions", {"min_quality": 2}, "min_quality: must be less than or equal to 1"),
        ("transitions", {"returns": "magic"}, "must be one of"),
        ("transitions", {"discount": 0.5, "returns": "episode"}, "no effect"),
        ("transitions", {"advantage": "x"}, "must be one of"),
        ("transitions", {"tools": "text"}, "tools: would have no effect on kind 'transitions'"),
        ("transitions", {"margin": math.nan}, "margin: must be a finite number"),
        ("transitions", {"step_weight": math.nan}, "step_weight: must be a finite number"),
        ("transitions", {"demos": False}, "demos: would have no effect on kind 'transitions', only on sft"),
        ("sft", {"demos": False, "whole": True}, "demos=False requires kind='sft' and whole=False"),
        ("grpo", {}, "rubric: is required"),
    ],
)
def test_invalid_settings_of_an_export_are_refused(kind: str, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        assay.export(kind, "out", **options)
    with pytest.raises(TypeError, match="unexpected keyword 'speed'"):
        assay.export(kind, "out", speed=1)


@pytest.mark.parametrize(
    "bad", [{"method": "x"}, {"by": ()}, {"by": ("colour",)}, {"most_copies": 0}, {"temperature": 2.0}]
)
def test_invalid_settings_of_the_balance_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Balance(**bad)


@given(
    st.dictionaries(st.tuples(st.text(max_size=3)), st.integers(1, 60), min_size=1, max_size=5),
    st.sampled_from(["none", "down", "over", "temperature"]),
    st.integers(0, 5),
)
def test_the_sampler_reaches_exactly_its_targets(counts: dict[tuple[str, ...], int], method: str, seed: int) -> None:
    balance = Balance(method=method, seed=seed)
    sampler, expected = Sampler(counts, balance), targets(counts, balance)
    for cell, count in counts.items():
        copies = [sampler.take(cell) for _ in range(count)]
        assert sum(copies) == expected[cell]
        assert max(copies) <= (balance.most_copies if method == "over" else 1)
        assert sampler.take(cell) == 0
    assert expected == dict(sampler.after)
    if method == "down":
        assert set(expected.values()) == {min(counts.values())}
    if method == "over":
        assert all(counts[cell] <= value <= max(counts.values()) for cell, value in expected.items())


def test_balancing_by_temperature_is_between_no_and_equal_balancing() -> None:
    # shares ~ 100^0.5 : 4^0.5 = 10 : 2; the smaller keeps its 4, so the larger gets 20
    assert targets({("a",): 100, ("b",): 4}, Balance(method="temperature")) == {("a",): 20, ("b",): 4}
    assert targets({("a",): 100, ("b",): 4}, Balance(method="temperature", temperature=1.0)) == {("a",): 100, ("b",): 4}
    assert targets({("a",): 100, ("b",): 4}, Balance(method="over")) == {("a",): 100, ("b",): 12}


def test_difficulty_is_the_tasks_own_or_derived_from_its_mean_score(store: Store) -> None:
    add_rollout(store, turn(0, "a", "b"), task="told", metadata={"difficulty": "brutal"})
    add_rollout(store, turn(0, "a", "b"), task="easy")
    for score in (0.0, 0.0, 0.0, 1.0):
        add_rollout(store, turn(0, "a", "b"), task="hard", score=score)
    _, manifest = exported(store, "transitions", balance=Balance(method="over", by=("difficulty",)))
    assert manifest["balance"]["before"] == {"brutal": 1, "easy": 1, "hard": 4}
