"""Search over agent parameters: samplers, pruned and failed trials, resumed studies, sampling noise."""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tuned_agents import TASKS, TWO, Aims, searched

from assay.errors import (
    BudgetExceeded,
    Cancelled,
    ConfigError,
    ModelError,
    ProgramError,
    StoreError,
)
from assay.optimizers.parameters import AgentObjective, Point, SearchConfig, Space, open_study, search
from assay.optimizers.parameters.results import smoothed_scores
from assay.programs import RANGES


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
    with pytest.raises(ConfigError, match="prune_at: must be"):
        searched(prune_at=0)
    assert {trial.state for trial in outcome.trials} == {"complete", "pruned"}


@pytest.mark.parametrize("sampler", ["random", "grid", "nsga2", "cmaes", "gp"])
def test_other_samplers_are_supported(sampler: str) -> None:
    outcome = searched(sampler=sampler, trials=12, pruner="hyperband")
    assert outcome.expected[outcome.best.number] >= outcome.expected[outcome.default.number]


def test_a_trial_with_a_high_score_by_sampling_noise_is_not_selected() -> None:
    space = Space(programs=["agent"], acting={"agent": ["temperature"]}, ranges={"temperature": (0.1, 1.1)})
    random = np.random.default_rng(0)
    places = np.linspace(0.1, 1.1, 30)
    chances = 0.9 - 0.8 * np.abs(places - 0.8)
    values = [{str(task): float(random.random() < chance) for task in range(20)} for chance in chances]
    values[1] = {str(task): 1.0 for task in range(20)}  # sampling noise, far from the optimum
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


@pytest.mark.slow
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
    assert len(outcome.trials) == 20  # what was cut off is not a trial of its own


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
