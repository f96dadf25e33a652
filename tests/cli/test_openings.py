"""The tables of the command line say how often the test split was opened."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web
from click.testing import CliRunner

from assay.cli.main import group
from assay.commands.improve_settings import ImproveReport
from assay.datasets.rows import NO_ROWS
from assay.optimizers.finetuning.report import PolicyReport
from assay.optimizers.finetuning.settings import PolicySettings
from assay.traces import Store
from assay.web.compare import compare_view
from rigs.serving import chat_completion, served

PROGRAM = """import dspy


class Mine(dspy.Module):
    def __init__(self):
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    def forward(self, question):
        return self.answer(question=question)
"""


async def answer(request: web.Request) -> web.Response:
    body = await request.json()
    return chat_completion(body["model"], json.dumps({"answer": "4"}))


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    (tmp_path / "mine.py").write_text(PROGRAM + "\n\nclass Other(Mine):\n    pass\n")
    (tmp_path / "r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: exact}\n")
    rows = [json.dumps({"question": f"What is {n}?", "answer": str(n % 5)}) for n in range(50)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    with served(app) as url:
        yield [
            "--rubric",
            "r.yaml",
            "--data",
            "data.jsonl",
            "--model",
            "openai/m",
            "--api-base",
            f"{url}/v1",
            "--prompt-format",
            "json",
        ]


def invoked(*arguments: str) -> str:
    done = CliRunner().invoke(group, list(arguments))
    assert done.exit_code == 0, done.output
    return done.stdout


def opened(times: str) -> str:
    return f"The test split of these tasks has been opened {times} in this store"


@pytest.mark.slow
def test_evaluate_counts_openings_of_the_test_split_and_a_kept_baseline_opens_none(flags: list[str]) -> None:
    assert opened("1 time") in invoked("evaluate", "mine.py:Mine", "--split", "test", *flags)
    assert opened("2 times") in invoked("evaluate", "mine.py:Mine", "--split", "test", *flags)
    kept = "The sealed test was not opened"
    assert kept in invoked("compile", "mine.py:Mine", "--optimizer", "labeled", *flags)
    assert kept in invoked("tune", "mine.py:Mine", "--trials", "1", *flags)
    assert "has been opened" not in invoked("evaluate", "mine.py:Mine", "--split", "val", *flags)


@pytest.mark.slow
def test_compare_reports_that_an_artifact_was_made_with_the_tasks(flags: list[str]) -> None:
    artifact = json.loads(invoked("compile", "mine.py:Mine", "--optimizer", "labeled", *flags, "--json"))["artifact"]
    for split in ("train", "val"):
        comparison = json.loads(invoked("compare", "mine.py:Mine", artifact, *flags, "--split", split, "--json"))
        n = comparison["b"]["n"]
        assert [note.partition(" (")[0] for note in comparison["notes"]] == [
            f"{n} of these {n} tasks were used to compile {artifact}"
        ]
    output = " ".join(invoked("compare", "mine.py:Mine", artifact, *flags, "--split", "train").split())
    assert "its score on them is biased upwards. The splits gate and test have tasks that it has not seen" in output
    assert json.loads(invoked("compare", "mine.py:Mine", artifact, *flags, "--split", "test", "--json"))["notes"] == []


def test_compare_reports_openings_of_the_test_split(flags: list[str]) -> None:
    sides = ["compare", "mine.py:Mine", "mine.py:Other", *flags]
    assert opened("2 times") + " (2 times by this job)" in " ".join(invoked(*sides, "--split", "test").split())
    assert json.loads(invoked(*sides, "--split", "test", "--json"))["test_openings"] == {"this_job": 2, "this_store": 4}
    assert json.loads(invoked(*sides, "--split", "val", "--json"))["test_openings"] is None


def test_compare_decides_on_the_gate_split_and_the_page_shows_what_limits_it(flags: list[str]) -> None:
    sides = ["compare", "mine.py:Mine", "mine.py:Other", *flags, "--json"]
    by_default = json.loads(invoked(*sides))
    assert (by_default["split"], by_default["test_openings"]) == ("gate", None)
    data = json.loads(invoked(*sides, "--split", "test"))
    runs = json.loads(invoked("runs", "list", "--json"))["runs"]
    with Store() as store:
        page = compare_view(store, {"a": runs[1]["id"], "b": runs[0]["id"]})
    shown = [side["notes"] for side in page.values["sides"]]
    assert [notes[:-1] for notes in shown] == [data["notes"], data["notes"]]
    assert [notes[-1].count("has been opened") for notes in shown] == [1, 1]


SIDE = {
    "score": 0.5,
    "interval": [0.4, 0.6],
    "n": 9,
    "criteria": {},
    "metrics": {},
    "task_types": {},
    "valid_calls": None,
    "parsed": None,
    "tokens_per_task": 1.0,
}
TEST = {"before": SIDE, "after": SIDE, "gain": {"mean": 0.0, "low": 0.0, "high": 0.0, "n": 9}}


def test_improve_reports_openings_of_the_test_split() -> None:
    report = ImproveReport(
        program="p", model="m", test_openings={"this_job": 2, "this_store": 5}, data=NO_ROWS.to_dict()
    )
    assert any(f"{opened('5 times')} (2 times by this job)" in str(line) for line in report.lines())


def test_train_reports_openings_for_each_program(tmp_path: Path) -> None:
    report = PolicyReport(
        None, tmp_path, PolicySettings(), validation={"one": {"greedy": TEST}, "two": {"greedy": TEST}},
        test_openings={"one": {"this_job": 1, "this_store": 4}},
    )  # fmt: skip
    assert str([*report.lines()]).count("has been opened 4 times") == 1
