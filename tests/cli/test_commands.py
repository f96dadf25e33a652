"""The commands as a user types them: what is on each stream, what a stop says, a search with the embedded model."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from assay.cli.main import group, how_to_continue
from assay.traces import Rollout, Store
from rigs.command_line import assay_command

DATA = "arithmetic:terms=2-2&digits=1-1&size=80"  # few and short calls
COMPILE = ["compile", "math_qa", "--rubric", "math_qa", "--data", DATA, "--prompt-format", "lean"]
SMALL = ["--train-size", "8", "--val-size", "3", "--gate-size", "3", "--test-size", "3", "--max-search-calls", "9"]


def test_json_is_alone_on_standard_output_whatever_other_processes_write_there(tmp_path: Path) -> None:
    """A child process and a native library write to file descriptor 1, past `sys.stdout`."""
    (tmp_path / "loud.py").write_text(
        "import os, subprocess\n"
        "def check(task, prediction, rollout):\n    return 1\n"
        "subprocess.run(['echo', 'of a child process'])\n"
        "os.write(1, b'of a native library\\n')\n"
    )
    (tmp_path / "r.yaml").write_text("name: r\ncriteria:\n- {name: a, check: 'loud.py:check'}\n")
    command = [sys.executable, "-m", "assay", "judge", "lint", str(tmp_path / "r.yaml"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert json.loads(done.stdout)
    assert "of a child process" in done.stderr
    assert "of a native library" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (
            ["judge", "audit", "Is it kind?", "--scale", "no,yes"],
            "Run the same command again to continue: the answers so far are in the response cache.",
        ),
        (["judge", "audit", "Is it kind?", "--no-cache"], "What is in the store is kept."),
        (
            ["judge", "score", "Is it kind?", "--data", "d.jsonl"],
            "The results so far are stored; --resume continues from here.",
        ),
        (["compile", "math_qa"], "The results so far are stored; --resume continues from here."),
        (["traces", "rate"], "What is in the store is kept."),
    ],
)
def test_stopped_command_names_an_existing_resume_option(arguments: list[str], hint: str) -> None:
    assert how_to_continue(arguments) == hint


@pytest.mark.slow
def test_an_artifact_of_the_embedded_model_runs_and_its_calls_are_in_the_store(small_embedded: str) -> None:
    def report(*words: str) -> Any:
        done = assay_command(*words, "--json")
        assert done.code == 0, done.stderr
        return done.report

    data = report(*COMPILE, "--model", small_embedded, "--set", "temperature=0.1", *SMALL)
    assert 0 < data["search_calls"] <= 9
    assert data["cost_usd"] == 0.0
    assert (data["replaces"], data["test"]["gain"]) == (False, None)  # three gate tasks decide nothing
    stats = report("traces", "stats")
    assert stats["transitions"] == data["calls"] + data["cached"]
    assert stats["unrecorded"] == 0
    newest = report("traces", "list", "--split", "val", "--limit", "1")["rollouts"][0]
    rollout = report("traces", "show", newest["id"])
    assert rollout["transitions"][0]["request"]["messages"]
    assert rollout["transitions"][0]["token_ids"]
    assert "answer" in report("run", data["artifact"], "question=What is 20 + 22?")
    ran = report("traces", "show", report("traces", "list", "--limit", "1")["rollouts"][0]["id"])
    assert ran["inputs"] == {"question": "What is 20 + 22?"}
    assert ran["program_version"] == rollout["program_version"]  # the same program
    scored = ["evaluate", data["artifact"], "--rubric", "math_qa", "--data", DATA, "--split", "gate", "--size", "3"]
    first, again = report(*scored), report(*scored)
    assert (again["result"]["score"], again["calls"]) == (first["result"]["score"], 0)  # from the response cache


@pytest.mark.parametrize(("number", "reason"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "the user")])
@pytest.mark.slow
def test_a_stopped_job_says_what_stopped_it(number: int, reason: str, tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text(
        "import time\ndef slow(question):\n    print('begun', flush=True)\n    time.sleep(60)\n"
    )
    (tmp_path / "d.jsonl").write_text('{"question": "a", "answer": "a", "split": "val"}\n')
    job = subprocess.Popen(
        [sys.executable, "-m", "assay", "evaluate", "p.py:slow", "--rubric", "math_qa", "--data", "d.jsonl",
         "--model", "openai/none", "--api-base", "http://127.0.0.1:9", "--no-preflight"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert job.stdout is not None
    assert job.stdout.readline() == "begun\n"
    job.send_signal(number)
    _, printed = job.communicate(timeout=60)
    assert job.returncode == 130
    assert f"assay: stopped: cancelled by {reason}. " in printed


def test_a_list_of_rollouts_names_the_version_of_the_program(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        store.put_rollout(Rollout(program="p.py:P", program_version="0123456789ab", inputs={"q": "Hello"}))
    output = CliRunner().invoke(group, ["traces", "list", "--store", "s.db"]).output
    assert re.search(r" p\.py:P@0123456789ab program +– +– +Hello$", output, re.M)
    listed = CliRunner().invoke(group, ["models", "list"]).output
    assert re.match(r"name +size +licence +file\nembedded/smollm2-135m +98 MB +Apache-2\.0 +\S", listed)


def test_a_list_of_runs_has_a_dash_for_what_a_run_has_not(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        store.put_run("record-1", kind="record", config={}, status="done", started_at=0.0)
    output = CliRunner().invoke(group, ["runs", "list", "--store", "s.db"]).output
    assert output.rstrip().endswith("–  –")
    assert "None" not in output


def test_the_project_of_init_has_no_comments_for_type_checkers(tmp_path: Path) -> None:
    CliRunner().invoke(group, ["init", "made"])
    assert "type: ignore" not in (tmp_path / "made/program.py").read_text()
