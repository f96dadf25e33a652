"""The sealed test is opened once, and what is unscored is never a number."""

import asyncio
import json
import math
from typing import Any

import pytest
from contract_files import Contract
from contract_project import Project

import assay
from assay.rubrics import Criterion, Essential, Rubric

TASK = {"question": "What is 3 + 1?", "answer": "4"}
ANSWER = {"answer": "4"}


def failing(task: Any, prediction: Any, rollout: Any) -> float:
    raise ValueError("the check is broken")


def without_grade(task: Any, prediction: Any, rollout: Any) -> float:
    return math.nan


def good(task: Any, prediction: Any, rollout: Any) -> float:
    return 1.0


# -- the sealed test


def test_a_candidate_that_is_not_better_leaves_the_test_sealed(project: Project) -> None:
    report = project.report("compile", "sums.py:Sums", "--optimizer", "labeled", "--gate-size", "3", "--val-size", "3")
    assert (report["replaces"], report["test_openings"]) == (False, None)
    assert report["test"] == {"baseline": None, "compiled": None, "gain": None}
    assert project.report("traces stats")["splits"].get("test") is None


def test_every_evaluation_on_the_test_split_is_counted(project: Project) -> None:
    counts = [
        project.report("evaluate", "sums.py:successor", "--split", "test")["test_openings"]["this_store"]
        for _ in range(2)
    ]
    assert counts == [1, 2]
    assert project.report("evaluate", "sums.py:successor", "--split", "gate")["test_openings"] is None


def stored(project: Project, *filters: str) -> list[dict[str, Any]]:
    done = project.run("traces", "list", *filters, "--json")
    rows: list[dict[str, Any]] = done.report["rollouts"]
    return rows


def test_a_task_is_in_the_same_split_in_every_command(project: Project, contract: Contract) -> None:
    splits = assay.datasets.load_splits(str(project.folder / "d.jsonl"))
    contract.check("splits", "train", sorted(task.inputs["question"] for task in splits.train))
    contract.check("splits", "val", sorted(task.inputs["question"] for task in splits.val))


# -- what is unscored


@pytest.mark.parametrize("check", [failing, without_grade])
def test_a_check_that_fails_leaves_its_criterion_and_not_a_zero(check: Any) -> None:
    rubric = Rubric("r", [Criterion(name="a", check=good), Criterion(name="b", check=check)])
    result = rubric.score(TASK, ANSWER)
    assert result.value == 1.0
    only = Rubric("r", [Criterion(name="b", check=check)]).score(TASK, ANSWER)
    assert math.isnan(only.value)


@pytest.mark.parametrize("check", [failing, without_grade])
def test_an_essential_criterion_without_a_grade_makes_the_score_unscored(check: Any) -> None:
    rubric = Rubric(
        "r", [Criterion(name="a", check=good), Criterion(name="b", check=check, essential=Essential(pass_at=1, cap=0))]
    )
    assert math.isnan(rubric.score(TASK, ANSWER).value)


def test_a_score_is_the_weighted_mean_of_what_was_graded() -> None:
    rubric = Rubric(
        "r",
        [
            Criterion(name="a", weight=3, check=good),
            Criterion(name="b", weight=1, check=lambda *_: 0.0),
            Criterion(name="c", weight=-1, check=lambda *_: 0.5),
        ],
    )
    assert rubric.score(TASK, ANSWER).value == pytest.approx((3 * 1 + 1 * 0 - 1 * 0.5) / 4)


def test_a_completion_without_a_grade_has_the_reward_none() -> None:
    def of_digits(task: Any, prediction: Any, rollout: Any) -> float:
        return float(prediction["answer"] == "4") if prediction["answer"].isdigit() else math.nan

    reward = Rubric("r", [Criterion(name="right", check=of_digits)]).trl_reward()
    values = asyncio.run(reward(prompts=["q"] * 3, completions=["4", "four", "5"], answer=["4"] * 3))
    assert values == [1.0, None, 0.0]


def test_a_failed_agent_is_0_and_a_failed_server_is_unscored(project: Project) -> None:
    project.write("fails.py", "def broken(question):\n    raise ValueError('no')\n")
    agent = project.run("evaluate", "fails.py:broken", "--no-preflight", "--size", "2", "--json").report["result"]
    server = project.run(
        "evaluate", "sums.py:Sums", "--no-preflight", "--size", "2", "--api-base", "http://127.0.0.1:9/v1", "--json"
    ).report["result"]
    assert (agent["score"], agent["failed"], agent["unscored"]) == (0.0, 2, 0)
    assert (server["score"], server["unscored"]) == (None, 2)
    assert {row["score"] for row in stored(project, "--program", "sums.py:Sums")} == {None}


def test_an_unscored_task_counts_in_neither_side_of_a_comparison(project: Project) -> None:
    project.write(
        "checks.py",
        "def odd(task, prediction, rollout):\n"
        "    number = int(task.inputs['question'].split()[2])\n"
        "    return float('nan') if number % 2 else float(prediction['answer'] == str(number + 1))\n",
    )
    project.write("odd.yaml", "name: odd\ncriteria:\n- {name: odd, check: checks.py:odd}\n")
    report = project.run(
        "compare", "sums.py:successor", "sums.py:mistaken", "--rubric", "odd.yaml", "--min-coverage", "0", "--json"
    ).report
    scored = [task for task in report["tasks"] if task["a"] is not None]
    assert report["gain"]["n"] == len(scored) < len(report["tasks"])
    assert report["a"]["score"] == report["b"]["score"] == 1.0


def test_the_store_holds_null_and_not_nan_for_an_unscored_rollout(project: Project) -> None:
    project.write("checks.py", "def absent(task, prediction, rollout):\n    return float('nan')\n")
    project.write("absent.yaml", "name: absent\ncriteria:\n- {name: absent, check: checks.py:absent}\n")
    project.run("evaluate", "sums.py:successor", "--rubric", "absent.yaml", "--size", "3", "--no-preflight")
    rows = stored(project)
    assert {row["score"] for row in rows} == {None}
    assert "NaN" not in json.dumps(rows)
