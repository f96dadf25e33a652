"""Search over agent parameters: spaces, pruned trials, resumed studies, the final decision and report."""

import json
import math
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import dspy
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import assay
from assay.errors import (
    BudgetExceeded,
    Cancelled,
    ConfigError,
    MissingExtra,
    ModelError,
    ParameterError,
    ProgramError,
    StoreError,
)
from assay.evaluation.metrics import AgentEvaluator, AgentMetrics, Budget, TaskRun, before_and_after, measure, run_of
from assay.optimizers.parameters import AgentObjective, Point, SearchConfig, Space, in_figures, open_study, search
from assay.optimizers.parameters.impact import impact
from assay.optimizers.parameters.page import importance, with_pruned_trials, write_page
from assay.optimizers.parameters.search import requeue_all
from assay.optimizers.parameters.smoothing import smoothed_scores
from assay.programs import RANGES, Agent
from assay.rubrics import JudgeSpec
from assay.runs.settings import TuneSettings
from assay.testing import SyntheticAgent, scripted_lm
from assay.traces import Rollout, ToolCall, Transition

ALL = Space(programs=["agent"], acting={"agent": list(RANGES)})


def run(task: str = "t", score: float | None = 1.0, **more: Any) -> TaskRun:
    return TaskRun(task_id=task, score=score, **more)


# -- metrics


def test_the_five_metrics_match_hand_calculation() -> None:
    runs = [
        run(
            "a",
            1.0,
            task_type="x",
            steps=5,
            tokens=1000,
            seconds=3,
            answer="42",
            reasoning="so it is 42",
            tools_good=1,
            tools_made=1,
            tools_needed=1,
        ),
        run(
            "b",
            0.5,
            task_type="y",
            steps=20,
            tokens=4000,
            seconds=60,
            answer="7",
            reasoning="so it is 8",
            tools_good=1,
            tools_made=2,
            tools_needed=1,
        ),
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


def test_consistency_is_the_agreement_of_sample_pairs() -> None:
    runs = [
        run("a", sample=0, answer="Yes."),
        run("a", sample=1, answer="yes"),
        run("a", sample=2, answer="no"),
        run("b", answer="x"),
    ]
    assert measure(runs).coherence == pytest.approx(1 / 3)  # of three pairs of one task; the other task has one answer


def test_a_rollout_is_converted_to_a_run() -> None:
    calls = [
        ToolCall(name="c", arguments={"e": "1+1"}, result="2"),
        ToolCall(name="c", arguments={"e": "2*3"}, result="6"),
    ]
    lost = ToolCall(name="c", arguments={"e": "9"}, result="9")
    rollout = Rollout(
        task_id="t",
        prediction={"answer": "6", "steps": []},
        transitions=[Transition(t=0, model="m", request={}, tools=[*calls, lost])],
    )
    task_run = run_of(rollout, score=1.0, has_tools=True)
    assert (task_run.tools_good, task_run.tools_made, task_run.tools_needed, task_run.answer) == (2, 3, 1, "6")
    assert run_of(rollout, score=1.0, has_tools=False).tools_needed is None


def test_a_result_read_by_the_next_predictor_counts_as_used() -> None:
    search = ToolCall(name="search", arguments={"query": "tall"}, result="Everest. K2.")
    request = {
        "messages": [
            {"role": "user", "content": "[[ ## context ## ]]\nEverest. K2.\n\n[[ ## question ## ]]\nWhich is tall?"}
        ]
    }
    turns = [
        Transition(t=0, model="m", request={}, tools=[search]),
        Transition(t=1, model="m", request=request, output="the first"),
    ]
    task_run = run_of(
        Rollout(task_id="t", prediction={"answer": "the first"}, transitions=turns), score=1.0, has_tools=True
    )
    assert (task_run.tools_good, task_run.reasoning) == (1, "")
    assert (measure([task_run]).tool_usage, measure([task_run]).coherence) == (1.0, None)
    early = Rollout(task_id="t", prediction={"answer": "the first"}, transitions=[turns[1]], early_tools=[search])
    assert run_of(early, score=1.0, has_tools=True).tools_good == 1


def test_a_metric_of_the_evaluator_replaces_the_computed_one() -> None:
    assert measure([run(score=0.2, metrics={"accuracy": 0.9, "coherence": 0.4, "unknown": 1.0})]).accuracy == 0.9


def test_the_comparison_table_matches_hand_calculation() -> None:
    before = [run("a", 1.0, confidence=0.5), run("b", 0.4, confidence=0.7), run("c", None)]
    after = [run("a", 1.0, confidence=0.9), run("b", 0.8, confidence=0.9), run("c", 0.9)]
    rows = {row["name"]: row for row in before_and_after(before, after)}
    assert rows["average confidence"] == {
        "name": "average confidence",
        "before": 0.6,
        "after": 0.9,
        "points": pytest.approx(30),
        "percent": pytest.approx(50),
    }
    assert (rows["task accuracy"]["before"], rows["task accuracy"]["after"]) == (0.5, 1.0)
    assert rows["response quality"]["after"] == pytest.approx(0.9)
    assert rows["overall score"]["before"] == pytest.approx((0.6 + 0.5 + 0.7) / 3)
    assert before_and_after([], [])[0] == {
        "name": "average confidence",
        "before": None,
        "after": None,
        "points": None,
        "percent": None,
    }


def test_a_rubric_is_an_evaluator() -> None:
    rubric = assay.Rubric(
        "r", [assay.Criterion(name="right", check=lambda t, p, r: p["answer"] == t.expected["answer"])]
    )
    evaluator = AgentEvaluator(rubric)
    assert evaluator({"question": "q", "answer": "x"}, {"answer": "x"}) == {"accuracy": 1.0}
    silent = AgentEvaluator(assay.Rubric("r", [assay.Criterion(name="judged", judge=JudgeSpec(text="Good?"))]))
    assert silent({"question": "q"}, {"answer": "x"}) == {}


def test_crashes_tool_lists_and_any_answer_are_accepted() -> None:
    class Breaks(Aims):
        def execute(self, task: Any) -> Any:
            if task != "0":
                raise RuntimeError("broken")
            return True

    runs = AgentObjective(Breaks(), Aims.right).run(
        Point("agent", {"temperature": 1.0, "max_steps": 1}), [str(at) for at in range(10)]
    )
    assert measure(runs).accuracy == pytest.approx(0.1)
    calls = [
        ToolCall(name="c", arguments={"city": "Zürich"}, result="Zürich"),
        ToolCall(name="c", arguments={"city": "Zürich"}, result="9"),
    ]
    rollout = Rollout(
        task_id="t",
        prediction={"a": {1: "x", "b": ("9",)}, "b": 2},
        transitions=[Transition(t=0, model="m", request={}, tools=calls)],
    )
    task_run = run_of(rollout, score=1.0, has_tools=True, needed=[{"name": "c"}, {"name": "c"}])
    assert (task_run.tools_good, task_run.tools_needed) == (2, 2)
    assert measure([task_run, task_run]).coherence is not None
    assert measure([run(answer="no", reasoning="I know this one. The answer is yes.")]).coherence == 0.0
    assert measure([run(answer="yes", reasoning="Is it no? The answer is yes.")]).coherence == 1.0


# -- spaces


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: Space(programs=["a"], acting={"a": ["temperature"]}, ranges={"temperature": (0.0, 1.0)}),
            "between 0.1 and 2",
        ),
        (lambda: Space(programs=["a"], acting={"a": ["temperature"]}, ranges={"temperature": (1.0, 0.5)}), "must rise"),
        (
            lambda: Space(programs=["a"], acting={"a": list(RANGES)}, ranges={"max_steps": (1.2, 1.8)}),
            "must have whole numbers",
        ),
        (
            lambda: Space(programs=["a"], acting={"a": ["temperature"]}, ranges={"heat": (0, 1)}),
            "unknown agent parameter",
        ),
        (
            lambda: Space(programs=["a"], acting={"a": ["temperature"]}, ranges={"max_steps": (1, 5)}),
            "nothing is searched",
        ),
        (
            lambda: Space(
                programs=["a"], acting={"a": list(RANGES)}, ranges={"max_steps": (1, 5)}, fixed={"max_steps": 3}
            ),
            "fixed and searched",
        ),
        (lambda: Space(programs=["a"], acting={"a": list(RANGES)}, fixed={"temperature": 9}), "between 0.1 and 2"),
        (lambda: SearchConfig(objectives=("score", "score")), "must be different ones of"),
        (lambda: SearchConfig(objectives=("score", "tokens"), pruner="wilcoxon"), "needs one objective"),
        (lambda: SearchConfig(sampler="magic"), "must be one of tpe"),
        (lambda: SearchConfig(trials=0), "at least 1"),
    ],
)
def test_wrong_settings_are_refused(build: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()


# -- searches


class Aims:
    """An agent that scores higher the closer its temperature is to 0.6 and its steps to 8; deterministic per task."""

    def __init__(self) -> None:
        self.parameters: dict[str, Any] = {}
        self.executed = 0

    def set_parameters(self, parameters: Mapping[str, Any]) -> None:
        self.parameters = dict(parameters)

    def execute(self, task: Any) -> Any:
        self.executed += 1
        off = abs(self.parameters["temperature"] - 0.6) + abs(math.log2(self.parameters["max_steps"] / 8)) / 4
        return int(task) / 40 < 0.95 - off

    @staticmethod
    def right(task: Any, output: Any) -> dict[str, float]:
        return {"accuracy": float(output)}


TASKS = [str((number * 7) % 40) for number in range(40)]
TWO = Space(
    programs=["agent"], acting={"agent": list(RANGES)}, ranges={"temperature": (0.1, 2.0), "max_steps": (1, 50)}
)


def searched(
    agent: Any = None, space: Space = TWO, *, url: str | None = None, name: str = "s", tasks: Any = TASKS, **config: Any
) -> Any:
    settings = SearchConfig(**{"trials": 30, **config})
    study = open_study(name, url, space, settings)
    return search(
        AgentObjective(agent or Aims(), Aims.right),
        tasks,
        space,
        settings,
        study,
        defaults=[Point("agent", {"temperature": 1.5, "max_steps": 30})],
    )


def test_a_search_finds_good_parameters_and_prunes_losing_trials() -> None:
    agent = Aims()
    outcome = searched(agent)
    assert outcome.best.values["score"] > 0.8
    assert outcome.default.point.parameters == {"temperature": 1.5, "max_steps": 30}
    assert outcome.default.number == 0
    assert outcome.best.metrics["accuracy"] == outcome.best.values["score"]
    assert len(outcome.trials) == 30
    assert outcome.task_runs == agent.executed
    assert outcome.saved > 0.2
    with pytest.raises(ConfigError, match="prune_at=0 must be above 0"):
        searched(prune_at=0)
    assert {trial.state for trial in outcome.trials} == {"complete", "pruned"}


@pytest.mark.parametrize("sampler", ["random", "grid", "nsga2", "cmaes", "gp"])
def test_other_samplers_are_supported(sampler: str) -> None:
    outcome = searched(sampler=sampler, trials=12, pruner="hyperband")
    assert outcome.expected[outcome.best.number] >= outcome.expected[outcome.default.number]


def test_a_trial_that_is_high_by_sampling_noise_is_not_the_best() -> None:
    space = Space(programs=["agent"], acting={"agent": ["temperature"]}, ranges={"temperature": (0.1, 1.1)})
    random = np.random.default_rng(0)
    places = np.linspace(0.1, 1.1, 30)
    chances = 0.9 - 0.8 * np.abs(places - 0.8)
    values = [{str(task): float(random.random() < chance) for task in range(20)} for chance in chances]
    values[1] = {str(task): 1.0 for task in range(20)}  # sampling noise, far from where it is good
    points = [Point("agent", {"temperature": float(place)}) for place in places]
    smoothed = smoothed_scores(points, values, space)
    expected, adjusted = (np.array([getattr(each, name) for each in smoothed]) for name in ("mean", "adjusted"))
    assert abs(places[int(np.argmax(expected))] - 0.8) < 0.15
    assert np.abs(expected - chances).mean() < np.abs(adjusted - chances).mean()
    assert [each.adjusted for each in smoothed] == pytest.approx([np.mean(list(trial.values())) for trial in values])
    assert all(each.mean == each.adjusted for each in smoothed_scores(points[:9], values[:9], space))
    assert all(each.mean == 1.0 for each in smoothed_scores(points, [{"a": 1.0}] * 30, space))
    assert smoothed_scores([], [], space) == []


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0, 1), min_size=1, max_size=6), min_size=10, max_size=25
    ),
    st.integers(0, 100),
)
def test_expected_scores_are_finite_for_any_trials(values: list[dict[str, float]], seed: int) -> None:
    space = Space(programs=["a", "b"], acting={"a": list(RANGES), "b": ["temperature"]})
    random = np.random.default_rng(seed)
    points = [
        Point(program, {name: space.at(name, random.random()) for name in space.searched(program)})
        for program in random.choice(["a", "b"], len(values))
    ]
    expected = smoothed_scores(points, values, space)
    assert np.isfinite([(each.adjusted, each.error, each.mean) for each in expected]).all()


def test_several_objectives_give_a_pareto_front() -> None:
    outcome = searched(objectives=("score", "latency"), trials=12)
    assert outcome.saved == 0
    assert outcome.best.number in outcome.front
    assert set(outcome.best.values) == {"score", "latency"}


def test_a_study_resumes_where_it_stopped(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 's.db'}"
    first = searched(url=url, trials=6)
    repeated = Aims()
    second = searched(repeated, url=url, trials=10)
    assert [trial.number for trial in first.trials] == [trial.number for trial in second.trials][:6]
    assert len(second.trials) == 10
    assert repeated.executed == second.task_runs - first.task_runs
    other = Space(programs=["agent"], acting={"agent": list(RANGES)}, ranges={"temperature": (0.1, 1.0)})
    with pytest.raises(ConfigError, match=r"searches something else: .*ranges is .*2\.0.*, not .*1\.0"):
        searched(space=other, url=url)
    with pytest.raises(ConfigError, match="objectives is"):
        searched(url=url, objectives=("latency",))


@pytest.mark.slow
def test_a_cap_within_a_trial_loses_nothing(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 's.db'}"

    class Capped(Aims):
        def execute(self, task: Any) -> Any:
            if self.executed >= 100:
                raise BudgetExceeded("100 calls are spent")
            return super().execute(task)

    with pytest.raises(BudgetExceeded):
        searched(Capped(), url=url, trials=20)
    study = open_study("s", url, TWO, SearchConfig(trials=20, pruner="none"))
    cut = next(trial for trial in study.get_trials() if trial.state.name == "FAIL")
    outcome = searched(url=url, trials=20)
    assert [trial.point.parameters for trial in outcome.trials].count(cut.params) == 1  # tried again from its beginning
    assert len(outcome.trials) == 20  # what was cut off is no trial of its own


def test_an_agent_that_rejects_parameters_fails_its_trials_with_the_reason() -> None:
    class Refuses(Aims):
        def set_parameters(self, parameters: Mapping[str, Any]) -> None:
            if parameters["temperature"] > 1.2:
                raise ValueError("too hot")
            super().set_parameters(parameters)

    outcome = searched(Refuses(), trials=15)
    failed = [trial for trial in outcome.trials if trial.state == "failed"]
    assert failed
    assert "set_parameters" in failed[0].error
    assert "too hot" in failed[0].error
    assert outcome.best.values["score"] > 0.3

    class Never(Aims):
        def set_parameters(self, parameters: Mapping[str, Any]) -> None:
            raise ValueError("never")

    with pytest.raises(ModelError, match=r"none of 5 trials could be scored: .*never"):
        searched(Never())
    with pytest.raises(ProgramError, match="needs execute"):
        AgentObjective(object(), Aims.right)  # type: ignore[arg-type]


def test_nan_and_constant_metrics_are_handled() -> None:
    agent = Aims()
    settings = SearchConfig(trials=5)
    objective = AgentObjective(agent, lambda task, output: {"accuracy": math.nan})
    with pytest.raises(ModelError, match="score could not be measured"):
        search(objective, TASKS, TWO, settings, open_study("nan", None, TWO, settings))
    objective = AgentObjective(agent, lambda task, output: {"accuracy": 0.5})
    outcome = search(objective, TASKS, TWO, settings, open_study("flat", None, TWO, settings))
    assert outcome.best.values["score"] == 0.5


def test_a_user_who_stops_a_trial_loses_nothing(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 's.db'}"

    class Stopped(Aims):
        def execute(self, task: Any) -> Any:
            if self.executed >= 60:
                raise KeyboardInterrupt
            return super().execute(task)

    with pytest.raises(Cancelled):
        searched(Stopped(), url=url, trials=10)
    outcome = searched(url=url, trials=10)
    assert sum(trial.state != "failed" for trial in outcome.trials) == 10


def test_a_suspended_trial_that_was_declared_dead_is_dropped(tmp_path: Path) -> None:
    import optuna

    url = f"sqlite:///{tmp_path / 's.db'}"

    class Sleeps(Aims):
        def execute(self, task: Any) -> Any:
            if self.executed == 85:
                storage = optuna.storages.RDBStorage(url)
                asleep = next(
                    t for t in optuna.load_study(study_name="s", storage=storage).trials if t.state.name == "RUNNING"
                )
                storage.set_trial_state_values(asleep._trial_id, state=optuna.trial.TrialState.FAIL)
            return super().execute(task)

    outcome = searched(Sleeps(), url=url, trials=8)
    assert sum(trial.state != "failed" for trial in outcome.trials) == 8
    assert sum(trial.state == "failed" for trial in outcome.trials) == 1


def test_mostly_unscored_trials_do_not_win() -> None:
    objective = AgentObjective(
        Aims(), lambda task, output: {"accuracy": 1.0} if task == "0" else {"accuracy": math.nan}
    )
    settings = SearchConfig(trials=5)
    with pytest.raises(ModelError, match="could not be measured on 39 of 40 runs"):
        search(objective, TASKS, TWO, settings, open_study("few", None, TWO, settings))


def test_additional_workers_try_other_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, settings = f"sqlite:///{tmp_path / 's.db'}", SearchConfig(trials=12, pruner="none")
    studies = [open_study("s", url, TWO, settings) for _ in range(2)]
    points = []
    for study in studies:
        trial = study.ask()
        points.append(TWO.suggest(trial))
        study.tell(trial, 0.0)
    assert points[0] != points[1]
    with pytest.raises(ConfigError, match="rubric is None, not r2"):
        open_study("s", url, TWO, settings, of={"rubric": "r2"})
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between the attempts to connect
    with pytest.raises(StoreError, match=r"me:\*\*\*@"):
        open_study("s", "postgresql+psycopg://me:s3cret@127.0.0.1:1/x", TWO, settings)


def test_an_agent_that_fails_scores_nothing_on_that_task() -> None:
    class Breaks(Aims):
        def execute(self, task: Any) -> Any:
            raise RuntimeError("broken")

    outcome = searched(Breaks(), trials=3)
    assert outcome.best.values["score"] == 0.0


# -- programs


class Guesses(Agent):
    """Answers at once; its model is the better the cooler it is asked."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.answer = dspy.Predict("question -> answer")

    def solve(self, **inputs: Any) -> Any:
        return self.answer(**inputs)


def cool(request: Any) -> str:
    text = str(request.messages[-1].text)
    number = int(text.split("number ")[1].split()[0].strip('".,}'))
    right = number / 100 < 1.1 - (request.config.temperature or 1.0)
    return json.dumps({"answer": "yes" if right else "no"})


def tuned(tmp_path: Path, **options: Any) -> Any:
    (tmp_path / "d.jsonl").write_text(
        "".join(json.dumps({"question": f"number {at} of all", "answer": "yes"}) + "\n" for at in range(100))
    )
    (tmp_path / "r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: 'assay.rubrics.checks:exact'}\n")
    program = options.pop("program", Guesses())
    return assay.tune(
        program,
        rubric=tmp_path / "r.yaml",
        data=str(tmp_path / "d.jsonl"),
        lm=options.pop("lm", scripted_lm(cool)),
        store=tmp_path / ".assay" / "a.db",
        **(({"trials": 12} if options.get("method", "optuna") == "optuna" else {}) | options),
    )


@pytest.mark.slow
def test_a_program_is_tuned_gated_and_reported_on_sealed_tasks(tmp_path: Path) -> None:
    report = tuned(tmp_path)
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert set(data["best"]) == set(RANGES)
    assert data["best"]["temperature"] < 0.4
    assert data["test"]["tuned"]["score"] > data["test"]["default"]["score"] + 0.2
    assert data["test"]["gain"]["low"] > 0
    assert data["replaces"]
    assert data["trials"] == 12
    assert set(data["test"]["tuned"]["metrics"]) == {
        "accuracy",
        "efficiency",
        "coherence",
        "adaptability",
        "tool_usage",
    }
    assert data["test"]["tuned"]["metrics"]["tool_usage"] is None
    loaded = assay.load(report.artifact)
    assert loaded.agent_parameters.temperature == data["best"]["temperature"]
    with assay.Store(tmp_path / ".assay" / "a.db") as store:
        assert {rollout.phase for rollout in store.rollouts(split="test", limit=1000)} == {"test"}


@pytest.mark.slow
def test_parameters_that_a_program_ignores_are_reported_and_not_searched(tmp_path: Path) -> None:
    messages: list[str] = []

    class Listens(assay.evaluation.SilentProgress):  # type: ignore[name-defined,misc]
        def say(self, text: str) -> None:
            messages.append(text)

    plain = tuned(tmp_path, program=dspy.Predict("question -> answer"), trials=6, progress=Listens())
    assert set(plain.to_dict()["best"]) == {"temperature"}
    assert any("ignores context_length, max_steps, tool_usage_threshold, reasoning_depth" in line for line in messages)


@pytest.mark.slow
def test_tokens_decide_between_tied_scores(tmp_path: Path) -> None:
    report = tuned(
        tmp_path,
        lm=scripted_lm(lambda request: json.dumps({"answer": "yes"})),
        objectives=("score", "tokens"),
        trials=6,
    ).to_dict()
    assert report["test"]["gain"]["mean"] == 0
    front = {trial["number"]: trial["tokens"] for trial in report["front"]}
    assert min(trial["tokens"] for trial in report["history"]) in front.values()
    level = [
        trial
        for trial in report["history"]
        if trial["values"]["score"] == max(t["values"]["score"] for t in report["history"])
    ]
    assert (
        report["best"].items() >= min(level, key=lambda trial: (trial["tokens"], trial["number"]))["parameters"].items()
    )


@pytest.mark.slow
def test_prompts_and_parameters_are_searched_together_and_applied(tmp_path: Path) -> None:
    first = tuned(
        tmp_path, trials=4, out=tmp_path / "one", parameters={"temperature": 2.0}, ranges={"max_steps": (1, 4)}
    )
    assert first.to_dict()["best"]["temperature"] == 2.0
    both = tuned(tmp_path, program=Guesses(), also=[str(first.artifact)], trials=8, out=tmp_path / "two")
    tried = {trial["program"] for trial in both.to_dict()["history"]}
    assert str(first.artifact) in tried
    assert len(tried) == 2
    applied = tuned(tmp_path, trials=8, apply=first.artifact, out=tmp_path / "three", seed=1)
    assert assay.load(applied.artifact).agent_parameters.temperature == applied.to_dict()["best"]["temperature"]
    with pytest.raises(ConfigError, match="is not an artifact"):
        tuned(tmp_path, trials=3, apply=tmp_path / "nothing", seed=2)
    with pytest.raises(ConfigError, match="salt='other' is not the artifact's 'assay'"):
        tuned(tmp_path, program=str(first.artifact), salt="other", trials=3)
    with pytest.raises(ConfigError, match="this store has the salt 'assay'"):
        tuned(tmp_path, apply=first.artifact, salt="other", trials=3, seed=3)


@pytest.mark.slow
def test_ranges_are_enforced_for_every_source(tmp_path: Path) -> None:
    for options in ({"ranges": {"temperature": (0.0, 9.0)}}, {"parameters": {"temperature": 9.0}}):
        with pytest.raises(ParameterError, match=r"0\.1"):
            tuned(tmp_path, **options)
    for flags, message in (
        (["--range", "temperature=0:9"], "between 0.1 and 2"),
        (["--range", "temperature=hot"], "LOW:HIGH"),
        (["--set", "temperature=9"], "between 0.1 and 2"),
        (["--objective", "beauty"], "different ones of"),
        (["--sampler", "x"], "must be one of"),
    ):
        command = [sys.executable, "-c", "from assay.cli import main; main()", "tune", "math_qa", "--rubric", "math_qa"]
        ended = subprocess.run(
            [*command, "--data", "arithmetic:size=40", *flags],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
        )
        assert (ended.returncode, message in ended.stderr) == (2, True), ended.stderr


@pytest.mark.slow
def test_the_effect_of_each_parameter_is_measured_and_plotted(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text(
        "".join(json.dumps({"question": f"number {at} of all", "answer": "yes"}) + "\n" for at in range(100))
    )
    (tmp_path / "r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: 'assay.rubrics.checks:exact'}\n")
    report = assay.parameter_impact(
        Guesses(), rubric=tmp_path / "r.yaml", data=str(tmp_path / "d.jsonl"), lm=scripted_lm(cool),
        store=tmp_path / ".assay" / "a.db",
        out=tmp_path / "impact", levels=3,
    )  # fmt: skip
    data = json.loads((tmp_path / "impact" / "impact.json").read_text())
    assert (tmp_path / "impact" / "impact.png").read_bytes().startswith(b"\x89PNG")
    moved = {effect["value"]: effect for effect in data["effects"] if effect["parameter"] == "temperature"}
    assert moved[0.1]["metrics"]["accuracy"]["mean"] > 0.9
    assert moved[2.0]["metrics"]["accuracy"]["mean"] == 0.0
    assert moved[2.0]["changes"]["accuracy"]["high"] < 0
    assert moved[0.1]["changes"]["accuracy"]["low"] > 0
    assert set(data["without_effect"]) == {"max_steps", "reasoning_depth", "context_length"}
    assert any("max_steps had no effect" in note for note in report.notes)
    page = (tmp_path / "impact" / "study.html").read_text()
    assert page.count("plotly-graph-div") == 1
    assert "need a study of the same" in report.notes[-1]


@pytest.mark.slow
def test_a_page_of_a_study_is_complete_without_network(tmp_path: Path) -> None:
    report = tuned(tmp_path, trials=14)
    page = report.page.read_text()
    assert re.findall(r"<h2>(.*?)</h2>", page) == ["History", "Importance", "Slices", "Contours"]
    assert re.search(r"<(script|link|img|iframe)[^>]*(src|href)=", page) is None
    assert page.count("plotly-graph-div") == 4
    assert [path.read_bytes()[:4] for path in report.pictures] == [b"\x89PNG"] * 4
    for weights in report.importance.values():
        assert max(weights, key=weights.__getitem__) == "temperature"
        assert sum(weights.values()) == pytest.approx(1)
    impact = assay.parameter_impact(
        Guesses(),
        rubric=tmp_path / "r.yaml",
        data=str(tmp_path / "d.jsonl"),
        lm=scripted_lm(cool),
        store=tmp_path / ".assay" / "a.db",
        levels=2,
    )
    assert impact.study is not None
    assert re.findall(r"<h2>(.*?)</h2>", impact.page.read_text())[:2] == ["Each parameter moved alone", "History"]
    with pytest.raises(ConfigError, match="there is no study 'none'"):
        assay.parameter_impact(
            Guesses(), rubric=tmp_path / "r.yaml", data=str(tmp_path / "d.jsonl"), lm=scripted_lm(cool),
            store=tmp_path / ".assay" / "a.db",
            levels=2, study="none",
        )  # fmt: skip


@pytest.mark.slow
def test_pages_with_little_or_hostile_content_are_valid(tmp_path: Path) -> None:
    objectives = ("score", "tokens")
    study = open_study("s", None, TWO, SearchConfig(objectives=objectives))
    assert importance(study) == {}
    page, pictures = write_page(
        tmp_path, study, objectives, title="<script>alert(1)</script>", facts={"<b>": "</table>"}
    )
    assert pictures == []
    assert "<script>alert" not in page.read_text()
    assert "&lt;/table&gt;" in page.read_text()
    for _ in range(5):  # all alike
        trial = study.ask()
        TWO.suggest(trial)
        study.tell(trial, [0.5, 10.0])
    assert importance(study) == {}
    write_page(tmp_path, study, objectives, title="t", facts={})
    assert "<h2>Pareto front</h2>" in page.read_text()


@pytest.mark.slow
def test_a_policy_tunes_a_program(tmp_path: Path) -> None:
    data = tuned(
        tmp_path, method="policy", episodes=25, tasks_per_episode=20, ranges={"temperature": (0.1, 2.0)}
    ).to_dict()
    assert data["method"] == "policy"
    assert data["best"]["temperature"] < 0.7
    assert data["test"]["tuned"]["score"] > data["test"]["default"]["score"]
    assert data["trials"] == len(data["history"]) == 25
    assert {"metrics", "parameters", "adjustments", "improvement", "meaning"} <= data["history"][3].keys()
    assert data["confirmed"][0]["overall"] is not None
    assert json.loads(json.dumps(data, allow_nan=False))
    with pytest.raises(ConfigError, match="must be one of optuna, policy"):
        tuned(tmp_path, method="magic")
    with pytest.raises(ConfigError, match="require method='optuna'"):
        tuned(tmp_path, method="policy", also=["x"])
    with pytest.raises(ConfigError, match="require method='optuna'"):
        tuned(tmp_path, method="policy", objectives=("tokens",))


@pytest.mark.model
@pytest.mark.slow
def test_the_command_tunes_with_several_workers_stops_at_a_cap_and_resumes(embedded: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "from assay.cli import main; main()",
        "tune",
        "math_qa",
        "--rubric",
        "math_qa",
        "--data",
        "arithmetic:terms=2-2&digits=1-1&size=60",
    ]
    sizes = ["--val-size", "2", "--gate-size", "2", "--test-size", "2"]
    flags = [
        "--range",
        "max_steps=1:2",
        "--range",
        "temperature=0.1:0.3",
        "--trials",
        "4",
        "--prompt-format",
        "lean",
        *sizes,
    ]
    common: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 900, "cwd": tmp_path}
    cut = subprocess.run([*command, *flags, "--json", "--max-calls", "30"], **common)
    assert cut.returncode in (0, 1), cut.stderr
    ended = subprocess.run([*command, *flags, "--workers", "2", "--json", "--resume"], **common)
    assert ended.returncode == 0, ended.stderr
    data = json.loads(ended.stdout)
    assert data["complete"] + data["pruned"] >= 4
    assert 1 <= data["best"]["max_steps"] <= 2
    assert data["test"]["default"]["n"] == data["test"]["tuned"]["n"] == 2
    output = subprocess.run([*command[:3], "run", data["artifact"], "question=What is 17 + 25?"], **common)
    assert output.returncode == 0, output.stderr


def test_a_study_not_created_by_assay_is_refused(tmp_path: Path) -> None:
    import optuna

    url = f"sqlite:///{tmp_path / 's.db'}"
    other = optuna.create_study(storage=url, study_name="s", direction="minimize")
    other.optimize(lambda trial: trial.suggest_float("lr", 0, 1), n_trials=3)
    with pytest.raises(ConfigError, match="was not created by assay"):
        open_study("s", url, TWO, SearchConfig())
    optuna.create_study(storage=url, study_name="empty", direction="minimize")
    with pytest.raises(ConfigError, match="was not created by assay"):
        open_study("empty", url, TWO, SearchConfig())


def test_trials_of_a_dead_process_are_requeued_and_old_failures_do_not_end_a_search(tmp_path: Path) -> None:
    url, config = f"sqlite:///{tmp_path / 's.db'}", SearchConfig(trials=4)
    study = open_study("s", url, TWO, config)
    study.enqueue_trial({"temperature": 1.5, "max_steps": 30}, user_attrs={"default": True})
    for _ in range(8):  # more cuts than trials
        TWO.suggest(study.ask())
        requeue_all(study)
    outcome = searched(url=url, trials=4)
    assert sum(trial.state in ("complete", "pruned") for trial in outcome.trials) == 4
    assert outcome.default.point.parameters == {"temperature": 1.5, "max_steps": 30}
    assert outcome.default.state == "complete"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"ranges": {"max_steps": (1, math.inf)}}, ParameterError, "finite numbers"),
        ({"ranges": {"max_steps": (math.nan, 3)}}, ParameterError, "finite numbers"),
        ({"seed": -1}, ConfigError, "seed=-1 must be at least 0"),
        ({"storage": "://x"}, ConfigError, "is not a database URL"),
        ({"method": "policy", "learning_rate": math.nan}, ConfigError, "must be a finite number"),
        ({"method": "policy", "tasks_per_episode": 0}, ConfigError, "tasks_per_episode=0"),
        ({"method": "policy", "sampler": "random"}, ConfigError, "sampler would have no effect on a policy"),
    ],
)
def test_wrong_settings_of_a_search_are_refused(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        tuned(tmp_path, **options)


def test_the_shares_of_workers_add_up_to_the_cap() -> None:
    config = TuneSettings(program="p", rubric="r", data="d", workers=8, max_calls=13, max_cost_usd=4.0)
    parts = [replace(config, worker=worker).of_one_worker() for worker in range(8)]
    assert sum(part.max_calls for part in parts) == 13
    assert sum(part.max_cost_usd for part in parts) == 4.0
    assert replace(config, max_calls=0).of_one_worker().max_calls == 0


@pytest.mark.slow
def test_unwritable_outputs_and_unknown_studies_are_refused_before_the_first_call(tmp_path: Path) -> None:
    requests: list[Any] = []
    lm = scripted_lm(lambda request: requests.append(request) or cool(request))
    first = tuned(tmp_path, trials=3, out=tmp_path / "one")
    common = {
        "rubric": tmp_path / "r.yaml",
        "data": str(tmp_path / "d.jsonl"),
        "store": tmp_path / ".assay" / "b.db",
        "lm": lm,
    }
    with pytest.raises(ConfigError, match="there is no study 'zzz'"):
        assay.parameter_impact(
            Guesses(), study="zzz", storage=f"sqlite:///{tmp_path / '.assay' / 'studies.db'}", **common
        )
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write to"):
        assay.parameter_impact(Guesses(), out=tmp_path / "file" / "x", **common)
    with pytest.raises(ConfigError, match="a store has one"):
        assay.tune(Guesses(), apply=first.artifact, salt="other", **common)
    assert requests == []


@pytest.mark.slow
def test_a_policy_at_its_cap_keeps_the_best_so_far(tmp_path: Path) -> None:
    report = tuned(tmp_path, method="policy", episodes=25, tasks_per_episode=10, max_search_calls=45).to_dict()
    assert "cap of 45" in report["stopped"]
    assert report["trials"] >= 2
    assert any("before the best parameters were confirmed" in note for note in report["notes"])


@pytest.mark.parametrize(
    ("answer", "reasoning", "follows"),
    [
        ("no", "maybe no\nit is yes", 0.0),
        (".5", "so it is 0.5", 1.0),
        ("$1,000", "that makes 1000", 1.0),
        ("yes", "first no.\nThen yes", 1.0),
    ],
)
def test_an_answer_is_compared_with_the_last_word_of_its_reasoning(answer: str, reasoning: str, follows: float) -> None:
    assert measure([TaskRun(task_id="1", score=1.0, answer=answer, reasoning=reasoning)]).coherence == follows


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


def test_a_missing_package_is_distinguished_from_another_host() -> None:
    error = pickle.loads(pickle.dumps(MissingExtra("ray", "ray")))
    assert (type(error), str(error)) == (MissingExtra, str(MissingExtra("ray", "ray")))


# -- what a reader found


@pytest.mark.slow
def test_a_study_lost_at_the_end_affects_only_the_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import assay.api.tune.run

    decide = assay.api.tune.run._decide

    def lost_study(*args: Any) -> None:
        for file in (tmp_path / ".assay").glob("studies.db*"):
            file.unlink()
        decide(*args)

    monkeypatch.setattr(assay.api.tune.run, "_decide", lost_study)
    report = tuned(tmp_path, trials=4)
    assert report.page is None
    assert any("no page: the study at" in note for note in report.notes)
    assert report.to_dict()["test"]["tuned"]["score"] is not None


@pytest.mark.slow
def test_a_study_is_not_resumed_by_another_program_of_the_same_name(tmp_path: Path) -> None:
    report = tuned(tmp_path, trials=3, study="s")
    assert report.to_dict()["trials"] == 3

    class Other(Guesses):
        pass

    Other.__module__, Other.__qualname__ = Guesses.__module__, Guesses.__qualname__
    other = Other()
    other.answer.demos = [dspy.Example(question="number 1 of all", answer="yes")]
    with pytest.raises(ConfigError, match="searches something else: versions"):
        tuned(tmp_path, trials=4, study="s", program=other)


@pytest.mark.slow
def test_runs_are_counted_with_their_samples(tmp_path: Path) -> None:
    data = tuned(tmp_path, trials=2, samples=2, pruner="none").to_dict()
    assert data["task_runs"] == 2 * sum(trial["n"] for trial in data["history"])


def test_task_difficulty_is_not_noise_and_tied_trials_may_differ() -> None:
    agent = SyntheticAgent("hartmann", seed=1, fixed=0.6)
    settings = SearchConfig(seed=1, trials=40)
    outcome = search(
        AgentObjective(agent, agent.right), agent.tasks, ALL, settings, open_study("fixed", None, ALL, settings)
    )
    spread = max(outcome.expected.values()) - min(outcome.expected.values())
    assert spread > 0.05  # with the tasks' own difficulty as noise all were level
    assert agent.success(outcome.best.point.parameters) > 0.9 * agent.best
    assert outcome.front == [outcome.best.number]


def test_a_pruned_trial_counts_like_a_complete_one() -> None:
    hard, easy = {f"h{n}": 0.0 for n in range(5)}, {f"e{n}": 1.0 for n in range(5)}
    trials = [hard | easy for _ in range(9)] + [hard]
    expected = smoothed_scores([Point("agent", {"temperature": 0.5})] * 10, trials, TWO)
    assert [each.adjusted for each in expected] == pytest.approx([0.5] * 10)


def test_pictures_of_another_objective_include_pruned_trials() -> None:
    settings = SearchConfig(trials=12, objectives=("latency",), pruner="hyperband", block=2)
    study = open_study("latency", None, TWO, settings)
    search(AgentObjective(Aims(), Aims.right), TASKS, TWO, settings, study)
    assert all(trial.values[0] < 0.05 for trial in with_pruned_trials(study).trials)


@pytest.mark.slow
def test_impact_skips_invalid_values_and_excludes_unscored_runs() -> None:
    class Fussy(Aims):
        def set_parameters(self, parameters: Mapping[str, Any]) -> None:
            if parameters["max_steps"] == 50:
                raise ValueError("too many")
            super().set_parameters(parameters)

    start = Point("agent", {"temperature": 0.7, "max_steps": 10})
    outcome = impact(AgentObjective(Fussy(), Aims.right), TASKS, TWO, start, levels=2)
    assert [(effect.parameter, effect.value) for effect in outcome.effects] == [
        ("temperature", 0.1),
        ("temperature", 2.0),
        ("max_steps", 1.0),
    ]
    assert outcome.failed == [
        "max_steps=50: Fussy.set_parameters({'temperature': 0.7, 'max_steps': 50}) raised ValueError: too many"
    ]
    assert outcome.to_dict()["start"]["metrics"]["accuracy"]["mean"] is not None

    class Idle:
        def execute(self, task: Any) -> str:
            return "same"

        def set_parameters(self, parameters: Mapping[str, Any]) -> None:
            pass

    unscored = impact(AgentObjective(Idle(), lambda task, output: {"accuracy": math.nan}), TASKS, TWO, start, levels=2)
    assert unscored.without_effect == ["temperature", "max_steps"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "policy", "trials": 5}, "trials would have no effect on a policy"),
        ({"method": "policy", "prune_at": 0.3, "block": 2}, "prune_at, block would have no effect"),
        ({"episodes": 3}, "episodes would have no effect on a search"),
    ],
)
def test_settings_of_the_other_method_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TuneSettings(program="p", rubric="r", data="d", **options)


@pytest.mark.parametrize(
    ("value", "text"),
    [(2000, "2000"), (1733.4, "1733"), (0.123456, "0.123"), (50, "50"), (-1150.2, "-1150"), (3.0, "3")],
)
def test_printed_figures_can_be_entered_again(value: float, text: str) -> None:
    assert in_figures(value) == text
