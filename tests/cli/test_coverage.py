"""A command with undecided criteria fails, but prints its report."""

import math
from pathlib import Path
from typing import Any

import pytest

from assay.commands.groups import check_coverage
from assay.errors import LowCoverage
from assay.rubrics import ScoreResult
from assay.rubrics.scoring import coverage_report
from assay.traces import Store
from assay.traces.records import Rollout, Verdict
from rigs.command_line import assay_command
from rigs.projects import PROGRAM, sums, write_rows
from rigs.serving import refusing

SHORT = "- {name: short, check: 'checks.py:short'}\n"
SCORE = ["traces", "score", "--rubric", "r.yaml", "--store", "a.db"]


@pytest.fixture(autouse=True)
def project(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    Path("checks.py").write_text("def short(*_):\n    return True\n\ndef kind(*_):\n    raise OSError('gone')\n")
    Path("r.yaml").write_text(f"name: both\ncriteria:\n{SHORT}- {{name: kind, judge: 'Is it kind?'}}\n")
    with Store("a.db") as store:
        for n in range(3):
            fields: dict[str, Any] = {"inputs": {"question": str(n)}, "prediction": {"answer": "yes"}}
            store.put_rollout(Rollout(id=f"r{n}", task_id=str(n), status="done", **fields))


def test_traces_score_without_a_judge_is_refused_at_once() -> None:
    done = assay_command(*SCORE, "--json")
    assert "has a judge decide 'kind', and no model was named for it" in " ".join(done.stderr.split())
    assert "Name one: --judge-model NAME" in " ".join(done.stderr.split())
    assert (done.code, done.stdout) == (2, "")


@pytest.mark.usefixtures("short_waits")
def test_traces_score_with_an_unreachable_judge_fails_naming_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_BASE", "http://127.0.0.1:9/v1")
    done = assay_command(*SCORE, "--judge-model", "openai/gone", "--no-preflight", "--json")
    assert (done.code, done.report["undecided"]["kind"]["n"]) == (1, 3)
    assert "kind was not decided on 3 of 3: judge 'Is it kind?' (openai/gone)" in " ".join(done.stderr.split())


@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize("command", ["evaluate", "collect"])
def test_without_a_preflight_an_unreachable_server_is_one_line_that_says_what_to_do(command: str) -> None:
    Path("p.py").write_text("import dspy\n\np = dspy.Predict('question -> answer')\n")
    Path("r.yaml").write_text(f"name: r\ncriteria:\n{SHORT}")
    write_rows("d.jsonl", [{"question": "a", "answer": "b", "split": "train"}])
    with refusing() as address:
        job = [command, "p.py:p", "--rubric", "r.yaml", "--data", "d.jsonl", "--split", "train", "--store", "b.db"]
        done = assay_command(*job, "--model", "openai/gone", "--api-base", f"{address}/v1", "--no-preflight")
    assert done.code == 1, done.stderr
    assert done.stderr.splitlines()[-1] == (
        f"assay: none of the 1 tasks could be scored: [openai/gone] failed to connect to "
        f"{address.removeprefix('http://')}: [Errno 111] Connection refused: no server listens there. Start it, or "
        "correct its address (--api-base)"
    )
    assert "LMTransportError" not in done.stdout + done.stderr
    assert "commonest reason" not in done.stdout, "the error says it"


ANSWERED = "        return dspy.Prediction(answer=found)\n\n\nYES = 'yes'\n"
COMMANDS: dict[str, list[str]] = {
    "compile": ["mine.py:Mine", "--optimizer", "labeled"],
    "evaluate": ["mine.py:Mine", "--split", "val"],
    "compare": ["mine.py:Mine", "other.py:Mine"],
    "tune": ["mine.py:Mine", "--trials", "1"],
    "collect": ["mine.py:Mine", "-n", "1"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_criterion_that_is_never_graded_fails_the_command_after_its_report(name: str) -> None:
    Path("r.yaml").write_text(f"name: both\ncriteria:\n{SHORT}- {{name: kind, check: 'checks.py:kind'}}\n")
    for file in ("mine.py", "other.py"):  # its model would not answer, and is not asked
        Path(file).write_text(PROGRAM.replace("self.answer(question=question)", "YES") + ANSWERED)
    write_rows("d.jsonl", sums(30))
    command = [name, *COMMANDS[name], "--rubric", "r.yaml", "--data", "d.jsonl", "--no-preflight", "--json"]
    done = assay_command(*command, "--store", "c.db")
    assert done.code == 1, done.stderr
    assert isinstance(done.report, dict), "the report is printed all the same"
    message = "coverage 0.00 is below the required 0.9. kind was not decided on"
    assert message in " ".join(done.stderr.split())
    done = assay_command(*command, "--store", "d.db", "--min-coverage", "0")
    assert done.code == 0, done.stderr


def result(value: float, failed: str | None = None, **grades: float | None) -> ScoreResult:
    verdicts: list[Any] = [Verdict(criterion=name, grade=grade, reason="away") for name, grade in grades.items()]
    return ScoreResult(value=value, verdicts=tuple(verdicts), failed=failed)


FAILED = result(0.0, "KeyError: 'x'", right=0.0, rambling=None)
CHECKS: dict[str, Any] = {f"check{n}": 1.0 for n in range(9)}
WAITING = ScoreResult(value=1.0, verdicts=(Verdict(criterion="short", grade=None, applies=False),))


@pytest.mark.parametrize(
    ("results", "coverage", "undecided"),
    [
        ([result(1.0, right=1.0, clear=None), result(1.0, right=1.0, clear=0.5)], 0.5, ["clear"]),
        ([result(1.0, judged=None, **CHECKS)] * 4, 0.0, ["judged"]),  # nine checks cannot hide one judge
        ([FAILED, FAILED], 1.0, []),  # a failure of the agent counts as graded
        ([result(math.nan, "gone", right=None), FAILED], 0.5, []),  # one of the server does not
        ([WAITING], 1.0, []),  # a criterion that does not apply is not missing
    ],
)
def test_coverage_is_that_of_the_least_graded_criterion(
    results: list[ScoreResult], coverage: float, undecided: list[str]
) -> None:
    report = coverage_report(results)
    assert (report["coverage"], list(report["undecided"])) == (coverage, undecided)


def test_required_coverage_applies_to_reports_at_any_depth() -> None:
    gap = {"kind": {"n": 3, "of": 4, "reason": "judge 'Is it kind?' (m): gone"}}
    sides = {"baseline": {"coverage": 1.0, "undecided": {}}, "compiled": {"coverage": 0.25, "undecided": gap}}
    message = r"coverage 0\.25 is below the required 0\.9. kind was not decided on 3 of 4: judge .* \(m\): gone"
    with pytest.raises(LowCoverage, match=message):
        check_coverage({"test": {**sides, "gain": None}}, 0.9)
    check_coverage({"test": {**sides, "gain": None}}, 0.25)
