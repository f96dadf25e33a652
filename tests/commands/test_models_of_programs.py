"""Programs that make models themselves: which models answered, replacing them, and parameters that they do not take."""

import importlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dspy
import pytest
from prompt_server import PromptServer, serving

import assay
from assay.commands.registry import register
from assay.commands.serve import Serve
from assay.errors import ConfigError, ParameterError
from assay.reports.markdown import models_text
from assay.testing import ScriptedEngine, scripted_lm
from assay.traces import Rollout, Store, Transition
from assay.traces.store.listing import usage_of_models
from assay.web.runs import run_page
from rigs.command_line import assay_command
from rigs.projects import write_rows

SIZES = {"train": 8, "val": 6, "gate": 6, "test": 6}
RIGHT = "[[ ## answer ## ]]\n7\n\n[[ ## completed ## ]]"
PARTS = ("plan", "answer")  # output of each predictor


def reply(request: Any) -> str:
    outputs = str(request.system).partition("output fields are:")[2].partition("All interactions")[0]
    field = "plan" if "`plan`" in outputs else "answer"
    return f"[[ ## {field} ## ]]\n7\n\n[[ ## completed ## ]]"


class Parts(dspy.Module):  # type: ignore[misc]
    """A plan and an answer; each by a model of its own if it has one."""

    def __init__(self, plan: Any = None, answer: Any = None) -> None:
        super().__init__()
        self.plan, self.answer = dspy.Predict("question -> plan"), dspy.Predict("question, plan -> answer")
        self.plan.lm, self.answer.lm = plan, answer

    def forward(self, question: str) -> dspy.Prediction:
        return self.answer(question=question, plan=self.plan(question=question).plan)


class InContext(Parts):
    """Its models are not those of its predictors. Every third question is answered by the job's."""

    def __init__(self, own: Any, *, job: bool = False) -> None:
        super().__init__()
        self.own, self.job = [own], job

    def forward(self, question: str) -> dspy.Prediction:
        if self.job and int(question.split()[-1]) % 3 == 0:
            return super().forward(question)
        with dspy.context(lm=self.own[0]):
            return super().forward(question)


def own(name: str = "mine/own", **options: Any) -> dspy.LM:
    return dspy.LM(name, engine=ScriptedEngine(reply, price_usd=0.5), cache=False, **options)


def calls_of(*models: Any) -> int:
    return sum(model.engine.calls for model in models)


@pytest.fixture
def job() -> dict[str, Any]:
    data = write_rows("d.jsonl", [{"question": f"Place {n}", "answer": "7"} for n in range(60)])
    return {"rubric": "exact", "data": data, "store": "s.db", "sizes": SIZES, "lm": scripted_lm(reply)}


JOBS: dict[str, Callable[..., Any]] = {
    "evaluate": assay.evaluate,
    "collect": lambda program, **job: assay.collect(program, n=2, **job),
    "tune": lambda program, **job: assay.tune(program, **{"trials": 2, "portable": False, **job}),
    "compile": lambda program, **job: assay.compile(program, **{"max_search_calls": 80, "portable": False, **job}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_a_report_has_calls_tokens_and_cost_of_each_model(name: str, job: dict[str, Any]) -> None:
    planner = own("mine/planner")
    data = JOBS[name](Parts(plan=planner), **job).to_dict()
    models = {row["model"]: row for row in data["models"]}
    assert data["model"] == "scripted/model"
    assert models.keys() == {"mine/planner", "scripted/model"}
    assert models["mine/planner"]["calls"] == planner.engine.calls > 0
    assert models["mine/planner"]["cost_usd"] == pytest.approx(0.5 * planner.engine.calls)
    assert models["scripted/model"]["calls"] == job["lm"].scripted.calls
    for key in ("calls", "cached", "tokens"):
        assert sum(row[key] for row in data["models"]) == data[key]
    assert sum(row["cost_usd"] for row in data["models"]) == pytest.approx(data["cost_usd"])
    assert "mine/planner" in models_text(data)


def test_a_comparison_has_the_models_of_each_side(job: dict[str, Any]) -> None:
    report = assay.compare(Parts(), Parts(plan=own("mine/planner")), **job)
    data = report.to_dict()
    sides = [{row["model"] for row in data[side]["models"]} for side in "ab"]
    assert sides == [{"scripted/model"}, {"scripted/model", "mine/planner"}]
    assert [bool(models_text(data[side])) for side in "ab"] == [False, True]
    page = report.write_page("page.html", store="s.db").read_text()
    assert "mine/planner" in page


def test_the_pages_name_the_models_and_that_of_one_model_does_not_change(job: dict[str, Any]) -> None:
    report = assay.evaluate(Parts(plan=own("mine/planner")), **job)
    assert "mine/planner" in report.write_page("own.html", store="s.db").read_text()
    plain = assay.evaluate(Parts(), **job)
    assert models_text(plain.to_dict()) == ""
    with Store("s.db") as store:
        shown = [
            run_page(store, run, {}, where="s.db", store_flag=None).values for run in (report.run_id, plain.run_id)
        ]
    assert [{usage.model for usage in page["models"]} for page in shown] == [{"mine/planner", "scripted/model"}, set()]


def test_a_resumed_job_has_the_models_of_all_its_processes(job: dict[str, Any]) -> None:
    program = Parts(plan=own("mine/planner"))
    stopped = assay.evaluate(program, max_calls=6, preflight=False, threads=1, **job).to_dict()
    data = assay.evaluate(program, preflight=False, threads=1, resume=True, **job).to_dict()
    counts = [{row["model"]: row["calls"] for row in report["models"]} for report in (stopped, data)]
    assert counts == [{"mine/planner": 3, "scripted/model": 3}, {"mine/planner": 6, "scripted/model": 6}]
    assert (data["calls"], data["stopped"]) == (12, None)


def test_the_calls_of_a_job_are_those_of_all_its_parts() -> None:
    with Store("s.db") as store:
        for run in ("improve-a.0.prompts-1", "improve-a.1.gate-1", "improve-ab.0.prompts-1", "improve-a"):
            rollout = Rollout(run_id=run)
            store.put_rollout(rollout)
            store.put_transition(rollout.id, Transition(t=0, model=f"of {run[:9]}", request={}, cost_usd=0.5))
        store.flush()
        (usage,) = usage_of_models(store, "improve-a")
    assert (usage.calls, usage.cost_usd) == (3, 1.5)


# -- replacing


class Asking(assay.Agent):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.ask = dspy.Predict("question -> answer")

    def solve(self, question: str) -> dspy.Prediction:
        return self.ask(question=question)


@pytest.mark.parametrize("kind", ["agent", "module"])
def test_a_replaced_call_has_the_parameters_of_the_job(kind: str, job: dict[str, Any]) -> None:
    seen = []

    def noted(request: Any) -> str:
        seen.append(request.config.temperature)
        return RIGHT if kind == "module" else '{"answer": "7"}'

    program: Any = Asking() if kind == "agent" else dspy.Predict("question -> answer")
    for predictor in program.predictors():
        predictor.lm = own()
    options = {**job, "lm": scripted_lm(noted)}
    assay.evaluate(program, replace_lms=True, parameters={"temperature": 0.25}, preflight=False, **options)
    assert set(seen) == {0.25}


COMMANDS: dict[str, list[str]] = {
    "evaluate": ["--size", "2"],
    "collect": ["--size", "2", "-n", "1"],
    "tune": ["--trials", "1", "--val-size", "2", "--gate-size", "4", "--test-size", "4", "--train-size", "2"],
    "compile": ["--max-search-calls", "30", "--val-size", "4", "--gate-size", "4", "--test-size", "4",
                "--train-size", "4"],
}  # fmt: skip


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[PromptServer]:
    with serving() as running:
        monkeypatch.setenv("PROGRAMS_SERVER", running.url)
        source = Path(__file__).parent.parent / "dspy_programs" / "own_models.py"
        Path("own_models.py").write_text(source.read_text())
        write_rows("d.jsonl", [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(20, 80)])
        yield running


def invoked(*arguments: str) -> Any:
    done = assay_command(*arguments)
    assert done.code == 0, done.stderr
    return done


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("replaced", [False, True])
def test_each_command_replaces_models_and_says_which_answered(name: str, replaced: bool, server: PromptServer) -> None:
    arguments = ["own_models.py:Program", "--rubric", "exact", "--data", "d.jsonl", *COMMANDS[name]]
    model = ["--model", "openai/main", "--api-base", server.url]
    flag = ["--replace-lms"] if replaced else []
    shown = invoked(name, *arguments, *model, *flag).stdout
    names = {"main"} if replaced else {"main", "planner", "checker", "critic"}
    assert server.requests.keys() == names
    assert ("openai/planner" in shown) == (not replaced)


def test_a_single_run_replaces_models_and_says_which_answered(server: PromptServer) -> None:
    arguments = ["run", "own_models.py:Program", "--model", "openai/main", "--api-base", server.url]
    shown = invoked(*arguments, "question=What is 1 + 1?")
    assert "openai/planner" in shown.stderr
    assert "openai/planner" not in shown.stdout
    data = json.loads(invoked(*arguments, "question=What is 2 + 1?", "--json").stdout)
    names = ["openai/checker", "openai/critic", "openai/main", "openai/planner"]
    assert [(row["model"], row["calls"]) for row in data["models"]] == [(name, 1) for name in names]
    server.requests.clear()
    data = json.loads(invoked(*arguments, "question=What is 3 + 1?", "--json", "--replace-lms").stdout)
    assert (dict(server.requests), "models" in data) == ({"main": 4}, False)
    server.requests.clear()
    Path("rows.jsonl").write_text('{"question": "What is 4 + 1?"}\n{"question": "What is 5 + 1?"}\n')
    done = invoked(*arguments, "--file", "rows.jsonl")
    assert [set(json.loads(line)) for line in done.stdout.splitlines()] == [{"answer"}, {"answer"}]
    assert server.requests == Counter(main=2, planner=2, checker=2, critic=2)
    assert "openai/planner: 2 " in done.stderr


@pytest.mark.slow
def test_the_version_of_an_agent_answers_in_place_of_the_models_of_its_program(server: PromptServer) -> None:
    options: Any = {"model": "openai/main", "api_base": server.url, "store": "s.db", "rubric": "exact"}
    report = assay.compile(
        "own_models.py:Program", data="d.jsonl", optimizer="labeled", sizes=SIZES, gate=False, test=False,
        preflight=False, **options,
    )  # fmt: skip
    register("sums", report.artifact, store="s.db")
    for replaced, names in ((False, {"main", "planner", "checker", "critic"}), (True, {"main"})):
        server.requests.clear()
        agent = assay.deployed("sums", store="s.db", replace_lms=replaced)
        assert agent(question="What is 1 + 1?").answer
        assert server.requests.keys() == names


def test_replacing_needs_an_agent_to_serve() -> None:
    with pytest.raises(ConfigError):
        Serve(replace_lms=True)


# -- parameters of the search


OWN_ONLY: dict[str, Callable[[], Any]] = {
    "of predictors": lambda: Parts(own(), own()),
    "in a context": lambda: InContext(own()),
    "with the name of the job's": lambda: InContext(own("scripted/model")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN_ONLY)
def test_a_temperature_that_no_call_takes_is_not_searched(name: str, job: dict[str, Any]) -> None:
    with pytest.raises(ParameterError):
        JOBS["tune"](OWN_ONLY[name](), **job)
    data = JOBS["compile"](OWN_ONLY[name](), **job).to_dict()
    assert len(data["candidates"]) > 2
    assert [c["settings"]["parameters"] for c in data["candidates"]] == [{} for _ in data["candidates"]]
    assert any("replace_lms=True" in note for note in data["notes"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["some calls", "some tasks", "replaced"])
def test_parameters_that_a_part_of_the_calls_takes_are_searched(kind: str, job: dict[str, Any]) -> None:
    program = (
        InContext(own(), job=True) if kind == "some tasks" else Parts(own(), own() if kind == "replaced" else None)
    )
    options = {**job, "replace_lms": kind == "replaced"}
    tuned = JOBS["tune"](program, trials=3, **options).to_dict()
    assert len({trial["parameters"]["temperature"] for trial in tuned["history"]}) > 1
    compiled = JOBS["compile"](program, **options).to_dict()
    assert any("temperature" in c["settings"]["parameters"] for c in compiled["candidates"])
    assert not any("replace_lms=True" in note for note in (*tuned["notes"], *compiled["notes"]))


@pytest.mark.slow
def test_other_parameters_of_an_agent_are_searched(job: dict[str, Any]) -> None:
    agent = Asking(parameters=None)
    engine = ScriptedEngine(lambda request: '{"answer": "7"}')
    agent.ask.lm = dspy.LM("mine/own", engine=engine, cache=False)
    data = JOBS["tune"](agent, **job).to_dict()
    assert {"max_steps", "context_length", "reasoning_depth"} <= data["history"][1]["parameters"].keys()
    assert "temperature" not in data["history"][1]["parameters"]


PLANNED = f"""
import dspy
from assay.testing import ScriptedEngine

class Planned(dspy.Module):
    def __init__(self):
        super().__init__()
        self.ask = dspy.Predict("question -> answer")
        self.ask.set_lm(dspy.LM("mine/asked", engine=ScriptedEngine(lambda request: {RIGHT!r}), cache=False))

    def forward(self, question):
        return self.ask(question=question)
"""


@pytest.mark.parametrize(
    "optimizer", ["labeled", "bootstrap", *(pytest.param(name, marks=pytest.mark.slow) for name in ("knn", "ensemble"))]
)
def test_programs_of_dspys_optimizers_keep_the_models_of_the_program(job: dict[str, Any], optimizer: str) -> None:
    Path("planned.py").write_text(PLANNED)
    data = JOBS["compile"]("planned.py:Planned", optimizer=optimizer, gate=False, test=False, **job).to_dict()
    assert len(data["candidates"]) == 2
    assert {row["model"] for row in data["models"] if row["calls"]} == {"mine/asked"}


@pytest.mark.slow
def test_a_model_that_an_artifact_does_not_contain_is_named(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Path("asks.py").write_text(
        "import dspy\n\nclass Asks(dspy.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.first = dspy.Predict('question -> answer')\n"
        "        self.second = dspy.Predict('question -> answer')\n"
        "        self.second.lm = dspy.LM('mine/second')\n\n"
        "    def forward(self, question):\n        return self.first(question=question)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    program = importlib.import_module("asks").Asks()
    program.first.lm = own()
    options: dict[str, Any] = {"optimizer": "labeled", "gate": False, "test": False, **job}
    for replaced, named in ((False, 1), (True, 0)):
        notes = assay.compile(program, replace_lms=replaced, **options).to_dict()["notes"]
        assert sum("calls scripted/model for first:" in note for note in notes) == named


# -- without a model


def test_a_program_whose_predictors_all_have_a_model_needs_no_other(job: dict[str, Any]) -> None:
    del job["lm"]
    planner, answerer = own("mine/planner"), own("mine/answerer")
    data = assay.evaluate(Parts(planner, answerer), **job).to_dict()
    assert data["result"]["score"] == 1.0
    assert data["model"] == "mine/planner"
    assert data["calls"] == calls_of(planner, answerer)
