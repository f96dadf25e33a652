"""Search over the parameters of a program: the final decision, effects, pages, the command."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import dspy
import pytest
from tuned_agents import TWO, Guesses, cool, tuned

import assay
from assay.errors import (
    ConfigError,
    ParameterError,
)
from assay.optimizers.parameters import SearchConfig, open_study
from assay.optimizers.parameters.impact import importance, write_page
from assay.programs import RANGES
from assay.testing import scripted_lm
from assay.traces import Store
from assay.traces.store.listing import list_runs
from assay.web.runs import run_page
from rigs.command_line import assay_command


@pytest.mark.slow
def test_a_program_is_tuned_gated_and_reported_on_sealed_tasks(tmp_path: Path) -> None:
    report = tuned(tmp_path)
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert set(data["best"]) == set(RANGES)
    assert data["best"]["temperature"] < 0.4
    assert data["test"]["tuned"]["score"] > data["test"]["default"]["score"] + 0.2
    assert data["test"]["gain"]["low"] > 0
    assert data["replaces"]
    assert data["trials"] == 12
    assert set(data["test"]["tuned"]["metrics"]) == {
        "accuracy",
        "efficiency",
        "coherence",
        "adaptability",
        "tool_usage",
    }
    assert data["test"]["tuned"]["metrics"]["tool_usage"] is None
    loaded = assay.load(report.artifact)
    assert loaded.agent_parameters.temperature == data["best"]["temperature"]
    with assay.Store(tmp_path / ".assay" / "a.db") as store:
        assert {rollout.phase for rollout in store.rollouts(split="test", limit=1000)} == {"test"}


@pytest.mark.slow
def test_parameters_that_a_program_ignores_are_reported_and_not_searched(tmp_path: Path) -> None:
    messages: list[str] = []

    class Listens(assay.evaluation.SilentProgress):  # type: ignore[name-defined,misc]
        def say(self, text: str) -> None:
            messages.append(text)

    plain = tuned(tmp_path, program=dspy.Predict("question -> answer"), trials=6, progress=Listens())
    assert set(plain.to_dict()["best"]) == {"temperature"}
    assert any("ignores context_length, max_steps, tool_usage_threshold, reasoning_depth" in line for line in messages)


@pytest.mark.slow
def test_tokens_decide_between_tied_scores(tmp_path: Path) -> None:
    report = tuned(
        tmp_path,
        lm=scripted_lm(lambda request: json.dumps({"answer": "yes"})),
        objectives=("score", "tokens"),
        trials=6,
    ).to_dict()
    assert report["gate"] is None or report["gate"]["mean"] == 0
    front = {trial["number"]: trial["tokens"] for trial in report["front"]}
    assert min(trial["tokens"] for trial in report["history"]) in front.values()
    level = [
        trial
        for trial in report["history"]
        if trial["values"]["score"] == max(t["values"]["score"] for t in report["history"])
    ]
    assert (
        report["best"].items() >= min(level, key=lambda trial: (trial["tokens"], trial["number"]))["parameters"].items()
    )


@pytest.mark.slow
def test_prompts_and_parameters_are_searched_together_and_applied(tmp_path: Path) -> None:
    first = tuned(
        tmp_path, trials=4, out=tmp_path / "one", parameters={"temperature": 2.0}, ranges={"max_steps": (1, 4)}
    )
    assert first.to_dict()["best"]["temperature"] == 2.0
    both = tuned(tmp_path, program=Guesses(), also=[str(first.artifact)], trials=8, out=tmp_path / "two")
    tried = {trial["program"] for trial in both.to_dict()["history"]}
    assert str(first.artifact) in tried
    assert len(tried) == 2
    applied = tuned(tmp_path, trials=8, apply=first.artifact, out=tmp_path / "three", seed=1)
    assert assay.load(applied.artifact).agent_parameters.temperature == applied.to_dict()["best"]["temperature"]
    with pytest.raises(ConfigError, match="is not an artifact"):
        tuned(tmp_path, trials=3, apply=tmp_path / "nothing", seed=2)
    with pytest.raises(ConfigError, match="salt='other' is not the artifact's 'assay'"):
        tuned(tmp_path, program=str(first.artifact), salt="other", trials=3)
    with pytest.raises(ConfigError, match="this store has the salt 'assay'"):
        tuned(tmp_path, apply=first.artifact, salt="other", trials=3, seed=3)


@pytest.mark.slow
def test_ranges_are_enforced_for_every_source(tmp_path: Path) -> None:
    for options in ({"ranges": {"temperature": (0.0, 9.0)}}, {"parameters": {"temperature": 9.0}}):
        with pytest.raises(ParameterError, match=r"0\.1"):
            tuned(tmp_path, **options)
    for flags, message in (
        (["--range", "temperature=0:9"], "between 0.1 and 2"),
        (["--range", "temperature=hot"], "LOW:HIGH"),
        (["--set", "temperature=9"], "between 0.1 and 2"),
        (["--objective", "beauty"], "different ones of"),
        (["--sampler", "x"], "must be one of"),
    ):
        ended = assay_command("tune", "math_qa", "--rubric", "math_qa", "--data", "arithmetic:size=40", *flags)
        assert (ended.code, message in ended.stderr) == (2, True), ended.stderr


@pytest.mark.slow
def test_the_effect_of_each_parameter_is_measured_and_plotted(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text(
        "".join(json.dumps({"question": f"number {at} of all", "answer": "yes"}) + "\n" for at in range(100))
    )
    (tmp_path / "r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: 'assay.rubrics.checks:exact'}\n")
    report = assay.parameter_impact(
        Guesses(), rubric=tmp_path / "r.yaml", data=str(tmp_path / "d.jsonl"), lm=scripted_lm(cool),
        store=tmp_path / ".assay" / "a.db",
        out=tmp_path / "impact", levels=3,
    )  # fmt: skip
    data = json.loads((tmp_path / "impact" / "impact.json").read_text())
    moved = {effect["value"]: effect for effect in data["effects"] if effect["parameter"] == "temperature"}
    assert moved[0.1]["metrics"]["accuracy"]["mean"] > 0.9
    assert moved[2.0]["metrics"]["accuracy"]["mean"] == 0.0
    assert moved[2.0]["changes"]["accuracy"]["high"] < 0
    assert moved[0.1]["changes"]["accuracy"]["low"] > 0
    assert set(data["without_effect"]) == {"max_steps", "reasoning_depth", "context_length"}
    assert any("max_steps had no effect" in note for note in report.notes)
    page = (tmp_path / "impact" / "study.html").read_text()
    assert page.count('<svg class="chart"') >= 5
    assert "need a study of the same" in report.notes[-1]


@pytest.mark.slow
def test_a_page_of_a_study_is_complete_without_network(tmp_path: Path) -> None:
    report = tuned(tmp_path, trials=14)
    page = report.page.read_text()
    assert re.findall(r"<h2>(.*?)</h2>", page) == ["History", "Importance", "Slices", "Trials"]
    assert re.search(r"<(script|link|img|iframe)[^>]*(src|href)=", page) is None
    assert len(page) < 100_000
    with Store(tmp_path / ".assay" / "a.db") as store:
        (run,) = list_runs(store, kind="tune")
        study = run_page(store, run["id"], {}, where=tmp_path / ".assay" / "a.db", store_flag=None).values["study"]
    assert study.is_chosen
    assert study.best.parameters == {name: report.best[name] for name in study.best.parameters}
    sent = report.write_page(tmp_path / "sent.html").read_text()
    assert "the tuned program replaces the default" in sent
    assert len(sent) < 100_000
    for weights in report.importance.values():
        assert max(weights, key=weights.__getitem__) == "temperature"
        assert sum(weights.values()) == pytest.approx(1)
    impact = assay.parameter_impact(
        Guesses(),
        rubric=tmp_path / "r.yaml",
        data=str(tmp_path / "d.jsonl"),
        lm=scripted_lm(cool),
        store=tmp_path / ".assay" / "a.db",
        levels=2,
    )
    assert impact.study is not None
    assert re.findall(r"<h2>(.*?)</h2>", impact.page.read_text())[:2] == ["Each parameter moved alone", "History"]
    with pytest.raises(ConfigError, match="there is no study 'none'"):
        assay.parameter_impact(
            Guesses(), rubric=tmp_path / "r.yaml", data=str(tmp_path / "d.jsonl"), lm=scripted_lm(cool),
            store=tmp_path / ".assay" / "a.db",
            levels=2, study="none",
        )  # fmt: skip


@pytest.mark.slow
def test_pages_with_little_or_hostile_content_are_valid(tmp_path: Path) -> None:
    objectives = ("score", "tokens")
    study = open_study("s", None, TWO, SearchConfig(objectives=objectives))
    assert importance(study) == {}
    page = write_page(tmp_path, study, objectives, title="<script>alert(1)</script>", facts={"<b>": "</table>"})
    assert "<script>alert" not in page.read_text()
    assert "&lt;/table&gt;" in page.read_text()
    for _ in range(5):  # all alike
        trial = study.ask()
        TWO.suggest(trial)
        study.tell(trial, [0.5, 10.0])
    assert importance(study) == {}
    write_page(tmp_path, study, objectives, title="t", facts={})
    assert "<h2>Pareto front</h2>" in page.read_text()


@pytest.mark.slow
def test_a_policy_tunes_a_program(tmp_path: Path) -> None:
    data = tuned(
        tmp_path, method="policy", episodes=25, tasks_per_episode=20, ranges={"temperature": (0.1, 2.0)}
    ).to_dict()
    assert data["method"] == "policy"
    assert data["best"]["temperature"] < 0.7
    assert data["test"]["tuned"]["score"] > data["test"]["default"]["score"]
    assert data["trials"] == len(data["history"]) == 25
    assert {"metrics", "parameters", "adjustments", "improvement", "meaning"} <= data["history"][3].keys()
    assert data["confirmed"][0]["overall"] is not None
    assert json.loads(json.dumps(data, allow_nan=False))
    with pytest.raises(ConfigError, match="must be one of optuna, policy"):
        tuned(tmp_path, method="magic")
    with pytest.raises(ConfigError, match="would have no effect on a policy"):
        tuned(tmp_path, method="policy", also=["x"])
    with pytest.raises(ConfigError, match="would have no effect on a policy"):
        tuned(tmp_path, method="policy", objectives=("tokens",))


@pytest.mark.tutorial
@pytest.mark.model
@pytest.mark.slow
def test_the_command_tunes_with_several_workers_stops_at_a_cap_and_resumes(embedded: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "from assay.cli import main; main()",
        "tune",
        "math_qa",
        "--rubric",
        "math_qa",
        "--data",
        "arithmetic:terms=2-2&digits=1-1&size=60",
    ]
    sizes = ["--val-size", "2", "--gate-size", "2", "--test-size", "2"]
    flags = [
        "--range",
        "max_steps=1:2",
        "--range",
        "temperature=0.1:0.3",
        "--trials",
        "4",
        "--prompt-format",
        "lean",
        *sizes,
    ]
    common: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 900, "cwd": tmp_path}
    cut = subprocess.run([*command, *flags, "--json", "--max-calls", "30"], **common)
    assert cut.returncode in (0, 1), cut.stderr
    ended = subprocess.run([*command, *flags, "--workers", "2", "--json", "--resume"], **common)
    assert ended.returncode == 0, ended.stderr
    data = json.loads(ended.stdout)
    assert data["complete"] + data["pruned"] >= 4
    assert 1 <= data["best"]["max_steps"] <= 2
    assert (data["replaces"], data["test"]["tuned"]) == (False, None)  # two gate tasks decide nothing
    output = subprocess.run([*command[:3], "run", data["artifact"], "question=What is 17 + 25?"], **common)
    assert output.returncode == 0, output.stderr
