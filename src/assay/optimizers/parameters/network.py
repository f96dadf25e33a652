"""The adjuster's network: maps metrics and parameters of an agent to changes of the parameters. Does not run agents."""

from collections.abc import Sequence

import numpy as np

from assay.evaluation.metrics import METRICS
from assay.programs import RANGES

_HIDDEN = 8
_SIGMA = 0.15  # initial standard deviation, in shares of a range
_LEAST, _MOST = 0.03, 0.4
_PUSH = 0.1  # of a parameter's range, for a metric of 0
_STEP = 0.02  # of the network's own weights

# What a low metric raises or lowers.
# rows: parameters; columns: accuracy, efficiency, coherence, adaptability, tool usage
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


class Adjuster:
    """A Gaussian distribution of adjustments: mean = A·d + V·tanh(W·s + b), one standard deviation per parameter.

    s holds the deficits d = 1 - metric (0 for a metric that was not measured) and the parameters, all in [0, 1]. Means
    and actions are in shares of each parameter's range. Initially A is `RULES` and V is 0, so the untrained network
    follows the rules.
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
        """One gradient step on advantage times the action's log-probability.

        Source: REINFORCE (Williams 1992, Machine Learning 8:229). The gradient is taken in units of the standard
        deviation, so that the step size does not depend on it.

        Args:
            advantage: in standard deviations; a positive one makes the action more likely.
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
    """Input of the network: a deficit for each metric, then the position of each parameter in its range."""
    return np.array([0.0 if value is None else 1 - value for value in metrics] + list(places))
