"""The pages of runs: list, one run, its commands; and the comparison of two runs."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from compiles import put_compile
from pages import NOW, Browser, browse, got, links_in, put_report, read, rollout_of_sums

from assay.commands.judge_compile import JudgeReport
from assay.models.unrecorded import Unrecorded
from assay.traces import Store, Verdict
from assay.web import runs

CONFIG = {"program": "sums.py:Sums", "model": "openai/m", "rubric": "math_qa", "data": "d.jsonl", "seed": 3}


def put_run(store: Store, run_id: str, *, status: str = "done", kind: str = "evaluate", at: float = NOW) -> None:
    store.put_run(run_id, kind=kind, config=CONFIG, status=status, started_at=at)


def test_an_empty_store_and_an_unknown_run_are_said(store: Store) -> None:
    assert "The store holds no runs yet." in read(store, "/runs")
    assert "Name two runs" in read(store, "/compare")
    ((status, text),) = got(store, "/runs/nowhere")
    assert (status, "no run&#39;s id starts with" in text) == (404, True)


def test_a_failed_run_says_why_with_flags(store: Store) -> None:
    reason = "no <b>answer</b>. `max_calls=90`: lower `val_size`"
    store.put_run("broken", kind="tune", config=CONFIG, status="failed", started_at=NOW, failure=reason)
    store.flush()
    text = read(store, "/runs/broken")
    assert "Failed: <bdi>no &lt;b&gt;answer&lt;/b&gt;. --max-calls 90: lower --val-size</bdi>" in text


def test_a_resumed_run_shows_its_first_start_and_when_it_was_resumed(store: Store) -> None:
    put_run(store, "run-1", status="stopped")
    store.flush()
    put_run(store, "run-1", at=NOW + 7_200)
    store.flush()
    times = re.findall(r'<time datetime="([^"]*)"', read(store, "/runs/run-1"))
    assert times[:2] == ["2025-06-15T15:06:40+00:00", "2025-06-15T17:06:40+00:00"]
    assert re.search("started <time[^·]*· resumed <time[^·]*· took .* from then", read(store, "/runs/run-1"))


def test_the_list_has_the_scores_of_runs(store: Store, tmp_path: Path) -> None:
    put_compile(store, tmp_path, run_id="compiled")
    put_run(store, "evaluated")
    for number, score in enumerate((0.25, 1.0, None)):
        rollout_of_sums(store, 5_000 + number, run_id="evaluated", phase="evaluate", score=score)
    put_run(store, "empty")
    store.flush()
    cells = re.findall(r'data-label="score">([^<]*)</td>', read(store, "/runs", where=tmp_path / "s.db"))
    assert sorted(cells) == ["0.500 → 0.833", "0.625", "–"]


FILTERS = {
    "": ["c", "b", "a"], "?kind=compile": ["b"], "?status=running": ["c"], "?program=SUMS": ["c", "b", "a"],
    "?program=other": [], "?since=2025-06-15": ["c", "b"],
}  # fmt: skip


def test_filters_select_runs(store: Store) -> None:
    put_run(store, "a", at=NOW - 864_000, kind="preflight")
    put_run(store, "b", kind="compile", at=NOW + 1)
    put_run(store, "c", status="running", at=NOW + 2)
    store.flush()
    pages = got(store, *(f"/runs{query}" for query in FILTERS))
    shown = [[link.removeprefix("/runs/") for link in links_in(text, "/runs/")] for _, text in pages]
    assert dict(zip(FILTERS, shown, strict=True)) == FILTERS
    assert "<td>check of train sft</td>" in pages[0][1]  # the check before a fine-tuning


def test_older_runs_are_on_further_pages(store: Store) -> None:
    for number in range(120):
        put_run(store, f"run-{number:03}", at=NOW + number // 2)
    store.flush()

    async def visit(browser: Browser) -> list[str]:
        ids, path = [], "/runs?program=sums"
        while path:
            text = (await browser.get(path))[1]
            ids += [link.removeprefix("/runs/") for link in links_in(text, "/runs/")]
            path = next(iter(re.findall(r'id="older"[^>]*href="([^"]*)"', text)), "").replace("&amp;", "&")
        return ids

    assert browse(store, visit) == [f"run-{number:03}" for number in reversed(range(120))]


def test_a_run_shows_settings_cost_and_phases(store: Store) -> None:
    put_run(store, "run-1")
    rollout_of_sums(store, 1)
    rollout_of_sums(store, 2, score=0.5)
    store.flush()
    text = read(store, "/runs/run-1")
    for part in ("sums.py:Sums", "math_qa", "24 of prompts, 6 of completions", "$0.0020", "0.750"):
        assert part in text
    assert "--resume" not in text


def judge_report(**fields: Any) -> dict[str, Any]:
    """The stored report of a compile of a judge whose test stayed sealed."""
    sides = dict.fromkeys(("baseline", "compiled", "gain", "accuracy_gain"))
    values = {
        "calls": 30, "cached": 0, "repeated_calls": 0, "tokens": 900, "cost_usd": 0.0, "unrecorded": 0,
        "stopped": None, "notes": [], "test_openings": None, "artifact": Path("a"),
        "data": {"near_duplicates": {"count": 0, "examples": []}},
        "unproven": None, "optimizer": "auto", "objective": "kappa", "winner": "bootstrap", "replaces": False,
        "gate": None, "sizes": {}, "ceiling": None, "test": sides, "card": {}, "candidates": [], "search_calls": 20,
        "outcome": None, **fields,
    }  # fmt: skip
    return JudgeReport(**values).to_dict()


def test_a_run_shows_its_result_and_notes(store: Store, tmp_path: Path) -> None:
    put_run(store, "run-1", kind="judge compile")
    store.flush()
    gate = {"mean": 0.125, "low": None, "high": None, "n": 12}
    report = judge_report(notes=["few <tasks>"], stopped="the cap of 9 calls", gate=gate)
    put_report(store, report)
    where = tmp_path / "page.db"
    text = read(store, "/runs/run-1", where=where)
    gained = "gate (12 items): +0.125, no interval (under 20 items)"
    printed = ("winner: bootstrap; LM calls: 30", "note: few &lt;tasks&gt;", "the cap of 9 calls", "<h2>Result</h2>")
    for part in (*printed, gained):
        assert part in text
    assert json.loads(read(store, "/runs/run-1/report", where=where)) == report


def test_an_evaluation_shows_its_scores_and_the_lowest_tasks_first(store: Store) -> None:
    put_run(store, "run-1")
    for number, score in ((1, 1.0), (2, 0.25), (3, None)):
        verdict = Verdict(criterion="right", grade=score or 0.0)
        rollout_of_sums(store, number, score=score, phase="evaluate", verdicts=[verdict], inputs={"q": f"sum {number}"})
    store.flush()
    text = read(store, "/runs/run-1")
    assert "evaluate of <strong><bdi>sums.py:Sums</bdi></strong>" in text
    assert "Score 0.625" in text
    assert "on 3 tasks, 1 of them unscored." in text
    assert "right 0.25" in text
    places = [text.index(f"sum {number}") for number in (3, 2, 1)]
    assert places == sorted(places)
    assert links_in(text, "/rollouts/")[0] == f"/rollouts/{3:032x}"


COUNTED = ("Score 0.500", "Rollouts by phase")


def test_a_large_run_is_scored_and_counted_on_request(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "SCORED", 2)
    monkeypatch.setattr(runs, "COUNTED", 2)
    put_run(store, "run-1")
    for number in (1, 2, 3):
        rollout_of_sums(store, number, score=0.5, phase="evaluate")
    store.flush()
    text = read(store, "/runs/run-1")
    assert [part for part in COUNTED if part in text] == []
    assert "/runs/run-1?count=all" in links_in(text, "/runs/run-1?count")
    asked = read(store, "/runs/run-1?count=all")
    assert all(part in asked for part in COUNTED)
    assert "A large evaluation" not in asked


def test_an_unfinished_run_shows_the_command_that_resumes_it(store: Store) -> None:
    put_run(store, "run-1", status="stopped")
    store.flush()
    text = read(store, "/runs/run-1")
    command = next(line for line in re.findall(r"<pre[^>]*>([^<]*)</pre>", text) if line.endswith("--resume"))
    words = "assay evaluate sums.py:Sums --rubric math_qa --data d.jsonl --model openai/m --seed 3 --resume"
    assert sorted(shlex.split(command)) == sorted(shlex.split(words))


@pytest.fixture
def two_runs(store: Store) -> Store:
    """Runs a and b on tasks 0 to 5: task 0 is worse in b, tasks 1 and 2 are better, the others the same."""
    for run, start in (("a", 0), ("b", 100)):
        put_run(store, run)
        for task in range(6):
            score = {("a", 0): 1.0, ("b", 0): 0.0, ("b", 1): 1.0, ("b", 2): 0.9}.get((run, task), 0.5)
            rollout_of_sums(store, start + task, run_id=run, task_id=f"task-{task}", score=score, phase="evaluate")
    rollout_of_sums(store, 50, run_id="a", task_id="only-in-a", phase="evaluate")
    store.flush()
    return store


def test_two_runs_are_compared_by_task_the_worst_first(two_runs: Store) -> None:
    text = read(two_runs, "/compare?a=a&b=b")
    # (-1 + 0.5 + 0.4 + 0 + 0 + 0) / 6 = -0.0167
    assert "-0.017 on 6 tasks, 95 % interval" in text
    assert "2 better, 1 worse, 3 the same; 1 not scored in both" in text
    assert re.findall(r"<bdi>How much is (\d+)", text) == ["100", "103", "104", "105", "102", "101"]
    assert "no significant difference" in text
    best_first = read(two_runs, "/compare?a=a&b=b&order=better")
    assert re.findall(r"<bdi>How much is (\d+)", best_first)[0] == "101"
    # as the form sends it after another run was typed
    assert "on 6 tasks" in read(two_runs, "/compare?a=a&b=b&of_a=of+another+run")


def test_a_comparison_names_adapters_apart_from_the_model(two_runs: Store) -> None:
    for run, model in (("a", "embedded/m+sums-1+sums-2"), ("b", "openai/m+plus")):
        config = {"program": "p.py:P", "model": model}
        two_runs.put_run(run, kind="evaluate", config=config, status="done", started_at=NOW)
    two_runs.flush()
    text = read(two_runs, "/compare?a=a&b=b")
    assert text.count("with <bdi>embedded/m</bdi> and the adapters <bdi>sums-1, sums-2</bdi>") == 2  # form and print
    assert text.count("with <bdi>openai/m+plus</bdi>") == 2


def test_the_form_with_one_run_does_not_choose_its_preflight(two_runs: Store) -> None:
    rollout_of_sums(two_runs, 40, run_id="a", task_id="task-0", phase="preflight")
    two_runs.flush()
    text = read(two_runs, "/compare?a=a")
    assert re.findall(r'<option value="([^"]*)" selected>', text) == [""]  # what the form sends
    assert "on 6 tasks" in read(two_runs, "/compare?a=a&of_a=&b=b")


def test_evaluations_of_one_run_are_compared_from_earlier_to_later(store: Store) -> None:
    put_run(store, "run-1", kind="compile")
    for number, (phase, version, score) in enumerate(
        [("search", "v1", 0.0), ("search", "v2", 0.5), ("test", "v1", 0.25), ("test", "v2", 0.75)]
    ):
        rollout_of_sums(store, number, task_id="task", phase=phase, split=phase, program_version=version, score=score)
    store.flush()
    text = read(store, "/compare?a=run-1&b=run-1")
    assert "+0.500 on 1 task, too few for an interval" in text
    assert re.findall(r'<option value="([^"]*)" selected>', text) == ["test · v1", "test · v2"]


def test_a_run_without_tasks_cannot_be_compared(store: Store) -> None:
    put_run(store, "run-1")
    store.flush()
    ((status, text),) = got(store, "/compare?a=run-1&b=run-1")
    assert (status, "nothing to compare" in text) == (400, True)


def test_an_unknown_cost_is_no_number(store: Store) -> None:
    missed = Unrecorded(3, "the gateway was killed")
    store.put_run("run-1", kind="serve", config={}, status="done", started_at=NOW, unrecorded=missed)
    store.flush()
    text = read(store, "/runs/run-1")
    assert "unknown: the gateway was killed" in text
    assert "unknown: a call has no known price" in text


def test_a_database_that_does_not_answer_is_reported(store: Store) -> None:
    async def visit(browser: Browser) -> tuple[int, str]:
        with store.engine.begin() as connection:
            connection.exec_driver_sql("ALTER TABLE runs RENAME TO gone")
        return await browser.get("/runs")

    status, text = browse(store, visit)
    assert (status, "the database did not answer: no such table: runs" in text) == (503, True)
