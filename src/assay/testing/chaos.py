"""Kills a job at random moments, resumes it until it is done, and holds what it left against a run that was not killed.

Each attempt is a forked process that gets SIGKILL; the model is `assay.testing.scripted_server`, and in a training the embedded one. Compared
are the report without its clocks, the rollouts with their transitions in the store, the rows of an export, and the hash of trained weights.
"""

import hashlib
import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.errors import ConfigError
from assay.testing.scripted_server import running

__all__ = ["JOBS", "TRAININGS", "Outcome", "Server", "chaos", "differences", "serving"]

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
_CLOCKS = ("latency_ms", "started_at", "ended_at", "created_at", "seconds", "metrics", "cost_usd", "repeated_calls", "kept_from_before", "artifact",
           "page", "pictures", "importance", "table", "interval_ms", "path", "files", "step_time")  # fmt: skip

_IDS = ("rollout", "rollout_id", "group", "group_id", "run", "run_id", "id", "trajectory", "trajectory_id", "episode")

Job = Callable[[str, bool], dict[str, Any]]


@dataclass
class Outcome:
    """What a job left. `requests`: how many the server saw; `kills`: of its processes; `weights`: the hash of those that were trained."""

    report: dict[str, Any]
    rollouts: dict[str, Any]
    rows: list[str]
    requests: int
    seconds: float
    kills: int = 0
    weights: str = ""
    spent: dict[str, int] = field(default_factory=dict)


def _common(address: str, resume: bool) -> dict[str, Any]:
    return {"rubric": "r.yaml", "data": "d.jsonl", "model": "openai/m", "api_base": address, "threads": _THREADS, "resume": resume, "seed": 7}


def _compile(address: str, resume: bool) -> dict[str, Any]:
    from assay.api import compile

    return compile("p.py:Sums", **_common(address, resume), max_search_calls=60).to_dict()


def _tune(address: str, resume: bool) -> dict[str, Any]:
    from assay.tuning import tune

    return tune("p.py:Sums", **_common(address, resume), trials=6, adapter="chat").to_dict()


def _collect(address: str, resume: bool) -> dict[str, Any]:
    from assay.exporting import collect

    return collect("p.py:Sums", **_common(address, resume), n=3, adapter="chat", parameters={"temperature": 1.0}).to_dict()


def _improve(address: str, resume: bool) -> dict[str, Any]:
    from assay.improving import improve

    options = {**_common(address, resume), "max_search_calls": 80}
    return improve("p.py:Sums", name="better", order=("prompts", "prompts"), **options).to_dict()


def _sft(address: str, resume: bool) -> dict[str, Any]:
    from assay.optimizers.weights import SFTConfig, train_sft

    config = SFTConfig(epochs=2, batch=2, rank=2, max_length=128, evaluations=3, held_out=0.2, seed=7)
    return train_sft("sft.jsonl", "trained", config, resume=resume).to_dict()


def _grpo(address: str, resume: bool) -> dict[str, Any]:
    from assay.training import train

    settings: dict[str, Any] = {
        "steps": 4,
        "tasks": 2,
        "num_generations": 3,
        "rank": 2,
        "max_length": 256,
        "max_completion": 12,
        "evaluate_every": 2,
        "held_out": 2,
    }
    found = train(
        "p.py:Sums", rubric="spread.yaml", data="d.jsonl", name="trained", resume=resume, test=False, threads=1, seed=7, adapter="lean", save_every=1,
        **settings,
    )  # fmt: skip
    return found.to_dict()


TRAININGS: dict[str, Job] = {"sft": _sft, "grpo": _grpo}
JOBS: dict[str, Job] = {"compile": _compile, "tune": _tune, "collect": _collect, "improve": _improve, **TRAININGS}


def _prepare(folder: Path, tasks: int) -> None:
    folder.mkdir(parents=True)
    (folder / "p.py").write_text(PROGRAM)
    (folder / "r.yaml").write_text(RUBRIC)
    rows = [{"inputs": {"question": f"What is {at} + 1?"}, "expected": {"answer": str(at + 1)}} for at in range(tasks)]
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    turns = [[{"role": "user", "content": f"What is {at} + 1?"}, {"role": "assistant", "content": f"It is {at + 1}."}] for at in range(tasks // 5)]
    (folder / "sft.jsonl").write_text("".join(json.dumps({"prompt": [asked], "completion": [said]}) + "\n" for asked, said in turns))
    (folder / "checks.py").write_text(SPREAD)
    (folder / "spread.yaml").write_text("name: spread\ncriteria:\n- {name: spread, check: 'checks.py:spread'}\n")


def _attempt(job: str, folder: Path, address: str, resume: bool) -> None:
    """In a process of its own: the job, and its report in a file."""
    os.chdir(folder)
    os.environ["OPENAI_API_KEY"] = "none"
    with open(folder / "output.txt", "a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    try:
        report = JOBS[job](address, resume)
    except ConfigError as error:
        if not resume:
            raise
        print(error, flush=True)  # killed before the run was in the store: there is nothing to resume
        os._exit(3)
    scratch = folder / ".report.json"
    scratch.write_text(json.dumps(report, default=str))
    scratch.replace(folder / "report.json")
    os._exit(0)


def _run(job: str, folder: Path, address: str, *, resume: bool, kill_after_s: float | None = None) -> int:
    """The exit code of one attempt; -9 where it was killed."""
    process = multiprocessing.get_context("fork").Process(target=_attempt, args=(job, folder, address, resume))
    process.start()
    process.join(kill_after_s)
    if process.is_alive():
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    return int(process.exitcode or 0)


def chaos(job: str, folder: Path, server: "Server", *, kills: int = 0, within_s: float = 1.0, seed: int = 0, tasks: int = 60) -> Outcome:
    """Runs a job in a new folder, killed up to `kills` times at random moments and resumed each time.

    Args:
        server: the same for runs that are compared: its address is part of what a job is.
        within_s: the seconds that an unkilled run takes; the kills are spread over them.
    """
    _prepare(folder, tasks)
    rng, done, resume, before, clock = random.Random(seed), 0, False, server.requests, time.monotonic()
    while True:
        kill = rng.uniform(0, 2 * within_s / (kills + 1)) if done < kills else None
        code = _run(job, folder, server.address, resume=resume, kill_after_s=kill)
        if code == -signal.SIGKILL:
            done, resume = done + 1, True
        elif code == 3:
            resume = False
        elif code == 0:
            break
        else:
            raise RuntimeError(f"{job} ended with {code}: {(folder / 'output.txt').read_text()[-3000:]}")
    return _outcome(folder, kills=done, requests=server.requests - before, seconds=time.monotonic() - clock)


@dataclass(frozen=True)
class Server:
    """A scripted server that runs. `requests`: how many it has seen."""

    address: str
    log: Path

    @property
    def requests(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0


@contextmanager
def serving(log: Path, *, delay_ms: float = 2) -> Iterator[Server]:
    with running(log, delay_ms=delay_ms) as address:
        yield Server(address, log)


def _outcome(folder: Path, *, kills: int, requests: int, seconds: float) -> Outcome:
    from assay.traces import Store

    report = json.loads((folder / "report.json").read_text().replace(str(folder), ""))
    with Store(folder / ".assay" / "assay.db") as store:
        found = [store.rollout(rollout.id) for rollout in store.rollouts()]
    rollouts = {
        r.id: {
            "phase": r.phase, "task": r.task_id, "sample": r.sample, "split": r.split, "status": r.status, "score": r.score, "group": r.group_id,
            "transitions": sorted(_digest([t.request, t.output, t.error]) for t in r.transitions),
        }
        for r in found
    }  # fmt: skip
    rows, parts = _exported(folder) if rollouts else [], isinstance(report.get("steps"), list)
    if parts:  # an improvement is made of runs with ids of its own: what they left is compared without ids
        contents = sorted((_digest({**row, "group": ""}), row) for row in rollouts.values())
        rollouts = {f"{digest}/{number}": {**row, "group": ""} for number, (digest, row) in enumerate(contents)}
        rows = sorted(json.dumps({k: v for k, v in json.loads(row).items() if k not in _IDS}, sort_keys=True) for row in rows)
    spent = {"calls": report.get("calls", 0), "repeated": report.get("repeated_calls", 0)}
    trained = folder / ".assay" / "adapters" / "trained" / "adapter_model.safetensors"
    weights = hashlib.sha256(trained.read_bytes()).hexdigest() if trained.is_file() else ""
    return Outcome(_plain(report), rollouts, rows, requests, seconds, kills, weights, spent)


def _exported(folder: Path) -> list[str]:
    """The rows of exports of transitions with advantages against group and batch, as text without clocks."""
    from assay.exporting import export
    from assay.traces.gates import Gates

    rows = []
    for advantage in ("group", "batch"):
        out = folder / f"exported-{advantage}"
        export("transitions", out, store=folder / ".assay" / "assay.db", gates=Gates(min_clean=0), privacy="off", advantage=advantage)
        rows += [_plain(json.loads(line)) for line in (out / "data.jsonl").read_text().splitlines()]
    # of two threads that ask the same, either may be the one that pays: the report's counts are compared, not whose call it was
    return sorted(json.dumps({name: value for name, value in row.items() if name != "cached"}, sort_keys=True) for row in rows)


def _plain(value: Any) -> Any:
    """Without what a clock or a kill may change."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if key not in _CLOCKS}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def differences(whole: Outcome, killed: Outcome) -> list[str]:
    """What a killed run left other than the whole one; empty where they are alike."""
    found = [f"report.{key}: {value!r}, not {whole.report.get(key)!r}" for key, value in killed.report.items() if value != whole.report.get(key)]
    missing, more = whole.rollouts.keys() - killed.rollouts.keys(), killed.rollouts.keys() - whole.rollouts.keys()
    if missing or more:
        some = [killed.rollouts[name] for name in sorted(more)[:2]] + [whole.rollouts[name] for name in sorted(missing)[:2]]
        found.append(f"rollouts: {len(missing)} are missing, {len(more)} are too many: {some}")
    changed = [name for name in whole.rollouts.keys() & killed.rollouts.keys() if whole.rollouts[name] != killed.rollouts[name]]
    if changed:
        found.append(f"{len(changed)} rollouts differ: {killed.rollouts[changed[0]]}, not {whole.rollouts[changed[0]]}")
    if running_still := sum(r["status"] == "running" for r in killed.rollouts.values()):
        found.append(f"{running_still} rollouts are left running")
    if whole.weights != killed.weights:
        found.append(f"the trained weights are {killed.weights[:12]}, not {whole.weights[:12]}")
    if whole.rows != killed.rows:
        found.append(f"the export has {len(killed.rows)} rows, {len(set(killed.rows) ^ set(whole.rows))} of them different, not {len(whole.rows)}")
    if (again := killed.requests - whole.requests) > _THREADS * killed.kills:
        found.append(f"{again} requests more than unkilled, and {killed.kills} kills can lose {_THREADS * killed.kills} that were on their way")
    if killed.spent["calls"] and killed.requests > sum(killed.spent.values()):
        found.append(f"the server saw {killed.requests} requests, {sum(killed.spent.values())} are counted")
    return found
