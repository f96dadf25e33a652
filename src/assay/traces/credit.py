"""Which LM call of a rollout deserves how much of its reward: returns, baselines, advantages. Pure functions of numbers.

A rollout of T calls earned `rewards[t]` at each; the outcome stands in the last. Nothing here knows of stores or trainers, and
nothing takes a missing score: leave such rollouts out and count them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from assay.errors import ConfigError, Unscored
from assay.traces.records import Rollout

__all__ = ["RETURNS", "Baseline", "differs_by_turn", "fitted_values", "gae", "returns", "rewards_of"]

RETURNS = ("to_go", "episode", "step", "uniform")
_EPSILON = 1e-4  # beside the deviation, as in TRL's GRPOTrainer
_ULP = 2**1074  # every finite float is a whole number of 2**-1074
_SAME = 1e-9  # episode returns that differ by less have no spread


def rewards_of(rollout: Rollout, *, outcome: str = "score", step_weight: float = 1.0, outcome_weight: float = 1.0) -> list[float]:
    """The reward of each LM call: the weighted sum of its step rewards; the last has the weighted outcome as well.

    Args:
        outcome: `score` (the rubric's) or `human` (a person's rating, else the score).
    Raises:
        Unscored: the rollout has no outcome, or a reward is not finite.
    """
    value = rollout.human_rating if outcome == "human" and rollout.human_rating is not None else rollout.score
    if value is None or not math.isfinite(value):
        raise Unscored(f"rollout {rollout.id} has no score")
    rewards = [step_weight * math.fsum(transition.step_rewards.values()) for transition in rollout.transitions]
    if rewards:
        rewards[-1] += outcome_weight * value
    if not all(map(math.isfinite, rewards)):
        raise Unscored(f"rollout {rollout.id} has a step reward that is no finite number")
    return rewards


def returns(rewards: Sequence[float], *, scheme: str = "to_go", discount: float = 1.0) -> list[float]:
    """What each call of a rollout is credited with, `[turn]`.

    Args:
        scheme: `to_go`: G_t = sum over k >= t of discount^(k-t) r_k (Sutton and Barto, Reinforcement Learning, 2nd ed., eq. 3.8);
            `episode`: all calls get the sum of all; `step`: each its own reward; `uniform`: the sum, shared out equally.
        discount: in [0, 1]; of `to_go` only.
    Worked: 0.15, 0.15, 0.15, 1.0 gives to_go 1.45, 1.30, 1.15, 1.0.
    """
    if scheme not in RETURNS:
        raise ConfigError(f"returns={scheme!r} must be one of {', '.join(RETURNS)}")
    if not 0 <= discount <= 1:
        raise ConfigError(f"discount={discount!r} must be between 0 and 1")
    if discount != 1 and scheme != "to_go":
        raise ConfigError(f"discount={discount!r} would have no effect on returns={scheme!r}")
    if scheme == "step":
        return list(rewards)
    if scheme == "to_go":
        found, ahead = [], 0.0
        for reward in reversed(rewards):
            ahead = reward + discount * ahead
            found.append(ahead)
        return found[::-1]
    total = math.fsum(rewards)
    return [total / len(rewards) if scheme == "uniform" else total] * len(rewards)


def differs_by_turn(scheme: str, discount: float) -> bool:
    """Whether the first call's return knows little of the later ones': single steps, and discounted."""
    return scheme == "step" or discount < 1


@dataclass
class Baseline:
    """What the other rollouts of a group, or of a batch, were credited with at the same turn. Constant memory in their number.

    Add every rollout, then ask for each one's advantages:
    A_t = (G_t - mean of the others' G at turn t) / (deviation of all episode returns + 1e-4). A rollout that had ended before
    turn t stands there with its last G, so that a longer way is held against what shorter ones arrived at. The episode return is the first
    call's G. With `every_turn` (see `differs_by_turn`) the deviation is that of all G, and groups differ where any turn does.

    Sums are exact, as integers of `_ULP`: the order in which rollouts are added changes no bit, and where all are alike it gives exactly 0.

    Sources: leave-one-out, RLOO (arXiv 2402.14740); the deviation, GRPO (arXiv 2402.03300, of the group) and REINFORCE++
    (arXiv 2501.03262, of the batch); by turn and with rollouts that ended, ours. With undiscounted returns to go and equal
    outcomes the calls of a tool that all used rightly sum to no less than 0 at every turn.
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
    _sum: int = 0  # of the G that are measured
    _squares: int = 0

    def add(self, credited: Sequence[float]) -> None:
        """Takes in a rollout: its G by turn."""
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
    def spread(self) -> bool:
        """Whether there is anything to tell the rollouts apart by."""
        ended = (math.inf, -math.inf)
        for turn in range(len(self._range) if self.every_turn else 1) if self.count > 1 else ():
            ended = _wider(ended, self._end_range[turn])
            low, high = _wider(self._range[turn], ended)
            if high - low > _SAME * max(1.0, abs(high), abs(low)):
                return True
        return False

    def advantages(self, credited: Sequence[float]) -> list[float]:
        """Of a rollout that was added, by turn; exactly 0 everywhere without spread."""
        if not self.spread:
            return [0.0] * len(credited)
        divisor = self.deviation + _EPSILON if self.scale else 1.0
        found, ended = [], 0
        others = self.count - 1 if self.leave_one_out else self.count
        for turn, value in enumerate(credited):
            ended += self._ended[turn]
            units = _units(value)
            total = self._at[turn] + ended - (units if self.leave_one_out else 0)
            found.append((others * units - total) / (others * _ULP) / divisor)
        return found


def _units(value: float) -> int:
    """A finite float as a whole number of the smallest one."""
    numerator, denominator = value.as_integer_ratio()
    return numerator << (_ULP.bit_length() - denominator.bit_length())  # both are powers of two


def _wider(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    return min(one[0], other[0]), max(one[1], other[1])


def gae(rewards: Sequence[float], values: Sequence[float], *, discount: float = 1.0, decay: float = 0.95) -> list[float]:
    """Generalised advantage estimates over the turns of a rollout, `[turn]`.

    A_t = sum over k >= t of (discount · decay)^(k-t) · (r_k + discount · V_{k+1} - V_k), with V = 0 after the last turn.
    Source: arXiv 1506.02438, eq. 16. With decay 1 it is the return to go minus V_t; with 0 one step's surprise.
    """
    if len(rewards) != len(values):
        raise ConfigError(f"{len(rewards)} rewards for {len(values)} values")
    found, ahead, after = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        ahead = reward + discount * after - value + discount * decay * ahead
        after = value
        found.append(ahead)
    return found[::-1]


def fitted_values(
    features: Sequence[Sequence[Mapping[str, float]]],
    credited: Sequence[Sequence[float]],
    groups: Sequence[str],
    *,
    ridge: float = 1.0,
    folds: int = 5,
) -> list[list[float]]:
    """A value for every call, `[rollout][turn]`: ridge regression of G on features, each group predicted from the others' folds.

    No call is held against a value that was fitted to its own group, so the baseline stays unbiased. Features are numbers by
    name, an absent one 0; with fewer than two groups every value is the mean of G.
    """
    names = sorted({name for rollout in features for turn in rollout for name in turn})
    turns = [turn for rollout in features for turn in rollout]
    rows = np.array([[turn.get(name, 0.0) for name in names] for turn in turns], dtype=float).reshape(len(turns), len(names))
    target = np.array([value for rollout in credited for value in rollout], dtype=float)
    if len(rows) != len(target) or len(features) != len(groups):
        raise ConfigError(f"{len(rows)} rows of features for {len(target)} returns, {len(features)} rollouts for {len(groups)} groups")
    order = {group: at for at, group in enumerate(dict.fromkeys(groups))}
    folds = min(folds, len(order))
    fold = np.array([order[group] % max(1, folds) for group, rollout in zip(groups, credited, strict=True) for _ in rollout], dtype=int)
    found = np.full(len(target), target.mean() if len(target) else 0.0)
    for left_out in range(folds if folds > 1 else 0):
        learn, tell = fold != left_out, fold == left_out
        centre, width = rows[learn].mean(axis=0), rows[learn].std(axis=0) + 1e-12
        x, mean = (rows[learn] - centre) / width, target[learn].mean()
        weights = np.linalg.solve(x.T @ x + ridge * np.eye(len(names)), x.T @ (target[learn] - mean))
        found[tell] = (np.clip((rows[tell] - centre) / width, -10, 10)) @ weights + mean
    ends = np.cumsum([len(rollout) for rollout in credited])
    return [part.tolist() for part in np.split(found, ends[:-1])] if len(credited) else []
