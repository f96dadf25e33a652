"""Keys and types of the JSON of every command, from jobs on a scripted model."""

import contextlib
import json
from pathlib import Path

import pytest
from contract_cli import described, leaves, while_serving
from contract_files import Contract, shape
from contract_project import Project
from prompt_server import PromptServer

import assay

JOBS = ("evaluate", "compile", "run", "compare", "tune", "collect", "improve", "runs list", "runs show")
TRACES = (
    "traces list", "traces show", "traces rate", "traces stats", "traces score", "traces close", "traces export",
    "traces import", "traces forget", "export sft", "export grpo", "export preferences", "export transitions",
)  # fmt: skip
DEPLOYMENTS = (
    "registry register", "registry list", "registry show", "registry diff", "registry alias", "registry flag",
    "registry suite", "registry capabilities", "registry route", "deploy simulate", "deploy start", "deploy status",
    "deploy advance", "deploy pause", "deploy resume", "deploy promote", "deploy rollback", "deploy history",
    "loop start", "loop status", "loop pool", "loop run", "loop install", "loop stop",
)  # fmt: skip
JUDGES = (
    "judge lint", "judge compile", "judge card", "judge audit", "judge score", "judge drift", "judge fidelity",
    "judge label", "judge forget",
)  # fmt: skip
SMALL = ("init", "index", "models list", "rubric checks", "trust list")
PARTS = {"jobs": JOBS, "traces": TRACES, "deployments": DEPLOYMENTS, "judges": JUDGES, "small": SMALL}
ELSEWHERE = {
    "serve": "test_contract_gateway",
    "view": "below",
    "agent run": "asks a trainer on another machine for tasks",
    **dict.fromkeys(("train sft", "train grpo"), "test_contract_trainings"),
    **dict.fromkeys(("train ppo", "train rloo", "train reinforce++", "train reinforce++-turn"), "as train grpo"),
}


@pytest.mark.parametrize(
    ("part", "command"), [(part, command) for part, commands in PARTS.items() for command in commands]
)
def test_keys_of_json_output_are_unchanged(
    part: str, command: str, contract: Contract, request: pytest.FixtureRequest
) -> None:
    project: Project = request.getfixturevalue(part)
    contract.check("json_output", command, shape(project.reports[command].report))


def test_the_json_of_every_command_that_has_one_is_checked() -> None:
    with_json = {words for words, command in leaves() if "--json" in described(command)["options"]}
    assert with_json == {command for commands in PARTS.values() for command in commands} | set(ELSEWHERE)


def test_standard_output_is_one_json_object_and_nothing_else(jobs: Project) -> None:
    for done in jobs.reports.values():
        assert isinstance(json.loads(done.stdout), dict)
        assert done.stdout.count("\n") == 1


def test_a_number_that_is_not_measured_is_null(jobs: Project) -> None:
    for done in jobs.reports.values():
        json.loads(done.stdout, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@pytest.mark.parametrize("command", ["evaluate", "compile", "tune", "collect", "improve"])
def test_keys_of_a_dry_run_are_unchanged(command: str, project: Project, contract: Contract) -> None:
    more = ("--name", "x", "--order", "prompts") if command == "improve" else ()
    done = project.run(command, "sums.py:Sums", *more, "--dry-run", "--json")
    contract.check("json_output", f"{command} --dry-run", shape(done.report))
    assert not (project.folder / ".assay" / "assay.db").exists()


def test_a_report_of_python_has_the_keys_of_the_command(jobs: Project, server: PromptServer) -> None:
    with contextlib.chdir(jobs.folder):
        report = assay.evaluate("sums.py:Sums", **assay.project_settings("evaluate"))
    assert shape(report.to_dict()).keys() == jobs.reports["evaluate"].report.keys()


def test_the_page_says_where_it_listens(jobs: Project, contract: Contract) -> None:
    with contextlib.chdir(jobs.folder):
        start, done = while_serving("view", "--port", "0", "--json", client=lambda start: start)
    contract.check("json_output", "view", shape(start))
    assert done.code == 0


def test_reports_are_written_as_pages_that_load_nothing(jobs: Project, tmp_path: Path) -> None:
    page = tmp_path / "e.html"
    assert jobs.run("evaluate", "sums.py:Sums", "--report", str(page)).code == 0
    assert "<html" in page.read_text()
    assert "http://" not in page.read_text().replace("http://www.w3.org/", "").replace(jobs.model_url, "")
