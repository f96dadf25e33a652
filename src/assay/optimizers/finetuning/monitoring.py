"""Curves of a policy gradient run, the alarms they raise, and the convergence rule. Does not stop a training."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping

import numpy as np

from assay.reports.training_log import TrainingLog

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

    def _alarms(self) -> dict[str, str]:
        """All alarms at this step, by name. The thresholds are rules of thumb, not from a paper."""
        alarms = dict[str, str]()
        if self._collapsed("entropy"):
            alarms["entropy"] = (
                f"entropy fell from {self._first('entropy'):.2f} to {self.last('entropy', 1)[0]:.2f} nats per token: "
                "the policy has stopped exploring. Raise beta=… or temperature=…, or lower learning_rate=…"
            )
        if (clipped := self._lasting("clip_ratio/region_mean", lambda share: share > 0.2)) is not None:
            alarms["clip"] = (
                f"{100 * clipped:.0f} % of the tokens are clipped: the policy changes too fast. Lower "
                "learning_rate=… or iterations=…"
            )
        if self._collapsed("reward_std") and not self._near_maximum():
            alarms["deviation"] = (
                f"the standard deviation of the rewards fell from {self._first('reward_std'):.3f} to "
                f"{self.last('reward_std', 1)[0]:.3f}: little is left to learn from. Take other tasks, raise "
                "temperature=… or num_generations=…, or give the rubric grades between 0 and 1"
            )
        if (share := self._lasting("zero_variance_groups", lambda share: share >= 0.75)) is not None:
            alarms["zero_variance"] = (
                f"{100 * share:.0f} % of the groups have zero variance, so nothing is learned from them. "
                f"{self._difficulty()}, or raise num_generations=… or temperature=…"
            )
        distinct = self._lasting("distinct", lambda share: share < 0.3)
        if distinct is not None and not self._near_maximum():
            alarms["distinct"] = (
                f"only {100 * distinct:.0f} % of the answers of a group are distinct: raise temperature=…, beta=… or "
                "num_generations=…"
            )
        if (kl := self._lasting("kl", lambda nats: nats > 0.5)) is not None:
            alarms["kl"] = (
                f"the KL to the model before training is {kl:.2f} nats per token. Raise beta=… or lower learning_rate=…"
            )
        if (cut := self._lasting("cut_off", lambda share: share > 0.3)) is not None:
            alarms["cut"] = (
                f"{100 * cut:.0f} % of the answers are truncated: raise max_completion=…, or add a criterion on "
                "length to the rubric"
            )
        if self._trend("reward") > 0 and self._trend("turns") > 0 >= self._trend("score"):
            alarms["income"] = (
                "the reward rises with the number of calls and the score does not: step rewards are earned by making "
                "more calls. Lower step_weight=… or discount=…, or limit the calls with parameters={'max_steps': …}"
            )
        if self._trend("score") > 0 > self._trend("monitor"):
            alarms["hacking"] = (
                "the score by the trained rubric rises while the score by the monitor rubric falls: the trained "
                "rubric is being gamed. Read the samples, and correct its criteria"
            )
        return alarms

    def _first(self, name: str) -> float:
        """Mean of the first values of a curve."""
        return float(np.mean([value for _, value in sorted(self.curves[name].items())[:_RUN]]))

    def _lasting(self, name: str, holds: Callable[[float], bool]) -> float | None:
        """The last value of a curve, if its last three values all hold."""
        last = self.last(name, _RUN)
        return last[-1] if len(last) == _RUN and all(map(holds, last)) else None

    def _collapsed(self, name: str) -> bool:
        """Whether a curve has stayed below a fifth of its first values."""
        return len(self.curves.get(name, {})) > _RUN and max(self.last(name, _RUN)) < 0.2 * self._first(name)

    def _difficulty(self) -> str:
        """What to do about groups of equal rewards."""
        score = (self.last("score", 1) or [math.nan])[0]
        if score >= 0.9:
            return "The tasks are too easy: take harder tasks"
        if score > 0.1:  # neither 0 nor the maximum: the rollouts are alike, and the tasks are not at fault
            return "The answers of a group are alike, or the rubric does not tell them apart: give it finer grades"
        return "The tasks are too hard: train by SFT first (assay train sft), or take easier tasks"

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
