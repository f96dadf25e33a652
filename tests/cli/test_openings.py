"""The tables of the command line say how often the test split was opened, and what limits a comparison."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from assay.commands.improve import ImproveReport
from assay.datasets.rows import NO_ROWS
from assay.optimizers.finetuning.report import PolicyReport
from assay.optimizers.finetuning.settings import PolicySettings
from assay.traces import Store
from assay.web.runs import compare_view
from rigs.command_line import Done, assay_command
from rigs.projects import write_program, write_project
from rigs.serving import ChatServer

MINE = "mine.py:Mine"


@pytest.fixture
def flags(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    write_project(24)
    write_program("other.py")
    with ChatServer(lambda body: json.dumps({"answer": "4"})).serving() as server:
        yield [
            "--rubric=r.yaml", "--data=data.jsonl", "--model=openai/m", f"--api-base={server.url}",
            "--prompt-format=json",
        ]  # fmt: skip


def invoked(*arguments: str) -> Done:
    done = assay_command(*arguments)
    assert done.code == 0, done.stderr
    return done


def opened(times: str) -> str:
    return f"The test split of these tasks has been opened {times} in this store"


@pytest.mark.slow
def test_evaluate_counts_openings_of_the_test_split_and_a_kept_baseline_opens_none(flags: list[str]) -> None:
    for times in ("1 time", "2 times"):
        assert opened(times) in invoked("evaluate", MINE, "--split", "test", *flags).stdout
    for command in (["compile", MINE, "--optimizer", "labeled"], ["tune", MINE, "--trials", "1"]):
        assert "The sealed test was not opened" in invoked(*command, *flags).stdout
    assert "has been opened" not in invoked("evaluate", MINE, "--split", "val", *flags).stdout


@pytest.mark.slow
def test_compare_reports_that_an_artifact_was_made_with_the_tasks(flags: list[str]) -> None:
    artifact = invoked("compile", MINE, "--optimizer", "labeled", *flags, "--json").report["artifact"]
    for split in ("train", "val", "test"):
        report = invoked("compare", MINE, artifact, *flags, "--split", split, "--json").report
        used = f"{report['b']['n']} of these {report['b']['n']} tasks were used to compile {artifact}"
        assert [note.partition(" (")[0] for note in report["notes"]] == ([] if split == "test" else [used])
    output = " ".join(invoked("compare", MINE, artifact, *flags, "--split", "train").stdout.split())
    assert "its score on them is biased upwards. The splits gate and test have tasks that it has not seen" in output


@pytest.mark.slow
def test_compare_decides_on_the_gate_split_and_counts_openings_of_the_test_split(flags: list[str]) -> None:
    sides = ["compare", MINE, "other.py:Mine", *flags]
    by_default = invoked(*sides, "--json").report
    assert (by_default["split"], by_default["test_openings"]) == ("gate", None)
    output = " ".join(invoked(*sides, "--split", "test").stdout.split())
    assert f"{opened('2 times')} (2 times by this job)" in output
    data = invoked(*sides, "--split", "test", "--json").report
    assert data["test_openings"] == {"this_job": 2, "this_store": 4}
    runs = invoked("runs", "list", "--json").report["runs"]
    with Store() as store:
        page = compare_view(store, {"a": runs[1]["id"], "b": runs[0]["id"]})
    shown = [side["notes"] for side in page.values["sides"]]
    assert [notes[:-1] for notes in shown] == [data["notes"], data["notes"]]
    assert [notes[-1].count("has been opened") for notes in shown] == [1, 1]


SIDE = {
    "score": 0.5, "interval": [0.4, 0.6], "n": 9, "criteria": {}, "metrics": {}, "task_types": {}, "valid_calls": None,
    "parsed": None, "tokens_per_task": 1.0,
}  # fmt: skip
TEST = {"before": SIDE, "after": SIDE, "gain": {"mean": 0.0, "low": 0.0, "high": 0.0, "n": 9}}


def test_improve_and_train_report_openings(tmp_path: Path) -> None:
    openings = {"this_job": 2, "this_store": 5}
    improved = ImproveReport(program="p", model="m", test_openings=openings, data=NO_ROWS.to_dict())
    assert any(f"{opened('5 times')} (2 times by this job)" in str(line) for line in improved.lines())
    trained = PolicyReport(
        None, tmp_path, PolicySettings(), validation={"one": {"greedy": TEST}, "two": {"greedy": TEST}},
        test_openings={"one": {"this_job": 1, "this_store": 4}},
    )  # fmt: skip
    assert str([*trained.lines()]).count("has been opened 4 times") == 1
