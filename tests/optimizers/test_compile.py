"""`assay compile` on a scripted model that needs demonstrations to be right: optimizers, caps, failures, replay."""

import sys
from pathlib import Path
from typing import Any

import dspy
import pytest
from compile_scripted import DATA, compile_it, student_of_examples

import assay
from assay.datasets import load_splits
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
    assert data["test"]["gain"] == {
        "mean": 1.0,
        "low": pytest.approx(0.5, abs=1e-3),
        "high": 1.0,
        "n": 12,
    }  # rule of three: 1 - 3 / 12 * (1 - -1)
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
@pytest.mark.parametrize("name", ["BootstrapFewShot", "GEPA"])
def test_teleprompter_is_loaded_by_class_path(tmp_path: Path, name: str) -> None:
    report = compile_it(f"dspy.teleprompt:{name}", tmp_path, sizes={"train": 8, "val": 5, "gate": 5, "test": 5})
    why = ("no candidate beat the plain program on val", "only the plain program was proposed")
    notes = [note for note in report.to_dict()["notes"] if "power" not in note]  # what would decide it
    assert notes in ([], *([f"{reason}; it is unchanged"] for reason in why))


@pytest.mark.parametrize("wrong", ["bootstrp", "no.module:X", "dspy:Nothing"])
def test_an_unknown_optimizer_is_refused_before_any_call(wrong: str, tmp_path: Path) -> None:
    lm = scripted_lm(student_of_examples)
    with pytest.raises(ConfigError, match="optimizer"):
        assay.compile("math_qa", rubric="math_qa", data=DATA, lm=lm, optimizer=wrong)
    assert lm.scripted.calls == 0


@pytest.mark.slow
def test_search_cap_ends_with_the_best_result(tmp_path: Path) -> None:
    data = compile_it("auto", tmp_path, max_search_calls=60).to_dict()
    assert data["search_calls"] <= 60
    assert data["test"]["compiled"]["n"] == 12


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "cap"), [("bootstrap-search", 260), ("mipro", 250)])
def test_cap_keeps_the_best_program_a_named_optimizer_evaluated(tmp_path: Path, optimizer: str, cap: int) -> None:
    data = compile_it(optimizer, tmp_path, max_search_calls=cap).to_dict()
    assert f"{cap} search calls" in data["stopped"]
    assert data["winner"] == f"{optimizer}, cut short"
    assert data["test"]["compiled"]["score"] > data["test"]["baseline"]["score"]
    report = compile_it(optimizer, tmp_path, max_search_calls=5000, resume=True).to_dict()
    assert (report["winner"], report["stopped"]) == (optimizer, None)


def test_failing_optimizer_leaves_the_plain_program_and_a_note(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "class Broken:\n    def compile(self, student, trainset):\n        raise KeyError('lost')\n"
    )
    sys.path.insert(0, str(tmp_path))
    data = compile_it("broken:Broken", tmp_path).to_dict()
    assert (data["winner"], data["test"]["compiled"]) == ("baseline", None)
    assert data["failed"].startswith("broken:Broken failed: KeyError")
    assert any(note.startswith("broken:Broken failed: KeyError: 'lost'") for note in data["notes"])


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


@pytest.mark.slow
def test_server_failure_after_the_search_leaves_a_resumable_run(tmp_path: Path) -> None:
    tested = {task.inputs["question"] for task in load_splits(DATA).unseal()}
    down = True

    def dies(request: Any) -> Any:
        prompt = request.messages[-1].text or ""
        return (
            dspy.lm15.ServerError("gone")
            if down and any(question in prompt for question in tested)
            else student_of_examples(request)
        )

    with pytest.raises(ModelError, match=r"none of the 12 test tasks could be scored.*gone.*resume=True"):
        compile_it("bootstrap", tmp_path, dies, gate=False)
    down = False
    data = compile_it("bootstrap", tmp_path, dies, gate=False, resume=True).to_dict()
    assert data["test"]["compiled"]["n"] == 12
    assert data["test"]["compiled"]["unscored"] == 0


def test_calls_are_stored_and_not_held_in_memory(tmp_path: Path) -> None:
    report = compile_it("labeled", tmp_path, sizes={"train": 8, "val": 5, "gate": 5, "test": 5})
    assert report.calls > 10
    assert report.outcome.baseline.session.lm.history == []


@pytest.mark.slow
def test_job_that_failed_to_start_releases_its_lock(tmp_path: Path) -> None:
    compile_it("labeled", tmp_path, cache=False)
    with pytest.raises(
        ConfigError, match="this job has finished"
    ) as caught:  # the exception is kept, as a notebook keeps it
        compile_it("labeled", tmp_path, cache=False, resume=True)
    assert compile_it("labeled", tmp_path).to_dict()["stopped"] is None, caught


def test_cap_on_all_calls_stops_and_keeps_the_artifact(tmp_path: Path) -> None:
    data = compile_it("auto", tmp_path, max_calls=40).to_dict()
    assert data["calls"] <= 40
    assert data["stopped"]
    assert not data["replaces"]
    assert Path(data["artifact"]).is_dir()


@pytest.mark.slow
def test_capped_run_resumes_with_a_higher_cap(tmp_path: Path) -> None:
    first = compile_it("auto", tmp_path, max_calls=40).to_dict()
    second = compile_it("auto", tmp_path, max_calls=1000, resume=True).to_dict()
    assert second["stopped"] is None
    assert second["repeated_calls"] == 0  # what was asked before is answered from the response cache
    assert second["calls"] > first["calls"]  # what was spent before still counts
    assert second["test"]["compiled"]["score"] == 1.0
    resumed = compile_it("auto", tmp_path, max_calls=1000, resume=True).to_dict()  # a finished run is replayed
    assert [resumed[name] for name in ("winner", "calls", "cached", "repeated_calls")] == [
        second[n] for n in ("winner", "calls", "cached", "repeated_calls")
    ]


@pytest.mark.slow
def test_program_raising_on_every_task_is_counted_and_not_fatal(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "import dspy\nclass Bad(dspy.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.p = dspy.Predict('question -> answer')\n    def forward(self, question):\n"
        "        raise RuntimeError('always')\n"
    )
    report = assay.compile(
        "bad.py:Bad", rubric="math_qa", data=DATA, lm=scripted_lm(student_of_examples),
        sizes={"test": 6, "gate": 6, "val": 6, "train": 6},
        preflight=False,
    )  # fmt: skip
    data = report.to_dict()
    assert (data["winner"], data["test"]["compiled"]) == ("baseline", None)
    assert {candidate["val_score"] for candidate in data["candidates"]} == {0.0}


def test_unreachable_server_leaves_tasks_unscored(tmp_path: Path) -> None:
    data = assay.evaluate(
        "math_qa", rubric="math_qa", data=DATA, lm=scripted_lm(lambda request: dspy.lm15.ServerError("down")),
        sizes={"val": 6},
        preflight=False,
    ).to_dict()  # fmt: skip
    assert (data["result"]["score"], data["result"]["unscored"]) == (None, 6)


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
