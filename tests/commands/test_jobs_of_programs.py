"""What jobs make of the programs, rubrics, rows and settings that they are given, and what they say of it."""

import json
import math
import multiprocessing
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import assay
from assay.errors import ConfigError, DataError, ProgramError, RubricError
from assay.testing import scripted_lm
from assay.traces import Store
from assay.traces.store.tables import test_openings
from rigs.command_line import assay_command
from rigs.projects import PROGRAM, Said, write_project, write_rows
from rigs.serving import refusing

ROWS = [{"question": f"Does page {n} crash?", "answer": "bug" if n % 2 else "sales"} for n in range(60)]
SOURCE = PROGRAM + "        return found\n"


@pytest.fixture(autouse=True)
def place(own_folder: Path) -> Path:
    write_project()
    write_rows("data.jsonl", ROWS)
    return own_folder


def lm() -> Any:
    return scripted_lm(lambda request: json.dumps({"answer": "bug"}))


def evaluate(program: str = "mine.py", **options: Any) -> Any:
    return assay.evaluate(program, **{"rubric": "r.yaml", "data": ROWS, "lm": lm(), **options})


def tune(**options: Any) -> dict[str, Any]:
    keywords: dict[str, Any] = {"rubric": "r.yaml", "data": ROWS, "lm": lm(), "prompt_format": "json", **options}
    return assay.tune("mine.py", **keywords).to_dict()


@pytest.mark.slow
def test_a_model_that_cannot_answer_is_named_with_the_way_out() -> None:
    with refusing() as address:
        for command, model, message in (
            ("evaluate", "openai/down", r"127\.0\.0\.1:\d+: .*: no server listens there\. Start it, .* \(--api-base\)"),
            ("run", "ollama/down", r"127\.0\.0\.1:\d+: .*: no server listens there\. Start it \(ollama serve\), or"),
            ("evaluate", "Qwen/Qwen3-4B", r"names no provider: write openai/Qwen/Qwen3-4B for an .* at --api-base"),
            ("run", "opnai/m", r"names no provider: .*Did you mean 'openai/m'\?"),
        ):
            more = ["question=x"] if command == "run" else ["--rubric", "r.yaml", "--data", "data.jsonl"]
            done = assay_command(command, "mine.py", *more, "--model", model, "--api-base", address)
            text = " ".join(done.stderr.split())
            assert re.search(message, text), text
            assert "litellm." not in text


def test_data_without_rows_or_without_an_input_is_refused_and_the_command_line_names_flags() -> None:
    with pytest.raises(DataError, match=r"^data is empty: pass at least one row"):
        evaluate(data=[])
    rows = [{"mail": row["question"], "answer": row["answer"]} for row in ROWS]
    with pytest.raises(DataError, match=r"Rename columns: rename=\{'COLUMN': 'NAME'\}") as caught:
        evaluate(data=rows)
    assert "--" not in str(caught.value)
    write_rows("data.jsonl", rows)
    ended = assay_command("evaluate", "mine.py", "--rubric", "r.yaml", "--data", "data.jsonl")
    assert ended.code == 2
    assert "Rename columns: --rename COLUMN=NAME" in ended.stderr
    assert "rename=" not in ended.stderr


TWO = "\n\nclass Agent:\n    def execute(self, task): ...\n    def set_parameters(self, given): ...\n"
PAIR = "import dspy\n\na, b = dspy.Predict('question -> answer'), dspy.Predict('question -> answer')\n"


def test_a_file_with_one_program_needs_no_name_and_others_are_named_with_what_was_meant() -> None:
    report = assay.compile("mine.py", rubric="r.yaml", data=ROWS, lm=lm(), optimizer="labeled", max_search_calls=30)
    assert json.loads((report.artifact / "manifest.json").read_text())["program"] == "mine.py:Mine"
    Path("base.py").write_text(SOURCE + "\n\nclass Better(Mine):\n    pass\n")
    assert len(evaluate("base.py").evaluation) > 0  # a base class is not a candidate
    Path("single.py").write_text('import dspy\n\nagent = dspy.Predict("question -> answer")\n')
    assert evaluate("single.py").to_dict()["result"]["failed"] == 0
    Path("two.py").write_text(SOURCE + TWO)
    Path("pair.py").write_text(PAIR)
    Path("none.py").write_text("x = 1\n")
    for folder in ("made/mine-auto", ".assay/artifacts/other-auto", "compiled"):
        Path(folder).mkdir(parents=True)
    for program, message in (
        ("two.py", r"two\.py has several programs; pass one of two\.py:Mine, two\.py:Agent"),
        ("pair.py", r"pair\.py:a, pair\.py:b"),
        ("none.py", r"none\.py has no class or instance"),
        ("gone.py", r"no such file: gone\.py"),
        ("made/mine-autos", r"no such file or folder\. Did you mean 'made/mine-auto'"),
        ("made/mine-auto", r"'made/mine-auto' is not an artifact: it has no manifest\.json"),
        ("other-auto", r"unknown program .*Did you mean '\.assay/artifacts/other-auto'"),
        ("complied", r"Did you mean 'compiled'"),
    ):
        with pytest.raises(ProgramError, match=message):
            evaluate(program)
    Path("metrics.py").write_text("def right(example, prediction, trace=None):\n    return True\n")
    for rubric, message in (("metrics.py", r"metrics\.py:NAME"), ("gone.py", r"no such file: gone\.py")):
        with pytest.raises(RubricError, match=message):
            evaluate(rubric=rubric)


def compare(a: str, b: str, **options: Any) -> Any:
    return assay.compare(a, b, **{"rubric": "r.yaml", "data": ROWS, "lm": lm(), **options})


def test_comparing_a_program_with_itself_or_with_none_is_refused_before_any_call() -> None:
    model = lm()
    for other, error, message in (
        ("mine.py", ConfigError, r"a and b are both mine\.py, with the same model: there is nothing to compare"),
        ("mine.py:Gone", ProgramError, r"mine\.py has no 'Gone'"),
    ):
        with pytest.raises(error, match=message):
            compare("mine.py", other, lm=model)
    assert not model.history


def test_a_comparison_stays_below_the_caps_of_both_sides_and_resumes_with_higher_ones() -> None:
    Path("p.py").write_text(PAIR)
    model = lm()
    rows = [{"question": f"What is {n} + 1?", "answer": "1", "split": "val"} for n in range(30)]
    job: dict[str, Any] = {
        "data": rows, "lm": model, "preflight": False, "threads": 1, "prompt_format": "json", "split": "val",
        "cache": False,
    }  # fmt: skip
    stopped = compare("p.py:a", "p.py:b", max_calls=21, **job).to_dict()
    assert stopped["stopped"] is not None
    assert stopped["calls"] == model.scripted.calls == 21
    assert min(stopped["a"]["n"], stopped["b"]["n"]) > 3
    assert stopped["unrecorded"] == 0
    whole = compare("p.py:a", "p.py:b", resume=True, **job).to_dict()
    assert whole["stopped"] is None
    assert whole["calls"] == model.scripted.calls == 60


@pytest.mark.slow
def test_a_comparison_that_was_killed_stays_below_its_caps_and_counts_one_opening_of_the_test() -> None:
    """Four calls are in flight when the process is killed."""
    Path("p.py").write_text(PAIR)
    sent = Path("sent")
    rows = [{"question": f"What is {n} + 1?", "answer": "1", "split": "test"} for n in range(40)]
    job: dict[str, Any] = {
        "data": rows, "preflight": False, "threads": 4, "prompt_format": "json", "split": "test", "max_calls": 40,
    }  # fmt: skip

    def answer(last: float) -> Callable[[Any], str]:
        def answered(request: Any) -> str:
            with sent.open("ab", buffering=0) as file:
                file.write(b".")
                place = file.tell()  # of this call, whichever others were sent meanwhile
            while place > last - 4:
                time.sleep(0.05)
                if sent.stat().st_size >= last:
                    os._exit(9)
            return json.dumps({"answer": "bug"})

        return answered

    def killed() -> None:
        compare("p.py:a", "p.py:b", lm=scripted_lm(answer(12)), **job)

    process = multiprocessing.get_context("fork").Process(target=killed)
    process.start()
    process.join()
    assert (process.exitcode, sent.stat().st_size) == (9, 12)
    report = compare("p.py:a", "p.py:b", lm=scripted_lm(answer(math.inf)), resume=True, **job).to_dict()
    assert sent.stat().st_size == 40
    assert report["calls"] + report["unrecorded"] == 40
    with Store() as store, store.engine.connect() as connection:
        assert connection.execute(sa.select(sa.func.count()).select_from(test_openings)).scalar() == 1


def test_an_unchanged_program_is_compared_with_nothing_and_the_test_stays_sealed() -> None:
    report = assay.compile("mine.py", rubric="r.yaml", data=ROWS, lm=lm(), optimizer="labeled")
    assert report.winner == "baseline"
    output = "\n".join(map(str, report.lines()))
    assert "The sealed test was not opened" in output
    assert "compiled" not in output.partition("winner:")[0]
    assert "gain:" not in output
    assert "The sealed test was not opened" in (report.artifact / "report.md").read_text()


def test_task_types_are_named_in_tables() -> None:
    Path("fixed.py").write_text("def answer(question):\n    return {'answer': 'bug'}\n")
    command = ["evaluate", "fixed.py:answer", "--rubric", "r.yaml", "--data", "data.jsonl"]
    assert "type" not in assay_command(*command).stdout
    write_rows("data.jsonl", [{**row, **({"task_type": "hard"} if n % 3 else {})} for n, row in enumerate(ROWS)])
    output = assay_command(*command).stdout
    assert "tasks of type hard" in output
    assert "tasks without a type" in output


@pytest.mark.slow
def test_the_first_trial_has_the_defaults_and_stays_the_best_of_level_ones(place: Path) -> None:
    data = tune(trials=3, store=place / "a.db")
    assert data["best"] == data["history"][0]["parameters"] == {"temperature": 0.7}
    assert data["level_with_best"] == [1, 2]
    assert data["gate"] is None  # the default of the first trial and the one that gate and test compare with are equal
    assert "no point was better on val than the default; it stays" in data["notes"]
    assert any("set no temperature: the default is 0.7" in note for note in data["notes"])
    page = (Path(data["artifact"]) / "report.md").read_text()
    assert "{" not in page
    assert "The sealed test was not opened" in page
    with assay.Store(place / "a.db") as store:
        assert not [rollout for rollout in store.rollouts() if rollout.split == "test"]
    for temperature, first in ((0.3, 0.3), (0.0, 0.1)):
        model = lm()
        model.kwargs["temperature"] = temperature
        data = tune(trials=1, lm=model, store=place / str(first) / "a.db")
        assert data["history"][0]["parameters"] == {"temperature": first}
    note = "the model's temperature 0 is outside 0.1 to 2: the first trial has 0.1"
    assert any(note in other for other in data["notes"])


# -- settings without effect

NO_JUDGE = "no criterion of the rubric 'r' is decided by a judge"
UNUSED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (assay.evaluate, {"judge_model": "openai/x"}, f"judge_model='openai/x' would have no effect: {NO_JUDGE}"),
    (assay.evaluate, {"judge_thinking": 64}, f"judge_thinking=64 would have no effect: {NO_JUDGE}"),
    (assay.evaluate, {"judge_thinking": 0}, f"judge_thinking='off' would have no effect: {NO_JUDGE}"),
    (assay.collect, {"n": 1, "judge_thinking": "high"}, "judge_thinking='high' would have no effect"),
    (assay.tune, {"trials": 1, "judge_model": "openai/x"}, "judge_model='openai/x' would have no effect"),
    *(
        (
            assay.compile,
            {"optimizer": name, "reflection_model": "openai/x", "max_calls": 40},
            f"reflection_model='openai/x' would have no effect: optimizer='{name}' writes no instructions",
        )
        for name in ("labeled", "LabeledFewShot")
    ),
]


def test_a_model_of_a_role_that_the_job_does_not_call_is_refused() -> None:
    Path("other.py").write_text(SOURCE)
    for function, options, message in UNUSED:
        with pytest.raises(ConfigError) as refused:
            function("mine.py", rubric="r.yaml", data=ROWS, lm=lm(), preflight=False, **options)
        assert str(refused.value).startswith(message)
    with pytest.raises(ConfigError, match="judge_model='openai/x' would have no effect"):
        compare("mine.py", "other.py", judge_model="openai/x")


@pytest.mark.parametrize(
    ("table", "options", "note"),
    [
        ('[judge]\nmodel = "openai/of-file"', {}, f"`judge_model='openai/of-file'` has no effect: {NO_JUDGE}"),
        ("[judge]\nthinking = 0", {}, f"`judge_thinking='off'` has no effect: {NO_JUDGE}"),
        ("", {"sizes": {"val": 3, "test": 5}}, "`test_size=5` has no effect: only tasks of val are run"),
        ("", {}, ""),
    ],
)
def test_settings_of_the_project_file_without_effect_are_noted_once(
    table: str, options: dict[str, Any], note: str
) -> None:
    Path("assay.toml").write_text(table)
    Path("other.py").write_text(SOURCE)
    said = Said()
    report = evaluate(progress=said, **assay.project_settings("evaluate"), **options)
    assert [line for line in report.notes if "no effect" in line] == ([note] if note else [])
    assert [line[6:] for line in said.lines if "no effect" in line] == ([note] if note else [])
    if table:
        report = compare("mine.py", "other.py", **assay.project_settings("compare"))
        assert sum(note in line for line in report.to_dict()["notes"]) == 1
        assert re.search(r"\(split=gate, a=\d\.\d+ .*, b=\d\.\d+ .*, gain=[+-]?\d\.\d+", repr(report)), repr(report)
