"""What commands print of runs, rollouts and reports, and `assay run` on rows."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from assay.cli import Console
from assay.commands.compile import CompileReport, sides_table
from assay.datasets.rows import NO_ROWS
from assay.reports.markdown import markdown
from assay.support.numbers import calls_text
from assay.traces import Rollout, Store
from assay.traces.store.listing import show_run
from rigs.command_line import Done, assay_command
from rigs.projects import EXACT, write_program, write_rows
from rigs.serving import ChatServer

NO_MODEL = ["--model", "openai/none", "--api-base", "http://localhost:9/v1"]


def invoked(*arguments: str, stdin: str = "", code: int = 0) -> Done:
    done = assay_command(*arguments, stdin=stdin)
    assert done.code == code, done.stderr
    return done


def refused(*arguments: str) -> str:
    done = invoked(*arguments, code=2)
    assert done.stdout == ""
    return " ".join(done.stderr.split())


@pytest.mark.parametrize(("cap", "code"), [("3", 1), ("12", 0)])
def test_the_score_of_a_part_of_the_tasks_meets_no_threshold(
    cap: str, code: int, own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    write_program()
    write_rows("d.jsonl", [{"question": f"{n}", "answer": "a", "split": "val"} for n in range(12)])
    arguments = ["evaluate", "mine.py:Mine", "--rubric", "exact", "--data", "d.jsonl", "--no-preflight", "--json"]
    with ChatServer(lambda body: "[[ ## answer ## ]]\na\n\n[[ ## completed ## ]]").serving() as server:
        arguments += ["--model", "openai/m", "--api-base", server.url, "--max-calls", cap]
        done = invoked(*arguments, "--fail-under", "0.5", code=code)
        invoked(*arguments)
    assert done.report["result"]["score"] == 1.0


# -- the page of a compile

SIDE = {
    "score": 0.123456789, "n": 12, "criteria": {"right": 1 / 3}, "task_types": {"a|b": 0.1, "b": None}, "failed": 1,
    "unscored": 0, "calls_per_task": 2.0, "tokens_per_task": 33.333333, "cost_usd": None, "undecided": {},
    "why_failed": "parse",
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


def test_the_page_of_a_compile_is_rounded_has_settings_as_code_and_names_as_text() -> None:
    gain = {"mean": 0.3333333, "low": -0.1, "high": 0.7, "n": 12}
    hostile = {**SIDE, "score": 0.5, "task_types": {**SIDE["task_types"], "<img src=x>\u202e": 0.25}}
    report = compiled(
        test={"baseline": SIDE, "compiled": hostile, "gain": gain}, gate=gain,
        notes=["something", "raise `max_search_calls=9`"], stopped="`max_calls=5` is too low",
    )  # fmt: skip
    text = markdown(report, title="qa.py:QA", about="By `auto`.")
    assert text.startswith("# qa.py:QA\n\nBy `auto`.\n")
    for part in (
        "| score | 0.123 | 0.500 |",
        "| right | 33 % | 33 % |",
        "| tasks of type b | – | – |",
        r"| tasks of type a\|b | 0.100 | 0.100 |",
        "| tasks of type &lt;img src=x>[U+202E] |",
        "+0.333, 95 % [-0.100, +0.700], 12 tasks",
        "LM calls: 1,234",
        "- something\n",
        "- raise `max_search_calls=9`\n",
        "stopped early: `max_calls=5` is too low; raise the cap and add `resume=True`",
    ):
        assert part in text
    assert "3333" not in text


@pytest.mark.parametrize(("costs", "cells"), [((0.0, None), ("unknown", "unknown")), ((0.0, 0.5), ("$0", "$0.5000"))])
def test_costs_are_compared_if_both_are_known(costs: tuple[float, float | None], cells: tuple[str, str]) -> None:
    table = sides_table(*({**SIDE, "cost_usd": cost} for cost in costs))
    assert next(tuple(row[1:]) for row in table.rows if row[0] == "cost") == cells


def test_calls_and_progress_are_stated_in_words(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert calls_text(3, 1234) == "3 (1,234 more from the cache)"
    monkeypatch.setattr("assay.cli.PROGRESS_LINE_EVERY_S", 0)
    with Console().bar("tasks", 3) as advance:
        advance(1), advance(1), advance(1)
    assert capsys.readouterr().err.splitlines() == ["tasks (3) …", "tasks: 1 of 3", "tasks: 2 of 3"]


# -- lists of runs and rollouts


@pytest.fixture
def flags(own_folder: Path) -> list[str]:
    """Flags of programs of which `half` is right for the task `a` and `whole` for all four."""
    Path("p.py").write_text("def half(question):\n    return question\ndef whole(question):\n    return 'a'\n")
    write_rows("d.jsonl", [{"question": q, "answer": "a", "split": "val"} for q in "abcd"])
    Path("r.yaml").write_text(EXACT)
    return ["--rubric", "r.yaml", "--data", "d.jsonl", *NO_MODEL]


def evaluated(flags: list[str], *more: str) -> Done:
    return invoked("evaluate", "p.py:half", *flags, *more)


def listed(*filters: str) -> list[dict[str, Any]]:
    return list(invoked("traces", "list", "--phase", "evaluate", *filters, "--json").report["rollouts"])


def runs() -> list[dict[str, Any]]:
    return list(invoked("runs", "list", "--json").report["runs"])


def test_resume_continues_a_run_of_the_same_split(flags: list[str]) -> None:
    rows = [{"question": q, "answer": "a", "split": "train"} for q in "axyz"]
    write_rows("d.jsonl", [*rows, *({"question": q, "answer": "a", "split": "val"} for q in "abcd")])
    for split in ("train", "val"):
        evaluated(flags, "--split", split)
    later, earlier = runs()
    with Store() as store:  # the later one is the one of val, which did not end
        store.put_run(later["id"], kind="evaluate", config=later, status="failed", started_at=1.0)
    evaluated(flags, "--split", "train", "--resume")
    assert {run["id"]: run["status"] for run in runs()} == {later["id"]: "failed", earlier["id"]: "done"}
    with Store() as store:
        splits = {(rollout.run_id, rollout.split) for rollout in store.rollouts() if rollout.phase == "evaluate"}
    assert splits == {(later["id"], "val"), (earlier["id"], "train")}
    assert later["id"].partition("-")[0] != earlier["id"].partition("-")[0]


def test_judge_verdicts_are_listed_separately_and_not_rated(own_folder: Path) -> None:
    with Store() as store:
        for name, source, split in (("a", "program", "train"), ("b", "judge", "train"), ("c", "program", "gate")):
            fields = {"source": source, "program": source, "split": split, "inputs": {"question": name}}
            store.put_rollout(Rollout(id=name * 32, run_id="r", status="done", **fields))
    header, row = invoked("traces", "list", "--split", "train").stdout.splitlines()
    assert header.split() == [
        "id", "time", "score", "status", "program", "source", "phase", "split", "failure", "first", "input"
    ]  # fmt: skip
    assert row.startswith("a" * 16)
    (verdict,) = invoked("traces", "list", "--source", "judge", "--json").report["rollouts"]
    assert verdict["id"] == "b" * 32
    assert invoked("traces", "rate", "aaaa", "0.5").stdout == "1 rollout rated\n"
    assert "is a verdict of a judge" in refused("traces", "rate", "bbbb", "0.5")
    assert "is of the sealed split gate" in refused("traces", "rate", "cccc", "0.5")


def test_stats_name_units_and_count_rollouts_by_status(own_folder: Path) -> None:
    with Store() as store:
        for n, status in enumerate(("done", "error", "error")):
            fields: dict[str, Any] = {"run_id": "r", "program": "p", "split": "val", "inputs": {"question": "a"}}
            store.put_rollout(Rollout(status=status, score=None if n else 1 / 3, **fields))
    lines = invoked("traces", "stats").stdout.splitlines()
    counts = dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in lines)
    expected = {
        "rollouts": "3", "by status": "done 1, error 2", "by split": "val 3", "scored": "1, mean score 0.333",
        "failed": "0", "unrecorded": "0 LM calls", "cost": "$0", "prompt tokens": "0 (calls from the cache included)",
    }  # fmt: skip
    assert {name: counts[name] for name in expected} == expected


def test_compare_pairs_two_programs_by_task_and_lists_runs_and_rollouts(flags: list[str]) -> None:
    data = invoked("compare", "p.py:half", "p.py:whole", *flags, "--split=val", "--report=c.html", "--json").report
    page = Path("c.html").read_text()
    assert "<h1>Comparison of p.py:half and p.py:whole</h1>" in page
    assert "+0.750 on 4 tasks, too few for an interval" in page
    assert "right 0 → 1" in page
    assert (data["a"]["score"], data["b"]["score"], data["gain"]["mean"]) == (0.25, 1.0, 0.75)
    assert sorted((task["a"], task["b"]) for task in data["tasks"]) == [(0.0, 1.0)] * 3 + [(1.0, 1.0)]
    whole, half = runs()
    assert (whole["program"], half["program"]) == ("p.py:whole", "p.py:half")
    assert len(invoked("runs", "list").stdout.splitlines()) == 2
    detail = invoked("runs", "show", half["id"][:8], "--json").report
    assert [part["n"] for part in detail["rollouts"] if part["phase"] == "evaluate"] == [4]
    for filters, count in (
        (["--program", "p.py:half", "--max-score", "0.5"], 3),
        (["--min-score", "0.5", "--status", "done"], 5),
        (["--since", "1h", "--split", "val"], 8),
        (["--since", "2999-01-01"], 0),
        (["--failure", "parse"], 0),
    ):
        assert len(listed(*filters)) == count, filters


def test_empty_lists_name_the_filters_and_the_known_programs(flags: list[str]) -> None:
    evaluated(flags, "--report", "e.html")
    page = Path("e.html").read_text()
    assert re.search(r"<bdi>score</bdi></th><td class=\"number\"><bdi>0\.250  95 % \[", page)
    assert page.index("right 0.00") < page.index("right 1.00")
    assert len(listed("--program", "HALF")) == 4
    none = invoked("traces", "list", "--program", "half", "--phase", "gate", "--min-score", "0.5")
    assert none.stdout == ""
    filters = "program half, phase gate, min score 0.5"
    assert f"no rollout matches the filters: {filters} (verdicts of judges are listed with --source judge)" in (
        none.stderr
    )
    assert "p.py:half" in refused("traces", "list", "--program", "triage")


def test_evaluate_run_shows_its_settings_and_no_verdicts_as_tasks(flags: list[str]) -> None:
    evaluated(flags)
    with Store() as store:
        run_id = show_run(store, "")["id"]
        store.put_rollout(Rollout(run_id=run_id, phase="evaluate", source="judge", status="done"))
    lines = invoked("runs", "show", run_id).stdout.splitlines()
    others = ("optimizer", "demos", "threshold", "difference", "early_stop")
    assert not [line for line in lines if line.strip().startswith(others)]
    assert {
        "  preflight: yes",
        "  task timeout: 600",
        "  evaluate: 1 done (verdicts of judges)",
        "  evaluate: 4 done, mean score 0.250",
    } <= {*lines}


# -- predictions

RUN = ["run", "p.py:inverse", *NO_MODEL]


@pytest.fixture
def inverse(own_folder: Path) -> None:
    Path("p.py").write_text("def inverse(x):\n    open('ran', 'w').close()\n    return 1 / float(x)\n")


def json_lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.usefixtures("inverse")
def test_run_continues_after_a_failed_line() -> None:
    text = '{"x": 4}\n\n{"x": 0}\nnot json\n[1]\n{"y": 1}\n{"inputs": {"x": 2}}\n'
    Path("rows.jsonl").write_text(text)
    for place, stdin in (("rows.jsonl", ""), ("-", text)):
        rows = json_lines(invoked(*RUN, "--file", place, stdin=stdin, code=1).stdout)
        assert (rows[0], rows[5]) == ({"answer": 0.25}, {"answer": 0.5})
        assert [row["line"] for row in rows[1:5]] == [3, 4, 5, 6]
        assert "ZeroDivisionError" in rows[1]["error"]
        assert "no column for the program's input x" in rows[4]["error"]
        out = f"{len(stdin)}.jsonl"
        invoked(*RUN, "--file", place, "--out", out, stdin=stdin, code=1)
        assert len(Path(out).read_text().splitlines()) == 6


@pytest.mark.usefixtures("inverse")
def test_a_file_without_rows_or_without_an_input_is_refused_before_anything_runs() -> None:
    for name, text in (("rows.csv", "value,note\n4,a\n2,b\n"), ("rows.jsonl", '{"value": 4, "note": "a"}\nnot json\n')):
        Path(name).write_text(text)
        said = refused(*RUN, "--file", name, "--out", "out.jsonl")
        assert "no column for the program's input x; the columns are note, value" in said
        assert "--rename COLUMN=NAME" in said
        said = refused(*RUN, "--file", name, "--rename", "vale=x")
        assert "there is no column 'vale' to rename; the rows have ['note', 'value']" in said
    for name, text, message in (
        ("none.csv", "x,note\n", "none.csv has no rows"),
        ("rows.txt", "4\n", "cannot tell what 'rows.txt' is"),
    ):
        Path(name).write_text(text)
        assert message in refused(*RUN, "--file", name)
    assert not Path("ran").exists()


@pytest.mark.usefixtures("inverse")
def test_run_reads_tables_and_ignores_other_columns() -> None:
    Path("rows.csv").write_text("x,answer,note\n4,0.25,a label\n0,,\n")
    Path("ids.csv").write_text("id,value\nT7,4\n")
    pq.write_table(pa.table({"value": [2.0], "answer": ["0.5"]}), "rows.parquet")
    Path("rows.json.gz").write_bytes(gzip.compress(b'[{"x": 4},\n {"x": 0}, {"x": 2}]'))
    good, bad = json_lines(invoked(*RUN, "--file", "rows.csv", code=1).stdout)
    assert (good, bad["line"]) == ({"answer": 0.25}, 3)
    assert "ZeroDivisionError" in bad["error"]
    renamed = ["--rename", "value=x"]
    assert json_lines(invoked(*RUN, "--file", "ids.csv", *renamed).stdout) == [{"id": "T7", "answer": 0.25}]
    assert json_lines(invoked(*RUN, "--file", "rows.parquet", *renamed).stdout) == [{"answer": 0.5}]
    rows = json_lines(invoked(*RUN, "--file", "rows.json.gz", code=1).stdout)
    assert (rows[0], rows[1]["line"], rows[2]) == ({"answer": 0.25}, 2, {"answer": 0.5})


UNUSABLE = {
    "LoopStopped('the model repeated itself')": "the model gave no answer: the model repeated itself",
    "AdapterParseError('Chat', dspy.Signature('x -> y'), 'I am a cat.')": (
        "the answer could not be parsed: 'I am a cat.'"
    ),
}


def test_an_answer_that_cannot_be_used_or_written_is_an_error_in_words(own_folder: Path) -> None:
    for number, (error, message) in enumerate(UNUSABLE.items()):
        Path(f"p{number}.py").write_text(
            "import dspy\nfrom assay.errors import LoopStopped\nfrom dspy.utils.exceptions import AdapterParseError\n\n"
            f"class P(dspy.Module):\n    def forward(self, x):\n        raise {error}\n"
        )
        done = invoked("run", f"p{number}.py:P", "x=1", *NO_MODEL, code=1)
        assert message in " ".join(done.stderr.split())
    Path("p.py").write_text("def half(question):\n    return {'answer': object(), 'other': 4}\n")
    for form in ([], ["--json"]):
        assert "4" in invoked("run", "p.py:half", "question=a", *NO_MODEL, *form, code=1).stdout
