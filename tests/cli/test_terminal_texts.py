"""What reaches the terminal: control characters of texts are escaped, on every path to it."""

import ast
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import tqdm
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import assay
from assay.cli import Console, print_json
from assay.deployment.plan import Plan
from assay.errors import FailureKind
from assay.support.terminal import ask, echo, escaped, protected, rich_console
from assay.traces.records import Rollout, ToolCall, Transition, Verdict
from assay.traces.store import Store, tables as schema
from rigs.command_line import assay_command

SOURCE = Path(assay.__file__).parent
CONTROLS = [chr(code) for code in (*range(9), *range(11, 32), *range(127, 160))]
MARKS = list("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
HOSTILE = "a\x1b[31mred\x1b]8;;http://evil\x07\x9b2J\r\x08\u202eb\u2066[bold]c[/bold]:smile:"
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@contextmanager
def streams() -> Iterator[tuple[StringIO, StringIO]]:
    """Both standard streams as plain files, without the wrapper of the entry point."""
    out, err = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        yield out, err


def test_control_characters_are_escaped_and_other_texts_are_not() -> None:
    for character in (*CONTROLS, *MARKS, "\ud800"):
        assert escaped(f"a{character}b") == f"a\\u{ord(character):04x}b"
    for text in ("a\tb\nc", "é ü 漢字 العربية עברית", "👩\u200d💻 🏳\ufe0f", "नमस्ते\u200c", "\xa0"):
        assert escaped(text) == text


def test_lines_and_questions_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    with streams() as (out, err):
        monkeypatch.setattr(sys, "stdin", StringIO("yes\n"))
        echo(HOSTILE)
        echo(HOSTILE, err=True)
        assert (ask(HOSTILE), ask("again")) == ("yes", None)
    assert not RAW.search(out.getvalue() + err.getvalue())
    assert out.getvalue() == escaped(HOSTILE) + "\n"


def test_tables_bars_and_panels_are_escaped_and_read_no_markup() -> None:
    table = Table(HOSTILE, title=HOSTILE, caption=HOSTILE)
    table.add_row(HOSTILE)
    table.add_row(Text(HOSTILE))
    with streams() as (out, err):
        rich = rich_console()
        rich.width = 500
        rich.print(table)
        rich.print(HOSTILE)
        rich.print(Panel(Text(HOSTILE), title=Text(HOSTILE)))
        rich.rule(HOSTILE)
        console = Console()
        console.say(HOSTILE)
        with console.bar(HOSTILE, 2) as advance:
            advance(2)
    assert not RAW.search(out.getvalue() + err.getvalue())
    assert out.getvalue().count("[bold]c[/bold]:smile:") == 9


def test_styles_of_assay_are_kept_beside_texts_without_colours() -> None:
    with streams() as (out, _):
        rich = type(rich_console())(file=out, force_terminal=True, color_system="standard", highlight=False)
        rich.print(Text("FAILED", style="bold"), HOSTILE)
    assert "\x1b[1mFAILED\x1b[0m" in out.getvalue()
    assert not RAW.search(out.getvalue().replace("\x1b[1m", "").replace("\x1b[0m", ""))


def test_what_others_print_is_escaped_by_the_streams() -> None:
    out = StringIO()
    print(HOSTILE, file=protected(out))
    protected(out).writelines([HOSTILE, "\n"])
    assert out.getvalue() == (escaped(HOSTILE.replace("\r", "\n")) + "\n") * 2


def test_a_progress_bar_of_another_library_is_printed_in_lines() -> None:
    out = StringIO()
    for _ in tqdm.tqdm(range(2), file=protected(out), mininterval=0):
        pass
    shares = [line.split("|")[0].strip() for line in out.getvalue().splitlines() if line]
    assert list(dict.fromkeys(shares)) == ["0%", "50%", "100%"]


def test_json_keeps_its_values() -> None:
    value = {"text": "".join([*CONTROLS, *MARKS]) + "\ud800 é \n\t", "key \x9b": [HOSTILE]}
    with streams() as (out, _):
        print_json(value)
    text = value["text"].replace("\ud800", "\ufffd")  # JSON as UTF-8 has no lone surrogates
    assert json.loads(out.getvalue()) == {**value, "text": text}
    assert not RAW.search(out.getvalue())


_PRINTS = re.compile(r"(?:sys\.(?:__)?(?:stdout|stderr)(?:__)?\.(?:buffer\.)?write(?:lines)?|print|input|"
                     r"click\.(?:echo|secho|prompt|confirm|echo_via_pager))")  # fmt: skip


def prints(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module == "rich.console" or (
            node.module == "rich" and any(alias.name == "print" for alias in node.names)
        )
    if isinstance(node, ast.Import):
        return any(alias.name == "rich" for alias in node.names)
    return isinstance(node, ast.Call) and bool(_PRINTS.fullmatch(ast.unparse(node.func)))


def test_no_other_module_prints() -> None:
    """`assay.support.terminal` escapes. Scripts of `assay.testing` print to the process that started them."""
    places = [
        f"{path.relative_to(SOURCE)}:{getattr(node, 'lineno', 0)}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path.relative_to(SOURCE).parts[0] != "testing" and path.name != "terminal.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if prints(node)
    ]
    assert places == []


def _hostile_store(file: Path) -> None:
    """A store with rows of every kind that commands show. Each of their texts, ids too, at any depth, is hostile."""
    word = "qqq"
    call = ToolCall(name=word, arguments={word: word}, result=word, isolation=word)
    failed = ToolCall(name=word, arguments={word: word}, error=word)
    verdict = Verdict(criterion=word, grade=0.5, reason=word, label=word)
    unscored = Verdict(criterion=f"{word}2", grade=None, reason=word)
    message = {"role": "user", "content": word}
    answer = {"choices": [{"message": {"role": "assistant", "content": word, "reasoning_content": word}}]}
    calls = [
        Transition(
            t=0, model=word, weights=word, adapters=(word,), request={"model": word, "messages": [message]},
            response=answer, output=word, tools=[call, failed], step_rewards={word: 0.5}, agent=word,
        ),
        Transition(t=1, model=word, request={"messages": [message]}, error=word, failure=FailureKind.MODEL),
    ]  # fmt: skip
    texts = {
        "run_id": word, "task_id": word, "task_type": word, "group_id": word, "program": word, "program_version": word,
        "model": word, "adapters": (word,), "rubric": word, "version": word, "error": word, "parameters": {word: 1},
        "inputs": {word: word}, "expected": {word: word}, "metadata": {word: word}, "prediction": {word: word},
    }  # fmt: skip
    with Store(file) as store:
        store.put_run(
            word, kind="evaluate", config={"program": word, "rubric": word, "data": word}, status="done", started_at=1.0
        )
        for number, status in enumerate(("done", "failed", "error", "running")):
            rollout = Rollout(
                id=f"{word}{number}", status=status, split="train", phase="evaluate", early_tools=[failed],
                transitions=calls if number == 0 else [], verdicts=[verdict, unscored], score=0.5, **texts,
            )  # fmt: skip
            store.put_rollout(rollout)
            for call_of in rollout.transitions:
                store.put_transition(rollout.id, call_of)
        store.flush()
        store.put_label(word, word, rater=word, label=word, fields={word: word}, rationale=word)
        rows: list[tuple[sa.Table, dict[str, Any]]] = [
            (schema.agent_versions, {"adapters_json": f'["{word}"]', "evidence_json": "{}", "people_json": "[]"}),
            (schema.agent_aliases, {}),
            (schema.agent_flags, {"value": f'"{word}"'}),
            (schema.deployments, {"plan_json": json.dumps(Plan().to_dict()), "status": "rolled_back", "stage": 0}),
            (schema.deployment_decisions, {"stage": 0, "action": "rollback", "numbers_json": "{}"}),
            (schema.loops, {}),
            (schema.loop_steps, {"step": "pool", "status": "failed", "detail_json": json.dumps({"reason": word})}),
        ]
        as_text, in_json = HOSTILE, json.dumps(HOSTILE)[1:-1]
        with store.engine.begin() as connection:
            for table, row in rows:
                needed = {
                    column.name: word if isinstance(column.type, sa.String) else 1
                    for column in table.columns
                    if not column.nullable
                }
                connection.execute(sa.insert(table).values({**needed, **row}))
            for column in (c for table in schema.metadata.sorted_tables for c in table.columns):
                if isinstance(column.type, sa.String):
                    is_json = column.like("{%") | column.like("[%") | column.like('"%')
                    changed = sa.func.replace(column, word, sa.case((is_json, in_json), else_=as_text))
                    connection.execute(sa.update(column.table).where(column.contains(word)).values({column: changed}))


_READING = [  # also with --json
    ["runs", "list"], ["runs", "show", HOSTILE], ["traces", "list"], ["traces", "show", f"{HOSTILE}0"],
    ["traces", "stats"], ["traces", "rate", f"{HOSTILE}0", "0.5"], ["traces", "close"], ["registry", "list", HOSTILE],
    ["registry", "show", f"{HOSTILE}@1"], ["deploy", "status", HOSTILE],
]  # fmt: skip
_OTHERS = [
    ["registry", "alias", f"{HOSTILE}@1", HOSTILE], ["deploy", "history", HOSTILE], ["loop", "status", HOSTILE],
    ["judge", "card", HOSTILE], ["judge", "forget", HOSTILE], ["run", HOSTILE, f"question={HOSTILE}"],
    ["evaluate", HOSTILE, "--rubric", HOSTILE, "--data", HOSTILE], ["traces", "score", "--rubric", HOSTILE],
    ["export", "sft", "--out", HOSTILE.replace("/", "")], [HOSTILE], ["traces", f"--{HOSTILE}"],
    ["models", "pull", HOSTILE], ["trust", "add", HOSTILE], ["traces", "forget", HOSTILE],
]  # fmt: skip


def test_no_command_writes_a_control_character(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_STORE", str(tmp_path / "s.db"))
    monkeypatch.setenv("ASSAY_HOME", str(tmp_path))
    _hostile_store(tmp_path / "s.db")
    for arguments in (*_READING, *([*words, "--json"] for words in _READING), *_OTHERS):
        done = assay_command(*arguments)
        written = done.stdout + done.stderr
        assert written, arguments
        assert not RAW.search(written), written


@pytest.mark.slow
def test_a_terminal_gets_the_escapes_of_assay_alone(tmp_path: Path) -> None:
    """In a pseudo-terminal, where rich draws bars and styles."""
    script = (
        "import logging, sys, warnings\n"
        "from assay.support.terminal import protected\n"
        "from assay.cli import Console\n"
        "sys.stdout, sys.stderr = protected(sys.stdout), protected(sys.stderr)\n"
        f"hostile = {HOSTILE!r}\n"
        "console = Console()\n"
        "with console.bar(hostile, 2) as advance:\n"
        "    print(hostile); logging.warning(hostile); warnings.warn(hostile); console.say(hostile); advance(2)\n"
    )
    master, slave = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", script], stdout=slave, stderr=slave, cwd=tmp_path)
    os.close(slave)
    written = b""
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:  # the process has ended
            break
        if not chunk:
            break
        written += chunk
    assert process.wait(timeout=60) == 0
    text = written.decode()
    assert "\x1b[" in text, "the bar is drawn"
    assert "\x1b[31mred" not in text
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f\u202e\u2066]|\x1b\\]", text)
