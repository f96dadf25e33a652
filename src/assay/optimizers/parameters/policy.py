"""A policy that learns from an agent's metrics which parameter to move, by what its moves have brought."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from assay.errors import BudgetExceeded, ConfigError, ModelError, ProgramError
from assay.optimizers.metrics import METRICS, AgentMetrics, Budget, measure
from assay.optimizers.parameters.arena import AgentArena, AgentEvaluation, Arena
from assay.optimizers.parameters.network import make_policy, state_of
from assay.optimizers.parameters.space import Point, Space
from assay.optimizers.session import Progress
from assay.programs import RANGES, AgentParameters, BaseAgent

__all__ = ["Episode", "PolicyOutcome", "RLTrainer", "train_policy"]

_WEIGHTS = {"accuracy": 4.0, "efficiency": 1.0, "coherence": 1.0, "adaptability": 1.0, "tool_usage": 1.0}
_SAME = 0.01  # of the overall score: a change that is none
_DOUBT = 0.1  # standard errors of a mean of right and wrong
_FARTHEST = 0.5  # of a parameter's range, in one episode
_STILL, _PATIENCE = 20, 60  # converged: so many episodes about the same, or none better than the best for so long
_CONFIRMED = 3  # points that are tried on the held-out tasks, beside the first


@dataclass(frozen=True)
class Episode:
    """One episode. `adjustments` are from where the policy stood, in the parameters' own units; `overall` is the weighted mean of
    the metrics that could be measured; `improvement` is over where it stood; `meaning` says it in words. Both are NaN where the
    episode could not be scored."""

    number: int
    metrics: Mapping[str, float | None]
    parameters: Mapping[str, Any]
    adjustments: Mapping[str, float]
    overall: float
    improvement: float
    kept: bool
    meaning: str

    def to_dict(self) -> dict[str, Any]:
        return {name: dict(value) if isinstance(value, Mapping) else None if value != value else value for name, value in vars(self).items()}


@dataclass
class PolicyOutcome:
    """What training found. `best` was confirmed on held-out tasks; `confirmed` has the overall score of each point tried there,
    the first being where training began."""

    best: Point
    history: list[Episode]
    confirmed: list[dict[str, Any]]
    converged: bool
    notes: list[str] = field(default_factory=list)
    stopped: str | None = None


def overall(metrics: AgentMetrics) -> float:
    """The mean of the metrics that could be measured, accuracy counting four times; NaN where accuracy could not."""
    found = {name: value for name, value in metrics.to_dict().items() if value is not None}
    if "accuracy" not in found:
        return math.nan
    return math.fsum(_WEIGHTS[name] * value for name, value in found.items()) / math.fsum(_WEIGHTS[name] for name in found)


def train_policy(
    arena: Arena, tasks: Sequence[Any], held_out: Sequence[Any], space: Space, start: Point, *, episodes: int = 10,
    tasks_per_episode: int | None = None, learning_rate: float = 0.01, update_policy: bool = True, seed: int = 0,
    budget: Budget | None = None, policy: Any = None, progress: Progress | None = None,
) -> PolicyOutcome:  # fmt: skip
    """Episodes of: the policy adjusts the parameters, the agent runs, the policy is updated by the improvement that followed.

    The policy moves on only from what was better; the last word have the held-out tasks.

    Args:
        held_out: tasks on which the best are confirmed; the training ones where empty.
        update_policy: whether it learns; otherwise the rules alone act.
        policy: one that was trained before; a new one where None.
    Returns:
        At a cap the best so far, unconfirmed, with `stopped`.
    Raises:
        ModelError: the first episode could not be scored at all.
        BudgetExceeded: in the first episode.
    """
    walk = _Walk(arena, tasks, space, start, policy or make_policy(seed=seed), seed=seed, budget=budget, per_episode=tasks_per_episode)
    shown = progress or Progress()
    try:
        with shown.bar("episodes", episodes) as advance:
            for _ in range(episodes):
                episode = walk.step(learning_rate if update_policy else 0.0)
                scored = "" if math.isnan(episode.overall) else f"overall {episode.overall:.3f}: "
                shown.say(f"  episode {episode.number}: {scored}{episode.meaning}")
                advance(1)
                if walk.converged:
                    break
        confirmed = walk.confirm(held_out or tasks)
    except BudgetExceeded as cap:
        if not walk.history:
            raise
        best_so_far = max(walk.history, key=lambda episode: -math.inf if math.isnan(episode.overall) else episode.overall)
        notes = ["the best parameters were not confirmed on held-out tasks"]
        return PolicyOutcome(Point(start.program, best_so_far.parameters), walk.history, [], False, notes, stopped=str(cap))
    if all(entry["overall"] is None for entry in confirmed):
        raise ModelError("nothing could be confirmed: accuracy was measured on none of the held-out tasks")
    best = max(confirmed, key=lambda entry: entry["overall"] if entry["overall"] is not None else -math.inf)
    notes = [f"converged: {_STILL} episodes about the same, or none better than the best in {_PATIENCE}"] if walk.converged else []
    if best is confirmed[0]:
        notes.append("nothing was better on held-out tasks than where it began")
    return PolicyOutcome(Point(start.program, best["parameters"]), walk.history, confirmed, walk.converged, notes)


class _Walk:
    """Where a policy stands, and what it has seen."""

    def __init__(
        self, arena: Arena, tasks: Sequence[Any], space: Space, start: Point, policy: Any, *, seed: int, budget: Budget | None,
        per_episode: int | None,
    ) -> None:  # fmt: skip
        if not tasks:
            raise ConfigError("a policy needs tasks to learn from")
        if per_episode is not None and per_episode < 1:
            raise ConfigError(f"tasks_per_episode={per_episode!r} must be at least 1, or None for all")
        self.arena, self.tasks, self.space, self.policy, self.budget, self.per_episode = arena, list(tasks), space, policy, budget, per_episode
        self.names = space.searched(start.program)
        defaults = AgentParameters().model_dump()
        begin = {name: start.parameters.get(name, defaults[name]) for name in self.names}
        self.at = {name: space.at(name, space.place(name, value)) if not _inside(space, name, value) else value for name, value in begin.items()}
        self.kept = {name: value for name, value in start.parameters.items() if name not in self.names}
        self.program, self.rng = start.program, np.random.default_rng(seed)
        self.history: list[Episode] = []
        self.metrics, self.score = AgentMetrics(), math.nan
        self.mean, self.spread = 0.0, 0.05  # of the improvements: the baseline, and what they are measured in

    @property
    def converged(self) -> bool:
        known = [episode for episode in self.history if not math.isnan(episode.overall)]
        scores, last = [episode.overall for episode in known], known[-_STILL:]
        still = len(known) > _STILL and all(abs(episode.improvement) <= _SAME for episode in last)
        return still or (len(scores) > _PATIENCE and max(scores[-_PATIENCE:]) <= max(scores[:-_PATIENCE]))

    def step(self, learning_rate: float) -> Episode:
        if not self.history:
            return self._first()
        state = state_of([getattr(self.metrics, name) for name in METRICS], self._places(self.at))
        action = np.clip(self.policy.mean(state) + self.policy.sigma * self.rng.normal(size=len(RANGES)), -_FARTHEST, _FARTHEST)
        tried = self._moved(action)
        try:
            metrics = self._measured(tried)
        except ProgramError as error:  # the agent takes these parameters not at all
            return self._noted(AgentMetrics(), tried, math.nan, kept=False, meaning=f"could not be run: {error}", score=math.nan)
        score = overall(metrics)
        improvement = score - self.score
        if math.isnan(improvement):
            return self._noted(metrics, tried, math.nan, kept=False, meaning="could not be scored: it counts for nothing", score=math.nan)
        self._learn(state, action, improvement, learning_rate)
        kept = improvement >= 0
        if improvement > _SAME:
            meaning = "better: the policy goes on from here, and such a move becomes likelier"
        elif improvement >= -_SAME:
            meaning = "about the same: the move brought nothing either way"
        else:
            meaning = "worse: the policy goes back, and such a move becomes less likely"
        episode = self._noted(metrics, tried, improvement, kept=kept, meaning=meaning, score=score)
        if kept:
            self.at, self.metrics, self.score = tried, metrics, score
        else:  # where it stands was chosen because it came out well, by luck as well: that part is forgotten bit by bit
            self.score -= _DOUBT * math.sqrt(max(0.0, self.score * (1 - self.score)) / len(self.tasks))
        return episode

    def _first(self) -> Episode:
        self.metrics = self._measured(self.at)
        self.score = overall(self.metrics)
        if math.isnan(self.score):
            raise ModelError("the first episode could not be scored: accuracy was measured on none of its tasks")
        return self._noted(self.metrics, self.at, 0.0, kept=True, meaning="where it begins", score=self.score)

    def _learn(self, state: np.ndarray, action: np.ndarray, improvement: float, learning_rate: float) -> None:
        advantage = (improvement - self.mean) / self.spread
        self.mean += 0.2 * (improvement - self.mean)
        self.spread = max(0.01, 0.8 * self.spread + 0.2 * abs(improvement - self.mean))
        if learning_rate:
            self.policy.update(state, action, float(np.clip(advantage, -3, 3)), learning_rate)

    def _measured(self, parameters: Mapping[str, Any]) -> AgentMetrics:
        tasks = self.tasks
        if self.per_episode is not None and self.per_episode < len(tasks):
            tasks = [tasks[at] for at in sorted(self.rng.permutation(len(tasks))[: self.per_episode])]
        return self._metrics(parameters, tasks)

    def _metrics(self, parameters: Mapping[str, Any], tasks: Sequence[Any]) -> AgentMetrics:
        """Without the seconds: they differ from run to run, and the same seed must walk the same way."""
        runs = self.arena.run(Point(self.program, {**self.kept, **parameters}), tasks)
        return measure([replace(run, seconds=None) for run in runs], budget=self.budget)

    def confirm(self, tasks: Sequence[Any]) -> list[dict[str, Any]]:
        """The first point and the best episodes' points, on held-out tasks."""
        better = sorted((e for e in self.history[1:] if not math.isnan(e.overall)), key=lambda e: -e.overall)
        points = [self.history[0].parameters, *(e.parameters for e in better[:_CONFIRMED])]
        scores = [overall(self._metrics({n: v for n, v in p.items() if n in self.names}, tasks)) for p in points]
        return [{"parameters": dict(p), "overall": None if math.isnan(s) else s} for p, s in zip(points, scores, strict=True)]

    def _noted(
        self, metrics: AgentMetrics, parameters: Mapping[str, Any], improvement: float, *, kept: bool, meaning: str, score: float
    ) -> Episode:  # fmt: skip
        moved = {name: float(parameters[name] - self.at[name]) for name in self.names}
        episode = Episode(len(self.history), metrics.to_dict(), {**self.kept, **parameters}, moved, score, improvement, kept, meaning)
        self.history.append(episode)
        return episode

    def _places(self, parameters: Mapping[str, Any]) -> list[float]:
        """Each of the five in [0, 1] of its range; the middle for those that are not searched."""
        return [self.space.place(name, parameters[name]) if name in self.names else 0.5 for name in RANGES]

    def _moved(self, action: np.ndarray) -> dict[str, Any]:
        places = dict(zip(RANGES, self._places(self.at), strict=True))
        return {name: self.space.at(name, places[name] + float(step)) for name, step in zip(RANGES, action, strict=True) if name in self.names}


def _inside(space: Space, name: str, value: float) -> bool:
    low, high = space.ranges[name]
    return low <= value <= high


class RLTrainer:
    """Trains a policy that adjusts the five parameters of anybody's agent.

    Args:
        agent: has `execute(task)` and `set_parameters(mapping)`.
        evaluator: `evaluator(task, output)` gives the metrics of one run by name, each in [0, 1]; `accuracy` is needed.
        benchmark: tasks, or an object whose `tasks` they are.
        held_out: share of the tasks on which the best is confirmed, in [0, 1).
        ranges: narrower ranges of the parameters, by name; the five, whole, where None.
        initial: parameters to begin from; the defaults of those that are left out.
        samples: runs of each task; how well its answers agree is part of the coherence.
    """

    def __init__(
        self, agent: BaseAgent, evaluator: AgentEvaluation, benchmark: Any, *, held_out: float = 0.3, seed: int = 0,
        ranges: Mapping[str, tuple[float, float]] | None = None, initial: Mapping[str, Any] | None = None, progress: Progress | None = None,
        samples: int = 1,
    ) -> None:  # fmt: skip
        tasks = list(getattr(benchmark, "tasks", benchmark))
        if not 0 <= held_out < 1:
            raise ConfigError(f"held_out={held_out!r} must be at least 0 and below 1")
        if len(tasks) < 2:
            raise ConfigError(f"a benchmark needs at least two tasks, got {len(tasks)}")
        if samples < 1:
            raise ConfigError(f"samples={samples!r} must be at least 1")
        order = np.random.default_rng(seed).permutation(len(tasks))
        kept = round(held_out * len(tasks))
        self.held_out, self.tasks = [tasks[at] for at in order[:kept]], [tasks[at] for at in order[kept:]]
        self.arena, self.seed, self.progress = AgentArena(agent, evaluator, samples=samples), seed, progress
        self.space = Space(programs=["agent"], acting={"agent": list(RANGES)}, **({"ranges": dict(ranges)} if ranges else {}))
        self.start = Point("agent", {**AgentParameters().model_dump(), **AgentParameters.of(initial or {}).model_dump(include=set(initial or {}))})
        self.policy = make_policy(seed=seed)
        self.outcome: PolicyOutcome | None = None

    @property
    def training_history(self) -> list[dict[str, Any]]:
        """Metrics, parameters, adjustments and improvement of every episode."""
        return [] if self.outcome is None else [episode.to_dict() for episode in self.outcome.history]

    def train(
        self, episodes: int = 10, tasks_per_episode: int | None = None, learning_rate: float = 0.01, update_policy: bool = True
    ) -> PolicyOutcome:
        """Trains for some episodes (fewer where it converges), then confirms the best on the held-out tasks.

        Args:
            tasks_per_episode: drawn anew for each episode; None: all.
        """
        if episodes < 1 or not 0 <= learning_rate < math.inf:
            raise ConfigError(f"episodes={episodes!r} must be at least 1 and learning_rate={learning_rate!r} a finite number of at least 0")
        self.outcome = train_policy(
            self.arena, self.tasks, self.held_out, self.space, self.start, episodes=episodes, tasks_per_episode=tasks_per_episode,
            learning_rate=learning_rate, update_policy=update_policy, seed=self.seed, policy=self.policy, progress=self.progress,
        )  # fmt: skip
        return self.outcome

    def get_best_parameters(self) -> dict[str, Any]:
        """The parameters that did best on the held-out tasks; those it began with before any training."""
        return dict((self.start if self.outcome is None else self.outcome.best).parameters)
