"""Credit assignment over the LM calls of a rollout: returns, baselines, advantages. Pure functions of numbers.

A rollout has one reward per call; the last includes the outcome. Does not access stores or trainers. Missing scores are
not accepted: leave out such rollouts and count them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from assay.errors import ConfigError, Unscored
from assay.support.names import one_of
from assay.traces.records import Rollout

RETURNS = ("to_go", "episode", "step", "uniform")
_EPSILON = 1e-4  # added to the deviation, as in TRL's GRPOTrainer
_ULP = 2**1074  # every finite float is an integer multiple of 2**-1074
_SAME = 1e-9  # relative difference below which episode returns are equal


def rewards_of(
    rollout: Rollout, *, outcome: str = "score", step_weight: float = 1.0, outcome_weight: float = 1.0
) -> list[float]:
    """Reward of each LM call: the weighted sum of its step rewards. The last call also gets the weighted outcome.

    Args:
        outcome: `score` (of the rubric) or `human` (human rating, else the score).
        step_weight: Factor of the step rewards.
        outcome_weight: Factor of the outcome.
    Raises:
        Unscored: The rollout has no outcome, or a reward is not finite.
    """
    value = rollout.human_rating if outcome == "human" and rollout.human_rating is not None else rollout.score
    if value is None or not math.isfinite(value):
        raise Unscored(f"rollout {rollout.id} has no score")
    rewards = [step_weight * math.fsum(transition.step_rewards.values()) for transition in rollout.transitions]
    if rewards:
        rewards[-1] += outcome_weight * value
    if not all(map(math.isfinite, rewards)):
        raise Unscored(f"rollout {rollout.id} has a step reward that is not finite")
    return rewards


def returns(rewards: Sequence[float], *, scheme: str = "to_go", discount: float = 1.0) -> list[float]:
    """Return of each call of a rollout, `[turn]`.

    Example: rewards 0.15, 0.15, 0.15, 1.0 give the `to_go` returns 1.45, 1.30, 1.15, 1.0.

    Args:
        rewards: Reward of each call.
        scheme: `to_go`: G_t = sum over k >= t of discount^(k-t) r_k (Sutton and Barto, Reinforcement Learning, 2nd ed.,
            eq. 3.8); `episode`: the sum of all rewards for every call (episode-level credit); `step`: the call's own
            reward; `uniform`: the sum divided by the number of calls.
        discount: Discount factor in [0, 1], for `to_go` only.
    Raises:
        ConfigError: The scheme is unknown, or the discount is out of range or has no effect.
    """
    if scheme not in RETURNS:
        raise ConfigError(f"returns={scheme!r} {one_of(scheme, RETURNS)}")
    if not 0 <= discount <= 1:
        raise ConfigError(f"discount={discount!r} must be between 0 and 1")
    if discount != 1 and scheme != "to_go":
        raise ConfigError(f"discount={discount!r} has no effect with returns={scheme!r}; use returns='to_go'")
    if scheme == "step":
        return list(rewards)
    if scheme == "to_go":
        result, following = [], 0.0
        for reward in reversed(rewards):
            following = reward + discount * following
            result.append(following)
        return result[::-1]
    total = math.fsum(rewards)
    return [total / len(rewards) if scheme == "uniform" else total] * len(rewards)


def differs_by_turn(scheme: str, discount: float) -> bool:
    """Whether the first call's return does not summarise the later ones: step rewards, or discounted returns."""
    return scheme == "step" or discount < 1


@dataclass
class Baseline:
    """Turn-level baseline over the rollouts of a group or batch, in memory independent of their number.

    Add every rollout, then compute the advantages of each:
    A_t = (G_t - mean of the others' G at turn t) / (deviation of all episode returns + 1e-4).
    A rollout that ended before turn t counts with its last G, so that longer rollouts are compared with the results of
    shorter ones. The episode return is the first call's G.

    Sums are exact, as integer multiples of 2**-1074: the result does not depend on the order of rollouts, and identical
    rollouts have an advantage of exactly 0. With undiscounted returns to go and equal outcomes, the advantages of a
    tool that all rollouts used correctly sum to at least 0 at every turn.

    Args:
        leave_one_out: Exclude the rollout itself from the mean.
        scale: Divide by the deviation.
        every_turn: Compute deviation and variance over the G of all turns, see `differs_by_turn`.
    Sources: leave-one-out: RLOO (arXiv 2402.14740); deviation of the group: GRPO (arXiv 2402.03300), of the batch:
        REINFORCE++ (arXiv 2501.03262). The mean by turn, including ended rollouts, is our own.
    """

    leave_one_out: bool = True
    scale: bool = True
    every_turn: bool = False
    count: int = 0
    _measured: int = 0
    _at: list[int] = field(default_factory=list)  # sums of G by turn, over the rollouts that had the turn
    _ended: list[int] = field(default_factory=list)  # sums of last G by the turn after it
    _range: list[tuple[float, float]] = field(default_factory=list)  # lowest and highest G by turn
    _end_range: list[tuple[float, float]] = field(default_factory=list)  # of last G by the turn after it
    _sum: int = 0  # of the G in the deviation
    _squares: int = 0

    def add(self, credited: Sequence[float]) -> None:
        """Add a rollout.

        Args:
            credited: Its returns, `[turn]`.
        """
        if not credited:
            return
        missing = len(credited) + 1 - len(self._at)
        self._at += [0] * missing
        self._ended += [0] * missing
        self._range += [(math.inf, -math.inf)] * missing
        self._end_range += [(math.inf, -math.inf)] * missing
        for turn, value in enumerate(credited):
            self._at[turn] += _units(value)
            self._range[turn] = _wider(self._range[turn], (value, value))
        self._ended[len(credited)] += _units(credited[-1])
        self._end_range[len(credited)] = _wider(self._end_range[len(credited)], (credited[-1], credited[-1]))
        self.count += 1
        for value in credited if self.every_turn else credited[:1]:
            units = _units(value)
            self._measured += 1
            self._sum += units
            self._squares += units * units

    @property
    def deviation(self) -> float:
        """Sample standard deviation of the episode returns, or of all G."""
        n = self._measured
        return math.sqrt((n * self._squares - self._sum**2) / (n * (n - 1) * _ULP**2)) if n > 1 else 0.0

    @property
    def has_variance(self) -> bool:
        """Whether the returns of the rollouts differ. If not, this is a zero-variance group."""
        ended = (math.inf, -math.inf)
        for turn in range(len(self._range) if self.every_turn else 1) if self.count > 1 else ():
            ended = _wider(ended, self._end_range[turn])
            low, high = _wider(self._range[turn], ended)
            if high - low > _SAME * max(1.0, abs(high), abs(low)):
                return True
        return False

    def advantages(self, credited: Sequence[float]) -> list[float]:
        """Advantages of an added rollout, `[turn]`; exactly 0 for a zero-variance group.

        Args:
            credited: Its returns, `[turn]`.
        """
        if not self.has_variance:
            return [0.0] * len(credited)
        divisor = self.deviation + _EPSILON if self.scale else 1.0
        result, ended = [], 0
        others = self.count - 1 if self.leave_one_out else self.count
        for turn, value in enumerate(credited):
            ended += self._ended[turn]
            units = _units(value)
            total = self._at[turn] + ended - (units if self.leave_one_out else 0)
            result.append((others * units - total) / (others * _ULP) / divisor)
        return result


class AgentBaselines:
    """A baseline for the calls of each named agent of the rollouts of a group or batch.

    The calls of an agent are compared with those of the same agent only, by their number among its own calls: a planner
    that asks twice does not shift the turns of the solver after it. Returns are those of the whole rollout, so that a
    planner is credited with what the solver made of its plan.

    Args:
        make: Makes the baseline of an agent.
    """

    def __init__(self, make: Callable[[], Baseline]) -> None:
        self._make = make
        self._of: dict[str, Baseline] = {}

    def add(self, credited: Sequence[float], agents: Sequence[str] = ()) -> None:
        """Add a rollout.

        Args:
            credited: Its returns, `[turn]`.
            agents: Name of the agent of each call; empty: all are of one agent.
        """
        for agent, turns in _turns_of(agents, len(credited)).items():
            if agent not in self._of:
                self._of[agent] = self._make()
            self._of[agent].add([credited[turn] for turn in turns])

    @property
    def has_variance(self) -> bool:
        """Whether the returns of any agent differ."""
        return any(baseline.has_variance for baseline in self._of.values())

    def advantages(self, credited: Sequence[float], agents: Sequence[str] = ()) -> list[float]:
        """Advantages of an added rollout, `[turn]`. Arguments as of `add`."""
        result = [0.0] * len(credited)
        for agent, turns in _turns_of(agents, len(credited)).items():
            values = self._of[agent].advantages([credited[turn] for turn in turns])
            for turn, value in zip(turns, values, strict=True):
                result[turn] = value
        return result


def _turns_of(agents: Sequence[str], count: int) -> dict[str, list[int]]:
    """The turns of each agent."""
    if agents and len(agents) != count:
        raise ConfigError(f"{len(agents)} agents for {count} calls")
    turns: dict[str, list[int]] = {}
    for turn in range(count):
        turns.setdefault(agents[turn] if agents else "", []).append(turn)
    return turns


def _units(value: float) -> int:
    """A finite float as an integer multiple of 2**-1074, the smallest positive float."""
    numerator, denominator = value.as_integer_ratio()
    return numerator << (_ULP.bit_length() - denominator.bit_length())  # both are powers of two


def _wider(left: tuple[float, float], right: tuple[float, float]) -> tuple[float, float]:
    return min(left[0], right[0]), max(left[1], right[1])


def gae(
    rewards: Sequence[float], values: Sequence[float], *, discount: float = 1.0, decay: float = 0.95
) -> list[float]:
    """Generalized advantage estimates over the turns of a rollout, `[turn]`.

    A_t = sum over k >= t of (discount · decay)^(k-t) · (r_k + discount · V_{k+1} - V_k), with V = 0 after the last
    turn.

    Args:
        rewards: Reward of each turn.
        values: Value estimate of each turn.
        discount: Discount factor gamma.
        decay: Lambda: 1 gives the return to go minus V_t, 0 the one-step temporal difference.
    Source: arXiv 1506.02438, eq. 16.
    """
    if len(rewards) != len(values):
        raise ConfigError(f"{len(rewards)} rewards for {len(values)} values")
    result, following, next_value = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        following = reward + discount * next_value - value + discount * decay * following
        next_value = value
        result.append(following)
    return result[::-1]


def fitted_values(
    features: Sequence[Sequence[Mapping[str, float]]],
    credited: Sequence[Sequence[float]],
    groups: Sequence[str],
    *,
    ridge: float = 1.0,
    folds: int = 5,
) -> list[list[float]]:
    """Value of every call, `[rollout][turn]`: cross-fitted ridge regression of G on features.

    Each group is predicted from the other folds, so that the baseline stays unbiased. With fewer than two groups, every
    value is the mean of G.

    Args:
        features: Feature values by name, `[rollout][turn]`; a missing feature is 0.
        credited: Returns, `[rollout][turn]`.
        groups: Group of each rollout.
        ridge: Regularization strength.
        folds: Number of folds; at most one per group.
    """
    names = sorted({name for rollout in features for turn in rollout for name in turn})
    turns = [turn for rollout in features for turn in rollout]
    rows = np.array([[turn.get(name, 0.0) for name in names] for turn in turns], dtype=float).reshape(
        len(turns), len(names)
    )
    target = np.array([value for rollout in credited for value in rollout], dtype=float)
    if len(rows) != len(target) or len(features) != len(groups):
        raise ConfigError(
            f"{len(rows)} rows of features for {len(target)} returns, {len(features)} rollouts for {len(groups)} groups"
        )
    order = {group: at for at, group in enumerate(dict.fromkeys(groups))}
    folds = min(folds, len(order))
    fold = np.array(
        [order[group] % max(1, folds) for group, rollout in zip(groups, credited, strict=True) for _ in rollout],
        dtype=int,
    )
    values = np.full(len(target), target.mean() if len(target) else 0.0)
    for test_fold in range(folds if folds > 1 else 0):
        learn, predict = fold != test_fold, fold == test_fold
        centre, width = rows[learn].mean(axis=0), rows[learn].std(axis=0) + 1e-12
        x, mean = (rows[learn] - centre) / width, target[learn].mean()
        weights = np.linalg.solve(x.T @ x + ridge * np.eye(len(names)), x.T @ (target[learn] - mean))
        values[predict] = (np.clip((rows[predict] - centre) / width, -10, 10)) @ weights + mean
    ends = np.cumsum([len(rollout) for rollout in credited])
    return [part.tolist() for part in np.split(values, ends[:-1])] if len(credited) else []
