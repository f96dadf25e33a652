"""Public API for `assay loop start` and `stop`, and the file of a loop as all machines read it."""

import hashlib
from pathlib import Path
from typing import Any

from assay.datasets.sources import check_data_exists
from assay.deployment.loops import Loops
from assay.deployment.registry import Registry
from assay.errors import DataError, DeploymentError
from assay.rubrics.loading import check_rubric_exists
from assay.runs.settings.loop import LoopSettings, load_loop
from assay.support.keywords import takes
from assay.support.places import no_such_file
from assay.traces import Store
from assay.traces.store.location import store_file


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
    from assay.api.deploy.simulate import plan_of

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
