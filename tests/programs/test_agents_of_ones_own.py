"""Agents of any framework behind the gateway of a job: who answers, what is recorded, what is refused."""

import urllib.error
from pathlib import Path
from typing import Any

import pytest
from calling_agents import chat, of_file, post
from openai import OpenAI

import assay
from assay.errors import ConfigError, FailureKind, ProgramFailed
from assay.rubrics import Criterion, Rubric
from assay.testing import scripted_lm
from assay.traces import Store
from rigs.gateway import opened_stage
from rigs.projects import Said

TASKS = [
    {"question": f"What is {n} + 1?", "answer": str(n + 1), "split": ("train", "val", "gate", "test")[n % 4]}
    for n in range(40)
]


def right(task: Any, prediction: Any, rollout: Any) -> float:
    return float(prediction.get("answer") == task.expected["answer"])


RUBRIC = Rubric("right", [Criterion(name="right", check=right)])


def sums(request: Any) -> str:
    """Right if the system text asks for sums."""
    number = int((request.messages[-1].text or "").split()[2])
    return str(number + (1 if "sum" in str(request.system) else 2))


def evaluated(agent: Any, *, script: Any = sums, size: int = 4, **options: Any) -> Any:
    lm = options.pop("lm", None) or scripted_lm(script)
    return assay.evaluate(agent=agent, rubric=RUBRIC, data=TASKS, lm=lm, size=size, **{"threads": 2, **options})


def calls_of(report: Any) -> list[Any]:
    with Store(None) as store:
        runs = [store.rollout(row.id) for row in store.rollouts(run_id=report.run_id, limit=None)]
    return [call for run in runs if run.phase == "evaluate" for call in run.transitions]


def test_any_model_answers_an_agent_and_its_calls_are_recorded(own_folder: Path) -> None:
    Path("a.md").write_text("Write the sum.")
    lm = scripted_lm(sums, tokens=(7, 3), price_usd=0.5)
    report = evaluated(of_file("a.md", temperature=0.2, max_tokens=9), lm=lm)
    assert report.result["score"] == 1.0
    call = calls_of(report)[0]
    assert call.request["body"]["messages"][0] == {"role": "system", "content": "Write the sum."}
    assert (call.prompt_tokens, call.completion_tokens, call.model) == (7, 3, "scripted/model")
    assert report.calls == lm.scripted.calls == 4  # the first one of the preflight, from the cache later
    assert sorted(call.cost_usd for call in calls_of(report)) == [0.0, 0.5, 0.5, 0.5]
    assert sorted(call.cached for call in calls_of(report)) == [False, False, False, True]


def test_equal_requests_are_answered_by_the_cache(own_folder: Path) -> None:
    Path("a.md").write_text("Write the sum.")
    lm = scripted_lm(sums)
    for _ in range(2):
        assert evaluated(of_file("a.md"), lm=lm).result["score"] == 1.0
    assert lm.scripted.calls == 4


def test_an_agent_is_not_shown_what_the_rubric_compares_its_answer_with(own_folder: Path) -> None:
    shown = list[dict[str, Any]]()

    def agent(task: dict[str, Any]) -> dict[str, Any]:
        shown.append(task["inputs"])
        return {"solution": chat(task, ("user", task["inputs"]["question"]))["content"]}

    Path("r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: exact, with: {field: solution}}\n")
    rows = [{"question": f"What is {n} + 1?", "solution": "5"} for n in range(4)]
    report = assay.evaluate(agent=agent, rubric="r.yaml", data=rows, lm=scripted_lm(lambda request: "5"), split="all")
    assert report.result["score"] == 1.0
    assert {tuple(inputs) for inputs in shown} == {("question",)}


@pytest.mark.parametrize(("column", "noted"), [("queue", True), ("label", False)])
def test_a_run_says_where_no_column_of_an_agents_tasks_is_an_expected_output(
    own_folder: Path, column: str, noted: bool
) -> None:
    rows = [{"question": f"What is {n} + 1?", column: "5"} for n in range(4)]
    rubric, said = Rubric("any", [Criterion(name="any", check=lambda task, prediction: 1.0)]), Said()
    Path("a.md").write_text("Write the sum.")
    lm = scripted_lm(lambda request: "5")
    assay.evaluate(agent=of_file("a.md"), rubric=rubric, data=rows, lm=lm, split="all", progress=said)
    assert any("every column is an input; an expected output is named answer, " in line for line in said.lines) is noted


def test_a_cap_holds_for_an_agent(own_folder: Path) -> None:
    Path("a.md").write_text("Write the sum.")
    lm = scripted_lm(sums)
    report = evaluated(of_file("a.md"), lm=lm, size=10, max_calls=5)
    assert report.stopped is not None
    assert (lm.scripted.calls, report.calls) == (5, 5)
    with Store(None) as store:  # what the cap kept from being sent is no call
        calls = [call for row in store.rollouts(limit=None) for call in store.rollout(row.id).transitions]
    assert [call.error for call in calls if not call.cached] == [None] * 5


def test_a_resumed_job_runs_tasks_again_beside_another_gateway(own_folder: Path) -> None:
    def agent(task: dict[str, Any]) -> str:
        chat(task, ("user", f"Think about it. {task['inputs']['question']}"))
        return str(chat(task, ("user", task["inputs"]["question"]))["content"])

    job: dict[str, Any] = {"script": lambda request: "1", "threads": 1, "preflight": False, "cache": False}
    with opened_stage(Path()):
        assert evaluated(agent, store="s.db", max_calls=5, **job).stopped is not None
        report = evaluated(agent, store="s.db", resume=True, **job)
    assert (report.stopped, report.result["failed"], report.result["unscored"]) == (None, 0, 0)


def test_a_temperature_of_the_job_replaces_the_agents(own_folder: Path) -> None:
    Path("a.md").write_text("Write the sum.")
    sent: list[float] = []

    def script(request: Any) -> str:
        sent.append(request.config.temperature)
        return sums(request)

    report = evaluated(of_file("a.md", temperature=0.9), script=script, parameters={"temperature": 0.2})
    assert set(sent) == {0.2}
    assert {call.request["body"]["temperature"] for call in calls_of(report)} == {0.2}


def test_tools_and_other_dialects_reach_the_model(own_folder: Path) -> None:
    names: list[Any] = []

    def script(request: Any) -> str:
        names.append([tool.name for tool in request.tools])
        return sums(request)

    tool = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}

    def agent(task: dict[str, Any]) -> str:
        body = {"instructions": "Write the sum.", "input": task["inputs"]["question"]}
        answer = post(task, "/responses", {**body, "tools": [{"type": "function", **tool}]})
        text: str = answer["output"][0]["content"][0]["text"]
        said = chat(task, ("system", "Write the sum."), ("user", task["inputs"]["question"]), stream=False)
        assert said["content"] == text
        return text

    assert evaluated(agent, script=script).result["score"] == 1.0
    assert ["add"] in names


def test_streams_and_anthropics_messages_are_answered_in_their_form(own_folder: Path) -> None:
    def agent(task: dict[str, Any]) -> str:
        client = OpenAI(base_url=task["base_url"], api_key=task["api_key"], max_retries=0)
        messages: Any = [{"role": "system", "content": "sum"}, {"role": "user", "content": task["inputs"]["question"]}]
        parts = client.chat.completions.create(model="any", messages=messages, stream=True)
        text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        body = {"system": "Write the sum.", "messages": messages[1:], "max_tokens": 9}
        assert post(task, "/messages", body)["content"] == [{"type": "text", "text": text}]
        return text

    report = evaluated(agent, preflight=False)
    assert report.result["score"] == 1.0
    assert [call.request["dialect"] for call in calls_of(report)] == ["chat", "messages"] * 4


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/responses", {"input": "Hi", "previous_response_id": "r"}, "no conversations are kept here"),
        ("/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "n": 2}, "gets one answer"),
        ("/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "speed": 2}, "'speed'"),
        ("/completions", {"prompt": "Hi"}, "answered by chat"),
    ],
)
def test_a_request_that_cannot_be_kept_is_refused_with_a_reason(
    own_folder: Path, path: str, body: dict[str, Any], reason: str
) -> None:
    refusals: list[str] = []

    def agent(task: dict[str, Any]) -> str:
        try:
            post(task, path, body)
        except urllib.error.HTTPError as error:
            refusals.append(f"{error.code} {error.read().decode()}")
        return str(chat(task, ("system", "sum"), ("user", task["inputs"]["question"]))["content"])

    assert evaluated(agent).result["score"] == 1.0
    assert all(refusal.startswith("400 ") and reason in refusal for refusal in refusals)


def test_a_model_that_fails_leaves_the_run_unscored(own_folder: Path) -> None:
    Path("a.md").write_text("Write the sum.")

    def script(request: Any) -> Any:
        number = int((request.messages[-1].text or "").split()[2])
        return sums(request) if number % 8 == 1 else ConnectionError("the server is gone")

    report = evaluated(of_file("a.md"), script=script, size=10, preflight=False)
    assert (report.result["n"], report.result["unscored"], report.result["score"]) == (10, 5, 1.0)
    assert {call.failure for call in calls_of(report) if call.error} == {FailureKind.MODEL}


def test_an_agent_that_fails_on_every_task_ends_the_job(own_folder: Path) -> None:
    def agent(task: dict[str, Any]) -> str:
        raise ValueError("no such tool")

    with pytest.raises(ProgramFailed, match="no such tool"):
        evaluated(agent)


def test_an_agent_past_the_gateway_is_refused(own_folder: Path) -> None:
    with pytest.raises(ConfigError, match="without calling the model at its base URL"):
        evaluated(lambda task: "1")


def test_runs_of_an_agent_are_collected_as_groups(own_folder: Path) -> None:
    Path("a.md").write_text("Write the sum.")
    lm = scripted_lm(sums)
    report = assay.collect(agent=of_file("a.md"), rubric=RUBRIC, data=TASKS, lm=lm, n=3, size=4, threads=2)
    assert (report.rollouts, report.tasks, report.result["score"]) == (12, 4, 1.0)
    assert report.calls == lm.scripted.calls == 12  # each rollout of a task is a sample of its own


def summing(task: dict[str, Any]) -> str:
    return str(chat(task, ("system", "Write the sum."), ("user", task["inputs"]["question"]))["content"])


def test_the_temperature_of_an_agent_is_tuned(own_folder: Path) -> None:
    def script(request: Any) -> str:
        return sums(request) if (request.config.temperature or 1.0) < 0.5 else "none"

    report = assay.tune(agent=summing, rubric=RUBRIC, data=TASKS, lm=scripted_lm(script), trials=6, threads=2, seed=1)
    assert report.replaces
    assert list(report.best) == ["temperature"]
    assert report.best["temperature"] < 0.5
    scored = assay.evaluate(report.artifact, rubric=RUBRIC, data=TASKS, lm=scripted_lm(script), size=4)
    assert scored.result["score"] == 1.0


def test_a_program_and_an_agent_exclude_each_other(own_folder: Path) -> None:
    with pytest.raises(ConfigError, match="give either a program or an agent"):
        assay.evaluate("math_qa", agent=of_file("a.md"), rubric=RUBRIC, data=TASKS)
