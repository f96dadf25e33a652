"""A policy that learns from an agent's metrics how to adjust its parameters.

Actor-critic: the network proposes adjustments, a Gaussian process over all episodes predicts their scores, and the best
one is tried.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from assay.datasets import Task
from assay.errors import BudgetExceeded, ConfigError, ModelError, ProgramError
from assay.evaluation.metrics import METRICS, AgentMetrics, Budget, TaskRun, measure
from assay.evaluation.progress import Progress, SilentProgress
from assay.evaluation.statistics import Gain, mean_interval, paired_gain
from assay.optimizers.parameters.objective import AgentEvaluation, AgentObjective, Objective, runs_by_task
from assay.optimizers.parameters.space import Point, Space
from assay.programs import RANGES, AgentParameters, BaseAgent
from assay.support.numbers import signed
from assay.support.options import takes
from assay.support.report import ReportRepr, measure_text
from assay.support.values import json_value

# -- The adjuster's network: maps metrics and parameters of an agent to changes of the parameters. Does not run agents.


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


# -- The adjuster's critic: expected score at any parameters, from all episodes so far. Does not choose parameters.


_LENGTH = (0.15, 2.0)  # of the kernel, in shares of a parameter's range
_VARIANCE = (0.005, 0.5)  # of scores over the space


@dataclass(frozen=True)
class Estimates:
    """Posterior of the score at each place: `mean[place]` and standard deviation `error[place]`."""

    mean: np.ndarray
    error: np.ndarray


class Critic:
    """A Gaussian process over the parameters' places, with an RBF kernel of one length scale.

    Source: Rasmussen and Williams 2006, ch. 2.

    An episode's score is a mean over a few dozen tasks, with a standard error of about 0.07. The scores of episodes at
    similar parameters reduce that error by a factor of two to three.

    Args:
        places: `[episode][parameter]`, each in [0, 1] of its range; at least two episodes.
        scores: overall scores in [0, 1].
        runs: scored runs behind each score.

    Attributes:
        evidence: log marginal likelihood of the scores.
    """

    def __init__(self, places: np.ndarray, scores: np.ndarray, runs: np.ndarray) -> None:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import RBF, ConstantKernel

        self._centre = float(scores.mean())
        # Laplace's rule: an episode of only right answers still has sampling noise
        smoothed = (scores * runs + 1) / (runs + 2)
        self._process = GaussianProcessRegressor(
            ConstantKernel(0.05, _VARIANCE) * RBF(0.5, _LENGTH), alpha=smoothed * (1 - smoothed) / runs + 1e-4
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a length at a bound is a valid fit
            self._process.fit(places, scores - self._centre)
        self.evidence = float(self._process.log_marginal_likelihood_value_)

    def at(self, places: np.ndarray) -> Estimates:
        """Posterior at `places[i][parameter]`."""
        mean, error = self._process.predict(places, return_std=True)
        return Estimates(mean + self._centre, error)


# -- Episodes and the outcome of the adjuster's training. Runs nothing.


_WEIGHTS = {"accuracy": 4.0, "efficiency": 1.0, "coherence": 1.0, "adaptability": 1.0, "tool_usage": 1.0}


@dataclass(frozen=True)
class Episode:
    """One episode.

    `adjustments` are relative to the policy's current parameters, in their own units. `overall`, in [0, 1], is the
    weighted mean of the metrics that could be measured. `improvement` is `overall` minus the expected score of the
    current parameters; `meaning` describes it. Both are NaN if the episode could not be scored. `unscored` counts runs
    without a score, and `why` is the reason of the first.
    """

    number: int
    metrics: Mapping[str, float | None]
    parameters: Mapping[str, Any]
    adjustments: Mapping[str, float]
    overall: float
    improvement: float
    accepted: bool
    meaning: str
    unscored: int = 0
    why: str | None = None


@dataclass
class PolicyOutcome:
    """Result of the training.

    `best` is the point with the highest expected score, or with validation tasks the one that scored best on them:
    `confirmed` then has the overall score of each point evaluated there, the initial one first.
    """

    best: Point
    history: list[Episode] = field(default_factory=list)
    confirmed: list[dict[str, Any]] = field(default_factory=list)
    converged: bool = False
    notes: list[str] = field(default_factory=list)
    stopped: str | None = None


def overall(metrics: AgentMetrics) -> float:
    """Mean of the measured metrics, with accuracy weighted 4; NaN if accuracy could not be measured."""
    values = {name: value for name, value in metrics.to_dict().items() if value is not None}
    if "accuracy" not in values:
        return math.nan
    return math.fsum(_WEIGHTS[name] * value for name, value in values.items()) / math.fsum(
        _WEIGHTS[name] for name in values
    )


# -- Policy.


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
            f"`episodes={episodes!r}` must be at least 1 and `learning_rate={learning_rate!r}` a finite number above 0"
        )
    outcome, progress = into or PolicyOutcome(start), progress or SilentProgress()
    state = _TrainingState(
        objective=objective, tasks=list(tasks), space=space, start=start, policy=policy or Adjuster(seed=seed),
        history=outcome.history, seed=seed, budget=budget, per_episode=tasks_per_episode,
        reach=min(_FARTHEST, _REACH * learning_rate), learns=update_policy,
    )  # fmt: skip
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


@dataclass(kw_only=True)
class _TrainingState:
    """State of the training: the current parameters and the episodes so far."""

    objective: Objective
    tasks: list[Any]
    space: Space
    start: Point
    policy: Adjuster
    history: list[Episode]
    seed: int
    budget: Budget | None
    per_episode: int | None
    reach: float
    learns: bool

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ConfigError("a policy needs tasks to learn from")
        if self.per_episode is not None and self.per_episode < 1:
            raise ConfigError(f"`tasks_per_episode={self.per_episode!r}` must be at least 1; None: all tasks")
        space, given = self.space, self.start.parameters
        self.names = space.searched(self.start.program)
        begin = {**AgentParameters().model_dump(), **given}
        self.at = {name: begin[name] for name in self.names}
        for name in self.names:
            low, high = space.ranges[name]
            if not low <= begin[name] <= high:
                self.at[name] = space.at(name, space.place(name, begin[name]))
        self.unsearched = {name: value for name, value in given.items() if name not in self.names}
        self.rng = np.random.default_rng(self.seed)
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
        return [
            replace(run, seconds=None) for run in self.objective.run(Point(self.start.program, dict(parameters)), tasks)
        ]

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


# -- `RLTrainer`: the same for any agent, without DSPy.


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
        return dict(json_value({**asdict(self), "gain": self.gain.to_dict()}))

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
        history: list[dict[str, Any]] = json_value([] if self.outcome is None else self.outcome.history)
        return history

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
        before, after = (_scores_by_task(self.objective.run(point, self.held_out)) for point in (self.start, best))
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


def _scores_by_task(runs: Sequence[TaskRun]) -> dict[str, float]:
    """Mean score of each task's runs; NaN if none is scored."""
    groups = {
        task: [run.score for run in of_task if run.score is not None] for task, of_task in runs_by_task(runs).items()
    }
    return {task: math.fsum(scores) / len(scores) if scores else math.nan for task, scores in groups.items()}
