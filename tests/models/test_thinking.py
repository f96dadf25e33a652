"""Thinking budgets: the bytes that each engine is sent, what is refused, and what is recorded."""

from contextlib import AbstractContextManager
from typing import Any

import pytest

from assay.errors import ConfigError
from assay.models import Call, ResponseCache, Thinking, get_lm
from assay.models.thinking import budget_of, thought_tokens
from assay.testing.fakes import scripted_lm
from rigs.serving import answering

VLLM = {"/v1/models": {"data": [{"id": "q", "owned_by": "vllm"}]}}
LLAMA = {"/v1/models": {"data": [{"id": "q", "owned_by": "llamacpp"}]}, "/props": {"chat_template": "<think>{{x}}"}}
LLAMA_PLAIN = {**LLAMA, "/props": {"chat_template": "{{ messages }}"}}
UNKNOWN = {"/v1/models": {"data": [{"id": "q", "owned_by": "somebody"}]}}
CHAT = {
    "id": "1",
    "object": "chat.completion",
    "model": "m",
    "created": 1,
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "5", "reasoning_content": "2+3"},
        }
    ],
    "usage": {
        "prompt_tokens": 3,
        "completion_tokens": 9,
        "total_tokens": 12,
        "completion_tokens_details": {"reasoning_tokens": 7},
    },
}
MESSAGES = {
    "id": "1",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "content": [{"type": "thinking", "thinking": "2+3", "signature": "s"}, {"type": "text", "text": "5"}],
    "stop_reason": "end_turn",
    "usage": {"input_tokens": 3, "output_tokens": 9},
}
GEMINI = {"candidates": [{"content": {"parts": [{"text": "5"}], "role": "model"}, "finishReason": "STOP"}]}


def server(pages: dict[str, Any]) -> AbstractContextManager[tuple[str, list[Any]]]:
    """Answers POST requests in the format of their path."""

    def answer(path: str, body: Any) -> tuple[int, Any]:
        if body is None:
            return (200, pages[path]) if path in pages else (404, {})
        return 200, MESSAGES if "messages" in path else GEMINI if "generateContent" in path else CHAT

    return answering(answer)


def sent(name: str, thinking: Any, pages: dict[str, Any], path: str = "/v1") -> tuple[dict[str, Any], Call]:
    """The body that a budget leads to, and the recorded call."""
    calls: list[Call] = []
    with server(pages) as (url, bodies):
        lm = get_lm(name, api_base=url + path, api_key="k", num_retries=0, max_tokens=500, observers=[calls.append])
        lm("What is 2+3?", thinking=thinking)
    return bodies[-1], calls[-1]


def test_off_is_sent_to_vllm_as_no_tokens_and_to_the_template() -> None:
    body, call = sent("openai/q", "off", VLLM)
    assert (body["thinking_token_budget"], body["chat_template_kwargs"]) == (0, {"enable_thinking": False})
    assert budget_of(call.request) == 0


def test_llama_cpp_gets_its_budget_field() -> None:
    assert sent("openai/q", 64, LLAMA)[0]["reasoning_budget_tokens"] == 64
    assert sent("openai/q", 0, LLAMA)[0]["reasoning_budget_tokens"] == 0


@pytest.mark.parametrize("pages", [VLLM, LLAMA, LLAMA_PLAIN, UNKNOWN])
def test_budget_auto_sends_no_limit(pages: dict[str, Any]) -> None:
    assert set(sent("openai/q", "auto", pages)[0]) == {"model", "messages", "max_completion_tokens"}


def test_anthropic_and_gemini_get_tokens_and_effort() -> None:
    body, call = sent("anthropic/claude-sonnet-4-5", 2048, {}, path="")
    assert (body["thinking"], body["max_tokens"]) == ({"type": "enabled", "budget_tokens": 2048}, 2548)
    assert budget_of(call.request) == 2048
    assert sent("anthropic/claude-opus-4-6", "low", {}, path="")[0]["output_config"] == {"effort": "low"}
    assert "thinking" not in sent("anthropic/claude-sonnet-4-5", "off", {}, path="")[0]
    for thinking, tokens in ((64, 64), ("low", 2048), ("off", 0)):
        config = sent("gemini/gemini-2.5-flash", thinking, {}, path="")[0]["generationConfig"]
        assert config["thinkingConfig"] == {"thinkingBudget": tokens}


@pytest.mark.parametrize(
    ("name", "thinking", "pages", "reason"),
    [
        ("openai/q", 64, LLAMA_PLAIN, "no thinking tags"),
        ("openai/q", "low", UNKNOWN, "does not say that it is vLLM or llama.cpp"),
        ("openai/q", "off", {}, "does not say that it is vLLM or llama.cpp"),
        ("anthropic/claude-opus-4-6", 2048, {}, "takes effort words"),
        ("anthropic/claude-sonnet-4-5", 64, {}, "at least 1024 tokens"),
        ("anthropic/claude-3-haiku-20240307", "low", {}, "not known to think.*limits that field instead"),
    ],
)
def test_a_budget_that_an_engine_cannot_keep_is_refused_before_any_request(
    name: str, thinking: Any, pages: dict[str, Any], reason: str
) -> None:
    with server(pages) as (url, bodies):
        lm = get_lm(name, api_base=f"{url}/v1", api_key="k", num_retries=0)
        with pytest.raises(ConfigError, match=reason):
            lm("What is 2+3?", thinking=thinking)
    assert bodies == []


def test_an_embedded_model_without_thinking_tags_is_refused(model_name: str) -> None:
    for thinking in (64, "low", "off"):
        with pytest.raises(ConfigError, match="no thinking tags"):
            get_lm(model_name, thinking=thinking)("hello")


def test_a_custom_engine_must_declare_that_it_thinks() -> None:
    with pytest.raises(ConfigError, match="supports_reasoning"):
        scripted_lm(lambda request: "5")("hello", thinking=64)
    lm = scripted_lm(lambda request: str(request.config.reasoning.thinking_budget))
    lm.scripted.supports_reasoning = True
    assert lm("hello", thinking=64) == ["64"]
    assert lm.copy(thinking=32)("hello") == ["32"]
    assert lm.copy(thinking=32)("hello", thinking=16) == ["16"]  # the call's own budget comes first


def test_the_budget_is_part_of_the_cache_key(tmp_path: Any) -> None:
    lm = scripted_lm(lambda request: "5", cache=ResponseCache(tmp_path / "c"))
    lm.scripted.supports_reasoning = True
    for thinking in (64, 64, 128, "off", "auto", None):
        lm("hello", thinking=thinking)
    assert lm.scripted.calls == 4  # 64, 128, off, and none at all


@pytest.mark.parametrize("value", [-1, 1.5, True, "lots", {"tokens": 1, "effort": "low"}, {"words": 3}, [1]])
def test_invalid_budgets_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="thinking"):
        Thinking.of(value)


REQUEST = {
    "config": {
        "response_format": {"schema": {"properties": {"thought": {"maxLength": 64}, "answer": {}}, "type": "object"}}
    }
}


@pytest.mark.parametrize(
    ("tokens", "thinking"),
    [
        (['{"', "thought", '": "', "a", " b", ' \\"', "c", '", "', "answer", '": "x"}'], 4),
        (["thought", ": ", "a", " b", "\n", "answer", ": ", "x"], 2),
        (['{"thought": "', '", "answer": "x"}'], 0),
        (['{"thought": "', "a", " b"], 2),  # cut by a limit
    ],
)
def test_the_tokens_of_a_thought_field_are_counted(tokens: list[str], thinking: int) -> None:
    assert thought_tokens(REQUEST, "", tokens, len) == thinking
    assert budget_of(REQUEST) == 16
