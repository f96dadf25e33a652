"""The shipped environments Nim and experiment, and environments with gymnasium's interface."""

import json
import random
from typing import Any

import dspy
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import assay
from assay.datasets import Task
from assay.errors import EnvironmentFailed
from assay.programs import EnvironmentAgent, GymEnvironment, InvalidAction
from assay.rubrics import NoGrade
from assay.shipped.programs.nim.checks import nim_won
from assay.shipped.programs.nim.program import Nim
from assay.shipped.programs.nim.tasks import NimRules, nim_problem
from assay.testing import scripted_lm


def nim(sticks: int = 7, skill: float = 1.0, seed: int = 0, most: int = 3) -> Task:
    return Task(id="1", inputs={"sticks": sticks, "most": most, "skill": skill, "seed": seed})


def answering(actions: Any) -> Any:
    turns = iter(actions)
    return scripted_lm(lambda request: json.dumps({"action": next(turns)}))


# Nim


def test_only_legal_moves_are_offered_and_taken() -> None:
    game = Nim()
    assert game.reset(nim(sticks=2)).actions == ("1", "2")
    for action in ("3", "0", "-1", "two", "1.0", "²", "99999999999"):
        with pytest.raises(InvalidAction, match="take 1 to 2 sticks"):
            game.step(action)
    assert game.step("2").reward == 1


def taking(count: Any) -> Any:
    return lambda left, most, rng: count


@pytest.mark.parametrize("move", [0, 4, -1, 2.0, True, "1", None])
def test_an_opponent_that_cheats_is_detected_and_the_game_unscored(move: Any) -> None:
    agent = EnvironmentAgent(lambda: Nim(taking(move)), "Nim.")
    with (
        dspy.context(lm=answering(["1", "1"])),
        pytest.raises(EnvironmentFailed, match=r"the opponent cheated: it took .* of 7 sticks"),
    ):
        agent(**nim(sticks=8).inputs)


def record(*moves: tuple[Any, Any]) -> dict[str, Any]:
    steps = [
        {"action": own, "reward": 0.0, "error": None, "info": {"opponent": reply}, "done": False}
        for own, reply in moves
    ]
    return {"steps": steps}


def test_the_replay_of_a_game_decides_and_not_its_reward() -> None:
    task = nim(sticks=6)
    assert nim_won(task, record(("2", 1), ("3", None)), None).value == 1
    lost = record(("2", 3), ("1", None))
    lost["steps"][-1]["reward"] = 1.0  # a claim; 6 - 2 - 3 - 1 = 0, so the last stick was taken by the agent
    assert nim_won(task, lost, None).value == 1
    claimed = record(("1", 3), ("1", 1))
    claimed["steps"][-1]["reward"] = 1.0  # 6 - 1 - 3 - 1 - 1 = 0: the opponent took the last one
    assert nim_won(task, claimed, None).value == 0
    for moves, problem in (
        ([("2", 4)], "the opponent took 4 of 4 sticks, at most 3"),
        ([("5", 1)], "the agent took 5 of 6 sticks"),
        ([("2", None), ("1", 1)], "left out a move"),
        ([("3", 3), ("1", 1)], "the agent moved after the end"),
        ([("3", 2), ("1", 1)], "the opponent moved after the end"),
    ):
        with pytest.raises(NoGrade, match=problem):
            nim_won(task, record(*moves), None)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 30), st.integers(1, 5), st.integers(0, 5000))
def test_games_of_random_players_replay_to_their_result(sticks: int, most: int, seed: int) -> None:
    game, rng = Nim(), random.Random(seed)
    step = game.reset(nim(sticks, 0.3, seed, most))
    own, replies = [], []
    while not step.done:
        own.append(int(rng.choice(step.actions)))
        step = game.step(str(own[-1]))
        replies.append(step.info["opponent"])
    assert nim_problem(NimRules(sticks, most), own, replies) == (step.reward == 1, "")


# The experiment


def experiment(material: str = "iron", seed: int = 1, trials: int = 3, noise: float = 5.0) -> Task:
    return Task(id="1", inputs={"material": material, "trials": trials, "noise": noise, "seed": seed})


def test_nim_and_experiment_run_by_name_with_their_rubrics(tmp_path: Any) -> None:
    for name, data, answer in (
        ("nim", "nim:size=20&seed=1&skill=0", "1"),
        ("experiment", "experiment:size=20&seed=1&trials=2", "heat 50, hours 5"),
    ):
        report = assay.evaluate(
            name,
            rubric=name,
            data=data,
            split="test",
            lm=scripted_lm(lambda request, answer=answer: json.dumps({"action": answer})),
            store=tmp_path / f"{name}.db",
        )
        assert report.evaluation.unscored == 0
        assert not any(result.failed for result in report.evaluation.results.values())


class Discrete:
    def __init__(self, n: int, start: int = 0) -> None:
        self.n, self.start = n, start


class Doors:
    """One of `n` doors has the prize; the observation says the number of the tries that are left."""

    def __init__(self, n: int = 3, tries: int = 2, start: int = 0) -> None:
        self.action_space, self.tries, self.closed = Discrete(n, start), tries, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.prize = random.Random(seed).randrange(self.action_space.n) + self.action_space.start
        self.left = self.tries if options is None else options["tries"]
        return {"left": self.left}, {"prize": self.prize}

    def step(self, action: Any) -> tuple[Any, ...]:
        assert isinstance(action, int)
        self.left -= 1
        won = action == self.prize
        return {"left": self.left}, float(won), won, self.left == 0, {"prize": self.prize, "object": object()}

    def close(self) -> None:
        self.closed += 1


def task(seed: int = 0, **inputs: Any) -> Task:
    return Task(id="1", inputs={"seed": seed, **inputs})


def test_a_truncated_episode_is_done() -> None:
    environment = GymEnvironment(Doors(tries=1))
    prize = environment.reset(task()).info["prize"]
    last = environment.step(str((int(prize) + 1) % 3))
    assert last.done
    assert last.info["truncated"] is True
    assert "object" not in last.info


def test_an_action_mask_removes_actions() -> None:
    class Masked(Doors):
        def step(self, action: Any) -> tuple[Any, ...]:
            result = super().step(action)
            return (*result[:4], {"action_mask": [1, 0, 1]})

    environment = GymEnvironment(Masked())
    prize = environment.reset(task()).info["prize"]
    assert environment.step(str((int(prize) + 1) % 3)).actions == ("0", "2")


def test_the_older_interface_is_refused_with_the_way_out() -> None:
    class Old(Doors):
        def step(self, action: Any) -> tuple[Any, ...]:
            return {"left": 1}, 0.0, False, {}

    agent = EnvironmentAgent(lambda: GymEnvironment(Old()), "Open a door.")
    lm = scripted_lm(lambda request: json.dumps({"action": "0"}))
    with dspy.context(lm=lm), pytest.raises(EnvironmentFailed, match="older gym, which returns four values"):
        agent(seed=0)
