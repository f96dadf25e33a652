"""What the command line prints names flags, not Python arguments."""

import re
from pathlib import Path

import pytest

from assay.cli import echo_line, names_of
from assay.errors import FailureKind, spoken
from assay.optimizers.finetuning.run_folder import POLICY_MEMORY, SFT_MEMORY
from assay.support.numbers import counted
from assay.traces import Rollout, Store, Transition
from rigs.command_line import assay_command

SPOKEN = [
    ("`preflight=False` skips this check", "--no-preflight skips this check"),
    ("`trust=True` then loads it", "--trust then loads it"),
    ("`split='test'` compares on others", "--split test compares on others"),
    ("Rename columns: `rename={'COLUMN': 'NAME'}`", "Rename columns: --rename COLUMN=NAME"),
    ("Choose another rubric with `rubric=…`", "Choose another rubric with --rubric"),
    ("give a model (`model=NAME`)", "give a model (--model NAME)"),
    ("Raise `max_calls` to 600 or more", "Raise --max-calls to 600 or more"),
    ("`parameters={'max_steps': 5}` is ignored", "--set max_steps=5 is ignored"),
    ("assay.load(path, program=…, split='test')", "assay.load(path, program=…, split='test')"),
    ('  File "x.py", line 3\n    run(`split`)', '  File "x.py", line 3\n    run(`split`)'),
    ("'a`b' of a user\n`resume=True` continues", "'a`b' of a user\n--resume continues"),
    ("`resume=False` begins anew", "no --resume begins anew"),
    ("`thinking=''` is wrong", "--thinking '' is wrong"),
    ("`max_calls='new\\nline'` is wrong", "--max-calls 'new\\nline' is wrong"),
    ("`task_timeout=nan` must be finite", "--task-timeout nan must be finite"),
    ("`max_cost_usd=-inf` must be finite", "--max-cost-usd -inf must be finite"),
    ("`calibration=('a', 'b')` is unknown", "calibration=('a', 'b') is unknown"),
    ("see `assay trust add`", "see `assay trust add`"),
]


def test_settings_become_the_flags_of_the_command() -> None:
    names = names_of(["evaluate"])
    assert [(text, spoken(text, names)) for text, _ in SPOKEN] == SPOKEN
    for versions in ("(1, 2)", "[1, 2]"):  # a list is the repeated flag
        text = spoken(f"`versions={versions}` must differ", names_of(["registry", "route"]))
        assert text == "--version 1 --version 2 must differ"


def test_advice_for_lack_of_memory_names_flags_that_exist() -> None:
    for command, advice, flags in (
        ("sft", SFT_MEMORY, ["--batch 2", "--batch 1", "--max-length", "--lora-r"]),
        ("grpo", POLICY_MEMORY, ["--per-device-batch-size", "--resume", "--max-length", "--lora-r"]),
    ):
        text = spoken(advice, names_of(["train", command]))
        assert re.findall(r"--[a-z-]+(?: \d)?", text) == flags
        assert "_" not in text


def test_a_count_of_one_is_singular() -> None:
    numbers = {0: "0 rollouts", 1: "1 rollout", 2: "2 rollouts", 1200: "1,200 rollouts"}
    assert {n: counted(n, "rollouts") for n in numbers} == numbers


def test_traces_close_and_show_say_what_still_runs_and_what_failed(own_folder: Path) -> None:
    error = "the gateway stopped the answer"
    calls = [
        Transition(t=0, model="m", request={}, output="again", error=error, failure=FailureKind.LOOP),
        Transition(t=1, model="m", request={}, error="no answer", failure=FailureKind.MODEL, prompt_tokens=3),
    ]
    with Store() as store:
        store.put_rollout(Rollout(id="a" * 32, source="gateway", status="running", inputs={"prompt": "hi"}, model="m"))
        store.put_rollout(Rollout(id="b" * 32, source="gateway", status="done", model="m"))
        for call in calls:
            store.put_transition("b" * 32, call)

    def printed(*arguments: str) -> str:
        return assay_command("traces", *arguments).stdout

    output = printed("close")
    assert "0 rollouts ended with their answer, 0 without one\n1 rollout still running: " in output
    assert "they had a call less than --idle-minutes ago" in output
    assert "--idle-minutes 0 ends them now" in output
    lines = printed("show", "aaaa").splitlines()
    assert lines[:2] == [f"{'a' * 32}  from gateway  m  running  score unscored", 'task – (default): {"prompt": "hi"}']
    assert "still running" not in printed("close", "--idle-minutes", "0")
    assert printed("show", "bbbb").splitlines()[3:9] == [
        "[0] ?+? tokens, 0 ms, failure loop",
        "  -> again",
        f"  error: {error}",
        "",
        "[1] 3+? tokens, 0 ms, failure model",
        "  -> no answer",
    ]


def test_a_line_of_a_list_is_cut_only_in_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "8")
    echo_line("0123456789")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    echo_line("0123456789")
    assert capsys.readouterr().out == "0123456789\n0123456…\n"
