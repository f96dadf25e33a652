"""Which rollout a request continues, where it names none: requests as real clients send them, over HTTP."""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from prompt_forms import ADAPTERS, VALUES, answer_of, prompt_of

from assay.datasets.tasks import Task
from assay.models.codec import value_tokens
from assay.rubrics import steps
from assay.rubrics.trl_reward import completion_fields
from assay.support.scrubbing import MARK, add_secrets
from assay.traces import Rollout, ToolCall, Transition
from assay.traces.gateway.requests import storable
from assay.traces.store.sealing import SplitFinder, store_tasks
from rigs.gateway import AnsweringServer, Stage, body_of, opened_stage, stage as stage, user
from rigs.upstream import response_body

Message = dict[str, Any]
Answers = Callable[[list[Message]], Message]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("calculator", "final_answer")
]


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Callable[[Answers], Stage]]:
    """A gateway whose model answers with the result of a function."""
    scripts: list[Answers] = []
    numbers = itertools.count(1)

    async def answer(request: web.Request) -> web.Response:
        message = {"role": "assistant", **scripts[-1]((await request.json())["messages"])}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        return web.json_response({"id": f"c{next(numbers)}", "choices": choices})

    with opened_stage(tmp_path, AnsweringServer(answer)) as stage:

        def begin(script: Answers) -> Stage:
            scripts.append(script)
            return stage

        yield begin


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


# -- one rollout, or another one


def test_a_growing_conversation_is_one_rollout_and_equal_ones_are_a_group(stage: Stage) -> None:
    for _ in range(3):  # three samples of one task, answered alike
        stage.chat(user("one"))
    for _ in range(3):  # each is continued
        stage.chat(user("one"), assistant("echo: one"), user("two"))
    stage.chat(user("other"))
    rollouts = stage.rollouts()
    assert sorted(stage.turns) == [1, 2, 2, 2]
    assert len({r.group_id for r in rollouts if len(r.transitions) == 2}) == 1
    assert all([t.t for t in r.transitions] == list(range(len(r.transitions))) for r in rollouts)


@pytest.mark.parametrize("at_once", [False, True])
def test_smolagents_writes_tool_calls_as_text_and_stays_one_rollout(stage: Stage, at_once: bool) -> None:
    def parts(role: str, text: str) -> Message:
        return {"role": role, "content": [{"type": "text", "text": text}]}

    begun = [parts("system", "You solve tasks by tool calls."), parts("user", "New task:\nuse the tool")]
    agents = [[*begun], [*begun]]  # the same task twice
    for _, messages in sorted(enumerate(agents * 3), key=lambda step: step[0] if at_once else step[0] % 2):
        call = stage.chat(*messages, tools=TOOLS, tool_choice="required")["tool_calls"][0]
        function = {"name": "calculator", "arguments": {"expression": "6*7"}}
        rewritten = {"id": call["id"], "type": "function", "function": function}
        messages += [
            parts("assistant", f"Calling tools:\n[{rewritten}]"),
            parts("user", "Observation:\n42; use the tool"),
        ]
    assert stage.turns == [3, 3]
    assert len({rollout.group_id for rollout in stage.rollouts()}) == 1


def test_an_answer_whose_json_the_client_reformatted_is_recognised(scripted: Callable[[Answers], Stage]) -> None:
    stage = scripted(lambda messages: {"content": '{"b": 1,\n "a": [2]}'})
    stage.chat(user("json"))
    stage.chat(user("json"), assistant('{"a": [2], "b": 1}'), user("more"))
    assert stage.turns == [2]


def test_a_client_that_sends_no_answers_back_has_one_rollout(stage: Stage) -> None:
    for texts in (("one",), ("one", "two"), ("one", "two", "three")):
        stage.chat(*map(user, texts))
    assert stage.turns == [3]


def test_a_conversation_with_the_same_beginning_is_another_rollout(stage: Stage) -> None:
    stage.chat(user("hello"))
    stage.chat(user("hello"), assistant("Somebody else answered this, long ago."), user("two"))
    assert stage.turns == [1, 1]


def test_a_request_that_insists_on_a_tool_after_an_answer_stays_in_the_rollout(stage: Stage) -> None:
    stage.chat(user("hello"), tools=TOOLS)
    stage.chat(user("hello"), tools=TOOLS, tool_choice={"type": "function", "function": {"name": "final_answer"}})
    stage.chat(user("hello"), tools=TOOLS)  # the same task anew
    assert stage.turns == [2, 1]


def test_a_shorter_request_after_a_failed_call_stays_in_the_rollout(stage: Stage) -> None:
    answer = stage.chat(user("one"))
    assert stage.post("chat", {"model": "m", "messages": [user("one"), answer, user("#500, and long")]})[0] == 500
    stage.chat(user("one"), answer, user("shorter"))
    assert stage.turns == [3]


def test_another_conversation_with_the_beginning_of_a_partial_answer_is_another_rollout(stage: Stage) -> None:
    question = "Hello, and #hang"
    with stage.client.chat.completions.create(model="m", messages=[user(question)], stream=True) as chunks:  # type: ignore[list-item]
        assert "".join(next(chunks).choices[0].delta.content or "" for _ in range(4))  # and closes the connection
    stage.chat(user(question), assistant("Somebody else answered this, long ago."), user("two"))
    assert stage.turns == [1, 1]


def test_tool_results_that_are_sent_twice_are_a_fork(stage: Stage) -> None:
    answer = stage.chat(user("use the tool"), tools=TOOLS)
    for result in ("42", "43"):
        tool_message = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": result}
        stage.chat(user("use the tool"), answer, tool_message, tools=TOOLS)
    assert stage.turns == [2, 1]


def test_responses_continue_by_their_id_or_their_conversation(stage: Stage) -> None:
    def respond(**more: Any) -> str:
        status, reply = stage.post("responses", {"model": "m", "input": "hello", **more})
        assert status == 200
        return str(reply["id"])

    respond(previous_response_id=respond())
    for conversation in ("conv_1", {"id": "conv_1"}, "conv_2"):
        respond(conversation=conversation)
    assert stage.turns == [2, 2, 1]


# -- programs of DSPy, whose prompts contain anew what was before


def test_a_predictor_that_reads_an_earlier_output_belongs_to_the_same_run(scripted: Callable[[Answers], Stage]) -> None:
    numbers = itertools.count(1)
    stage = scripted(
        lambda messages: assistant(
            f"[[ ## reasoning ## ]]\nthought number {next(numbers)}\n\n[[ ## draft ## ]]\na draft\n\n"
            "[[ ## answer ## ]]\n7\n\n[[ ## completed ## ]]"
        )
    )
    question = {"question": "six times seven?"}
    for _ in range(2):
        stage.chat(*prompt_of(ADAPTERS["ChatAdapter"], "question -> draft", question))
        stage.chat(*prompt_of(ADAPTERS["ChatAdapter"], "question, draft -> answer", {**question, "draft": "a draft"}))
    assert stage.turns == [2, 2]


@pytest.mark.parametrize("form", ADAPTERS)
def test_sealed_tasks_of_several_inputs_and_lines_are_recognised(
    scripted: Callable[[Answers], Stage], form: str
) -> None:
    adapter, signature = ADAPTERS[form], "question, context: list[str], n: int -> answer"
    sealed = [
        {"question": f"{value}\nof place {at}?", "context": [value, "b"], "n": at} for at, value in enumerate(VALUES)
    ]
    kept = [{**inputs, "n": inputs["n"] + 100} for inputs in sealed]
    stage = scripted(lambda messages: {"content": answer_of(adapter, signature, {"answer": "far away"})})
    for split, tasks in (("test", sealed), ("train", kept)):
        store_tasks(stage.store, {split: [Task(id=f"{split} {at}", inputs=inputs) for at, inputs in enumerate(tasks)]})
    for demos in ([], [{"question": "q", "context": ["c"], "n": 1, "answer": "a"}]):
        for inputs in [*sealed, *kept]:
            stage.chat(*prompt_of(adapter, signature, inputs, demos))
    stage.gateway.rollouts.sweep(all_of_them=True)
    finder = SplitFinder(stage.store)
    recorded = [rollout.inputs for rollout in stage.rollouts()]
    expected = ([True] * len(sealed) + [False] * len(kept)) * 2
    assert [finder.knows_as_sealed(inputs) for inputs in recorded] == expected
    assert {finder.of_inputs(inputs) for inputs in recorded[: len(sealed)]} == {"test"}


def test_the_arguments_of_dspys_submit_are_the_answer_of_a_run(scripted: Callable[[Answers], Stage]) -> None:
    fields = {"answer": "two\nlines", "score": 3}
    call = {"id": "c1", "type": "function", "function": {"name": "submit", "arguments": json.dumps(fields)}}
    submit = {"type": "function", "function": {"name": "submit", "parameters": {"type": "object", "properties": {}}}}
    stage = scripted(lambda messages: {"content": "I am done", "tool_calls": [call]})
    for adapter in ADAPTERS.values():
        stage.chat(*prompt_of(adapter, "question -> thought", {"question": "how far?"}), tools=[submit])
    assert [rollout.prediction for rollout in stage.rollouts()] == [fields] * len(ADAPTERS)


def test_a_tool_call_is_the_completion_of_a_reward() -> None:
    for arguments in ({"answer": "4"}, '{"answer": "4"}'):
        call = {"type": "function", "function": {"name": "submit", "arguments": arguments}}
        completion = [{"role": "assistant", "content": "", "tool_calls": [call]}]
        assert completion_fields(completion, ["answer"]) == {"answer": "4"}
    for written in (
        '<tool_call>\n{"name": "submit", "arguments": {"answer": "a < 4"}}\n</tool_call>',
        'Done.<tool_call>{"name": "note", "arguments": {}}</tool_call><tool_call>{"name": "submit", '
        '"parameters": {"answer": "a < 4"}}</tool_call>',
    ):
        assert completion_fields(written, ["answer"]) == {"answer": "a < 4"}
    tools = [ToolCall(name="submit", arguments={"answer": "4"})]
    call_of_run = Transition(t=0, model="m", request={}, output="I am done", tools=tools)
    task, run = Task(id="t", inputs={}), Rollout(transitions=[call_of_run])
    assert steps.parsed(task, {"transition": call_of_run}, run, fields=["answer"]).value == 1


@pytest.mark.parametrize("form", ADAPTERS)
def test_the_tokens_of_a_verdict_are_found(form: str) -> None:
    text = answer_of(ADAPTERS[form], "question -> why, verdict", {"why": "the verdict: no", "verdict": "yes"})
    at = text.rindex("yes")
    tokens = [text[:at], "ye", "s", text[at + 3 :]]
    assert list(value_tokens(tokens, "verdict"))[:2] == [1, 2]
    assert value_tokens(tokens, "other") == range(0)


# -- tool results whose ids the client changed

CALLS = [("c1", "f", '{"a": 1}'), ("c2", "g", "{}"), ("c3", "f", '{"a": 1}')]


def called(*ids: str) -> Message:
    functions = [{"name": name, "arguments": arguments} for _, name, arguments in CALLS]
    calls = [{"id": new, "type": "function", "function": at} for new, at in zip(ids, functions, strict=True)]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def results(**texts: str) -> list[Message]:
    return [{"role": "tool", "tool_call_id": call_id, "content": text} for call_id, text in texts.items()]


OTHER_IDS = [called("x1", "x2", "x3"), *results(x1="r1", x2="r2", x3="r3")]


@pytest.mark.parametrize(
    ("turns", "texts"),
    [
        ([[called("c1", "c2", "c3"), *results(c3="r3", c1="r1", c2="r2")]], ["r1", "r2", "r3"]),
        ([OTHER_IDS], ["r1", "r2", "r3"]),
        ([[called("x1", "x2", "x3"), *results(x3="r3", x1="r1", x2="r2")]], ["r1", "r2", "r3"]),
        ([[called("c1", "c2", "c3"), *results(x1="r1", x2="r2", x3="r3")]], ["r1", "r2", "r3"]),
        ([[called("c1", "x2", "x3"), *results(c1="r1", x2="r2", x3="r3")]], ["r1", "r2", "r3"]),
        ([[called("x1", "x2", "x3"), *results(x2="r2")]], [None, "r2", None]),  # what is missing stays missing
        (
            [OTHER_IDS, [called("y1", "y2", "y3"), *results(y1="s1", y2="s2", y3="s3")]],
            ["r1", "r2", "r3", "s1", "s2", "s3"],
        ),
    ],
)
def test_results_belong_to_their_calls_in_order_where_ids_changed(
    tmp_path: Path, turns: list[list[Message]], texts: list[str | None]
) -> None:
    async def answer(request: web.Request) -> web.Response:
        messages = (await request.json())["messages"]
        done = sum(message["role"] == "assistant" for message in messages) == len(turns)
        return web.json_response(response_body("chat", 1, "m", "done" if done else "", [] if done else CALLS))

    with opened_stage(tmp_path, AnsweringServer(answer)) as stage:
        messages = [user("add")]
        stage.chat(*messages, tools=TOOLS)
        for turn in turns:
            messages += turn
            stage.chat(*messages, tools=TOOLS)
        tools = stage.rollout().tools
    assert [tool.result for tool in tools] == texts
    assert [tool.name for tool in tools] == ["f", "g", "f"] * len(turns)


# -- the known prefix of a conversation, which is not parsed again

SECRET, LATER = "planted-credential-1a2b3c4d", "told-after-the-first-calls-77"


@pytest.mark.parametrize("planted", [-1, 0, 3])
@pytest.mark.parametrize("dialect", ["chat", "messages"])
def test_a_growing_conversation_is_stored_like_its_requests_alone(stage: Stage, dialect: str, planted: int) -> None:
    messages = [user("begin")]
    for turn in range(5):
        arguments = {"expression": f"6*{turn}", **({"api_key": SECRET} if turn == planted else {})}
        if dialect == "chat":
            function = {"name": "calculator", "arguments": json.dumps(arguments)}
            calls = [{"id": f"c{turn}", "type": "function", "function": function}]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
            messages.append({"role": "tool", "tool_call_id": f"c{turn}", "content": "42"})
        else:
            use = {"type": "tool_use", "id": f"c{turn}", "name": "calculator", "input": arguments}
            result = {"type": "tool_result", "tool_use_id": f"c{turn}", "content": "42"}
            messages.append({"role": "assistant", "content": [use]})
            messages.append({"role": "user", "content": [result, {"type": "text", "text": "and now?"}]})
        body = body_of(dialect, messages=messages)
        stage.post(dialect, body)
        stored = stage.rollouts()[-1].transitions[-1].request["body"]
        assert stored == storable(json.loads(json.dumps(body)), [])
        assert SECRET not in json.dumps(stored)


def test_a_key_that_is_registered_later_is_removed_from_a_known_beginning(stage: Stage) -> None:
    messages = [user(f"begin with {LATER}")]
    messages.append(stage.chat(*messages))
    add_secrets(LATER)
    stage.chat(*messages, user("and now?"))
    first, second = (call.request["body"]["messages"][0]["content"] for call in stage.calls())
    assert (first, second) == (f"begin with {LATER}", f"begin with {MARK}")
