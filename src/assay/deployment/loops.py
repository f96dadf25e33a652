"""Continuous loops in the store: who may run one, and the steps of its cycles.

One process holds the lease of a loop. Every write of a step fails without it, so that a process that was considered
ended writes nothing more.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from assay.deployment.deployments import ENDED_STATUSES, Deployments
from assay.deployment.registry import current_user
from assay.errors import DeploymentError
from assay.support.report import Report
from assay.traces.store import leases, tables as schema
from assay.traces.store.leases import Lease, present, seconds, writing
from assay.traces.store.rows import as_json, clean
from assay.traces.store.upserts import upsert

STEPS = ("pool", "gates", "improve", "register", "deploy")  # of a cycle, in order
RUNNING, DONE, WAITING, ENDED, FAILED = "running", "done", "waiting", "ended", "failed"
_LOOPS, _STEPS = schema.loops, schema.loop_steps


@dataclass(frozen=True, kw_only=True)
class Loop:
    """The loop of an agent. `holder` is the process that runs it now."""

    agent: str
    file: str
    sha256: str
    enabled: bool
    holder: str | None
    changed_at: float
    changed_by: str


@dataclass(frozen=True, kw_only=True)
class LoopStep:
    """One step of a cycle.

    Attributes:
        status: running (also if its process was killed), done, waiting (the pool has too little), ended (nothing more
            to do in this cycle) or failed.
        attempts: how often it was started since it last ended without a failure.
    """

    agent: str
    cycle: int
    step: str
    status: str
    attempts: int
    detail: Mapping[str, Any]
    started_at: float
    ended_at: float | None
    by: str


class Loops:
    """The loops in a store.

    Args:
        engine: of an open `Store`.
    """

    def __init__(self, engine: sa.Engine) -> None:
        self.engine = engine

    def get(self, agent: str) -> Loop | None:
        """The loop of an agent; None if it was never started."""
        with self.engine.connect() as connection:
            row = connection.execute(sa.select(_LOOPS).where(_LOOPS.c.agent == agent)).mappings().first()
        return None if row is None else Loop(**row, holder=leases.holder_of(self.engine, _lease(agent)))

    def known(self, agent: str) -> Loop:
        """The loop of an agent.

        Raises:
            DeploymentError: it was never started.
        """
        if (loop := self.get(agent)) is None:
            raise DeploymentError(f"agent {agent!r} has no loop: assay loop start {agent} --file FILE starts one")
        return loop

    def enable(self, agent: str, file: str, sha256: str) -> None:
        """Lets processes run the loop, by the settings in `file`."""
        row = {
            "agent": agent, "file": file, "sha256": sha256, "enabled": True, "changed_at": present(self.engine),
            "changed_by": clean(current_user()),
        }  # fmt: skip
        with writing(self.engine, "the loop") as connection:
            connection.execute(upsert(self.engine.dialect.name, _LOOPS).values(**row))

    def disable(self, agent: str) -> None:
        """Ends the loop: a process that runs it stops before its next step.

        Raises:
            DeploymentError: the agent has no loop.
        """
        self.known(agent)
        changes = {"enabled": False, "changed_at": present(self.engine), "changed_by": clean(current_user())}
        with writing(self.engine, "the loop") as connection:
            connection.execute(sa.update(_LOOPS).where(_LOOPS.c.agent == agent).values(**changes))

    def acquire(self, agent: str, *, lease_s: float = 30.0) -> Lease | None:
        """The lease of an agent's loop; None while another process has it.

        Raises:
            DeploymentError: the agent has no loop.
        """
        self.known(agent)
        return leases.acquire(self.engine, _lease(agent), lease_s)

    def steps(self, agent: str) -> list[LoopStep]:
        """All steps of an agent's cycles, in the order of cycles and steps."""
        query = sa.select(_STEPS).where(_STEPS.c.agent == agent).order_by(_STEPS.c.cycle)
        with self.engine.connect() as connection:
            rows = connection.execute(query).mappings().all()
        steps = [
            LoopStep(**{n: v for n, v in row.items() if n != "detail_json"}, detail=json.loads(row["detail_json"]))
            for row in rows
        ]
        return sorted(steps, key=lambda step: (step.cycle, STEPS.index(step.step)))

    def begin(self, lease: Lease, agent: str, cycle: int, step: str) -> None:
        """Writes that a step has begun: in its first attempt, again after a kill or failure, or, with the pool, anew.

        Steps of the cycle that come after it are removed.

        Raises:
            LostLease: another process has the lease.
        """
        of_cycle = sa.and_(_STEPS.c.agent == agent, _STEPS.c.cycle == cycle)
        attempts = sa.case((_STEPS.c.status.in_((RUNNING, FAILED)), _STEPS.c.attempts + 1), else_=1)
        again = {"status": RUNNING, "attempts": attempts, "ended_at": None, "by": lease.holder}
        with lease.writing("the loop") as connection:
            connection.execute(sa.delete(_STEPS).where(of_cycle, _STEPS.c.step.in_(STEPS[STEPS.index(step) + 1 :])))
            if not connection.execute(
                sa.update(_STEPS).where(of_cycle, _STEPS.c.step == step).values(**again)
            ).rowcount:
                row = {
                    "agent": agent, "cycle": cycle, "step": step, "detail_json": "{}", "by": lease.holder,
                    "status": RUNNING, "attempts": 1, "started_at": seconds(connection),
                }  # fmt: skip
                connection.execute(sa.insert(_STEPS).values(**row))

    def end(self, lease: Lease, agent: str, cycle: int, step: str, status: str, detail: Mapping[str, Any]) -> None:
        """Writes how a step ended.

        Raises:
            LostLease: another process has the lease.
        """
        where = sa.and_(_STEPS.c.agent == agent, _STEPS.c.cycle == cycle, _STEPS.c.step == step)
        values = {"status": status, "detail_json": as_json(dict(detail))}
        with lease.writing("the loop") as connection:
            connection.execute(sa.update(_STEPS).where(where).values(**values, ended_at=seconds(connection)))


def _lease(agent: str) -> str:
    return f"the loop of agent {agent!r}"


# -- Where the cycles of a loop stand: which step comes next, when the next cycle is due, what the budget leaves.


_WEEK_S = 7 * 86400.0
_TOLERANCE_S = 60.0  # of clocks


@dataclass(frozen=True, kw_only=True)
class Position:
    """The cycle that is to be continued.

    Attributes:
        cycle: its number, from 1.
        steps: its steps so far, by name.
        step: the next one, or the one that was started and has not ended.
    """

    cycle: int
    steps: Mapping[str, LoopStep]
    step: str

    @property
    def attempts(self) -> int:
        """How often the next step was begun before, and was killed or failed."""
        before = self.steps.get(self.step)
        return before.attempts if before is not None and before.status in (RUNNING, FAILED) else 0

    @property
    def improves(self) -> bool:
        """Whether the improvement has begun, so that the cycle is no longer one that waits for data."""
        return "improve" in self.steps


def position(steps: Sequence[LoopStep], attempts: int) -> Position:
    """The next step of the newest cycle, or the first of a new one.

    A cycle whose pool has too little begins again with the pool. A step that failed, or whose process was killed, is
    begun again until it had `attempts`.
    """
    number = max((step.cycle for step in steps), default=0)
    last = {step.step: step for step in steps if step.cycle == number}
    if not last or _is_closed(last, attempts):
        return Position(cycle=number + 1, steps={}, step=STEPS[0])
    if any(last[name].status == WAITING for name in ("pool", "gates") if name in last):
        return Position(cycle=number, steps=last, step=STEPS[0])
    done = next(name for name in STEPS if name not in last or last[name].status != DONE)
    return Position(cycle=number, steps=last, step=done)


def _is_closed(steps: Mapping[str, LoopStep], attempts: int) -> bool:
    if "deploy" in steps and steps["deploy"].status == DONE:
        return True
    return any(step.status == ENDED or (step.status == FAILED and step.attempts >= attempts) for step in steps.values())


def due_in(steps: Sequence[LoopStep], every_s: float, now: float) -> float:
    """Seconds until the next cycle may improve; 0 if it may now. A cycle counts from the start of its improvement.

    If the newest one began in the future, a clock was changed: the next cycle may begin, and counts from then on.
    """
    begun = next((step.started_at for step in reversed(steps) if step.step == "improve"), None)
    if begun is None or begun > now + _TOLERANCE_S:
        return 0.0
    return max(0.0, begun + every_s - now)


def spent(steps: Sequence[LoopStep], now: float) -> tuple[int, float]:
    """LM calls and dollars of the improvements that began in the last seven days, or in the future by this clock."""
    recent = [step.detail for step in steps if step.step == "improve" and step.started_at > now - _WEEK_S]
    return sum(int(d.get("calls") or 0) for d in recent), sum(float(d.get("cost_usd") or 0.0) for d in recent)


# -- The seven figures that a loop is watched by, each against its limit. Reads the store; decides nothing.
#
# | figure | what it is | |---|---| | `convergence` | share of the improvements that ended by themselves, and none of
# whose trainings ended not converged | | `forgetting` | largest loss of a task type in production, champion against the
# version that it replaced | | `hacks` | alarms of trainings that a rubric is gamed, and rollouts that failed a
# criterion named after hacks | | `clean` | share of clean rollouts in the newest pool | | `live` | mean score of the
# version that serves now, in the window | | `suite` | share of the validation suite's tasks that the newest candidate
# passed | | `deployments` | share of the ended deployments that were neither taken back after a promotion nor ended by
# hand |


_ROLLOUTS = schema.rollouts.c
_SURE = 1.96  # standard errors


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure.

    Attributes:
        value: None without data.
        limit: None without one.
        ok: whether the value is within the limit; None without a value or a limit.
        n: number of what the value is of.
        low, high: 95 % interval, where there is one.
        detail: by task type or by kind.
    """

    name: str
    value: float | None
    limit: float | None
    ok: bool | None
    n: int
    low: float | None = None
    high: float | None = None
    detail: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class _Scores:
    """Number, mean and variance of the mean of scores."""

    n: int
    mean: float
    variance: float


def loop_figures(
    engine: sa.Engine,
    agent: str,
    steps: Sequence[LoopStep],
    limits: Any,
    *,
    suite_limit: float | None = None,
    now: float,
) -> list[Figure]:
    """The seven figures of an agent.

    Args:
        limits: `assay.commands.loop_file.LoopLimits`.
        suite_limit: of the validation suite, where `limits` names none.
        now: seconds since the epoch.
    """
    deployments = Deployments(engine)
    aliases = deployments.registry.aliases(agent)
    since = now - 86400 * limits.window_days
    champion, before = aliases.get("champion"), replaced_by_champion(deployments, agent)
    live = live_scores(engine, f"{agent}@{champion}", since=since)
    former = live_scores(engine, f"{agent}@{before}") if before is not None else {}
    return [
        _convergence(steps, limits.convergence),
        _forgetting(live_scores(engine, f"{agent}@{champion}"), former, limits.forgetting),
        _hacks(engine, agent, steps, since, limits.hacks),
        _newest(steps, "pool", "clean", "clean", limits.clean),
        _live(live, former, limits.live),
        _newest(steps, "deploy", "suite", "suite", suite_limit if limits.suite is None else limits.suite),
        deployment_success(deployments, agent, limits.deployments),
    ]


def replaced_by_champion(deployments: Deployments, agent: str) -> int | None:
    """Number of the version that the present champion replaced when it first became the champion.

    After a rollback the alias `previous` names the version that was taken back, which is not a standard for the one
    that serves now.
    """
    history = deployments.registry.alias_history(agent)
    served = [change.number for change in history if change.alias == "champion" and change.number]
    if not served:
        return None
    first = served.index(served[-1])
    return served[first - 1] if first else None


def live_scores(engine: sa.Engine, version: str, *, since: float | None = None) -> dict[str, _Scores]:
    """Scores of a version in production by task type; without those of replays."""
    score = _ROLLOUTS.score
    query = (
        sa.select(_ROLLOUTS.task_type, sa.func.count(score), sa.func.avg(score), sa.func.avg(score * score))
        .where(_ROLLOUTS.version == version, _ROLLOUTS.phase == "deployed", score.is_not(None))
        .group_by(_ROLLOUTS.task_type)
    )
    if since is not None:
        query = query.where(_ROLLOUTS.started_at >= since)
    scores = {}
    with engine.connect() as connection:
        for kind, count, mean, squares in connection.execute(query):
            variance = max(0.0, float(squares) - float(mean) ** 2) / max(1, count - 1)
            scores[str(kind)] = _Scores(int(count), float(mean), variance)
    return scores


def _share(name: str, good: int, whole: int, limit: float, detail: Mapping[str, Any] | None = None) -> Figure:
    """A share with its exact interval (Clopper and Pearson 1934)."""
    if not whole:
        return Figure(name=name, value=None, limit=limit, ok=None, n=0, detail=detail)
    from scipy import stats

    interval = stats.binomtest(good, whole).proportion_ci(0.95)
    value = good / whole
    return Figure(
        name=name, value=value, limit=limit, ok=value >= limit, n=whole, low=float(interval.low),
        high=float(interval.high), detail=detail,
    )  # fmt: skip


def _convergence(steps: Sequence[LoopStep], limit: float) -> Figure:
    ended = [s for s in steps if s.step == "improve" and s.status in (DONE, ENDED, FAILED)]
    good = sum(step.status != FAILED and bool(step.detail.get("converged")) for step in ended)
    return _share("convergence", good, len(ended), limit)


def _forgetting(now: Mapping[str, _Scores], before: Mapping[str, _Scores], limit: float) -> Figure:
    """The largest loss; beyond the limit only if its interval is."""
    losses = {
        kind: (before[kind].mean - now[kind].mean, math.sqrt(before[kind].variance + now[kind].variance))
        for kind in sorted(now.keys() & before.keys())
    }
    if not losses:
        return Figure(name="forgetting", value=None, limit=limit, ok=None, n=0)
    worst = max(losses, key=lambda kind: losses[kind][0])
    loss, error = losses[worst]
    over = [kind for kind, (mean, spread) in losses.items() if mean - _SURE * spread > limit]
    return Figure(
        name="forgetting", value=loss, limit=limit, ok=not over, n=len(losses), low=loss - _SURE * error,
        high=loss + _SURE * error, detail={kind: mean for kind, (mean, _) in losses.items()},
    )  # fmt: skip


def _hacks(engine: sa.Engine, agent: str, steps: Sequence[LoopStep], since: float, limit: int) -> Figure:
    alarms = sum(int(s.detail.get("hacks") or 0) for s in steps if s.step == "improve" and s.started_at >= since)
    query = sa.select(_ROLLOUTS.verdicts_json).where(
        _ROLLOUTS.version.startswith(f"{agent}@", autoescape=True), _ROLLOUTS.started_at >= since,
        _ROLLOUTS.verdicts_json.like("%hack%"),
    )  # fmt: skip
    failed = 0
    with engine.connect() as connection:
        for (text,) in connection.execute(query):
            failed += _fails_hack_check(text)
    detail = {"trainings": alarms, "rollouts": failed}
    value = alarms + failed
    return Figure(name="hacks", value=float(value), limit=float(limit), ok=value <= limit, n=value, detail=detail)


def _fails_hack_check(verdicts: str) -> bool:
    return any(
        "hack" in str(verdict["criterion"]) and verdict["grade"] is not None and verdict["grade"] < 1
        for verdict in json.loads(verdicts)
    )


def _newest(steps: Sequence[LoopStep], step: str, key: str, name: str, limit: float | None) -> Figure:
    """A value of the newest step of a kind that has it."""
    values = [entry.detail[key] for entry in steps if entry.step == step and entry.detail.get(key) is not None]
    value = float(values[-1]) if values else None
    ok = None if value is None or limit is None else value >= limit
    return Figure(name=name, value=value, limit=limit, ok=ok, n=len(values))


def _live(live: Mapping[str, _Scores], former: Mapping[str, _Scores], limit: float | None) -> Figure:
    now, before = _pooled(live), _pooled(former)
    if limit is None and before is not None:
        limit = before.mean
    if now is None:
        return Figure(name="live", value=None, limit=limit, ok=None, n=0)
    width = _SURE * math.sqrt(now.variance)
    return Figure(
        name="live", value=now.mean, limit=limit, ok=None if limit is None else now.mean + width >= limit, n=now.n,
        low=max(0.0, now.mean - width), high=min(1.0, now.mean + width),
        detail={kind: scores.mean for kind, scores in sorted(live.items())},
    )  # fmt: skip


def _pooled(scores: Mapping[str, _Scores]) -> _Scores | None:
    n = sum(of.n for of in scores.values())
    if not n:
        return None
    mean = math.fsum(of.n * of.mean for of in scores.values()) / n
    # within task types: their shares are taken as given
    return _Scores(n, mean, math.fsum((of.n / n) ** 2 * of.variance for of in scores.values()))


def deployment_success(deployments: Deployments, agent: str, limit: float) -> Figure:
    """Share of the ended deployments that succeeded: promoted and still so, or taken back by a rule before that."""
    good = whole = 0
    kinds = {"promoted": 0, "rolled back": 0, "taken back later": 0, "ended by hand": 0}
    for deployment in deployments.all(agent):
        if deployment.state.status not in ENDED_STATUSES:
            continue
        whole += 1
        history = [row for row in deployments.history(deployment.id) if row["action"] not in ("alarm", "replay")]
        promoted = any(row["action"] == "promote" for row in history)
        last = history[-1] if history else {"rule": "order", "action": ""}
        if deployment.state.status == "rolled_back" and promoted:
            kinds["taken back later"] += 1
        elif last["rule"] == "order":
            kinds["ended by hand"] += 1
        else:
            good += 1
            kinds["promoted" if promoted else "rolled back"] += 1
    return _share("deployments", good, whole, limit, kinds)


@dataclass(frozen=True, kw_only=True, repr=False)
class LoopRunReport(Report):
    """What one run of a loop did.

    Attributes:
        agent: name of the agent.
        action: `advance` (of the active deployment), `cycle`, `wait`, `held` (another process runs the loop), `stopped`
            or `failed`.
        reason: why the run ended there.
        cycle: the cycle that it worked on; null if it did not come to one.
        steps: steps that were taken in this run, each with its status and reason.
        deployment: the active deployment; null without one.
        dry_run: whether nothing was written.
    """

    agent: str
    action: str
    reason: str
    cycle: int | None = None
    steps: list[dict[str, Any]] = field(default_factory=list)
    deployment: dict[str, Any] | None = None
    dry_run: bool = False

    def lines(self) -> Iterator[str]:
        yield from (f"{step['step']:9} {step['status']:8} {step['reason']}" for step in self.steps)
        yield f"{self.action}: {self.reason}"

    @property
    def failure(self) -> str:
        return "a step of the loop failed" if self.action == "failed" else ""
