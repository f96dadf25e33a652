"""The commands as a user types them: what is on each stream, what a stop says, lists, `deploy simulate`."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from assay.cli import command_of, how_to_continue
from assay.commands import COMMANDS, command_class
from assay.commands.deploy import simulate_plan
from assay.errors import ConfigError
from assay.support.options import options_of
from assay.traces import Rollout, Store
from rigs.command_line import assay_command

EVERY_OPTION = {name for words in COMMANDS for name in options_of(command_class(words))}


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


KEPT = "What is in the store is kept."
RESUMED = "The results so far are stored; --resume continues from here."
CACHED = "Run the same command again to continue: the answers so far are in the response cache."


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("judge audit j --scale no,yes", CACHED),
        ("judge audit j --no-cache", KEPT),
        ("judge score j --data d.jsonl", RESUMED),
        ("compile math_qa", RESUMED),
        ("traces rate", KEPT),
    ],
)
def test_stopped_command_names_an_existing_resume_option(command: str, hint: str) -> None:
    assert how_to_continue(command.split()) == hint


def test_a_failure_of_the_database_is_said_without_its_statement(own_folder: Path) -> None:
    with Store() as store, store.engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE rollouts")
    done = assay_command("traces", "list", "--json")
    assert (done.code, done.report) == (1, {"stopped": "the database failed: no such table: rollouts"})
    assert "SELECT" not in done.stderr


def test_lists_name_the_version_of_a_program_and_have_a_dash_for_what_a_row_has_not(own_folder: Path) -> None:
    with Store() as store:
        store.put_rollout(Rollout(program="p.py:P", program_version="0123456789ab", inputs={"q": "Hello"}))
        store.put_run("record-1", kind="record", config={}, status="done", started_at=0.0)
    output = assay_command("traces", "list").stdout
    assert re.search(r" p\.py:P@0123456789ab program +– +– +Hello$", output, re.M)
    output = assay_command("runs", "list").stdout
    assert output.rstrip().endswith("–  –")
    assert "None" not in output
    listed = assay_command("models", "list").stdout
    assert re.match(r"name +size +licence +file\nembedded/smollm2-135m +98 MB +Apache-2\.0 +\S", listed)


def test_a_worse_candidate_is_rolled_back_and_the_shares_add_up() -> None:
    flags = ["--base", "0.7", "--effect", "-0.25", "--runs", "10", "--seed", "1", "--json"]
    report = assay_command("deploy", "simulate", *flags).report
    assert report["rolled_back"] == 1.0
    assert report["promoted"] + report["rolled_back"] + report["undecided"] == pytest.approx(1)
    assert report["step_requests"][0] == 100  # the replay
    assert len(report["step_requests"]) == 5
    assert {"requests_median", "candidate_requests_median", "runs"} < report.keys()


def test_a_custom_plan_is_simulated_and_its_goal_can_be_overridden(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("steps:\n- {weight: 50, decides: true, max_requests: 300}\nmetrics:\n- {success_gain: 0.0}\n")
    options = {"plan": str(path), "effect": 0.3, "runs": 10}
    assert simulate_plan(**options).promoted > 0.8  # type: ignore[arg-type]
    strict = simulate_plan(goal=0.9, **options)  # type: ignore[arg-type]
    assert (strict.promoted, strict.rules) == (0.0, {"inconclusive": 10})


def test_values_out_of_range_and_a_missing_plan_are_refused() -> None:
    for name, value in (("base", 1.2), ("runs", 0), ("users", 1), ("effect", -2.0), ("plan", "no.yaml")):
        with pytest.raises(ConfigError, match=r"no\.yaml" if name == "plan" else name):
            simulate_plan(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("words", COMMANDS)
def test_help_names_settings_as_flags_that_the_command_has(words: str) -> None:
    command, own = command_of(words.split()), options_of(command_class(words))
    texts = [command.help, *(getattr(parameter, "help", "") for parameter in command.params)]
    assert [name for text in texts for name in re.findall(r"`(\w+)`", text or "") if name in own] == []
    named = {name for option in own.values() for name in re.findall(r"`(\w+_\w+)", option.help)}
    assert named & EVERY_OPTION <= own.keys()
    headings = {getattr(parameter, "group", "Output") for parameter in command.params}
    assert [heading for heading in headings if len(heading.split()) > 12 or ". " in heading] == []
