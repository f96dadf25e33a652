"""The gate of a step of `assay improve` ends once it has decided, under the caps of the whole improvement."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

import assay
import assay.commands.compile
import assay.commands.improve
from assay.commands.compile import Compile
from assay.errors import BudgetExceeded
from assay.evaluation import SilentProgress, evaluate
from assay.runs.jobs import open_job
from assay.traces import Store
from rigs.serving import chat_completion, served

PROGRAM = """import dspy


class Mine(dspy.Module):
    def __init__(self):
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    def forward(self, question):
        found, number = self.answer(question=question), int(question.split()[2])
        return dspy.Prediction(answer=str({what}))
"""


class Server:
    def __init__(self) -> None:
        self.calls = 0

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls += 1
        return chat_completion(body["model"], json.dumps({"answer": "4"}))


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def job(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """An improvement whose only step results in `after.py`."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    made = SimpleNamespace(winner="one", stopped=None, artifact="after.py:Mine")
    monkeypatch.setattr("assay.commands.improve.compile_program", lambda *_, **__: made)
    rows = [{"question": f"What is {n} + 2?", "answer": str(n + 2)} for n in range(300)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: exact}\n")
    (tmp_path / "before.py").write_text(PROGRAM.format(what="number"))
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.answer)
    with served(app) as url:
        yield {
            "rubric": "r.yaml", "data": "data.jsonl", "name": "up", "order": ["prompts"], "model": "openai/m",
            "api_base": f"{url}/v1",
            "prompt_format": "json", "sizes": {"gate": 50, "test": 5}, "cache": False, "preflight": False,
        }  # fmt: skip


@pytest.mark.slow
def test_a_gate_ends_at_its_decision(job: dict[str, Any], server: Server) -> None:
    Path("after.py").write_text(PROGRAM.format(what="number + 2"))
    report = assay.improve("before.py:Mine", **job)
    step = report.steps[0]
    assert step["kept"]
    assert step["gate"]["low"] > 0
    assert (step["gate"]["n"], step["before"], step["after"]) == (20, 0.0, 1.0)  # of 50, evaluated every 10
    assert (
        step["note"] == "gate ended after 20 of 50 tasks: a difference is shown; its interval holds for stopping early"
    )
    assert server.calls == 2 * 20 + 2 * 5  # gate and test


@pytest.mark.slow
def test_a_prompt_step_runs_its_gate_once(job: dict[str, Any], server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("assay.commands.improve.compile_program", assay.commands.compile.compile)
    Path("before.py").write_text(PROGRAM.format(what="number + 2 if len(self.answer.demos) > 1 else number"))
    report = assay.improve("before.py:Mine", optimizer="labeled", **job)
    step = report.steps[0]
    assert (step["kept"], step["before"], step["after"]) == (True, 0.0, 1.0)
    with Store(Path(".assay") / "assay.db") as store:
        runs = [(rollout.phase, rollout.task_id) for rollout in store.rollouts() if rollout.phase in ("gate", "test")]
    gate = [task for phase, task in runs if phase == "gate"]
    assert len(gate) == 2 * step["gate"]["n"]  # before and after, by the step alone
    assert len(runs) - len(gate) == 2 * 5


def test_compile_without_its_own_gate_searches_with_the_full_cap(job: dict[str, Any], server: Server) -> None:
    options = {key: value for key, value in job.items() if key not in ("name", "order")} | {"max_calls": 60}
    report = assay.compile("before.py:Mine", optimizer="labeled", gate=False, test=False, **options).to_dict()
    assert (report["gate"], report["replaces"], report["test"]["compiled"]) == (None, False, None)
    assert [row["n"] for row in report["candidates"]] == [
        20,
        20,
    ]  # 60 calls allow 20 tasks for both and the search; half of them would allow 10
    assert server.calls == 40


@pytest.mark.slow
def test_a_gate_that_can_no_longer_show_a_gain_ends(job: dict[str, Any]) -> None:
    Path("after.py").write_text(PROGRAM.format(what="-number"))  # as wrong
    step = assay.improve("before.py:Mine", **job).steps[0]
    assert not step["kept"]
    assert 10 <= step["gate"]["n"] < 50
    assert "can hardly become significant" in step["note"]


@pytest.mark.slow
@pytest.mark.parametrize("kept_on", ["val", "gate"])
def test_a_step_that_is_not_kept_says_which_gain_its_tasks_would_have_shown(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch, kept_on: str
) -> None:
    Path("after.py").write_text(PROGRAM.format(what="-number"))
    sizes = {"train": 20, "val": 20, "gate": 10, "test": 5}
    if kept_on == "val":
        monkeypatch.setattr("assay.commands.improve.compile_program", assay.commands.compile.compile)
    report = assay.improve("before.py:Mine", **{**job, "optimizer": "labeled", "sizes": sizes})
    step = report.steps[0]
    assert (step["kept"], step["gate"] is None) == (False, kept_on == "val")
    shown = re.search(rf"{sizes[kept_on]} {kept_on} tasks\D*(\d\.\d+)", step["note"])
    assert shown
    assert 0 < float(shown[1]) <= 1
    assert report.artifact
    assert shown[0] in (report.artifact / "report.md").read_text()


@pytest.mark.slow
def test_without_early_stop_a_gate_runs_the_full_split(job: dict[str, Any]) -> None:
    Path("after.py").write_text(PROGRAM.format(what="number + 2"))
    step = assay.improve("before.py:Mine", early_stop=False, **job).steps[0]
    assert (step["gate"]["n"], step["kept"], "note" in step) == (50, True, False)


@pytest.mark.slow
def test_a_gate_stopped_by_a_cap_decides_nothing_and_resumes(
    job: dict[str, Any], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    Path("after.py").write_text(PROGRAM.format(what="number + 2 * (number % 5 == 0)"))  # one of five tasks
    report = assay.improve("before.py:Mine", max_calls=30, **job)
    assert server.calls == 22  # 8 are kept for the sealed test, and no step is kept that it would compare
    assert "step 1 of 1, prompts: gate ended after 11 of 50 tasks" in str(report.stopped)
    assert (report.steps, report.test) == ([], None)
    repeated = assay.improve(
        "before.py:Mine", max_calls=30, resume=True, **job
    )  # nothing is left to do: the stored report is returned
    assert (repeated.to_dict(), server.calls) == (report.to_dict(), 22)
    monkeypatch.delattr(
        "assay.commands.improve.compile_program"
    )  # the result of the step is stored until its gate; the step is not run again
    report = assay.improve("before.py:Mine", max_calls=300, resume=True, **job)
    assert report.steps[0]["kept"]
    assert report.test is not None
    assert report.stopped is None
    assert not (Path(".assay") / "improve" / "up").exists()


@pytest.mark.slow
def test_a_cap_ends_an_improvement_with_the_sealed_test_of_the_adopted_steps(
    job: dict[str, Any], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("after.py").write_text(PROGRAM.format(what="number + 2"))
    made, searched = assay.commands.improve.compile_program(), []

    def compile_program(program: str, **options: Any) -> Any:
        """The first step results in `after.py`; the second uses all calls that it may make."""
        searched.append(options["max_calls"])
        if len(searched) == 1:
            return made
        config = Compile(
            program=program,
            rubric="r.yaml",
            data="data.jsonl",
            **{name: options[name] for name in ("max_calls", "model", "api_base")},
        )
        with open_job(config, program=program, rubric="r.yaml", progress=SilentProgress()) as opened:
            opened.session.register(opened.splits.train)
            evaluate(opened.recorded, opened.splits.train, opened.session, name="all")
        raise AssertionError("the cap was not reached")

    monkeypatch.setattr("assay.commands.improve.compile_program", compile_program)
    job |= {"order": ["prompts", "prompts"], "sizes": {"gate": 10, "test": 10}}
    report = assay.improve("before.py:Mine", max_calls=80, **job)
    # half of 80 is reserved for two gates of 6 tasks and a test of 8; the searches share the rest. 60 calls are left
    # for the second step, of which its gate and the test get 20 each
    assert searched == [20, 20]
    assert report.stopped == "step 2 of 2, prompts: the cap of 20 calls is reached"
    assert [step["kept"] for step in report.steps] == [True]
    assert report.test is not None
    assert (report.test["gain"]["n"], report.test["after"]["score"]) == (10, 1.0)
    assert server.calls == 20 + 20 + 20  # gate, search, test
    assert report.artifact is not None
    text = (report.artifact / "report.md").read_text()
    assert "stopped early: step 2 of 2" in text
    assert re.search(r"\| prompts \| \+\d\.\d{3}.* \| kept \|", text)
    assert re.search(r"sealed tasks, 10", text)
    assert "{" not in text
    Path("other.py").write_text(PROGRAM.format(what="number + 2"))
    made.artifact = "other.py:Mine"
    monkeypatch.setattr("assay.commands.improve.compile_program", lambda *_, **__: made)
    report = assay.improve(
        "before.py:Mine", max_calls=200, resume=True, **job
    )  # the second step and its gate, which shows no further gain
    assert (report.stopped, [step["kept"] for step in report.steps]) == (None, [True, False])


@pytest.mark.slow
def test_a_step_at_its_maximum_leaves_later_steps_their_work_and_gate(
    job: dict[str, Any], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("after", "other"):
        Path(f"{name}.py").write_text(PROGRAM.format(what="number + 2"))
    made = assay.commands.improve.compile_program()

    def compile_program(program: str, **options: Any) -> Any:
        compile_options = {name: options[name] for name in ("max_calls", "model", "api_base", "prompt_format", "cache")}
        with open_job(
            Compile(program=program, rubric="r.yaml", data="data.jsonl", **compile_options),
            program=program,
            rubric="r.yaml",
            progress=SilentProgress(),
        ) as opened:
            opened.session.register(opened.splits.train)
            with pytest.raises(BudgetExceeded):
                evaluate(opened.recorded, opened.splits.train, opened.session, name="all")
        return made if program.startswith("before") else SimpleNamespace(**{**vars(made), "artifact": "other.py:Mine"})

    monkeypatch.setattr("assay.commands.improve.compile_program", compile_program)
    report = assay.improve(
        "before.py:Mine", max_calls=120, **{**job, "order": ["prompts", "prompts"], "sizes": {"gate": 10, "test": 10}}
    )
    assert report.stopped is None
    assert [step["gate"]["n"] for step in report.steps] == [10, 10]
    assert report.test is not None
    assert server.calls == 2 * (30 + 20) + 20  # half of 120 is for gates and test, and two searches share the rest


def test_a_sealed_test_stopped_by_a_cap_is_reported_with_its_finished_tasks(
    job: dict[str, Any], server: Server
) -> None:
    Path("after.py").write_text(PROGRAM.format(what="number + 2"))
    report = assay.improve("before.py:Mine", max_calls=36, **{**job, "sizes": {"gate": 10, "test": 30}})
    assert report.test is not None
    assert report.test["gain"]["n"] == 8  # what the gate leaves
    assert report.stopped is None  # enough for an interval
    assert report.notes == ["test ended after 8 of 30 tasks: the caps leave 8 tasks for test"]
    assert server.calls == 36


@pytest.mark.slow
def test_the_sealed_test_is_opened_once_and_ends_at_its_decision(job: dict[str, Any], server: Server) -> None:
    Path("after.py").write_text(PROGRAM.format(what="number + 2"))
    report = assay.improve("before.py:Mine", **{**job, "sizes": {"gate": 10, "test": 50}})
    assert report.test is not None
    assert report.test_openings == {"this_job": 1, "this_store": 1}
    assert (report.test["before"]["n"], report.test["after"]["n"], report.test["gain"]["n"]) == (
        20,
        20,
        20,
    )  # of 50, evaluated every 10
    assert report.test["gain"]["low"] > 0
    assert report.notes == [
        "test ended after 20 of 50 tasks: a difference is shown; its interval holds for stopping early"
    ]
    assert server.calls == 2 * 10 + 2 * 20


def test_without_early_stop_the_sealed_test_runs_the_full_split(job: dict[str, Any]) -> None:
    Path("after.py").write_text(PROGRAM.format(what="number + 2"))
    report = assay.improve("before.py:Mine", early_stop=False, **{**job, "sizes": {"gate": 10, "test": 30}})
    assert report.test is not None
    assert (report.test["after"]["n"], report.notes) == (30, [])
    assert report.test_openings == {"this_job": 1, "this_store": 1}


@pytest.mark.slow
def test_criterion_intervals_have_the_level_of_the_score_if_a_test_ended_early(
    job: dict[str, Any],
) -> None:
    Path("after.py").write_text(PROGRAM.format(what="number + 2 * (number % 3 > 0)"))  # two of three tasks
    report = assay.improve("before.py:Mine", **{**job, "sizes": {"gate": 30, "test": 100}})
    assert report.test is not None
    assert report.test["gain"]["n"] < 100
    assert report.test["criteria"]["right"] == report.test["gain"]  # the only criterion


@pytest.mark.parametrize(("options", "done"), [({}, False), ({"optimizer": "copro", "max_search_calls": 5}, True)])
def test_a_search_stopped_by_a_cap_before_any_gain_remains_open(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], done: bool
) -> None:  # fmt: skip
    made = SimpleNamespace(winner="baseline", stopped="the cap of 5 calls is reached", notes=["unchanged"])
    monkeypatch.setattr("assay.commands.improve.compile_program", lambda *_, **__: made)
    report = assay.improve("before.py:Mine", **job, **options)
    assert (len(report.steps), report.stopped is None) == (
        done,
        done,
    )  # a cap of the search alone is the end of the step


@pytest.mark.slow
def test_a_search_that_used_its_share_without_a_gain_is_done_if_a_later_step_fits(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = SimpleNamespace(winner="baseline", stopped="the cap of 30 calls is reached", notes=["unchanged"])
    monkeypatch.setattr("assay.commands.improve.compile_program", lambda *_, **__: made)
    report = assay.improve(
        "before.py:Mine", max_calls=120, **{**job, "order": ["prompts", "prompts"], "sizes": {"gate": 10, "test": 10}}
    )
    assert [step["note"] for step in report.steps] == ["unchanged"]
    assert (
        report.stopped == "step 2 of 2, prompts: the cap of 30 calls is reached"
    )  # the last step is unfinished; a higher cap completes it
