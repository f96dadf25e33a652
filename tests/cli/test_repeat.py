"""Commands made of stored settings: click reads them back as the same settings."""

import shlex
from typing import Any

import orjson
import pytest

from assay.commands.collect import Collect
from assay.commands.compile import Compile
from assay.commands.evaluate import Evaluate
from assay.commands.judge_compile import CompileJudge
from assay.commands.repeat import resume_command, rollout_command, run_command
from assay.commands.tune import TuneOrImpact
from assay.jobs.rl_settings import RLSettings
from assay.traces.store.rows import as_json
from rigs.command_line import assay_command

JOB = {"program": "my programs/p.py:P", "rubric": "r.yaml", "data": "arithmetic:size=9&seed=1"}


@pytest.mark.parametrize(
    "settings",
    [
        Compile(**JOB),
        TuneOrImpact(**JOB, ranges={"max_steps": (1.0, 4.0)}, objectives=["score", "tokens"], also=["a", "b"]),
        Compile(
            **JOB, model="openai/m", cache=False, preflight=False, val_size=4, test_size=5, seed=3,
            parameters={"temperature": 0.5, "tool": "a b"}, optimizer="gepa",
            optimizer_settings={"max_metric_calls": 4}, rename={"a": "b"}, max_calls=0,
        ),
        Evaluate(**JOB, split="test", samples=3, size=7, cache=False),
        Collect(**JOB, n=4, size=2, parameters={"max_steps": 3}),
        CompileJudge("Is it right?", labels="l.csv", scale=["no", "yes"], sizes={"val": 4}, cache=False),
    ],
)  # fmt: skip
def test_a_command_line_makes_the_settings_that_it_was_made_of(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = orjson.loads(as_json(settings.without_passwords))
    words, made = shlex.split(str(resume_command(settings.kind, stored))), list[Any]()
    assert (words[0], words[-1]) == ("assay", "--resume")
    monkeypatch.setattr(type(settings), "run", lambda self: made.append(self))
    assay_command(*words[1:-1])
    assert made[0].without_passwords == settings.without_passwords


def test_a_setting_without_a_flag_has_no_command_line() -> None:
    assert run_command("compile", Compile(**JOB, early_stop=False).without_passwords) is None


def test_a_training_is_resumed_by_its_method() -> None:
    sft = {
        "algorithm": "sft", "export": "data/warm rows", "adapter_name": "warm", "epochs": 1, "program": "p.py:P",
        "rubric": "r.yaml", "data": "d.jsonl", "sizes": {"test": 9}, "parameters": {"max_steps": 3}, "patience": 2,
    }  # fmt: skip
    text = resume_command("train", sft, store="s.db")
    assert text is not None
    assert sorted(shlex.split(text)) == sorted([
        "assay", "train", "sft", "data/warm rows", "--name", "warm", "--epochs", "1", "--program", "p.py:P", "--rubric",
        "r.yaml", "--data", "d.jsonl", "--test-size", "9", "--set", "max_steps=3", "--store", "s.db", "--resume",
    ])  # fmt: skip
    parameters = {"max_steps": 2}
    settings = RLSettings(**JOB, name="better", algorithm="rloo", steps=9, retention=["q,r,d"], parameters=parameters)
    policy = {**settings.without_passwords, "parameters": {"temperature": 1.0, "max_steps": 2}}
    text = run_command("train", policy)
    assert text is not None
    assert text.startswith("assay train rloo ")
    assert {"my programs/p.py:P", "better", "r.yaml", JOB["data"]} <= set(shlex.split(text))
    assert "--retention q,r,d" in text
    assert "--steps 9" in text
    assert "--set max_steps=2" in text
    assert "temperature" not in text  # it is that of the rollouts, which this command refuses
    assert (
        resume_command("train", {**policy, "retention": ["q,r,d"], "program": "q", "rubric": "r", "data": "d"}) is None
    )
    agent = run_command("train", {**policy, "agent": "m:f"})
    assert agent is not None
    assert ("--agent m:f" in agent, "my programs" in agent) == (True, False)
    offline = str(run_command("train", {"algorithm": "grpo", "export": "calls", "adapter_name": "o", "steps": 2}))
    assert sorted(offline.split()) == sorted(["assay", "train", "grpo", "calls", "--name", "o", "--steps", "2"])


def test_commands_that_cannot_be_typed_are_left_out() -> None:
    assert run_command("serve-of-others", {}) is None
    assert resume_command("serve", {"port": 1}) is None
    assert run_command("evaluate", {**JOB, "program": ["no", "name"]}) is None
    assert run_command("evaluate", {**JOB, "model": {"no": "text"}}) is None
    assert run_command("evaluate", {**JOB, "data": "two\nlines"}) is None


def test_a_rollout_is_repeated_with_its_inputs() -> None:
    text = rollout_command("p.py:P", {"question": "it's 1 + 1", "n": 2}, "openai/m", store="a b.db")
    assert text is not None
    assert shlex.split(text) == [
        "assay", "run", "p.py:P", "question=it's 1 + 1", "n=2", "--model", "openai/m", "--store", "a b.db",
    ]  # fmt: skip
    assert rollout_command("p.py:P", {"rows": [1]}, "m") is None
    assert rollout_command("", {"question": "x"}, "m") is None
    assert rollout_command("p.py:P", {"--store": "x"}, "m") is None
    assert rollout_command("p.py:P", {"question": "x" * 5000}, "m") is None
