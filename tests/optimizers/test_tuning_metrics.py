"""Search over agent parameters: the five metrics, evaluators, spaces."""

import math
from typing import Any

import pytest
from tuned_agents import TASKS, Aims

import assay
from assay.errors import (
    ConfigError,
)
from assay.evaluation.metrics import AgentEvaluator, AgentMetrics, Budget, TaskRun, before_and_after, measure, run_of
from assay.optimizers.parameters import AgentObjective, Point, SearchConfig, Space
from assay.programs import RANGES
from assay.rubrics import JudgeSpec
from assay.traces import Rollout, ToolCall, Transition


def run(task: str = "t", score: float | None = 1.0, **more: Any) -> TaskRun:
    return TaskRun(task_id=task, score=score, **more)


# -- metrics


def test_the_five_metrics_match_hand_calculation() -> None:
    first = {"steps": 5, "tokens": 1000, "seconds": 3, "answer": "42", "reasoning": "so it is 42", "tools_made": 1}
    second = {"steps": 20, "tokens": 4000, "seconds": 60, "answer": "7", "reasoning": "so it is 8", "tools_made": 2}
    runs = [
        run("a", 1.0, task_type="x", tools_good=1, tools_needed=1, **first),
        run("b", 0.5, task_type="y", tools_good=1, tools_needed=1, **second),
        run("c", None, task_type="y", tools_made=0, tools_needed=0),
    ]
    metrics = measure(runs, budget=Budget(steps=10, tokens=2000, seconds=30))
    # accuracy (1 + 0.5) / 2; efficiency: 1 - (0.5 + 0.5 + 0.1) / 3 and 0; coherence: 42 follows, 7 does not
    # adaptability: the worst type has 0.5 of a mean of 0.75; tools: 1 / 1, 1 / 2 and none needed
    assert metrics == AgentMetrics(
        accuracy=0.75,
        efficiency=pytest.approx((1 - 1.1 / 3) / 2),
        coherence=0.5,
        adaptability=pytest.approx(0.5 / 0.75),
        tool_usage=pytest.approx((1 + 0.5 + 1) / 3),
    )


def test_unmeasured_metrics_are_none() -> None:
    assert measure([]).to_dict() == dict.fromkeys(("accuracy", "efficiency", "coherence", "adaptability", "tool_usage"))
    assert measure([run(score=math.nan)]).accuracy is None
    assert measure([run(score=0.0)]).adaptability is None
    with pytest.raises(ConfigError, match="must be above 0"):
        Budget(steps=0)


def test_a_metric_of_the_evaluator_replaces_the_computed_one() -> None:
    assert measure([run(score=0.2, metrics={"accuracy": 0.9, "coherence": 0.4, "unknown": 1.0})]).accuracy == 0.9


def test_the_comparison_table_matches_hand_calculation() -> None:
    before = [run("a", 1.0, confidence=0.5), run("b", 0.4, confidence=0.7), run("c", None)]
    after = [run("a", 1.0, confidence=0.9), run("b", 0.8, confidence=0.9), run("c", 0.9)]
    rows = {row["name"]: row for row in before_and_after(before, after)}
    confidence = {"before": 0.6, "after": 0.9, "points": pytest.approx(30), "percent": pytest.approx(50)}
    assert rows["average confidence"] == {"name": "average confidence", **confidence}
    assert (rows["task accuracy"]["before"], rows["task accuracy"]["after"]) == (0.5, 1.0)
    assert rows["response quality"]["after"] == pytest.approx(0.9)
    assert rows["overall score"]["before"] == pytest.approx((0.6 + 0.5 + 0.7) / 3)
    assert before_and_after([], [])[0] == {"name": "average confidence", **dict.fromkeys(confidence)}


def test_a_rubric_is_an_evaluator() -> None:
    rubric = assay.Rubric(
        "r", [assay.Criterion(name="right", check=lambda t, p, r: p["answer"] == t.expected["answer"])]
    )
    evaluator = AgentEvaluator(rubric)
    assert evaluator({"question": "q", "answer": "x"}, {"answer": "x"}) == {"accuracy": 1.0}
    silent = AgentEvaluator(assay.Rubric("r", [assay.Criterion(name="judged", judge=JudgeSpec(text="Good?"))]))
    with pytest.raises(ConfigError, match="judge_model"):
        silent({"question": "q"}, {"answer": "x"})


# -- spaces


ALL = list(RANGES)


@pytest.mark.parametrize(
    ("acting", "settings", "message"),
    [
        (["temperature"], {"ranges": {"temperature": (0.0, 1.0)}}, "between 0.1 and 2"),
        (["temperature"], {"ranges": {"temperature": (1.0, 0.5)}}, "must rise"),
        (["temperature"], {"ranges": {"heat": (0, 1)}}, "not an agent parameter"),
        (["temperature"], {"ranges": {"max_steps": (1, 5)}}, "nothing is searched"),
        (ALL, {"ranges": {"max_steps": (1.2, 1.8)}}, "must have whole numbers"),
        (ALL, {"ranges": {"max_steps": (1, 5)}, "fixed": {"max_steps": 3}}, "fixed and searched"),
        (ALL, {"fixed": {"temperature": 9}}, "between 0.1 and 2"),
        (None, {"objectives": ("score", "score")}, "must be different ones of"),
        (None, {"objectives": ("score", "tokens"), "pruner": "wilcoxon"}, "needs one objective"),
        (None, {"sampler": "magic"}, "must be one of tpe"),
        (None, {"trials": 0}, "trials: must be"),
        (None, {"prune_at": 0}, "prune_at: must be"),
    ],
)
def test_wrong_settings_are_refused(acting: list[str] | None, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SearchConfig(**settings) if acting is None else Space(programs=["a"], acting={"a": acting}, **settings)


def test_a_result_within_another_number_was_not_used() -> None:
    for answer, good in (("42", 0), ("2", 1), ("it is 2.", 1), ("2.5", 0)):
        rollout = Rollout(task_id="1", prediction={"answer": answer})
        rollout.transitions = [
            Transition(t=0, model="m", request={}, tools=[ToolCall(name="c", arguments={"e": "1+1"}, result="2")])
        ]
        assert run_of(rollout, score=1.0, has_tools=True).tools_good == good


def test_evaluators_give_metrics_between_0_and_1() -> None:
    for metrics, message in (({"accuracy": 85}, "between 0 and 1"), (None, "gives metrics by name")):
        with pytest.raises(ConfigError, match=message):
            AgentObjective(Aims(), lambda task, output, metrics=metrics: metrics).run(
                Point("agent", {"temperature": 0.5, "max_steps": 5}), TASKS[:3]
            )
