"""`resume` of a finished run returns its report without calls; with a higher cap it continues."""

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from dspy.utils.exceptions import LMServerError

import assay
from assay.errors import ArtifactError, BudgetExceeded, RubricError, spoken
from assay.models import Caps, Meter
from assay.models.meter import Usage
from assay.testing import scripted_lm
from assay.traces import Store
from assay.traces.store import tables as schema
from assay.traces.store.listing import list_runs, result_of
from rigs.command_line import assay_command
from rigs.projects import EXACT, Said, write_program, write_rows

MINE = "mine.py:Mine"


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


@pytest.fixture(autouse=True)
def place(own_folder: Path) -> Path:
    write_program()
    Path("r.yaml").write_text(EXACT)
    rows = [{"question": f"What do you say to number {n}.", "answer": str(n + 2)} for n in range(300)]
    write_rows("data.jsonl", rows)
    return own_folder


def job(script: Any, **more: Any) -> dict[str, Any]:
    shared = {"rubric": "r.yaml", "data": "data.jsonl", "threads": 1, "prompt_format": "json"}
    return {**shared, "lm": scripted_lm(script), **more}


def compile(script: Any, *, max_calls: int = 120, **more: Any) -> Any:
    return assay.compile(MINE, **job(script, max_calls=max_calls, **more))


def rows_of_runs() -> list[dict[str, Any]]:
    with Store() as store:
        return list_runs(store, limit=9)


def statuses() -> list[str]:
    return [run["status"] for run in rows_of_runs()]


def test_a_finished_compile_is_reported_again_even_if_its_cap_is_spent(place: Path) -> None:
    script, said = Flaky(), Said()
    first = compile(script)
    data, calls, rows = first.to_dict(), script.calls, rows_of_runs()
    assert (data["replaces"], data["stopped"]) == (True, None)
    repeated = compile(script, resume=True, progress=said)
    assert repeated.to_dict() == json.loads(json.dumps(data))
    assert repeated.gate == first.gate
    assert repeated.program.predictors()[0].demos
    assert statuses() == ["done"]
    assert rows_of_runs() == rows  # with its duration
    assert "this run has finished" in "".join(said.lines)
    run_id = rows[0]["id"]
    shown = assay_command("runs", "show", run_id).stdout
    printed = [spoken(line, str) for line in first.lines() if isinstance(line, str)]  # as the command has printed it
    assert any(line.startswith("gain, paired: ") for line in printed)
    assert [line for line in printed if line not in shown] == []
    assert "sealed test split" in shown
    assert assay_command("runs", "show", run_id, "--json").report["result"]["winner"] == data["winner"]
    copied = compile(script, resume=True, out="there")
    assert copied.artifact == (place / "there").resolve()
    assert assay.load("there")
    source = next((Path(data["artifact"]) / "source").rglob("*.py"))
    source.write_text("raise ImportError('gone')\n")
    broken = compile(script, resume=True)
    *notes, last = broken.to_dict()["notes"]
    assert "the artifact cannot be loaded here: " in last
    assert {**broken.to_dict(), "notes": notes} == json.loads(json.dumps(data))
    with pytest.raises(ArtifactError):
        _ = broken.program
    assert script.calls == calls


def other_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes to a folder that has the same project and nothing that was made of it."""
    folder = Path("other").absolute()
    shutil.copytree(".", folder, ignore=shutil.ignore_patterns(".assay", "other"))
    monkeypatch.chdir(folder)


@pytest.mark.postgres
def test_a_job_that_ended_is_only_reported_on_another_machine(
    empty_postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, said = Flaky(), Said()
    settings: dict[str, Any] = {"store": empty_postgres_url, "progress": said, "sizes": {"val": 20, "test": 20}}
    first = json.loads(json.dumps(compile(script, **settings).to_dict()))
    stopped = json.loads(json.dumps(compile(script, max_calls=12, seed=7, **settings).to_dict()))
    calls = script.calls
    other_machine(monkeypatch)
    assert compile(script, max_calls=12, seed=7, resume=True, **settings).to_dict() == stopped
    assert compile(script, resume=True, **settings).to_dict() == first
    Path(first["artifact"]).rename("moved")  # the folders are of one machine after all
    again = compile(script, resume=True, **settings).to_dict()
    note = f"note: the artifact is on {socket.gethostname()}, where this run ended, in {first['artifact']}"
    assert note in "".join(said.lines)
    assert again["notes"][len(first["notes"])] in "".join(said.lines)
    assert {**again, "notes": first["notes"]} == first
    assert script.calls == calls
    with Store(empty_postgres_url) as store:
        assert [run["status"] for run in list_runs(store)] == ["stopped", "done"]
        (run,) = list_runs(store, status="done")
        assert result_of(store, run) == first
        with store.engine.connect() as connection:
            assert set(connection.execute(sa.select(schema.test_openings.c.times)).scalars()) == {1}


def test_resume_takes_the_latest_run_not_one_that_a_wrong_rubric_ended_before_it() -> None:
    settings = job(Flaky(every=1000), split="val", sizes={"val": 3})
    Path("r.yaml").write_text(EXACT.replace("exact}", "exact, with: {field: lable}}"))
    with pytest.raises(RubricError, match="lable"):
        assay.evaluate(MINE, **settings)
    Path("r.yaml").write_text(EXACT)
    first = assay.evaluate(MINE, **settings).to_dict()
    again = assay.evaluate(MINE, **settings, resume=True).to_dict()
    assert again["result"] == first["result"]
    assert statuses() == ["done", "failed"]


@pytest.mark.slow
def test_a_higher_cap_continues_a_finished_run_and_another_rubric_starts_a_new_one() -> None:
    script = Flaky()
    first = compile(script).to_dict()
    assert compile(script, max_calls=400, resume=True).to_dict()["calls"] > first["calls"]
    Path("r.yaml").write_text(f"{EXACT}- {{name: same, check: exact}}\n")
    other = compile(script, max_calls=400, resume=True).to_dict()
    assert set(other["test"]["compiled"]["criteria"]) == {"right", "same"}


def test_a_run_stopped_by_its_cap_before_a_decision_reports_an_exhausted_cap() -> None:
    script, said = Flaky(), Said()
    first = compile(script, max_calls=12).to_dict()
    assert first["stopped"]
    repeated = compile(script, max_calls=12, resume=True, progress=said).to_dict()
    assert repeated == json.loads(json.dumps(first))
    assert "nothing is left under this cap" in "".join(said.lines)
    assert statuses() == ["stopped"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "settings"),
    [
        (assay.tune, {"trials": 2, "max_calls": 250, "sizes": {"val": 20}}),
        (assay.collect, {"n": 2, "max_calls": 60, "sizes": {"val": 20}, "split": "val"}),
        (assay.evaluate, {"max_calls": 200, "split": "val"}),
    ],
    ids=["tune", "collect", "evaluate"],
)
def test_a_finished_job_is_reported_again_with_its_failed_runs(
    function: Callable[..., Any], settings: dict[str, Any]
) -> None:
    script = Flaky()
    first = function(MINE, **job(script, **settings)).to_dict()
    calls = script.calls
    repeated = function(MINE, **job(script, **settings, resume=True)).to_dict()
    assert script.calls == calls
    assert repeated["stopped"] == first["stopped"] is None
    if function is assay.tune:
        assert repeated == json.loads(json.dumps(first, default=str))
    else:
        assert repeated["result"] == first["result"]
        assert first["result"]["failed"] > 0 or function is assay.collect
    assert statuses() == ["done"]


def test_an_evaluation_that_its_cap_stopped_is_stopped_again() -> None:
    settings: dict[str, Any] = {"max_calls": 30, "split": "val"}
    first = assay.evaluate(MINE, **job(script := Flaky(), **settings)).to_dict()
    repeated = assay.evaluate(MINE, **job(script, **settings, resume=True)).to_dict()
    assert repeated["calls"] == first["calls"] <= 30
    assert repeated["stopped"] == first["stopped"]
    assert repeated["result"]["n"] >= first["result"]["n"]


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


@pytest.mark.slow
def test_tune_prints_only_measured_metrics_with_their_definitions() -> None:
    def right_if_warm(request: Any) -> str:
        number = int((request.messages[-1].text or "").split("number ")[1].split(".")[0])
        return json.dumps({"answer": str(number + 2 if (request.config.temperature or 0) > 1 else number)})

    sizes = {"val": 20, "gate": 20, "test": 10}
    report = assay.tune(MINE, **job(right_if_warm, trials=4, sizes=sizes))
    assert report.test["tuned"]["metrics"]["adaptability"] is None  # there is one task type alone
    output = "\n".join(map(str, report.lines()))
    assert "adaptability" not in output
    assert "average confidence" not in output
    assert "efficiency: 1 minus the share of `budget`" in output
    assert "task accuracy: share of tasks with a score of 0.8 or more" in output


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_descending_range_is_refused_before_the_preflight(more: list[str]) -> None:
    words = ["tune", MINE, "--rubric", "r.yaml", "--data", "data.jsonl", "--range", "temperature=1:0.1", *more]
    done = assay_command(*words)
    assert (done.code, "of temperature must rise and lie between" in done.stderr) == (2, True)
    assert not Path(".assay").exists()


def test_a_rubric_that_has_changed_is_said_before_rollouts_are_run_again(place: Path) -> None:
    said = Said()
    settings = job(Flaky(every=10**6), size=12, n=1, preflight=False)
    first = assay.collect(MINE, **settings)
    again = assay.collect(MINE, **settings, resume=True, progress=said)
    assert (again.kept_from_before, "note: " in "".join(said.lines)) == (first.rollouts, False)
    Path("r.yaml").write_text(EXACT.replace("check: exact", "check: exact, weight: 2"))
    other = assay.collect(MINE, **settings, resume=True, progress=said, max_calls=1)
    assert "rollouts of this run were scored by another version of the rubric" in "".join(said.lines)
    assert other.calls == first.calls  # answers come from the response cache
