"""Advantages of LM calls from the rewards of a batch of rollouts, by algorithm. Does not handle tokens.

`reinforce++` has one advantage per token: here each call gets its return, and the trainer normalises the returns over
the tokens of the batch.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from assay.optimizers.finetuning.rows import Row, Trajectory
from assay.optimizers.finetuning.settings import PolicySettings
from assay.traces.credit import AgentBaselines, Baseline, differs_by_turn, fitted_values, gae, returns

_RIDGES = (1.0, 30.0, 300.0, 3000.0)  # in rows; the first one is used where there are no hidden states
_HIDDEN = "hidden_0"  # feature name of the first dimension of the hidden state


@dataclass
class Credit:
    """Advantages of a batch.

    Attributes:
        advantages: `advantages[rollout][turn]`; rollouts of zero-variance groups are missing.
        groups: number of groups in the batch.
        zero_variance: number of groups whose rollouts all earned the same.
        explained: share of the variance of the returns that the value function of `ppo` explains, at most 1; NaN for
            other algorithms.
    """

    advantages: dict[str, list[float]] = field(default_factory=dict)
    groups: int = 0
    zero_variance: int = 0
    explained: float = math.nan

    def apply_to(self, batch: Sequence[Trajectory], left_out: Counter[str]) -> tuple[list[Row], list[Row]]:
        """Sets the advantages of the batch's rows.

        Args:
            left_out: counts the rollouts of zero-variance groups.
        Returns:
            Rows with an advantage, and rows of zero-variance groups.
        """
        rows, zero_variance = list[Row](), list[Row]()
        for trajectory in batch:
            turns = self.advantages.get(trajectory.rollout)
            if turns is None:
                left_out["rollouts of zero-variance groups"] += 1
                zero_variance += trajectory.rows
                continue
            for row in trajectory.rows:
                row.advantage, row.rollout = turns[row.turn], trajectory.rollout
            rows += trajectory.rows
        return rows, zero_variance


class ValueMemory:
    """Value function of `ppo`, fitted on the rollouts of the last batches: one batch is too small.

    The value is a ridge regression on features of the state (turn, tokens, tools, errors, task type; with a value head
    also the model's hidden state, see `add_hidden`). It is fitted anew at every step. The value of a group is predicted
    from other groups only, so it does not bias the gradient. The ridge is the one of `_RIDGES` that predicts the held
    out groups best.
    """

    def __init__(self, batches: int = 8) -> None:
        self.batches: deque[list[Trajectory]] = deque(maxlen=batches)

    def values(self, batch: Sequence[Trajectory], discount: float) -> list[list[float]]:
        """Values of the batch's calls, `[rollout][turn]`. Adds the batch to the memory."""
        earlier = [trajectory for past in self.batches for trajectory in past]
        names = [f"{index}:{trajectory.group}" for index, past in enumerate(self.batches) for trajectory in past]
        names += [trajectory.group for trajectory in batch]
        every = [*earlier, *batch]
        credited = [returns(trajectory.rewards, discount=discount) for trajectory in every]
        self.batches.append([trajectory.without_rows() for trajectory in batch])
        features, target = (
            [trajectory.features for trajectory in every],
            [value for turns in credited for value in turns],
        )
        ridges = (
            _RIDGES if any(_HIDDEN in turn for trajectory in every for turn in trajectory.features) else _RIDGES[:1]
        )
        fits = [fitted_values(features, credited, names, ridge=ridge) for ridge in ridges]
        return min(fits, key=lambda values: _squared_error(values, target))[len(earlier) :]

    def to_json(self) -> list[list[dict[str, Any]]]:
        return [
            [
                {
                    "group": trajectory.group,
                    "rollout": trajectory.rollout,
                    "rewards": trajectory.rewards,
                    "features": trajectory.features,
                }
                for trajectory in batch
            ]
            for batch in self.batches
        ]

    def load(self, batches: Sequence[Sequence[dict[str, Any]]]) -> None:
        """Adds the batches that `to_json` returned."""
        self.batches.extend([Trajectory(**fields) for fields in batch] for batch in batches)


def _squared_error(values: Sequence[Sequence[float]], target: Sequence[float]) -> float:
    return math.fsum(
        (value - expected) ** 2 for value, expected in zip([v for turns in values for v in turns], target, strict=True)
    )


def add_hidden(batch: Sequence[Trajectory], hidden_of: Callable[[Sequence[Row]], list[list[float]]]) -> None:
    """Adds the model's last hidden state at the end of each call's prompt to the features of its turn (value head).

    A call without a row gets the mean over the batch.

    Args:
        hidden_of: rows -> `[row][dimension]`.
    """
    rows = [(trajectory, row) for trajectory in batch for row in trajectory.rows]
    if not rows:
        return
    states = np.array(hidden_of([row for _, row in rows]))
    by_turn = {(id(trajectory), row.turn): state for (trajectory, row), state in zip(rows, states, strict=True)}
    mean = states.mean(axis=0)
    for trajectory in batch:
        for turn, features in enumerate(trajectory.features):
            state = by_turn.get((id(trajectory), turn), mean)
            features.update({f"{_HIDDEN[:-1]}{i}": float(value) for i, value in enumerate(state)})


def assign_credit(batch: Sequence[Trajectory], config: PolicySettings, memory: ValueMemory) -> Credit:
    """Advantages of all calls of a batch.

    Sources, by algorithm:
        grpo: return minus the group's mean at the same turn, divided by the standard deviation of the group's episode
            returns (arXiv 2402.03300).
        rloo: return minus the mean of the group's other rollouts, not scaled (arXiv 2402.14740).
        reinforce++: the return; the trainer normalises it over all tokens of the batch (arXiv 2501.03262).
        reinforce++-turn (our variant): return minus the batch's mean at the same turn, divided by the standard
            deviation of the batch's episode returns.
        ppo: generalised advantage estimation over the turns (arXiv 1506.02438), centred and scaled over the batch.
    """
    credited = {
        trajectory.rollout: returns(trajectory.rewards, scheme=config.returns, discount=config.discount)
        for trajectory in batch
    }
    groups: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in batch:
        groups[trajectory.group].append(trajectory)
    credit = Credit(groups=len(groups))
    if config.algorithm == "reinforce++":
        differs = len({tuple(turns) for turns in credited.values()}) > 1
        # the KL penalty differs by token, so it is learned from even where all returns are equal
        if differs or config.kl_in_reward:
            credit.advantages = credited
        else:
            credit.zero_variance = len(groups)
    elif config.algorithm == "ppo":
        _generalised(batch, credited, config, memory, credit)
    else:
        _against_baselines(batch, groups, credited, config, credit)
    return credit


def _generalised(
    batch: Sequence[Trajectory],
    credited: dict[str, list[float]],
    config: PolicySettings,
    memory: ValueMemory,
    credit: Credit,
) -> None:
    """Fills in the advantages of `ppo`."""
    values = memory.values(batch, config.discount)
    # equal rewards, unequal values: the differences are errors of the value function, not a signal
    if len({tuple(trajectory.rewards) for trajectory in batch}) < 2:
        credit.zero_variance = credit.groups
        return
    target = np.array([value for trajectory in batch for value in credited[trajectory.rollout]])
    residual = target - np.array([value for turns in values for value in turns])
    credit.explained = 1 - float(residual.var() / target.var()) if target.var() > 0 else math.nan
    raw = {
        trajectory.rollout: gae(trajectory.rewards, turns, discount=config.discount, decay=config.gae_lambda)
        for trajectory, turns in zip(batch, values, strict=True)
    }
    every = np.array([value for rollout in raw.values() for value in rollout])
    mean, width = (float(every.mean()), float(every.std()) + 1e-4) if len(every) else (0.0, 1.0)
    credit.advantages = {name: [(value - mean) / width for value in turns] for name, turns in raw.items()}


def _against_baselines(
    batch: Sequence[Trajectory],
    groups: dict[str, list[Trajectory]],
    credited: dict[str, list[float]],
    config: PolicySettings,
    credit: Credit,
) -> None:
    """Fills in the advantages of `grpo`, `rloo` and `reinforce++-turn`: returns minus a mean."""
    over_batch, rloo = config.algorithm == "reinforce++-turn", config.algorithm == "rloo"
    every_turn = differs_by_turn(config.returns, config.discount)
    for members in [list(batch)] if over_batch else groups.values():
        baseline = AgentBaselines(
            lambda: Baseline(leave_one_out=rloo, scale=config.scale and not rloo, every_turn=every_turn)
        )
        for member in members:
            baseline.add(credited[member.rollout], member.agents)
        if not baseline.has_variance:
            credit.zero_variance += len(groups) if over_batch else 1
            continue
        credit.advantages |= {
            member.rollout: baseline.advantages(credited[member.rollout], member.agents) for member in members
        }
