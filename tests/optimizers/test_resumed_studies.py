"""A study interrupted at any moment ends with the trials, values and winner of an uninterrupted one."""

from pathlib import Path
from typing import Any

import pytest

from assay.optimizers.parameters import AgentObjective, SearchConfig, SearchOutcome, Space, open_study, search
from assay.testing.agents import SyntheticAgent

SPACE = Space(
    programs=["agent"],
    acting={"agent": ["temperature", "max_steps"]},
    ranges={"temperature": (0.1, 2.0), "max_steps": (1, 50)},
)


class Killed(BaseException):
    """Ends a search without any clean-up of Optuna or of ours, as SIGKILL does."""


class Fragile(SyntheticAgent):
    remaining_runs = 10**9  # runs until it is killed

    def execute(self, task: Any) -> bool:
        self.remaining_runs -= 1
        if self.remaining_runs < 0:
            raise Killed
        return super().execute(task)


def searched(url: str, config: SearchConfig, *, kill_after: int = 10**9, kill_at_draw: int = 10**9) -> SearchOutcome:
    agent = Fragile()
    agent.remaining_runs = kill_after
    study = open_study("s", url, SPACE, config)
    draw, drawn = study._storage.set_trial_param, [0]

    def set_trial_param(*args: Any, **kwargs: Any) -> None:
        drawn[0] += 1
        if drawn[0] > kill_at_draw:
            raise Killed
        draw(*args, **kwargs)

    study._storage.set_trial_param = set_trial_param  # type: ignore[method-assign]
    return search(AgentObjective(agent, agent.right), agent.tasks[:10], SPACE, config, study, alone=True)


def summary(outcome: SearchOutcome) -> Any:
    return (
        outcome.best.number,
        outcome.task_runs,
        [(t.number, t.state, t.point.parameters, t.values) for t in outcome.trials],
    )


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["tpe", "cmaes", "grid"])
def test_a_killed_search_resumes_to_the_same_result(sampler: str, tmp_path: Path) -> None:
    config = SearchConfig(trials=6, sampler=sampler, seed=3)
    uninterrupted = searched(f"sqlite:///{tmp_path / 'whole.db'}", config)
    assert len(uninterrupted.trials) == 6
    url = f"sqlite:///{tmp_path / 'killed.db'}"
    for kills in ({"kill_after": 0}, {"kill_after": 17}, {"kill_at_draw": 3}):
        with pytest.raises(Killed):
            searched(url, config, **kills)
    assert summary(searched(url, config)) == summary(uninterrupted)


@pytest.mark.slow
def test_a_killed_hyperband_search_resumes_to_the_same_result(tmp_path: Path) -> None:
    config = SearchConfig(trials=6, pruner="hyperband", block=5)
    uninterrupted = searched(f"sqlite:///{tmp_path / 'whole.db'}", config)
    url = f"sqlite:///{tmp_path / 'killed.db'}"
    for _ in range(2):
        with pytest.raises(Killed):
            searched(url, config, kill_after=17)
    assert summary(searched(url, config)) == summary(uninterrupted)
