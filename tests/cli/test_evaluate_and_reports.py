"""`assay evaluate --fail-under`, and the page of a compile."""

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from aiohttp import web
from click.testing import CliRunner

from assay.cli.main import command_of, group
from assay.cli.shared import Console
from assay.commands.compile import CompileReport, sides_table
from assay.datasets.rows import NO_ROWS
from assay.errors import ConfigError, DataError, ModelError, ProgramFailed
from assay.optimizers.finetuning.settings import SFTSettings
from assay.optimizers.finetuning.sft import SFTReport
from assay.reports.markdown import markdown
from assay.support.numbers import calls_text
from assay.traces import Rollout, Store
from assay.traces.store.listing import show_run
from rigs.command_line import assay_command
from rigs.serving import chat_completion, served

command: Any = command_of(["evaluate"])


@pytest.mark.parametrize(("least", "code"), [("0.5", 0), ("0.51", 1)])
def test_fail_under_decides_the_exit_code(least: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("def half(question):\n    return question\n")
    (tmp_path / "c.py").write_text(
        "def right(task, prediction, rollout):\n    return float(prediction['answer'] == 'a')\n"
    )
    (tmp_path / "r.yaml").write_text("name: r\ncriteria:\n  - name: right\n    check: c.py:right\n")
    (tmp_path / "d.jsonl").write_text(
        "\n".join(json.dumps({"question": q, "answer": "a", "split": "val"}) for q in "ab")
    )
    done = CliRunner().invoke(
        command,
        [
            "p.py:half",
            "--rubric",
            "r.yaml",
            "--data",
            "d.jsonl",
            "--model",
            "openai/none",
            "--api-base",
            "http://localhost:9/v1",
            "--fail-under",
            least,
        ],
    )
    assert done.exit_code == code, done.output


@pytest.mark.parametrize(("cap", "code"), [("3", 1), ("12", 0)])
def test_the_score_of_a_part_of_the_tasks_meets_no_threshold(cap: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text(
        "import dspy\n\nclass P(dspy.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.ask = dspy.Predict('question -> answer')\n\n"
        "    def forward(self, question):\n        return self.ask(question=question)\n"
    )
    rows = [{"question": f"{n}", "answer": "a", "split": "val"} for n in range(12)]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    arguments = ["p.py:P", "--rubric", "exact", "--data", "d.jsonl", "--model", "openai/m", "--no-preflight"]
    app = web.Application()

    async def answer(request: web.Request) -> web.Response:
        return chat_completion("m", "[[ ## answer ## ]]\na\n\n[[ ## completed ## ]]")

    app.router.add_post("/v1/chat/completions", answer)
    with served(app) as address:
        arguments += ["--api-base", f"{address}/v1", "--max-calls", cap, "--json"]
        done = CliRunner(env={"OPENAI_API_KEY": "none"}).invoke(command, [*arguments, "--fail-under", "0.5"])
        partial = CliRunner(env={"OPENAI_API_KEY": "none"}).invoke(command, arguments)
    assert (done.exit_code, partial.exit_code) == (code, 0), done.output
    assert json.loads(done.stdout)["result"]["score"] == 1.0


SIDE = {
    "score": 0.123456789, "n": 12, "criteria": {"right": 1 / 3}, "task_types": {"a": 0.1, "b": None}, "failed": 1,
    "unscored": 0,
    "calls_per_task": 2.0, "tokens_per_task": 33.333333, "cost_usd": None, "undecided": {}, "why_failed": "parse",
}  # fmt: skip


def compiled(**changes: Any) -> CompileReport:
    nothing: dict[str, Any] = dict.fromkeys(("baseline", "compiled", "gain"))
    values: dict[str, Any] = {
        "artifact": Path(), "optimizer": "auto", "winner": "demos 4", "gate": None, "replaces": False, "stopped": None,
        "failed": None, "notes": [], "calls": 1234, "search_calls": 56, "cached": 7, "repeated_calls": 0,
        "tokens": 89012, "cost_usd": 0.1234567, "unpriced_calls": 0, "model": "openai/x", "models": [],
        "unrecorded": 0, "rows_not_stored": 0, "test_openings": None, "data": NO_ROWS.to_dict(), "candidates": [],
        "test": nothing, "config": None, "run_id": "r",
    }  # fmt: skip
    return CompileReport(**{**values, **changes})


def test_the_page_of_a_compile_is_rounded() -> None:
    gain = {"mean": 0.3333333, "low": -0.1, "high": 0.7, "n": 12}
    test = {"baseline": SIDE, "compiled": {**SIDE, "score": 0.5}, "gain": gain}
    text = markdown(compiled(test=test, gate=gain, notes=["something"]), title="qa.py:QA", about="By `auto`.")
    assert text.startswith("# qa.py:QA\n\nBy `auto`.\n")
    assert "| score | 0.123 | 0.500 |" in text
    assert "| right | 33 % | 33 % |" in text
    assert "| tasks of type b | – | – |" in text
    assert "+0.333, 95 % [-0.100, +0.700], 12 tasks" in text
    assert "LM calls: 1,234" in text
    assert "- something\n" in text
    assert "3333" not in text


def test_the_page_of_a_compile_names_settings_as_code() -> None:
    report = compiled(stopped="`max_calls=5` is too low", notes=["raise `max_search_calls=9`"])
    page = markdown(report, title="qa.py:QA", about="By `auto`.")
    assert "stopped early: `max_calls=5` is too low; raise the cap and add `resume=True`" in page
    assert "- raise `max_search_calls=9`\n" in page


def test_names_of_task_types_are_no_markup() -> None:
    side = {**SIDE, "task_types": {"a|b": 0.5, "<img src=x>\u202e": 0.25}}
    gain = {"mean": 0.0, "low": -0.1, "high": 0.1, "n": 12}
    text = markdown(compiled(test={"baseline": side, "compiled": side, "gain": gain}), title="qa.py:QA", about="")
    assert r"| tasks of type a\|b | 0.500 | 0.500 |" in text
    assert "| tasks of type &lt;img src=x>[U+202E] | 0.250 | 0.250 |" in text


@pytest.mark.parametrize(("costs", "cells"), [((0.0, None), ("unknown", "unknown")), ((0.0, 0.5), ("$0", "$0.5000"))])
def test_costs_are_compared_if_both_are_known(costs: tuple[float, float | None], cells: tuple[str, str]) -> None:
    table = sides_table(*({**SIDE, "cost_usd": cost} for cost in costs))
    assert next(tuple(row[1:]) for row in table.rows if row[0] == "cost") == cells


def project(folder: Path) -> list[str]:
    (folder / "p.py").write_text("def half(question):\n    return question\ndef whole(question):\n    return 'a'\n")
    (folder / "c.py").write_text(
        "def right(task, prediction, rollout):\n    return float(prediction['answer'] == 'a')\n"
    )
    (folder / "r.yaml").write_text("name: r\ncriteria:\n  - name: right\n    check: c.py:right\n")
    (folder / "d.jsonl").write_text(
        "\n".join(json.dumps({"question": q, "answer": "a", "split": "val"}) for q in "abcd")
    )
    return ["--rubric", "r.yaml", "--data", "d.jsonl", "--model", "openai/none", "--api-base", "http://localhost:9/v1"]


def invoked(*arguments: str) -> str:
    done = CliRunner().invoke(group, list(arguments))
    assert done.exit_code == 0, done.output
    return done.stdout


def test_calls_and_progress_are_stated_in_words(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert calls_text(3, 1234) == "3 (1,234 more from the cache)"
    monkeypatch.setattr("assay.cli.shared.PROGRESS_LINE_EVERY_S", 0)
    with Console().bar("tasks", 3) as advance:
        advance(1), advance(1), advance(1)
    assert capsys.readouterr().err.splitlines() == ["tasks (3) …", "tasks: 1 of 3", "tasks: 2 of 3"]


def test_resume_continues_a_run_of_the_same_split(tmp_path: Path) -> None:
    flags = project(tmp_path)
    rows = [
        {"question": q, "answer": "a", "split": split}
        for split, letters in (("train", "axyz"), ("val", "abcd"))
        for q in letters
    ]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for split in ("train", "val"):
        invoked("evaluate", "p.py:half", *flags, "--split", split)
    with Store() as store:  # the later one is the one of val, which did not end
        runs = json.loads(invoked("runs", "list", "--json"))["runs"]
        store.put_run(runs[0]["id"], kind="evaluate", config=runs[0], status="failed", started_at=1.0)
    invoked("evaluate", "p.py:half", *flags, "--split", "train", "--resume")
    statuses = {run["id"]: run["status"] for run in json.loads(invoked("runs", "list", "--json"))["runs"]}
    assert statuses == {runs[0]["id"]: "failed", runs[1]["id"]: "done"}
    with Store() as store:
        splits = {(rollout.run_id, rollout.split) for rollout in store.rollouts() if rollout.phase == "evaluate"}
    assert splits == {(runs[0]["id"], "val"), (runs[1]["id"], "train")}
    assert runs[0]["id"].partition("-")[0] != runs[1]["id"].partition("-")[0]


def test_judge_verdicts_are_listed_separately_and_not_rated(tmp_path: Path) -> None:
    with Store() as store:
        for name, source, split in (("a", "program", "train"), ("b", "judge", "train"), ("c", "program", "gate")):
            store.put_rollout(
                Rollout(
                    id=name * 32, run_id="r", source=source, status="done", program=source, split=split,
                    inputs={"question": name},
                )
            )  # fmt: skip
    header, row = invoked("traces", "list", "--split", "train").splitlines()
    assert header.split() == [
        "id", "time", "score", "status", "program", "source", "phase", "split", "failure", "first", "input"
    ]  # fmt: skip
    assert row.startswith("a" * 16)
    (verdict,) = json.loads(invoked("traces", "list", "--source", "judge", "--json"))["rollouts"]
    assert verdict["id"] == "b" * 32
    assert invoked("traces", "rate", "aaaa", "0.5") == "1 rollout rated\n"
    for name, reason in (("bbbb", "is a verdict of a judge"), ("cccc", "is of the sealed split gate")):
        refused = CliRunner().invoke(group, ["traces", "rate", name, "0.5"])
        assert isinstance(refused.exception, ConfigError)
        assert reason in str(refused.exception)


def test_stats_name_units_and_count_rollouts_by_status(tmp_path: Path) -> None:
    with Store() as store:
        for n, status in enumerate(("done", "error", "error")):
            score = 1 / 3 if status == "done" else None
            store.put_rollout(
                Rollout(
                    id=str(n) * 32,
                    run_id="r",
                    status=status,
                    program="p",
                    split="val",
                    score=score,
                    inputs={"question": "a"},
                )
            )
    counts = dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in invoked("traces", "stats").splitlines())
    assert (counts["rollouts"], counts["by status"], counts["by split"], counts["scored"]) == (
        "3",
        "done 1, error 2",
        "val 3",
        "1, mean score 0.333",
    )
    assert (counts["failed"], counts["unrecorded"], counts["cost"]) == ("0", "0 LM calls", "$0")
    assert counts["prompt tokens"] == "0 (calls from the cache included)"
    assert json.loads(invoked("traces", "stats", "--run", "r", "--json"))["statuses"] == {"done": 1, "error": 2}


def test_compare_pairs_two_programs_by_task_and_lists_runs_and_rollouts(tmp_path: Path) -> None:
    more = ["--split", "val", "--report", "c.html", "--json"]
    data = json.loads(invoked("compare", "p.py:half", "p.py:whole", *project(tmp_path), *more))
    page = (tmp_path / "c.html").read_text()
    assert "<h1>Comparison of p.py:half and p.py:whole</h1>" in page
    assert "+0.750 on 4 tasks, too few for an interval" in page
    assert "right 0 → 1" in page
    assert (data["a"]["score"], data["b"]["score"]) == (0.25, 1.0)
    assert data["gain"]["mean"] == 0.75
    assert sorted((task["a"], task["b"]) for task in data["tasks"]) == [(0.0, 1.0)] * 3 + [(1.0, 1.0)]
    runs = json.loads(invoked("runs", "list", "--json"))["runs"]
    assert [run["program"] for run in runs] == ["p.py:whole", "p.py:half"]
    assert len(invoked("runs", "list").splitlines()) == 2
    detail = json.loads(invoked("runs", "show", runs[1]["id"][:8], "--json"))
    assert [part["n"] for part in detail["rollouts"] if part["phase"] == "evaluate"] == [4]
    assert len(invoked("traces", "list", "--phase", "evaluate").splitlines()) == 1 + 8
    for filters, count in (
        (["--program", "p.py:half", "--max-score", "0.5"], 3),
        (["--min-score", "0.5", "--status", "done"], 5),
        (["--since", "1h", "--split", "val"], 8),
        (["--since", "2999-01-01"], 0),
        (["--failure", "parse"], 0),
    ):
        rollouts = json.loads(invoked("traces", "list", "--phase", "evaluate", *filters, "--json"))["rollouts"]
        assert len(rollouts) == count, filters
    wrong = CliRunner().invoke(group, ["traces", "list", "--since", "yesterday"]).exception
    assert isinstance(wrong, ConfigError)  # exit code 2 in `main`


def test_empty_lists_name_the_filters_and_the_known_programs(tmp_path: Path) -> None:
    invoked("evaluate", "p.py:half", *project(tmp_path), "--report", "e.html")
    page = (tmp_path / "e.html").read_text()
    assert re.search(r"<dt>Score, 95 % interval</dt><dd><bdi>0\.250 \[", page)
    assert page.index("right 0.00") < page.index("right 1.00")
    refused = CliRunner().invoke(group, ["evaluate", "p.py:half", *project(tmp_path), "--report", "no/such/e.html"])
    assert isinstance(refused.exception, ConfigError)
    assert (
        len(invoked("traces", "list", "--phase", "evaluate", "--program", "HALF").splitlines()) == 1 + 4
    )  # with the header
    none = CliRunner().invoke(group, ["traces", "list", "--program", "half", "--phase", "gate", "--min-score", "0.5"])
    assert (none.exit_code, none.stdout) == (0, "")
    filters = "program half, phase gate, min score 0.5"
    assert (
        none.stderr
        == f"no rollout matches the filters: {filters} (verdicts of judges are listed with --source judge)\n"
    )
    unknown = CliRunner().invoke(group, ["traces", "list", "--program", "triage"])
    assert isinstance(unknown.exception, ConfigError)
    assert "p.py:half" in str(unknown.exception)


def test_evaluate_run_shows_its_settings_and_no_verdicts_as_tasks(tmp_path: Path) -> None:
    invoked("evaluate", "p.py:half", *project(tmp_path))
    with Store() as store:
        run_id = show_run(store, "")["id"]
        store.put_rollout(Rollout(run_id=run_id, phase="evaluate", source="judge", status="done"))
    lines = invoked("runs", "show", run_id).splitlines()
    assert not [
        line
        for line in lines
        if line.strip().startswith(("optimizer", "demos", "threshold", "difference", "early_stop"))
    ]
    assert "  preflight: yes" in lines
    assert "  task timeout: 600" in lines
    assert "  evaluate: 1 done (verdicts of judges)" in lines
    assert "  evaluate: 4 done, mean score 0.250" in lines


@pytest.mark.parametrize("source", ["file", "stdin"])
def test_run_continues_after_a_failed_line(source: str, tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("def inverse(x):\n    return 1 / x\n")
    text = '{"x": 4}\n\n{"x": 0}\nnot json\n[1]\n{"y": 1}\n{"inputs": {"x": 2}}\n'
    (tmp_path / "rows.jsonl").write_text(text)
    arguments = [
        "run",
        "p.py:inverse",
        "--file",
        "rows.jsonl" if source == "file" else "-",
        "--model",
        "openai/none",
        "--api-base",
        "http://localhost:9",
    ]
    done = CliRunner().invoke(group, arguments, input=text if source == "stdin" else None)
    assert done.exit_code == 1
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert (rows[0], rows[5]) == ({"answer": 0.25}, {"answer": 0.5})
    assert [row["line"] for row in rows[1:5]] == [3, 4, 5, 6]
    assert "ZeroDivisionError" in rows[1]["error"]
    assert "no column for the program's input x" in rows[4]["error"]
    done = CliRunner().invoke(group, [*arguments, "--out", "out.jsonl"], input=text if source == "stdin" else None)
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 6
    assert assay_command("run", "p.py:inverse").code == 2


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("LoopStopped('the model repeated itself')", "the model gave no answer: the model repeated itself"),
        (
            "AdapterParseError('Chat', dspy.Signature('x -> y'), 'I am a cat.')",
            "the answer could not be parsed: 'I am a cat.'",
        ),
    ],
)
def test_an_answer_that_cannot_be_used_is_an_error_in_words(error: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text(
        "import dspy\nfrom assay.errors import LoopStopped\nfrom dspy.utils.exceptions import AdapterParseError\n\n"
        f"class P(dspy.Module):\n    def forward(self, x):\n        raise {error}\n"
    )
    done = CliRunner().invoke(group, ["run", "p.py:P", "x=1", "--model", "openai/none", "--api-base", "http://[::1]:9"])
    assert isinstance(done.exception, ModelError), done.exception
    assert str(done.exception) == message


def test_a_file_without_rows_or_without_an_input_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("def inverse(x):\n    open('ran', 'w').close()\n    return 1 / float(x)\n")
    run = ["run", "p.py:inverse", "--model", "openai/none", "--api-base", "http://localhost:9"]
    for name, text in (("rows.csv", "value,note\n4,a\n2,b\n"), ("rows.jsonl", '{"value": 4, "note": "a"}\nnot json\n')):
        (tmp_path / name).write_text(text)
        done = CliRunner().invoke(group, [*run, "--file", name, "--out", "out.jsonl"])
        assert isinstance(done.exception, DataError)
        assert "no column for the program's input x; the columns are note, value" in str(done.exception)
        assert "--rename COLUMN=NAME" in done.exception.text(done.exception.names)
        done = CliRunner().invoke(group, [*run, "--file", name, "--rename", "vale=x"])
        assert "there is no column 'vale' to rename; the rows have ['note', 'value']" in str(done.exception)
    (tmp_path / "rows.csv").write_text("x,note\n")
    assert "rows.csv has no rows" in str(CliRunner().invoke(group, [*run, "--file", "rows.csv"]).exception)
    assert not (tmp_path / "ran").exists()
    (tmp_path / "rows.csv").write_text("id,value\nT7,4\n")
    done = CliRunner().invoke(group, [*run, "--file", "rows.csv", "--rename", "value=x"])
    assert json.loads(done.stdout) == {"id": "T7", "answer": 0.25}


def test_run_reads_tables_and_ignores_other_columns(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("def inverse(x):\n    return 1 / float(x)\n")
    (tmp_path / "rows.csv").write_text("x,answer,note\n4,0.25,a label\n0,,\n")
    pq.write_table(pa.table({"value": [2.0], "answer": ["0.5"]}), tmp_path / "rows.parquet")
    run = ["run", "p.py:inverse", "--model", "openai/none", "--api-base", "http://localhost:9"]
    done = CliRunner().invoke(group, [*run, "--file", "rows.csv"])
    good, bad = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.exit_code, good, bad["line"]) == (1, {"answer": 0.25}, 3)
    assert "ZeroDivisionError" in bad["error"]
    done = CliRunner().invoke(group, [*run, "--file", "rows.parquet", "--rename", "value=x"])
    assert [json.loads(line) for line in done.stdout.splitlines()] == [{"answer": 0.5}]
    (tmp_path / "rows.json.gz").write_bytes(gzip.compress(b'[{"x": 4},\n {"x": 0}, {"x": 2}]'))
    done = CliRunner().invoke(group, [*run, "--file", "rows.json.gz"])
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert (rows[0], rows[1]["line"], rows[2]) == ({"answer": 0.25}, 2, {"answer": 0.5})
    (tmp_path / "rows.txt").write_text("4\n")
    done = CliRunner().invoke(group, [*run, "--file", "rows.txt"])
    assert isinstance(done.exception, DataError)
    assert "cannot tell what 'rows.txt' is" in str(done.exception)
    assert done.stdout == ""


def test_a_fine_tuning_writes_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(source: Any, name: str, config: SFTSettings, **_: Any) -> SFTReport:
        return SFTReport(
            name, tmp_path, config, rows=8, held_out_rows=2, tasks=5, left_out=Counter(), steps=2,
            loss={1: 2.0, 2: 1.0}, held_out_loss={0: 2.0, 2: 1.5}, best_step=2,
        )  # fmt: skip

    monkeypatch.setattr("assay.optimizers.finetuning.sft.train_sft", trained)
    messages = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]
    Path("rows.jsonl").write_text(json.dumps({"messages": messages}))
    assert "mean loss" in invoked("train", "sft", "rows.jsonl", "--name", "warm", "--report", "sft.html")
    page = Path("sft.html").read_text()
    assert "<title>sft: warm – assay</title>" in page
    assert page.count("<polyline") == 2


@pytest.mark.parametrize("form", [["--json"], []])
def test_an_answer_that_json_cannot_hold_is_a_failure(
    form: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.py").write_text("def half(question):\n    return {'answer': object(), 'other': 4}\n")
    run = ["run", "p.py:half", "question=a", "--model", "openai/none", "--api-base", "http://localhost:9", *form]
    done = CliRunner().invoke(group, run)
    assert isinstance(done.exception, ProgramFailed)
    assert "4" in done.stdout
