"""Search over agent parameters: what is refused, caps, dead processes, other studies, reported figures."""

import math
import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import dspy
import pytest
from tuned_agents import TASKS, TWO, Aims, Guesses, cool, searched, tuned

import assay
from assay.commands.tune import Tune
from assay.errors import (
    ConfigError,
    MissingExtra,
)
from assay.optimizers import budget
from assay.optimizers.parameters import AgentObjective, Point, SearchConfig, Space, in_figures, open_study, search
from assay.optimizers.parameters.impact import impact, with_pruned_trials
from assay.optimizers.parameters.results import smoothed_scores
from assay.optimizers.parameters.search import requeue_all
from assay.programs import RANGES
from assay.testing import SyntheticAgent, scripted_lm

ALL = Space(programs=["agent"], acting={"agent": list(RANGES)})


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
        ({"ranges": {"max_steps": (1, math.inf)}}, ConfigError, "a finite number"),
        ({"ranges": {"max_steps": (math.nan, 3)}}, ConfigError, "a finite number"),
        ({"seed": -1}, ConfigError, "seed: must be"),
        ({"storage": "://x"}, ConfigError, "storage: it is neither"),
        ({"method": "policy", "learning_rate": math.nan}, ConfigError, "must be a finite number"),
        ({"method": "policy", "tasks_per_episode": 0}, ConfigError, "tasks_per_episode: must be"),
        ({"method": "policy", "sampler": "random"}, ConfigError, "sampler: would have no effect on a policy"),
    ],
)
def test_wrong_settings_of_a_search_are_refused(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        tuned(tmp_path, **options)


def test_the_shares_of_workers_add_up_to_the_cap() -> None:
    config = Tune(program="p", rubric="r", data="d", workers=8, max_calls=13, max_cost_usd=4.0)
    parts = [config.part_of(worker) for worker in range(8)]
    assert sum(part.max_calls for part in parts) == 13
    assert sum(part.max_cost_usd for part in parts) == 4.0
    assert replace(config, max_calls=0).part_of(0).max_calls == 0


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


def test_a_missing_package_is_distinguished_from_another_host() -> None:
    error = pickle.loads(pickle.dumps(MissingExtra("ray", "ray")))
    assert (type(error), str(error)) == (MissingExtra, str(MissingExtra("ray", "ray")))


@pytest.mark.slow
def test_a_study_lost_at_the_end_affects_only_the_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = budget.plan_report

    def lost_study(*args: Any, searching: bool = False, **options: Any) -> Any:
        for file in (tmp_path / ".assay").glob("studies.db*") if not searching else ():
            file.unlink()
        return plan(*args, searching=searching, **options)

    monkeypatch.setattr(budget, "plan_report", lost_study)
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
    assert spread > 0.05  # with the tasks' difficulty counted as noise all were equal
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
    ("value", "text"),
    [(2000, "2000"), (1733.4, "1733"), (0.123456, "0.123"), (50, "50"), (-1150.2, "-1150"), (3.0, "3")],
)
def test_printed_figures_can_be_entered_again(value: float, text: str) -> None:
    assert in_figures(value) == text
