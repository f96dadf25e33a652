"""`assay registry` and `assay deploy` on the command line, from registration to rollback."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from production import artifact

import assay
from assay.cli import group
from assay.rubrics import Criterion, Rubric


def run(*words: str, code: int = 0) -> Any:
    """The JSON that a command prints."""
    result = CliRunner().invoke(group, [*words, "--json"], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def text(*words: str) -> str:
    return CliRunner().invoke(group, [*words], catch_exceptions=False).output


@pytest.fixture
def agent(own_folder: Path) -> Path:
    artifact(own_folder / "one")
    artifact(own_folder / "two", "return dspy.Prediction(answer='no')")
    assert run("registry", "register", "support", "one")["name"] == "support@1"
    assert run("registry", "register", "support", "two", "--parent", "support@1")["parent"] == 1
    return own_folder


def is_right(task: Any, prediction: Any, rollout: Any) -> bool:
    """The candidate always, the champion on every third task."""
    return prediction["answer"] == "no" or int(task.inputs["question"]) % 3 == 0


RUBRIC = Rubric("right", [Criterion(name="right", weight=1, check=is_right)])
PLAN = """
steps:
- {weight: 50, decides: true, requests: 20, max_requests: 2000}
- {weight: 90, requests: 10}
metrics:
- {success_gain: 0.1}
- {name: error_rate, failure_above: 0.5}
"""


@pytest.mark.slow
def test_a_version_goes_from_registration_to_production_and_back(agent: Path) -> None:
    (agent / "plan.yaml").write_text(PLAN)
    started = run("deploy", "start", "support@2", "--plan", "plan.yaml")
    assert started["expected"]["better"]["promoted"] > 0.8
    assert run("deploy", "status", "support")["status"] == "running"
    assert "  score: nothing measured yet" in text("deploy", "status", "support")
    production = assay.deployed("support", rubric=RUBRIC)
    for at in range(200):
        production(question=str(at), unit=str(at))
    production.store.flush()
    status = run("deploy", "status", "support")
    assert {"deployment", "stage", "share", "decision", "arms", "reason"} <= status.keys()
    assert status["decision"] == "next", status
    assert (status["decision"], run("deploy", "advance", "support", "--dry-run")["decision"]) == ("next", "next")
    assert re.search(r"  score: champion 0\.[234]", text("deploy", "status", "support"))  # a third of some 100 tasks
    assert run("deploy", "advance", "support")["rule"] == "success"
    assert run("deploy", "promote", "support", "--reason", "enough")["status"] == "promoted"
    assert "support@2" in text("registry", "show", "support")
    shown = text("registry", "show", "support@1")
    assert not any(mark in shown for mark in "{}[]"), shown
    assert run("deploy", "rollback", "support", "--reason", "complaints")["status"] == "rolled_back"
    assert "last decision (order): complaints" in text("deploy", "status", "support")
    rules = [row["rule"] for row in run("deploy", "history", "support")["decisions"]]
    assert rules == ["checks", "success", "order", "order"]
    assert [row["aliases"] for row in run("registry", "list", "support")["versions"]] == [
        ["champion"], ["candidate", "previous"],
    ]  # fmt: skip
    scores = run("registry", "capabilities", "support")["capabilities"]
    assert {row["version"] for row in scores} == {"support@1", "support@2"}


SHADOW_PLAN = PLAN.replace("steps:", "steps:\n- {shadow: true, requests: 30}")


@pytest.mark.parametrize(("candidate", "rule"), [("support@2", "step"), ("support@3", "failure_loss")])
@pytest.mark.slow
def test_the_shadow_step_replays_what_was_recorded(agent: Path, candidate: str, rule: str) -> None:
    artifact(agent / "three", "raise ValueError('broken')")
    run("registry", "register", "support", "three")
    (agent / "plan.yaml").write_text(SHADOW_PLAN)
    (agent / "checks.py").write_text(
        "def right(task, prediction, rollout):\n    return len(prediction['answer']) > 0\n"
    )
    (agent / "rubric.yaml").write_text("name: right\ncriteria:\n- {name: right, weight: 1, check: checks.py:right}\n")
    production = assay.deployed("support", rubric="rubric.yaml")
    for at in range(20):
        production(question=str(at))
    production.store.flush()
    forced = ("--force",) if rule == "failure_loss" else ()  # it answers none of the recorded rollouts
    run("deploy", "start", candidate, "--plan", "plan.yaml", *forced)
    with pytest.raises(assay.AssayError, match=r"\b30\b.* 20 scored and 0 unscored"):
        run("deploy", "advance", "support", "--rubric", "rubric.yaml")
    for at in range(20, 40):
        production(question=str(at))
    production.store.flush()
    decided = run("deploy", "advance", "support", "--rubric", "rubric.yaml")
    assert (decided["rule"], decided["requests"]["candidate"]) == (rule, 30)
    assert len(run("traces", "list", "--phase", "shadow", "--limit", "100")["rollouts"]) == 30


def test_no_alias_is_set_to_a_changed_artifact_and_a_missing_one_is_named(agent: Path) -> None:
    state = agent / "two" / "program.json"
    before = state.read_text()
    state.write_text(before + " ")
    with pytest.raises(assay.AssayError, match=r"support@2 cannot be loaded: .*program\.json was changed"):
        run("registry", "alias", "support@2", "champion")
    assert "note: support@2 cannot be loaded" in text("registry", "show", "support@2")
    (agent / "two").rename(agent / "elsewhere")  # on another machine
    assert "note: support@2 cannot be loaded: no artifact at" in text("registry", "alias", "support@2", "canary")
    assert run("registry", "show", "support@1")["problem"] is None


def test_diff_shows_the_lines_of_code_that_differ(agent: Path) -> None:
    data = run("registry", "diff", "support@1", "support@2")
    assert data["changed"]["program"][1].endswith("two-source/agent.py:Answer")
    (change,) = data["code"]["files"]
    assert (change["file"], change["left_out"]) == ("source/agent.py", 0)
    assert change["a"] != change["b"]
    assert data["code"]["a"] != data["code"]["b"]
    shown = text("registry", "diff", "support@1", "support@2")
    assert "-        return dspy.Prediction(answer='yes')\n+        return dspy.Prediction(answer='no')" in shown
    same = run("registry", "diff", "support@1", "support@1")
    assert (same["changed"], same["prompts"], same["code"]["files"]) == ({}, {}, [])
    assert text("registry", "diff", "support@1", "support@1") == (
        "no difference in settings, model, data, prompts or code\n"
    )


def test_wrong_usage_of_registry_commands_is_named(agent: Path) -> None:
    Path("loop.yaml").write_text("rubric: gone.yaml\n")
    for words, message in (
        ("deploy rollback x", "there is no deployment 'x'"),
        ("registry register other nowhere", "is not an artifact"),
        ("deploy start support@2 --suite-data x.csv", "belong together"),
        ("registry suite support --data gone.csv --rubric math_qa", "no such file: gone.csv"),
        ("registry suite support --data arithmetic: --rubric gone.yaml", "no such file: gone.yaml"),
        ("registry suite support --data arithmetic: --rubric math", "Did you mean 'math_qa'"),
        ("loop start support --file loop.yaml", "no such file: .*gone.yaml"),
    ):
        with pytest.raises(assay.AssayError, match=message):
            run(*words.split())


@pytest.mark.slow
def test_a_suite_is_shown_and_removed_only_on_request(agent: Path) -> None:
    named = {"threshold": 0.5, "pass_rate": 0.0, "pass_at": 0.5, "data": "arithmetic:", "rubric": "math_qa"}
    words = ("registry", "suite", "support")
    assert text(*words) == "the agent has no validation suite\n"
    assert run(*words, "--data", "arithmetic:", "--rubric", "math_qa", "--threshold", "0.5")["suite"] == named
    assert run(*words)["suite"] == named  # and again: showing it did not remove it
    assert run(*words)["suite"] == named
    with pytest.raises(assay.AssayError, match="would have no effect"):
        text(*words, "--threshold", "0.9")
    with pytest.raises(assay.AssayError, match="remove: excludes"):
        text(*words, "--remove", "--threshold", "0.9")
    assert run(*words, "--remove")["suite"] is None
    assert run(*words)["suite"] is None
    assert "the agent has no routing" in text("registry", "route", "support")


@pytest.mark.parametrize("words", ["deploy start support@2", "registry list"])
def test_commands_that_read_create_no_store(own_folder: Path, words: str) -> None:
    with pytest.raises(assay.AssayError, match="no store"):
        run(*words.split())
    assert not (own_folder / ".assay").exists()
