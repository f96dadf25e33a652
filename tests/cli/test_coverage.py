"""A command with undecided criteria fails, but prints its report."""

import json
import math
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from assay.cli.main import group
from assay.commands.groups import check_coverage
from assay.errors import AssayError, ConfigError, LowCoverage
from assay.rubrics import ScoreResult
from assay.rubrics.scoring import coverage_report
from assay.traces import Store
from assay.traces.records import Rollout, Verdict
from rigs.command_line import assay_command


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    (tmp_path / "checks.py").write_text(
        "def short(task, prediction, rollout):\n    return len(str(prediction.get('answer'))) < 9\n"
    )
    text = "name: both\ncriteria:\n- {name: short, check: 'checks.py:short'}\n- {name: kind, judge: 'Is it kind?'}\n"
    (tmp_path / "r.yaml").write_text(text)
    with Store(tmp_path / "a.db") as store:
        for n in range(3):
            store.put_rollout(
                Rollout(
                    id=f"r{n}", task_id=str(n), inputs={"question": str(n)}, prediction={"answer": "yes"}, status="done"
                )
            )
    return tmp_path


def run_cli(*args: str) -> tuple[int, str, str]:
    """A command in this process: exit code as of `main`, standard output, final message."""
    done = CliRunner().invoke(group, list(args))
    if isinstance(done.exception, AssayError):
        assert not isinstance(done.exception, ConfigError), "that would be wrong usage, and exit code 2"
        return 1, done.stdout, str(done.exception)
    return done.exit_code, done.stdout, done.output


def test_traces_score_without_a_judge_is_refused_at_once(project: Path) -> None:
    done = CliRunner().invoke(
        group, ["traces", "score", "--rubric", "r.yaml", "--store", str(project / "a.db"), "--json"]
    )
    assert isinstance(done.exception, ConfigError)
    assert "has a judge decide 'kind', and no model was named for it" in str(done.exception)
    assert "Name one: --judge-model NAME" in done.exception.text(done.exception.names)
    assert done.stdout == ""


@pytest.mark.slow
def test_traces_score_with_an_unreachable_judge_fails_naming_it(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_BASE", "http://127.0.0.1:9/v1")
    score = ["traces", "score", "--rubric", "r.yaml", "--store", str(project / "a.db"), "--judge-model", "openai/gone"]
    code, out, err = run_cli(*score, "--no-preflight", "--json")
    assert (code, json.loads(out)["undecided"]["kind"]["n"]) == (1, 3)
    assert "kind was not decided on 3 of 3: judge 'Is it kind?' (openai/gone)" in " ".join(err.split())


@pytest.mark.slow
@pytest.mark.parametrize("command", ["evaluate", "collect"])
def test_without_a_preflight_an_unreachable_server_is_one_line_that_says_what_to_do(
    project: Path, command: str
) -> None:
    (project / "p.py").write_text("import dspy\n\np = dspy.Predict('question -> answer')\n")
    (project / "d.jsonl").write_text('{"question": "a", "answer": "b", "split": "train"}\n')
    (project / "r.yaml").write_text("name: r\ncriteria:\n- {name: short, check: 'checks.py:short'}\n")
    with socket.socket() as listening:  # bound and not listening
        listening.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        job = [command, "p.py:p", "--rubric", "r.yaml", "--data", "d.jsonl", "--split", "train", "--store", "b.db"]
        done = assay_command(*job, "--model", "openai/gone", "--api-base", address, "--no-preflight")
    assert done.code == 1, done.stderr
    assert done.stderr.splitlines()[-1] == (
        f"assay: none of the 1 tasks could be scored: [openai/gone] failed to connect to "
        f"{address.removeprefix('http://').removesuffix('/v1')}: [Errno 111] Connection refused: no server listens "
        "there. Start it, or correct its address (--api-base)"
    )
    assert "LMTransportError" not in done.stdout + done.stderr
    assert "commonest reason" not in done.stdout, "the error says it"


DATA = ["--rubric", "r.yaml", "--data", "d.jsonl", "--store", "c.db", "--no-preflight", "--json"]
COMMANDS: dict[str, list[str]] = {
    "compile": ["compile", "p.py:P", "--optimizer", "labeled", "--out", "a", *DATA],
    "evaluate": ["evaluate", "p.py:P", "--split", "val", *DATA],
    "compare": ["compare", "p.py:P", "p.py:Q", *DATA],
    "tune": ["tune", "p.py:P", "--trials", "1", "--out", "t", *DATA],
    "collect": ["collect", "p.py:P", "-n", "1", *DATA],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_criterion_that_is_never_graded_fails_the_command_after_its_report(project: Path, name: str) -> None:
    (project / "checks.py").write_text("def short(*_):\n    return True\n\ndef kind(*_):\n    raise OSError('gone')\n")
    (project / "r.yaml").write_text(
        "name: both\ncriteria:\n- {name: short, check: 'checks.py:short'}\n- {name: kind, check: 'checks.py:kind'}\n"
    )
    (project / "p.py").write_text(
        "import dspy\n\nclass P(dspy.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.ask = dspy.Predict('question -> answer')\n\n    def forward(self, question):\n"
        "        return dspy.Prediction(answer='yes')\n\nclass Q(P):\n    pass\n"
    )
    (project / "d.jsonl").write_text(
        "".join(json.dumps({"question": f"Is {n} a number?", "answer": "yes"}) + "\n" for n in range(30))
    )
    code, out, err = run_cli(*COMMANDS[name])
    assert code == 1, err
    assert isinstance(json.loads(out), dict), "the report is printed all the same"
    assert "coverage 0.00 is below the required 0.9. kind was not decided on" in " ".join(err.split())
    other = {"c.db": "d.db", "a": "b", "t": "u"}
    code, _, err = run_cli(*[other.get(arg, arg) for arg in COMMANDS[name]], "--min-coverage", "0")
    assert code == 0, err


def result(value: float, failed: str | None = None, **grades: float | None) -> ScoreResult:
    verdicts: list[Any] = [Verdict(criterion=name, grade=grade, reason="away") for name, grade in grades.items()]
    return ScoreResult(value=value, verdicts=tuple(verdicts), failed=failed)


def test_coverage_is_that_of_the_least_graded_criterion() -> None:
    coverage = coverage_report([result(1.0, right=1.0, clear=None), result(1.0, right=1.0, clear=0.5)])
    assert coverage == {"coverage": 0.5, "undecided": {"clear": {"n": 1, "of": 2, "reason": "away"}}}
    # nine checks cannot hide one judge that never answered
    many: dict[str, Any] = {f"check{n}": 1.0 for n in range(9)}
    assert coverage_report([result(1.0, judged=None, **many)] * 4)["coverage"] == 0.0


def test_an_agent_failure_counts_as_graded_and_a_server_failure_does_not() -> None:
    failed = result(0.0, "KeyError: 'x'", right=0.0, rambling=None)
    assert coverage_report([failed, failed]) == {"coverage": 1.0, "undecided": {}}
    server = result(math.nan, "gone", right=None)
    assert coverage_report([server, failed]) == {"coverage": 0.5, "undecided": {}}


def test_a_criterion_that_does_not_apply_is_not_missing() -> None:
    waiting = Verdict(criterion="short", grade=None, applies=False)
    assert coverage_report([ScoreResult(value=1.0, verdicts=(waiting,))]) == {"coverage": 1.0, "undecided": {}}


def test_required_coverage_applies_to_reports_at_any_depth() -> None:
    gap = {"kind": {"n": 3, "of": 4, "reason": "judge 'Is it kind?' (m): gone"}}
    data = {
        "test": {
            "baseline": {"coverage": 1.0, "undecided": {}},
            "compiled": {"coverage": 0.25, "undecided": gap},
            "gain": None,
        }
    }
    message = (
        r"coverage 0\.25 is below the required 0\.9. kind was not decided on 3 of 4: judge 'Is it kind\?' \(m\): gone"
    )
    with pytest.raises(LowCoverage, match=message):
        check_coverage(data, 0.9)
    check_coverage(data, 0.25)
