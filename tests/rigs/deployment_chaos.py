"""Kills gateways and schedulers in the middle of deployments' transitions, and checks what is in the store.

A gateway serves an agent of two versions and advances its deployments; a scheduler advances them too, starts one after
another and gives orders; clients call the gateway. All are forked processes. One of the first two receives SIGKILL at a
random moment, or before a chosen statement or commit of a transition, and is started again. With `Postgres` the
database server is a third victim: all of its processes are killed, and it is started again; gateway and scheduler live
on. `problems` is what a killed transition could leave: see `problems_in`.
"""

import importlib
import json
import multiprocessing
import os
import random
import signal
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from assay.errors import DeploymentError, StoreError
from rigs.deployment_checks import problems_in, snapshot
from rigs.postgres_kills import kill_postgres, postgres_runs

AGENT = "support"
_SOURCE = """
import random
import dspy

class Answer(dspy.Module):
    def forward(self, question):
        right = random.random() < {rate}
        return dspy.Prediction(answer=question if right else "no")
"""
_RATES = {1: 0.3, 2: 0.95}
_UNITS, _CLIENTS = 60, 3
_RUBRIC = "name: right\ncriteria:\n- {name: right, check: 'assay.rubrics.checks:exact'}\n"
_TRANSITIONS = ("UPDATE deployments", "INSERT INTO deployment", "INSERT INTO agent_aliases")
_LONGEST_S = 20.0  # for a placed kill to come


@dataclass
class Outcome:
    """What was killed, and what was found.

    Attributes:
        kills: by process and kind (`placed` in a transition, or `random`).
        problems: empty if nothing is wrong.
        deployments: by status.
        decisions: by action.
        rollouts: of deployments.
        failed_calls: calls of clients that a kill cut off.
        not_begun: gateways and schedulers that ended because the database was away when they began.
    """

    kills: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    deployments: dict[str, int] = field(default_factory=dict)
    decisions: dict[str, int] = field(default_factory=dict)
    rollouts: int = 0
    failed_calls: int = 0
    not_begun: int = 0
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Postgres:
    """A server that may be killed: its data folder, and what starts it again under the same address."""

    folder: Path
    restart: Callable[[], None]


def chaos(
    folder: Path, store: str, *, kills: int, seed: int = 0, on_kill: Callable[[str], None] | None = None,
    postgres: Postgres | None = None,
) -> Outcome:  # fmt: skip
    """Runs gateway, scheduler and clients in a folder, and kills `kills` times.

    Args:
        store: URL or file of an empty database.
        on_kill: called with a line for each kill.
        postgres: the server of the database, which is killed in half of the cases.
    """
    for module in ("traces.gateway.server", "commands.serve", "commands.deployed", "commands.advancing"):
        importlib.import_module(f"assay.{module}")  # once, and not in each forked process
    began, report = time.monotonic(), Outcome()
    _in_process(_prepare, folder, store).join()
    ended = folder / "ended"
    clients = _in_process(_calling, folder, seed)
    killing = _Killing(folder, store, seed, postgres)
    try:
        while not (folder / "url").exists() and time.monotonic() - began < 3 * _LONGEST_S:
            time.sleep(0.1)
        time.sleep(2.0)
        for number in range(kills):
            name, kind = killing.kill(number)
            problems = problems_in(store, folder / "log", rollouts=number % 10 == 9)
            report.problems += [f"after kill {number + 1} ({name}, {kind}): {problem}" for problem in problems]
            report.kills[f"{name}, {kind}"] = report.kills.get(f"{name}, {kind}", 0) + 1
            if on_kill is not None:
                on_kill(f"{number + 1}: {name}, {kind}: {'; '.join(problems) or 'nothing wrong'}")
            report.problems += [f"after kill {number + 1}: {text}" for text in killing.revive(number)]
        time.sleep(2.0)
    finally:
        ended.touch()
        clients.join(30)
        for process in (clients, *killing.running.values()):
            _kill(process)
    report.problems += [f"at the end: {problem}" for problem in problems_in(store, folder / "log", rollouts=True)]
    _count(report, store)
    failed = folder / "failed"
    report.failed_calls = len(failed.read_text().splitlines()) if failed.exists() else 0
    report.not_begun = killing.not_begun
    report.seconds = round(time.monotonic() - began, 1)
    return report


class _Killing:
    """Gateway and scheduler as processes, and what kills them or the database."""

    def __init__(self, folder: Path, store: str, seed: int, postgres: Postgres | None) -> None:
        self.folder, self.store, self.seed, self.postgres = folder, store, seed, postgres
        self.rng, self.work = random.Random(seed), {"gateway": _gateway, "scheduler": _scheduler}
        self.running = {name: self._started(name, 0) for name in self.work}
        self.not_begun = 0

    def kill(self, number: int) -> tuple[str, str]:
        """Kills one of them. Returns which, and whether it was placed in a transition or at a random moment."""
        name, kind = self.rng.choice(list(self.work)), self.rng.choice(("placed", "placed", "random"))
        if self.postgres is not None and self.rng.random() < 0.5:
            return "postgresql", self._kill_database(self.postgres, name, kind, number)
        if kind == "placed":
            self._place(name, number, None)
            self.running[name].join(_LONGEST_S)
            kind = "placed" if self.running[name].exitcode is not None else "random"
        else:
            time.sleep(self.rng.uniform(0.2, 1.5))
        _kill(self.running[name])
        return name, kind

    def _kill_database(self, postgres: Postgres, name: str, kind: str, number: int) -> str:
        """Kills the server, from within a process that makes a transition or from here; starts it again."""
        if kind == "placed":
            self._place(name, number, postgres.folder)
            end = time.monotonic() + 2 * _LONGEST_S
            while postgres_runs(postgres.folder) and time.monotonic() < end:
                time.sleep(0.02)
            if postgres_runs(postgres.folder):  # the statement did not come
                kind = "random"
                _kill(self.running[name])
        else:
            time.sleep(self.rng.uniform(0.2, 1.5))
        kill_postgres(postgres.folder)
        time.sleep(self.rng.uniform(0, 1.5))
        postgres.restart()
        return kind

    def _place(self, name: str, number: int, database: Path | None) -> None:
        """Starts a process that kills before a statement or commit of its first transitions."""
        _kill(self.running[name])
        self.running[name] = self._started(name, number, self.rng.randint(1, 14 if database is None else 6), database)

    def _started(self, name: str, number: int, kill_at: int | None = None, database: Path | None = None) -> Any:
        return _in_process(self.work[name], self.folder, self.store, kill_at, database, self.seed + number)

    def revive(self, number: int) -> list[str]:
        """Starts a killed process again. Returns which one ended by itself, after it had begun to work."""
        problems = []
        for name, process in self.running.items():
            if process.exitcode is None:
                continue
            if process.exitcode != -signal.SIGKILL:
                if (self.folder / f"up-{process.pid}").exists():
                    problems.append(f"the {name} ended by itself with {process.exitcode}")
                else:  # it could not open the store: the database was killed just then
                    self.not_begun += 1
            self.running[name] = self._started(name, number)
        return problems


def _in_process(work: Callable[..., None], *arguments: Any) -> Any:
    process = multiprocessing.get_context("fork").Process(target=_working, args=(work, arguments))
    process.start()
    return process


def _working(work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    folder = Path(arguments[0])
    os.chdir(folder)
    os.environ |= {"XDG_CONFIG_HOME": str(folder / "config"), "OPENAI_API_KEY": "none"}
    with open(folder / "output.txt", "a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    work(*arguments)
    os._exit(0)


def _kill(process: Any) -> None:
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    process.join()


def _prepare(folder: Path, store: str) -> None:
    """Two versions of the agent, the first of them its champion."""
    from assay.deployment import save_artifact
    from assay.deployment.registry import Registry
    from assay.programs import load_program
    from assay.traces import Store

    (folder / "r.yaml").write_text(_RUBRIC)
    with Store(store) as opened:
        registry = Registry(opened.engine)
        for number, rate in _RATES.items():
            source = folder / f"source-{number}" / "agent.py"
            source.parent.mkdir()
            source.write_text(_SOURCE.format(rate=rate))
            name = f"{source}:Answer"
            manifest = {"program": name, "model": "openai/none", "settings": {"adapter": None, "parameters": {}}}
            made = save_artifact(folder / f"v{number}", load_program(name), manifest, splits={}, report="")
            registry.register(AGENT, made)
        registry.set_alias(f"{AGENT}@1", "champion", why="the first")


def _plan() -> Any:
    from assay.deployment.plan import Metric, Plan, Step

    steps = (
        Step(weight=10, requests=6), Step(weight=30, requests=10), Step(weight=50, requests=10),
        Step(weight=50, decides=True, requests=20, max_requests=400), Step(weight=95, requests=10),
    )  # fmt: skip
    return Plan(steps=steps, metrics=(Metric(success_gain=0.1),))


def _placed(number: int | None, database: Path | None) -> None:
    """Kills this process, or the database, before the statement or commit of this number in its transitions."""
    if number is None:
        return
    seen, lock = [0], threading.Lock()

    def count() -> None:
        with lock:
            seen[0] += 1
            if seen[0] != number:
                return
            if database is None:
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                kill_postgres(database)

    def before(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith(_TRANSITIONS):
            connection.info["transition"] = True
            count()

    def commit(connection: Any) -> None:
        if connection.info.pop("transition", False):
            count()

    sa.event.listen(sa.Engine, "before_cursor_execute", before)
    sa.event.listen(sa.Engine, "commit", commit)


def _gateway(folder: Path, store: str, kill_at: int | None, database: Path | None, seed: int) -> None:
    from assay.commands.serve import Serving, serve

    random.seed(seed)
    _placed(kill_at, database)

    def publish(serving: Serving) -> None:
        (folder / f"up-{os.getpid()}").touch()
        (folder / ".url").write_text(serving.url)
        (folder / ".url").replace(folder / "url")

    serve(
        model="m", upstream="http://127.0.0.1:9", port=0, store=store, key="chaos-key", registered=(AGENT,),
        agent_rubric=str(folder / "r.yaml"), advance_s=0.1, on_start=publish,
    )  # fmt: skip


def _scheduler(folder: Path, store: str, kill_at: int | None, database: Path | None, seed: int) -> None:
    """Advances, starts and orders, until it is killed. What a call has returned is in the log."""
    from assay.deployment.deployments import Deployments
    from assay.traces import Store

    rng = random.Random(seed)
    _placed(kill_at, database)
    with Store(store) as opened, open(folder / "log", "a", buffering=1) as log:
        deployments = Deployments(opened.engine)
        (folder / f"up-{os.getpid()}").touch()
        while True:
            # another process was first; the database is busy or away
            with suppress(DeploymentError, StoreError, sa.exc.DBAPIError):
                done = _step(opened, deployments, rng)
                if done is not None:
                    log.write(json.dumps(done) + "\n")
            time.sleep(rng.uniform(0.02, 0.2))


def _step(opened: Any, deployments: Any, rng: random.Random) -> dict[str, Any] | None:
    from assay.commands.advancing import advanced
    from assay.deployment.decisions import PAUSED, PROMOTED, RUNNING

    newest = next(iter(deployments.all(AGENT, limit=1)), None)
    if newest is not None and newest.state.status == PROMOTED and rng.random() < 0.4:
        decision = deployments.order(newest.id, "rollback")
    elif newest is None or newest.state.status not in (RUNNING, PAUSED):
        champion = deployments.registry.alias(AGENT, "champion")
        deployments.start(f"{AGENT}@{3 - champion}", _plan())
        return None
    elif newest.state.status == PAUSED:
        decision = deployments.order(newest.id, rng.choice(("resume", "promote", "rollback")))
    elif rng.random() < 0.05:
        decision = deployments.order(newest.id, "pause")
    else:
        decision = advanced(opened, newest)
    if decision.action == "continue":
        return None
    return {"deployment": newest.id, "action": decision.action, "rule": decision.rule, "stage": decision.step}


def _calling(folder: Path, seed: int) -> None:
    """Clients that call the gateway, wherever it listens now, until the run has ended."""

    def client(number: int) -> None:
        rng = random.Random(seed * 1000 + number)
        while not (folder / "ended").exists():
            question = f"q{rng.randrange(10**9)}"
            body = {"inputs": {"question": question}, "expected": {"answer": question}}
            try:
                url = (folder / "url").read_text()
                data = json.dumps({**body, "unit": f"user-{rng.randrange(_UNITS)}"}).encode()
                headers = {"Content-Type": "application/json", "Authorization": "Bearer chaos-key"}
                request = urllib.request.Request(f"{url}/agents/{AGENT}", data, headers)
                with urllib.request.urlopen(request, timeout=10) as answer:
                    answer.read()
            except OSError as error:
                with open(folder / "failed", "a") as failed:
                    failed.write(f"{error!r}\n")
                time.sleep(0.1)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(_CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _count(report: Outcome, store: str) -> None:
    rows = snapshot(store, rollouts=True)
    report.deployments = dict(Counter(deployment["status"] for deployment in rows.deployments))
    report.decisions = dict(Counter(decision["action"] for decision in rows.decisions))
    report.rollouts = len(rows.rollouts)
