"""A policy that learns from an agent's metrics how to adjust its parameters.

Actor-critic: the network proposes adjustments, a Gaussian process over all episodes predicts their scores, and the best
one is tried.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from assay.errors import BudgetExceeded, ConfigError, ModelError, ProgramError
from assay.evaluation.metrics import METRICS, AgentMetrics, Budget, TaskRun, measure
from assay.evaluation.progress import Progress, SilentProgress
from assay.optimizers.parameters.critic import Critic
from assay.optimizers.parameters.episodes import Episode, PolicyOutcome, overall
from assay.optimizers.parameters.network import Adjuster, state_of
from assay.optimizers.parameters.objective import Objective
from assay.optimizers.parameters.space import Point, Space
from assay.programs import RANGES, AgentParameters
from assay.support.numbers import signed

_SAME = 0.01  # change of the overall score that counts as none
_REACH = 30  # largest move per episode, in learning rates: 0.3 of a parameter's range at the default of 0.01
_FARTHEST = 0.5  # largest move at any learning rate, as a share of the range
_PROPOSED, _DRAWN = 256, 512  # adjustments compared by the critic: from the network, and uniform within reach
_OPTIMISM = 0.5  # standard errors added to the critic's mean, for exploration
_UNCHANGED, _PATIENCE = 20, 60  # converged: this many episodes without change, or without a new best
_CONFIRMED = 3  # points evaluated on the validation tasks, in addition to the first
_COVERAGE = 0.5  # of an episode's runs must be scored for the episode to count
_EVIDENCE = 0.5  # log marginal likelihood that a parameter must add to count as acting: odds of 1.6
_HOPELESS = 3  # unscored episodes at the start after which training ends
_BETTER, _EQUAL, _WORSE = (
    "better: the policy moves here",
    "about the same: stable, maybe converged",
    "worse: the policy stays where it was",
)
_UNSCORED = "could not be scored: the episode is ignored"


def train_policy(
    objective: Objective,
    tasks: Sequence[Any],
    validation: Sequence[Any],
    space: Space,
    start: Point,
    *,
    episodes: int = 10,
    tasks_per_episode: int | None = None,
    learning_rate: float = 0.01,
    update_policy: bool = True,
    seed: int = 0,
    budget: Budget | None = None,
    policy: Adjuster | None = None,
    progress: Progress | None = None,
    into: PolicyOutcome | None = None,
) -> PolicyOutcome:
    """Trains in episodes: the policy adjusts the parameters, the agent runs, the improvement updates the policy.

    Args:
        validation: tasks on which the most promising points are compared; empty: the critic chooses.
        learning_rate: above 0. A parameter moves by at most 30 times this share of its range, and by at most half.
        update_policy: whether policy and critic learn; otherwise only the rules act.
        policy: a policy trained before; None: a new one.
        into: receives the history during training; it survives an exception.
    Returns: the outcome; if a cap was reached, the best so far, with `stopped`.
    Raises:
        ConfigError: a setting is out of range.
        ModelError: none of the first episodes could be scored.
        BudgetExceeded: a cap was reached in the first episode.
    """
    if episodes < 1 or not 0 < learning_rate < math.inf:
        raise ConfigError(
            f"episodes={episodes!r} must be at least 1 and learning_rate={learning_rate!r} a finite number above 0"
        )
    outcome, progress = into or PolicyOutcome(start), progress or SilentProgress()
    state = _TrainingState(
        objective,
        tasks,
        space,
        start,
        policy or Adjuster(seed=seed),
        outcome.history,
        seed=seed,
        budget=budget,
        per_episode=tasks_per_episode,
        reach=min(_FARTHEST, _REACH * learning_rate),
        learns=update_policy,
    )
    try:
        _run_episodes(state, episodes, progress)
        _choose(outcome, state, validation)
    except BudgetExceeded as cap:
        if not state.history:
            raise
        outcome.best, outcome.stopped = Point(start.program, state.promising(1)[0]), str(cap)
        outcome.notes.append("the cap came before the best parameters were confirmed")
    outcome.converged = state.converged
    outcome.notes += _advice(state, learning_rate)
    return outcome


def _run_episodes(state: "_TrainingState", episodes: int, progress: Progress) -> None:
    with progress.bar("episodes", episodes) as advance:
        for _ in range(episodes):
            episode = state.step()
            scored = "" if math.isnan(episode.overall) else f"overall {episode.overall:.3f}: "
            progress.say(f"  episode {episode.number}: {scored}{episode.meaning}")
            advance(1)
            if state.converged:
                break


def _choose(outcome: PolicyOutcome, state: "_TrainingState", validation: Sequence[Any]) -> None:
    promising = state.promising(_CONFIRMED)
    points = [state.history[0].parameters, *(p for p in promising if p != state.history[0].parameters)]
    best = promising[0]
    if validation:
        scores = [overall(state.metrics_of(p, validation)) for p in points]
        outcome.confirmed = [
            {"parameters": dict(p), "overall": None if math.isnan(s) else s}
            for p, s in zip(points, scores, strict=True)
        ]
        if all(math.isnan(score) for score in scores):
            raise ModelError("nothing could be confirmed: accuracy was measured on none of the validation tasks")
        best = points[max(range(len(points)), key=lambda at: -math.inf if math.isnan(scores[at]) else scores[at])]
    outcome.best = Point(outcome.best.program, best)
    if best == state.history[0].parameters:
        outcome.notes.append("no parameters were better than the initial ones")


def _advice(state: "_TrainingState", learning_rate: float) -> list[str]:
    """Notes on the last third of the improvements."""
    improvements = [episode.improvement for episode in state.history[1:] if not math.isnan(episode.improvement)]
    last = improvements[-max(3, len(improvements) // 3) :]
    notes = (
        [f"converged: {_UNCHANGED} episodes about the same, or none better than the best in {_PATIENCE}"]
        if state.converged
        else []
    )
    if len(last) < 3:
        return notes
    mean = math.fsum(last) / len(last)
    if mean < -_SAME:
        notes.append(
            f"improvement was {signed(mean)} over the last {len(last)} episodes: "
            f"try another learning rate (say {learning_rate / 2:g}) or a reset"
        )
    elif mean <= _SAME and not state.converged:
        notes.append(f"improvement was {signed(mean)} over the last {len(last)} episodes: stable, maybe converged")
    return notes


class _TrainingState:
    """State of the training: the current parameters and the episodes so far."""

    def __init__(
        self,
        objective: Objective,
        tasks: Sequence[Any],
        space: Space,
        start: Point,
        policy: Adjuster,
        history: list[Episode],
        *,
        seed: int,
        budget: Budget | None,
        per_episode: int | None,
        reach: float,
        learns: bool,
    ) -> None:
        if not tasks:
            raise ConfigError("a policy needs tasks to learn from")
        if per_episode is not None and per_episode < 1:
            raise ConfigError(f"tasks_per_episode={per_episode!r} must be at least 1; leave it out for all tasks")
        self.objective, self.tasks, self.space = objective, list(tasks), space
        self.policy, self.budget, self.per_episode = policy, budget, per_episode
        self.reach, self.learns, self.history = reach, learns, history
        self.names = space.searched(start.program)
        defaults = AgentParameters().model_dump()
        begin = {name: start.parameters.get(name, defaults[name]) for name in self.names}
        self.at = {
            name: space.at(name, space.place(name, value)) if not _inside(space, name, value) else value
            for name, value in begin.items()
        }
        self.unsearched = {name: value for name, value in start.parameters.items() if name not in self.names}
        self.program, self.rng = start.program, np.random.default_rng(seed)
        self.metrics, self.expected = AgentMetrics(), math.nan  # of the current parameters
        self.spread = 0.05  # scale of the improvements, by which advantages are divided
        self._runs: list[int] = []  # number of scored runs, by episode

    @property
    def converged(self) -> bool:
        scored = [episode for episode in self.history if not math.isnan(episode.overall)]
        scores, last = [episode.overall for episode in scored], scored[-_UNCHANGED:]
        unchanged = len(scored) > _UNCHANGED and all(abs(episode.improvement) <= _SAME for episode in last)
        return unchanged or (len(scores) > _PATIENCE and max(scores[-_PATIENCE:]) <= max(scores[:-_PATIENCE]))

    def step(self) -> Episode:
        if math.isnan(self.expected):
            return self._begin()
        state = state_of([getattr(self.metrics, name) for name in METRICS], self._places(self.at))
        action = self._action(state)
        tried = self._moved(action)
        try:
            runs = self._run(tried)
        except ProgramError as error:  # the agent cannot take these parameters
            return self._noted(AgentMetrics(), tried, [], meaning=f"could not be run: {error}")
        metrics, score = self._scored(runs)
        if math.isnan(score):
            return self._noted(metrics, tried, runs, meaning=_UNSCORED)
        improvement = score - self.expected
        meaning = _BETTER if improvement > _SAME else _EQUAL if improvement >= -_SAME else _WORSE
        episode = self._noted(metrics, tried, runs, score=score, improvement=improvement, meaning=meaning)
        self._learn(state, action, episode)
        return self.history[-1]

    def _begin(self) -> Episode:
        """The first episode, which is repeated if it could not be scored."""
        runs = self._run(self.at)
        self.metrics, self.expected = self._scored(runs)
        meaning = _UNSCORED if math.isnan(self.expected) else "where it begins"
        episode = self._noted(
            self.metrics,
            self.at,
            runs,
            score=self.expected,
            improvement=math.nan if math.isnan(self.expected) else 0.0,
            meaning=meaning,
        )
        if math.isnan(self.expected) and len(self.history) >= _HOPELESS:
            raise ModelError(
                f"the first {_HOPELESS} episodes could not be scored: accuracy was measured on too few tasks; "
                f"{episode.why or 'no reason'}"
            )
        return episode

    def _action(self, state: np.ndarray) -> np.ndarray:
        """The best adjustment by the critic's prediction; until there is a critic, the rules with their noise."""
        critic = self._critic() if self.learns else None
        if critic is None:
            return np.clip(self.policy.propose(state, 1, self.rng)[0], -self.reach, self.reach)
        drawn = self.rng.uniform(-self.reach, self.reach, size=(_DRAWN, len(RANGES)))
        actions = np.clip(
            np.concatenate([self.policy.propose(state, _PROPOSED, self.rng), drawn]), -self.reach, self.reach
        )
        values = critic.at(np.clip(np.array(self._places(self.at)) + actions, 0, 1))
        return np.asarray(actions[int(np.argmax(values.mean + _OPTIMISM * values.error))])

    def _learn(self, state: np.ndarray, action: np.ndarray, episode: Episode) -> None:
        """Updates the network by the critic's gain of the move, and moves to the best expected parameters."""
        accepted = episode.improvement >= 0
        critic = self._critic() if self.learns else None
        if critic is None:  # only the rules act: keep parameters that were not worse
            if accepted:
                self.at, self.metrics, self.expected = (
                    {n: episode.parameters[n] for n in self.names},
                    AgentMetrics(**episode.metrics),
                    episode.overall,
                )
        else:
            scored = [e for e in self.history if not math.isnan(e.overall)]
            gain = float(
                np.diff(critic.at(np.array([self._places(self.at), self._places(episode.parameters)])).mean)[0]
            )
            self.policy.update(state, action, float(np.clip(gain / self.spread, -3, 3)))
            self.spread = max(0.01, 0.8 * self.spread + 0.2 * abs(gain))
            means = critic.at(np.array([self._places(e.parameters) for e in scored])).mean
            best = scored[int(np.argmax(means))]
            accepted = best is episode
            self.at, self.metrics = {name: best.parameters[name] for name in self.names}, AgentMetrics(**best.metrics)
            self.expected = float(means.max())
        self.history[-1] = replace(episode, accepted=accepted)

    def _rows(self) -> list[tuple[list[float], float, int]]:
        """Places, overall score and number of scored runs of each scored episode."""
        return [
            (self._places(e.parameters), e.overall, n)
            for e, n in zip(self.history, self._runs, strict=True)
            if not math.isnan(e.overall)
        ]

    def _critic(self) -> Critic | None:
        rows = self._rows()
        if len(rows) < 2:
            return None
        places, scores, runs = zip(*rows, strict=True)
        return Critic(np.array(places), np.array(scores), np.array(runs, dtype=float))

    def promising(self, count: int) -> list[Mapping[str, Any]]:
        """Parameters of the episodes with the highest expected scores, best first, with the initial value of each
        parameter whose effect is not shown."""
        scored = [episode for episode in self.history if not math.isnan(episode.overall)]
        if not scored:
            return [self.history[0].parameters]
        critic = self._critic()
        values = (
            [e.overall for e in scored]
            if critic is None
            else critic.at(np.array([self._places(e.parameters) for e in scored])).mean.tolist()
        )
        order = sorted(range(len(scored)), key=lambda at: -values[at])
        initial, acting = self.history[0].parameters, self._acting()
        settings: list[Mapping[str, Any]] = []
        for at in order:
            parameters = {**initial, **{name: scored[at].parameters[name] for name in acting}}
            if parameters not in settings:
                settings.append(parameters)
        return settings[:count]

    def _acting(self) -> list[str]:
        """The parameters whose effect the episodes show: each adds to the evidence of the model, in forward selection,
        more than one that explains only noise."""
        rows = self._rows()
        if len(rows) < 2:
            return []
        places, scores, runs = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
        left = [at for at, name in enumerate(RANGES) if name in self.names and np.ptp(places[:, at])]
        chosen: list[int] = []
        evidence = Critic(np.zeros((len(rows), 1)), scores, runs).evidence
        while left:
            found = {at: Critic(places[:, [*chosen, at]], scores, runs).evidence for at in left}
            best = max(found, key=found.__getitem__)
            if found[best] - evidence <= _EVIDENCE:
                break
            evidence = found[best]
            chosen.append(best)
            left.remove(best)
        return [name for at, name in enumerate(RANGES) if at in chosen]

    def _run(self, parameters: Mapping[str, Any]) -> list[TaskRun]:
        return self.runs_of({**self.unsearched, **parameters}, self._drawn())

    def _drawn(self) -> list[Any]:
        """The tasks of an episode."""
        if self.per_episode is None or self.per_episode >= len(self.tasks):
            return self.tasks
        return [self.tasks[at] for at in sorted(self.rng.permutation(len(self.tasks))[: self.per_episode])]

    def runs_of(self, parameters: Mapping[str, Any], tasks: Sequence[Any]) -> list[TaskRun]:
        """Runs without their seconds, which differ between runs: the same seed must give the same episodes."""
        return [replace(run, seconds=None) for run in self.objective.run(Point(self.program, dict(parameters)), tasks)]

    def metrics_of(self, parameters: Mapping[str, Any], tasks: Sequence[Any]) -> AgentMetrics:
        return measure(self.runs_of(parameters, tasks), budget=self.budget)

    def _scored(self, runs: Sequence[TaskRun]) -> tuple[AgentMetrics, float]:
        """Metrics and overall score; the score is NaN if too few runs are scored."""
        metrics = measure(runs, budget=self.budget)
        return metrics, overall(metrics) if sum(_is_scored(run) for run in runs) >= _COVERAGE * len(runs) else math.nan

    def _noted(
        self,
        metrics: AgentMetrics,
        parameters: Mapping[str, Any],
        runs: Sequence[TaskRun],
        *,
        meaning: str,
        score: float = math.nan,
        improvement: float = math.nan,
    ) -> Episode:
        moved = {name: float(parameters[name] - self.at[name]) for name in self.names}
        missing = [run for run in runs if not _is_scored(run)]
        reason = next((run.error for run in missing if run.error), None)
        episode = Episode(
            len(self.history),
            metrics.to_dict(),
            {**self.unsearched, **parameters},
            moved,
            score,
            improvement,
            not self.history,
            meaning,
            len(missing),
            reason,
        )
        self.history.append(episode)
        self._runs.append(len(runs) - len(missing))
        return episode

    def _places(self, parameters: Mapping[str, Any]) -> list[float]:
        """The five parameters scaled to [0, 1] of their ranges; 0.5 for those that are not searched."""
        return [self.space.place(name, parameters[name]) if name in self.names else 0.5 for name in RANGES]

    def _moved(self, action: np.ndarray) -> dict[str, Any]:
        places = dict(zip(RANGES, self._places(self.at), strict=True))
        return {
            name: self.space.at(name, places[name] + float(step))
            for name, step in zip(RANGES, action, strict=True)
            if name in self.names
        }


def _is_scored(run: TaskRun) -> bool:
    return run.score is not None and math.isfinite(run.score)


def _inside(space: Space, name: str, value: float) -> bool:
    low, high = space.ranges[name]
    return low <= value <= high
