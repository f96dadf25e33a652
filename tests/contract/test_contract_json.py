"""Keys and types of the JSON of every command, from jobs on a scripted model."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from contract_cli import described, leaves, while_serving
from contract_files import Contract, shape
from contract_project import Project
from prompt_server import PromptServer

import assay

PLAN = """
steps:
- {weight: 50, decides: true, requests: 20, max_requests: 2000}
- {weight: 90, requests: 10}
metrics:
- {success_gain: 0.1}
"""
JUDGE = """
text: Is the output the right answer to the question?
scale: ["no", "yes"]
reading: text
shows: [input.question, output.answer]
"""
JUDGED = """
name: judged
criteria:
- {name: kind, judge: {text: "Is it right?", shows: [input.question, output.answer]}}
"""
LOOSE = ("--min-transitions", "1", "--min-clean", "0", "--min-task-types", "1")
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


@pytest.fixture(scope="session")
def jobs(server: PromptServer, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A program evaluated, compiled, tuned and improved."""
    project = Project(tmp_path_factory.mktemp("jobs"), server.url)
    price = ("--price", "1,2")
    project.report("evaluate", "sums.py:Sums", *price)
    project.report("compile", "sums.py:Sums", "--max-search-calls", "40", "--out", "one", *price)
    project.report("run", "one", "question=What is 7 + 1?")
    project.report("compare", "sums.py:Sums", "one")
    project.report("tune", "sums.py:Sums", "--trials", "2", "--out", "two")
    project.report("collect", "sums.py:Sums", "--size", "6", "-n", "4")
    project.report("improve", "sums.py:Sums", "--name", "better", "--order", "prompts", "--max-search-calls", "40")
    runs = project.report("runs list")["runs"]
    project.report("runs show", next(run["id"] for run in runs if run["kind"] == "compile"))
    return project


@pytest.fixture(scope="session")
def traces(jobs: Project) -> Project:
    """What the jobs recorded: listed, rated, scored, exported, imported."""
    rollouts = jobs.report("traces list", "--phase", "collect")["rollouts"]
    jobs.report("traces show", rollouts[0]["id"])
    jobs.report("traces rate", rollouts[0]["id"], "0.5")
    jobs.report("traces stats")
    jobs.report("traces score", "--rubric", "steps.yaml", "--again", "--run", rollouts[0]["run_id"])
    jobs.report("traces close")
    for kind, more in (("sft", ()), ("grpo", ("--rubric", "r.yaml")), ("preferences", ()), ("transitions", ())):
        jobs.report(f"export {kind}", "--out", f"to-{kind}", *LOOSE, *more)
    jobs.report("traces export", "otlp", "spans.jsonl")
    jobs.report("traces import", "otlp", "spans.jsonl")
    jobs.report("traces forget", "nobody")
    return jobs


@pytest.fixture(scope="session")
def deployments(jobs: Project) -> Project:
    """A version registered, deployed in stages and rolled back, and a loop that waits for data."""
    jobs.write("plan.yaml", PLAN)
    jobs.write("loop.yaml", "rubric: r.yaml\nmethod: compile\npool: {min_points: 100000}\n")
    jobs.report("registry register", "support", "two")
    jobs.report("registry register", "support", "one", "--parent", "support@1")
    jobs.report("registry list", "support")
    jobs.report("registry show", "support@2")
    jobs.report("registry diff", "support@1", "support@2")
    jobs.report("registry alias", "support@2", "tried")
    jobs.report("registry suite", "support", "--data", "d.jsonl", "--rubric", "r.yaml")
    jobs.report("deploy simulate", "--runs", "2")
    with contextlib.chdir(jobs.folder):
        serve_units(5)
        jobs.report("deploy start", "support@2", "--plan", "plan.yaml", "--force")
        serve_units(20)
    for order in ("status", "advance", "pause", "resume", "promote", "rollback", "history"):
        jobs.report(f"deploy {order}", "support")
    jobs.report("registry flag", "support", "kill", "true")
    jobs.report("registry capabilities", "support")
    jobs.report("registry route", "support", "--version", "1", "--version", "2")
    jobs.report("loop start", "support", "--file", "loop.yaml")
    jobs.report("loop status", "support")
    jobs.report("loop pool", "support")
    jobs.report("loop run", "support")
    jobs.report("loop install", "support", "--kind", "cron")
    jobs.report("loop stop", "support")
    return jobs


def serve_units(count: int) -> None:
    """Rollouts in production, one for each unit."""
    agent = assay.deployed("support", rubric="r.yaml")
    for number in range(count):
        agent(question=f"What is {number} + 1?", unit=str(number), expected={"answer": str(number + 1)})
    agent.store.flush()


@pytest.fixture(scope="session")
def judges(server: PromptServer, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A judge compiled on the labels of two raters, audited and used."""
    project = Project(tmp_path_factory.mktemp("judges"), server.url)
    project.write("kind.yaml", JUDGE)
    project.write("judged.yaml", JUDGED)
    project.write_rows("labels.jsonl", [label(number, rater) for number in range(20, 80) for rater in ("ann", "bob")])
    project.report("judge lint", "judged.yaml")
    made = project.report("judge compile", "kind.yaml", "--labels", "labels.jsonl", "--max-search-calls", "60")
    project.report("judge card", made["artifact"])
    project.report("judge audit", "kind.yaml", code=1)  # a judge that is right by a hash of the prompt has biases
    project.report("judge score", "kind.yaml", "--data", "labels.jsonl")
    project.report("judge drift", made["artifact"])
    project.report("judge fidelity", "rules", "--data", "conversations:?size=4")
    assert project.run("evaluate", "sums.py:successor", "--size", "3").code == 0
    project.report("judge label", "kind.yaml", "--rater", "ann", stdin="yes\nno\nq\n")
    project.report("judge forget", "ann")
    return project


def label(number: int, rater: str) -> dict[str, Any]:
    """A rating of an output that is wrong for every third item; the raters differ on every tenth."""
    judged = "no" if (number + (rater == "bob" and number % 20 == 0)) % 3 == 0 else "yes"
    output = {"answer": str(number + 1 + (number % 3 == 0))}
    inputs = {"question": f"What is {number} + 1?"}
    return {"item_id": str(number), "input": inputs, "output": output, "rater": rater, "label": judged}


@pytest.fixture(scope="session")
def small(server: PromptServer, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Commands that run no job."""
    project = Project(tmp_path_factory.mktemp("small"), server.url)
    (project.folder / "docs").mkdir()
    project.write("docs/a.md", "# Parcels\n\nThe parcel is late.\n")
    project.report("init", "new")
    project.report("index", "docs")
    for command in ("models list", "rubric checks", "trust list"):
        project.report(command)
    return project


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
