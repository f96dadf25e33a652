"""Exit codes: 0 for done, 1 for a failure, 2 for wrong usage, 130 for Ctrl-C."""

import subprocess

import pytest
from contract_project import Project

from rigs.command_line import described, leaves

RUN = ("evaluate", "sums.py:Sums")
STOPS = """
import os
import signal

sent = []


def stopped(question):
    if not sent:  # one Ctrl-C: a second one could come after the command has ended
        sent.append(True)
        os.kill(os.getpid(), signal.SIGINT)
    return {"answer": question}
"""
NUMBERS = ("--size", "--seed", "--threads", "--task-timeout", "--max-calls", "--max-tokens", "--max-cost-usd")


@pytest.mark.parametrize(
    "words",
    [
        ("compil",),
        ("evaluate",),
        ("evaluate", "nothing.py:P"),
        ("evaluate", "sums.py:Nothing"),
        (*RUN, "--rubric", "nothing.yaml"),
        (*RUN, "--data", "nothing.jsonl"),
        (*RUN, "--rubric", "broken.yaml"),
        (*RUN, "--split", "vall"),
        (*RUN, "--unknown"),
        (*RUN, "--set", "temperature"),
        (*RUN, "--set", "temperature=5"),
        ("compile", "sums.py:Sums", "--optimizer", "nothing"),
        ("run", "nowhere", "question=1"),
        ("run", "sums.py:successor", "unknown=1"),
        ("deploy", "simulate", "--effect", "x"),
        ("judge", "score", "nothing.yaml", "--data", "d.jsonl"),
        ("init", "."),
    ],
    ids=" ".join,
)
def test_wrong_usage_ends_with_2_before_any_call(words: tuple[str, ...], project: Project, server: object) -> None:
    project.write("broken.yaml", "name: [")
    done = project.run(*words)
    assert done.code == 2, done.stderr
    assert done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("flag", NUMBERS)
def test_a_value_of_the_wrong_type_ends_with_2(flag: str, project: Project) -> None:
    assert project.run(*RUN, flag, "many").code == 2
    assert project.run(*RUN, flag, "nan").code == 2
    assert project.run(*RUN, flag, "-1").code == 2


def test_every_command_refuses_an_unknown_option_with_2(project: Project) -> None:
    for words, _ in leaves():
        assert project.run(*words.split(), "--no-such-option").code == 2, words


def test_every_command_without_its_required_argument_ends_with_2(project: Project) -> None:
    (project.folder / "assay.toml").unlink()
    for words, command in leaves():
        options = described(command)["options"].values()
        if any(option.get("required") for option in options):
            assert project.run(*words.split()).code == 2, words


def test_a_score_below_fail_under_ends_with_1_after_the_report(project: Project) -> None:
    assert project.run("evaluate", "sums.py:successor", "--fail-under", "0.9").code == 0
    done = project.run("evaluate", "sums.py:mistaken", "--fail-under", "0.9", "--json")
    assert (done.code, done.report["result"]["score"] < 0.9) == (1, True)


def test_a_coverage_below_the_required_one_ends_with_1_after_the_report(project: Project) -> None:
    project.write("checks.py", "def absent(task, prediction, rollout):\n    return float('nan')\n")
    project.write("absent.yaml", "name: absent\ncriteria:\n- {name: absent, check: checks.py:absent}\n")
    done = project.run("evaluate", "sums.py:successor", "--rubric", "absent.yaml", "--no-preflight", "--json")
    assert (done.code, done.report["result"]["score"]) == (1, None)
    assert project.run("evaluate", "sums.py:successor", "--rubric", "absent.yaml").code == 2  # by the preflight


@pytest.mark.parametrize("code", [0, 1])
def test_processes_that_train_together_print_the_only_json(
    project: Project, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def launched(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(words, code)

    monkeypatch.setattr("assay.commands.train.subprocess.run", launched)
    project.write("two.yaml", "num_processes: 2\n")
    done = project.run("train", "rloo", "sums.py:Sums", "--name", "both", "--accelerate-config", "two.yaml", "--json")
    assert (done.code, done.stdout) == (code, "")


def test_a_failure_ends_with_1_and_the_reason_as_json(project: Project) -> None:
    done = project.run(*RUN, "--api-base", "http://127.0.0.1:9/v1", "--size", "2", "--json")  # no server is there
    assert (done.code, list(done.report)) == (1, ["error"])
    done = project.run("registry", "show", "absent", "--json")
    assert (done.code, list(done.report)) == (1, ["error"])


def test_a_job_that_its_cap_stops_ends_with_0_and_says_so(project: Project) -> None:
    done = project.run(*RUN, "--max-calls", "5", "--no-preflight", "--json")
    assert (done.code, done.report["calls"] <= 5, done.report["stopped"] is None) == (0, True, False)


def test_ctrl_c_ends_with_130_and_the_reason_as_json(project: Project) -> None:
    project.write("stops.py", STOPS)
    done = project.run("evaluate", "stops.py:stopped", "--no-preflight", "--threads", "1", "--json")
    assert (done.code, list(done.report)) == (130, ["stopped"])


@pytest.mark.parametrize("words", ["runs list", "traces stats --store nowhere.db", "export sft --out x"])
def test_a_store_that_does_not_exist_ends_with_1_and_is_not_made(words: str, project: Project) -> None:
    assert project.run(*words.split()).code == 1
    assert not list(project.folder.rglob("*.db"))


def test_a_finding_of_the_judges_lint_ends_with_1_and_a_worse_program_with_0(project: Project) -> None:
    assert project.run("judge", "lint", "r.yaml").code == 1
    assert project.run("judge", "lint", "math_qa").code == 0
    assert project.run("compare", "sums.py:successor", "sums.py:mistaken").code == 0


def test_a_row_that_fails_ends_with_1_after_the_others(project: Project) -> None:
    project.write_rows("rows.jsonl", [{"question": "What is 4 + 1?"}, {"question": "nonsense"}])
    done = project.run("run", "sums.py:successor", "--file", "rows.jsonl")
    assert (done.code, len(done.stdout.splitlines())) == (1, 2)
