"""Keys and types of the JSON of every command and of the artifacts, from jobs on a scripted model."""

import contextlib
import json
from pathlib import Path

import pytest
from contract_files import Contract, shape
from contract_jobs import (
    deployments as deployments,
    jobs as jobs,
    judges as judges,
    referees as referees,
    small as small,
    traces as traces,
)
from contract_project import Project
from prompt_server import PromptServer

import assay
from assay.errors import AssayError
from rigs.command_line import described, leaves, while_serving

JOBS = ("evaluate", "compile", "run", "compare", "migrate", "tune", "collect", "improve", "runs list", "runs show")
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
REFEREES = ("referee open", "referee close", "referee skill")
PARTS = {
    "jobs": JOBS, "traces": TRACES, "deployments": DEPLOYMENTS, "judges": JUDGES, "small": SMALL, "referees": REFEREES,
}  # fmt: skip
ELSEWHERE = {
    "serve": "test_contract_gateway",
    "view": "below",
    "agent run": "asks a trainer on another machine for tasks",
    **dict.fromkeys(("train sft", "train rl"), "test_contract_trainings"),
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


def test_what_a_program_prints_is_not_on_standard_output(project: Project) -> None:
    project.write("talks.py", "def talks(question):\n    print('hello')\n    return {'answer': question}\n")
    done = project.run("evaluate", "talks.py:talks", "--size", "2", "--json")
    assert (done.stdout.count("\n"), "hello" in done.stdout, "hello" in done.stderr) == (1, False, True)


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


# -- artifacts and exports of these jobs


def test_the_files_and_the_manifest_of_an_artifact_are_unchanged(jobs: Project, contract: Contract) -> None:
    artifact = jobs.folder / "one"
    files = sorted(str(path.relative_to(artifact)) for path in artifact.rglob("*") if path.is_file())
    contract.check("artifacts", "compiled program, files", files)
    contract.check("artifacts", "compiled program", shape(json.loads((artifact / "manifest.json").read_text())))


def test_the_manifest_of_a_compiled_judge_is_unchanged(judges: Project, contract: Contract) -> None:
    artifact = Path(judges.reports["judge compile"].report["artifact"])
    contract.check("artifacts", "compiled judge", shape(json.loads((artifact / "manifest.json").read_text())))


def test_the_manifest_of_an_export_is_unchanged(traces: Project, contract: Contract) -> None:
    manifest = json.loads((traces.folder / "to-transitions" / "manifest.json").read_text())
    contract.check("artifacts", "export", shape(manifest))


def test_an_artifact_of_a_newer_format_is_refused(jobs: Project, tmp_path: Path) -> None:
    (tmp_path / "newer").mkdir()
    stored = json.loads((jobs.folder / "one" / "manifest.json").read_text())
    (tmp_path / "newer" / "manifest.json").write_text(json.dumps({**stored, "format": 10_000}))
    with pytest.raises(AssayError):
        assay.load(tmp_path / "newer")


# -- the sealed test


def test_a_compile_that_replaces_its_baseline_opens_the_test_once(jobs: Project) -> None:
    report = jobs.reports["compile"].report
    assert report["replaces"]
    assert report["test_openings"] == {"this_job": 1, "this_store": 1}
    assert report["test"]["gain"]["low"] > 0
    assert report["test"]["baseline"]["n"] == report["test"]["compiled"]["n"] > 0


def test_no_rollout_of_the_test_split_is_exported(traces: Project) -> None:
    sealed = {
        row["inputs"]["question"]
        for row in traces.run("traces", "list", "--split", "test", "--json").report["rollouts"]
    }
    exported = (traces.folder / "to-transitions" / "data.jsonl").read_text()
    assert sealed
    assert [question for question in sealed if question in exported] == []


def test_a_rollout_of_a_sealed_split_takes_no_rating(traces: Project) -> None:
    (rollout, *_) = traces.run("traces", "list", "--split", "test", "--json").report["rollouts"]
    assert traces.run("traces", "rate", rollout["id"], "0.5").code == 2
