"""Replays of recorded rollouts, before a deployment starts and in its shadow step; tools with side effects."""

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from production import artifact

import assay
from assay.commands.advancing import replay
from assay.commands.deploy import StartReport, advance_deployment, start_deployment
from assay.commands.registry import capabilities
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
from assay.traces.store import tables as schema
from rigs.command_line import assay_command

CANDIDATES = {
    "support@2": "return dspy.Prediction(reply='yes')",  # the output was renamed
    "support@3": "return dspy.Prediction(answer='no')",
    "support@4": "raise ValueError('broken')",
    "support@5": "return dspy.Prediction(**({'answer': '1'} if question == '1' else {}))",
}
CHECKS = "def right(task, prediction, rollout):\n    return prediction['answer'] == 'no'\n"
RUBRIC = "name: right\ncriteria:\n- {name: right, weight: 1, check: checks.py:right}\n"


@pytest.fixture
def agent(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("assay.commands.deploy.expected_requests", lambda plan: {})
    (own_folder / "checks.py").write_text(CHECKS)
    (own_folder / "rubric.yaml").write_text(RUBRIC)
    with Store() as store:
        registry = Deployments(store.engine).registry
        registry.register("support", artifact(own_folder / "one"))
        for name, body in CANDIDATES.items():
            registry.register("support", artifact(own_folder / name[-1], body))
        registry.set_alias("support@1", "champion")
    return own_folder


def serve(count: int) -> None:
    production = assay.deployed("support@1", rubric="rubric.yaml")
    for at in range(count):
        production(question=str(at), task_type=f"type {at % 2}")
    production.store.flush()


def dry(candidate: str, **options: Any) -> StartReport:
    return start_deployment(candidate, dry_run=True, **options)


@pytest.mark.slow
def test_a_renamed_output_of_a_program_without_predictors_is_refused(agent: Path) -> None:
    serve(4)
    with pytest.raises(assay.AssayError, match="gives no answer, which 3 recorded rollouts had"):
        dry("support@2")
    assert dry("support@2", force=True).breaks == (
        "outputs: the candidate gives no answer, which 3 recorded rollouts had",
    )
    assert (dry("support@3").breaks, dry("support@3").unchecked) == ((), ())


def test_an_output_that_some_replays_lack_is_a_change(agent: Path) -> None:
    serve(4)
    report = dry("support@5", replay=4)
    assert report.breaks == ()
    assert report.changes == ("outputs: answer is missing in 3 of 4 replays of recorded rollouts",)


def test_what_could_not_be_compared_is_said(agent: Path) -> None:
    (reason, comparison) = dry("support@2").unchecked
    assert reason == "replays: support@1 has no recorded answers"
    assert comparison.startswith("outputs: not compared, because a program without predictors declares none")
    serve(3)
    assert "no recorded rollout was replayed" in dry("support@2", replay=0).unchecked[0]
    with pytest.raises(assay.AssayError, match=r"answers none of 3 recorded rollouts \(ValueError: broken\)"):
        dry("support@4")
    failed = dry("support@4", replay=1)
    assert failed.unchecked[0] == "replays: 1 of 1 failed (ValueError: broken)"
    assert "no replay has an answer" in failed.unchecked[1]


@pytest.mark.slow
def test_a_dry_run_says_what_it_tried_and_tries_more_on_request(agent: Path) -> None:
    serve(12)
    plain = dry("support@3")
    assert "the shadow step: it replays 100 recorded rollouts, 3 were replayed, unscored" in plain.not_tried[0]
    assert plain.not_tried[1] == "live traffic: the steps 10 %, 50 %, 50 %, 95 % are simulated only"
    report = dry("support@3", replay=12, replay_rubric="rubric.yaml")
    assert (report.replays.n, report.replays.champion, report.replays.candidate) == (12, 0.0, 1.0)
    assert report.replays.gain is not None
    assert report.replays.gain.is_gain
    shown = assay_command(
        "deploy", "start", "support@3", "--dry-run", "--replay", "12", "--replay-rubric", "rubric.yaml"
    )
    assert "replayed 12 recorded rollouts: 12 answered, with all recorded outputs; score 0.000 recorded, 1.000" in (
        shown.stdout
    )
    assert "not tried: the shadow step: it replays 100 recorded rollouts, 12 were replayed (--replay" in shown.stdout
    with Store() as store:
        assert Deployments(store.engine).active("support") is None


def test_replays_before_a_start_are_in_no_figure_of_production(agent: Path) -> None:
    serve(3)
    started = start_deployment("support@3")
    assert (started.replays.n, started.not_tried) == (3, ())
    assert [row["version"] for row in capabilities("support").capabilities] == ["support@1", "support@1"]
    with Store() as store:
        (first, *_) = Deployments(store.engine).history("support")
        assert first["replays"]["answered"] == 3
        with store.engine.connect() as connection:
            rows = connection.execute(sa.select(schema.rollouts).where(schema.rollouts.c.phase == "check")).all()
    assert [row.version for row in rows] == [None] * 3


# -- tools with side effects, which a replay answers from the recording

ANY = Rubric("any", [Criterion(name="any", weight=1, check=lambda task, prediction, rollout: True)])
SHADOW = Plan(
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
        production = assay.deployed("shop", rubric=ANY)
        for question in "012":
            assert production(question=question).answer == "ordered tea"
        production.store.flush()
        deployment = deployments.start("shop@2", SHADOW)
        assert replay(deployments, deployment, rubric=ANY, store=None) == 3
        assert (own_folder / "orders.txt").read_text() == "tea tea tea "
        pairs = deployments.shadow(deployment.id, SHADOW.metrics[0])
        assert (list(pairs.differences), pairs.missing) == ([0.0, 0.0], 1)  # jam was not ordered before
        assert advance(deployments, deployment.id, now=2e9).action == "next"  # one of three is below max_missing


def test_rollouts_that_nothing_could_score_are_counted_apart_from_missing_ones(own_folder: Path) -> None:
    compares = Rubric("exact", [Criterion(name="exact", weight=1, check=exact)])
    with Store() as store:
        deployments = Deployments(store.engine)
        for name in ("one", "two"):
            deployments.registry.register("shop", artifact(own_folder / name, ORDERS.replace("{item}", "'tea'")))
        deployments.registry.set_alias("shop@1", "champion")
        deployment = deployments.start("shop@2", SHADOW)
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
