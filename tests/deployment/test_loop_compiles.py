"""A loop whose improvement is a real `assay.compile`, on a scripted server, killed during the search."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import assay
from assay.deployment import save_artifact
from assay.deployment.loops import Loops
from assay.deployment.registry import Registry
from assay.programs import load_program
from assay.testing.scripted_server import running
from assay.traces import Store

PROGRAM = """
import dspy

class Sums(dspy.Module):
    def __init__(self):
        super().__init__()
        self.solve = dspy.Predict("question -> answer")

    def forward(self, question):
        return self.solve(question=question)
"""
RUBRIC = "name: right\ncriteria:\n- {name: right, check: checks.py:right}\n"
CHECKS = """
import re

def right(task, prediction, rollout):
    return int(prediction["answer"]) == int(re.search(r"(\\d+) \\+ 1", task.inputs["question"])[1]) + 1
"""
FILE = """
rubric: r.yaml
method: compile
options: {{api_base: "{address}", max_search_calls: 30, threads: 2, prompt_format: chat}}
max_calls: 5000
lease_s: 1
pool: {{privacy: patterns, min_points: 50, min_task_types: 1}}
deploy: {{plan: plan.yaml}}
"""
PLAN = json.dumps({"steps": [{"weight": 50, "decides": True, "max_requests": 400}]})


def prepare(folder: Path, address: str) -> None:
    """The agent `sums` in production, with 80 rollouts."""
    files = {"p.py": PROGRAM, "r.yaml": RUBRIC, "checks.py": CHECKS, "plan.yaml": PLAN}
    for name, text in {**files, "loop.yaml": FILE.format(address=address)}.items():
        (folder / name).write_text(text)
    manifest: dict[str, Any] = {
        "program": f"{folder}/p.py:Sums", "model": "openai/m", "settings": {"adapter": "chat", "parameters": {}},
        "api_base": address,
    }  # fmt: skip
    save_artifact(folder / "one", load_program(f"{folder}/p.py:Sums"), manifest, splits={}, report="")
    with Store() as store:
        registry = Registry(store.engine)
        registry.register("sums", folder / "one")
        registry.set_alias("sums@1", "champion")
    agent = assay.deployed("sums", rubric="r.yaml")
    for at in range(80):
        agent(question=f"What is {at} + 1?", unit=str(at), expected={"answer": str(at + 1)})
    agent.store.flush()


@pytest.mark.chaos
@pytest.mark.slow
def test_a_compile_that_is_killed_is_continued_and_its_result_deployed(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with running(own_folder / "requests") as address:
        prepare(own_folder, address)
        before = (own_folder / "requests").stat().st_size
        command = [sys.executable, "-m", "assay", "loop", "run", "sums", "--json"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([*command[:4], "start", "sums", "--file", "loop.yaml"], check=True, env=environment)
        first = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while (own_folder / "requests").stat().st_size < before + 20 and first.poll() is None:
            time.sleep(0.05)
        first.send_signal(signal.SIGKILL)
        first.wait()
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        report = json.loads(done.stdout)
        assert [step["step"] for step in report["steps"]] == ["improve", "register", "deploy"], report
    with Store() as store:
        rows = {step.step: step for step in Loops(store.engine).steps("sums")}
        assert Registry(store.engine).versions("sums")[-1].parent == 1
    assert (rows["improve"].attempts, rows["improve"].detail["converged"]) == (2, True)
    assert rows["improve"].detail["calls"] > 50
    assert report["deployment"]["status"] == "running"
