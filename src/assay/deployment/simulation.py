"""Simulated deployments: the assignment and the `advance` of production, on traffic with known truth."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from assay.deployment.decisions import Decision, State, advance
from assay.deployment.evidence import CANDIDATE, CHAMPION, Arms, Cell, Stratum, Units, cell_of_units, position
from assay.deployment.plan import Metric, Plan
from assay.deployment.readings import Paired
from assay.deployment.rollout_values import Effects, Known, fitted
from assay.deployment.settings import Traffic
from assay.errors import ConfigError
from assay.support.report import Report

_ARMS = (CHAMPION, CANDIDATE)
_SECONDS = 1.0  # between two requests


class SimulatedDeployment:
    """The records of one simulated deployment: implements `Records` in memory.

    Values are summed by stage, arm, task type and user while they come, so that an evaluation does not read single
    rollouts.
    """

    def __init__(self, plan: Plan, traffic: Traffic, seed: int) -> None:
        self.plan, self.traffic, self.now = plan, traffic, 0.0
        self._random = np.random.default_rng(seed)
        self._state, self.decisions = State(), list[Decision]()
        users = np.arange(traffic.users)
        self._positions = np.array([position(f"user-{user}", f"seed-{seed}") for user in users])
        activity = 1 / (1.0 + users) ** traffic.heavy
        self._activity = np.cumsum(activity / activity.sum())
        self._own = self._random.normal(0, traffic.user_spread, traffic.users) if traffic.user_spread else users * 0.0
        self._own -= self._own.mean()
        count = traffic.task_types
        self._tasks = np.random.default_rng((seed, 1)).normal(0, traffic.task_spread, traffic.tasks)
        self._types = np.linspace(-0.15, 0.15, count) if count > 1 else np.zeros(1)
        stages = len(plan.steps)
        # [total, count, shift, missing, their shift][stage][arm][task type][user]
        self._sums = np.zeros((5, stages, 2, count, traffic.users), dtype=np.float32)
        self._late = np.zeros_like(self._sums[3:])  # missing so far: their rewards come later
        self._deciding: list[tuple[np.ndarray, ...]] = []  # rewards of the step that decides, for its newer half
        self._seen = np.zeros(traffic.users, dtype=bool)
        self._units = np.zeros((stages, 2), dtype=int)
        self._requests = np.zeros((stages, 2), dtype=int)
        self._waiting: list[tuple[np.ndarray, ...]] = []
        self._shadow, self._replayed = np.zeros(0), 0.0
        self._known: dict[int, dict[Stratum, dict[str, Cell]]] = {}
        self._before: list[Known] = []  # recorded rollouts and replays, until the covariate is fitted
        self._effects: Effects | None = None
        self._has_served = False
        if traffic.history:
            self._record(traffic.history)

    def rates(
        self, arm: np.ndarray, kinds: np.ndarray, users: np.ndarray, at: np.ndarray, tasks: np.ndarray | None = None
    ) -> np.ndarray:
        """True success rates of rollouts; of `tasks` where tasks come again."""
        traffic = self.traffic
        rate = traffic.base + self._types[kinds] + self._own[users] + traffic.drift * np.minimum(at / 5000, 1.0)
        if tasks is not None and traffic.tasks:
            rate = rate + self._tasks[tasks]
        effect = traffic.effect + traffic.novelty * 0.5 ** (at / 300)
        return np.clip(np.where(arm == 1, rate * (1 + effect), rate), 0, 1)

    def replay(self, count: int) -> None:
        """Replays rollouts of the champion on the candidate: pairs of one task and user."""
        kinds, tasks = self._drawn(count)
        users = self._users(count)
        at = np.zeros(count)
        draws = 0.5 * self._random.random(count)  # half of what decides a rollout is its task
        both = [
            (draws + 0.5 * self._random.random(count) < self.rates(np.full(count, arm), kinds, users, at, tasks)) * 1.0
            for arm in (0, 1)
        ]
        for arm in (0, 1):
            self._remember(both[arm], tasks, users, kinds, replayed=arm == 1)
        self._shadow = np.concatenate([self._shadow, both[1] - both[0]])
        self._replayed += float(both[0].sum())
        self._requests[self._state.step, 1] += count

    def serve(self, count: int) -> None:
        """Serves requests at the share of the current step."""
        share, step = self.plan.steps[self._state.step].share, self._state.step
        self._fit()
        users = self._users(count)
        kinds, tasks = self._drawn(count)
        at = self.now + _SECONDS * np.arange(1, count + 1)
        arms = (self._positions[users] < share).astype(int)
        values = (self._random.random(count) < self.rates(arms, kinds, users, at, tasks)) * 1.0
        shifts = np.zeros(count)
        if self._effects is not None:
            shifts = self._effects.units[users] + (self._effects.tasks[tasks] if self.traffic.tasks else 0.0)
        arrival = at + self.traffic.delay_s * np.where(values == 1, 3, 1)
        arrival[self._random.random(count) < self.traffic.missing] = np.inf
        lost = np.array([self.traffic.unscored_failures, self.traffic.candidate_unscored_failures])
        if lost.any():
            arrival[(values == 0) & (self._random.random(count) < lost[arms])] = np.inf
        self._waiting.append((np.full(count, step), arms, kinds, users, at, values, shifts, arrival))
        np.add.at(self._requests[step], arms, 1)
        new = np.unique(users[~self._seen[users]])
        self._seen[new] = True
        np.add.at(self._units[step], (self._positions[new] < share).astype(int), 1)
        self.now += _SECONDS * count

    def _record(self, count: int) -> None:
        """Rollouts of the champion before the deployment."""
        kinds, tasks = self._drawn(count)
        users = self._users(count)
        rates = self.rates(np.zeros(count, dtype=int), kinds, users, np.zeros(count), tasks)
        self._remember((self._random.random(count) < rates) * 1.0, tasks, users, kinds, replayed=False)

    def _remember(
        self, values: np.ndarray, tasks: np.ndarray, users: np.ndarray, kinds: np.ndarray, *, replayed: bool
    ) -> None:
        of_it = np.full(len(values), replayed)
        self._before.append(Known(values=values, tasks=tasks, units=users, kinds=kinds, replayed=of_it))

    def _fit(self) -> None:
        """Fits the covariate before the first live request."""
        if self._has_served:
            return
        self._has_served, before = True, self._before
        if self.plan.covariate and before:
            names = ("values", "tasks", "units", "kinds", "replayed")
            columns = {name: np.concatenate([getattr(some, name) for some in before]) for name in names}
            # all tasks and users have a place, also those that were not seen
            self._effects = fitted(Known(**columns), tasks=max(1, self.traffic.tasks), units=self.traffic.users)

    def _drawn(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Task types and tasks of requests. A task that does not come again has the number 0, without an effect."""
        if self.traffic.tasks:
            tasks = self._random.integers(0, self.traffic.tasks, count)
            return tasks % len(self._types), tasks
        return self._random.integers(0, len(self._types), count), np.zeros(count, dtype=int)

    def _users(self, count: int) -> np.ndarray:
        return np.minimum(np.searchsorted(self._activity, self._random.random(count)), self.traffic.users - 1)

    def _collect(self, horizon: float) -> None:
        """Adds the rewards that have arrived, of rollouts that are old enough; others of these are missing so far."""
        left: list[tuple[np.ndarray, ...]] = []
        self._late[:] = 0
        for block in self._waiting:
            steps, arms, kinds, users, at, values, shifts, arrival = block
            old = at + horizon <= self.now
            known, lost = old & (arrival <= self.now), old & np.isinf(arrival)
            ended = (known | lost) & (steps == self.plan.deciding)
            if ended.any():
                rewards = np.where(lost, np.nan, values)
                self._deciding.append(tuple(column[ended] for column in (arms, kinds, users, at, rewards, shifts)))
            ones = np.ones(len(values))
            for sums, rows, columns in (
                (self._sums, known, (values, ones, shifts)), (self._sums[3:], lost, (ones, shifts)),
                (self._late, old & ~known & ~lost, (ones, shifts)),
            ):  # fmt: skip
                for part, column in zip(sums, columns, strict=False):
                    np.add.at(part, (steps[rows], arms[rows], kinds[rows], users[rows]), column[rows])
            for stage in np.unique(steps[old]):
                self._known.pop(int(stage), None)
            if not (known | lost).all():
                left.append(tuple(column[~known & ~lost] for column in block))
        self._waiting = left

    def state(self, name: str) -> tuple[Plan, State]:
        return self.plan, self._state

    def evidence(self, name: str, metric: Metric, now: float) -> Arms:
        self._collect(metric.horizon_s)
        for stage in range(len(self.plan.steps)):
            if stage not in self._known:
                self._known[stage] = self._cells(stage)
        return {stratum: arms for stage in self._known.values() for stratum, arms in stage.items()}

    def _cells(self, stage: int) -> dict[Stratum, dict[str, Cell]]:
        parts = self._sums[:, stage].copy()
        parts[3:] += self._late[:, stage]
        totals, counts, shifts, missing, missing_shifts = parts.astype(float)
        users, none = np.arange(self.traffic.users), np.zeros(self.traffic.users)
        newer = self._newer() if stage == self.plan.deciding else {}
        return {
            (stage, f"type-{kind}"): {
                arm: cell_of_units(
                    Units(
                        bucket=users, count=counts[at, kind], total=totals[at, kind], shift=shifts[at, kind],
                        missing=missing[at, kind], running=none, unknown_shift=missing_shifts[at, kind],
                    ), buckets=len(users), newer=newer.get((at, kind)),
                )
                for at, arm in enumerate(_ARMS)
            }
            for kind in range(len(self._types))
            if counts[:, kind].any() or missing[:, kind].any()
        }  # fmt: skip

    def _newer(self) -> dict[tuple[int, int], Cell]:
        """Cells of the newer half of the step that decides, by arm and task type."""
        if not self._deciding:
            return {}
        arms, kinds, users, at, values, shifts = (
            np.concatenate([block[column] for block in self._deciding]) for column in range(6)
        )
        scored, bucket, cells = ~np.isnan(values), np.arange(self.traffic.users), {}
        columns = (scored, np.where(scored, values, 0), scored * shifts, ~scored, scored * 0, ~scored * shifts)
        for arm in range(2):
            for kind in range(len(self._types)):
                rows = (arms == arm) & (kinds == kind) & (at > (at.min() + at.max()) / 2)
                count, total, shift, missing, running, unknown_shift = (
                    np.bincount(users[rows], column[rows], minlength=len(bucket)) for column in columns
                )
                units = Units(
                    bucket=bucket, count=count, total=total, shift=shift, missing=missing, running=running,
                    unknown_shift=unknown_shift,
                )  # fmt: skip
                cells[arm, kind] = cell_of_units(units, buckets=len(bucket))
        return cells

    def shadow(self, name: str, metric: Metric) -> Paired:
        return Paired(differences=self._shadow.tolist(), champion=self._replayed / max(1, len(self._shadow)))

    def units(self, name: str, step: int) -> Mapping[str, int]:
        return {arm: int(self._units[step, at]) for at, arm in enumerate(_ARMS)}

    def requests(self, name: str, step: int, now: float) -> Mapping[str, int]:
        return {arm: int(self._requests[step, at]) for at, arm in enumerate(_ARMS)}

    def write(self, name: str, decision: Decision, before: State, after: State) -> bool:
        if before != self._state:
            return False
        self._state = after
        self.decisions.append(decision)
        return True

    @property
    def served(self) -> int:
        """Live rollouts and replays."""
        return int(self._requests.sum())

    @property
    def live(self) -> dict[str, int]:
        """Live rollouts by arm, those of the shadow step not counted."""
        steps = [at for at, step in enumerate(self.plan.steps) if not step.shadow]
        return {arm: int(self._requests[steps, at].sum()) for at, arm in enumerate(_ARMS)}


@dataclass(frozen=True, kw_only=True, repr=False)
class SimulationReport(Report):
    """Results of simulated deployments.

    Attributes:
        runs: number of simulated deployments.
        promoted: share of the runs.
        rolled_back: share of the runs.
        undecided: share of the runs, paused or not ended.
        requests_median: live rollouts until the end, of both arms.
        candidate_requests_median: those of the candidate.
        step_requests: median of the rollouts of each step, over the runs that reached it; 0 if none did.
        rules: number of runs by the rule that ended them; `requests` for those that were cut off undecided.
    """

    runs: int
    promoted: float
    rolled_back: float
    undecided: float
    requests_median: float
    candidate_requests_median: float
    step_requests: Sequence[float] = ()
    rules: Mapping[str, int]

    def lines(self) -> Iterator[str]:
        for name in ("promoted", "rolled_back", "undecided"):
            yield f"{name.replace('_', ' '):12} {getattr(self, name):6.1%} of {self.runs} simulated deployments"
        candidate = f"{self.candidate_requests_median:,.0f} of them on the candidate"
        yield f"median of live requests: {self.requests_median:,.0f}, {candidate}"
        yield "median by step: " + ", ".join(f"{count:,.0f}" for count in self.step_requests)
        yield "ended by: " + ", ".join(f"{rule} {count}" for rule, count in sorted(self.rules.items()))


Advance = Callable[[SimulatedDeployment, str, float], Decision]


def simulate(
    plan: Plan,
    traffic: Traffic,
    *,
    runs: int = 500,
    seed: int = 0,
    interval: int = 50,
    most_requests: int = 50_000,
    total_requests: float = math.inf,
    advance: Advance = advance,
    on_run: Callable[[int], None] = lambda count: None,
) -> SimulationReport:
    """Runs a plan on simulated traffic.

    Args:
        runs: number of simulated deployments; run i has the seed `seed` + i.
        interval: requests between two evaluations.
        most_requests: requests, replays among them, after which a run is undecided, for plans that never end by
            themselves.
        total_requests: requests of all runs after which no further run begins, for a limited time.
        advance: what decides; for comparisons with other rules.
        on_run: called with 1 after each run, for progress.
    """
    if runs < 1 or interval < 1:
        raise ConfigError(f"runs={runs!r} and interval={interval!r} must be at least 1")
    ends = []
    for run in range(runs):
        ends.append(_run(plan, traffic, seed + run, interval, most_requests, advance))
        on_run(1)
        if (total_requests := total_requests - ends[-1].served) <= 0:
            break
    runs = len(ends)
    statuses, rules = [end.state("")[1].status for end in ends], dict[str, int]()
    for end, status in zip(ends, statuses, strict=True):
        rule = "requests" if status == "running" else end.decisions[-1].rule
        rules[rule] = rules.get(rule, 0) + 1
    return SimulationReport(
        runs=runs,
        promoted=statuses.count("promoted") / runs,
        rolled_back=statuses.count("rolled_back") / runs,
        undecided=sum(status in ("running", "paused") for status in statuses) / runs,
        requests_median=statistics.median(sum(end.live.values()) for end in ends),
        candidate_requests_median=statistics.median(end.live[CANDIDATE] for end in ends),
        step_requests=[_median_of_step(ends, at) for at in range(len(plan.steps))],
        rules=rules,
    )


def _median_of_step(ends: Sequence[SimulatedDeployment], step: int) -> float:
    reached = [count for end in ends if (count := sum(end.requests("", step, 0.0).values()))]
    return float(statistics.median(reached)) if reached else 0.0


def _run(
    plan: Plan, traffic: Traffic, seed: int, interval: int, most_requests: int, advance: Advance
) -> SimulatedDeployment:
    deployment = SimulatedDeployment(plan, traffic, seed)
    while deployment.state("")[1].status == "running" and deployment.served < most_requests:
        step = plan.steps[deployment.state("")[1].step]
        if step.shadow:  # a long one in larger parts, because each evaluation reads all replays
            deployment.replay(max(interval, min(step.requests, most_requests) // 100))
        else:
            deployment.serve(interval)
        advance(deployment, "", deployment.now)
    return deployment
