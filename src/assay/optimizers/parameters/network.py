"""The policy network: from an agent's metrics to adjustments of its parameters. Torch where it is installed, else numpy."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from assay.optimizers.metrics import METRICS
from assay.programs import RANGES

__all__ = ["RULES", "NumpyPolicy", "TorchPolicy", "make_policy", "state_of"]

_HIDDEN = 8
_SIGMA = 0.15  # of a parameter's range: how far an adjustment strays from what the network says, at first
_LEAST, _MOST = 0.03, 0.4
_PUSH = 0.1  # of a parameter's range, for a metric of 0

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


class NumpyPolicy:
    """A Gaussian policy: mean = A·d + V·tanh(W·s + b), with a deviation of its own for each parameter.

    s are the deficits d = 1 - metric (0 where nothing measures it) and the parameters, all in [0, 1]; the mean and the actions
    are adjustments in shares of each parameter's range. A begins as the rules, V at 0, so that the untrained network follows
    the rules alone. One update is one step of REINFORCE (Williams 1992, Machine Learning 8:229) up the gradient of advantage
    times log-probability, in units of the deviation, so that a step is as large where the policy is sure as where it is not.
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

    def update(self, state: np.ndarray, action: np.ndarray, advantage: float, learning_rate: float) -> None:
        """One step for one action that was taken."""
        sigma = self.sigma
        z = (action - self.mean(state)) / sigma
        push = advantage * z * sigma  # sigma squared times the gradient z / sigma of the mean
        active = np.tanh(self.hidden @ state + self.bias)
        back = (self.out.T @ push) * (1 - active**2)
        self.rules += learning_rate * np.outer(push, state[: len(METRICS)])
        self.out += learning_rate * np.outer(push, active)
        self.hidden += learning_rate * np.outer(back, state)
        self.bias += learning_rate * back
        self.log_sigma = np.clip(self.log_sigma + learning_rate * advantage * (z**2 - 1) / 2, np.log(_LEAST), np.log(_MOST))


class TorchPolicy(NumpyPolicy):
    """The same, its gradient by torch."""

    def update(self, state: np.ndarray, action: np.ndarray, advantage: float, learning_rate: float) -> None:
        import torch

        names = ("rules", "hidden", "bias", "out", "log_sigma")
        leaves = {name: torch.tensor(getattr(self, name), dtype=torch.float64, requires_grad=True) for name in names}
        s, a, held = (torch.tensor(values, dtype=torch.float64) for values in (state, action, self.sigma))
        mean = leaves["rules"] @ s[: len(METRICS)] + leaves["out"] @ torch.tanh(leaves["hidden"] @ s + leaves["bias"])
        centre = -0.5 * (a - mean) ** 2  # held**2 times the mean's part of the log-probability
        spread = torch.exp(leaves["log_sigma"])
        z = ((a - mean) / held).detach()
        width = -torch.log(spread) / 2 - (z * held / spread) ** 2 / 4  # half the deviation's part
        (advantage * (centre + width).sum()).backward()
        for name in names:
            gradient = leaves[name].grad
            assert gradient is not None
            setattr(self, name, getattr(self, name) + learning_rate * gradient.numpy())
        self.log_sigma = np.clip(self.log_sigma, np.log(_LEAST), np.log(_MOST))


def make_policy(*, seed: int = 0) -> Any:
    """Torch's where it can be imported, else numpy's: the same steps to rounding."""
    try:
        import torch  # noqa: F401
    except ImportError:
        return NumpyPolicy(seed=seed)
    return TorchPolicy(seed=seed)


def state_of(metrics: Sequence[float | None], places: Sequence[float]) -> np.ndarray:
    """What the network sees: a deficit for each metric, then the parameters' places in their ranges."""
    return np.array([0.0 if value is None else 1 - value for value in metrics] + list(places))
