"""Replays of stage 0: tools with side effects are answered from the recording."""

from pathlib import Path

import pytest
from production import artifact

import assay
from assay.commands.advancing import replay
from assay.commands.deploy import advance_deployment
from assay.deployment.decisions import advance
from assay.deployment.deployments import Deployments
from assay.deployment.plan import Metric, Plan, Step
from assay.errors import DeploymentError
from assay.programs.toolbox import function_tool
from assay.rubrics import Criterion, Rubric
from assay.rubrics.checks import exact
from assay.traces import Store
from assay.traces.listening import NotInRecording, RecordedToolError, ToolReplay, has_side_effects
from assay.traces.records import ToolCall

RUBRIC = Rubric("any", [Criterion(name="any", weight=1, check=lambda task, prediction, rollout: True)])
PLAN = Plan(
    steps=(Step(shadow=True, requests=3), Step(weight=50, decides=True)), metrics=(Metric(success_gain=0.1),)
)  # fmt: skip
ORDERS = """import assay
        def order(item: str) -> str:
            with open('orders.txt', 'a') as file:
                file.write(item + ' ')
            return 'ordered ' + item
        answer = dspy.Tool(assay.side_effects(order))(item={item})
        return dspy.Prediction(answer=answer)"""


def test_a_replay_runs_no_tool_with_side_effects(own_folder: Path) -> None:
    with Store() as store:
        deployments = Deployments(store.engine)
        deployments.registry.register("shop", artifact(own_folder / "one", ORDERS.replace("{item}", "'tea'")))
        other = ORDERS.replace("{item}", "'jam' if question == '2' else 'tea'")
        deployments.registry.register("shop", artifact(own_folder / "two", other))
        deployments.registry.set_alias("shop@1", "champion")
        production = assay.deployed("shop", rubric=RUBRIC)
        for question in "012":
            assert production(question=question).answer == "ordered tea"
        production.store.flush()
        deployment = deployments.start("shop@2", PLAN)
        assert replay(deployments, deployment, rubric=RUBRIC, store=None) == 3
        assert (own_folder / "orders.txt").read_text() == "tea tea tea "
        pairs = deployments.shadow(deployment.id, PLAN.metrics[0])
        assert (list(pairs.differences), pairs.missing) == ([0.0, 0.0], 1)  # jam was not ordered before
        assert advance(deployments, deployment.id, now=2e9).action == "next"  # one of three is below max_missing


def test_rollouts_that_nothing_could_score_are_counted_apart_from_missing_ones(own_folder: Path) -> None:
    compares = Rubric("exact", [Criterion(name="exact", weight=1, check=exact)])
    with Store() as store:
        deployments = Deployments(store.engine)
        for name in ("one", "two"):
            deployments.registry.register("shop", artifact(own_folder / name, ORDERS.replace("{item}", "'tea'")))
        deployments.registry.set_alias("shop@1", "champion")
        deployment = deployments.start("shop@2", PLAN)
        production = assay.deployed("shop", rubric=compares)
        for question in "01234567":
            production(question=question)
        production.store.flush()
        with pytest.raises(DeploymentError, match=r"\b3\b.* 0 scored and 8 unscored .*expected="):
            advance_deployment(deployment.id)
        for question in "01":
            production(question=question, expected={"answer": "ordered tea"})
        production.store.flush()
        with pytest.raises(DeploymentError, match=r"\b3\b.* 2 scored and 8 unscored .*expected="):
            advance_deployment(deployment.id)


def test_a_recorded_call_answers_one_call_with_the_same_arguments() -> None:
    @assay.side_effects
    def order(item: str) -> str:
        """Orders an item."""
        raise AssertionError("a replay ran it")

    assert has_side_effects(function_tool(order))
    calls = [("tea", "one", None), ("tea", "two", None), ("jam", None, "sold out")]
    recorded = [ToolCall(name="order", arguments={"item": i}, result=r, error=e) for i, r, e in calls]
    tool, answers = function_tool(order), ToolReplay(recorded)
    assert [answers.result(tool, {"item": "tea"}) for _ in range(2)] == ["one", "two"]
    with pytest.raises(RecordedToolError, match="sold out"):
        answers.result(tool, {"item": "jam"})
    with pytest.raises(NotInRecording, match="order has side effects and is not run in a replay"):
        answers.result(tool, {"item": "tea"})
    assert (answers.answered, answers.missed) == (3, ["order"])
