"""Public API for `assay loop install`: files for cron and systemd that call `assay loop run`. Installs nothing."""

import shlex
import sys
from pathlib import Path

from assay.errors import ConfigError
from assay.runs.settings import LoopInstallSettings
from assay.support.keywords import takes
from assay.support.names import check_name
from assay.traces.store.connection import password_of
from assay.traces.store.location import store_url


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
