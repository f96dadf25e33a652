"""Exports: advantages, the selection of rollouts, sealed and erased data, settings."""

import json
import math
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from export_rows import add_rollout, exported, response_of, store as store, turn

import assay
from assay.traces import Store, ToolCall
from assay.traces.export.settings import Gates, Selection, UngatedExport


@pytest.mark.slow
def test_transitions_have_rewards_returns_and_advantages_in_both_files(store: Store) -> None:
    for score in (1.0, 0.0):
        add_rollout(
            store,
            turn(0, "a", "b", step_rewards={"ran": 0.25}, token_ids=(1, 2), logprobs=(-0.5, -1.0)),
            turn(1, "c", "d"),
            score=score,
        )
    rows, manifest = exported(store, "transitions")
    good = [row for row in rows if row["score"] == 1.0]
    assert [(row["t"], row["reward"], row["return"], row["weight"]) for row in good] == [
        (0, 0.25, 1.25, 0.5),
        (1, 1.0, 1.0, 0.5),
    ]
    # turn 0: 1.25 against 0.25, turn 1: 1 against 0; the deviation of the returns 1.25 and 0.25 is sqrt(0.5)
    assert [row["advantage"] for row in good] == pytest.approx([1 / (math.sqrt(0.5) + 1e-4)] * 2)
    assert good[0]["token_ids"] == [1, 2]
    assert good[0]["input"]["body"]["messages"][0]["content"] == "a"
    assert manifest["files"]["data.jsonl"]["rows"] == 4
    table = pq.read_table("out/data.parquet").to_pylist()
    assert [row["advantage"] for row in table] == [row["advantage"] for row in rows]
    assert json.loads(table[0]["input"]) == rows[0]["input"]
    assert table[0]["token_ids"] == [1, 2]


@pytest.mark.slow
def test_transitions_have_reasoning_and_refusal_in_columns_that_hide_personal_data(store: Store) -> None:
    message = {
        "role": "assistant",
        "content": None,
        "refusal": "No, jane.doe@corp.com.",
        "reasoning_content": "Is jane.doe@corp.com kind?",
    }
    made = turn(0, "Is she kind?", "No, jane.doe@corp.com.", token_ids=(1,), logprobs=(-1.0,))
    made.response = {"body": {"choices": [{"message": message}]}}
    add_rollout(store, made)
    (row,), _ = exported(store, "transitions")
    assert (row["reasoning"].startswith("Is "), row["refusal"].startswith("No, "), row["refusal"]) == (
        True,
        True,
        row["output"],
    )
    assert "jane.doe" not in json.dumps(row)
    assert row["token_ids"] is None  # the token ids encode the hidden text
    assert pq.read_table("out/data.parquet").column("reasoning").to_pylist() == [row["reasoning"]]


@pytest.mark.slow
def test_identical_rollouts_are_counted_and_have_advantage_zero(store: Store) -> None:
    for _ in range(3):
        add_rollout(store, turn(0, "a", "b"))
    rows, manifest = exported(store, "transitions")
    assert [row["advantage"] for row in rows] == [0.0] * 3
    assert manifest["groups_without_spread"] == 1


@pytest.mark.parametrize("how", ["group", "batch", "none"])
def test_advantages_are_relative_to_the_group_or_the_batch(store: Store, how: str) -> None:
    for task, scores in {"easy": (1.0, 1.0), "hard": (0.0, 0.0)}.items():
        for score in scores:
            add_rollout(store, turn(0, task, "x"), task=task, score=score)
    rows, _ = exported(store, "transitions", advantage=how)
    signs = {row["task"]: math.copysign(1, row["advantage"]) if row["advantage"] else 0 for row in rows}
    assert signs == ({"easy": 1, "hard": -1} if how == "batch" else {"easy": 0, "hard": 0})


def test_advantages_do_not_depend_on_the_ids_of_rollouts(tmp_path: Path) -> None:
    by_score = []
    for name, backwards in (("one", False), ("other", True)):
        with Store(tmp_path / name / ".assay" / "assay.db") as store:
            scores = [0.1, 0.7, 0.3, 0.9, 0.2, 0.6, 0.45]
            for at, score in enumerate(reversed(scores) if backwards else scores):
                add_rollout(store, turn(0, "a", f"b {score}"), id=f"r{at}", score=score)
            store.flush()
            rows, _ = exported(store, "transitions", str(tmp_path / f"{name}-out"))
            by_score.append({row["score"]: row["advantage"] for row in rows})
    assert by_score[0] == by_score[1]  # to the last bit
    assert len(by_score[0]) == 7


def test_sealed_rollouts_and_their_inputs_are_never_exported(store: Store) -> None:
    add_rollout(store, turn(0, "a", "b"), task="mine")
    add_rollout(store, turn(0, "a", "b"), task="sealed", split="test")
    add_rollout(
        store, turn(0, "a", "b"), task="again", split="", inputs={"question": "sealed"}
    )  # the same question, asked outside a split
    add_rollout(store, turn(0, "a", "b"), task="gated", split="gate")
    rows, manifest = exported(store, "transitions")
    assert {row["task"] for row in rows} == {"mine"}
    assert manifest["left_out"] == {"of the gate or test split": 2, "with the inputs of a sealed task": 1}


def test_text_that_overlaps_with_sealed_text_is_measured_and_named(store: Store) -> None:
    long = "the quick brown fox jumps over the lazy dog and runs far away from here"
    add_rollout(store, turn(0, "a", "b"), task="near", inputs={"question": long + " today"})
    add_rollout(
        store,
        turn(0, "a", "b"),
        task="far",
        inputs={"question": "something else entirely that has nothing to do with animals at all, ever"},
    )
    add_rollout(store, turn(0, "a", "b"), task="sealed", split="test", inputs={"question": long})
    _, manifest = exported(store, "transitions")
    overlap = manifest["overlap"]
    assert (overlap["tasks"], overlap["shared"], overlap["worst"][0]["task"]) == (2, 1, "near")
    assert overlap["worst"][0]["share"] == pytest.approx(8 / 9, abs=1e-4)  # 16 words: 9 n-grams of 8, one of them new


def test_tenants_and_consent_limit_the_selection(store: Store) -> None:
    add_rollout(store, turn(0, "a", "b"), task="free")
    add_rollout(store, turn(0, "a", "b"), task="acme", tenant="acme")
    add_rollout(store, turn(0, "a", "b"), task="other", tenant="other")
    add_rollout(store, turn(0, "a", "b"), task="no", consent="Withdrawn")
    add_rollout(store, turn(0, "a", "b"), task="yes", consent="given")
    rows, manifest = exported(store, "transitions", selection=Selection(tenants=("acme",)))
    assert {row["task"] for row in rows} == {"free", "acme", "yes"}
    assert manifest["left_out"] == {"of a tenant that was not selected": 1, "with a consent that was not given": 1}
    assert manifest["tenants"] == ["acme"]
    rows, _ = exported(store, "transitions", "out2", selection=Selection(require_consent=True))
    assert {row["task"] for row in rows} == {"yes"}
    free = next(rollout.id for rollout in store.rollouts(limit=None) if rollout.task_id == "free")
    store.rate(free, 0.9)
    rows, manifest = exported(store, "transitions", "out3", selection=Selection(rated=True))
    assert {row["task"] for row in rows} == {"free"}
    assert manifest["left_out"]["without a human rating"] > 0


def test_failed_gates_report_what_is_missing_and_write_nothing(store: Store) -> None:
    for at in range(10):
        add_rollout(
            store, turn(0, "a", "b", finish="length" if at < 5 else "stop"), task=f"t{at}", task_type=f"k{at % 3}"
        )
    store.flush()
    with pytest.raises(UngatedExport) as caught:
        assay.export("transitions", "out", store=store.url, privacy="patterns")
    by_name = {gate["gate"]: gate for gate in caught.value.gates}
    assert by_name["transitions"]["missing"] == "4,995 more clean transitions"
    assert by_name["clean"] == {
        "gate": "clean",
        "passed": False,
        "enforced": True,
        "value": 0.5,
        "required": 0.95,
        "missing": "5 truncated; 90 more clean transitions would do",
    }
    assert by_name["task types"]["missing"] == "2 more task types"
    assert (by_name["privacy"]["passed"], by_name["privacy"]["value"]) == (True, "patterns only")
    assert "names were not detected" in by_name["privacy"]["warning"]
    assert not Path("out").exists()
    assert [p.name for p in Path().iterdir()] == [".assay"]
    report = assay.export("transitions", "out", store=store.url, gates=Gates(min_clean=0))
    assert (report.manifest["passed"], report.manifest["gated"]) == (False, False)
    assert report.rows == 10  # what was cut off is what a policy must learn to avoid


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        ({"error": "boom"}, "error"),
        ({"response": None}, "schema"),
        ({"request": {}}, "schema"),
        ({"response": response_of("x", "length")}, "truncated"),
        ({"output": "", "response": response_of("")}, "parse"),
        (
            {"tools": [ToolCall(name="f", arguments={"arguments": "{"}, error="the arguments are not a JSON object")]},
            "parse",
        ),
        ({"model": ""}, "provenance"),
        ({"token_ids": (1,), "logprobs": None}, "schema"),
    ],
)
def test_problems_of_unclean_calls_are_named(store: Store, broken: dict[str, Any], problem: str) -> None:
    plain = turn(0, "a", "b")
    for name, value in broken.items():
        setattr(plain, name, value)
    add_rollout(store, plain, turn(1, "c", "d"))
    _, manifest = exported(store, "transitions")
    assert manifest["problems"] == {problem: 1}


def test_a_cached_copy_of_an_exported_answer_is_left_out_and_fails_no_gate(store: Store) -> None:
    add_rollout(store, turn(0, "a", "b"), run_id="search")
    for _ in range(9):  # a later run that the response cache answers
        add_rollout(store, turn(0, "a", "b", cached=True), run_id="collect")
    add_rollout(store, turn(0, "a", "b"))  # sampled anew, and the same: that is data
    rows, manifest = exported(store, "transitions", gates=Gates(min_transitions=0, min_task_types=0))
    assert (len(rows), manifest["problems"]) == (2, {})
    assert manifest["left_out"] == {"cached copies of calls that are exported": 9}


def test_a_failed_gate_names_the_run_and_rounds_its_figure(store: Store) -> None:
    for at in range(6):
        add_rollout(
            store,
            turn(0, "a", "b", finish="length" if at < 4 else "stop"),
            task=f"t{at}",
            run_id="late" if at else "early",
        )
    store.flush()
    with pytest.raises(
        UngatedExport,
        match=r"clean is 0\.3333, required is 0\.95: 4 truncated; 3 of them in run late; .*runs.*min_clean",
    ):
        assay.export("sft", "out", store=store.url)
