"""`assay compile` on a scripted model that needs demonstrations to be right: optimizers, caps, failures, replay."""

from pathlib import Path
from typing import Any

import dspy
import pytest
from compile_scripted import compile_it, student_of_examples

import assay
from assay.errors import ConfigError, ModelError, unspoken
from assay.optimizers import OPTIMIZERS
from assay.optimizers.prompts.teleprompters import shows_demos
from assay.testing import scripted_lm


@pytest.mark.slow
def test_auto_finds_demonstrations_if_the_plain_program_never_succeeds(tmp_path: Path) -> None:
    report = compile_it("auto", tmp_path)
    data = report.to_dict()
    assert data["test"]["baseline"]["score"] == 0.0
    assert data["test"]["compiled"]["score"] == 1.0
    assert data["test"]["compiled"]["criteria"]["tool_adoption"] == 1.0
    assert data["replaces"]
    # rule of three: 1 - 3 / 12 * (1 - -1)
    assert data["test"]["gain"] == {"mean": 1.0, "low": pytest.approx(0.5, abs=1e-3), "high": 1.0, "n": 12}
    assert 0 < data["search_calls"] <= 300
    assert data["unrecorded"] == data["rows_not_stored"] == 0


SHOWS_THREE = {"bootstrap", "bootstrap-search", "knn", "mipro", "infer-rules", "ensemble", "optuna"}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_every_optimizer_runs_and_stores_the_measured_program(optimizer: str, tmp_path: Path) -> None:
    demos = {"demos": 4} if shows_demos(optimizer) else {}
    report = compile_it(optimizer, tmp_path, sizes={"train": 12, "val": 6, "test": 5}, gate=False, **demos)
    data = report.to_dict()
    assert not [note for note in data["notes"] if "failed" in note], data["notes"]
    better = optimizer in SHOWS_THREE  # the scripted model needs three demonstrations of whole calls
    assert data["winner"] == (optimizer if better else "baseline")
    result = data["test"]["compiled"]
    assert (result and (result["n"], result["score"])) == ((5, 1.0) if better else None)
    loaded = assay.load(report.artifact)
    with dspy.context(lm=scripted_lm(student_of_examples)):
        answer = loaded(question="What is 20 + 22?").answer
    assert (answer == "42") == better


@pytest.mark.slow
def test_cap_keeps_the_best_program_a_named_optimizer_evaluated(tmp_path: Path) -> None:
    data = compile_it("mipro", tmp_path, max_search_calls=250).to_dict()
    assert "250 search calls" in data["stopped"]
    assert data["winner"] == "mipro, cut short"
    assert data["test"]["compiled"]["score"] > data["test"]["baseline"]["score"]
    report = compile_it("mipro", tmp_path, max_search_calls=5000, resume=True).to_dict()
    assert (report["winner"], report["stopped"]) == ("mipro", None)


@pytest.mark.parametrize("optimizer", ["auto", "labeled"])
def test_unreachable_server_ends_the_compile_early_with_a_reason(tmp_path: Path, optimizer: str) -> None:
    calls = []

    def down(request: Any) -> Exception:
        calls.append(1)
        return dspy.lm15.ServerError("down")

    with pytest.raises(ModelError, match=r"could be scored.*down.*continue with resume=True") as caught:
        compile_it(optimizer, tmp_path, down, preflight=False)
    assert "continue with `resume=True`" in unspoken(caught.value)
    assert len(calls) <= 40


def test_a_search_ends_soon_after_its_server_is_gone_and_continues_with_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("assay.models.meter.GONE_S", 0.0)
    asked, down = list[bool](), True

    def dies(request: Any) -> Any:
        asked.append(down)
        return ConnectionRefusedError("nothing listens") if down and len(asked) > 20 else student_of_examples(request)

    with pytest.raises(ModelError, match=r"is gone.*nothing listens.*continue with resume=True"):
        compile_it("auto", tmp_path, dies)
    assert len(asked) <= 20 + 16 + 2  # of 2 threads
    down = False
    assert compile_it("auto", tmp_path, dies, resume=True).replaces


def test_calls_are_not_held_in_memory_and_a_finished_job_without_a_cache_releases_its_lock(tmp_path: Path) -> None:
    sizes = {"train": 8, "val": 5, "gate": 5, "test": 5}
    report = compile_it("labeled", tmp_path, sizes=sizes, cache=False)
    assert report.calls > 10
    assert report.outcome.baseline.session.lm.history == []
    with pytest.raises(ConfigError, match="this job has finished") as caught:  # kept, as a notebook keeps it
        compile_it("labeled", tmp_path, sizes=sizes, cache=False, resume=True)
    assert compile_it("labeled", tmp_path, sizes=sizes).to_dict()["stopped"] is None, caught


@pytest.mark.slow
def test_a_capped_run_keeps_an_artifact_and_resumes_with_a_higher_cap(tmp_path: Path) -> None:
    first = compile_it("auto", tmp_path, max_calls=40).to_dict()
    assert first["calls"] <= 40
    assert first["stopped"]
    assert not first["replaces"]
    assert Path(first["artifact"]).is_dir()
    second = compile_it("auto", tmp_path, max_calls=1000, resume=True).to_dict()
    assert second["stopped"] is None
    assert second["repeated_calls"] == 0  # what was asked before is answered from the response cache
    assert second["calls"] > first["calls"]  # what was spent before still counts
    assert second["test"]["compiled"]["score"] == 1.0
    resumed = compile_it("auto", tmp_path, max_calls=1000, resume=True).to_dict()  # a finished run is replayed
    for name in ("winner", "calls", "cached", "repeated_calls"):
        assert resumed[name] == second[name]


@pytest.mark.slow
def test_repeated_run_replays_from_the_cache(tmp_path: Path) -> None:
    sizes = {"train": 12, "val": 6, "gate": 5, "test": 5}
    first = compile_it("auto", tmp_path, seed=5, sizes=sizes).to_dict()
    second = compile_it("auto", tmp_path, seed=5, sizes=sizes).to_dict()
    assert second["calls"] == 0
    assert second["cached"] == first["calls"] + first["cached"]
    assert second["test"] == first["test"]
    assert second["candidates"] == first["candidates"]
    assert second["artifact"] != first["artifact"]
