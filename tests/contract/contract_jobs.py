"""Jobs, judges and deployments of one project each, run once for all tests that read their reports and files."""

import contextlib
import json
import os
import sys
from typing import Any

import pytest
from contract_project import Project
from prompt_server import PromptServer

import assay
from assay.programs import McpServer

# Its goal is out of reach, so that no decision depends on the assignment, which is random.
PLAN = """
steps:
- {weight: 50, decides: true, requests: 1000, max_requests: 2000}
- {weight: 90, requests: 10}
metrics:
- {success_gain: 3}
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
AGENT = """
import json, urllib.request

def solve(task):
    with open("skill.md") as file:
        system = file.read()
    question = task["inputs"]["question"] + " Reply with: answer: …"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = json.dumps({"model": task["model"], "messages": messages}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + task["api_key"]}
    request = urllib.request.Request(task["base_url"] + "/chat/completions", data=body, headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = json.load(answer)["choices"][0]["message"]["content"]
    return {"answer": text.removeprefix("answer: ")}
"""
BETTER = "Answer the question carefully. Others were: What is 1 + 1? What is 2 + 1? What is 3 + 1? What is 4 + 1?"
LOOSE = ("--privacy", "patterns", "--min-clean", "0")


@pytest.fixture(scope="session")
def jobs(server: PromptServer, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A program evaluated, compiled, migrated, tuned and improved."""
    project = Project(tmp_path_factory.mktemp("jobs"), server.url)
    price = ("--price", "1,2")
    project.report("evaluate", "sums.py:Sums", *price)
    project.report("compile", "sums.py:Sums", "--max-search-calls", "40", "--out", "one", *price)
    project.report("run", "one", "question=What is 7 + 1?")
    project.report("compare", "sums.py:Sums", "one")
    project.report("migrate", "one", "--model", "openai/n", "--api-base", server.url, *price)
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
def deployments(jobs: Project, traces: Project) -> Project:
    """A version registered, deployed in stages and rolled back, and a loop that waits for data. After `traces`, whose
    exports would have its rollouts otherwise."""
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
        serve_units(60)  # assigned by chance: enough for both arms
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


@pytest.fixture(scope="session")
def referees(server: PromptServer, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A referee that has promoted a text and is closed."""
    project, out = (
        Project(tmp_path_factory.mktemp("referees"), server.url, rows=200),
        tmp_path_factory.mktemp("of") / "o",
    )
    project.write("agent.py", AGENT)
    project.write("skill.md", "Answer the question with one number.")
    (project.folder / "workspace").mkdir()
    project.report(
        "referee open", "--agent", "agent.py:solve", "--text", "skill.md", "--out", str(out), "--workspace", "workspace"
    )
    command = [sys.executable, "-m", "assay", "referee", "serve", str(out)]
    with McpServer(command, env=dict(os.environ), timeout_s=240, start_timeout_s=240) as referee:
        assert json.loads(referee.call("submit", {"texts": {"skill.md": BETTER}}))["promoted"]
    done = project.run("referee", "close", str(out), "--json")
    assert done.code == 0, done.stderr
    project.reports["referee close"] = done
    project.report("referee skill")
    return project


def label(number: int, rater: str) -> dict[str, Any]:
    """A rating of an output that is wrong for every third item; the raters differ on every tenth."""
    judged = "no" if (number + (rater == "bob" and number % 20 == 0)) % 3 == 0 else "yes"
    output = {"answer": str(number + 1 + (number % 3 == 0))}
    inputs = {"question": f"What is {number} + 1?"}
    return {"item_id": str(number), "input": inputs, "output": output, "rater": rater, "label": judged}


@pytest.fixture(scope="session")
def small(jobs: Project, server: PromptServer, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Commands that run no job. After `jobs`, whose artifacts are trusted."""
    project = Project(tmp_path_factory.mktemp("small"), server.url)
    (project.folder / "docs").mkdir()
    project.write("docs/a.md", "# Parcels\n\nThe parcel is late.\n")
    project.report("init", "new")
    project.report("index", "docs")
    for command in ("models list", "rubric checks", "trust list"):
        project.report(command)
    return project
