"""`assay collect --curriculum`: groups by stage, promotion by val scores, replays, resuming."""

import json
import re
from pathlib import Path
from typing import Any

import dspy
import pytest

import assay
from assay.commands.collect import Collect
from assay.datasets.curriculum import stage_of
from assay.errors import ConfigError, DataError
from assay.jobs.planning import plan_of
from assay.testing import scripted_lm
from assay.traces import Store
from rigs.command_line import assay_command
from rigs.projects import EXACT, write_rows

STAGES = """
stages:
  - {name: two, where: {terms: 2}}
  - {name: three, where: {terms: 3}, replay: 0.5}
  - {name: four, where: {terms: 4}}
"""


@pytest.fixture(autouse=True)
def project(own_folder: Path) -> None:
    rows = []
    for terms in (2, 3, 4):
        for a in range(24):
            inputs = {"question": " + ".join([str(a)] * terms)}
            rows.append({"inputs": inputs, "expected": {"answer": str(terms * a)}, "metadata": {"terms": terms}})
    write_rows("d.jsonl", rows)
    Path("r.yaml").write_text(EXACT)
    Path("cur.yaml").write_text(STAGES)


def adder(most: int, calls: list[str] | None = None) -> Any:
    """A model that adds `most` numbers and ignores further ones."""

    def script(request: Any) -> str:
        numbers = [int(n) for n in re.findall(r"\d+", str(request.messages[-1].text).rpartition("question")[2])]
        if calls is not None:
            calls.append(str(numbers))
        return json.dumps({"answer": str(sum(numbers[:most]))})

    return scripted_lm(script)


def collect(lm: Any, **options: Any) -> Any:
    options = {"data": "d.jsonl", "curriculum": "cur.yaml", "store": "s.db", "n": 2, "prompt_format": "json", **options}
    return assay.collect(dspy.Predict("question -> answer"), rubric="r.yaml", lm=lm, **options)


def test_stages_are_collected_until_one_is_not_passed_on_val() -> None:
    report = collect(adder(2)).to_dict()
    stages = {row["name"]: row for row in report["curriculum"]["stages"]}
    assert [row["status"] for row in stages.values()] == ["passed", "not passed", "not reached"]
    assert (stages["two"]["best_val"], stages["three"]["best_val"] < 0.8) == (1.0, True)
    assert any("stages not reached: four" in note for note in report["notes"])
    with Store("s.db") as store:
        rollouts = list(store.rollouts())
        run = store.runs(report["run"].rpartition("-")[0])
    assert run == [(report["run"], "done")]
    collected = [r for r in rollouts if r.phase == "collect"]
    by_stage = {name: [r for r in collected if stage_of(r.metadata) == name] for name in stages}
    assert (len(by_stage["three"]), by_stage["four"]) == (2 * stages["three"]["train"], [])
    # replays of the first stage are half of the second stage's tasks, limited by how many there are
    replays = min(stages["two"]["train"], stages["three"]["train"])
    assert len(by_stage["two"]) == 2 * (stages["two"]["train"] + replays)
    assert len({(r.task_id, r.sample) for r in collected}) == len(collected)
    assert {r.split for r in collected} == {"train"}
    assert {r.split for r in rollouts if r.phase == "promotion"} == {"val"}
    path = Path(report["curriculum"]["path"])
    assert path.resolve() == Path("runs", report["run"], "curriculum.json").resolve()
    assert json.loads(path.read_text()) == report["curriculum"]
    assert report["curriculum"]["order"][0].keys() == {"step", "stage", "task", "replayed"}


def test_val_runs_of_promotion_are_not_exported() -> None:
    collect(adder(9))
    assay.export("sft", out="out", store="s.db", min_quality=0.0)
    exported = {json.loads(line)["task"] for line in Path("out/data.jsonl").read_text().splitlines()}
    with Store("s.db") as store:
        rollouts = list(store.rollouts())
    assert exported == {r.task_id for r in rollouts if r.phase == "collect"}
    assert exported.isdisjoint({r.task_id for r in rollouts if r.phase == "promotion"})


def test_a_stage_with_a_limit_is_left_without_promotion() -> None:
    Path("cur.yaml").write_text(STAGES.replace("stages:", "max_share: 0.5\nstages:"))
    report = collect(adder(2)).to_dict()
    assert [row["status"] for row in report["curriculum"]["stages"]] == ["passed", "not passed", "not passed"]


def test_a_stopped_run_is_resumed_with_the_same_order_and_pays_nothing_twice() -> None:
    whole = collect(adder(9), seed=5, cache=False).to_dict()
    calls: list[str] = []
    stopped = collect(adder(9, calls), seed=6, max_calls=60).to_dict()
    assert stopped["stopped"]
    ended = collect(adder(9, calls), seed=6, resume=True).to_dict()
    assert ended["stopped"] is None
    assert [row["status"] for row in ended["curriculum"]["stages"]] == ["passed"] * 3
    assert len(ended["curriculum"]["order"]) == len(whole["curriculum"]["order"])
    assert ended["kept_from_before"] == stopped["rollouts"]


def test_the_estimate_is_of_all_stages() -> None:
    program = dspy.Predict("question -> answer")
    settings: Any = {"rubric": "r.yaml", "data": "d.jsonl", "curriculum": "cur.yaml", "lm": adder(9), "n": 2}
    estimate = plan_of(Collect(program, **settings, prompt_format="json"))
    report = collect(adder(9)).to_dict()
    promoted = sum(row["val"] for row in report["curriculum"]["stages"])
    assert estimate.calls == report["rollouts"] + promoted  # one call each
    assert any("reaches every stage" in line for line in estimate.lines())


def test_a_run_is_not_resumed_with_a_changed_curriculum() -> None:
    logs: list[bool] = []

    def script(request: Any) -> str:
        logs.append(any(Path("runs").glob("*/curriculum.json")))
        return '{"answer": "0"}'

    assert collect(scripted_lm(script), max_calls=20).to_dict()["stopped"]
    assert logs[0]  # the log is begun before the first call, so that a killed run is checked too
    Path("cur.yaml").write_text(STAGES.replace("0.5", "0.4"))
    with pytest.raises(ConfigError, match=r"cur.yaml has changed since this run was begun"):
        collect(adder(9), resume=True)


def test_settings_that_would_have_no_effect_and_missing_data_are_refused() -> None:
    with pytest.raises(ConfigError, match="split: val would have no effect"):
        collect(adder(2), split="val")
    with pytest.raises(DataError, match="names no data, and the command was given none"):
        collect(adder(2), data=None)
    with pytest.raises(ConfigError, match="data: is missing"):
        collect(adder(2), data=None, curriculum=None)


def test_the_command_line_needs_no_data_where_the_stages_name_it() -> None:
    Path("p.py").write_text("def p(question):\n    return {'answer': str(2 * int(question.split()[0]))}\n")
    command = ["collect", "p.py:p", "--rubric", "r.yaml", "--curriculum", "cur.yaml", "-n", "1", "--no-preflight"]
    for key, code, text in (
        ("where", 0, "stage two: passed; val 1.000, needed 0.8"),
        ("wher", 2, "cur.yaml:2: stage 'two': unknown key 'wher'"),
        ("wher", 2, "Did you mean 'where'?"),
    ):
        Path("cur.yaml").write_text(f"stages:\n  - {{name: two, data: d.jsonl, {key}: {{terms: 2}}}}\n")
        done = assay_command(*command)
        assert (done.code, text in " ".join((done.stdout + done.stderr).split())) == (code, True), done.stderr
    assert assay_command(*command[:4]).code == 2
