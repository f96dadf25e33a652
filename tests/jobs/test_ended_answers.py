"""Refusals, content filters, truncation and reasoning without an answer are named, with the provider's word."""

from pathlib import Path
from typing import Any

import dspy
import pytest

import assay
from assay.rubrics import load_rubric
from assay.traces import Rollout, Transition
from assay.traces.messages.endings import ending_of
from rigs.serving import ChatServer

ROWS = [{"question": f"{n}", "answer": "a"} for n in range(5)]
USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
THOUGHT = {**USAGE, "completion_tokens_details": {"reasoning_tokens": 1}}
CLAUDE = {
    "id": "m",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "usage": {"input_tokens": 1, "output_tokens": 1},
}


def chat(finish: str, **message: Any) -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": None, **message}}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "usage": USAGE, "choices": [choice]}


REPLIES = [
    (chat("content_filter"), ["content filter", "content_filter"]),
    (chat("stop", refusal="I cannot help."), ["refused", "refusal", "I cannot help."]),
    (chat("length", content="[[ ## ans"), ["cut", "length"]),
    (chat("stop", content="", reasoning_content="Let me see."), ["reasoning", "stop"]),
]


def test_the_failure_of_a_run_says_what_ended_its_answer(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    for reply, words in REPLIES:
        with ChatServer(lambda body, reply=reply: reply).serving() as server:
            report = assay.evaluate(
                dspy.Predict("question -> answer"), rubric="exact", data=ROWS, model="openai/m", split="all",
                preflight=False, api_base=server.url,
            )  # fmt: skip
        why = report.to_dict()["result"]["why_failed"]
        assert [word for word in words if word not in why] == []


@pytest.mark.parametrize(
    ("dialect", "body", "words"),
    [
        ("messages", {**CLAUDE, "content": [], "stop_reason": "refusal"}, ["refused", "refusal"]),
        ("messages", {**CLAUDE, "content": [], "stop_reason": "max_tokens"}, ["cut", "max_tokens"]),
        ("gemini", {"candidates": [{"finishReason": "SAFETY"}]}, ["content filter", "SAFETY"]),
        ("gemini", {"candidates": [{"finishReason": "RECITATION"}]}, ["content filter", "RECITATION"]),
        ("gemini", {"promptFeedback": {"blockReason": "PROHIBITED_CONTENT"}}, ["filter", "PROHIBITED_CONTENT"]),
        ("gemini", {"candidates": [{"finishReason": "MAX_TOKENS"}]}, ["cut", "MAX_TOKENS"]),
        ("chat", chat("content_filter"), ["content filter", "content_filter"]),
        ("chat", chat("safety", content=""), ["content filter", "safety"]),
        ("chat", chat("sensitive", content=""), ["content filter", "sensitive"]),
        ("chat", chat("guardrail_intervened"), ["content filter", "guardrail_intervened"]),
        ("chat", chat("model_length", content=""), ["cut", "model_length"]),
        ("chat", chat("insufficient_system_resource", content=""), ["ended", "insufficient_system_resource"]),
        ("chat", {**chat("stop", content=""), "usage": THOUGHT}, ["reasoning", "stop"]),
        ("messages", {**CLAUDE, "content": [], "stop_reason": "model_context_window_exceeded"}, ["cut", "window"]),
        ("messages", {**CLAUDE, "content": [], "stop_reason": "pause_turn"}, ["ended", "pause_turn"]),
        ("gemini", {"candidates": [{"finishReason": "MALFORMED_FUNCTION_CALL"}]}, ["MALFORMED_FUNCTION_CALL"]),
        ("responses", {"output": [], "status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}},
         ["cut", "max_output_tokens"]),
        ("responses", {"output": [], "status": "incomplete", "incomplete_details": {"reason": "content_filter"}},
         ["content filter", "content_filter"]),
    ],
)  # fmt: skip
def test_an_empty_answer_of_a_recorded_agent_says_what_ended_it(
    dialect: str, body: dict[str, Any], words: list[str]
) -> None:
    call = Transition(t=0, model="m", request={"dialect": dialect, "body": {}}, response={"body": body})
    result = load_rubric("exact").score(
        {"inputs": {"question": "?"}, "expected": {"answer": "a"}}, None, Rollout(transitions=[call])
    )
    assert result.failed is not None
    assert [word for word in words if word not in result.failed] == []


@pytest.mark.parametrize("word", ["stop", "eos", "tool_calls", "a_word_of_no_provider"])
def test_an_answer_that_ended_as_usual_has_no_ending(word: str) -> None:
    assert ending_of(Transition(t=0, model="m", request={"dialect": "chat"}, response=chat(word, content="a"))) == ""
