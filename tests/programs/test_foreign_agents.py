"""Agents written without assay, run on the embedded model behind the gateway: what is recorded, and how they fail."""

import dataclasses
import os
import re
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from policy_stage import TASK, scripted_policy, trained, training

from assay.errors import BudgetExceeded, ConfigError, FailureKind
from assay.evaluation import Session
from assay.models import Caps
from assay.models.embedded import PolicyBackend
from assay.models.lm import LanguageModel, lm_over
from assay.programs.foreign_agent import ForeignAgent
from assay.programs.runners import (
    AgentFailed,
    AgentRunner,
    AgentTask,
    CallableRunner,
    CommandRunner,
    RunnerLost,
    runner_of,
)
from assay.traces import Store
from assay.traces.gateway.agents import AgentGateway

CLIENT = """
import json, os, sys, urllib.request

def ask(base, key, agent="", **body):
    data = json.dumps({"messages": [{"role": "user", "content": "How much is 2 + 3?"}], **body}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    headers |= {"x-assay-agent": agent} if agent else {}
    request = urllib.request.Request(f"{base}/chat/completions", data=data, headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
"""


def ask(task: Mapping[str, Any], **body: Any) -> str:
    scope: dict[str, Any] = {}
    exec(CLIENT, scope)
    answer: str = scope["ask"](task["base_url"], task["api_key"], **{"model": task["model"], **body})
    return answer


@dataclasses.dataclass
class AgentHost:
    session: Session
    gateway: AgentGateway
    store: Store

    def program(self, runner: AgentRunner) -> ForeignAgent:
        program = ForeignAgent("the agent", runner, trains=True)
        program.gateway = self.gateway
        return program

    def run(self, agent: AgentRunner | ForeignAgent, *, timeout_s: float = 60.0) -> Any:
        """The scored prediction of a run as a training makes it; None if it took too long."""
        program = agent if isinstance(agent, ForeignAgent) else self.program(agent)
        return trained(program, self.session, timeout_s)


@contextmanager
def hosting(policy: LanguageModel, folder: Path) -> Iterator[AgentHost]:
    store = Store(folder / "a.db")
    session = training(policy, store)
    gateway = AgentGateway(store, session.lm.model, accepts=["gpt-5-mini"])
    yield AgentHost(session, gateway, store)
    gateway.close()
    store.close()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[AgentHost]:
    with hosting(scripted_policy(), tmp_path) as host:
        yield host


@pytest.fixture
def embedded_host(small_embedded: str, tmp_path: Path) -> Iterator[AgentHost]:
    policy = lm_over(PolicyBackend(small_embedded), small_embedded, max_tokens=8, seed=0).copy(top_p=1.0)
    with hosting(policy, tmp_path) as host:
        yield host


def command(code: str) -> CommandRunner:
    return CommandRunner([sys.executable, "-c", CLIENT + code])


CALLING = "task = json.load(sys.stdin)\n" + (
    'said = ask(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], model=os.environ["ASSAY_MODEL"])\n'
)


@pytest.mark.slow
def test_calls_of_a_function_are_turns_of_the_scored_rollout(embedded_host: AgentHost) -> None:
    answers: list[str] = []

    def agent(task: dict[str, Any]) -> dict[str, str]:
        answers.extend(ask(task, temperature=0, max_tokens=100, seed=1) for _ in range(3))
        return {"answer": answers[-1]}

    run = embedded_host.run(CallableRunner(agent))
    rollout = run.rollout
    assert run.prediction.answer == answers[-1]
    assert (rollout.score, rollout.status, rollout.source, rollout.task_id) == (1.0, "done", "program", "t")
    assert [call.t for call in rollout.transitions] == [0, 1, 2]
    assert [call.output for call in rollout.transitions] == answers
    for call in rollout.transitions:
        assert call.model == embedded_host.session.lm.model
        assert call.token_ids
        assert len(call.token_ids) == len(call.logprobs or ()) == call.completion_tokens
        assert call.completion_tokens <= 8  # the policy's limit, not the agent's
        assert (call.request["body"]["temperature"], call.request["body"].get("seed")) == (1.0, None)  # nor are these
    assert len(set(answers)) > 1  # sampled at the training's temperature and seeds, not at the agent's
    embedded_host.store.flush()
    stored = embedded_host.store.rollout(rollout.id)
    assert [(call.t, call.output, call.token_ids) for call in stored.transitions] == [
        (call.t, call.output, call.token_ids) for call in rollout.transitions
    ]
    assert stored.score == 1.0
    assert embedded_host.session.meter.usage.calls == 3
    assert embedded_host.session.recorder.unrecorded.calls == 0


@pytest.mark.slow
def test_the_same_seed_gives_the_same_calls(embedded_host: AgentHost) -> None:
    runner = CallableRunner(lambda task: " ".join(ask(task) for _ in range(2)))
    first, second = embedded_host.run(runner), embedded_host.run(runner)
    assert first.prediction.answer == second.prediction.answer
    assert first.rollout.id != second.rollout.id


@pytest.mark.slow
def test_a_command_gets_the_task_on_stdin_and_answers_by_its_last_line(host: AgentHost) -> None:
    end = 'print("thinking"); print(json.dumps({"answer": said, "of": task["inputs"]["question"], "id": task["id"]}))'
    run = host.run(command(CALLING + end))
    (call,) = run.rollout.transitions
    assert dict(run.prediction.items()) == {"answer": call.output, "of": TASK.inputs["question"], "id": "t"}


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("print(said, file=sys.stderr); sys.exit(3)", "exited with 3"),
        ("sys.stdout.buffer.write(bytes([255, 254]))", "not UTF-8"),
        ("pass", "printed nothing"),
        ("print('x' * (2 << 20))", "more than 1 MiB"),
    ],
)
def test_an_agent_without_an_answer_has_failed_and_scores_0(host: AgentHost, end: str, reason: str) -> None:
    rollout = host.run(command(CALLING + end)).rollout
    assert reason in rollout.error
    assert (rollout.status, rollout.failure, rollout.score) == ("failed", FailureKind.AGENT, 0.0)
    assert len(rollout.transitions) == 1


@pytest.mark.parametrize("runner", [CallableRunner(lambda task: "5"), command("print(5)")], ids=["function", "command"])
def test_an_agent_that_ignores_the_base_url_is_refused_after_its_first_task(
    host: AgentHost, runner: AgentRunner
) -> None:
    with pytest.raises(ConfigError, match="without calling the model at its base URL"):
        host.run(runner)


def test_an_agent_that_requests_another_model_gets_an_error_that_names_it(host: AgentHost) -> None:
    with pytest.raises(ConfigError, match="asked for the model 'gpt-5'"):
        host.run(CallableRunner(lambda task: ask(task, model="gpt-5")))
    rollout = host.run(CallableRunner(lambda task: ask(task, model="gpt-5-mini"))).rollout  # accepted
    assert [call.model for call in rollout.transitions] == [host.session.lm.model]


def test_calls_after_the_end_of_a_rollout_are_refused_and_counted(host: AgentHost) -> None:
    tasks: list[dict[str, Any]] = []

    def agent(task: dict[str, Any]) -> str:
        tasks.append(task)
        return ask(task)

    program = host.program(CallableRunner(agent))
    run = host.run(program)
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(tasks[0])
    assert refused.value.code == 403
    assert "has ended" in refused.value.read().decode()
    assert program.notes() == ["1 call of the agent came after the run had ended, which is refused"]
    host.store.flush()
    assert len(host.store.rollout(run.rollout.id).transitions) == 1


def test_a_command_that_hangs_is_ended_with_its_children(host: AgentHost, tmp_path: Path) -> None:
    hangs = "import subprocess, time; child = subprocess.Popen(['sleep', '60'])\n"
    hangs += f"open({str(tmp_path / 'pids')!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}'); time.sleep(60)"
    program = host.program(command(CALLING + hangs))
    assert host.run(program, timeout_s=6.0) is None
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    deadline = time.monotonic() + 120
    while any(map(_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_alive, pids))
    assert "1 run of the agent took too long and ended" in program.notes()


def test_a_function_that_hangs_is_given_up_and_its_calls_are_refused(host: AgentHost) -> None:
    ended, late = threading.Event(), list[int]()

    def agent(task: dict[str, Any]) -> str:
        ask(task)
        ended.wait(120)
        try:
            ask(task)
        except urllib.error.HTTPError as error:
            late.append(error.code)
        return "late"

    assert host.run(CallableRunner(agent), timeout_s=3.0) is None
    time.sleep(0.5)
    ended.set()
    deadline = time.monotonic() + 120
    while not late and time.monotonic() < deadline:
        time.sleep(0.05)
    assert late == [403]


def test_a_run_whose_process_is_killed_is_made_again(host: AgentHost, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    once = f"mark = {str(mark)!r}\nif not os.path.exists(mark): open(mark, 'w').close(); os.kill(os.getpid(), 9)\n"
    program = host.program(command(CALLING + once + "print(said)"))
    rollout = host.run(program).rollout
    assert (rollout.status, rollout.score, len(rollout.transitions)) == ("done", 1.0, 1)
    assert program.notes() == ["1 run lost the process that ran the agent"]
    host.store.flush()
    lost = next(row for row in host.store.rollouts(limit=None) if row.id != rollout.id)
    assert (lost.status, lost.failure, lost.score) == ("error", FailureKind.MODEL, None)


def test_a_cap_stops_the_job(host: AgentHost) -> None:
    host.session.meter.caps = Caps(calls=2)
    with pytest.raises(BudgetExceeded):
        host.run(CallableRunner(lambda task: [ask(task) for _ in range(4)]))


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ("no-such-program-anywhere x", "cannot be started"),
        ("python 'unclosed", "cannot be read as a command"),
        ("missing.py:solve", "there is no file missing.py"),
        ("json:nothing", "json has no 'nothing'"),
        ("json:load_", "Did you mean 'load'"),
        ("no_such_module:solve", "cannot be loaded"),
        ("my_agent.py --fast", "is not a command: write 'python my_agent.py --fast', or my_agent.py:FUNCTION"),
        ("json:JSONDecoder", "must be a function"),
    ],
)
def test_an_agent_that_cannot_be_started_is_refused_by_name(host: AgentHost, agent: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        host.run(runner_of(agent))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z" if Path(f"/proc/{pid}/stat").exists() else False


COMMANDED = AgentTask(id="t", rollout="r", inputs={}, model="m", base_url="http://127.0.0.1:9/v1", api_key="k")
LOUD = """
import os, sys, time
for number in range(6):
    os.write(2, b"." * 700_000)
    time.sleep(0.12)
os.write(2, f"last words, of {os.fstat(2).st_size} bytes".encode())
sys.exit(3)
"""


def test_the_end_of_a_long_standard_error_is_kept_and_the_rest_is_not() -> None:
    with pytest.raises(AgentFailed, match="the agent exited with 3") as failed:
        CommandRunner([sys.executable, "-S", "-c", LOUD]).run(COMMANDED, lambda: None)
    match = re.search(r"it said: '\.+last words, of (\d+) bytes'$", str(failed.value))
    assert match is not None
    assert len(str(failed.value)) < 1000
    assert int(match[1]) < 3_000_000  # of 4,200,000 that were written


def test_a_command_that_is_killed_is_named_with_its_signal_and_last_words() -> None:
    code = "import os; os.write(2, b'out of memory'); os.kill(os.getpid(), 9)"
    with pytest.raises(RunnerLost, match="the agent's process was killed by SIGKILL; it said: 'out of memory'"):
        CommandRunner([sys.executable, "-S", "-c", code]).run(COMMANDED, lambda: None)


def test_of_many_copies_of_the_folder_the_latest_stay(own_folder: Path) -> None:
    Path("system.md").write_text("Be brief.")
    code = "import json, os; print(json.dumps({'place': os.getcwd(), 'text': open('system.md').read()}))"
    runner = CommandRunner([sys.executable, "-S", "-c", code])
    answers = [
        runner.run(dataclasses.replace(COMMANDED, files={"system.md": f"Text {at}"}), lambda: None) for at in range(12)
    ]
    assert [answer["text"] for answer in answers] == [f"Text {at}" for at in range(12)]
    assert [at for at, answer in enumerate(answers) if Path(answer["place"]).exists()] == list(range(4, 12))
    again = runner.run(dataclasses.replace(COMMANDED, files={"system.md": "Text 0"}), lambda: None)
    assert again["text"] == "Text 0"
