"""The commands as a user types them: output, exit codes, kill and resume, two at once, artifacts that were changed."""

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from assay.cli.main import group, how_to_continue
from assay.traces import Rollout, Store

ASSAY = [sys.executable, "-c", "from assay.cli import main; main()"]
DATA = "arithmetic:terms=2-2&digits=1-1&size=80"  # few and short calls
COMPILE = [
    "compile",
    "math_qa",
    "--rubric",
    "math_qa",
    "--data",
    DATA,
    "--set",
    "temperature=0.1",
    "--prompt-format",
    "lean",
]
SMALL = ["--train-size", "8", "--val-size", "4", "--gate-size", "3", "--test-size", "3", "--max-search-calls", "14"]


def assay(*args: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*ASSAY, *args], capture_output=True, text=True, timeout=timeout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["compil"], 2, "Did you mean 'compile'"),
        (["compile", "math_qa"], 2, "Missing option '--rubric'"),
        (["compile", "mathqa", "--rubric", "math_qa", "--data", "arithmetic:size=9"], 2, "Did you mean 'math_qa'"),
        (["evaluate", "math_qa", "--rubric", "math_qa", "--data", "missing.jsonl"], 2, "no such file: missing.jsonl"),
        (
            ["evaluate", "math_qa", "--rubric", "math_qa", "--data", "arithmetic:size=60", "--set", "temperature=9"],
            2,
            "between 0.1 and 2",
        ),
        (
            ["evaluate", "math_qa", "--rubric", "math_qa", "--data", "arithmetic:size=60", "--model", "embedded/x"],
            2,
            "no embedded model",
        ),
        (["traces", "stats"], 1, "there is no store"),
        (["run", "classify", "text=x"], 2, "reads its labels from the data"),
        (["run", "math_qa", "what is 1+1"], 2, "For example: assay run math_qa 'question=what is 1+1'"),
        (
            ["evaluate", "math_qa", "--rubric", "math_qa", "--data", "arithmetic:size=60", "--set", "max_steps=true"],
            2,
            "must be a number",
        ),
        (["traces", "list", "--split", "bogus"], 2, "'bogus' must be one of train, val"),
        (["evaluate", "math_qa", "--split", "vall"], 2, "all. Did you mean 'val'?"),
        (["models", "pull", "nonsense"], 2, "the models are smollm2-135m"),
    ],
)
def test_wrong_usage_and_failures_have_their_exit_codes(args: list[str], code: int, message: str) -> None:
    done = assay(*args)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_json_is_alone_on_standard_output_whatever_other_processes_write_there(tmp_path: Path) -> None:
    """A child process and a native library write to file descriptor 1, past `sys.stdout`."""
    (tmp_path / "loud.py").write_text(
        "import os, subprocess\n"
        "def check(task, prediction, rollout):\n    return 1\n"
        "subprocess.run(['echo', 'of a child process'])\n"
        "os.write(1, b'of a native library\\n')\n"
    )
    (tmp_path / "r.yaml").write_text("name: r\ncriteria:\n- {name: a, check: 'loud.py:check'}\n")
    done = assay("judge", "lint", str(tmp_path / "r.yaml"), "--json")
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
            "What was found so far is kept; --resume continues from here.",
        ),
        (["compile", "math_qa"], "What was found so far is kept; --resume continues from here."),
        (["traces", "rate"], "What is in the store is kept."),
    ],
)
def test_stopped_command_names_an_existing_resume_option(arguments: list[str], hint: str) -> None:
    assert how_to_continue(arguments) == hint


@pytest.mark.slow
def test_audit_without_verdicts_prints_one_json_object() -> None:
    done = assay(
        "judge",
        "audit",
        "Is it kind?",
        "--model",
        "openai/none",
        "--api-base",
        "http://127.0.0.1:9/v1",
        "--threads",
        "8",
        "--json",
    )
    data = json.loads(done.stdout)
    assert (done.returncode, data["passed"]) == (1, None)
    assert data["error"].startswith("all ")
    assert data["error"] in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "code", "output"), [("Is it clear and short?", 1, "compound"), ("Is it clear?", 0, "nothing found")]
)
def test_lint_exit_code_fails_ci(tmp_path: Path, text: str, code: int, output: str) -> None:
    (tmp_path / "r.yaml").write_text(f"name: r\ncriteria:\n- {{name: a, judge: '{text}'}}\n")
    done = assay("judge", "lint", str(tmp_path / "r.yaml"))
    assert (done.returncode, output in done.stdout) == (code, True), done.stderr


@pytest.mark.model
def test_failed_audit_on_the_embedded_model_has_exit_code_1(embedded: str, tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text('{"input": "What is 2 + 2?", "good": "4", "bad": "5"}\n')
    store, cases = str(tmp_path / "a.db"), str(tmp_path / "c.jsonl")
    done = assay(
        "judge",
        "audit",
        "Is the output a right answer?",
        "--cases",
        cases,
        "--store",
        store,
        "--pass-at",
        "1",
        "--min-coverage",
        "0",
        "--json",
    )
    data = json.loads(done.stdout)
    assert done.returncode == (0 if data["passed"] else 1), done.stderr
    assert data["verdicts"] > 10
    assert (
        data["unscored"] < 0.5 * data["verdicts"]
    )  # under some attacks a model of this size gives yes and no a low probability


@pytest.fixture(scope="module")
def compiled(embedded: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """One real compile with the embedded model, in a folder of its own."""
    folder = tmp_path_factory.mktemp("compiled")
    done = subprocess.run([*ASSAY, *COMPILE, *SMALL, "--json"], capture_output=True, text=True, timeout=600, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "estimate:" in done.stderr
    return folder, json.loads(done.stdout)


@pytest.mark.model
@pytest.mark.slow
def test_compile_prints_one_json_object_with_the_documented_fields(compiled: tuple[Path, dict]) -> None:
    _, data = compiled
    assert data.keys() >= {"artifact", "optimizer", "search_calls", "calls", "tokens", "cost_usd", "replaces", "test"}
    assert data["replaces"] is False  # three gate tasks decide nothing, so that the test stays sealed
    assert data["test"] == {"baseline": None, "compiled": None, "gain": None}
    assert 0 < data["search_calls"] <= 14
    assert data["cost_usd"] == 0.0


@pytest.mark.model
@pytest.mark.slow
def test_the_artifact_runs_evaluates_and_its_calls_are_in_the_store(compiled: tuple[Path, dict]) -> None:
    folder, data = compiled

    def invoked(*args: str) -> dict:
        done = subprocess.run([*ASSAY, *args, "--json"], capture_output=True, text=True, timeout=300, cwd=folder)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    stats = invoked("traces", "stats")
    assert stats["transitions"] == data["calls"] + data["cached"]
    assert stats["unrecorded"] == 0
    scored = ["--rubric", "math_qa", "--data", DATA, "--split", "gate", "--size", "3"]
    evaluated = invoked("evaluate", data["artifact"], *scored)
    newest = invoked("traces", "list", "--split", "gate", "--limit", "1")["rollouts"][0]
    rollout = invoked("traces", "show", newest["id"])
    assert rollout["transitions"][0]["request"]["messages"]
    assert rollout["transitions"][0]["token_ids"]
    assert "answer" in invoked("run", data["artifact"], "question=What is 20 + 22?")
    ran = invoked("traces", "show", invoked("traces", "list", "--limit", "1")["rollouts"][0]["id"])
    assert ran["inputs"] == {"question": "What is 20 + 22?"}
    assert ran["transitions"]
    assert ran["program_version"] == rollout["program_version"]  # the same program
    repeated = invoked("evaluate", data["artifact"], *scored)
    assert repeated["result"]["score"] == evaluated["result"]["score"]  # from the response cache
    assert repeated["calls"] == 0


@pytest.mark.model
@pytest.mark.slow
def test_changed_newer_and_incomplete_artifacts_are_refused(compiled: tuple[Path, dict], tmp_path: Path) -> None:
    folder, data = compiled

    def broken(name: str) -> Path:
        return Path(shutil.copytree(folder / data["artifact"], tmp_path / name))

    edited = broken("edited")
    (edited / "program.json").write_text((edited / "program.json").read_text().replace("calculator", "oracle"))
    manifest = broken("manifest")
    (manifest / "manifest.json").write_text(
        (manifest / "manifest.json").read_text().replace('"temperature": 0.1', '"temperature": 1.9')
    )
    newer = broken("newer")
    (newer / "manifest.json").write_text(
        json.dumps({**json.loads((newer / "manifest.json").read_text()), "format": 99})
    )
    missing = broken("missing")
    (missing / "program.json").unlink()
    garbled = broken("garbled")
    (garbled / "manifest.json").write_text("{")
    for path, message in (
        (edited, "program.json was changed"),
        (manifest, "manifest.json was changed"),
        (newer, "format 99"),
        (missing, "cannot read program.json"),
        (garbled, "cannot read"),
    ):
        done = assay("run", str(path), "question=1+1")
        assert done.returncode == 1
        assert message in done.stderr


def _until(condition: Callable[[], bool], timeout_s: float = 180) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.5)


def _transitions() -> int:
    """LM calls in this folder's store so far, read beside the process that writes them."""
    if not Path(".assay/assay.db").is_file():
        return 0
    with sqlite3.connect("file:.assay/assay.db?mode=ro", uri=True) as db:
        try:
            return int(db.execute("SELECT count(*) FROM transitions").fetchone()[0])
        except sqlite3.OperationalError:  # the tables are not there yet
            return 0


@pytest.mark.model
@pytest.mark.slow
def test_a_killed_compile_resumes_where_it_stopped(embedded: str, tmp_path: Path) -> None:
    command = [*COMPILE, *SMALL, "--json"]
    process = subprocess.Popen([*ASSAY, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    _until(lambda: _transitions() >= 6)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    before = json.loads(assay("traces", "stats", "--json").stdout)
    assert before["transitions"] >= 6
    done = assay(*command, "--resume", timeout=600)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["repeated_calls"] <= 4  # what was in flight; what was answered before the kill is not asked again
    assert data["search_calls"] <= 14 + 1  # and still counts under the cap
    resumed = json.loads(assay(*command, "--resume").stdout)  # a finished run is replayed
    assert (resumed["calls"], resumed["winner"]) == (data["calls"], data["winner"])


@pytest.mark.model
@pytest.mark.slow
def test_ctrl_c_keeps_the_best_result(embedded: str) -> None:
    process = subprocess.Popen([*ASSAY, *COMPILE, *SMALL], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    _until(lambda: _transitions() > 0)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "--resume continues" in errors
    assert json.loads(assay("traces", "stats", "--json").stdout)["transitions"] > 0


@pytest.mark.model
@pytest.mark.slow
def test_two_compiles_in_one_folder_do_not_conflict(embedded: str) -> None:
    command = [*COMPILE, *SMALL, "--optimizer", "labeled"]  # a short search: only the folder is tested here
    first = subprocess.Popen([*ASSAY, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    _until(lambda: _transitions() > 0)
    same = assay(*command)
    assert same.returncode == 2
    assert "running already" in same.stderr
    other = assay(*command, "--seed", "1", timeout=600)
    assert other.returncode == 0, other.stderr
    output, errors = first.communicate(timeout=600)
    assert first.returncode == 0, errors
    names = {path.name.removesuffix("-unproven") for path in Path(".assay/artifacts").iterdir()}
    assert len(names) == 2
    assert "artifact:" in output


@pytest.mark.model
def test_standard_output_has_only_json_if_the_program_prints(embedded: str, tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text(
        "import dspy\nprint('loaded')\nclass P(dspy.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.predict = dspy.Predict('question -> answer')\n    def forward(self, question):\n"
        "        print('runs')\n        return '4'\n"
    )
    done = assay(
        "evaluate",
        "p.py:P",
        "--rubric",
        "math_qa",
        "--data",
        "arithmetic:size=60",
        "--size",
        "3",
        "--min-coverage",
        "0",
        "--no-preflight",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["result"]["n"] == 3
    assert done.stderr.count("loaded") == 1
    ran = assay("run", "p.py:P", "question=What is 2 + 2?", "--json")
    assert json.loads(ran.stdout) == {"answer": "4"}


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
