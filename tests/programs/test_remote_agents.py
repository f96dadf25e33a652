"""Agents that runners on other machines execute: leases, heartbeats, results that come late, wrong keys."""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from policy_stage import scripted_policy, trained, training

from assay.errors import AssayError, ConfigError, FailureKind
from assay.evaluation.executors import in_background
from assay.programs.foreign_agent import ForeignAgent
from assay.programs.runners import CallableRunner, RemoteRunner, TaskServer, work
from assay.traces import Store
from assay.traces.gateway.agents import AgentGateway
from assay.traces.gateway.routes import Leases

KEY = "key-of-the-runners"
AGENT = """
import json, os, urllib.request

def solve(task):
    assert task["base_url"] == os.environ["OPENAI_BASE_URL"]
    assert "ASSAY_AGENT_KEY" not in os.environ
    body = {"model": task["model"], "messages": [{"role": "user", "content": task["inputs"]["question"]}]}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {task['api_key']}"}
    request = urllib.request.Request(f"{task['base_url']}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
"""


def solve(task: dict[str, Any]) -> str:
    scope: dict[str, Any] = {}
    exec(AGENT.replace("    assert", "    #"), scope)
    answer: str = scope["solve"](task)
    return answer


class Trainer:
    """What of a training serves runners: gateway, leases, and runs of the agent on one task."""

    def __init__(self, folder: Path, leases: Leases) -> None:
        self.store, self.leases = Store(folder / "a.db"), leases
        self.session = training(scripted_policy(), self.store)
        self.gateway = AgentGateway(self.store, self.session.lm.model, key=KEY)
        self.gateway.add_routes(leases.add_to)
        self.gateway.add_routes(lambda app: app.middlewares.append(self._proxy))
        self.faults: list[str] = []  # ends of paths, whose next request gets a 503
        self.handled_first = self.lasting = False
        self.program = ForeignAgent("remote", RemoteRunner(leases), trains=True)
        self.program.gateway = self.gateway
        self.server = TaskServer(self.gateway.address, KEY)

    @web.middleware
    async def _proxy(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """As of a proxy before the trainer."""
        if (end := request.path.rpartition("/")[2]) not in self.faults:
            return await handler(request)
        if not self.lasting:
            self.faults.remove(end)
        if self.handled_first:
            await handler(request)
        return web.Response(status=503, text="the upstream is not there")

    def run(self, *, timeout_s: float = 60.0) -> Any:
        return trained(self.program, self.session, timeout_s)

    def lease(self) -> dict[str, Any]:
        leased = self.server.post("/assay/tasks/lease", {"runner": "by hand"})
        assert leased is not None
        return leased


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path, Leases(heartbeat_s=0.2, patience_s=120.0))
    yield trainer
    trainer.gateway.close()
    trainer.store.close()


def working(trainer: Trainer, runner: Any, lines: list[str] | None = None) -> Callable[[], Any]:
    """Starts a runner of one task, whose result the function returns; what it says is appended to `lines`."""
    say = (lambda _: None) if lines is None else lines.append
    server = TaskServer(trainer.server.url, KEY)
    return in_background(lambda: work(runner, server, patience_s=120, say=say, tasks=1))


@pytest.mark.slow
def test_another_process_runs_the_agent_and_its_calls_are_recorded_here(trainer: Trainer, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    flags = ["--server", trainer.server.url, "--key", KEY, "--tasks", "1", "--json"]
    trainer.leases.heartbeat_s, trainer.leases.patience_s = 20.0, 120.0
    command = [sys.executable, "-m", "assay", "agent", "run", "agent.py:solve", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        run = trainer.run()
        assert process.communicate(timeout=60)[0].strip() == '{"tasks": {"done": 1}}'
    (call,) = run.rollout.transitions
    assert run.prediction.answer == call.output
    assert call.token_ids
    assert run.rollout.score == 1.0


def test_a_runner_without_heartbeat_is_replaced_and_its_late_result_is_refused(trainer: Trainer) -> None:
    run = in_background(trainer.run)
    lost = trainer.lease()  # and never heard of again
    patient_until = time.monotonic() + 120
    while not trainer.program.counts["lost"] and time.monotonic() < patient_until:
        time.sleep(0.05)
    trainer.leases.heartbeat_s = 20.0  # the next one may load the model meanwhile
    done = working(trainer, CallableRunner(solve))
    assert run().prediction.answer
    assert done() == {"done": 1}
    with pytest.raises(Exception, match="a late one is not taken"):
        trainer.server.post(f"/assay/tasks/{lost['lease']}/result", {"answer": {"answer": "late"}})
    assert trainer.program.notes() == [
        "1 run lost the process that ran the agent",
        "1 result of runners came after the task had ended, which is refused",
    ]
    trainer.store.flush()
    rows = sorted(trainer.store.rollouts(limit=None), key=lambda row: row.started_at)
    assert [(row.status, row.failure, row.score) for row in rows] == [
        ("error", FailureKind.MODEL, None),
        ("done", None, 1.0),
    ]


def slow_agent(trainer: Trainer) -> tuple[CallableRunner, list[str]]:
    """An agent that takes some heartbeats and calls no model, and the ids of its rollouts."""
    runs = list[str]()
    trainer.program.reached.set()

    def answer(task: dict[str, Any]) -> str:
        runs.append(task["rollout"])
        time.sleep(1.5)
        return "5"

    return CallableRunner(answer), runs


@pytest.mark.slow
@pytest.mark.parametrize("handled", [False, True], ids=["refused", "reply lost"])
@pytest.mark.parametrize("faults", [["alive"], ["result"], ["alive", "result", "result"]], ids="-".join)
def test_a_request_that_fails_once_is_sent_again_and_the_agent_runs_once(
    trainer: Trainer, faults: list[str], handled: bool
) -> None:
    trainer.leases.heartbeat_s, trainer.faults, trainer.handled_first = 1.0, list(faults), handled
    (runner, runs), lines = slow_agent(trainer), list[str]()
    done = working(trainer, runner, lines)
    rollout = trainer.run().rollout
    assert done() == {"done": 1}
    assert (rollout.status, rollout.score, runs) == ("done", 1.0, [rollout.id])
    assert trainer.faults == []
    assert trainer.program.notes() == []
    told = f"a result cannot be sent: ConnectionError: {trainer.server.url} answers with 503: the upstream is not there"
    expected = [f"{told}. Trying again for up to 120 s"] if "result" in faults else []
    assert lines == [*expected, "task t: done"]


@pytest.mark.chaos
@pytest.mark.slow
def test_a_runner_whose_heartbeats_all_fail_is_lost_and_no_failure_of_the_agent(trainer: Trainer) -> None:
    trainer.faults, trainer.lasting = ["alive"], True
    runner, runs = slow_agent(trainer)
    done = working(trainer, runner)
    run = in_background(trainer.run)
    assert done() == {"lost": 1}
    trainer.faults.clear()
    trainer.leases.heartbeat_s = 20.0
    done = working(trainer, runner)
    rollout = run().rollout
    assert done() == {"done": 1}
    assert (rollout.status, rollout.score, len(runs)) == ("done", 1.0, 2)
    assert trainer.program.notes() == ["1 run lost the process that ran the agent"]


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(CYCLE, "contains itself"), ({("a", "b"): 1}, "cannot be a key"), ("x" * 9_000_000, "bytes; at most 8,388,608")],
    ids=["cycle", "keys", "large"],
)
def test_an_answer_that_cannot_be_sent_is_the_agents_failure(trainer: Trainer, answer: Any, reason: str) -> None:
    trainer.leases.heartbeat_s = 20.0
    runner = CallableRunner(lambda task: {"answer": answer})
    done = working(trainer, runner)
    rollout = trainer.run().rollout
    assert done() == {"failed": 1}
    assert re.search(reason, rollout.error)
    assert rollout.score == 0.0


def test_a_wrong_key_a_wrong_server_and_no_server_have_different_errors(trainer: Trainer) -> None:
    def worked(url: str, key: str) -> Any:
        return work(CallableRunner(solve), TaskServer(url, key), patience_s=0.5, say=lambda _: None, tasks=1)

    with pytest.raises(ConfigError, match="refuses the key"):
        worked(trainer.server.url, "another-key")
    with pytest.raises(ConfigError, match=r"server='localhost:80' is not a URL: write http://localhost:80$"):
        worked("localhost:80", KEY)
    with pytest.raises(ConfigError, match="must be the address"):
        worked("http:///assay", KEY)
    with pytest.raises(AssayError, match="cannot be reached"):
        worked("http://127.0.0.1:9", KEY)
