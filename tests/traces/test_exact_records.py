"""What a model answered is in the store byte for byte, through every engine, prompt format and streaming mode."""

import asyncio
import json
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
from rigs.serving import post, served


class Fixed:
    """An OpenAI-compatible server that gives one message, streamed in pieces where the caller asks for a stream."""

    def __init__(self) -> None:
        self.message: dict[str, Any] = {}
        self.finish = "stop"

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._chat)
        return app

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body, usage = await request.json(), {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        head = {"id": "1", "model": "m", "created": 1, "usage": usage}
        message = {"role": "assistant", "content": None, **self.message}
        if not body.get("stream"):
            return web.json_response(
                {
                    **head,
                    "object": "chat.completion",
                    "choices": [{"index": 0, "message": message, "finish_reason": self.finish}],
                }
            )
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        deltas: list[dict[str, Any]] = [{key: value} for key, value in message.items() if key != "content"]
        deltas += [{"content": message["content"][at : at + 5]} for at in range(0, len(message["content"] or ""), 5)]
        for delta in [*deltas, None]:
            choice = {"index": 0, "delta": delta or {}, "finish_reason": None if delta is not None else self.finish}
            await response.write(
                f"data: {json.dumps({**head, 'object': 'chat.completion.chunk', 'choices': [choice]})}\n\n".encode()
            )
        await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture(scope="module")
def fixed() -> Iterator[tuple[Fixed, str]]:
    server = Fixed()
    with served(server.app()) as url:
        yield server, url


def lm_of(engine: str, url: str, recorder: Recorder, cache: ResponseCache | None = None) -> Any:
    """A recorded model: with DSPy's client, litellm or a user's engine."""
    if engine == "native":
        return get_lm("openai/m", api_base=f"{url}/v1", api_key="none", observers=[recorder.observe], cache=cache)
    lm = dspy.LM("openai/m", api_base=f"{url}/v1", api_key="none", engine="litellm", cache=False, num_retries=0)
    if engine == "own":
        lm = dspy.LM("own/m", engine=CustomEngine(f"{url}/v1"), cache=False)
    return with_recording(lm, observers=[recorder.observe], cache=cache)


class CustomEngine:
    """A user's DSPy engine, which returns parsed data without the server's reply."""

    supports_function_calling = supports_reasoning = False
    supports_response_schema = True
    supported_params = frozenset({"temperature", "max_tokens", "response_format"})

    def __init__(self, url: str) -> None:
        self.url = url

    def complete(self, request: Any) -> Any:
        _, body = post(f"{self.url}/chat/completions", {"messages": []})
        return lm15.response_from_openai_chat(body, model="m")


def run(program: Any, *, streamed: bool, **inputs: Any) -> Any:
    if not streamed:
        return program(**inputs)

    async def collect() -> Any:
        parts = [part async for part in dspy.streamify(program)(**inputs)]
        return parts[-1]

    return asyncio.run(collect())


def stored(store: Store, rollout: Rollout) -> list[Transition]:
    store.flush()
    return store.rollout(rollout.id).transitions


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("prompt_format", FORMATS)
@pytest.mark.parametrize("engine", ["native", "litellm", "own"])
def test_a_program_answer_is_stored_byte_for_byte(
    fixed: tuple[Fixed, str], tmp_path: Path, engine: str, prompt_format: str, streamed: bool
) -> None:  # fmt: skip
    server, url = fixed
    server.message, cache = {"content": ANSWERS[prompt_format]}, ResponseCache()
    with Store(tmp_path / "s.db") as store:
        recorder = Recorder(store)
        for cached in (False, True):
            rollout = Rollout()
            with (
                dspy.context(lm=lm_of(engine, url, recorder, cache), adapter=make_adapter(prompt_format)),
                recorder.rollout(rollout),
            ):
                prediction = run(dspy.Predict(Sentiment), streamed=streamed, text="fine")
            (transition,) = stored(store, rollout)
            assert (transition.error, transition.cached, transition.output) == (None, cached, ANSWERS[prompt_format])
            assert make_adapter(prompt_format).parse(Sentiment, transition.output) == dict(prediction.items())
            turn = as_turn(transition)
            assert turn.answer == {"role": "assistant", "content": ANSWERS[prompt_format]}  # what an export trains on
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


MESSAGES: dict[str, tuple[dict[str, Any], str]] = {
    "refusal": ({"refusal": "I cannot help with that."}, "I cannot help with that."),
    "reasoning": ({"content": "four", "reasoning_content": "2 and 2 make 4"}, "four"),
    "parts": ({"content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}, "one two"),
    "image": (
        {"content": "here", "images": [{"type": "image_url", "image_url": {"url": "https://x.org/a.png"}}]},
        "here[image: https://x.org/a.png]",
    ),
    "blank": ({"content": "  \n"}, "  \n"),
}


@pytest.mark.parametrize("engine", ["native", "gateway"])
@pytest.mark.parametrize("kind", MESSAGES)
def test_every_kind_of_answer_is_stored(fixed: tuple[Fixed, str], tmp_path: Path, kind: str, engine: str) -> None:
    server, url = fixed
    server.message, expected = MESSAGES[kind]
    with Store(tmp_path / "s.db") as store:
        rollout = Rollout()
        if engine == "native":
            recorder = Recorder(store)
            with recorder.rollout(rollout):
                lm_of(engine, url, recorder)("hello")
        else:
            with served(Gateway(store, upstream_of("m", base=url)).app()) as gateway:
                post(
                    f"{gateway}/r/{rollout.id}/v1/chat/completions",
                    {"messages": [{"role": "user", "content": "hello"}]},
                )
        (transition,) = stored(store, rollout)
        answer = answer_of(
            transition.request.get("dialect"), (transition.response or {}).get("body", transition.response)
        )
    assert (transition.error, transition.output) == (None, expected)
    assert answer.output == expected
    assert answer.reasoning == (server.message.get("reasoning_content") or "")


def test_a_tool_that_the_model_asked_for_is_one_record_with_its_result(fixed: tuple[Fixed, str]) -> None:
    server, url = fixed
    call = {"id": "c1", "type": "function", "function": {"name": "double", "arguments": '{"x": 2}'}}
    server.message = {"tool_calls": [call]}

    def double(x: int) -> int:
        return 2 * x

    recorder = Recorder()
    with recorder.active(), recorder.rollout(Rollout()) as rollout:
        lm_of("native", url, recorder)("hello")
        assert [(t.name, t.result) for t in rollout.tools] == [("double", None)]
        dspy.Tool(double)(x=2)
        dspy.Tool(double)(x=3)
    assert [(t.arguments, t.result) for t in rollout.tools] == [({"x": 2}, "4"), ({"x": 3}, "6")]
