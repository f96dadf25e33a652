"""Public API for `assay loop start` and `stop`, and the file of a loop as all machines read it."""

import hashlib
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from assay.datasets.sources import check_data_exists
from assay.deployment.deployments import Deployments
from assay.deployment.loops import Loops, LoopStep, due_in, loop_figures, position, spent
from assay.deployment.registry import Registry
from assay.deployment.watching import judge_watches
from assay.errors import AssayError, ConfigError, DataError, DeploymentError
from assay.rubrics.loading import check_rubric_exists
from assay.runs.settings import LoopInstallSettings
from assay.runs.settings.loop import LoopLimits, LoopSettings, load_loop
from assay.support.keywords import takes
from assay.support.names import check_name
from assay.support.places import no_such_file
from assay.support.reprs import ReportRepr
from assay.traces import Store
from assay.traces.store.connection import password_of
from assay.traces.store.leases import seconds
from assay.traces.store.location import store_file, store_url


@takes()
def start_loop(agent: str, file: str | Path, *, store: str | Path | None = None) -> dict[str, Any]:
    """Lets `assay loop run` work for an agent, by the settings in `file`. Starts no process.

    Raises:
        ConfigError: the file breaks a rule.
        DataError, RubricError: a file that it names, or that its plan names, is not there.
        DeploymentError: the agent has no champion.
    """
    settings = load_loop(file)
    _check_files(settings)
    path = Path(file).absolute()
    with Store(store) as opened:
        champion = Registry(opened.engine).version(agent)
        Loops(opened.engine).enable(agent, str(path), _sha256(path))
    return {"agent": agent, "enabled": True, "file": str(path), "champion": champion.name}


def _check_files(settings: LoopSettings) -> None:
    """Refuses a loop that would fail later, for want of a file that it names."""
    from assay.api.deploy.start import plan_of

    deploy, options = settings.deploy, settings.options or {}
    for rubric in (settings.rubric, deploy.suite_rubric, deploy.replay_rubric, options.get("monitor")):
        if isinstance(rubric, str):
            check_rubric_exists(rubric)
    for data in (deploy.suite_data, settings.pool.against):
        if isinstance(data, str):
            check_data_exists(data)
    source, python, _ = settings.method.partition(".py:")
    plan = plan_of(deploy.plan, deploy.goal)
    named = [place for watch in plan.watch for place in (watch.judge, watch.anchors) if place is not None]
    for path in [*([f"{source}.py"] if python else []), *named]:
        if not Path(path).exists():
            raise DataError(no_such_file(path))


def has_loop(agent: str, *, store: str | Path | None = None) -> bool:
    """Whether the loop of an agent was started in this store; False where there is no store."""
    file = store_file(store)
    if file is not None and not file.is_file():
        return False
    with Store(store) as opened:
        return Loops(opened.engine).get(agent) is not None


@takes()
def stop_loop(agent: str, *, store: str | Path | None = None) -> dict[str, Any]:
    """Ends the loop of an agent: a process that runs it stops before its next step. An active deployment continues.

    Raises:
        DeploymentError: the agent has no loop.
    """
    with Store(store) as opened:
        Loops(opened.engine).disable(agent)
    return {"agent": agent, "enabled": False}


def loop_file(loops: Loops, agent: str, file: str | Path | None = None) -> LoopSettings:
    """The settings of a started loop.

    The store has the path and the hash of the file and not its content: commands and Python files that it names are
    run, and whoever may write to the store must not choose them.

    Raises:
        DeploymentError: the agent has no loop, or the file is missing or another one than at the start.
    """
    loop = loops.known(agent)
    path = Path(loop.file if file is None else file)
    if not path.is_file():
        raise DeploymentError(
            f"there is no {path} on this machine: copy the file of the loop here, and name it", flag="--file"
        )
    if _sha256(path) != loop.sha256:
        raise DeploymentError(
            f"{path} is not the file that the loop of {agent!r} was started with: start it again with the changed "
            f"file (assay loop start {agent} --file {path})"
        )
    return load_loop(path)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# -- Public API for `assay loop status`: where a loop stands, and the seven figures that it is watched by.


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


# -- Public API for `assay loop install`: files for cron and systemd that call `assay loop run`. Installs nothing.


@takes(LoopInstallSettings)
def schedule_files(
    agent: str,
    *,
    kind: str = "systemd",
    every_minutes: int = 5,
    file: str | Path | None = None,
    store: str | Path | None = None,
    folder: str | Path | None = None,
) -> dict[str, str]:
    """Names and contents of the files.

    Args:
        kind: systemd (a service and a timer of the user) or cron (one line).
        every_minutes: between two runs; for cron a divisor of 60.
        file: the loop's file on this machine, where it is elsewhere than on the one that started the loop.
        store: is written as an absolute path or URL. One with a password is refused: set ASSAY_STORE for the service.
        folder: working directory of the run; by default the present one.
    Raises:
        ConfigError: an argument breaks its rule.
    """
    LoopInstallSettings(kind=kind, every_minutes=every_minutes)  # checks them together
    place = Path(folder or ".").absolute()
    command = [sys.executable, "-m", "assay", "loop", "run", agent, *_flags(file, store)]
    if any("\n" in word for word in (*command, str(place))):
        raise ConfigError("a path with a line break cannot be written to a schedule")
    name = f"assay-loop-{check_name(agent, 'agent', plain=True)}"
    return _systemd(name, agent, command, place, every_minutes) if kind == "systemd" else _cron(
        name, command, place, every_minutes
    )  # fmt: skip


def _flags(file: str | Path | None, store: str | Path | None) -> list[str]:
    flags = [] if file is None else ["--file", str(Path(file).absolute())]
    if store is None:
        return flags
    if password_of(store_url(store)):
        raise ConfigError(
            "the store's URL has a password, which must not be in a schedule: set ASSAY_STORE in its environment"
        )
    text = str(store)
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
