"""The setting `thinking` of each role: what reaches the server, what is stored, and what is refused before a call."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dspy
import pytest

import assay
from assay.commands.compile import Compile
from assay.commands.judge_score import score_rows
from assay.commands.project import project_settings
from assay.commands.scoring import score_rollouts
from assay.commands.tune import tune
from assay.errors import ConfigError, ProjectError
from assay.jobs.loading import load_judge
from assay.models import Thinking, get_lm
from assay.programs import Classify
from assay.testing import scripted_lm
from rigs.projects import write_project, write_rows
from rigs.serving import ChatServer

SIZES = {"train": 4, "val": 4, "gate": 3, "test": 3}


class Notes(dspy.Module):  # type: ignore[misc]
    """Plans, then answers."""

    def __init__(self) -> None:
        super().__init__()
        self.plan = dspy.Predict("question -> plan")
        self.answer = dspy.Predict("question, plan -> answer")

    def forward(self, question: str) -> Any:
        return self.answer(question=question, plan=self.plan(question=question).plan)


class Thinker(ChatServer):
    """A server that says who provides its models, and the budgets of its requests."""

    def __init__(self, owner: str) -> None:
        super().__init__(self._fields, owner=owner)

    @staticmethod
    def _fields(body: dict[str, Any]) -> str:
        fields = {"plan": "add", "answer": "4", "verdict": "yes"}
        sections = "".join(f"[[ ## {name} ## ]]\n{value}\n\n" for name, value in fields.items())
        return json.dumps(fields) if "JSON" in str(body["messages"]) else f"{sections}[[ ## completed ## ]]"

    def budgets(self) -> list[Any]:
        """Budgets of the requests since the last call of this function."""
        budgets = [body.get("thinking_token_budget") for body in self.bodies]
        self.bodies.clear()
        return budgets


@pytest.fixture
def vllm() -> Iterator[Thinker]:
    server = Thinker("vllm")
    with server.serving():
        yield server


@pytest.fixture
def somebody() -> Iterator[Thinker]:
    server = Thinker("somebody")
    with server.serving():
        yield server


@pytest.fixture
def project(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    for name in ("OPENAI_API_KEY", "OPENAI_API_BASE", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    return {**write_project(40), "model": "openai/m", "preflight": False}


@pytest.mark.parametrize(
    ("value", "stored"), [(256, 256), ("256", 256), ("Low", "low"), (0, "off"), ("auto", "auto"), (10**6, 10**6)]
)
def test_a_budget_is_stored_in_its_short_form(value: Any, stored: Any) -> None:
    assert Compile(program="p", rubric="r", data="d", thinking=value).thinking == stored


def test_every_call_of_a_module_with_two_predictors_has_the_budget_and_a_judge_its_own(
    project: dict[str, Any], vllm: Thinker
) -> None:
    run = {**project, "api_base": vllm.url, "sizes": {"val": 1}, "cache": False}
    assay.evaluate(Notes(), thinking=64, **run)
    assert vllm.budgets() == [64, 64]
    assay.evaluate(Notes(), thinking=64, **{**run, "rubric": "judged.yaml"}, judge_thinking="off")
    first, second, *judged = vllm.budgets()
    assert (first, second, set(judged)) == (64, 64, {0})
    assay.evaluate(Notes(), judge_thinking=32, **{**run, "rubric": "judged.yaml"})
    first, second, *judged = vllm.budgets()
    assert (first, second, set(judged)) == (
        None,
        None,
        {32},
    )  # the program's model is not limited by the judges' budget
    assay.evaluate(Notes(), **run)
    assert vllm.budgets() == [None, None]


def test_the_budget_of_a_plain_module_is_in_its_artifact_and_holds_where_that_runs(
    project: dict[str, Any], vllm: Thinker
) -> None:
    run = {**project, "api_base": vllm.url, "cache": False}
    report = assay.compile(Notes(), optimizer="labeled", thinking=64, sizes=SIZES, portable=False, **run)
    assert set(vllm.budgets()) == {64}
    artifact, question = str(report.artifact), {"question": "2+2?"}
    assert json.loads((report.artifact / "manifest.json").read_text())["settings"]["thinking"] == 64
    with dspy.context(lm=get_lm("openai/other", api_base=vllm.url)):
        assay.load(artifact, program=Notes())(**question)
    assert vllm.budgets() == [64, 64]


@pytest.mark.slow
def test_each_program_of_a_study_has_its_own_budget_unless_one_is_set(project: dict[str, Any], vllm: Thinker) -> None:
    run = {**project, "api_base": vllm.url, "cache": False, "sizes": SIZES}
    artifact = assay.compile("mine.py:Mine", optimizer="labeled", thinking=64, **run).artifact
    search = {**run, "also": (str(artifact),), "trials": 4, "sampler": "random", "pruner": "none"}
    vllm.budgets()
    tune("mine.py:Mine", **search)
    assert set(vllm.budgets()) == {None, 64}
    tune("mine.py:Mine", thinking=8, **search)
    assert set(vllm.budgets()) == {8}


def test_an_artifact_runs_with_its_budget_unless_another_is_set(project: dict[str, Any], vllm: Thinker) -> None:
    run = {**project, "api_base": vllm.url, "cache": False}
    artifact = assay.compile("mine.py:Mine", optimizer="labeled", thinking=64, sizes=SIZES, **run).artifact
    vllm.budgets()
    assay.run(artifact, {"question": "2+2?"})
    assay.run(artifact, {"question": "2+2?"}, thinking="off")
    assay.run("mine.py:Mine", {"question": "2+2?"}, model="openai/m", api_base=vllm.url, thinking=7)
    assert vllm.budgets() == [64, 0, 7]
    measured = {**project, "cache": False, "sizes": {"val": 1}}
    del measured["model"]
    assay.evaluate(str(artifact), **measured)
    assay.evaluate(str(artifact), thinking=16, **measured)
    assert vllm.budgets() == [64, 16]


def test_an_agent_is_given_the_budget_in_place_of_its_own_and_the_callers_object_is_unchanged(tmp_path: Any) -> None:
    rows = [{"text": f"word {n}", "label": "a" if n % 2 else "b"} for n in range(30)]
    lm, agent = scripted_lm(lambda request: '{"thought": "", "label": "a"}'), Classify(["a", "b"], thinking=8)
    report = assay.compile(
        agent, rubric="classify", data=rows, lm=lm, optimizer="labeled", sizes=SIZES, preflight=False,
        thinking=64, out=tmp_path / "a",
    )  # fmt: skip
    assert agent.thinking == Thinking(tokens=8)
    assert assay.load(report.artifact).thinking == Thinking(tokens=64)
    assert "thinking" not in json.loads((report.artifact / "manifest.json").read_text())["settings"]


def test_a_judge_that_cannot_keep_its_budget_is_refused_before_the_program_is_called(
    project: dict[str, Any], somebody: Thinker
) -> None:
    run = {**project, "api_base": somebody.url, "preflight": True, "sizes": {"val": 1}}
    with pytest.raises(ConfigError, match=r"judge_thinking='low': the server .*Name a model that thinks"):
        assay.evaluate(Notes(), **{**run, "rubric": "judged.yaml"}, judge_thinking="low")
    with pytest.raises(ConfigError, match="reflection_thinking=64: the server"):
        assay.compile(Notes(), **{**run, "sizes": SIZES}, reflection_thinking=64)
    with pytest.raises(ConfigError, match="thinking=64: the server"):
        assay.compile_judge("Is it kind?", labels=_labels(), api_base=somebody.url, model="openai/m", thinking=64)
    with pytest.raises(ConfigError, match="judge_thinking='low' would have no effect: no criterion"):
        assay.evaluate(Notes(), **run, judge_thinking="low")
    assert somebody.bodies == []


class Late(Notes):
    """Its second call cannot keep a budget: the thought is a list."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = dspy.Predict("question, plan -> thought: list[str], answer")


def test_a_program_whose_second_call_cannot_keep_the_budget_is_refused_before_the_first(
    project: dict[str, Any], somebody: Thinker
) -> None:
    run = {**project, "api_base": somebody.url, "sizes": {"val": 1}, "prompt_format": "json"}
    with pytest.raises(ConfigError, match=r"thinking=64 cannot limit the field 'thought' of type list\[str\]"):
        assay.evaluate(Late(), thinking=64, **run)
    assert somebody.bodies == []
    assay.evaluate(Notes(), thinking=64, **run)  # has no field to think in, which every budget allows
    assert somebody.budgets() == [None, None]


def _labels() -> list[dict[str, Any]]:
    return [
        {"task_input": f"q{n}", "output": f"o{n}", "label": "yes" if n % 2 else "no", "rater": "r"} for n in range(60)
    ]


@pytest.mark.slow
def test_a_compiled_judge_keeps_its_budget_with_its_own_model(project: dict[str, Any], vllm: Thinker) -> None:
    report = assay.compile_judge(
        "Is it kind?", labels=_labels(), model="openai/m", api_base=vllm.url, thinking=64, optimizer="calibrate",
        preflight=False, out="judge",
    )  # fmt: skip
    assert set(vllm.budgets()) == {64}
    inputs = {"task_input": "q", "output": "o"}
    with dspy.context(lm=scripted_lm(lambda request: '{"verdict": "yes"}'), adapter=dspy.JSONAdapter()):
        load_judge(report.artifact, own_model=True)(**inputs)
    assert set(vllm.budgets()) == {64}
    rows = write_rows("outputs.jsonl", [{"task_input": "q", "output": "o"}])
    score_rows(str(report.artifact), data=rows, out="scored.jsonl", preflight=False)
    assert set(vllm.budgets()) == {64}


def test_the_project_file_sets_the_budget_of_each_role(project: dict[str, Any]) -> None:
    Path("assay.toml").write_text(
        "[program]\nthinking = 256\n[judge]\nthinking = 'low'\n[reflection]\nthinking = 'high'\n"
        "[compile]\nrubric = 'r.yaml'\n"
    )
    compiling = project_settings("compile")
    assert [compiling[name] for name in ("thinking", "judge_thinking", "reflection_thinking")] == [256, "low", "high"]
    assert project_settings("run")["thinking"] == 256
    assert project_settings("judge compile")["thinking"] == "low"
    Path("assay.toml").write_text("[program]\nmodel = 'openai/m'\nthinking = 256\n")
    assert project_settings("judge compile") == {"model": "openai/m"}  # a judge does not take the program's budget
    Path("assay.toml").write_text("[judge]\nthinking = 'hgih'\n")
    with pytest.raises(ProjectError, match=r"thinking: must be .* Did you mean 'high'"):
        project_settings("compile")


def test_stored_rollouts_are_scored_with_the_judges_budget(project: dict[str, Any], vllm: Thinker) -> None:
    assay.evaluate(Notes(), **{**project, "api_base": vllm.url, "sizes": {"val": 1}})
    vllm.budgets()
    judge = {"judge_model": "openai/m", "judge_api_base": vllm.url}
    score_rollouts(rubric="judged.yaml", again=True, judge_thinking="32", **judge)
    assert set(vllm.budgets()) == {32}
    with pytest.raises(ConfigError, match="judge_thinking: would have no effect without judge_model"):
        score_rollouts(rubric="judged.yaml", judge_thinking=32)
