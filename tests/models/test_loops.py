"""Loop detection: copies, reuse of word groups, tool calls; a call that ends in a loop fails and is recorded."""

import asyncio
import itertools
import random
import string
import sysconfig
from pathlib import Path
from typing import Any

import dspy
import pytest
from dspy import lm15
from hypothesis import given, settings, strategies as st

from assay.errors import ConfigError, FailureKind, LoopStopped
from assay.models import Call, ResponseCache, get_lm, with_recording
from assay.models.loops import LoopDetector, ToolLoopDetector, find_loop
from assay.programs.tool_agent import ToolAgent
from assay.testing.fakes import scripted_lm

ROOT = Path(__file__).resolve().parents[2]
WORDS = st.text(string.ascii_lowercase, min_size=1, max_size=6)


def prose(words: int, seed: int) -> list[str]:
    """Words without structure: no group of four is likely to occur twice."""
    rng = random.Random(seed)
    return ["".join(rng.choices(string.ascii_lowercase, k=5)) for _ in range(words)]


@settings(deadline=None)
@given(phrase=st.lists(WORDS, min_size=1, max_size=80), before=st.integers(0, 300), seed=st.integers(0, 99))
def test_every_repeated_phrase_is_found_at_the_latest_16_words_late(phrase: list[str], before: int, seed: int) -> None:
    # A period of at most 80 words is found within 5 copies, or 1024 words' level for longer ones.
    detector, lead = LoopDetector(), prose(before, seed)
    for word in lead:
        assert detector.add_word(word) is None
    needed = max(4 * len(phrase), 64)
    stride = 16 if needed <= 256 - 16 else 64
    for index in range(needed + stride):
        if detector.add_word(phrase[index % len(phrase)]) is not None:
            break
    loop = detector.loop
    assert loop is not None
    if loop.kind == "copies":
        assert len(phrase) % loop.period == 0
        # the first copy is not a repetition, so a loop never begins before its second copy
        assert loop.start >= before - len(phrase)
        assert loop.repeated >= needed - len(phrase) - 1


@settings(deadline=None, max_examples=40)
@given(words=st.lists(WORDS, max_size=400, unique=True), seed=st.integers(0, 99))
def test_words_without_repetition_raise_no_alarm(words: list[str], seed: int) -> None:
    assert find_loop(" ".join(words)) is None
    assert find_loop(" ".join(prose(800, seed))) is None


@settings(deadline=None, max_examples=60)
@given(text=st.text("ab 1.,\n", max_size=600), cuts=st.lists(st.integers(0, 600), max_size=12))
def test_the_parts_in_which_a_text_arrives_make_no_difference(text: str, cuts: list[int]) -> None:
    whole, parts, at = LoopDetector(), LoopDetector(), sorted({0, *cuts, len(text)})
    whole.add(text + " ")
    for begin, end in itertools.pairwise(at):
        parts.add(text[begin:end])
    parts.add(text[at[-1] :] + " ")
    assert parts.loop == whole.loop
    assert parts.words == whole.words


def test_a_ruled_line_and_an_empty_table_are_no_loops() -> None:
    assert find_loop("=" * 5000) is None
    assert find_loop("| " + " | ".join("-" * 3 for _ in range(12)) + " |\n") is None


def test_documents_and_sources_raise_no_alarm() -> None:
    # cp852 is a table of 256 numbered lines, mimetypes one of file types
    library = ("argparse", "json/decoder", "encodings/cp852", "statistics", "mimetypes", "socket")
    files = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md"), *(ROOT / "src/assay/models").glob("*.py")]
    assert len(files) > 40
    files += [Path(sysconfig.get_paths()["stdlib"]) / f"{module}.py" for module in library]
    alarms = {str(path): loop for path in files if (loop := find_loop(path.read_text(encoding="utf-8")))}
    assert alarms == {}


def test_the_same_call_with_the_same_result_is_a_loop() -> None:
    detector = ToolLoopDetector()
    assert detector.add("search", {"q": "a", "n": 2}, "x") is None
    assert detector.add("search", {"q": "b", "n": 2}, "x") is None
    loop = detector.add("search", {"n": 2.0, "q": " a "}, "x")  # the same call, written differently
    assert loop is not None
    assert (loop.kind, loop.start, loop.end) == ("same call", 2, 3)


def test_a_call_that_returns_something_new_is_progress() -> None:
    detector = ToolLoopDetector()
    for turn in range(20):
        assert detector.add("status", {"job": 1}, f"{turn} %") is None


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
