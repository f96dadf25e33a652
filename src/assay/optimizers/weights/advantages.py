"""Advantages of every LM call from the rewards of a batch of rollouts, as each algorithm has them. Numbers alone: no tokens.

`reinforce++` has its advantages by token: here a call gets its return, and the trainer normalises over the tokens of the batch.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from assay.optimizers.weights.config import PolicyConfig
from assay.optimizers.weights.rows import Row, Trajectory
from assay.traces.credit import Baseline, differs_by_turn, fitted_values, gae, returns

__all__ = ["Credit", "ValueMemory", "add_hidden", "assign_credit"]

_RIDGES = (1.0, 30.0, 300.0, 3000.0)  # in rows; the first is that of the features alone
_HIDDEN = "hidden_0"  # name of the first of the hidden state's numbers


@dataclass
class Credit:
    """`advantages[rollout][turn]`; rollouts of groups without spread have none. `flat` counts those groups; `explained` is the share of the returns'
    variance that the value of `ppo` explains, NaN where there is none."""

    advantages: dict[str, list[float]] = field(default_factory=dict)
    groups: int = 0
    flat: int = 0
    explained: float = math.nan

    def given_to(self, batch: Sequence[Trajectory], left: Counter[str]) -> tuple[list[Row], list[Row]]:
        """The rows of the batch with their advantages, and apart, counted, those of groups without spread."""
        rows, flat = list[Row](), list[Row]()
        for one in batch:
            turns = self.advantages.get(one.rollout)
            if turns is None:
                left["rollouts of groups without spread"] += 1
                flat += one.rows
                continue
            for row in one.rows:
                row.advantage, row.rollout = turns[row.turn], one.rollout
            rows += one.rows
        return rows, flat


class ValueMemory:
    """Rollouts of the last batches, that a value is fitted on: one batch is too small for it.

    The value is a ridge regression on features of where a rollout stands (turn, tokens, tools, errors, kind of task; with a value head the
    model's hidden state too, see `add_hidden`), fitted anew at every step on other groups than it is asked about, so it cannot bias the gradient.
    The ridge is the one of `_RIDGES` that predicted the other groups best.
    """

    def __init__(self, batches: int = 8) -> None:
        self.batches: deque[list[Trajectory]] = deque(maxlen=batches)

    def values(self, batch: Sequence[Trajectory], discount: float) -> list[list[float]]:
        """A value for each call of the batch; the batch is remembered."""
        known = [one for earlier in self.batches for one in earlier]
        names = [f"{at}:{one.group}" for at, earlier in enumerate(self.batches) for one in earlier] + [one.group for one in batch]
        every = [*known, *batch]
        credited = [returns(one.rewards, discount=discount) for one in every]
        self.batches.append([one.without_rows() for one in batch])
        features, target = [one.features for one in every], [value for turns in credited for value in turns]
        ridges = _RIDGES if any(_HIDDEN in turn for one in every for turn in one.features) else _RIDGES[:1]
        tried = [fitted_values(features, credited, names, ridge=ridge) for ridge in ridges]
        return min(tried, key=lambda values: _square(values, target))[len(known) :]

    def to_json(self) -> list[list[dict[str, Any]]]:
        return [[{"group": o.group, "rollout": o.rollout, "rewards": o.rewards, "features": o.features} for o in batch] for batch in self.batches]

    def take(self, told: Sequence[Sequence[dict[str, Any]]]) -> None:
        self.batches.extend([Trajectory(**one) for one in batch] for batch in told)


def _square(values: Sequence[Sequence[float]], target: Sequence[float]) -> float:
    return math.fsum((value - wanted) ** 2 for value, wanted in zip([v for turns in values for v in turns], target, strict=True))


def add_hidden(batch: Sequence[Trajectory], hidden_of: Callable[[Sequence[Row]], list[list[float]]]) -> None:
    """Adds the model's last hidden state at the end of each call's prompt to the features of its turn: what a value head sees.

    A call that is not trained on gets the batch's mean.
    """
    rows = [(one, row) for one in batch for row in one.rows]
    if not rows:
        return
    states = np.array(hidden_of([row for _, row in rows]))
    at = {(id(one), row.turn): state for (one, row), state in zip(rows, states, strict=True)}
    mean = states.mean(axis=0)
    for one in batch:
        for turn, features in enumerate(one.features):
            features.update({f"{_HIDDEN[:-1]}{i}": float(value) for i, value in enumerate(at.get((id(one), turn), mean))})


def assign_credit(batch: Sequence[Trajectory], config: PolicyConfig, memory: ValueMemory) -> Credit:
    """Advantages of all calls of a batch.

    `grpo`: return minus the group's mean at the same turn, over the deviation of the group's episode returns (arXiv 2402.03300);
    `rloo`: minus the mean of the others', unscaled (arXiv 2402.14740); `reinforce++`: the return itself, which the trainer normalises over all
    tokens of the batch (arXiv 2501.03262); `reinforce++-turn` (ours): minus the batch's mean at the same turn, over the deviation of its episode
    returns; `ppo`: generalised advantages over the turns (arXiv 1506.02438), centred and scaled over the batch.
    """
    credited = {one.rollout: returns(one.rewards, scheme=config.returns, discount=config.discount) for one in batch}
    groups: dict[str, list[Trajectory]] = defaultdict(list)
    for one in batch:
        groups[one.group].append(one)
    found = Credit(groups=len(groups))
    if config.algorithm == "reinforce++":
        spread = len({tuple(turns) for turns in credited.values()}) > 1
        if spread or config.kl_in_reward:
            found.advantages = credited
        else:
            found.flat = len(groups)
        return found
    if config.algorithm == "ppo":
        values = memory.values(batch, config.discount)
        if len({tuple(one.rewards) for one in batch}) < 2:  # the value of a turn is no reason to push what all did alike
            found.flat = len(groups)
            return found
        target = np.array([value for one in batch for value in credited[one.rollout]])
        residual = target - np.array([value for turns in values for value in turns])
        found.explained = 1 - float(residual.var() / target.var()) if target.var() > 0 else math.nan
        raw = {o.rollout: gae(o.rewards, v, discount=config.discount, decay=config.gae_lambda) for o, v in zip(batch, values, strict=True)}
        flat = np.array([value for rollout in raw.values() for value in rollout])
        mean, width = (float(flat.mean()), float(flat.std()) + 1e-4) if len(flat) else (0.0, 1.0)
        found.advantages = {name: [(value - mean) / width for value in turns] for name, turns in raw.items()}
        return found
    whole = config.algorithm == "reinforce++-turn"
    for members in [list(batch)] if whole else groups.values():
        rloo = config.algorithm == "rloo"
        every_turn = differs_by_turn(config.returns, config.discount)
        baseline = Baseline(leave_one_out=rloo, scale=config.scale and not rloo, every_turn=every_turn)
        for one in members:
            baseline.add(credited[one.rollout])
        if not baseline.spread:
            found.flat += len(groups) if whole else 1
            continue
        found.advantages |= {one.rollout: baseline.advantages(credited[one.rollout]) for one in members}
    return found
