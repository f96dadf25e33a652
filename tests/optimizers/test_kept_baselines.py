"""A job whose gate proves nothing keeps the baseline: as its program, in its artifact, and with a sealed test."""

import asyncio
import json
from pathlib import Path
from typing import Any

import dspy
import pytest
from dspy import lm15
from own_prompt_programs import Sums

import assay
from assay.commands.serve import serve
from assay.datasets import load_splits
from assay.datasets.memory import data_spec
from assay.deployment.registry import Registry
from assay.errors import ModelError
from assay.models import with_recording
from assay.reports.compiled import compile_page
from assay.reports.markdown import gain_claim
from assay.testing import ScriptedEngine, scripted_lm
from assay.traces import Store
from rigs.command_line import assay_command
from rigs.progress import Lines

RUBRIC = "name: r\ncriteria:\n  - name: right\n    check: exact\n"
SIZES = {"train": 12, "val": 12, "gate": 8, "test": 8}
ROWS = [dspy.Example(question=f"What is {i} + 1?", answer=str(i + 1)).with_inputs("question") for i in range(120)]


def taught(right_from: int) -> Any:
    """A model that is right if the prompt shows demonstrations, and on questions above a number without them."""

    def script(request: Any) -> str:
        text = request.messages[-1].text or ""
        number = int(text.split("What is ")[-1].split(" ")[0])
        right = len(request.messages) > 2 or number >= right_from
        value = str(number + 1) if right else "0"
        if request.config.response_format is None:
            return f"[[ ## answer ## ]]\n{value}\n\n[[ ## completed ## ]]"
        return json.dumps({"answer": value})

    return script


def compiled(place: Path, right_from: int, **options: Any) -> Any:
    (place / "r.yaml").write_text(RUBRIC)
    options = {"program": Sums("two"), "lm": scripted_lm(taught(right_from)), "optimizer": "labeled", **options}
    return assay.compile(
        options.pop("program"), rubric=place / "r.yaml", data=ROWS, sizes=SIZES, store=place / "a.db",
        **{"out": place / "artifact", **options},
    )  # fmt: skip


def demos_of(program: dspy.Module) -> int:
    return sum(len(predictor.demos) for predictor in program.predictors())


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A compile of a program that is nearly always right: too few gate tasks to prove a gain. With its folder."""
    folder = tmp_path_factory.mktemp("refused")
    engine = ScriptedEngine(taught(10), price_usd=0.0)
    lm = with_recording(dspy.LM("openai/none", engine=engine, cache=False, num_retries=0))
    return folder, compiled(folder, 10, lm=lm)


@pytest.fixture(scope="module")
def proven(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compiled(tmp_path_factory.mktemp("proven"), 1000)


def test_after_a_refused_gate_program_and_artifact_are_the_baseline_and_the_test_stays_sealed(
    refused: tuple[Path, Any],
) -> None:
    folder, report = refused
    data = report.to_dict()
    assert (data["winner"], data["replaces"]) == ("labeled", False)
    assert demos_of(report.program) == 0
    assert demos_of(assay.load(report.artifact)) == 0
    assert data["test"] == {"baseline": None, "compiled": None, "gain": None}
    assert data["test_openings"] is None
    assert "not opened" in (report.artifact / "report.md").read_text()
    with Store(folder / "a.db") as store:
        assert "not opened" in compile_page(store, report.run_id, data, folder).decisions[-1].text
    unproven = Path(data["unproven"])
    assert demos_of(assay.load(unproven)) > 0
    assert json.loads((unproven / "manifest.json").read_text())["unproven"] is True
    assert "unproven" not in json.loads((report.artifact / "manifest.json").read_text())


def test_commands_say_that_an_artifact_is_unproven(refused: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, report = refused
    data = report.to_dict()
    monkeypatch.chdir(folder)
    monkeypatch.setattr("assay.commands.deploy.EXPECTED_RUNS", 2)

    def said(*arguments: str) -> bool:
        return "unproven" in assay_command(*arguments, "--store", "a.db").stderr

    assert not said("registry", "register", "sums", data["artifact"])
    assert not said("registry", "show", "sums")
    assert said("registry", "register", "sums", data["unproven"])
    assert said("registry", "list")
    assert said("registry", "show", "sums@2")
    assert said("deploy", "start", "sums@2", "--dry-run")
    assert said("registry", "alias", "sums@2", "champion")
    progress = Lines()
    serve(registered=("sums",), store="a.db", port=0, on_start=lambda serving: serving.stop(), progress=progress)
    assert "unproven" in progress.text


def test_a_proven_program_is_the_result_and_is_tested(proven: Any) -> None:
    data = proven.to_dict()
    assert data["replaces"]
    assert data["unproven"] is None
    assert demos_of(proven.program) > 0
    assert "opened 1 time in this store" in (proven.artifact / "report.md").read_text()
    for side in ("baseline", "compiled"):
        assert data["test"][side].keys() >= {"score", "n", "unscored", "criteria", "task_types"}
        assert data["test"][side]["n"] == 8
    assert data["test"]["gain"].keys() >= {"mean", "low", "high"}
    assert data["test"]["gain"]["mean"] == 1.0


def test_the_result_is_an_instance_of_the_users_class(proven: Any, tmp_path: Path) -> None:
    best = proven.program
    assert (type(best), best.hint, best.shout()) == (Sums, "two", "TWO")
    assert dspy.settings.lm is None
    assert best(question="What is 3 + 1?").answer == "4"  # with the model that it was compiled with
    assert asyncio.run(best.acall(question="What is 3 + 1?")).answer == "4"
    best.save(tmp_path / "best.json")
    loaded = Sums()
    loaded.load(tmp_path / "best.json")
    assert [demo["question"] for demo in loaded.answer.demos] == [demo["question"] for demo in best.answer.demos]
    best.save(tmp_path / "whole", save_program=True)
    whole = dspy.load(tmp_path / "whole", allow_pickle=True)
    assert (type(whole).__name__, len(whole.answer.demos)) == ("Sums", len(best.answer.demos))
    other = dspy.utils.DummyLM([{"answer": "other"}])
    with dspy.context(lm=other):
        assert best.deepcopy()(question="?").answer == "other"
    again = compiled(tmp_path, 1000, program=best, out=tmp_path / "again")
    assert type(again.program) is Sums
    best.answer.demos = []
    assert demos_of(proven.program) > 0, "what a user changes on the result stays out of the report"


@pytest.mark.parametrize("registered", [False, True])
def test_a_run_resumed_after_its_server_died_at_the_gate_writes_its_artifact_under_the_same_name(
    tmp_path: Path, registered: bool
) -> None:
    gate = {str(task.inputs["question"]) for task in load_splits(data_spec(ROWS), limits=SIZES).gate}
    down, places = True, tmp_path / "artifacts"

    def dies(request: Any) -> Any:
        asked = (request.messages[-1].text or "").split("[[ ## question ## ]]\n")[-1].partition("\n")[0]
        return lm15.ServerError("gone") if down and asked in gate else taught(1000)(request)

    def job(**more: Any) -> Any:
        return compiled(tmp_path, 1000, out=None, **more)

    of_another_run = job(seed=1, cache=False).artifact / "manifest.json"
    before = of_another_run.read_text()
    with pytest.raises(ModelError, match=rf"none of the 8 gate tasks.*is kept in {places / 'sums-labeled-unproven'};"):
        job(lm=scripted_lm(dies))
    assert demos_of(assay.load(places / "sums-labeled-2")) == 0
    assert demos_of(assay.load(places / "sums-labeled-unproven")) > 0
    if registered:
        with Store(tmp_path / "a.db") as store:
            Registry(store.engine).register("sums", places / "sums-labeled-2")
    down = False
    report = job(lm=scripted_lm(dies), resume=True)
    assert report.artifact.name == ("sums-labeled-3" if registered else "sums-labeled-2")
    assert demos_of(assay.load(report.artifact)) > 0
    assert of_another_run.read_text() == before


def test_a_caller_that_decides_itself_gets_the_winner_on_val(tmp_path: Path) -> None:
    report = compiled(tmp_path, 10, gate=False, test=False)
    assert (report.to_dict()["unproven"], demos_of(report.program) > 0) == (None, True)


def test_a_tuned_program_that_is_unproven_is_beside_an_artifact_with_the_default(tmp_path: Path) -> None:
    def hot(request: Any) -> str:
        temperature = request.config.temperature or 0.0
        number = int((request.messages[-1].text or "").split("What is ")[-1].split(" ")[0])
        return json.dumps({"answer": str(number + 1) if temperature > 1.5 or number % 8 else "0"})

    (tmp_path / "r.yaml").write_text(RUBRIC)
    report = assay.tune(
        Sums("two"), rubric=tmp_path / "r.yaml", data=ROWS, sizes=SIZES, store=tmp_path / "a.db",
        out=tmp_path / "artifact", lm=scripted_lm(hot), trials=6, prompt_format="json",
    )  # fmt: skip
    data = report.to_dict()
    assert (data["replaces"], data["test"]["tuned"], data["test_openings"]) == (False, None, None)
    temperature = {
        name: json.loads((Path(data[name]) / "manifest.json").read_text())["settings"]["parameters"]["temperature"]
        for name in ("artifact", "unproven")
    }
    assert temperature["unproven"] == data["best"]["temperature"] != temperature["artifact"]
    assert "not opened" in "\n".join(map(str, report.lines()))


def test_a_test_that_was_opened_before_supports_no_proof() -> None:
    once, again = {"this_job": 1, "this_store": 1}, {"this_job": 1, "this_store": 3}
    assert gain_claim(0.1, 0.2) == gain_claim(0.1, 0.2, once) != gain_claim(0.1, 0.2, again)
    assert gain_claim(-0.1, 0.2, again) == gain_claim(-0.1, 0.2, once)
    assert "no proof" in gain_claim(0.1, 0.2, again)
