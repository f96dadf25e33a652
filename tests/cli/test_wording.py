"""What the command line prints names flags, not Python arguments."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from assay.cli.main import group, names_of
from assay.cli.shared import echo_line
from assay.errors import AssayError, FailureKind, StopRun, spoken
from assay.optimizers.finetuning.run_folder import POLICY_MEMORY, SFT_MEMORY
from assay.support.numbers import counted
from assay.traces import Rollout, Store, Transition


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [{"mail": f"Page {n} crashes", "intent": "bug"} for n in range(40)]
    Path("mails.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("texts.jsonl").write_text(
        "".join(json.dumps({"text": row["mail"], "intent": row["intent"]}) + "\n" for row in rows)
    )
    Path("labels.jsonl").write_text("".join(json.dumps({"answer": row["mail"], "label": "yes"}) + "\n" for row in rows))
    Store(Path(".assay/assay.db")).close()
    Path("p.py").write_text(
        "def answer(text):\n    return {'intent': 'bug'}\n\n\ndef fails(text):\n    raise ValueError('no')\n"
    )
    Path("r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: exact}\n")
    Path("missing.yaml").write_text("name: r\ncriteria:\n- {name: right, check: exact, with: {field: gone}}\n")
    return tmp_path


def printed(arguments: list[str]) -> str:
    """What a command prints, its error included, as `main` prints it."""
    done = CliRunner().invoke(group, arguments)
    error = done.exception
    if isinstance(error, AssayError):
        return f"{done.output}{error.text(error.names)}"
    assert error is None or isinstance(error, SystemExit | StopRun), error
    return f"{done.output}{spoken(str(error or ''), names_of(arguments))}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
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
    ],
)
def test_settings_become_the_flags_of_the_command(text: str, expected: str) -> None:
    assert spoken(text, names_of(["evaluate"])) == expected


@pytest.mark.parametrize("versions", ["(1, 2)", "[1, 2]"])
def test_a_list_becomes_the_repeated_flag(versions: str) -> None:
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
    assert [counted(n, "rollouts") for n in (0, 1, 2, 1200)] == [
        "0 rollouts",
        "1 rollout",
        "2 rollouts",
        "1,200 rollouts",
    ]


def test_traces_close_reports_rollouts_with_recent_calls_and_show_omits_empty_fields(place: Path) -> None:
    with Store(Path(".assay/assay.db")) as store:
        store.put_rollout(Rollout(id="a" * 32, source="gateway", status="running", inputs={"prompt": "hi"}, model="m"))
    output = printed(["traces", "close"])
    assert "0 rollouts ended with their answer, 0 without one\n1 rollout still running: " in output
    assert "they had a call less than --idle-minutes ago" in output
    assert "--idle-minutes 0 ends them now" in output
    lines = printed(["traces", "show", "aaaa"]).splitlines()
    assert lines[:2] == [f"{'a' * 32}  from gateway  m  running  score unscored", 'task – (default): {"prompt": "hi"}']
    assert "still running" not in printed(["traces", "close", "--idle-minutes", "0"])


def test_traces_show_names_the_failure_of_a_call_beside_its_text(place: Path) -> None:
    error = "the gateway stopped the answer"
    calls = [
        Transition(t=0, model="m", request={}, output="again", error=error, failure=FailureKind.LOOP),
        Transition(t=1, model="m", request={}, error="no answer", failure=FailureKind.MODEL, prompt_tokens=3),
    ]
    with Store(Path(".assay/assay.db")) as store:
        store.put_rollout(Rollout(id="b" * 32, source="gateway", status="done", model="m"))
        for call in calls:
            store.put_transition("b" * 32, call)
    lines = printed(["traces", "show", "bbbb"]).splitlines()
    assert lines[3:9] == [
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
