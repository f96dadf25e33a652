"""Step checks: what is read from the record of a step, each with a case that fails it."""

from typing import Any

import pytest

from assay.datasets import Task
from assay.errors import FailureKind
from assay.rubrics import NoGrade, steps
from assay.support.sections import LINES
from assay.traces import Rollout, ToolCall, Transition

TASK = Task(id="t", inputs={"question": "?"}, metadata={"tool_calls": 2})


def call(arguments: dict[str, Any], result: str | None = "2", error: str | None = None) -> ToolCall:
    return ToolCall(name="calculator", arguments=arguments, result=result, error=error)


def graded(check: Any, rollout: Rollout, t: int, **options: Any) -> float | None:
    try:
        return float(check(TASK, {"transition": rollout.transitions[t]}, rollout, **options).value)
    except NoGrade:
        return None


def rollout(*turns: Transition, **options: Any) -> Rollout:
    return Rollout(transitions=[*turns], **options)


def turn(
    t: int, *tools: ToolCall, output: str = "x", request: dict[str, Any] | None = None, error: str | None = None
) -> Transition:
    return Transition(t=t, model="m", request=request or {}, output=output, tools=[*tools], error=error)


SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}


def asks(schema: dict[str, Any]) -> dict[str, Any]:
    return {"config": {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}}


@pytest.mark.parametrize(
    ("output", "request_", "options", "expected"),
    [
        ('{"expression": "1+1"}', asks(SCHEMA), {}, 1),
        ('{"expression": 3}', asks(SCHEMA), {}, 0),
        ('{"expression": ""}', asks(SCHEMA), {}, 0),
        ("no JSON at all", asks(SCHEMA), {}, 0),
        ("[1, 2]", asks(SCHEMA), {}, 0),
        ("expression: 1+1", asks({**SCHEMA, LINES: True}), {}, 1),
        ("expression:", asks({**SCHEMA, LINES: True}), {}, 0),
        ("[[ ## expression ## ]]\n1+1\n\n[[ ## completed ## ]]", {}, {"fields": ["expression"]}, 1),
        ("[[ ## expresion ## ]]\n1+1", {}, {"fields": ["expression"]}, 0),
        ("anything", {}, {}, 1),
        ("", {}, {}, 0),
    ],
)
def test_parsed_accepts_every_prompt_format_and_fails_on_missing_fields(
    output: str, request_: dict[str, Any], options: dict[str, Any], expected: int
) -> None:
    assert graded(steps.parsed, rollout(turn(0, output=output, request=request_)), 0, **options) == expected


def test_parsed_fails_the_step_whose_unparsed_output_ended_the_run() -> None:
    broken = rollout(
        turn(0), turn(1), status="failed", error="the answer could not be read: 'x'", failure=FailureKind.PARSE
    )
    broken.transitions[1].failure = FailureKind.PARSE
    assert [graded(steps.parsed, broken, t) for t in (0, 1)] == [1, 0]
    assert graded(steps.parsed, broken, 0, tools_only=True) is None


def test_an_agent_error_with_similar_wording_is_no_parse_failure() -> None:
    error = "OSError: notes.txt could not be read"
    broken = rollout(turn(0), turn(1), status="failed", error=error, failure=FailureKind.AGENT)
    assert [graded(steps.parsed, broken, t) for t in (0, 1)] == [1, 1]


@pytest.mark.parametrize(
    ("arguments", "request_", "expected"),
    [
        ({"expression": "(3/5)^(-2)"}, {}, 1),
        ({"expression": "sqrt(7"}, {}, 0),
        ({"expression": "the sum"}, {}, 0),
        ({"expression": " "}, {}, 0),
        ({"expression": 12}, {}, 0),
        (
            {"expression": "1+1"},
            {"tools": [{"type": "function", "function": {"name": "calculator", "parameters": SCHEMA}}]},
            1,
        ),
        ({"number": "1+1"}, {"tools": [{"name": "calculator", "parameters": SCHEMA}]}, 0),
        ({"number": "1+1"}, {"body": {"tools": [{"name": "calculator", "input_schema": SCHEMA}]}}, 0),
        ({"code": "def f(:"}, {}, 0),
        ({"sql": "SELECT ')' FROM t WHERE (a = 1)"}, {}, 1),
        ({"sql": "SELECT (a FROM t"}, {}, 0),
        ({"sql": "please list them"}, {}, 0),
    ],
)
def test_eligible_checks_arguments_without_calling_the_tool(
    arguments: dict[str, Any], request_: dict[str, Any], expected: int
) -> None:
    assert graded(steps.eligible, rollout(turn(0, call(arguments), request=request_)), 0) == expected


def test_eligible_accepts_user_argument_languages() -> None:
    run = rollout(turn(0, call({"payload": "{]"})))
    assert graded(steps.eligible, run, 0) == 1
    assert graded(steps.eligible, run, 0, syntax={"payload": "json"}) == 0


def test_a_result_is_used_by_a_later_step_or_the_answer() -> None:
    run = rollout(
        turn(0, call({"expression": "1+1"}, "2")),
        turn(1, call({"expression": "2*3"}, "6")),
        turn(2, output="it is 66"),
        prediction={"answer": "12"},
    )
    assert [graded(steps.result_used, run, t) for t in range(3)] == [1, 0, None]  # 66 contains 6 only as a digit


def asking(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "parts": [{"type": "text", "text": text}]}]}


@pytest.mark.parametrize(
    ("prompt", "used"),
    [
        ('[[ ## context ## ]]\n["Rome is a city", "Rome has 7 hills."]\n\n[[ ## question ## ]]\nWhat of Rome?', 1),
        ("context: [1] «Rome is a city»\n[2] «Rome has 7 hills.»\nquestion: What of Rome?", 1),
        ("Use this: Rome is a city\nRome has 7 hills.", 1),
        ("[[ ## question ## ]]\nWhat of Rome?", 0),
        ("results: search(About Rome) = ['Rome is a city', 'Rome has 7 hills.']\nquestion: What of Rome?", 0),
        (
            "[[ ## trajectory ## ]]\n[[ ## tool_name_0 ## ]]\nsearch\n[[ ## tool_args_0 ## ]]\n"
            '{"query": "About Rome"}\n'
            '[[ ## observation_0 ## ]]\n["Rome is a city", "Rome has 7 hills."]\n[[ ## question ## ]]\nWhat?',
            0,
        ),
    ],
)
def test_a_result_passed_to_the_next_step_is_used_and_a_history_does_not_count(prompt: str, used: int) -> None:
    search = call({"query": "About Rome"}, "['Rome is a city', 'Rome has 7 hills.']")
    run = rollout(
        turn(0, search, output="About Rome"),
        turn(1, output="hills", request=asking(prompt)),
        prediction={"answer": "seven"},
    )
    assert graded(steps.result_used, run, 0) == used


def test_repeated_calls_and_known_results_earn_nothing() -> None:
    run = rollout(
        turn(0, call({"expression": "1+1"})), turn(1, call({"expression": "1+1"})), turn(2, call({"expression": "4-2"}))
    )
    assert [graded(steps.not_repeated, run, t) for t in range(3)] == [1, 0, 1]
    assert [graded(steps.shortened, run, t) for t in range(3)] == [1, 0, 0]
    twice = rollout(turn(0, call({"expression": "1"}), call({"expression": "1"})))
    assert graded(steps.not_repeated, twice, 0) == 0


def test_steps_beyond_the_needed_number_earn_no_shortening_reward() -> None:
    run = rollout(
        *(turn(t, call({"expression": f"{t}+0"}, str(t))) for t in range(3)),
        turn(3, call({"expression": "x"}, None, "failed")),
    )
    assert [graded(steps.shortened, run, t) for t in range(4)] == [1, 1, 0, 0]


def test_a_recorded_schema_is_neither_fetched_nor_executed() -> None:
    slow = {"type": "object", "properties": {"expression": {"pattern": "(1+)+$"}}}
    for schema, expression in (({"$ref": "http://127.0.0.1:9/schema"}, "1"), (slow, "1" * 60 + "+1")):
        offered = {"tools": [{"name": "calculator", "parameters": schema}]}
        assert graded(steps.eligible, rollout(turn(0, call({"expression": expression}), request=offered)), 0) == 1
    request = {"dialect": "responses", "body": {"text": {"format": {"type": "json_schema", "schema": SCHEMA}}}}
    assert graded(steps.parsed, rollout(turn(0, output="not json", request=request)), 0) == 0


@pytest.mark.parametrize(
    ("answer", "used"),
    [
        ("Order 1002 is delivered.", 1),
        ("Order 1002 has an unknown state.", 0),  # the number is an argument of the call
        ("It is undelivered.", 0),
        ("true", 0),
    ],
)
def test_a_value_inside_a_json_result_is_used_where_it_appears(answer: str, used: int) -> None:
    tool = call({"order_id": 1002}, '{"order_id": 1002, "status": "delivered", "paid": true, "tags": []}')
    assert graded(steps.result_used, rollout(turn(0, tool), prediction={"answer": answer}), 0) == used
