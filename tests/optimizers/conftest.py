"""A model server whose answers depend on the prompt alone, for tests of runs in several processes."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from rigs.serving import served

PROGRAM = '''
import dspy

class Mine(dspy.Module):
    """A program of the user's own, in a file that the other hosts do not have."""

    def __init__(self):
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    def forward(self, question):
        return self.answer(question=question)
'''


async def answer(request: web.Request) -> web.Response:
    payload = await request.json()
    prompt = "\n".join(message["content"] for message in payload["messages"])
    number = int((re.findall(r"What is (\d+)", prompt) or ["0"])[-1]) // 4 * 4 + 1  # right for every fourth
    text = "yes" if "polite" in prompt else f"[[ ## answer ## ]]\n{number}\n\n[[ ## completed ## ]]"
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    if payload.get("logprobs") and text == "yes":
        # without them judges are called again; how often depends on the order of threads
        likely = [{"token": word, "logprob": value, "bytes": None} for word, value in (("yes", -0.01), ("no", -4.7))]
        choice["logprobs"] = {"content": [{**likely[0], "top_logprobs": likely}]}
    usage = {"prompt_tokens": len(prompt), "completion_tokens": 1, "total_tokens": len(prompt) + 1}
    head = {"id": "1", "object": "chat.completion", "model": "m", "created": 1}
    return web.json_response({**head, "choices": [choice], "usage": usage})


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    with pytest.MonkeyPatch.context() as patch, served(app) as address:
        patch.setenv("OPENAI_API_KEY", "none")
        yield {"model": "openai/m", "api_base": f"{address}/v1"}


@pytest.fixture
def mine(tmp_path: Path) -> str:
    """A program of the user's own, by its name."""
    (tmp_path / "mine.py").write_text(PROGRAM)
    return f"{tmp_path / 'mine.py'}:Mine"
