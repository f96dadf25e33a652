"""Kills a job at random times, resumes it until it ends, and compares its results with those of an uninterrupted run.

Each attempt is a forked process that receives SIGKILL. The model is `assay.testing.scripted_server`; trainings use the
embedded model. Compared are the report without its timings, the rollouts and transitions in the store, the rows of an
export, and the hash of trained weights.

`stopped` ends a job by a cap, a signal or a full disk, and compares what the server answered with what was stored.
"""

import hashlib
import json
import multiprocessing
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import Any

from assay.errors import ConfigError
from assay.support.values import json_text
from assay.testing.scripted_server import running
from rigs import module_command

PROGRAM = """
import dspy

class Sums(dspy.Module):
    def __init__(self):
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    def forward(self, question):
        return self.answer(question=question)
"""
RUBRIC = "name: sums\ncriteria:\n- {name: right, check: 'assay.rubrics.checks:numeric'}\n"
SPREAD = """
import hashlib

def spread(task, prediction, rollout):
    \"\"\"Any answer has a grade, and two that differ hardly ever the same one.\"\"\"
    return hashlib.sha256(str(prediction.get("answer")).encode()).digest()[0] / 255
"""
_THREADS = 4
_NOTHING_TO_RESUME = 3  # exit code of an attempt
# keys of reports and rows that differ between runs: timings, paths, and counts that a resumed run splits differently
_VOLATILE = (
    "latency_ms", "started_at", "ended_at", "created_at", "seconds", "metrics", "cost_usd", "repeated_calls",
    "kept_from_before", "artifact", "page", "importance", "table", "interval_ms", "path", "files",
    "step_time",
)  # fmt: skip
_IDS = ("rollout", "rollout_id", "group", "group_id", "run", "run_id", "id", "trajectory", "trajectory_id", "episode")

Job = Callable[..., dict[str, Any]]  # of the server's address, whether to resume, and further settings


@dataclass
class Outcome:
    """Results of a job."""

    report: dict[str, Any]
    rollouts: dict[str, Any]
    rows: list[str]  # of the exports
    requests: int  # that the server received
    seconds: float
    kills: int = 0
    weights: str = ""  # hash of the trained weights
    spent: dict[str, int] = field(default_factory=dict)  # calls that the report counts: `calls`, `repeated`


def _common(address: str, resume: bool, **more: Any) -> dict[str, Any]:
    return {
        "rubric": "r.yaml",
        "data": "d.jsonl",
        "model": "openai/m",
        "api_base": address,
        "threads": _THREADS,
        "resume": resume,
        "seed": 7,
        **more,
    }


def _compile(address: str, resume: bool, **more: Any) -> dict[str, Any]:
    from assay.commands.compile import compile

    return compile("p.py:Sums", **_common(address, resume, **more), max_search_calls=60).to_dict()


def _tune(address: str, resume: bool, **more: Any) -> dict[str, Any]:
    from assay.commands.tune import tune

    return tune("p.py:Sums", **_common(address, resume, **more), trials=6, prompt_format="chat").to_dict()


def _collect(address: str, resume: bool, **more: Any) -> dict[str, Any]:
    from assay.commands.collect import collect

    return collect(
        "p.py:Sums", **_common(address, resume, **more), n=3, prompt_format="chat", parameters={"temperature": 1.0}
    ).to_dict()


def _improve(address: str, resume: bool, **more: Any) -> dict[str, Any]:
    from assay.commands.improve import improve

    options = {**_common(address, resume, **more), "max_search_calls": 80}
    return improve("p.py:Sums", name="better", order=("prompts", "prompts"), **options).to_dict()


def _sft(address: str, resume: bool, **more: Any) -> dict[str, Any]:
    from assay.optimizers.finetuning import SFTSettings, train_sft

    config = SFTSettings(epochs=2, batch=2, lora_r=2, max_length=128, evaluations=3, eval_fraction=0.2, seed=7)
    return train_sft("sft.jsonl", "trained", config, resume=resume).to_dict()


def _grpo(address: str, resume: bool, **more: Any) -> dict[str, Any]:
    from assay.commands.train import train

    settings: dict[str, Any] = {
        "steps": 4,
        "prompts_per_step": 2,
        "num_generations": 3,
        "lora_r": 2,
        "max_length": 256,
        "max_completion": 12,
        "evaluate_every": 2,
        "eval_tasks": 2,
    }
    report = train(
        "p.py:Sums",
        rubric="spread.yaml",
        data="d.jsonl",
        name="trained",
        resume=resume,
        test=False,
        threads=1,
        seed=7,
        prompt_format="lean",
        save_every=1,
        **settings,
    )
    return report.to_dict()


TRAININGS: dict[str, Job] = {"sft": _sft, "grpo": _grpo}
JOBS: dict[str, Job] = {"compile": _compile, "tune": _tune, "collect": _collect, "improve": _improve, **TRAININGS}


def _prepare(folder: Path, tasks: int) -> None:
    folder.mkdir(parents=True)
    (folder / "p.py").write_text(PROGRAM)
    (folder / "r.yaml").write_text(RUBRIC)
    rows = [{"inputs": {"question": f"What is {n} + 1?"}, "expected": {"answer": str(n + 1)}} for n in range(tasks)]
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    turns = [
        [{"role": "user", "content": f"What is {n} + 1?"}, {"role": "assistant", "content": f"It is {n + 1}."}]
        for n in range(tasks // 5)
    ]
    (folder / "sft.jsonl").write_text(
        "".join(json.dumps({"prompt": [user], "completion": [assistant]}) + "\n" for user, assistant in turns)
    )
    (folder / "checks.py").write_text(SPREAD)
    (folder / "spread.yaml").write_text("name: spread\ncriteria:\n- {name: spread, check: 'checks.py:spread'}\n")


def _attempt(job: str, folder: Path, address: str, resume: bool, **more: Any) -> None:
    """Runs the job and writes its report to a file. Called in a process of its own."""
    os.chdir(folder)
    os.environ["OPENAI_API_KEY"] = "none"
    with open(folder / "output.txt", "a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    try:
        report = JOBS[job](address, resume, **more)
    except ConfigError as error:
        if not resume:
            raise
        print(error, flush=True)  # killed before the run was stored, so there is nothing to resume
        os._exit(_NOTHING_TO_RESUME)
    scratch = folder / ".report.json"
    scratch.write_text(json_text(report), encoding="utf-8")
    scratch.replace(folder / "report.json")
    os._exit(0)


def _run(job: str, folder: Path, address: str, *, resume: bool, kill_after_s: float | None = None) -> int:
    """Exit code of one attempt; -9 if it was killed."""
    process = multiprocessing.get_context("fork").Process(target=_attempt, args=(job, folder, address, resume))
    process.start()
    process.join(kill_after_s)
    if process.is_alive():
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    return int(process.exitcode or 0)


def chaos(
    job: str, folder: Path, server: "Server", *, kills: int = 0, within_s: float = 1.0, seed: int = 0, tasks: int = 60
) -> Outcome:
    """Runs a job in a new folder, kills it up to `kills` times at random times, and resumes it each time.

    Args:
        job: a name in `JOBS`.
        server: the same for all runs that are compared, because its address is part of the job's settings.
        within_s: duration of an uninterrupted run; the kills are spread over it.
        tasks: number of tasks of the job.
    """
    _prepare(folder, tasks)
    rng, killed, resume, requests_before, start = random.Random(seed), 0, False, server.requests, time.monotonic()
    while True:
        kill_after_s = rng.uniform(0, 2 * within_s / (kills + 1)) if killed < kills else None
        code = _run(job, folder, server.address, resume=resume, kill_after_s=kill_after_s)
        if code == -signal.SIGKILL:
            killed, resume = killed + 1, True
        elif code == _NOTHING_TO_RESUME:
            resume = False
        elif code == 0:
            break
        else:
            raise RuntimeError(f"{job} exited with {code}: {(folder / 'output.txt').read_text()[-3000:]}")
    requests = server.requests - requests_before
    return _outcome(folder, kills=killed, requests=requests, seconds=time.monotonic() - start)


@dataclass(frozen=True)
class Stop:
    """A way to stop a job.

    Attributes:
        signal: sent once `after` requests were answered; None: the settings or the disk stop the job.
        disk_kb: size of the disk for the store; None: that of the folder. Needs `unshare` of util-linux.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    signal: Signals | None = None
    after: int = 20
    disk_kb: int | None = None


STOPS = {
    "calls": Stop(settings={"max_calls": 60}),
    "tokens": Stop(settings={"max_tokens": 12_000}),
    "SIGINT": Stop(signal=signal.SIGINT),
    "SIGTERM": Stop(signal=signal.SIGTERM),
    "full disk": Stop(disk_kb=1700),
}


@dataclass(frozen=True)
class Accounts:
    """Calls of a job that was stopped: `answered` by the server, `stored`, and counted as `unrecorded`."""

    answered: int
    stored: int
    unrecorded: int
    settled: int  # in the ledgers of its runs
    running: int  # rollouts, and runs

    def problems(self) -> Iterator[str]:
        if self.answered != self.stored + self.unrecorded:
            yield f"{self.answered} calls were answered: {self.stored} are stored, {self.unrecorded} unrecorded"
        if self.settled != self.answered:
            yield f"{self.answered} calls were answered, {self.settled} are paid for in the ledger"
        if self.running:
            yield f"{self.running} rollouts or runs are still running"


def stopped(job: str, folder: Path, server: "Server", stop: Stop, *, tasks: int = 60) -> tuple[Accounts, list[str]]:
    """Runs a job in a new folder until it is stopped; returns its accounts, and what is wrong with them."""
    _prepare(folder, tasks)
    before, settings = server.requests, {"threads": 16, **stop.settings}
    if stop.disk_kb is not None:
        _on_small_disk(job, folder, server.address, stop.disk_kb, settings)
    else:
        process = multiprocessing.get_context("fork").Process(
            target=_attempt, args=(job, folder, server.address, False), kwargs=settings
        )
        process.start()
        if stop.signal is not None:
            while process.is_alive() and server.requests - before < stop.after:
                time.sleep(0.01)
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, stop.signal)
        process.join()
    accounts = _accounts(folder, server.requests - before)
    return accounts, list(accounts.problems())


def _on_small_disk(job: str, folder: Path, address: str, disk_kb: int, settings: Mapping[str, Any]) -> None:
    """Runs an attempt with the store on a disk of its own, which only its process sees; then copies the store."""
    home, left = folder / ".assay", folder / "left"
    home.mkdir()
    script = f'mount -t tmpfs -o size={disk_kb}k tmpfs {home} && "$@"; cp -r {home} {left}'
    attempt = [*module_command("rigs.chaos"), job, str(folder), address, json.dumps(settings)]
    subprocess.run(["unshare", "-r", "-m", "sh", "-c", script, "sh", *attempt], check=True)
    home.rmdir()
    left.rename(home)


def _accounts(folder: Path, answered: int) -> Accounts:
    """Read once the rows that wait in a file are written."""
    from assay.traces import Store

    Store(folder / ".assay" / "assay.db").close()
    with closing(sqlite3.connect(folder / ".assay" / "assay.db")) as db:

        def count(query: str) -> int:
            return int(db.execute(query).fetchone()[0] or 0)

        stored = count("SELECT count(*) FROM transitions WHERE NOT cached AND error IS NULL")
        unrecorded = count("SELECT sum(unseen) FROM runs")
        running = sum(count(f"SELECT count(*) FROM {table} WHERE status = 'running'") for table in ("rollouts", "runs"))
    settled = 0
    for ledger in folder.glob(".assay/runs/*/calls.db"):
        with closing(sqlite3.connect(ledger)) as db:
            if db.execute(
                "SELECT 1 FROM sqlite_master WHERE name = 'calls'"
            ).fetchone():  # stopped before its first call
                settled += int(db.execute("SELECT sum(settled) FROM calls WHERE NOT failed").fetchone()[0] or 0)
    return Accounts(answered, stored, unrecorded, settled, running)


@dataclass(frozen=True)
class Server:
    """A running scripted server."""

    address: str
    log: Path

    @property
    def requests(self) -> int:
        """Number of requests so far: the server writes one byte for each."""
        return self.log.stat().st_size if self.log.exists() else 0


@contextmanager
def serving(log: Path, *, delay_ms: float = 2) -> Iterator[Server]:
    """Runs a scripted server; `log` is the file in which it counts requests."""
    with running(log, delay_ms=delay_ms) as address:
        yield Server(address, log)


def _outcome(folder: Path, *, kills: int, requests: int, seconds: float) -> Outcome:
    from assay.traces import Store

    report = json.loads((folder / "report.json").read_text().replace(str(folder), ""))
    with Store(folder / ".assay" / "assay.db") as store:
        rollouts = {rollout.id: _contents(store.rollout(rollout.id)) for rollout in store.rollouts()}
    rows = _exported(folder) if rollouts else []
    # The runs of `improve` have random ids: compared without ids, and without the version of the program, because of
    # equal calls of several versions the export keeps that of the lowest id.
    if isinstance(report.get("steps"), list):
        contents = sorted((_digest({**row, "group": ""}), row) for row in rollouts.values())
        rollouts = {f"{digest}/{number}": {**row, "group": ""} for number, (digest, row) in enumerate(contents)}
        rows = sorted(
            json.dumps(
                {k: v for k, v in json.loads(row).items() if k not in (*_IDS, "program_version")}, sort_keys=True
            )
            for row in rows
        )
    spent = {"calls": report.get("calls", 0), "repeated": report.get("repeated_calls", 0)}
    trained = folder / ".assay" / "adapters" / "trained" / "adapter_model.safetensors"
    weights = hashlib.sha256(trained.read_bytes()).hexdigest() if trained.is_file() else ""
    return Outcome(_plain(report), rollouts, rows, requests, seconds, kills, weights, spent)


def _contents(rollout: Any) -> dict[str, Any]:
    """The parts of a rollout that are compared."""
    return {
        "phase": rollout.phase,
        "task": rollout.task_id,
        "sample": rollout.sample,
        "split": rollout.split,
        "status": rollout.status,
        "score": rollout.score,
        "group": rollout.group_id,
        "transitions": sorted(_digest([t.request, t.output, t.error]) for t in rollout.transitions),
    }


def _exported(folder: Path) -> list[str]:
    """Rows of the transitions exports with `group` and `batch` advantages, as JSON without timings."""
    from assay.commands.export import export
    from assay.traces.export.settings import Gates

    rows = []
    for advantage in ("group", "batch"):
        out = folder / f"exported-{advantage}"
        export(
            "transitions",
            out,
            store=folder / ".assay" / "assay.db",
            gates=Gates(min_clean=0),
            privacy="off",
            advantage=advantage,
        )
        rows += [_plain(json.loads(line)) for line in (out / "data.jsonl").read_text().splitlines()]
    # of two threads that send the same request either one may get the cached response, so `cached` is not compared
    return sorted(
        json.dumps({name: value for name, value in row.items() if name != "cached"}, sort_keys=True) for row in rows
    )


def _plain(value: Any) -> Any:
    """The value without the keys in `_VOLATILE`."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if key not in _VOLATILE}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _digest(value: Any) -> str:
    return hashlib.sha256(json_text(value, sort_keys=True).encode()).hexdigest()[:16]


def differences(reference: Outcome, killed: Outcome) -> list[str]:
    """How a killed run's results differ from those of an uninterrupted one; empty if they are equal."""
    problems = [
        f"report.{key}: {value!r}, expected {reference.report.get(key)!r}"
        for key, value in killed.report.items()
        if value != reference.report.get(key) and key not in ("test_openings", "unrecorded")
    ]
    problems += _opening_differences(
        reference.report.get("test_openings"), killed.report.get("test_openings"), killed.kills
    )
    problems += _rollout_differences(reference.rollouts, killed.rollouts)
    if reference.weights != killed.weights:
        problems.append(f"the trained weights are {killed.weights[:12]}, expected {reference.weights[:12]}")
    if reference.rows != killed.rows:
        differing = len(set(killed.rows) ^ set(reference.rows))
        problems.append(f"the export has {len(killed.rows)} rows, expected {len(reference.rows)}; {differing} differ")
    # a kill loses at most the requests that are in flight, one per thread
    repeated, allowed = killed.requests - reference.requests, _THREADS * killed.kills
    if repeated > allowed:
        problems.append(f"{repeated} repeated requests, expected at most {allowed} for {killed.kills} kills")
    if killed.spent["calls"] and killed.requests > sum(killed.spent.values()):
        problems.append(f"the server received {killed.requests} requests, {sum(killed.spent.values())} are counted")
    # calls of a killed process that have no row: at least what was sent again
    unrecorded, again = killed.report.get("unrecorded", 0), killed.requests - killed.spent["calls"]
    if killed.spent["calls"] and "unrecorded" in killed.report and not again <= unrecorded <= allowed:
        problems.append(f"report.unrecorded: {unrecorded}, expected {again} to {allowed}")
    return problems


def _opening_differences(reference: Any, killed: Any, kills: int) -> Iterator[str]:
    """A job that is killed after it opened the test split opens it again when it is resumed."""
    names = (reference or {}).keys() | (killed or {}).keys()
    for name in sorted(names):
        once, often = (reference or {}).get(name, 0), (killed or {}).get(name, 0)
        if not once <= often <= once + kills:
            yield f"report.test_openings.{name}: {often}, expected {once} to {once + kills}"


def _rollout_differences(reference: dict[str, Any], killed: dict[str, Any]) -> Iterator[str]:
    missing, extra = sorted(reference.keys() - killed.keys()), sorted(killed.keys() - reference.keys())
    if missing or extra:
        examples = [*(killed[name] for name in extra[:2]), *(reference[name] for name in missing[:2])]
        yield f"rollouts: {len(missing)} missing, {len(extra)} unexpected: {examples}"
    changed = [name for name in reference.keys() & killed.keys() if reference[name] != killed[name]]
    if changed:
        yield f"{len(changed)} rollouts differ: {killed[changed[0]]}, expected {reference[changed[0]]}"
    if running_still := sum(rollout["status"] == "running" for rollout in killed.values()):
        yield f"{running_still} rollouts are still running"


if __name__ == "__main__":  # an attempt on a disk of its own
    _attempt(sys.argv[1], Path(sys.argv[2]), sys.argv[3], False, **json.loads(sys.argv[4]))
