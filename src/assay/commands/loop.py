"""`assay loop`: from production to a better version, again and again."""

import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Le

from assay.commands.groups import InExistingStore, OfAgent, Reported, Trusting
from assay.errors import AssayError, ConfigError, DataError
from assay.support.numbers import figure
from assay.support.options import Flag, Settings, function_of
from assay.support.places import no_such_file
from assay.support.report import OBJECT, Report

if TYPE_CHECKING:
    from assay.commands.loop_file import LoopSettings
    from assay.deployment.loops import Figure, LoopRunReport, LoopStep
else:
    Figure = LoopRunReport = Any  # so that the types can be read without the heavy packages


class WithFile(Settings):
    """Options."""

    file: Annotated[str | Path | None, Flag(metavar="FILE", key=False)] = None
    """Loop file on this machine, if its path differs from the one given to assay loop start; with the same content."""


class RunLoop(OfAgent, InExistingStore, WithFile, Trusting, Reported):
    """Advance the active deployment of AGENT; without one collect the pool, check its gates, improve, register, deploy.

    It may be called at any time, on several machines: one process at a time runs the loop, and the next one
    continues after a kill. Exit code 1 if a step failed.

    Raises:
        DeploymentError: the agent has no loop, or its file was changed.
    """

    dry_run: Annotated[bool, Flag(key=False)] = False
    """Print what would be done; write nothing."""

    def run(self) -> LoopRunReport:
        from assay.commands.cycle import run_cycle
        from assay.commands.loop_file import started_loop
        from assay.deployment.loops import LoopRunReport, Loops

        with self.opened() as store:
            loops = Loops(store.engine)
            settings = started_loop(loops, self.agent, self.file)
            if not loops.known(self.agent).enabled:
                reason = "the loop was stopped"
                return LoopRunReport(agent=self.agent, action="stopped", reason=reason, dry_run=self.dry_run)
            return run_cycle(self.agent, settings, store, self.store, self.reporter, dry_run=self.dry_run)


@dataclass(frozen=True, kw_only=True, repr=False)
class StartedLoop(Report):
    """A loop that was started.

    Attributes:
        agent: name of the agent.
        enabled: whether `assay loop run` works.
        file: the settings of the loop.
        champion: version that it improves.
    """

    agent: str
    enabled: bool = True
    file: str
    champion: str

    def lines(self) -> Iterator[str]:
        next_commands = f"assay loop run {self.agent} --dry-run, assay loop install {self.agent}"
        yield f"the loop of {self.agent} is started; next: {next_commands}"


class StartLoop(OfAgent, InExistingStore):
    """Enable assay loop run for AGENT with the settings in FILE. Starts no process; assay loop install schedules it.

    Raises:
        ConfigError: the file breaks a rule.
        DataError, RubricError: a file that it names, or that its plan names, is not there.
        DeploymentError: the agent has no champion.
    """

    file: Annotated[str | Path, Flag(metavar="FILE", key=False)]
    """YAML file with the settings of the loop."""

    def run(self) -> StartedLoop:
        from assay.commands.loop_file import load_loop, loop_digest
        from assay.deployment.loops import Loops
        from assay.deployment.registry import Registry

        _check_files(load_loop(self.file))
        path = Path(self.file).absolute()
        with self.opened() as store:
            champion = Registry(store.engine).version(self.agent)
            Loops(store.engine).enable(self.agent, str(path), loop_digest(path))
        return StartedLoop(agent=self.agent, file=str(path), champion=champion.name)


def _check_files(settings: "LoopSettings") -> None:
    """Refuses a loop that would fail later, for want of a file that it names."""
    from assay.datasets.sources import check_data_exists
    from assay.rubrics.loading import check_rubric_exists

    deploy, options = settings.deploy, settings.options or {}
    for rubric in (settings.rubric, deploy.suite_rubric, deploy.replay_rubric, options.get("monitor")):
        if isinstance(rubric, str):
            check_rubric_exists(rubric)
    for data in (deploy.suite_data, settings.pool.against):
        if isinstance(data, str):
            check_data_exists(data)
    source, python, _ = settings.method.partition(".py:")
    plan = deploy.read_plan()
    named = [place for watch in plan.watch for place in (watch.judge, watch.anchors) if place is not None]
    for path in [*([f"{source}.py"] if python else []), *named]:
        if not Path(path).exists():
            raise DataError(no_such_file(path))


@dataclass(frozen=True, kw_only=True, repr=False)
class StoppedLoop(Report):
    """A loop that was stopped.

    Attributes:
        agent: name of the agent.
        enabled: whether `assay loop run` works.
    """

    agent: str
    enabled: bool = False

    def lines(self) -> Iterator[str]:
        yield f"the loop of {self.agent} is stopped"


class StopLoop(OfAgent, InExistingStore):
    """End the loop of AGENT: a process that runs it stops before its next step. An active deployment continues.

    Raises:
        DeploymentError: the agent has no loop.
    """

    def run(self) -> StoppedLoop:
        from assay.deployment.loops import Loops

        with self.opened() as store:
            Loops(store.engine).disable(self.agent)
        return StoppedLoop(agent=self.agent)


@dataclass(frozen=True, kw_only=True, repr=False)
class LoopStatusReport(Report):
    """Where a loop stands, and the seven figures that it is watched by.

    Attributes:
        agent: name of the agent.
        enabled: whether `assay loop run` works.
        holder: host and process that run the loop now; null if none does.
        file: the settings of the loop.
        problem: why they cannot be read on this machine; null if they can.
        cycle: number of the current or next cycle.
        next_step: its next step.
        due_in_s: seconds until it may begin.
        spent: calls and dollars of seven days.
        budget: caps of these; null without one.
        deployment: the active deployment; null without one.
        figures: convergence, forgetting, hacks, clean, live, suite and deployments, each with value, limit, whether it
            is within it, number and interval.
        judges: each watch of a judge by the newest deployment, with the result of its newest replay of anchors.
        alarms: names of the figures beyond their limits, and watches of judges that gave an alarm.
        steps: steps of the newest cycle.
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
    figures: list[Figure]
    judges: list[dict[str, Any]]
    alarms: list[str]
    steps: list[dict[str, Any]]

    def lines(self) -> Iterator[str]:
        from assay.deployment.watching import judge_lines

        state = "started" if self.enabled else "stopped"
        holder = f", run by {self.holder}" if self.holder else ""
        due = f", due in {self.due_in_s / 3600:.1f} h" if self.due_in_s else ""
        yield f"loop of {self.agent}: {state}{holder}; cycle {self.cycle}, next {self.next_step}{due}"
        if self.problem:
            yield f"  {self.problem}"
        for step in self.steps:
            at = time.strftime("%m-%d %H:%M", time.localtime(step["started_at"]))
            yield f"  {at}  {step['step']:9} {step['status']:8} {step['reason'] or ''}"
        if (active := self.deployment) is not None:
            yield f"  deployment {active['id'][:12]}: {active['status']}, {active['share']:.0%} on the candidate"
        for one in self.figures:
            span = "" if one.low is None else f" [{figure(one.low)}, {figure(one.high)}]"
            limit = "no limit" if one.limit is None else f"limit {one.limit:g}"
            mark = {True: "ok", False: "ALARM", None: "–"}[one.ok]
            yield f"{mark:5}  {one.name:12} {figure(one.value)}{span}, {limit} (n = {one.n})"
        yield from judge_lines(self.judges)


class LoopStatus(OfAgent, InExistingStore, WithFile):
    """Show where the loop of AGENT stands, and seven figures against their limits.

    Raises:
        DeploymentError: the agent has no loop.
    """

    def run(self) -> LoopStatusReport:
        from assay.commands.loop_file import LoopLimits, started_loop
        from assay.deployment.deployments import Deployments
        from assay.deployment.loops import Loops, due_in, loop_figures, position, spent
        from assay.deployment.watching import judge_watches
        from assay.traces.store.leases import present

        with self.opened() as store:
            loops, deployments = Loops(store.engine), Deployments(store.engine)
            loop = loops.known(self.agent)
            settings, problem = None, None
            try:
                settings = started_loop(loops, self.agent, self.file)
            except AssayError as error:
                problem = str(error)
            now = present(store.engine)
            steps, active = loops.steps(self.agent), deployments.active(self.agent)
            newest = next(iter(deployments.all(self.agent, limit=1)), None)
            judges = [] if newest is None else judge_watches(deployments, newest)
            figures = loop_figures(
                store.engine, self.agent, steps, LoopLimits() if settings is None else settings.limits,
                suite_limit=_suite_limit(settings), now=now,
            )  # fmt: skip
        at = position(steps, 5 if settings is None else settings.attempts)
        waits = not at.improves and settings is not None
        calls, usd = spent(steps, now)
        state = None if active is None else {"id": active.id, "status": active.state.status, "share": active.share}
        return LoopStatusReport(
            agent=self.agent, enabled=loop.enabled, holder=loop.holder, file=loop.file, problem=problem, cycle=at.cycle,
            next_step=at.step, due_in_s=due_in(steps, 86400 * settings.every_days, now) if waits and settings else 0.0,
            spent={"calls": calls, "cost_usd": usd},
            budget={name: getattr(settings, f"max_{name}", None) for name in ("calls", "cost_usd")},
            deployment=state, figures=figures, judges=judges,
            alarms=[
                *(one.name for one in figures if one.ok is False),
                *(row["watch"] for row in judges if row["ok"] is False),
            ],
            steps=[_step_row(step) for step in steps if step.cycle == max(other.cycle for other in steps)],
        )  # fmt: skip


def _suite_limit(settings: "LoopSettings | None") -> float | None:
    return None if settings is None or settings.deploy.suite_data is None else settings.deploy.suite_pass_rate or None


def _step_row(step: "LoopStep") -> dict[str, Any]:
    names = ("cycle", "step", "status", "attempts", "started_at", "ended_at", "by")
    return {**{name: getattr(step, name) for name in names}, "reason": step.detail.get("reason")}


@dataclass(frozen=True, kw_only=True, repr=False)
class ScheduleReport(Report):
    """Files for systemd or cron that call `assay loop run`.

    Attributes:
        files: contents by name.
        out: folder in which they were written; null if they were not.
    """

    files: dict[str, str]
    out: str | None
    note: str = field(default="", metadata=OBJECT)

    def lines(self) -> Iterator[str]:
        for name, text in self.files.items():
            yield f"# {name}\n{text}" if self.out is None else str(Path(self.out) / name)

    def warnings(self) -> Iterator[str]:
        if self.note:
            yield f"note: {self.note}"


class InstallLoop(OfAgent, WithFile):
    """Write a systemd service with its timer, or a cron line, that calls assay loop run AGENT. Installs nothing.

    The store is written as an absolute path or URL. One with a password is refused: set ASSAY_STORE for the service.

    Raises:
        ConfigError: a setting breaks its rule.
    """

    kind: Literal["systemd", "cron"] = "systemd"
    """Scheduler: systemd (a service and its timer of the user) or cron (a line)."""

    every_minutes: Annotated[int, Ge(1), Le(1440), Flag(name="--every", metavar="MINUTES")] = 5
    """Minutes between two runs; for cron a divisor of 60."""

    out: Annotated[str | Path | None, Flag(metavar="DIR", key=False)] = None
    """Folder for the files; without it they are printed."""

    def check(self) -> None:
        if self.kind == "cron" and (self.every_minutes > 59 or 60 % self.every_minutes):
            raise ConfigError("must be a divisor of 60 below it with `kind` cron", field="every_minutes")

    def run(self) -> ScheduleReport:
        from assay.support.names import check_name
        from assay.support.places import check_writable, write_whole

        if self.out is not None:
            check_writable(Path(self.out) / "FILE", "out")
        place = Path.cwd()
        command = [sys.executable, "-m", "assay", "loop", "run", self.agent, *self._flags()]
        if any("\n" in word for word in (*command, str(place))):
            raise ConfigError("a path with a line break cannot be written to a schedule")
        name = f"assay-loop-{check_name(self.agent, 'agent', plain=True)}"
        if self.kind == "systemd":
            files = _systemd(name, self.agent, command, place, self.every_minutes)
        else:
            files = _cron(name, command, place, self.every_minutes)
        if self.out is not None:
            for file, text in files.items():
                write_whole(Path(self.out) / file, text)
        start = f"this store has no loop of {self.agent}: assay loop start {self.agent} --file FILE starts one"
        out = None if self.out is None else str(self.out)
        return ScheduleReport(files=files, out=out, note="" if self._has_loop() else start)

    def _has_loop(self) -> bool:
        from assay.deployment.loops import Loops
        from assay.traces.store import Store
        from assay.traces.store.location import store_address

        if not store_address(self.store).exists:
            return False
        with Store(self.store) as store:
            return Loops(store.engine).get(self.agent) is not None

    def _flags(self) -> list[str]:
        from assay.traces.store.location import store_address

        flags = [] if self.file is None else ["--file", str(Path(self.file).absolute())]
        if self.store is None:
            return flags
        if store_address(self.store).secret:
            raise ConfigError(
                "the store's URL has a password, which must not be in a schedule: set ASSAY_STORE in its environment"
            )
        text = str(self.store)
        return [*flags, "--store", text if "://" in text else str(Path(text).absolute())]


def _systemd(name: str, agent: str, command: list[str], folder: Path, minutes: int) -> dict[str, str]:
    """The timer is monotonic: a clock that is set does not fire it."""
    service = (
        f"[Unit]\nDescription=Loop of the agent {agent} (assay)\n\n"
        f"[Service]\nType=oneshot\nWorkingDirectory={_escaped(str(folder))}\n"
        "EnvironmentFile=-%h/.config/assay/loop.env\n"
        f"ExecStart={' '.join(map(_quoted, command))}\n"
    )
    timer = (
        f"[Unit]\nDescription=Run the loop of the agent {agent} (assay)\n\n"
        f"[Timer]\nOnBootSec=1min\nOnUnitInactiveSec={minutes}min\n\n[Install]\nWantedBy=timers.target\n"
    )
    return {f"{name}.service": service, f"{name}.timer": timer}


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def _quoted(word: str) -> str:
    """A word of a command line of systemd, in which % and $ have a meaning."""
    text = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{text}"'


def _cron(name: str, command: list[str], folder: Path, minutes: int) -> dict[str, str]:
    """In a crontab % ends the command unless it is escaped."""
    line = f"cd {shlex.quote(str(folder))} && {shlex.join(command)}".replace("%", "\\%")
    return {f"{name}.cron": f"{'*' if minutes == 1 else f'*/{minutes}'} * * * * {line}\n"}


run_loop = function_of(RunLoop, "run_loop")
start_loop = function_of(StartLoop, "start_loop")
stop_loop = function_of(StopLoop, "stop_loop")
loop_status = function_of(LoopStatus, "loop_status")
schedule_files = function_of(InstallLoop, "schedule_files")
