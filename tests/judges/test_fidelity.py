"""Fidelity cards: simulated users that follow their profile, and users that each make one fault."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dspy
import pytest
from click.testing import CliRunner

from assay.cli.main import group
from assay.commands.judge_fidelity import audit_user
from assay.datasets import load_tasks
from assay.errors import ConfigError, DataError
from assay.judges.quality.fidelity import FAULTS, faults_of, fidelity_card, interview
from assay.programs import RuleBasedUser
from assay.testing import scripted_lm

DATA = "conversations:?size=12&seed=4&changes=0.5"


Change = Callable[[Any, Any, Any], Any]


class Faulty(dspy.Module):
    """The rule-based user with one fault: `change` gives its turn, of which None leaves it as it is."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change

    def forward(self, profile: Any, messages: Any) -> dspy.Prediction:
        turn = RuleBasedUser()(profile=profile, messages=messages)
        message = self.change(turn, profile, messages)
        if message is None:
            return turn
        return dspy.Prediction(message=message, ended="done" if message == "Goodbye." else "")


def withheld(turn: Any, profile: Any, messages: Any) -> str | None:
    secret = list(profile["facts"].values())[-1]["value"]
    return "I would rather not say." if secret.casefold() in turn.message.casefold() else None


def told(turn: Any, profile: Any, messages: Any) -> str | None:
    return None if messages else " ".join([turn.message, *(fact["says"] for fact in profile["facts"].values())])


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda turn, profile, messages: None if messages else "Hello there.", "no_goal"),
        (lambda turn, profile, messages: f"{turn.message} {profile['goal']}" if len(messages) == 4 else None,
         "repeated_goal"),
        (lambda turn, profile, messages: "My size is 4711." if "shoe" in str(messages[-1:]) else None, "invented"),
        (told, "told_answer"),
        (withheld, "withheld"),
        (lambda turn, profile, messages: "Goodbye." if len(messages) == 6 else None, "stopped_early"),
        (lambda turn, profile, messages: "And one more thing." if turn.ended else None, "never_stopped"),
    ],
)  # fmt: skip
def test_each_fault_is_found_in_all_runs_and_no_other_one(change: Change, fault: str) -> None:
    faults = [faults_of(interview(Faulty(change), task)) for task in load_tasks(DATA)]
    assert all(made[fault] for made in faults)
    others = {name for made in faults for name, value in made.items() if value} - {fault}
    assert others <= ({"told_answer"} if fault == "repeated_goal" else set())


def test_the_rule_based_user_has_no_fault_and_an_exact_interval() -> None:
    card = fidelity_card([interview(RuleBasedUser(), task) for task in load_tasks(DATA)])
    assert card["passed"]
    assert card["faithful"]["share"] == 1.0
    assert card["faithful"]["low"] == pytest.approx(0.025 ** (1 / 12))  # Clopper-Pearson, 12 of 12
    assert {name: fault["share"] for name, fault in card["faults"].items()} == dict.fromkeys(FAULTS, 0.0)
    assert card["faults"]["invented"]["high"] == pytest.approx(1 - 0.025 ** (1 / 12))


def test_the_audit_of_a_model_records_its_calls_and_reports_what_it_cost(own_folder: Path) -> None:
    def stubborn(request: Any) -> str:
        return json.dumps({"say": "done"})

    report = audit_user("model", data=DATA, lm=scripted_lm(stubborn), tasks=3)
    assert report.faults["stopped_early"]["share"] == 1.0
    assert report.calls == 3
    assert not report.passed


class Raises(dspy.Module):
    def forward(self, profile: Any, messages: Any) -> Any:
        raise RuntimeError("no user today")


class Hangs(dspy.Module):
    def forward(self, profile: Any, messages: Any) -> Any:
        time.sleep(5)


class Exits(dspy.Module):
    def forward(self, profile: Any, messages: Any) -> Any:
        raise SystemExit(3)


class Mute(dspy.Module):
    def forward(self, profile: Any, messages: Any) -> Any:
        return dspy.Prediction(text="hello")


def test_users_that_fail_are_counted_and_those_that_break_the_protocol_are_refused(own_folder: Path) -> None:
    report = audit_user(Raises(), data=DATA, tasks=2, lm=scripted_lm(lambda request: "{}"))
    assert (report.failed, report.passed) == (2, False)
    assert "no user today" in report.why_failed[0]
    report = audit_user(Exits(), data=DATA, tasks=2, lm=scripted_lm(lambda request: "{}"))
    assert (report.failed, report.passed) == (2, False)
    with pytest.raises(DataError, match="UserProgram"):
        audit_user(Mute(), data=DATA, tasks=1, lm=scripted_lm(lambda request: "{}"))
    with pytest.raises(ConfigError, match="callable"):
        audit_user(3, data=DATA)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"one of rules, model, or file\.py:Class\. Did you mean 'rules'\?"):
        audit_user("rule", data=DATA)
    with pytest.raises(DataError, match="no input 'user'"):
        audit_user("rules", data="arithmetic:size=3")


def test_a_user_that_hangs_is_given_up_after_the_time_limit(own_folder: Path) -> None:
    report = audit_user(Hangs(), data=DATA, tasks=1, task_timeout=0.1, lm=scripted_lm(lambda request: "{}"))
    assert (report.failed, report.passed) == (1, False)
    assert "longer than the limit of 0.1 s" in report.why_failed[0]


@pytest.mark.slow
def test_the_command_prints_the_card_and_fails_with_a_faulty_user(own_folder: Path) -> None:
    result = CliRunner().invoke(group, ["judge", "fidelity", "rules", "--data", DATA, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["passed"]
    Path("users.py").write_text(
        "import dspy\n\n\nclass Bye(dspy.Module):\n    def forward(self, profile, messages):\n"
        "        return dspy.Prediction(message='Bye.', ended='done')\n"
    )
    result = CliRunner().invoke(group, ["judge", "fidelity", "users.py:Bye", "--data", DATA, "--tasks", "5"])
    assert result.exit_code == 1
    assert "stopped_early" in result.stdout
    assert "FAILED: at most 5% of the runs with a fault; 5 runs" in " ".join(result.stdout.split())
