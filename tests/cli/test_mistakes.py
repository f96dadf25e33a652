"""Mistakes of somebody who has not read the documentation: each message names what was meant."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from assay.cli.main import command_of, group
from assay.cli.wording import message_of
from assay.errors import AssayError

PROGRAM = """
import dspy


class Triage(dspy.Module):
    def __init__(self):
        super().__init__()
        self.read = dspy.Predict("ticket -> queue")

    def forward(self, ticket):
        return self.read(ticket=ticket)
"""
LOCAL = ["--model", "openai/m", "--api-base", "http://127.0.0.1:9/v1"]
JOB = ["triage.py", "--rubric", "rubric.yaml", "--data", "tickets.csv", *LOCAL, "--dry-run"]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "triage.py").write_text(PROGRAM)
    (tmp_path / "rubric.yaml").write_text("name: r\ncriteria:\n- {name: right, check: exact}\n")
    (tmp_path / "broken.yaml").write_text("name: r\ncriteria:\n  - name: right\n     weight: 1\n")
    rows = [f"refund {number},billing" for number in range(80)]
    (tmp_path / "tickets.csv").write_text("\n".join(["ticket,queue", *rows]))
    return tmp_path


def refusal(words: list[str]) -> tuple[int, str]:
    """Exit code and message of a command."""
    error = CliRunner().invoke(group, words).exception
    assert isinstance(error, AssayError)
    return error.exit_code, message_of(error, command_of(words))


@pytest.mark.parametrize(
    ("wrong", "right", "message"),
    [
        ("rubric.yml", "rubric.yaml", "no such file: rubric.yml. Did you mean 'rubric.yaml'?"),
        ("rubric", "rubric.yaml", "Did you mean 'rubric.yaml'?"),
        ("broken.yaml", "rubric.yaml", "broken.yaml:4: invalid YAML: mapping values are not allowed here, column 12"),
        ("ticket.csv", "tickets.csv", "no such file: ticket.csv. Did you mean 'tickets.csv'?"),
        ("triag.py", "triage.py", "no such file: triag.py. Did you mean 'triage.py'?"),
        (
            "triage.py:Traige",
            "triage.py",
            "its programs are Triage. Did you mean 'triage.py:Triage'?",
        ),
        ("127.0.0.1:9/v1", LOCAL[-1], "--api-base 127.0.0.1:9/v1 is no URL: write http://127.0.0.1:9/v1"),
        ("models.example.org/v1", LOCAL[-1], "write https://models.example.org/v1"),
    ],
)
def test_a_wrong_name_is_refused_with_the_right_one(project: Path, wrong: str, right: str, message: str) -> None:
    code, text = refusal(["compile", *(wrong if word == right else word for word in JOB)])
    assert (code, message in text) == (2, True), text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--optimizer", "gpea"], "Did you mean 'gepa'?"),
        (["--optimizer", "gepa", "--optimizer-set", "max_metric_cals=3"], "Did you mean 'max_metric_calls'?"),
        (["--optimizer", "gepa", "--demos", "3"], "--demos 3 would have no effect on --optimizer gepa"),
    ],
)
def test_an_estimate_refuses_what_the_run_would(project: Path, flags: list[str], message: str) -> None:
    code, text = refusal(["compile", *JOB, *flags])
    assert (code, message in text) == (2, True), text


def test_what_is_missing_may_be_in_the_project_file(project: Path) -> None:
    for words, missing in (([], "argument 'PROGRAM'"), (["triage.py"], "option '--rubric'")):
        result = CliRunner().invoke(group, ["compile", *words])
        assert f"Missing {missing}. Give it here or in assay.toml, which assay init writes." in result.output
