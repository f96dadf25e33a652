"""What `assay loop run` says of an improvement that changed nothing."""

import json
import time
from pathlib import Path

import pytest
from aiohttp import web

import assay
from assay.commands.cycle import Order, improved
from assay.commands.loop_file import LoopSettings
from rigs.serving import served

PROGRAM = """
import dspy

class Asks(dspy.Module):
    def __init__(self):
        super().__init__()
        self.ask = dspy.Predict("question -> answer")

    def forward(self, question):
        return self.ask(question=question)
"""


async def answers(request: web.Request) -> web.Response:
    text = "[[ ## answer ## ]]\nParis\n\n[[ ## completed ## ]]"
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
    return web.json_response(
        {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    )


@pytest.mark.slow
def test_a_cycle_that_keeps_the_champion_says_why_in_words(own_folder: Path) -> None:
    (own_folder / "asks.py").write_text(PROGRAM)
    (own_folder / "r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: exact}\n")
    (own_folder / "d.jsonl").write_text(
        "".join(json.dumps({"question": f"Capital of {n}?", "answer": "Paris"}) + "\n" for n in range(40))
    )
    app = web.Application()
    app.router.add_post("/v1/chat/completions", answers)
    with served(app) as url:
        options = {"optimizer": "labeled", "api_base": f"{url}/v1", "model": "openai/m"}
        assay.compile("asks.py:Asks", rubric="r.yaml", data="d.jsonl", out="one", **options)
        order = Order(
            name="asks", champion=own_folder / "one", data=own_folder / "d.jsonl", out=own_folder / "two", store=None,
            began=time.time(), max_calls=200, max_cost_usd=None,
        )  # fmt: skip
        settings = LoopSettings(rubric="r.yaml", method="compile", options=options)
        result = improved(settings, order, None)
    assert result["artifact"] is None
    assert result["reason"]
    assert not {"null", "None", "NaN", "{"} & set(result["reason"].replace("{", " { ").split())
