"""Imports: requests and answers in the dialects of other APIs read as chat."""

from pathlib import Path
from typing import Any

from importing_rows import body, choice, langfuse, observation

CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
ANSWERS: list[tuple[Any, str, list[Any] | None, str | None]] = [  # output, text, calls, finish reason
    ({"choices": [{"message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}]}, "a", None, "stop"),
    ({"choices": [{"text": "a", "finish_reason": "length"}]}, "a", None, "length"),
    (
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "a"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}},
            ],
            "stop_reason": "tool_use",
        },
        "a",
        [CALLED],
        "tool_calls",
    ),
    ([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}], "a", None, None),
    (
        {
            "output": [
                {"type": "reasoning", "summary": []},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x": 1}'},
            ]
        },
        "a",
        [CALLED],
        "tool_calls",
    ),
    (
        {
            "candidates": [
                {
                    "content": {
                        "role": "model",
                        "parts": [{"text": "a"}, {"functionCall": {"id": "c", "name": "f", "args": {"x": 1}}}],
                    },
                    "finishReason": "stop",
                }
            ]
        },
        "a",
        [CALLED],
        "stop",
    ),
    (
        {
            "generations": [
                [
                    {
                        "text": "a",
                        "message": {
                            "type": "ai",
                            "content": "a",
                            "tool_calls": [{"id": "c", "name": "f", "args": {"x": 1}}],
                        },
                    }
                ]
            ]
        },
        "a",
        [CALLED],
        None,
    ),
    (["a", "b"], "a", None, None),
    ({"content": "a"}, "a", None, None),
    (7, "7", None, None),
]


def test_answers_of_other_apis_read_as_chat(tmp_path: Path) -> None:
    for output, text, calls, reason in ANSWERS:
        (run,), _ = langfuse(tmp_path, observation(1, input="q", output=output))
        (call,) = run.transitions
        assert (call.output, choice(call)["message"].get("tool_calls"), choice(call)["finish_reason"]) == (
            text,
            calls,
            reason,
        ), output


def test_requests_of_other_apis_read_as_chat(tmp_path: Path) -> None:
    user = {"role": "user", "content": "a"}
    requests = [
        ("a", [user]),
        ({"prompt": "a"}, [user]),
        ([[{"type": "human", "content": "a"}]], [user]),
        ({"args": ["a"], "kwargs": {}}, [user]),
        (
            {
                "instructions": "s",
                "input": [
                    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c", "output": "r"},
                ],
            },
            [
                {"role": "system", "content": "s"},
                user,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "c", "content": "r"},
            ],
        ),
        (
            {"contents": [{"role": "user", "parts": [{"text": "a"}]}], "systemInstruction": {"parts": [{"text": "s"}]}},
            [{"role": "system", "content": "s"}, user],
        ),
        (
            [{"lc": 1, "type": "constructor", "id": ["HumanMessage"], "kwargs": {"content": "a", "type": "human"}}],
            [user],
        ),
        ('{"input": [{"role": "user", "content": "a"}]}', [user]),
        ([{**user, "name": "eve"}], [{**user, "name": "eve"}]),
        ({"question": "a"}, [user]),
        (["a", "b"], [user, {"role": "user", "content": "b"}]),
    ]
    for request, expected in requests:
        (run,), _ = langfuse(tmp_path, observation(1, input=request, output="x"))
        assert body(run.transitions[0])["messages"] == expected, request
