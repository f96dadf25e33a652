"""Several completions per call, and text-completion models: a recorded LM behaves like a plain `dspy.LM`."""

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
