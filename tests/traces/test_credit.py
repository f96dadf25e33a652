"""Credit: worked values, and what must hold whatever the rewards."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, strategies as st

from assay.errors import ConfigError, Unscored
from assay.traces import Rollout, Transition
from assay.traces.credit import Baseline, fitted_values, gae, returns, rewards_of

REWARDS = st.lists(st.floats(-10, 10), min_size=1, max_size=6)


def rollout(steps: list[float], score: float | None, rating: float | None = None) -> Rollout:
    transitions = [Transition(t=t, model="m", request={}, step_rewards={"a": value}) for t, value in enumerate(steps)]
    return Rollout(score=score, human_rating=rating, transitions=transitions)


def credited(group: list[list[float]], **options: bool) -> list[list[float]]:
    baseline, of = Baseline(**options), [returns(rewards) for rewards in group]
    for values in of:
        baseline.add(values)
    return [baseline.advantages(values) for values in of]


def test_the_published_worked_example_of_returns_gives_1_45() -> None:
    rewards = rewards_of(rollout([0.15, 0.15, 0.15, 0.0], 1.0))
    assert rewards == [0.15, 0.15, 0.15, 1.0]
    assert returns(rewards) == pytest.approx([1.45, 1.30, 1.15, 1.0])
    assert returns(rewards, scheme="episode") == pytest.approx([1.45] * 4)
    assert returns(rewards, scheme="uniform") == pytest.approx([1.45 / 4] * 4)
    assert returns(rewards, scheme="step") == rewards
    # 1.0; 0.15 + 0.5; 0.15 + 0.5·0.65; 0.15 + 0.5·0.475
    assert returns(rewards, discount=0.5) == pytest.approx([0.3875, 0.475, 0.65, 1.0])


@pytest.mark.parametrize("every_turn", [False, True])
def test_the_order_of_the_rollouts_does_not_change_the_result(every_turn: bool) -> None:
    rng = random.Random(5)
    group = [[rng.choice([0.1, 0.15, 1 / 3, 0.7]) for _ in range(rng.randint(1, 4))] for _ in range(40)]
    first = credited(group, every_turn=every_turn)
    for _ in range(20):
        order = rng.sample(range(len(group)), len(group))
        again = credited([group[at] for at in order], every_turn=every_turn)
        assert [again[order.index(at)] for at in range(len(group))] == first


def test_advantages_of_three_rollouts_match_hand_computed_values() -> None:
    # turn 0: 1, 0, 0. Leave one out: 1 - 0; 0 - 1/2; 0 - 1/2.
    # Sample deviation of 1, 0, 0: sqrt(((2/3)^2 + 2/9) / 2) = 0.57735
    scaled = credited([[1.0], [0.0], [0.0]])
    assert [value for (value,) in scaled] == pytest.approx([1 / 0.57745, -0.5 / 0.57745, -0.5 / 0.57745], rel=1e-4)
    unscaled = credited([[1.0], [0.0], [0.0]], leave_one_out=False, scale=False)
    assert [value for (value,) in unscaled] == pytest.approx([2 / 3, -1 / 3, -1 / 3])


def test_a_longer_rollout_is_compared_with_the_last_return_of_a_shorter_one() -> None:
    # the second rollout has no turn 1: its last return, 1.0, is used there
    (_, second), _ = credited([[0.0, 0.25], [1.0]], scale=False)
    assert second == pytest.approx(0.25 - 1.0)


def test_unknown_schemes_and_invalid_discounts_are_refused() -> None:
    for options, match in (
        ({"scheme": "magic"}, "must be one of"),
        ({"discount": 1.5}, "between 0 and 1"),
        ({"discount": 0.9, "scheme": "episode"}, "no effect"),
    ):
        with pytest.raises(ConfigError, match=match):
            returns([1.0], **options)  # type: ignore[arg-type]


def test_a_missing_score_is_never_a_number() -> None:
    for broken in (rollout([0.0], None), rollout([0.0], math.nan), rollout([math.inf], 1.0)):
        with pytest.raises(Unscored):
            rewards_of(broken)
    assert rewards_of(rollout([0.1, 0.2], 0.5, rating=1.0), outcome="human", step_weight=0.0) == [0.0, 1.0]
    assert rewards_of(rollout([0.1, 0.2], 0.5, rating=1.0), outcome_weight=2.0) == pytest.approx([0.1, 1.2])
    assert rewards_of(rollout([], 0.5)) == []


@given(REWARDS, st.integers(2, 5))
def test_identical_rollouts_give_exactly_zero(rewards: list[float], count: int) -> None:
    assert credited([rewards] * count) == [[0.0] * len(rewards)] * count


@given(st.lists(st.integers(1, 5), min_size=2, max_size=6), st.floats(0.01, 0.2))
def test_correct_use_of_a_tool_has_no_negative_total_advantage(calls: list[int], step: float) -> None:
    group = [[step] * tools + [1.0] for tools in calls]
    by_rollout = credited(group)
    for turn in range(max(calls)):
        pushes = [advantages[turn] for tools, advantages in zip(calls, by_rollout, strict=True) if turn < tools]
        assert math.fsum(pushes) >= -1e-9


@given(st.lists(st.lists(st.floats(-10, 10), min_size=3, max_size=3), min_size=2, max_size=6))
def test_advantages_of_rollouts_of_equal_length_sum_to_zero(group: list[list[float]]) -> None:
    by_rollout = credited(group)
    for turn in range(3):
        assert math.fsum(advantages[turn] for advantages in by_rollout) == pytest.approx(0.0, abs=1e-6)


@given(st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=6), min_size=2, max_size=8), st.floats(1.5, 100))
def test_scaled_advantages_do_not_depend_on_the_scale_of_rewards(group: list[list[float]], factor: float) -> None:
    sums = [math.fsum(rewards) for rewards in group]
    if max(sums) - min(sums) < 0.05:
        return
    unscaled, larger = credited(group), credited([[factor * reward for reward in rewards] for rewards in group])
    for a, b in zip(unscaled, larger, strict=True):
        assert b == pytest.approx(a, rel=0.02, abs=1e-3)


def test_gae_between_one_step_and_the_whole_return() -> None:
    rewards, values = [0.15, 0.15, 1.0], [0.5, 0.6, 0.7]
    assert gae(rewards, values, decay=1.0) == pytest.approx([1.3 - 0.5, 1.15 - 0.6, 1.0 - 0.7])
    assert gae(rewards, values, decay=0.0) == pytest.approx([0.15 + 0.6 - 0.5, 0.15 + 0.7 - 0.6, 1.0 - 0.7])
    with pytest.raises(ConfigError, match="3 rewards for 1 values"):
        gae(rewards, [0.0])


def test_fitted_values_follow_features_and_never_see_their_own_group() -> None:
    rng = np.random.default_rng(0)
    hard = rng.integers(0, 2, 60)
    features = [[{"hard": float(h)}] for h in hard]
    groups = [f"g{at}" for at in range(60)]
    values = fitted_values(features, [[1.0 - h] for h in hard], groups)
    assert all(abs(value - (1 - h)) < 0.1 for (value,), h in zip(values, hard, strict=True))
    with_outlier = fitted_values(features, [[100.0 if at == 0 else 1.0 - h] for at, h in enumerate(hard)], groups)
    assert with_outlier[0] == pytest.approx(values[0])  # the return of its own rollout does not change its value
    assert fitted_values([], [], []) == []
    assert fitted_values([[{}], [{}]], [[1.0], [3.0]], ["a", "a"]) == [[2.0], [2.0]]
