"""Biases of a judge, found by edits of the user's own items, and fidelity cards of simulated users."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dspy
import numpy as np
import pytest
from labelled_items import labels_file

from assay.commands.judge_audit import audit_judge, audit_user
from assay.datasets import load_tasks
from assay.errors import ConfigError, DataError
from assay.judges import PointwiseJudge
from assay.judges.quality.agreement import Answers
from assay.judges.quality.fidelity import FAULTS, assess_biases, edits, faults_of, fidelity_card, interview
from assay.programs import RuleBasedUser
from assay.rubrics import JudgeSpec
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


YES_NO = JudgeSpec(text="Good?")
NAMES = tuple(edits("quality", "m"))


def answers(values: Any, spec: JudgeSpec = YES_NO) -> Answers:
    return Answers([spec.scale[int(value)] for value in values], [float(value) for value in values])


def failed(strength: float, *, noise: float, seed: int, edit: str = "length", n: int = 60) -> dict[str, bool]:
    """Whether each edit failed, for a judge that one edit moves up with a probability, and that is noisy."""
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, 2, n)

    def judged(moved: float = 0.0) -> Answers:
        values = np.where(rng.random(n) < noise, 1 - truth, truth)
        return answers(np.where(rng.random(n) < moved, 1, values))

    changed = {name: judged(strength if name == edit else 0.0) for name in NAMES}
    results = assess_biases(judged(), judged(), changed, YES_NO)
    return {name: entry["passed"] is False for name, entry in results.items()}


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_judge_that_always_follows_an_edit_is_found_on_60_items(noise: float) -> None:
    assert all(failed(1.0, noise=noise, seed=seed)["length"] for seed in range(20))


def test_a_judge_that_follows_an_edit_in_three_of_ten_is_mostly_found() -> None:
    assert sum(failed(0.3, noise=0.02, seed=seed)["length"] for seed in range(20)) >= 10


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.2])
def test_a_noisy_judge_without_a_bias_rarely_fails(noise: float) -> None:
    failures = sum(any(failed(0.0, noise=noise, seed=seed).values()) for seed in range(20))
    assert failures <= 3


def test_a_significant_change_that_is_small_is_no_bias() -> None:
    places = [0.5] * 60
    before = Answers(["no"] * 60, places)
    after = Answers(["no"] * 60, [place + 0.02 for place in places])
    entry = assess_biases(before, before, {"length": after}, YES_NO)["length"]
    assert entry["p"] < 0.01
    assert entry["passed"] is True
    large = Answers(["no"] * 60, [place + 0.1 for place in places])
    assert assess_biases(before, before, {"length": large}, YES_NO)["length"]["passed"] is False


def audited(tmp_path: Path, *swayed: str) -> Any:
    """The audit of a judge that finds lovely answers good, and those with one of these texts."""

    def script(request: Any) -> dict[str, float]:
        text = str(request.messages[-1].text)
        good = "lovely" in text.partition("output: ")[2] or any(each in text for each in swayed)
        return {"yes": 0.95, "no": 0.05} if good else {"yes": 0.05, "no": 0.95}

    judge, labels = PointwiseJudge({"text": "Is it a good answer?"}), labels_file(tmp_path, good="lovely", count=20)
    return audit_judge(judge, labels=labels, lm=scripted_lm(script, logprobs=True), store=tmp_path / "s.db")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("swayed", "found"), [((), []), (("Harvard",), ["authority"]), (("Answer\\n\\n",), ["formatting"])]
)
def test_an_audit_with_labels_finds_what_moves_the_verdicts_on_them(
    tmp_path: Path, swayed: tuple[str, ...], found: list[str]
) -> None:
    report = audited(tmp_path, *swayed)
    assert [name for name, entry in report.biases.items() if not entry["passed"]] == found
    assert not (found and report.passed)


@pytest.mark.slow
def test_injections_that_change_an_eighth_of_the_verdicts_fail(tmp_path: Path) -> None:
    report = audited(tmp_path, "checked by three experts")  # one of six injections
    entry = report.attacks["instructions hidden in the text"]
    assert 0.1 < entry["flip_rate"] < 0.2
    assert not entry["passed"]
    assert not report.passed
