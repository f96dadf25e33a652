"""Public API for `assay loop status`: where a loop stands, and the seven figures that it is watched by."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from assay.api.loop.state import loop_file
from assay.deployment.cycles import due_in, position, spent
from assay.deployment.deployments import Deployments
from assay.deployment.judge_drift import judge_watches
from assay.deployment.loops import Loops, LoopStep
from assay.deployment.monitoring import loop_figures
from assay.errors import AssayError
from assay.runs.settings.loop import LoopLimits, LoopSettings
from assay.support.keywords import takes
from assay.support.reprs import ReportRepr
from assay.traces import Store
from assay.traces.store.leases import seconds


@dataclass(frozen=True, kw_only=True, repr=False)
class LoopStatusReport(ReportRepr):
    """Where a loop stands.

    Attributes:
        enabled: whether `assay loop run` works.
        holder: host and process that run it now; None if none does.
        file: its settings; `problem` says why they cannot be read on this machine.
        cycle: the current or next cycle, with `next_step` and `due_in_s`.
        spent: calls and dollars of seven days, with `budget`.
        deployment: the active deployment.
        figures: convergence, forgetting, hacks, clean, live, suite, deployments: each with value, limit and ok.
        judges: the judges that the newest deployment is watched by, each with its newest replay of anchors.
        alarms: names of the figures beyond their limits, and watches of judges that gave an alarm.
        steps: the steps of the newest cycle.
    """

    agent: str
    enabled: bool
    holder: str | None
    file: str
    problem: str | None
    cycle: int
    next_step: str
    due_in_s: float
    spent: dict[str, float]
    budget: dict[str, float | None]
    deployment: dict[str, Any] | None
    figures: list[dict[str, Any]]
    judges: list[dict[str, Any]]
    alarms: list[str]
    steps: list[dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@takes()
def loop_status(agent: str, *, file: str | Path | None = None, store: str | Path | None = None) -> LoopStatusReport:
    """The status of an agent's loop; nothing is written.

    Args:
        file: the loop's file on this machine, where it is elsewhere.
    Raises:
        DeploymentError: the agent has no loop.
    """
    with Store(store) as opened:
        loops, deployments = Loops(opened.engine), Deployments(opened.engine)
        loop = loops.known(agent)
        settings, problem = None, None
        try:
            settings = loop_file(loops, agent, file)
        except AssayError as error:
            problem = str(error)
        with opened.engine.connect() as connection:
            now = seconds(connection)
        steps, active = loops.steps(agent), deployments.active(agent)
        newest = next(iter(deployments.all(agent, limit=1)), None)
        judges = [] if newest is None else judge_watches(deployments, newest)
        figures = loop_figures(
            opened.engine, agent, steps, LoopLimits() if settings is None else settings.limits,
            suite_limit=_suite_limit(settings), now=now,
        )  # fmt: skip
    at = position(steps, 5 if settings is None else settings.attempts)
    calls, usd = spent(steps, now)
    return LoopStatusReport(
        agent=agent, enabled=loop.enabled, holder=loop.holder, file=loop.file, problem=problem, cycle=at.cycle,
        next_step=at.step, due_in_s=0.0 if at.improves or settings is None else due_in(
            steps, 86400 * settings.every_days, now
        ),
        spent={"calls": calls, "cost_usd": usd},
        budget={name: getattr(settings, f"max_{name}", None) for name in ("calls", "cost_usd")},
        deployment=None if active is None else {"id": active.id, "status": active.state.status, "share": active.share},
        figures=[figure.to_dict() for figure in figures],
        judges=judges,
        alarms=[
            *(figure.name for figure in figures if figure.ok is False),
            *(row["watch"] for row in judges if row["ok"] is False),
        ],
        steps=[_step_row(step) for step in steps if step.cycle == max(other.cycle for other in steps)],
    )  # fmt: skip


def _suite_limit(settings: LoopSettings | None) -> float | None:
    return None if settings is None or settings.deploy.suite_data is None else settings.deploy.suite_pass_rate or None


def _step_row(step: LoopStep) -> dict[str, Any]:
    names = ("cycle", "step", "status", "attempts", "started_at", "ended_at", "by")
    return {**{name: getattr(step, name) for name in names}, "reason": step.detail.get("reason")}
