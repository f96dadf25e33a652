"""Curves of a policy gradient run, the alarms they raise, and the convergence rule. Does not stop a training."""

import math
from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from assay.reports.training_log import TrainingLog

__all__ = ["TrainingMonitor"]

_WINDOW = 10  # steps of each window of the convergence rule
_CONVERGED = 0.1  # largest half width of the interval of the difference, in units of the reward
_SMALL = 0.05  # a significant change of the mean reward that a longer training is not worth
_RUN = 3  # consecutive steps before an alarm


class TrainingMonitor:
    """Curves by step, alarms, and whether training has converged. Each alarm is raised once and names a remedy.

    Converged: Welch's 95 % interval of the difference between the mean reward of the last ten steps and of the ten
    steps before reaches at most 0.1 to either side, and contains 0 or reaches at most 0.05. A significant difference
    that is certainly below 0.05 is none that a longer training is worth.

    Args:
        log: receives every value and alarm immediately.
    """

    def __init__(self, log: TrainingLog | None = None) -> None:
        self.curves: dict[str, dict[int, float]] = defaultdict(dict)
        self.alarms: dict[str, str] = {}
        self._log = log

    def update(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """Adds the metrics of a step. Returns the new alarms."""
        for name, value in metrics.items():
            self.curves[name][step] = value
        before = set(self.alarms)
        for name, alarm in self._alarms().items():
            self.alarms.setdefault(name, f"step {step}: {alarm}")
        if self._log is not None:
            self._log.values(step, metrics, self.alarms)
        return [text for name, text in self.alarms.items() if name not in before]

    def evaluated(self, step: int, scores: Mapping[str, float]) -> None:
        """Adds the scores of an evaluation, by curve."""
        for name, value in scores.items():
            self.curves[name][step] = value
        if self._log is not None:
            self._log.values(step, scores, self.alarms)

    def alarm(self, step: int, name: str, text: str) -> None:
        """Raises an alarm that no curve shows."""
        self.alarms[name] = text
        if self._log is not None:
            self._log.values(step, {}, self.alarms)

    @property
    def evaluated_steps(self) -> set[int]:
        """Steps at which held-out or retention tasks were evaluated."""
        names = [name for name in self.curves if name.startswith(("held_out_", "retained_"))]
        return {step for name in names for step in self.curves[name]}

    def last(self, name: str, count: int) -> list[float]:
        """The last `count` values of a curve, or fewer."""
        curve = self.curves.get(name, {})
        return [curve[step] for step in sorted(curve)[-count:]]

    def _first(self, name: str) -> list[float]:
        return [value for _, value in sorted(self.curves.get(name, {}).items())[:_RUN]]

    def _alarms(self) -> dict[str, str]:
        """All alarms at this step, by name. The thresholds are rules of thumb, not from a paper."""
        alarms = {
            "entropy": self._entropy(),
            "clip": self._clipping(),
            "deviation": self._deviation(),
            "zero_variance": self._zero_variance(),
            "distinct": self._diversity(),
            "kl": self._kl(),
            "cut": self._truncation(),
            "income": self._call_rewards(),
            "hacking": self._reward_hacking(),
        }
        return {name: text for name, text in alarms.items() if text is not None}

    def _collapsed(self, name: str) -> bool:
        """Whether a curve has stayed below a fifth of its first values."""
        last = self.last(name, _RUN)
        more = len(self.curves.get(name, {})) > _RUN
        return len(last) == _RUN and more and max(last) < 0.2 * float(np.mean(self._first(name)))

    def _entropy(self) -> str | None:
        if not self._collapsed("entropy"):
            return None
        first, last = np.mean(self._first("entropy")), self.last("entropy", 1)[-1]
        return (
            f"entropy fell from {first:.2f} to {last:.2f} nats per token: the policy has stopped exploring. Raise "
            "beta=… or temperature=…, or lower learning_rate=…"
        )

    def _clipping(self) -> str | None:
        clipped = self.last("clip_ratio/region_mean", _RUN)
        if len(clipped) < _RUN or min(clipped) <= 0.2:
            return None
        return (
            f"{100 * clipped[-1]:.0f} % of the tokens are clipped: the policy changes too fast. Lower "
            "learning_rate=… or iterations=…"
        )

    def _deviation(self) -> str | None:
        if not self._collapsed("reward_std") or self._near_maximum():
            return None
        first, last = np.mean(self._first("reward_std")), self.last("reward_std", 1)[-1]
        return (
            f"the standard deviation of the rewards fell from {first:.3f} to {last:.3f}: little is left to learn from. "
            "Take other tasks, raise temperature=… or num_generations=…, or give the rubric grades between 0 and 1"
        )

    def _zero_variance(self) -> str | None:
        shares = self.last("zero_variance_groups", _RUN)
        if len(shares) < _RUN or min(shares) < 0.75:
            return None
        reward = self.last("score", 1)[-1] if self.last("score", 1) else math.nan
        if reward >= 0.9:
            advice = "The tasks are too easy: take harder tasks"
        elif reward > 0.1:
            # neither 0 nor the maximum: the rollouts are alike, and the tasks are not at fault
            advice = "The answers of a group are alike, or the rubric does not tell them apart: give it finer grades"
        else:
            advice = "The tasks are too hard: train by SFT first (assay train sft), or take easier tasks"
        return (
            f"{100 * shares[-1]:.0f} % of the groups have zero variance, so nothing is learned from them. {advice}, or "
            "raise num_generations=… or temperature=…"
        )

    def _diversity(self) -> str | None:
        distinct = self.last("distinct", _RUN)
        if len(distinct) < _RUN or max(distinct) >= 0.3 or self._near_maximum():
            return None
        return (
            f"only {100 * distinct[-1]:.0f} % of the answers of a group are distinct: raise temperature=…, beta=… or "
            "num_generations=…"
        )

    def _kl(self) -> str | None:
        kl = self.last("kl", _RUN)
        if len(kl) < _RUN or min(kl) <= 0.5:
            return None
        return (
            f"the KL to the model before training is {kl[-1]:.2f} nats per token. Raise beta=… or lower learning_rate=…"
        )

    def _truncation(self) -> str | None:
        cut = self.last("cut_off", _RUN)
        if len(cut) < _RUN or min(cut) <= 0.3:
            return None
        return (
            f"{100 * cut[-1]:.0f} % of the answers are truncated: raise max_completion=…, or add a criterion on length "
            "to the rubric"
        )

    def _call_rewards(self) -> str | None:
        if not (self._trend("reward") > 0 and self._trend("turns") > 0 >= self._trend("score")):
            return None
        return (
            "the reward rises with the number of calls and the score does not: step rewards are earned by making more "
            "calls. Lower step_weight=… or discount=…, or limit the calls with parameters={'max_steps': …}"
        )

    def _reward_hacking(self) -> str | None:
        if not self._trend("score") > 0 > self._trend("monitor"):
            return None
        return (
            "the score by the trained rubric rises while the score by the monitor rubric falls: the trained rubric is "
            "being gamed. Read the samples, and correct its criteria"
        )

    def _near_maximum(self) -> bool:
        """Whether the score is at least 0.9, where equal rollouts are expected."""
        return min(self.last("score", _RUN) or [1.0]) >= 0.9

    def _trend(self, name: str) -> float:
        """1 for a rising curve, -1 for a falling one (Spearman's rank correlation with the step, p < 0.05), else 0."""
        curve = self.curves.get(name, {})
        if len(curve) < _WINDOW or len(set(curve.values())) < 2:
            return 0.0
        from scipy import stats

        rho, p = stats.spearmanr(sorted(curve), [curve[step] for step in sorted(curve)])
        return math.copysign(1.0, rho) if p < 0.05 else 0.0

    @property
    def converged(self) -> bool | None:
        """By the rule of the class; None before 20 steps."""
        rewards = self.last("reward", 2 * _WINDOW)
        if len(rewards) < 2 * _WINDOW:
            return None
        before, after = rewards[:_WINDOW], rewards[_WINDOW:]
        if np.ptp(rewards) == 0:  # Welch's test is undefined for two constant samples
            return True
        from scipy import stats

        interval = stats.ttest_ind(after, before, equal_var=False).confidence_interval(0.95)
        most = max(-interval.low, interval.high)
        return bool(most <= (_CONVERGED if interval.low <= 0 <= interval.high else _SMALL))
