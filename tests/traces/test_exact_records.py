"""What a model answered is in the store byte for byte, through every engine, prompt format and streaming mode."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dspy
import pytest
from aiohttp import web
from dspy import lm15
from exact_answers import ANSWERS, FORMATS, Sentiment, as_turn

from assay.models import ResponseCache, get_lm, with_recording
from assay.programs.adapters import make_adapter
from assay.traces import Recorder, Rollout, Store, Transition
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.upstreams import upstream_of
from assay.traces.messages.dialects import answer_of
from rigs.gateway import CHAT, PATHS, AnsweringServer, send_events
from rigs.serving import post, served


class Fixed(AnsweringServer):
    """An OpenAI-compatible server that gives one message, streamed in pieces where the caller asks for a stream."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.message: dict[str, Any] = {}
        self.url = ""

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        head = {"id": "1", "model": "m", "created": 1, "usage": usage}
        message = {"role": "assistant", "content": None, **self.message}
        if not (await request.json()).get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return web.json_response({**head, "object": "chat.completion", "choices": [choice]})
        text = message.pop("content") or ""
        deltas = [{name: value} for name, value in message.items()]
        deltas += [{"content": text[at : at + 5]} for at in range(0, len(text), 5)]
        choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
        choices.append({"index": 0, "delta": {}, "finish_reason": "stop"})
        chunks = [{**head, "object": "chat.completion.chunk", "choices": [choice]} for choice in choices]
        return await send_events(request, [*chunks, b"data: [DONE]\n\n"])


@pytest.fixture(scope="module")
def fixed() -> Iterator[Fixed]:
    server = Fixed()
    with served(server.app()) as url:
        server.url = url
        yield server


class CustomEngine:
    """A user's DSPy engine, which returns parsed data without the server's reply."""

    supports_function_calling = supports_reasoning = False
    supports_response_schema = True
    supported_params = frozenset({"temperature", "max_tokens", "response_format"})

    def __init__(self, url: str) -> None:
        self.url = url

    def complete(self, request: Any) -> Any:
        _, body = post(self.url + PATHS["chat"], {"messages": []})
        return lm15.response_from_openai_chat(body, model="m")


def lm_of(engine: str, url: str, recorder: Recorder, cache: ResponseCache | None = None) -> Any:
    """A recorded model: with DSPy's client, litellm or a user's engine."""
    options: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": "none"}
    if engine == "native":
        return get_lm("openai/m", observers=[recorder.observe], cache=cache, **options)
    if engine == "own":
        lm = dspy.LM("own/m", engine=CustomEngine(url), cache=False)
    else:
        lm = dspy.LM("openai/m", engine="litellm", cache=False, num_retries=0, **options)
    return with_recording(lm, observers=[recorder.observe], cache=cache)


async def last_part(program: Any, **inputs: Any) -> Any:
    return [part async for part in dspy.streamify(program)(**inputs)][-1]


def stored(store: Store, rollout: Rollout) -> list[Transition]:
    store.flush()
    return store.rollout(rollout.id).transitions


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("engine", ["native", "litellm", "own"])
def test_a_program_answer_is_stored_byte_for_byte(fixed: Fixed, tmp_path: Path, engine: str, streamed: bool) -> None:
    with Store(tmp_path / "s.db") as store:
        for prompt_format in FORMATS:
            text, adapter = ANSWERS[prompt_format], make_adapter(prompt_format)
            recorder, cache, fixed.message = Recorder(store), ResponseCache(), {"content": text}
            for cached in (False, True):
                rollout, program = Rollout(), dspy.Predict(Sentiment)
                lm = lm_of(engine, fixed.url, recorder, cache)
                with dspy.context(lm=lm, adapter=adapter), recorder.rollout(rollout):
                    prediction = asyncio.run(last_part(program, text="fine")) if streamed else program(text="fine")
                (transition,) = stored(store, rollout)
                assert (transition.error, transition.cached, transition.output) == (None, cached, text)
                assert adapter.parse(Sentiment, transition.output) == dict(prediction.items())
                turn = as_turn(transition)
                assert turn.answer == {"role": "assistant", "content": text}  # what an export trains on
                assert turn.problem(rollout, True) is None


@pytest.mark.parametrize("prompt_format", ["json", "chat"])
def test_the_embedded_models_answer_is_stored_as_the_program_read_it(
    small_embedded: str, tmp_path: Path, prompt_format: str
) -> None:
    with Store(tmp_path / "s.db") as store:
        recorder, rollout = Recorder(store), Rollout()
        lm = get_lm(small_embedded, observers=[recorder.observe], temperature=0.1, max_tokens=60, seed=1)
        with dspy.context(lm=lm, adapter=make_adapter(prompt_format)), recorder.rollout(rollout):
            try:
                read = dict(dspy.Predict(Sentiment)(text="A fine day.").items())
            except dspy.utils.exceptions.AdapterParseError as error:  # ChatAdapter, which nothing constrains
                read = error.lm_response
        calls = stored(store, rollout)
    transition, used = calls[-1], "json" if len(calls) > 1 else prompt_format  # ChatAdapter asks again as JSON
    parsed = transition.output if isinstance(read, str) else make_adapter(used).parse(Sentiment, transition.output)
    assert transition.output
    assert parsed == read
    assert as_turn(transition).answer["content"] == transition.output


IMAGE = {"type": "image_url", "image_url": {"url": "https://x.org/a.png"}}
MESSAGES: dict[str, tuple[dict[str, Any], str]] = {
    "refusal": ({"refusal": "I cannot help with that."}, "I cannot help with that."),
    "reasoning": ({"content": "four", "reasoning_content": "2 and 2 make 4"}, "four"),
    "parts": ({"content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}, "one two"),
    "image": ({"content": "here", "images": [IMAGE]}, "here[image: https://x.org/a.png]"),
    "blank": ({"content": "  \n"}, "  \n"),
}


@pytest.mark.parametrize("engine", ["native", "gateway"])
@pytest.mark.parametrize("kind", MESSAGES)
def test_every_kind_of_answer_is_stored(fixed: Fixed, tmp_path: Path, kind: str, engine: str) -> None:
    fixed.message, expected = MESSAGES[kind]
    with Store(tmp_path / "s.db") as store:
        rollout = Rollout()
        if engine == "native":
            recorder = Recorder(store)
            with recorder.rollout(rollout):
                lm_of(engine, fixed.url, recorder)("hello")
        else:
            with served(Gateway(store, upstream_of("m", base=fixed.url)).app()) as gateway:
                post(f"{gateway}/r/{rollout.id}{PATHS['chat']}", CHAT)
        (transition,) = stored(store, rollout)
    body = (transition.response or {}).get("body", transition.response)
    answer = answer_of(transition.request.get("dialect"), body)
    assert (transition.error, transition.output, answer.output) == (None, expected, expected)
    assert answer.reasoning == (fixed.message.get("reasoning_content") or "")


def test_a_tool_that_the_model_asked_for_is_one_record_with_its_result(fixed: Fixed) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "double", "arguments": '{"x": 2}'}}
    fixed.message = {"tool_calls": [call]}

    def double(x: int) -> int:
        return 2 * x

    recorder = Recorder()
    with recorder.active(), recorder.rollout(Rollout()) as rollout:
        lm_of("native", fixed.url, recorder)("hello")
        assert [(t.name, t.result) for t in rollout.tools] == [("double", None)]
        for x in (2, 3):
            dspy.Tool(double)(x=x)
    assert [(t.arguments, t.result) for t in rollout.tools] == [({"x": 2}, "4"), ({"x": 3}, "6")]
