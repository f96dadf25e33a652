"""Search over agent parameters: samplers, pruned and failed trials, resumed studies, sampling noise."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tuned_agents import TASKS, TWO, Aims, searched

from assay.errors import (
    BudgetExceeded,
    Cancelled,
    ConfigError,
    ModelError,
    ProgramError,
)
from assay.optimizers.parameters import AgentObjective, Point, SearchConfig, Space, open_study, search
from assay.optimizers.parameters.impact import impact
from assay.optimizers.parameters.results import smoothed_scores
from assay.optimizers.parameters.search import requeue_all
from assay.programs import RANGES
from assay.testing import SyntheticAgent
from assay.traces.store.leases import LostLease

ALL = Space(programs=["agent"], acting={"agent": list(RANGES)})


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
@pytest.mark.parametrize(
    ("stop", "raised"), [(BudgetExceeded("100 calls are spent"), BudgetExceeded), (KeyboardInterrupt(), Cancelled)]
)
def test_a_stop_within_a_trial_loses_nothing(tmp_path: Path, stop: BaseException, raised: type[Exception]) -> None:
    url = f"sqlite:///{tmp_path / 's.db'}"

    class Stopped(Aims):
        def execute(self, task: Any) -> Any:
            if self.executed >= 100:
                raise stop
            return super().execute(task)

    with pytest.raises(raised):
        searched(Stopped(), url=url, trials=20)
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


def test_an_agent_that_fails_scores_nothing_on_that_task() -> None:
    class Breaks(Aims):
        def execute(self, task: Any) -> Any:
            raise RuntimeError("broken")

    outcome = searched(Breaks(), trials=3)
    assert outcome.best.values["score"] == 0.0


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


def test_a_study_is_of_one_store(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 's.db'}"
    open_study("s", url, TWO, SearchConfig(), of={"store": "one"})
    open_study("s", url, TWO, SearchConfig(), of={"store": "one"})
    with pytest.raises(ConfigError, match="of another store"):
        open_study("s", url, TWO, SearchConfig(), of={"store": "two"})


def test_trials_of_a_dead_process_are_requeued_and_old_failures_do_not_end_a_search(tmp_path: Path) -> None:
    url, config = f"sqlite:///{tmp_path / 's.db'}", SearchConfig(trials=4)
    study = open_study("s", url, TWO, config)
    study.enqueue_trial({"temperature": 1.5, "max_steps": 30}, user_attrs={"default": True})
    for _ in range(8):  # more cuts than trials
        TWO.suggest(study.ask())
        requeue_all(study, lambda trial: True)
    outcome = searched(url=url, trials=4)
    assert sum(trial.state in ("complete", "pruned") for trial in outcome.trials) == 4
    assert outcome.default.point.parameters == {"temperature": 1.5, "max_steps": 30}
    assert outcome.default.state == "complete"


def test_a_search_that_was_taken_over_while_a_trial_ran_says_so(tmp_path: Path) -> None:
    url, config, lost = f"sqlite:///{tmp_path / 's.db'}", SearchConfig(trials=4), list[bool]()

    def guard() -> None:
        if lost:
            raise LostLease("taken over")

    class TakenOver(Aims):
        def execute(self, task: Any) -> Any:
            requeue_all(open_study("s", url, TWO, config), lambda trial: True)  # by the other process
            lost.append(True)
            raise BudgetExceeded("taken over: no further call is sent")

    agent = TakenOver()
    with pytest.raises(LostLease, match="taken over"):
        search(AgentObjective(agent, agent.right), TASKS, TWO, config, open_study("s", url, TWO, config, guard=guard))


def test_task_difficulty_is_not_noise_and_tied_trials_may_differ() -> None:
    agent = SyntheticAgent("hartmann", seed=1, fixed=0.6)
    settings = SearchConfig(seed=1, trials=40)
    outcome = search(
        AgentObjective(agent, agent.right), agent.tasks, ALL, settings, open_study("fixed", None, ALL, settings)
    )
    spread = max(outcome.expected.values()) - min(outcome.expected.values())
    assert spread > 0.05  # with the tasks' difficulty counted as noise all were equal
    assert agent.success(outcome.best.point.parameters) > 0.9 * agent.best
    assert outcome.front == [outcome.best.number]


@pytest.mark.slow
def test_impact_skips_invalid_values_and_excludes_unscored_runs() -> None:
    class Fussy(Aims):
        def set_parameters(self, parameters: Mapping[str, Any]) -> None:
            if parameters["max_steps"] == 50:
                raise ValueError("too many")
            super().set_parameters(parameters)

    start = Point("agent", {"temperature": 0.7, "max_steps": 10})
    outcome = impact(AgentObjective(Fussy(), Aims.right), TASKS, TWO, start, levels=2)
    moved = [(effect.parameter, effect.value) for effect in outcome.effects]
    assert moved == [("temperature", 0.1), ("temperature", 2.0), ("max_steps", 1.0)]
    (failed,) = outcome.failed
    assert failed.startswith("max_steps=50: ")
    assert failed.endswith("raised ValueError: too many")
    assert outcome.to_dict()["start"]["metrics"]["accuracy"]["mean"] is not None

    class Idle:
        def execute(self, task: Any) -> str:
            return "same"

        def set_parameters(self, parameters: Mapping[str, Any]) -> None:
            pass

    unscored = impact(AgentObjective(Idle(), lambda task, output: {"accuracy": math.nan}), TASKS, TWO, start, levels=2)
    assert unscored.without_effect == ["temperature", "max_steps"]


def test_mostly_unscored_trials_do_not_win() -> None:
    objective = AgentObjective(Aims(), lambda task, output: {"accuracy": 1.0 if task == "0" else math.nan})
    settings = SearchConfig(trials=5)
    with pytest.raises(ModelError, match="could not be measured on 39 of 40 runs"):
        search(objective, TASKS, TWO, settings, open_study("few", None, TWO, settings))
