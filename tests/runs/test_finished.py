"""`resume` of a finished run returns its report without calls; with a higher cap it continues."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from dspy.utils.exceptions import LMServerError

import assay
from assay.cli.main import group
from assay.commands.tune import tune
from assay.errors import ArtifactError, BudgetExceeded, ParameterError, RubricError, spoken
from assay.evaluation import SilentProgress
from assay.models import Caps, Meter
from assay.models.meter import Usage
from assay.testing import scripted_lm
from assay.traces import Store
from assay.traces.store.listing import list_runs

PROGRAM = """import dspy


class Mine(dspy.Module):
    def __init__(self):
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    def forward(self, question):
        return self.answer(question=question)
"""


class Flaky:
    """Adds 2 if demonstrations show it; sometimes answers with an error, which is never cached."""

    def __init__(self, every: int = 9) -> None:
        self.calls, self.every = 0, every

    def __call__(self, request: Any) -> Any:
        self.calls += 1
        if self.calls % self.every == 5:
            return LMServerError("busy")
        prompt = request.messages[-1].text or ""
        number = int(prompt.split("number ")[1].split(".")[0]) if "number " in prompt else 0
        return json.dumps({"answer": str(number + 2) if len(request.messages) > 4 else str(number)})


class CapturedProgress(SilentProgress):
    def __init__(self) -> None:
        self.text = ""

    def say(self, text: str) -> None:
        self.text += f"{text}\n"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(PROGRAM)
    (tmp_path / "r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: exact}\n")
    rows = [json.dumps({"question": f"What do you say to number {n}.", "answer": str(n + 2)}) for n in range(300)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    return tmp_path


def job(script: Any, **more: Any) -> dict[str, Any]:
    return {"rubric": "r.yaml", "data": "data.jsonl", "lm": scripted_lm(script), "threads": 1, **more}


def rows_of_runs() -> list[dict[str, Any]]:
    with Store(Path(".assay/assay.db")) as store:
        return list_runs(store)


def statuses() -> list[str]:
    with Store(Path(".assay/assay.db")) as store:
        return [run["status"] for run in list_runs(store, limit=9)]


def test_a_finished_compile_is_reported_again_even_if_its_cap_is_spent(place: Path) -> None:
    script, progress = Flaky(), CapturedProgress()
    first = assay.compile("mine.py:Mine", **job(script, max_calls=120, prompt_format="json"))
    data, calls, row = first.to_dict(), script.calls, rows_of_runs()
    assert data["replaces"]
    assert data["stopped"] is None
    repeated = assay.compile(
        "mine.py:Mine", **job(script, max_calls=120, prompt_format="json", resume=True, progress=progress)
    )
    assert script.calls == calls
    assert repeated.to_dict() == json.loads(json.dumps(data))
    assert repeated.gate == first.gate
    assert repeated.program.predictors()[0].demos
    assert statuses() == ["done"]
    assert rows_of_runs() == row  # with its duration
    assert "this run has finished" in progress.text


def test_resume_takes_the_latest_run_not_one_that_a_wrong_rubric_ended_before_it(place: Path) -> None:
    settings = job(Flaky(every=1000), split="val", sizes={"val": 3}, prompt_format="json")
    (place / "r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: exact, with: {field: lable}}\n")
    with pytest.raises(RubricError, match="lable"):
        assay.evaluate("mine.py:Mine", **settings)
    (place / "r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: exact}\n")
    first = assay.evaluate("mine.py:Mine", **settings).to_dict()
    again = assay.evaluate("mine.py:Mine", **settings, resume=True).to_dict()
    assert again["result"] == first["result"]
    assert statuses() == ["done", "failed"]


@pytest.mark.slow
def test_a_higher_cap_continues_a_finished_run_and_another_rubric_starts_a_new_one(place: Path) -> None:
    script = Flaky()
    first = assay.compile("mine.py:Mine", **job(script, max_calls=120, prompt_format="json")).to_dict()
    more = assay.compile("mine.py:Mine", **job(script, max_calls=400, prompt_format="json", resume=True)).to_dict()
    assert more["calls"] > first["calls"]
    (place / "r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: exact}\n- {name: same, check: exact}\n")
    other = assay.compile("mine.py:Mine", **job(script, max_calls=400, prompt_format="json", resume=True)).to_dict()
    assert set(other["test"]["compiled"]["criteria"]) == {"right", "same"}


def test_a_run_stopped_by_its_cap_before_a_decision_reports_an_exhausted_cap(place: Path) -> None:
    script, progress = Flaky(), CapturedProgress()
    first = assay.compile("mine.py:Mine", **job(script, max_calls=12, prompt_format="json")).to_dict()
    assert first["stopped"]
    repeated = assay.compile(
        "mine.py:Mine", **job(script, max_calls=12, prompt_format="json", resume=True, progress=progress)
    ).to_dict()
    assert repeated == json.loads(json.dumps(first))
    assert "nothing is left under this cap" in progress.text
    assert statuses() == ["stopped"]


def test_the_artifact_is_copied_to_the_requested_folder(place: Path) -> None:
    script = Flaky()
    assay.compile("mine.py:Mine", **job(script, max_calls=120, prompt_format="json"))
    resumed = assay.compile(
        "mine.py:Mine", **job(script, max_calls=120, prompt_format="json", resume=True, out="there")
    )
    assert resumed.artifact == (place / "there").resolve()
    assert assay.load("there")


def test_a_finished_compile_is_reported_again_even_if_its_artifact_cannot_be_loaded(place: Path) -> None:
    script = Flaky()
    first = assay.compile("mine.py:Mine", **job(script, max_calls=120, prompt_format="json")).to_dict()
    calls = script.calls
    source = next((Path(first["artifact"]) / "source").rglob("*.py"))
    source.write_text("raise ImportError('gone')\n")
    resumed = assay.compile("mine.py:Mine", **job(script, max_calls=120, prompt_format="json", resume=True))
    assert script.calls == calls
    data = resumed.to_dict()
    assert "the artifact cannot be loaded here: " in data["notes"][-1]
    assert {**data, "notes": data["notes"][:-1]} == json.loads(json.dumps(first))
    with pytest.raises(ArtifactError):
        _ = resumed.program


@pytest.mark.slow
def test_a_finished_tune_is_reported_again(place: Path) -> None:
    script = Flaky()
    settings = {"trials": 2, "max_calls": 250, "prompt_format": "json", "sizes": {"val": 20}}
    first = tune("mine.py:Mine", **job(script, **settings)).to_dict()
    calls = script.calls
    resumed = tune("mine.py:Mine", **job(script, **settings, resume=True)).to_dict()
    assert script.calls == calls
    assert resumed == json.loads(json.dumps(first, default=str))


@pytest.mark.parametrize("cap", [200, 30])
def test_a_finished_evaluation_keeps_all_runs_including_failed_ones(place: Path, cap: int) -> None:
    script = Flaky()
    first = assay.evaluate("mine.py:Mine", **job(script, max_calls=cap, split="val", prompt_format="json")).to_dict()
    repeated = assay.evaluate(
        "mine.py:Mine", **job(script, max_calls=cap, split="val", prompt_format="json", resume=True)
    ).to_dict()
    assert repeated["calls"] == first["calls"] <= cap
    assert repeated["stopped"] == first["stopped"]
    if cap == 200:
        assert repeated["result"] == first["result"]
        assert first["result"]["failed"] > 0
        assert statuses() == ["done"]
    else:
        assert repeated["result"]["n"] >= first["result"]["n"]


def test_a_finished_collect_makes_no_call(place: Path) -> None:
    script = Flaky()
    first = assay.collect(
        "mine.py:Mine", **job(script, max_calls=60, n=2, split="val", sizes={"val": 20}, prompt_format="json")
    ).to_dict()
    calls = script.calls
    repeated = assay.collect(
        "mine.py:Mine",
        **job(script, max_calls=60, n=2, split="val", sizes={"val": 20}, prompt_format="json", resume=True),
    ).to_dict()
    assert script.calls == calls
    assert repeated["result"] == first["result"]
    assert repeated["stopped"] is None


def test_usage_of_later_phases_before_a_resume_is_not_reserved_again() -> None:
    meter = Meter(Caps(calls=100), {"search": Usage(calls=20), "gate": Usage(calls=30), "test": Usage(calls=10)})
    meter.hold(gate=Usage(calls=30), test=Usage(calls=30))
    with meter.during("search"):
        meter.check()  # 60 are spent and 20 more kept
    meter.phases["search"].calls = 40
    with (
        meter.during("search"),
        pytest.raises(BudgetExceeded, match="80 of 100 calls are spent; the rest is reserved for gate and test"),
    ):
        meter.check()


def test_runs_show_has_the_lines_of_the_command(place: Path) -> None:
    compiled = assay.compile("mine.py:Mine", **job(Flaky(), max_calls=120, prompt_format="json"))
    report = compiled.to_dict()
    run_id = json.loads(CliRunner().invoke(group, ["runs", "list", "--json"]).stdout)["runs"][0]["id"]
    output = CliRunner().invoke(group, ["runs", "show", run_id]).stdout
    printed = [spoken(line, str) for line in compiled.lines() if isinstance(line, str)]
    assert any(line.startswith("gain, paired: ") for line in printed)
    assert [line for line in printed if line not in output] == []
    assert "sealed test split" in output
    assert (
        json.loads(CliRunner().invoke(group, ["runs", "show", run_id, "--json"]).stdout)["result"]["winner"]
        == report["winner"]
    )


@pytest.mark.slow
def test_tune_prints_only_measured_metrics_with_their_definitions(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def right_if_warm(request: Any) -> str:
        number = int((request.messages[-1].text or "").split("number ")[1].split(".")[0])
        return json.dumps({"answer": str(number + 2 if (request.config.temperature or 0) > 1 else number)})

    sizes = {"val": 20, "gate": 20, "test": 10}
    report = tune("mine.py:Mine", **job(right_if_warm, trials=4, prompt_format="json", sizes=sizes))
    assert report.test["tuned"]["metrics"]["adaptability"] is None  # there is one task type alone
    print(*report.lines(), sep="\n")
    output = capsys.readouterr().out
    assert "adaptability" not in output
    assert "average confidence" not in output
    assert "efficiency: 1 minus the share of `budget`" in output
    assert "task accuracy: share of tasks with a score of 0.8 or more" in output


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_descending_range_is_refused_before_the_preflight(place: Path, more: list[str]) -> None:
    words = [
        "tune",
        "mine.py:Mine",
        "--rubric",
        "r.yaml",
        "--data",
        "data.jsonl",
        "--range",
        "temperature=1:0.1",
        *more,
    ]
    with pytest.raises(ParameterError, match="of temperature must rise and lie between"):
        CliRunner().invoke(group, words, standalone_mode=False, catch_exceptions=False)
    assert not Path(".assay").exists()
