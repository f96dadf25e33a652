"""The page of a run of tune and of a training: decision, charts with their data, before and after."""

import re
from pathlib import Path
from typing import Any

from pages import NOW, Scans, put_report, read

from assay.reports.training import constant_reward
from assay.traces import Store

TRIALS = [
    {
        "number": at, "parameters": {"temperature": at / 4, "max_steps": 4}, "values": {"score": at / 8}, "n": 8,
        "state": "pruned" if at == 2 else "complete", "tokens": 10.0, "program": "",
    }
    for at in range(5)
]  # fmt: skip
GAIN = {"mean": 0.2, "low": 0.1, "high": 0.3, "n": 20}
TUNED: dict[str, Any] = {
    "artifact": "/a/tuned", "method": "optuna", "objectives": ["score"], "history": TRIALS, "replaces": True,
    "best": {"temperature": 0.75, "max_steps": 4}, "importance": {"fanova": {"temperature": 0.9, "max_steps": 0.1}},
    "gate": GAIN, "test": {"gain": GAIN | {"low": -0.1}}, "notes": [], "stopped": None,
}  # fmt: skip
TRAINED: dict[str, Any] = {
    "config": {"model": "m", "algorithm": "grpo"}, "converged": None, "steps": 3, "rollouts": 24, "calls": 24,
    "best_step": 3, "alarms": ["the score fell"], "stopped": None, "validation": {}, "samples": [], "left_out": {},
    "curves": {"reward": {"1": 0.1, "2": 0.4, "3": 0.5}, "held_out_greedy": {"0": 0.2, "3": 0.6}}, "notes": [],
}  # fmt: skip


def page_of(store: Store, folder: Path, kind: str, report: dict[str, Any]) -> str:
    store.put_run("run-1", kind=kind, config={"program": "p"}, status="done", started_at=NOW)
    store.flush()
    put_report(store, report)
    with Scans(store) as scans:
        text = read(store, "/runs/run-1", where=folder / "page.db")
    assert scans == []
    return text


def test_a_search_shows_its_decision_and_what_each_parameter_did(store: Store, tmp_path: Path) -> None:
    text = page_of(store, tmp_path, "tune", TUNED)
    assert "Gate: +0.200 on 20 tasks, 95 % interval +0.100 to +0.300: a gain." in text
    assert "Test: +0.200 on 20 tasks, 95 % interval -0.100 to +0.300: no significant difference." in text
    assert "The tuned parameters replace the default." in text
    assert "<dt>Best parameters</dt><dd>temperature 0.75, max steps 4</dd>" in text
    assert "Run the result on an input of your own" in text
    headings = re.findall(r"<h2>(.*?)</h2>", text)
    assert headings[:5] == ["Decision", "History", "Importance", "Slices", "Trials"]
    assert "3 <strong>chosen</strong>" in text
    assert text.count('<svg class="chart"') == 3  # the history and two slices


def test_a_search_without_proof_says_what_could_give_one(store: Store, tmp_path: Path) -> None:
    report = {**TUNED, "replaces": False, "gate": GAIN | {"low": -0.1}}
    text = page_of(store, tmp_path, "tune", report)
    assert "The default stays. More gate tasks can show a smaller gain" in text
    assert "Run the result, which was not shown to be better, on an input of your own" in text


def test_a_policy_shows_its_episodes(store: Store, tmp_path: Path) -> None:
    episodes = [{"parameters": {"temperature": at / 4}, "overall": at / 4} for at in range(4)]
    report = {**TUNED, "method": "policy", "history": episodes, "importance": {}, "gate": None, "test": {}}
    text = page_of(store, tmp_path, "tune", report)
    assert "Neither gate nor test was run." in text
    assert "overall, by trial" in text


def test_a_training_shows_training_and_held_out_curves_with_their_data(store: Store, tmp_path: Path) -> None:
    text = page_of(store, tmp_path, "train", TRAINED)
    assert "the score fell" in text
    assert re.findall(r"<h3>(.*?)</h3>", text)[:2] == ["Reward", "Held out"]
    assert text.count('<svg class="chart"') == 2
    assert '<tr><th scope="row">2</th><td class="number">0.400</td></tr>' in text
    assert "/rollouts?run=run-1&amp;phase=train" in text


def test_a_training_whose_rollouts_all_had_one_reward_learned_nothing(store: Store, tmp_path: Path) -> None:
    steps = [str(step) for step in range(20)]
    curves = {"reward": dict.fromkeys(steps, 0.0), "reward_std": dict.fromkeys(steps, 0.0)}
    text = page_of(store, tmp_path, "train", {**TRAINED, "converged": True, "curves": curves})
    assert "<bdi>nothing was learned: every rollout had the reward 0.000</bdi>" in text
    assert constant_reward({"reward": {1: 0.5, 2: 0.5}, "reward_std": {1: 0.1, 2: 0.1}}) is None
    assert constant_reward({"reward": {1: 0.5, 2: 0.25}, "reward_std": {1: 0.0, 2: 0.0}}) is None
    assert constant_reward({}) is None
