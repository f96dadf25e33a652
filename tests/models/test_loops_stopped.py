"""A model that repeats itself: its call fails with the kind `loop`; text and cost are recorded."""

import asyncio
from typing import Any

import dspy
import pytest
from dspy import lm15

from assay.errors import ConfigError, FailureKind, LoopStopped
from assay.models import Call, ResponseCache, get_lm, with_recording
from assay.programs.tool_agent import ToolAgent
from assay.testing.fakes import scripted_lm

LOOP = "we add one more and " * 60


class Cut:
    """An engine whose answers end at their limit."""

    supported_params = frozenset({"temperature", "max_tokens"})
    price_usd = 0.5

    def __init__(self, text: str) -> None:
        self.text, self.calls = text, 0

    def complete(self, request: Any) -> Any:
        self.calls += 1
        return lm15.Response(
            id=None,
            model=request.model,
            message=lm15.Message.assistant([lm15.TextPart(self.text)]),
            finish_reason="length",
            usage=lm15.Usage(input_tokens=7, output_tokens=300),
        )


def looping(text: str, **recording: Any) -> Any:
    engine = Cut(text)
    lm = with_recording(dspy.LM("scripted/model", engine=engine, cache=False, num_retries=2), **recording)
    lm.scripted = engine
    return lm


def test_a_call_that_ends_in_a_loop_fails_in_async_calls_too() -> None:
    with pytest.raises(LoopStopped):
        asyncio.run(looping(LOOP).acall("add"))


def test_an_answer_cut_without_a_loop_and_a_complete_one_are_answers() -> None:
    text = " ".join(f"word{number}" for number in range(300))
    assert looping(text)("add") == [text]
    assert scripted_lm(lambda request: LOOP)("add") == [LOOP]  # the model ended it itself


def test_an_answer_that_went_on_after_a_loop_is_an_answer() -> None:
    text = LOOP + " ".join(f"word{number}" for number in range(80))
    assert looping(text)("add") == [text]
    with pytest.raises(LoopStopped, match="from word 6 on"):
        looping(LOOP + " we add one mo")("add")  # cut within a word


def test_a_cached_loop_fails_again_without_a_call(tmp_path: Any) -> None:
    calls: list[Call] = []
    lm = looping(LOOP, cache=ResponseCache(tmp_path / "c"), observers=[calls.append])
    for _ in range(2):
        with pytest.raises(LoopStopped, match="ended after 300 tokens"):
            lm("add")
    assert lm.scripted.calls == 1
    assert [call.cached for call in calls] == [False, True]
    assert {call.failure for call in calls} == {FailureKind.LOOP}


def test_hosted_models_cannot_be_stopped() -> None:
    with pytest.raises(ConfigError, match="stop_loops works for embedded models only"):
        get_lm("openai/gpt-4o", api_key="k", stop_loops=True)


@pytest.mark.model
def test_an_embedded_model_is_stopped_long_before_its_limit(embedded: str) -> None:
    calls: list[Call] = []
    lm = get_lm(embedded, temperature=0.0, max_tokens=800, stop_loops=True, observers=[calls.append])
    with pytest.raises(LoopStopped):
        lm("Repeat the word hello forever without stopping." + " hello" * 14)
    (call,) = calls
    assert call.failure is FailureKind.LOOP
    assert call.completion_tokens is not None
    assert 64 <= call.completion_tokens < 200
    assert call.prompt_tokens is not None
    assert call.prompt_tokens > 40
    assert lm("Say hello.")  # the slot is free again


@pytest.mark.model
def test_loop_detection_does_not_change_an_answer(embedded: str) -> None:
    calls: list[Call] = []
    for stops in (False, True):
        lm = get_lm(embedded, temperature=0.0, max_tokens=80, stop_loops=stops, observers=[calls.append], seed=1)
        lm("What is 2+3? Think, then answer.")
    plain, watched = calls
    assert watched.output == plain.output
    assert (watched.prompt_tokens, watched.completion_tokens) == (plain.prompt_tokens, plain.completion_tokens)
    assert plain.token_ids is not None
    assert watched.token_ids is None  # llama.cpp leaves the last one out of a stream: incomplete ids are not recorded


def test_an_agent_ends_when_a_tool_call_brings_nothing_new() -> None:
    results = iter(range(100))

    def poll(job: str) -> str:
        """State of a job."""
        return f"{min(next(results), 3)} of 3"

    def script(request: Any) -> str:
        text = str(request)
        if '"job"' in text or "Write the next call" in text:
            return '{"job": "a"}'
        return '{"thought": "t", "action": "poll", "need": 1.0}' if "Choose" in text else '{"answer": "3"}'

    agent = ToolAgent("question -> answer", [poll], arguments={"poll": {"job": (str, dspy.OutputField())}})
    with dspy.context(lm=scripted_lm(script)):
        steps = agent(question="ready?").steps
    assert [step["result"] for step in steps] == ["0 of 3", "1 of 3", "2 of 3", "3 of 3", "3 of 3"]
