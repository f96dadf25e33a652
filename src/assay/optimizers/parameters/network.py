"""The policy network: from an agent's metrics and parameters to adjustments of the parameters. Measures nothing."""

from collections.abc import Sequence

import numpy as np

from assay.optimizers.metrics import METRICS
from assay.programs import RANGES

__all__ = ["RULES", "Policy", "state_of"]

_HIDDEN = 8
_SIGMA = 0.15  # of a parameter's range: how far an adjustment strays from what the network says, at first
_LEAST, _MOST = 0.03, 0.4
_PUSH = 0.1  # of a parameter's range, for a metric of 0
_STEP = 0.02  # of the network's own weights

# rows: parameters; columns: accuracy, efficiency, coherence, adaptability, tool usage. What a low metric raises or lowers.
RULES = _PUSH * np.array(
    [
        [1, 0, 0, 0, 0],  # context_length
        [0, 0, -1, 1, 0],  # temperature
        [1, -1, 0, 0, 0],  # max_steps
        [0, -1, 0, 0, -1],  # tool_usage_threshold
        [0, 0, 1, 1, 0],  # reasoning_depth
    ],
    dtype=float,
)


class Policy:
    """A Gaussian policy: mean = A·d + V·tanh(W·s + b), with a standard deviation of its own for each parameter.

    s are the deficits d = 1 - metric (0 where nothing measures it) and the parameters, all in [0, 1]; the mean and the actions are adjustments
    in shares of each parameter's range. A begins as `RULES` and V at 0: the untrained network follows the rules alone.
    """

    def __init__(self, *, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        inputs, outputs = len(METRICS) + len(RANGES), len(RANGES)
        self.rules = RULES.copy()
        self.hidden, self.bias = rng.normal(0, 1 / np.sqrt(inputs), (_HIDDEN, inputs)), np.zeros(_HIDDEN)
        self.out = np.zeros((outputs, _HIDDEN))
        self.log_sigma = np.full(outputs, np.log(_SIGMA))

    @property
    def sigma(self) -> np.ndarray:
        return np.asarray(np.exp(self.log_sigma))

    def mean(self, state: np.ndarray) -> np.ndarray:
        return np.asarray(self.rules @ state[: len(METRICS)] + self.out @ np.tanh(self.hidden @ state + self.bias))

    def propose(self, state: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
        """`count` actions, `[action][parameter]`."""
        return np.asarray(self.mean(state) + self.sigma * rng.normal(size=(count, len(RANGES))))

    def update(self, state: np.ndarray, action: np.ndarray, advantage: float) -> None:
        """One step up the gradient of advantage times the action's log-probability (REINFORCE, Williams 1992, Machine Learning 8:229), in units
        of the standard deviation, so that a step is as large where the policy is sure as where it is not.

        Args:
            advantage: in standard deviations; above 0 the action becomes likelier.
        """
        sigma = self.sigma
        z = (action - self.mean(state)) / sigma
        push = advantage * z * sigma  # sigma squared times the gradient z / sigma of the mean
        active = np.tanh(self.hidden @ state + self.bias)
        back = (self.out.T @ push) * (1 - active**2)
        self.rules += _STEP * np.outer(push, state[: len(METRICS)])
        self.out += _STEP * np.outer(push, active)
        self.hidden += _STEP * np.outer(back, state)
        self.bias += _STEP * back
        self.log_sigma = np.clip(self.log_sigma + _STEP * advantage * (z**2 - 1) / 2, np.log(_LEAST), np.log(_MOST))


def state_of(metrics: Sequence[float | None], places: Sequence[float]) -> np.ndarray:
    """What the network sees: a deficit for each metric, then the parameters' places in their ranges."""
    return np.array([0.0 if value is None else 1 - value for value in metrics] + list(places))
