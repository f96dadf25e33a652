"""What is watched while a policy trains, and what is said when it goes wrong. Numbers in, alarms out."""

import math
from collections import defaultdict
from collections.abc import Mapping

import numpy as np

__all__ = ["Watch"]

_WINDOW = 10  # steps of a window of the convergence rule
_SETTLED = 0.1  # half width of the interval under which no difference counts as none
_RUN = 3  # steps in a row before an alarm


class Watch:
    """Curves by step, the alarms that they raise (each once, with its cure), and whether training has converged.

    Converged: over the last ten steps the mean reward differs from that of the ten before by no more than chance (the 95 % interval of
    Welch holds 0) and by little (it is no wider than 0.1 to either side).
    """

    def __init__(self) -> None:
        self.curves: dict[str, dict[int, float]] = defaultdict(dict)
        self.alarms: dict[str, str] = {}

    def see(self, step: int, told: Mapping[str, float]) -> list[str]:
        """Takes in the numbers of a step; gives the alarms that are new."""
        for name, value in told.items():
            self.curves[name][step] = value
        known = set(self.alarms)
        for name, alarm in self._alarms().items():
            self.alarms.setdefault(name, f"step {step}: {alarm}")
        return [text for name, text in self.alarms.items() if name not in known]

    def last(self, name: str, count: int) -> list[float]:
        """The last numbers of a curve."""
        curve = self.curves.get(name, {})
        return [curve[step] for step in sorted(curve)[-count:]]

    def _alarms(self) -> dict[str, str]:
        found = {}
        entropy, start = self.last("entropy", _RUN), [v for _, v in sorted(self.curves.get("entropy", {}).items())[:_RUN]]
        if len(entropy) == _RUN and len(self.curves["entropy"]) > _RUN and max(entropy) < 0.2 * float(np.mean(start)):
            found["entropy"] = (
                f"entropy has fallen from {np.mean(start):.2f} to {entropy[-1]:.2f} nats a token: the policy explores no more. Raise --beta or "
                "--temperature, or lower --learning-rate"
            )
        clipped = self.last("clip_ratio/region_mean", _RUN)
        if len(clipped) == _RUN and min(clipped) > 0.2:
            found["clip"] = f"{100 * clipped[-1]:.0f} % of the tokens are clipped: the policy moves too fast. Lower --learning-rate or --iterations"
        apart, first = self.last("reward_std", _RUN), [v for _, v in sorted(self.curves.get("reward_std", {}).items())[:_RUN]]
        if len(apart) == _RUN and len(self.curves["reward_std"]) > _RUN and max(apart) < 0.2 * float(np.mean(first)) and not self._done():
            found["deviation"] = (
                f"the deviation of the rewards has fallen from {np.mean(first):.3f} to {apart[-1]:.3f}: there is ever less to learn from. Take "
                "other tasks, raise --temperature or --num-generations, or give the rubric grades between 0 and 1"
            )
        flat = self.last("flat_groups", _RUN)
        if len(flat) == _RUN and min(flat) >= 0.75:
            reward = self.last("score", 1)[-1] if self.last("score", 1) else math.nan
            hard = "easy: take harder tasks" if reward > 0.5 else "hard: warm it up (assay train sft), or take easier tasks"
            found["flat"] = (
                f"{100 * flat[-1]:.0f} % of the groups have no spread, so nothing is learned from them. The tasks are too {hard}, or raise "
                f"--num-generations "
                "or --temperature"
            )
        distinct = self.last("distinct", _RUN)
        if len(distinct) == _RUN and max(distinct) < 0.3 and not self._done():
            found["distinct"] = (
                f"only {100 * distinct[-1]:.0f} % of a group's answers are different ones: raise --temperature, --beta or --num-generations"
            )
        kl = self.last("kl", _RUN)
        if len(kl) == _RUN and min(kl) > 0.5:
            found["kl"] = f"the policy is {kl[-1]:.2f} nats a token from where it began: raise --beta or lower --learning-rate"
        cut = self.last("cut_off", _RUN)
        if len(cut) == _RUN and min(cut) > 0.3:
            found["cut"] = f"{100 * cut[-1]:.0f} % of the answers are cut off: raise --max-completion, or give a rubric that minds length"
        if self._moves("reward") > 0 and self._moves("turns") > 0 >= self._moves("score"):
            found["income"] = (
                "the reward rises with the number of calls and the score does not: step rewards are earned by making calls. Lower --step-weight or "
                "--discount, or bound the calls with --set max_steps=…"
            )
        if self._moves("score") > 0 > self._moves("watched"):
            found["hacking"] = (
                "the rubric that is trained on rises while the one that only watches falls: the first is being gamed. Look at the samples, and "
                "mend its criteria"
            )
        return found

    def _done(self) -> bool:
        """Whether the score is near its top, where all rollouts are alike for a good reason."""
        return min(self.last("score", _RUN) or [1.0]) >= 0.9

    def _moves(self, name: str) -> float:
        """1 where a curve rises beyond chance (Spearman's rank correlation with the step, 5 %), -1 where it falls, 0 otherwise."""
        curve = self.curves.get(name, {})
        if len(curve) < _WINDOW or len(set(curve.values())) < 2:
            return 0.0
        from scipy import stats

        rho, p = stats.spearmanr(sorted(curve), [curve[step] for step in sorted(curve)])
        return math.copysign(1.0, rho) if p < 0.05 else 0.0

    @property
    def converged(self) -> bool | None:
        """By the rule; None where there are too few steps for it."""
        rewards = self.last("reward", 2 * _WINDOW)
        if len(rewards) < 2 * _WINDOW:
            return None
        before, after = rewards[:_WINDOW], rewards[_WINDOW:]
        if np.ptp(rewards) == 0:
            return True
        from scipy import stats

        interval = stats.ttest_ind(after, before, equal_var=False).confidence_interval(0.95)
        return bool(interval.low <= 0 <= interval.high and max(-interval.low, interval.high) <= _SETTLED)
