"""Search over the parameters of a program: the final decision, effects, pages, caps, the command, what is refused."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import dspy
import pytest
from tuned_agents import JOB, TWO, Guesses, cool, tuned, write

import assay
from assay.errors import ConfigError
from assay.optimizers.parameters import SearchConfig, open_study
from assay.optimizers.parameters.impact import importance, write_page
from assay.programs import RANGES
from assay.testing import scripted_lm
from assay.traces import Store
from assay.traces.store.listing import list_runs
from assay.web.runs import run_page
from rigs.progress import Lines


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A program that was tuned once for the tests that only read it, and its folder."""
    folder = tmp_path_factory.mktemp("study")
    return folder, tuned(folder, trials=14)


@pytest.mark.slow
def test_a_program_is_tuned_gated_and_reported_on_sealed_tasks(study: tuple[Path, Any]) -> None:
    folder, report = study
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert set(data["best"]) == set(RANGES)
    assert data["best"]["temperature"] < 0.4
    assert data["test"]["tuned"]["score"] > data["test"]["default"]["score"] + 0.2
    assert data["test"]["gain"]["low"] > 0
    assert data["replaces"]
    assert data["trials"] == 14
    metrics = data["test"]["tuned"]["metrics"]
    assert set(metrics) == {"accuracy", "efficiency", "coherence", "adaptability", "tool_usage"}
    assert metrics["tool_usage"] is None
    loaded = assay.load(report.artifact)
    assert loaded.agent_parameters.temperature == data["best"]["temperature"]
    with Store(folder / ".assay" / "a.db") as store:
        assert {rollout.phase for rollout in store.rollouts(split="test", limit=1000)} == {"test"}


@pytest.mark.slow
def test_a_page_of_a_study_is_complete_without_network(study: tuple[Path, Any], tmp_path: Path) -> None:
    folder, report = study
    page = report.page.read_text()
    assert re.findall(r"<h2>(.*?)</h2>", page) == ["History", "Importance", "Slices", "Trials"]
    assert re.search(r"<(script|link|img|iframe)[^>]*(src|href)=", page) is None
    assert len(page) < 100_000
    with Store(folder / ".assay" / "a.db") as store:
        (run,) = list_runs(store, kind="tune")
        shown = run_page(store, run["id"], {}, where=folder / ".assay" / "a.db", store_flag=None).values["study"]
    assert shown.is_chosen
    assert shown.best.parameters == {name: report.best[name] for name in shown.best.parameters}
    sent = report.write_page(tmp_path / "sent.html").read_text()
    assert "the tuned program replaces the default" in sent
    assert len(sent) < 100_000
    for weights in report.importance.values():
        assert max(weights, key=weights.__getitem__) == "temperature"
        assert sum(weights.values()) == pytest.approx(1)


@pytest.mark.slow
def test_unwritable_outputs_other_salts_and_unknown_studies_are_refused_before_the_search(
    study: tuple[Path, Any], own_folder: Path
) -> None:
    folder, report = study
    write(own_folder)
    lm = scripted_lm(cool)
    (own_folder / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write to"):
        assay.parameter_impact(Guesses(), out=own_folder / "file" / "x", lm=lm, **JOB)
    with pytest.raises(ConfigError, match="a store has one"):
        assay.tune(Guesses(), into=report.artifact, salt="other", lm=lm, **JOB)
    with pytest.raises(ConfigError, match="there is no study 'zzz'"):
        assay.parameter_impact(Guesses(), study="zzz", storage=f"sqlite:///{folder}/.assay/studies.db", lm=lm, **JOB)
    assert lm.scripted.calls <= 1  # the preflight's


@pytest.mark.slow
def test_the_effect_of_each_parameter_is_measured_and_plotted(own_folder: Path) -> None:
    write(own_folder)
    report = assay.parameter_impact(Guesses(), lm=scripted_lm(cool), out="impact", levels=3, **JOB)
    data = json.loads(Path("impact/impact.json").read_text())
    moved = {effect["value"]: effect for effect in data["effects"] if effect["parameter"] == "temperature"}
    assert moved[0.1]["metrics"]["accuracy"]["mean"] > 0.9
    assert moved[2.0]["metrics"]["accuracy"]["mean"] == 0.0
    assert moved[2.0]["changes"]["accuracy"]["high"] < 0
    assert moved[0.1]["changes"]["accuracy"]["low"] > 0
    assert set(data["without_effect"]) == {"max_steps", "reasoning_depth", "context_length"}
    assert any("max_steps had no effect" in note for note in report.notes)
    assert Path("impact/study.html").read_text().count('<svg class="chart"') >= 5
    assert "need a study of the same" in report.notes[-1]
    tuned(own_folder, trials=10)
    again = assay.parameter_impact(Guesses(), lm=scripted_lm(cool), levels=2, **JOB)
    assert again.study is not None
    assert re.findall(r"<h2>(.*?)</h2>", again.page.read_text())[:2] == ["Each parameter moved alone", "History"]


@pytest.mark.slow
def test_parameters_that_a_program_ignores_are_reported_and_not_searched(tmp_path: Path) -> None:
    progress = Lines()
    plain = tuned(tmp_path, program=dspy.Predict("question -> answer"), trials=6, progress=progress)
    assert set(plain.to_dict()["best"]) == {"temperature"}
    assert "ignores context_length, max_steps, tool_usage_threshold, reasoning_depth" in progress.text


@pytest.mark.slow
def test_tokens_decide_between_tied_scores(tmp_path: Path) -> None:
    lm = scripted_lm(lambda request: json.dumps({"answer": "yes"}))
    report = tuned(tmp_path, lm=lm, objectives=("score", "tokens"), trials=6).to_dict()
    assert report["gate"] is None or report["gate"]["mean"] == 0
    front = {trial["number"]: trial["tokens"] for trial in report["front"]}
    assert min(trial["tokens"] for trial in report["history"]) in front.values()
    highest = max(trial["values"]["score"] for trial in report["history"])
    level = [trial for trial in report["history"] if trial["values"]["score"] == highest]
    fewest = min(level, key=lambda trial: (trial["tokens"], trial["number"]))
    assert report["best"].items() >= fewest["parameters"].items()


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
    applied = tuned(tmp_path, trials=8, into=first.artifact, out=tmp_path / "three", seed=1)
    assert assay.load(applied.artifact).agent_parameters.temperature == applied.to_dict()["best"]["temperature"]
    with pytest.raises(ConfigError, match="is not an artifact"):
        tuned(tmp_path, trials=3, into=tmp_path / "nothing", seed=2)
    with pytest.raises(ConfigError, match="salt='other' is not the artifact's 'assay'"):
        tuned(tmp_path, program=str(first.artifact), salt="other", trials=3)
    with pytest.raises(ConfigError, match="this store has the salt 'assay'"):
        tuned(tmp_path, into=first.artifact, salt="other", trials=3, seed=3)


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


@pytest.mark.slow
def test_a_policy_at_its_cap_keeps_the_best_so_far(tmp_path: Path) -> None:
    report = tuned(tmp_path, method="policy", episodes=25, tasks_per_episode=10, max_search_calls=45).to_dict()
    assert "cap of 45" in report["stopped"]
    assert report["trials"] >= 2
    assert any("before the best parameters were confirmed" in note for note in report["notes"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranges": {"max_steps": (1, math.inf)}}, "a finite number"),
        ({"ranges": {"max_steps": (math.nan, 3)}}, "a finite number"),
        ({"ranges": {"temperature": (0.0, 9.0)}}, r"0\.1"),
        ({"parameters": {"temperature": 9.0}}, r"0\.1"),
        ({"seed": -1}, "seed: must be"),
        ({"storage": "://x"}, "storage: it is neither"),
        ({"method": "magic"}, "must be one of optuna, policy"),
        ({"method": "policy", "learning_rate": math.nan}, "must be a finite number"),
        ({"method": "policy", "tasks_per_episode": 0}, "tasks_per_episode: must be"),
        ({"method": "policy", "sampler": "random"}, "sampler: would have no effect on a policy"),
        ({"method": "policy", "also": ["x"]}, "would have no effect on a policy"),
        ({"method": "policy", "objectives": ("tokens",)}, "would have no effect on a policy"),
    ],
)
def test_wrong_settings_of_a_search_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tuned(tmp_path, **options)


@pytest.mark.slow
def test_a_study_is_not_resumed_by_another_program_of_the_same_name(tmp_path: Path) -> None:
    report = tuned(tmp_path, trials=3, study="s")
    assert report.to_dict()["trials"] == 3

    class Other(Guesses):
        pass

    Other.__module__, Other.__qualname__ = Guesses.__module__, Guesses.__qualname__
    other = Other()
    other.answer.demos = [dspy.Example(question="number 1 of all", answer="yes")]
    with pytest.raises(ConfigError, match="searches something else: versions"):
        tuned(tmp_path, trials=4, study="s", program=other)


@pytest.mark.tutorial
@pytest.mark.model
@pytest.mark.slow
def test_the_command_tunes_with_several_workers_stops_at_a_cap_and_resumes(embedded: str, tmp_path: Path) -> None:
    program = [sys.executable, "-c", "from assay.cli import main; main()"]
    command = [*program, "tune", "math_qa", "--rubric", "math_qa", "--data", "arithmetic:terms=2-2&digits=1-1&size=60"]
    sizes = ["--val-size", "2", "--gate-size", "2", "--test-size", "2", "--trials", "4", "--prompt-format", "lean"]
    flags = ["--range", "max_steps=1:2", "--range", "temperature=0.1:0.3", *sizes]
    common: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 900, "cwd": tmp_path}
    cut = subprocess.run([*command, *flags, "--json", "--max-calls", "30"], **common)
    assert cut.returncode in (0, 1), cut.stderr
    ended = subprocess.run([*command, *flags, "--workers", "2", "--json", "--resume"], **common)
    assert ended.returncode == 0, ended.stderr
    data = json.loads(ended.stdout)
    assert data["complete"] + data["pruned"] >= 4
    assert 1 <= data["best"]["max_steps"] <= 2
    assert (data["replaces"], data["test"]["tuned"]) == (False, None)  # two gate tasks decide nothing
    output = subprocess.run([*program, "run", data["artifact"], "question=What is 17 + 25?"], **common)
    assert output.returncode == 0, output.stderr
