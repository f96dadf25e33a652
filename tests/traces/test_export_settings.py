"""Exports: their snapshot, settings, balance and gates, as arithmetic."""

import json
import math
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from export_rows import LOOSE, add_rollout, exported, store as store, turn
from hypothesis import given, strategies as st

import assay
from assay.errors import ConfigError, DataError
from assay.traces import Store
from assay.traces.export.settings import Balance, GateReport, Gates, Sampler, targets


def test_columns_of_grpo_are_read_with_their_names(store: Store) -> None:
    inputs = {"card": 4111111111111111, "password": "hunter2222", "phone": "2127365000", "prompt": "mine"}
    add_rollout(store, turn(0, "a", "b"), inputs=inputs)
    (row,), manifest = exported(store, "grpo", rubric="math_qa")
    assert not any(str(value) in json.dumps(row) for name, value in inputs.items() if name != "prompt")
    assert (row["prompt_"], row["prompt"]) == ("mine", [{"role": "user", "content": "a"}])
    assert manifest["privacy"]["state"] != "failed"


@pytest.mark.slow
def test_an_export_reads_a_snapshot_of_the_store(store: Store, tmp_path: Path) -> None:
    for at in range(300):
        add_rollout(store, turn(0, "a", f"b{at}"), task=f"t{at:03}")
    store.flush()
    stop = threading.Event()

    def disturb() -> None:
        with Store(store.url) as other:
            while not stop.is_set():
                with other.engine.begin() as connection:
                    connection.execute(
                        sa.text(
                            "UPDATE rollouts SET status = CASE status WHEN 'done' THEN 'running' ELSE 'done' END "
                            "WHERE task_id = 't100'"
                        )
                    )
                    connection.execute(
                        sa.text(
                            "DELETE FROM transitions WHERE rollout_id IN (SELECT id FROM rollouts WHERE task_id = "
                            "'t200')"
                        )
                    )
                time.sleep(0.001)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        counts = [len(exported(store, "transitions", f"o{n}")[0]) for n in range(6)]
    finally:
        stop.set()
        thread.join()
    assert all(298 <= count <= 300 for count in counts), counts


def test_bad_numbers_are_named_counted_and_left_out(store: Store) -> None:
    add_rollout(store, turn(0, "a", "b", step_rewards={"x": float("nan")}))
    add_rollout(store, turn(0, "a", "b", step_rewards={"x": 1e308, "y": 1e308}))
    add_rollout(store, turn(0, "a", "b"), score=5.0)
    add_rollout(store, turn(0, "a", "b"), score=0.5)
    rows, manifest = exported(store, "transitions")
    assert [row["score"] for row in rows] == [0.5]
    assert manifest["left_out"] == {"without an outcome or with a non-finite reward": 2, "unscored": 1}
    with pytest.raises(ConfigError, match="finite"):
        exported(store, "transitions", "x", step_weight=math.nan)


def test_calls_of_judges_are_not_exported(store: Store) -> None:
    add_rollout(store, turn(0, "a", "b"))
    add_rollout(store, turn(0, "judge this", "yes"), source="judge", score=None)
    _, manifest = exported(store, "transitions")
    assert (manifest["rows"], manifest["problems"]) == (1, {})


def test_an_export_never_writes_over_another(store: Store) -> None:
    add_rollout(store, turn(0, "a", "b"))
    exported(store, "transitions")
    before = (Path("out") / "data.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="already exists"):
        exported(store, "transitions")
    assert (Path("out") / "data.jsonl").read_bytes() == before


def test_an_export_of_an_empty_store_names_the_reason(store: Store) -> None:
    add_rollout(store, turn(0, "a", "b"), split="test")
    store.flush()
    with pytest.raises(DataError, match="1 left out: of the gate or test split"):
        assay.export("sft", "out", store=store.url, gates=LOOSE)


@pytest.mark.parametrize(
    "bad", [{"method": "x"}, {"by": ()}, {"by": ("colour",)}, {"most_copies": 0}, {"temperature": 2.0}]
)
def test_invalid_settings_of_the_balance_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Balance(**bad)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"min_quality": 2}, "min_quality: must be less than or equal to 1"), ({"returns": "magic"}, "must be one of"),
        ({"discount": 0.5, "returns": "episode"}, "no effect"), ({"advantage": "x"}, "must be one of"),
        ({"margin": math.nan}, "margin: must be a finite number"),
    ],
)  # fmt: skip
def test_invalid_settings_of_an_export_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        assay.export("transitions", "out", **options)
    with pytest.raises(ConfigError, match="rubric: is required"):
        assay.export("grpo", "out")


def test_an_unknown_setting_of_an_export_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="unexpected keyword 'speed'"):
        assay.export("transitions", "out", speed=1)


def test_emoji_surrogates_and_hostile_text_survive(store: Store) -> None:
    add_rollout(store, turn(0, "\U0001f600 \ud800 \x00 \u2028", '</s> {"a": 1} \\u0000'))
    rows, _ = exported(store, "transitions")
    assert "\U0001f600" in json.dumps(rows[0]["input"], ensure_ascii=False)


@given(
    st.dictionaries(st.tuples(st.text(max_size=3)), st.integers(1, 60), min_size=1, max_size=5),
    st.sampled_from(["none", "down", "over", "temperature"]),
    st.integers(0, 5),
)
def test_the_sampler_reaches_exactly_its_targets(counts: dict[tuple[str, ...], int], method: str, seed: int) -> None:
    balance = Balance(method=method, seed=seed)
    sampler, totals = Sampler(counts, balance), Counter[tuple[str, ...]]()
    for cell, count in counts.items():
        copies = [sampler.take(cell) for _ in range(count)]
        totals[cell] += sum(copies)
        assert max(copies) <= (balance.most_copies if method == "over" else 1)
        assert sampler.take(cell) == 0
    expected = targets(counts, balance)
    assert dict(totals) == expected == dict(sampler.after)
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


@given(st.integers(0, 200), st.integers(0, 200))
def test_the_clean_gate_reports_how_many_clean_transitions_are_missing(clean: int, broken: int) -> None:
    report = GateReport(Gates())
    for _ in range(clean):
        report.see("a", None)
    for _ in range(broken):
        report.see("a", "error")
    gate = next(gate for gate in report.to_list() if gate["gate"] == "clean")
    if broken and not gate["passed"]:
        more = int(gate["missing"].split(";")[1].split()[0].replace(",", ""))
        assert (clean + more) / (clean + broken + more) >= 0.95 > (clean + more - 1) / (clean + broken + more - 1)
