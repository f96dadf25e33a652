"""Several completions per call, and text-completion models: a recorded LM behaves like a plain `dspy.LM`."""

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dspy
import pytest
from aiohttp import web

from assay.models import Call, ResponseCache, with_recording
from rigs.serving import served


class Completions:
    """Server for chat and text completions, with the requested number of choices, numbered over all calls."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self._numbers = itertools.count(1)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._text)
        return app

    def _answer(self, body: dict[str, Any], choice: Any) -> web.Response:
        self.requests.append(body)
        form = "[[ ## answer ## ]]\n{}" if "[[ ## answer ## ]]" in str(body) else "{}"
        choices = [
            {"index": i, "finish_reason": "stop", **choice(form.format(f"answer {next(self._numbers)}"))}
            for i in range(body.get("n") or 1)
        ]
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        return web.json_response(
            {"id": "1", "object": "x", "created": 1, "model": "m", "choices": choices, "usage": usage}
        )

    async def _chat(self, request: web.Request) -> web.Response:
        return self._answer(await request.json(), lambda text: {"message": {"role": "assistant", "content": text}})

    async def _text(self, request: web.Request) -> web.Response:
        return self._answer(await request.json(), lambda text: {"text": text})


@pytest.fixture
def server() -> Iterator[tuple[Completions, str]]:
    completions = Completions()
    with served(completions.app()) as url:
        yield completions, f"{url}/v1"


def recorded(url: str, calls: list[Call], tmp_path: Path, **options: Any) -> dspy.LM:
    lm = dspy.LM("openai/m", api_base=url, api_key="k", cache=False, num_retries=0, **options)
    return with_recording(lm, observers=[calls.append], cache=ResponseCache(tmp_path / "cache"))


@pytest.mark.parametrize("engine", ["auto", "litellm"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_each_of_several_completions_is_a_separate_answer(
    server: tuple[Completions, str], tmp_path: Path, engine: str, asynchronous: bool
) -> None:
    calls: list[Call] = []
    lm = recorded(server[1], calls, tmp_path, engine=engine)
    texts = asyncio.run(lm.acall("hello", n=3)) if asynchronous else lm("hello", n=3)
    assert sorted(texts) == ["answer 1", "answer 2", "answer 3"]
    assert [call.output for call in calls] == texts
    assert lm("hello", n=3) == texts  # from the response cache
    assert lm("hello") == texts[:1]
    assert [call.cached for call in calls[3:]] == [True] * 4


def test_the_models_own_setting_of_n_is_used(server: tuple[Completions, str], tmp_path: Path) -> None:
    calls: list[Call] = []
    assert recorded(server[1], calls, tmp_path, n=2)("hello") == ["answer 1", "answer 2"]
    assert len(calls) == 2


def test_predict_returns_all_completions(server: tuple[Completions, str], tmp_path: Path) -> None:
    calls: list[Call] = []
    with dspy.context(lm=recorded(server[1], calls, tmp_path), adapter=dspy.ChatAdapter()):
        prediction = dspy.Predict("question -> answer: str", n=2)(question="x")
    assert prediction.completions.answer == ["answer 1", "answer 2"]
    assert len(calls) == 2


@pytest.mark.parametrize("asynchronous", [False, True])
def test_text_completion_models_are_recorded(
    server: tuple[Completions, str], tmp_path: Path, asynchronous: bool
) -> None:
    calls: list[Call] = []
    lm = recorded(server[1], calls, tmp_path, model_type="text", max_tokens=7)
    assert (asyncio.run(lm.acall("hello")) if asynchronous else lm("hello")) == ["answer 1"]
    assert [(call.output, call.error, call.prompt_tokens, call.completion_tokens) for call in calls] == [
        ("answer 1", None, 3, 2)
    ]
    (body,) = server[0].requests
    assert (body["prompt"], body["max_tokens"]) == ("hello\n\nBEGIN RESPONSE:", 7)


def test_a_text_model_gets_the_same_request_as_without_recording(
    server: tuple[Completions, str], tmp_path: Path
) -> None:
    plain = dspy.LM(
        "openai/m", api_base=server[1], api_key="k", cache=False, num_retries=0, model_type="text", temperature=0.5
    )
    plain("hello")
    with_recording(plain, observers=[lambda call: None])("hello")
    first, second = ({key: body[key] for key in ("model", "prompt", "temperature")} for body in server[0].requests)
    assert first == second


@pytest.mark.parametrize("model_type", ["chat", "text"])
def test_a_call_is_once_in_callbacks_usage_and_history(
    server: tuple[Completions, str], tmp_path: Path, model_type: str
) -> None:
    class Calls:
        started = ended = 0

        def on_lm_start(self, **_: Any) -> None:
            self.started += 1

        def on_lm_end(self, **_: Any) -> None:
            self.ended += 1

    calls, lm = Calls(), recorded(server[1], [], tmp_path, model_type=model_type)
    with dspy.track_usage() as usage, dspy.context(callbacks=[calls]):
        lm("hello")
    assert (calls.started, calls.ended, len(lm.history)) == (1, 1, 1)
    assert usage.get_total_tokens()["openai/m"]["prompt_tokens"] == 3
