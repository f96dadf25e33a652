"""Policy gradient training of agents that were written without assay."""

import functools
import shutil
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import assay
from assay.commands.train import train
from assay.errors import ConfigError, ProgramFailed
from assay.programs.runners import TaskServer, runner_of, work
from assay.reports.training import read_training_log
from assay.traces import Store
from rigs.progress import Lines

EXAMPLES = Path(__file__).parents[2] / "examples" / "any_agent"
DATA = "arithmetic:terms=2-2&digits=1-1&size=60"
SMALL: dict[str, Any] = {
    "steps": 1,
    "prompts_per_step": 2,
    "num_generations": 2,
    "lora_r": 2,
    "max_completion": 8,
    "evaluate_every": 0,
    "sizes": {"test": 2, "val": 2},
}
AGENT = """
import json, os, sys, urllib.request

def ask(base, key, model, text):
    body = {"model": model, "messages": [{"role": "user", "content": text}]}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{base}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

def solve(task):
    where = task["base_url"], task["api_key"], task["model"]
    draft = ask(*where, task["inputs"]["question"])
    return {"answer": ask(*where, f"Draft: {draft} Answer:")}

if __name__ == "__main__":
    print(json.dumps(solve(json.load(sys.stdin))))
"""


def letters(task: Any, prediction: Any, rollout: Any) -> float:
    """Something that rollouts of an untrained model differ in, so that no group has zero variance.

    Token ids are None where a letter spans several tokens, which depends on the processor's arithmetic.
    """
    tokens = [token for call in rollout.transitions for token in call.token_ids or call.output.encode()]
    return sum(place * token for place, token in enumerate(tokens, 1)) % 997 / 997


def rubric() -> assay.Rubric:
    return assay.Rubric("letters", [assay.Criterion(name="letters", check=letters)])


def training_of(agent: Any, model: str | Path, **options: Any) -> Any:
    job = {"rubric": rubric(), "data": DATA, "name": "mine", "model": str(model), **SMALL, **options}
    return train(agent=agent, **job)


def _records(phase: str) -> list[Any]:
    with Store(Path(".assay") / "assay.db") as store:
        return [store.rollout(row.id) for row in store.rollouts(limit=None) if row.phase == phase]


@pytest.mark.tutorial
@pytest.mark.slow
def test_an_agent_trains_the_embedded_model_whose_new_weights_answer_its_next_calls(embedded: str) -> None:
    Path("agent.py").write_text(AGENT)
    report = training_of("agent.py:solve", embedded)
    assert report.name == f"{embedded}+mine"
    assert (report.steps, report.row_stats.rollouts, report.row_stats.calls) == (1, 4, 8)  # two calls per rollout
    assert report.row_stats.left_out == {}
    trained, tested = _records("train"), _records("test")
    assert {rollout.program for rollout in trained} == {"agent.py:solve"}
    ended = {(len(rollout.transitions), rollout.score is None, rollout.error) for rollout in [*trained, *tested]}
    assert ended == {(2, False, None)}
    adapters = {call.adapters for rollout in [*trained, *tested] for call in rollout.transitions}
    assert len(adapters) == 3  # none before the training, LoRA's zeros in the first step, and its result
    assert set(report.validation["solve"]) == {"greedy", "sampled"}
    temperatures = [
        {call.request["body"]["temperature"] for rollout in rollouts for call in rollout.transitions}
        for rollouts in (trained, tested)
    ]
    assert temperatures == [{1.0}, {0.0, 1.0}]


@pytest.mark.slow
def test_a_command_trains_a_model_that_the_trainer_itself_generates_with(tiny_model: Path) -> None:
    Path("agent.py").write_text(AGENT)
    report = training_of(f"{sys.executable} agent.py", tiny_model)
    assert report.row_stats.left_out == {}
    assert (report.row_stats.rollouts, report.row_stats.calls) == (4, 8)
    assert {call.model for rollout in _records("train") for call in rollout.transitions} == {str(tiny_model)}
    (file,) = Path(".assay/runs").glob("*/training.jsonl")
    log = read_training_log(file.parent)
    assert log is not None
    assert log.curves == report.curves
    assert {rollout_id for rollout_id, _ in log.samples.values()} <= {rollout.id for rollout in _records("train")}
    assert len(log.samples) == len(report.row_stats.samples)


@pytest.mark.tutorial
@pytest.mark.slow
def test_a_runner_elsewhere_executes_the_agent_of_a_whole_training(tiny_model: Path) -> None:
    Path("agent.py").write_text(AGENT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    lines: list[str] = []
    server = TaskServer(f"http://127.0.0.1:{port}", "key-of-the-runners")
    runner = threading.Thread(
        target=functools.partial(work, runner_of("agent.py:solve"), server, patience_s=300, say=lines.append, tasks=12),
        daemon=True,
    )
    runner.start()
    report = training_of("remote", tiny_model, agent_key="key-of-the-runners", agent_listen=f"127.0.0.1:{port}")
    runner.join(60)
    assert report.row_stats.left_out == {}
    assert (report.row_stats.rollouts, report.row_stats.calls) == (4, 8)
    tasks = [line for line in lines if line.startswith("task ")]  # others say that the trainer is not there yet, and is
    assert len(tasks) == 12  # and two tasks of the test split, before and after, in two modes
    assert all(line.endswith(": done") for line in tasks)
    assert {rollout.program for rollout in _records("train")} == {"remote"}


@pytest.mark.tutorial
@pytest.mark.slow
@pytest.mark.parametrize("agent", ["{python} {folder}/openai_agent.py", "node {folder}/agent.mjs"])
def test_the_agents_of_the_examples_can_be_trained(tiny_model: Path, agent: str) -> None:
    """Unchanged, with OpenAI's SDK and as a Node program (LangGraph: tests/clients). No calculation is written."""
    pytest.importorskip("openai")
    if agent.startswith("node") and shutil.which("node") is None:
        pytest.skip("node is not installed")
    agent = agent.format(python=sys.executable, folder=EXAMPLES)
    small = {"prompts_per_step": 1, "sizes": {"test": 1, "val": 1}, "max_length": 4096, "beta": 0}
    report = training_of(agent, tiny_model, rubric=EXAMPLES / "sums.yaml", **small)
    assert report.row_stats.rollouts == 2
    for rollout in _records("train"):
        assert rollout.status == "done", rollout.error
        assert len(rollout.transitions) == 2
        assert all(call.token_ids for call in rollout.transitions)


def python(code: str) -> str:
    return f'{sys.executable} -S -c "{code}"'


FAILING: list[tuple[Any, type[Exception], str]] = [
    (lambda task: "5", ConfigError, "without calling the model at its base URL"),
    (python("raise SystemExit('no config file')"), ProgramFailed, "it said: 'no config file'. Correct the agent."),
    (
        python("import os; os.write(2, b'no memory'); os.kill(os.getpid(), 9)"),
        ProgramFailed,
        "was killed by SIGKILL; it said: 'no memory'. Correct the agent, or the machine",
    ),
]


@pytest.mark.parametrize(("agent", "error", "text"), FAILING, ids=["silent", "fails", "killed"])
def test_an_agent_that_cannot_be_trained_is_refused_before_weights_are_loaded(
    model_name: str, agent: Any, error: type[Exception], text: str
) -> None:
    progress = Lines()
    with pytest.raises(error) as raised:
        training_of(agent, model_name, progress=progress)
    assert text in str(raised.value)
    assert "Traceback" not in str(raised.value)
    assert not [line for line in progress.lines if line.startswith("loading")]


def test_an_agent_that_hangs_ends_the_training_before_weights_are_loaded(model_name: str) -> None:
    with pytest.raises(ProgramFailed, match=r"took longer than the limit of 0\.2 s"):
        training_of(python("import time; time.sleep(600)"), model_name, rollout_timeout_s=0.2)


@pytest.mark.parametrize(
    ("program", "options", "message"),
    [
        ("math_qa", {"agent_model": "gpt-5"}, "agent_model: would have no effect: a program is run"),
        ("math_qa", {"agent_listen": "127.0.0.1:8330"}, "agent_listen: would have no effect"),
        ("math_qa", {"agent": "agent.py:solve"}, "either a program or an agent"),
        (None, {"prompt_format": "lean"}, "prompt_format: would have no effect: an agent writes"),
        (None, {"agent_listen": "0.0.0.0:0"}, "reachable from other machines"),
        (None, {"agent_listen": "8000"}, "must be HOST:PORT"),
    ],
)
def test_settings_of_an_agent_are_refused_for_a_program_and_wrong_addresses_named(
    model_name: str, program: str | None, options: dict[str, Any], message: str
) -> None:
    agent = {} if program else {"agent": lambda task: "5"}
    job = {"rubric": rubric(), "data": DATA, "name": "mine", "model": model_name, **SMALL}
    with pytest.raises(ConfigError, match=message):
        train(program, **{**job, **agent, **options})
