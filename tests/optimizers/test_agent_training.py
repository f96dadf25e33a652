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
from assay.programs.foreign.remote import TaskServer, work
from assay.programs.foreign.runners import runner_of
from assay.reports.training_log import read_training_log
from assay.traces import Store

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


def _records(phase: str) -> list[Any]:
    with Store(Path(".assay") / "assay.db") as store:
        return [store.rollout(row.id) for row in store.rollouts(limit=None) if row.phase == phase]


@pytest.mark.tutorial
@pytest.mark.slow
def test_an_agent_trains_the_embedded_model_whose_new_weights_answer_its_next_calls(embedded: str) -> None:
    Path("agent.py").write_text(AGENT)
    report = train(agent="agent.py:solve", rubric=rubric(), data=DATA, name="mine", model=embedded, **SMALL)
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
    report = train(
        agent=f"{sys.executable} agent.py", rubric=rubric(), data=DATA, name="mine", model=str(tiny_model), **SMALL
    )
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
@pytest.mark.parametrize("algorithm", ["ppo", "rloo", "reinforce++"])
def test_the_other_algorithms_train_an_agent_too(tiny_model: Path, algorithm: str) -> None:
    Path("agent.py").write_text(AGENT)
    options = {**SMALL, "sizes": {"test": 1, "val": 1}, "algorithm": algorithm}
    report = train(agent="agent.py:solve", rubric=rubric(), data=DATA, name="mine", model=str(tiny_model), **options)
    assert (report.steps, report.row_stats.rollouts, report.row_stats.calls) == (1, 4, 8)
    assert report.row_stats.left_out == {}
    assert {rollout.program for rollout in _records("train")} == {"agent.py:solve"}


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
    report = train(
        agent="remote", agent_key="key-of-the-runners", agent_listen=f"127.0.0.1:{port}", rubric=rubric(), data=DATA,
        name="mine", model=str(tiny_model), **SMALL,
    )  # fmt: skip
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
    options = {**SMALL, "prompts_per_step": 1, "sizes": {"test": 1, "val": 1}, "max_length": 4096, "beta": 0}
    report = train(agent=agent, rubric=EXAMPLES / "sums.yaml", data=DATA, name="mine", model=str(tiny_model), **options)
    assert report.row_stats.rollouts == 2
    for rollout in _records("train"):
        assert rollout.status == "done", rollout.error
        assert len(rollout.transitions) == 2
        assert all(call.token_ids for call in rollout.transitions)


def test_an_agent_that_ignores_the_policy_ends_the_training_before_weights_are_loaded(model_name: str) -> None:
    messages: list[str] = []

    class Progress(assay.evaluation.SilentProgress):  # type: ignore[misc]
        def say(self, text: str) -> None:
            messages.append(text)

    with pytest.raises(ConfigError, match="without calling the model at its base URL"):
        train(
            agent=lambda task: "5", rubric=rubric(), data=DATA, name="mine", model=model_name, progress=Progress(),
            **SMALL,
        )  # fmt: skip
    assert not [text for text in messages if text.startswith("loading")]


def test_a_command_that_fails_is_shown_by_its_last_words(model_name: str) -> None:
    agent = f"{sys.executable} -S -c \"raise SystemExit('no config file')\""
    with pytest.raises(ProgramFailed) as raised:
        train(agent=agent, rubric=rubric(), data=DATA, name="mine", model=model_name, **SMALL)
    assert "it said: 'no config file'. Correct the agent." in str(raised.value)
    assert "Traceback" not in str(raised.value)


def test_a_command_that_is_killed_at_the_preflight_is_shown_by_its_last_words(model_name: str) -> None:
    code = "import os; os.write(2, b'no memory'); os.kill(os.getpid(), 9)"
    with pytest.raises(ProgramFailed) as raised:
        train(
            agent=f'{sys.executable} -S -c "{code}"', rubric=rubric(), data=DATA, name="mine", model=model_name, **SMALL
        )
    assert "was killed by SIGKILL; it said: 'no memory'. Correct the agent, or the machine" in str(raised.value)
    assert "Traceback" not in str(raised.value)


def test_an_agent_that_hangs_ends_the_training_before_weights_are_loaded(model_name: str) -> None:
    agent = f'{sys.executable} -S -c "import time; time.sleep(600)"'
    with pytest.raises(ProgramFailed, match=r"took longer than the limit of 0\.2 s"):
        train(agent=agent, rubric=rubric(), data=DATA, name="mine", model=model_name, rollout_timeout_s=0.2, **SMALL)


def test_settings_of_an_agent_are_refused_for_a_program(model_name: str) -> None:
    with pytest.raises(ConfigError, match="agent_model: would have no effect: a program is trained"):
        train("math_qa", rubric=rubric(), data=DATA, name="mine", model=model_name, agent_model="gpt-5", **SMALL)
    with pytest.raises(ConfigError, match="agent_listen: would have no effect"):
        train(
            "math_qa", rubric=rubric(), data=DATA, name="mine", model=model_name, agent_listen="127.0.0.1:8330", **SMALL
        )
    with pytest.raises(ConfigError, match="prompt_format: would have no effect: an agent writes"):
        train(
            agent=lambda task: "5", rubric=rubric(), data=DATA, name="mine", model=model_name, prompt_format="lean",
            **SMALL,
        )  # fmt: skip
    with pytest.raises(ConfigError, match="either a program or an agent"):
        train("math_qa", agent="agent.py:solve", rubric=rubric(), data=DATA, name="mine", model=model_name, **SMALL)
    with pytest.raises(ConfigError, match="reachable from other machines"):
        train(
            agent=lambda task: "5", rubric=rubric(), data=DATA, name="mine", model=model_name,
            agent_listen="0.0.0.0:0", **SMALL,
        )  # fmt: skip
    with pytest.raises(ConfigError, match="must be HOST:PORT"):
        train(
            agent=lambda task: "5", rubric=rubric(), data=DATA, name="mine", model=model_name, agent_listen="8000",
            **SMALL,
        )  # fmt: skip


def test_the_command_line_takes_either_a_program_or_an_agent() -> None:
    from rigs.command_line import assay_command

    flags = ["--name", "mine", "--rubric", "math_qa", "--data", DATA]
    neither = assay_command("train", "grpo", *flags)
    both = assay_command("train", "grpo", "math_qa", "--agent", "agent.py:solve", *flags)
    assert neither.code == both.code == 2
    assert all("give either a PROGRAM or an --agent to train" in done.stderr for done in (neither, both))
