"""What `assay loop run` does: one call takes the loop of an agent as far as it can go now."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from assay.commands.advancing import advanced
from assay.commands.compile import compile as compile_program
from assay.commands.deploy import advance_deployment, start_deployment
from assay.commands.improve import improve
from assay.commands.loop_file import LoopSettings
from assay.commands.pool import collect_pool
from assay.deployment.decisions import RUNNING
from assay.deployment.deployments import Deployment, Deployments
from assay.deployment.loops import (
    DONE,
    ENDED,
    FAILED,
    WAITING,
    LoopRunReport,
    Loops,
    Position,
    due_in,
    position,
    spent,
)
from assay.deployment.plan import Notifier
from assay.deployment.pool import gate_value, read_manifest
from assay.deployment.watching import watches_now
from assay.errors import BudgetExceeded, ConfigError, DataError, DeploymentError
from assay.evaluation.progress import Progress
from assay.jobs.checks import settings_of_another_job
from assay.jobs.groups import ScoringSettings, StoredJudge
from assay.jobs.opening import artifact_place
from assay.jobs.rescoring import score_stored
from assay.models.meter import Usage
from assay.reports.markdown import with_interval
from assay.sources.modules import attribute_of
from assay.support.names import place_in
from assay.support.options import options_of
from assay.support.scrubbing import error_text
from assay.support.values import json_text
from assay.traces import Store
from assay.traces.resuming import spent_of
from assay.traces.store import tables as schema
from assay.traces.store.leases import Lease, LostLease, present
from assay.traces.store.location import home_of

# -- The improvement of a cycle: `assay.compile`, `assay.improve` or a function of the user's own.

_HACKING = "being gamed"  # of the alarm of `assay.optimizers.finetuning.policy_gradient`, in notes and logs


@dataclass(frozen=True, kw_only=True)
class Order:
    """What is to be improved.

    Attributes:
        champion: folder of the artifact.
        data: file of the pool.
        out: folder of the result.
        began: when the improvement began, seconds since the epoch.
        max_calls, max_cost_usd: what the budget leaves; None without a limit.
    """

    name: str
    champion: Path
    data: Path
    out: Path
    store: Any
    began: float
    max_calls: int | None
    max_cost_usd: float | None


def improved(settings: LoopSettings, order: Order, progress: Progress | None) -> dict[str, Any]:
    """Runs the improvement, or continues the one that was killed.

    Returns:
        `artifact` (None if nothing better was found), `reason`, `calls`, `cost_usd`, `converged` and `hacks`.
    """
    with settings_of_another_job():  # the options of the loop outlive the rubric of one cycle
        if settings.method == "compile":
            return _compiled(settings, order, progress)
        if settings.method == "improve":
            return _improved(settings, order, progress)
    return _by_function(settings, order)


def _options(settings: LoopSettings, order: Order) -> dict[str, Any]:
    """The method's options, with the caps that the budget leaves."""
    options = dict(settings.options or {})
    for name in ("max_calls", "max_cost_usd"):
        limits = [value for value in (options.get(name), getattr(order, name)) if value is not None]
        if limits:
            options[name] = min(limits)
    return options


def _compiled(settings: LoopSettings, order: Order, progress: Progress | None) -> dict[str, Any]:
    report = compile_program(
        str(order.champion), rubric=settings.rubric, data=str(order.data), out=order.out, store=order.store,
        resume=True, progress=progress, **_options(settings, order),
    ).to_dict()  # fmt: skip
    better = bool(report["replaces"])
    return {
        "artifact": report["artifact"] if better else None,
        "reason": _decided(report),
        "calls": report["calls"],
        "cost_usd": report["cost_usd"],
        "converged": report["stopped"] is None,
        "hacks": _hacks(report),
        "test": report["test"],
    }


def _decided(report: Mapping[str, Any]) -> str:
    """Why a compiled program replaces the champion, or does not."""
    if report["gate"] is not None:
        return f"gate: {with_interval(report['gate'])}"
    if report["winner"] == "baseline":
        return "the baseline is the best that was found"
    return f"the gate was not decided{': ' if report['stopped'] else ''}{report['stopped'] or ''}"


def _improved(settings: LoopSettings, order: Order, progress: Progress | None) -> dict[str, Any]:
    report = improve(
        str(order.champion), rubric=settings.rubric, data=str(order.data), name=order.name, out=order.out,
        store=order.store, resume=True, progress=progress, **_options(settings, order),
    ).to_dict()  # fmt: skip
    better = any(step["kept"] for step in report["steps"])
    settled = all(step.get("converged") is not False for step in report["steps"])
    calls, cost = usage_since(order.store, order.began)
    return {
        "artifact": report["artifact"] if better else None,
        "reason": "; ".join(map(_outcome, report["steps"])),
        "calls": calls,
        "cost_usd": cost,
        "converged": report["stopped"] is None and settled,
        "hacks": _hacks(report),
        "test": report["test"],
    }


def _outcome(step: Mapping[str, Any]) -> str:
    """A step of an improvement in a few words."""
    settled = ", not converged" if step.get("converged") is False else ""
    return f"{step['step']} {'kept' if step['kept'] else 'not kept'}{settled}"


def usage_since(store: Any, began: float) -> tuple[int, float]:
    """LM calls and dollars of all jobs of the store since a time, without those of production.

    For improvements without counts of their own that outlive a kill or failure. Calls of another job at the same time
    are counted too, so that the budget holds. What a run sent by its ledger counts, also if it was never stored.
    """
    calls, rollouts, runs = schema.transitions.c, schema.rollouts.c, schema.runs.c
    stored = (
        sa.select(rollouts.run_id, sa.func.count(), sa.func.sum(calls.cost_usd))
        .select_from(schema.transitions.join(schema.rollouts, rollouts.id == calls.rollout_id))
        .where(calls.started_at >= began, sa.not_(calls.cached), rollouts.phase.not_in(("deployed", "shadow")))
        .group_by(rollouts.run_id)
    )
    count, cost = 0, 0.0
    with Store(store) as opened:
        with opened.engine.connect() as connection:
            used = {run: (int(number), float(usd or 0.0)) for run, number, usd in connection.execute(stored)}
            begun = connection.execute(sa.select(runs.id).where(runs.started_at >= began)).scalars().all()
        for run in {*used, *begun}:
            number, usd = used.get(run, (0, 0.0))
            sent = Usage() if run is None else spent_of(opened, run)
            count, cost = count + max(number, sent.calls), cost + max(usd, sent.cost_usd)
    return count, cost


def _hacks(report: Mapping[str, Any]) -> int:
    """Alarms that a rubric was gamed, in notes and steps."""
    return json_text([report.get("notes"), report.get("steps")]).count(_HACKING)


def _by_function(settings: LoopSettings, order: Order) -> dict[str, Any]:
    """A function of the user's own; it runs the code of its file."""
    function = attribute_of(settings.method)
    result = function(
        str(order.champion), rubric=settings.rubric, data=str(order.data), out=str(order.out),
        **_options(settings, order),
    )  # fmt: skip
    if result is None:
        return {"artifact": None, "reason": "the function found nothing better", "converged": True, "hacks": 0}
    report = dict(result) if isinstance(result, Mapping) else {"artifact": str(result)}
    known = ("artifact", "reason", "calls", "cost_usd", "converged", "hacks")
    if unknown := sorted(report.keys() - set(known)):
        raise ConfigError(f"{settings.method} returned {unknown[0]!r}; a result has {', '.join(known)}")
    artifact = report.get("artifact")
    return {
        "reason": "",
        "converged": True,
        "hacks": 0,
        **report,
        "artifact": None if artifact is None else str(artifact),
    }


# -- Run.


def run_cycle(
    agent: str, settings: LoopSettings, opened: Store, store: Any, progress: Progress, *, dry_run: bool
) -> LoopRunReport:
    """Advances the active deployment of an agent; without one takes the steps of a cycle as far as they go.

    Safe to call at any time, on any number of machines: one process at a time has the loop. A killed one is continued
    by the next call, at the step that it had begun.

    Args:
        store: where `opened` is, as it was given.
    """
    run = _Run(agent, settings, opened, store, progress)
    if dry_run:
        return run.dry()
    lease = run.loops.acquire(agent, lease_s=settings.lease_s)
    if lease is None:
        holder = run.loops.known(agent).holder or "another process"
        return LoopRunReport(agent=agent, action="held", reason=f"{holder} runs the loop now")
    with lease:
        try:
            return run.go(lease)
        finally:
            run.notifier.close()


@dataclass
class _Run:
    """One run of a loop."""

    agent: str
    settings: LoopSettings
    opened: Store
    store: Any
    progress: Progress

    def __post_init__(self) -> None:
        self.loops, self.deployments = Loops(self.opened.engine), Deployments(self.opened.engine)
        self.notifier = Notifier(self.settings.events)
        self.taken: list[dict[str, Any]] = []

    def go(self, lease: Lease) -> LoopRunReport:
        """Advances the deployment, else works on the cycle until it ends, waits or is stopped."""
        if (active := self.deployments.active(self.agent)) is not None:
            at = position(self.loops.steps(self.agent), self.settings.attempts)
            made = at.steps["register"].detail.get("version") if "register" in at.steps else None
            if at.step == "deploy" and made == f"{self.agent}@{active.candidate}":
                self._step(lease, at)  # its process was killed when the deployment had just started
            return self._advance(active)
        self._score()
        newest = next(iter(self.deployments.all(self.agent, limit=1)), None)
        if newest is not None and watches_now(self.deployments, newest, present(self.opened.engine)) is not None:
            decision = advanced(self.opened, newest, hooks=self.settings.events)
            if decision.action == "rollback":
                return self._report("advance", f"rollback ({decision.rule}): {decision.reason}")
        waited = WAITING in [step.status for step in self.loops.steps(self.agent)[-2:]]
        while True:
            at = position(self.loops.steps(self.agent), self.settings.attempts)
            if (reason := self._hindrance(at)) is not None:
                return self._report("wait", reason, at)
            if not self.loops.known(self.agent).enabled:
                return self._report("stopped", "the loop was stopped", at)
            status, reason = self._step(lease, at)
            if status == FAILED:
                self.notifier.notify("failed", agent=self.agent, cycle=at.cycle, step=at.step, reason=reason)
                return self._report("failed", f"{at.step}: {reason}", at)
            if status == WAITING:
                if not waited:  # a schedule calls this every few minutes
                    self.notifier.notify("waiting", agent=self.agent, cycle=at.cycle, step=at.step, reason=reason)
                return self._report("wait", reason, at)
            if status == ENDED or at.step == "deploy":
                return self._report("cycle", reason, at)

    def _score(self) -> None:
        """Scores rollouts of production that have no score."""
        scoring = self.settings.scoring or ScoringSettings()
        with Store(self.store) as store:
            score_stored(store, self.settings.rubric, scoring, agent=self.agent, progress=self.progress)

    def _report(self, action: str, reason: str, at: Position | None = None, *, dry_run: bool = False) -> LoopRunReport:
        active = self.deployments.active(self.agent)
        return LoopRunReport(
            agent=self.agent, action=action, reason=reason, cycle=at.cycle if at is not None else None,
            steps=self.taken, deployment=None if active is None else {"id": active.id, "status": active.state.status},
            dry_run=dry_run,
        )  # fmt: skip

    def _advance(self, active: Deployment, *, dry_run: bool = False) -> LoopRunReport:
        if active.state.status != RUNNING:
            return self._report("wait", f"deployment {active.id} is paused: resume, promote or roll it back")
        if self.settings.scoring and not dry_run:  # its threads and time limit
            self._score()
        scoring = self.settings.scoring or ScoringSettings()
        judge: Any = {name: getattr(scoring, name) for name in options_of(StoredJudge)}
        report = advance_deployment(
            active.id, rubric=self.settings.rubric, dry_run=dry_run, hooks=self.settings.events, store=self.store,
            progress=self.progress, **judge,
        )  # fmt: skip
        return self._report("advance", f"{report.decision} ({report.rule}): {report.reason}", dry_run=dry_run)

    def _hindrance(self, at: Position) -> str | None:
        """Why the cycle cannot continue now; None if it can."""
        steps, settings = self.loops.steps(self.agent), self.settings
        now = present(self.opened.engine)
        if not at.improves and (left := due_in(steps, 86400 * settings.every_days, now)) > 0:
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(now + left))
            return f"the next cycle is due at {when}"
        if at.step in ("pool", "gates", "improve"):
            left_calls, left_usd = self._left(now)
            if (left_calls is not None and left_calls <= 0) or (left_usd is not None and left_usd <= 0):
                return "the budget of seven days is used up (`max_calls`, `max_cost_usd`)"
        return None

    def _left(self, now: float, *, without: int | None = None) -> tuple[int | None, float | None]:
        """Calls and dollars that the budget leaves.

        Args:
            without: a cycle that is not counted.
        """
        calls, usd = spent([step for step in self.loops.steps(self.agent) if step.cycle != without], now)
        settings = self.settings
        return (
            None if settings.max_calls is None else settings.max_calls - calls,
            None if settings.max_cost_usd is None else settings.max_cost_usd - usd,
        )

    def _step(self, lease: Lease, at: Position) -> tuple[str, str]:
        """Takes one step and writes how it ended. After a kill it counts as started."""
        if at.attempts >= self.settings.attempts:
            reason = f"its process was killed or failed in each of {at.attempts} attempts"
            status, detail = FAILED, {"reason": reason, **self._lost(at)}
            self.loops.end(lease, self.agent, at.cycle, at.step, status, detail)
            return status, str(detail["reason"])
        self.loops.begin(lease, self.agent, at.cycle, at.step)
        steps: dict[str, Callable[[Position], tuple[str, dict[str, Any]]]] = {
            "pool": self._pool, "gates": self._gates, "improve": self._improve, "register": self._register,
            "deploy": self._deploy,
        }  # fmt: skip
        self.progress.say(f"loop {self.agent}, cycle {at.cycle}: {at.step}")
        try:
            status, detail = steps[at.step](at)
        except LostLease:
            raise
        except (Exception, BudgetExceeded) as error:  # whatever a program, judge or trainer raises; tried again
            status, detail = FAILED, {"reason": error_text(error)[:2000], **self._lost(at)}
        self.loops.end(lease, self.agent, at.cycle, at.step, status, detail)
        reason = str(detail.get("reason") or "")
        self.taken.append({"step": at.step, "status": status, "reason": reason})
        return status, reason

    def _lost(self, at: Position) -> dict[str, Any]:
        """What an improvement has spent that did not end by itself; it counts for the budget."""
        began = next(
            (s.started_at for s in self.loops.steps(self.agent) if (s.cycle, s.step) == (at.cycle, "improve")), None
        )
        if at.step != "improve" or began is None:
            return {}
        calls, cost = usage_since(self.store, began)
        return {"calls": calls, "cost_usd": cost}

    # -- steps
    def _folder(self, cycle: int) -> Path:
        return (place_in(home_of(self.store) / "loop", self.agent, "agent") / f"cycle-{cycle}").absolute()

    def _pool_settings(self, cycle: int) -> dict[str, Any]:
        """Settings of the pool; compared with the training data that was named, else with the newest pool that an
        improvement was made from, where it is on this machine."""
        options: dict[str, Any] = {**vars(self.settings.pool)}
        if options["against"] is None:
            steps = self.loops.steps(self.agent)
            used = {s.cycle for s in steps if s.step == "improve" and s.status in (DONE, ENDED) and s.cycle < cycle}
            pools = [
                str(s.detail["path"]) for s in steps if s.step == "pool" and s.cycle in used and "path" in s.detail
            ]
            options["against"] = next((path for path in reversed(pools) if Path(path).is_file()), None)
        return options

    def _pool(self, at: Position) -> tuple[str, dict[str, Any]]:
        out = self._folder(at.cycle) / "pool.jsonl"
        try:
            report = collect_pool(self.agent, out=out, replace=True, store=self.store, **self._pool_settings(at.cycle))
        except DataError as error:
            return WAITING, {"reason": str(error)}
        return DONE, {**report.to_dict(), "reason": f"{report.tasks} tasks"}

    def _gates(self, at: Position) -> tuple[str, dict[str, Any]]:
        return _passed(at.steps["pool"].detail, self.settings.min_new_tasks)

    def _improve(self, at: Position) -> tuple[str, dict[str, Any]]:
        pool = at.steps["pool"].detail
        data = Path(pool["path"])
        if not data.is_file():  # another machine has collected it
            again = collect_pool(
                self.agent, out=self._folder(at.cycle) / "pool.jsonl", replace=True, store=self.store,
                **self._pool_settings(at.cycle),
            )  # fmt: skip
            data = Path(str(again.path))
        people = read_manifest(data)["people"]
        registry = self.deployments.registry
        champion = registry.version(self.agent)
        now = present(self.opened.engine)
        began = at.steps["improve"].started_at if "improve" in at.steps else now
        calls, usd = self._left(now, without=at.cycle)  # caps of a resumed job hold for all of its attempts
        order = Order(
            name=f"{self.agent}-loop-{at.cycle}", champion=registry.folder_of(champion), data=data,
            out=artifact_place(self.store, None, f"{self.agent}-loop-{at.cycle}").absolute(), store=self.store,
            began=began, max_calls=calls, max_cost_usd=usd,
        )  # fmt: skip
        detail = {**improved(self.settings, order, self.progress), "champion": champion.name, "people": people}
        if detail["artifact"] is None:
            return ENDED, {**detail, "reason": f"no better version: {detail['reason']}"}
        return DONE, detail

    def _register(self, at: Position) -> tuple[str, dict[str, Any]]:
        made = at.steps["improve"].detail
        # First, so that erasure names the artifact: its demonstrations are tasks of the pool.
        self.opened.put_artifact(str(made["artifact"]), made["people"])
        version = self.deployments.registry.register(
            self.agent, made["artifact"], parent=made["champion"], people=made["people"], by="assay loop"
        )
        return DONE, {"version": version.name, "reason": version.name}

    def _deploy(self, at: Position) -> tuple[str, dict[str, Any]]:
        version = self.deployments.registry.version(at.steps["register"].detail["version"])
        for known in self.deployments.all(self.agent):
            if known.candidate == version.number:  # started before this process or its predecessor was killed
                return DONE, {"deployment": known.id, "reason": f"{version.name} is being deployed"}
        options: Any = vars(self.settings.deploy)
        try:
            report = start_deployment(version.name, store=self.store, progress=self.progress, **options)
        except DeploymentError as error:
            if self.deployments.active(self.agent) is not None:
                return WAITING, {"reason": str(error)}
            return ENDED, {"reason": f"not deployed: {error}"}
        suite = None if report.suite is None else report.suite.pass_rate
        detail: dict[str, Any] = {
            "deployment": report.deployment,
            "suite": suite,
            "reason": f"{version.name} is deployed",
        }
        return DONE, detail

    def dry(self) -> LoopRunReport:
        """What a run would do; nothing is written."""
        if (active := self.deployments.active(self.agent)) is not None:
            return self._advance(active, dry_run=True)
        at = position(self.loops.steps(self.agent), self.settings.attempts)
        if (reason := self._hindrance(at)) is not None:
            return self._report("wait", reason, at, dry_run=True)
        if at.step != "pool":
            return self._report("cycle", f"would continue cycle {at.cycle} with {at.step}", at, dry_run=True)
        try:
            pool = collect_pool(self.agent, store=self.store, **self._pool_settings(at.cycle)).to_dict()
        except DataError as error:
            return self._report("wait", str(error), at, dry_run=True)
        status, detail = _passed(pool, self.settings.min_new_tasks)
        self.taken.append({"step": "gates", "status": status, "reason": detail["reason"]})
        if status == WAITING:
            return self._report("wait", detail["reason"], at, dry_run=True)
        calls, usd = self._left(present(self.opened.engine))
        left = (
            "no cap on calls" if calls is None else f"{calls} calls",
            "no cap on cost" if usd is None else f"${usd:.2f}",
        )
        reason = f"would improve {self.agent} by {self.settings.method} on {pool['tasks']} tasks ({', '.join(left)})"
        return self._report("cycle", reason, at, dry_run=True)


def _passed(pool: Mapping[str, Any], new: int) -> tuple[str, dict[str, Any]]:
    """Whether a pool passes its gates and has enough new tasks."""
    missing = [
        f"{gate['gate']} is {gate_value(gate)}, {gate['required']} is required"
        for gate in pool["gates"]
        if not gate["passed"]
    ]
    if pool["new_tasks"] < new:
        capped = f" of {pool['tasks']}" if "tasks beyond max_tasks" in pool["left_out"] else ""
        hint = "; raise `max_tasks` of the pool, or lower min_new_tasks" if capped else ""
        missing.append(f"new tasks are {pool['new_tasks']}{capped}, {new} are required{hint}")
    if missing:
        return WAITING, {"reason": "; ".join(missing), "gates": pool["gates"]}
    return DONE, {"reason": "all gates passed", "gates": pool["gates"]}
