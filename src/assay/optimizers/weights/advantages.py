"""Advantages of every LM call from the rewards of a batch of rollouts, as each algorithm has them. Numbers alone: no tokens."""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from assay.optimizers.weights.config import PolicyConfig
from assay.optimizers.weights.rows import Row, Trajectory
from assay.traces.credit import Baseline, differs_by_turn, fitted_values, gae, returns

__all__ = ["Credit", "ValueMemory", "assign_credit"]


@dataclass
class Credit:
    """`advantages[rollout][turn]`; rollouts of groups without spread have none. `flat` counts those groups."""

    advantages: dict[str, list[float]] = field(default_factory=dict)
    groups: int = 0
    flat: int = 0

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
                row.advantage = turns[row.turn]
            rows += one.rows
        return rows, flat


class ValueMemory:
    """Rollouts of the last batches, that a value is fitted on: one batch is too small for it.

    The value is a ridge regression on a handful of features of where a rollout stands (turn, tokens, tools, errors, kind of task), fitted
    anew at every step on other groups than it is asked about. A head on the model would need thousands of rollouts before it told more
    than the mean, and a small model's hidden state a pass of its own; this costs milliseconds, and cannot bias the gradient.
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
        return fitted_values([one.features for one in every], credited, names)[len(known) :]

    def to_json(self) -> list[list[dict[str, Any]]]:
        return [[{"group": o.group, "rollout": o.rollout, "rewards": o.rewards, "features": o.features} for o in batch] for batch in self.batches]

    def take(self, told: Sequence[Sequence[dict[str, Any]]]) -> None:
        self.batches.extend([Trajectory(**one) for one in batch] for batch in told)


def assign_credit(batch: Sequence[Trajectory], config: PolicyConfig, memory: ValueMemory) -> Credit:
    """Advantages of all calls of a batch.

    `grpo`: return minus the group's mean at the same turn, over the deviation of the group's episode returns (arXiv 2402.03300);
    `rloo`: minus the mean of the others', unscaled (arXiv 2402.14740); `reinforce++`: mean and deviation of the batch
    (arXiv 2501.03262); `ppo`: generalised advantages over the turns (arXiv 1506.02438), centred and scaled over the batch.
    """
    credited = {one.rollout: returns(one.rewards, scheme=config.returns, discount=config.discount) for one in batch}
    groups: dict[str, list[Trajectory]] = defaultdict(list)
    for one in batch:
        groups[one.group].append(one)
    found = Credit(groups=len(groups))
    if config.algorithm == "ppo":
        values = memory.values(batch, config.discount)
        if len({tuple(one.rewards) for one in batch}) < 2:  # the value of a turn is no reason to push what all did alike
            found.flat = len(groups)
            return found
        raw = {o.rollout: gae(o.rewards, v, discount=config.discount, decay=config.gae_lambda) for o, v in zip(batch, values, strict=True)}
        flat = np.array([value for rollout in raw.values() for value in rollout])
        mean, width = (float(flat.mean()), float(flat.std()) + 1e-4) if len(flat) else (0.0, 1.0)
        found.advantages = {name: [(value - mean) / width for value in turns] for name, turns in raw.items()}
        return found
    whole = config.algorithm == "reinforce++"
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
