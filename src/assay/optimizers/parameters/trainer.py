"""`RLTrainer`: trains a policy that adjusts the five parameters of any agent. Does not need DSPy."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from assay.datasets import Task
from assay.errors import ConfigError
from assay.evaluation.progress import Progress
from assay.evaluation.statistics import Gain, mean_interval, paired_gain
from assay.optimizers.parameters.objective import AgentEvaluation, AgentObjective
from assay.optimizers.parameters.policy import Adjuster, PolicyOutcome, scores_by_task, train_policy
from assay.optimizers.parameters.space import Point, Space
from assay.programs import RANGES, AgentParameters, BaseAgent
from assay.support.numbers import signed
from assay.support.options import takes
from assay.support.reprs import ReportRepr, measure_text


@dataclass(frozen=True, repr=False)
class HeldOutReport(ReportRepr):
    """The initial and the best parameters on held-out tasks, which were not used for training or selection.

    `before` and `after` are mean scores in [0, 1] with `before_interval` and `after_interval` (95 %), NaN if nothing
    was scored. `gain` is paired by task. `unscored` counts tasks without a score on either side.
    """

    before: float
    before_interval: tuple[float, float]
    after: float
    after_interval: tuple[float, float]
    gain: Gain
    unscored: int

    def to_dict(self) -> dict[str, Any]:
        fields = {
            **vars(self),
            "before_interval": list(self.before_interval),
            "after_interval": list(self.after_interval),
            "gain": self.gain.to_dict(),
        }
        return {
            name: None if isinstance(value, float) and math.isnan(value) else value for name, value in fields.items()
        }

    def _facts(self) -> list[tuple[str, str]]:
        data = self.to_dict()
        sides = [
            (name, measure_text({"mean": data[name], "interval": data[f"{name}_interval"]}))
            for name in ("before", "after")
        ]
        return [*sides, ("gain", measure_text(data["gain"], change=True)), ("unscored", str(self.unscored))]


class RLTrainer:
    """Trains a policy that adjusts the five parameters of any agent.

    A run is unscored, left out and counted if a model or server could not be reached or the evaluation fails. Any other
    exception of the agent is its own failure and scores 0.

    Args:
        agent: has `execute(task)` and `set_parameters(mapping)`.
        evaluator: `evaluator(task, output)` returns the metrics of one run by name, each in [0, 1], with
            `accuracy`.
        benchmark: tasks, or an object whose `tasks` they are.
        eval_fraction: share of the tasks, in [0, 1), that only the report at the end sees. With 0 there is no report.
        ranges: narrower ranges of parameters, by name; None: the full ranges of all five.
        initial: initial parameters; those left out have their defaults.
        samples: runs of each task; the agreement of their answers is part of the coherence.
    """

    @takes
    def __init__(
        self,
        agent: BaseAgent,
        evaluator: AgentEvaluation,
        benchmark: Any,
        *,
        eval_fraction: float = 0.3,
        seed: int = 0,
        ranges: Mapping[str, tuple[float, float]] | None = None,
        initial: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
        samples: int = 1,
    ) -> None:
        tasks = list(getattr(benchmark, "tasks", benchmark))
        if not 0 <= eval_fraction < 1:
            raise ConfigError(f"`eval_fraction={eval_fraction!r}` must be at least 0 and below 1")
        if len(tasks) < 2:
            raise ConfigError(f"a benchmark needs at least two tasks, got {len(tasks)}")
        if samples < 1:
            raise ConfigError(f"`samples={samples!r}` must be at least 1")
        order = np.random.default_rng(seed).permutation(len(tasks))
        eval_count = round(eval_fraction * len(tasks))
        keys = [task.key if isinstance(task, Task) else str(at) for at, task in enumerate(tasks)]
        held_out = {keys[at] for at in order[:eval_count]}  # two spellings of a task are one task
        self.held_out = [tasks[at] for at in order if keys[at] in held_out]
        self.tasks = [tasks[at] for at in order if keys[at] not in held_out]
        self.objective, self.seed, self.progress = AgentObjective(agent, evaluator, samples=samples), seed, progress
        self.space = Space(
            programs=["agent"], acting={"agent": list(RANGES)}, **({"ranges": dict(ranges)} if ranges else {})
        )
        self.start = Point(
            "agent",
            {
                **AgentParameters().model_dump(),
                **AgentParameters.of(initial or {}).model_dump(include=set(initial or {})),
            },
        )
        self.reset()

    def reset(self) -> None:
        """Discards the training: a new policy, no history, the initial parameters."""
        self.policy = Adjuster(seed=self.seed)  # each call of `train` continues it
        self.outcome: PolicyOutcome | None = None
        self.report: HeldOutReport | None = None

    @property
    def training_history(self) -> list[dict[str, Any]]:
        """Metrics, parameters, adjustments and improvement of every episode, also after an exception."""
        return [] if self.outcome is None else [episode.to_dict() for episode in self.outcome.history]

    def train(
        self,
        episodes: int = 10,
        tasks_per_episode: int | None = None,
        learning_rate: float = 0.01,
        update_policy: bool = True,
    ) -> PolicyOutcome:
        """Trains, then evaluates the initial and the best parameters on the held-out tasks (`report`).

        Args:
            episodes: largest number of episodes; training ends earlier if it converges.
            tasks_per_episode: number of tasks drawn for each episode; None: all.
            learning_rate: above 0. In one episode a parameter moves by at most 30 times this share of its range, and by
                at most half of it.
            update_policy: whether the policy learns; otherwise only its rules act.
        """
        self.outcome, self.report = PolicyOutcome(self.start), None
        train_policy(
            self.objective, self.tasks, (), self.space, self.start, episodes=episodes,
            tasks_per_episode=tasks_per_episode,
            learning_rate=learning_rate, update_policy=update_policy, seed=self.seed, policy=self.policy,
            progress=self.progress, into=self.outcome,
        )  # fmt: skip
        if self.held_out and self.outcome.stopped is None:
            # after training only: nothing may be chosen by these tasks
            self.report = self._reported(self.outcome.best)
            gain = self.report.gain
            self.outcome.notes.append(
                f"held-out tasks, best against initial: {signed(gain.mean)}, "
                f"95 % [{signed(gain.low)}, {signed(gain.high)}], n={gain.n}"
            )
        return self.outcome

    def _reported(self, best: Point) -> HeldOutReport:
        before, after = (scores_by_task(self.objective.run(point, self.held_out)) for point in (self.start, best))
        means = [[score for score in side.values() if not math.isnan(score)] for side in (before, after)]
        first, second = (math.fsum(side) / len(side) if side else math.nan for side in means)
        unscored = sum(math.isnan(before[task]) or math.isnan(after[task]) for task in before)
        return HeldOutReport(
            first, mean_interval(means[0]), second, mean_interval(means[1]), paired_gain(before, after), unscored
        )

    def get_best_parameters(self) -> dict[str, Any]:
        """The best parameters by expected score, with the initial value of each one whose effect the episodes do not
        show; the initial ones before any training."""
        return dict((self.start if self.outcome is None else self.outcome.best).parameters)
