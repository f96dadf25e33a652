"""A search ends, and a cap holds between runs, also where the program's calls cannot be recorded."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import assay
from assay.models.unrecorded import Unrecorded
from assay.testing import scripted_lm
from rigs.command_line import assay_command
from rigs.serving import chat_completion, served

HEAD = """import json, urllib.request
import dspy

class Mine(dspy.Module):
    def __init__(self):
        super().__init__()
        self.say = dspy.Predict("question -> answer")
"""
OWN_CLIENT = """
    def forward(self, question):
        for _ in range(2):
            body = json.dumps({"model": "m", "messages": [{"role": "user", "content": question}]}).encode()
            headers = {"Content-Type": "application/json"}
            urllib.request.urlopen(urllib.request.Request("URL/chat/completions", body, headers)).read()
        return dspy.Prediction(answer="1")
"""
PINNED = """        self.say.lm = dspy.LM("openai/m", api_base="URL", api_key="k", cache=False, temperature=1.0)

    def forward(self, question):
        return self.say(question=question)
"""
NO_CALLS = """
    def forward(self, question):
        return dspy.Prediction(answer=str(len(question)))
"""


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    """The address of a model's server, and the models that were asked."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append((await request.json())["model"])
        return chat_completion(asked[-1], "[[ ## answer ## ]]\n1\n\n[[ ## completed ## ]]")

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    with served(app) as address:
        yield f"{address}/v1", asked


def write(place: Path, program: str, url: str) -> None:
    (place / "mine.py").write_text(HEAD + program.replace("URL", url))
    (place / "r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: exact}\n")
    rows = [json.dumps({"question": f"What of {n}?", "answer": str(n % 3)}) for n in range(120)]
    (place / "data.jsonl").write_text("\n".join(rows))


def compiled(place: Path, program: str, url: str, **caps: int) -> Any:
    write(place, program, url)
    lm = scripted_lm(lambda _: "{}")
    return assay.compile("mine.py:Mine", rubric="r.yaml", data="data.jsonl", lm=lm, threads=2, seed=1, **caps)


@pytest.mark.slow
def test_unrecorded_calls_count_against_the_cap(server: tuple[str, list[str]], tmp_path: Path) -> None:
    report = compiled(tmp_path, OWN_CLIENT, server[0], max_calls=100)
    made = len(server[1])
    assert report.unrecorded == made
    assert 20 < made <= 100 + 2 * 2  # runs in flight end
    data = report.to_dict()
    assert data["cost_usd"] is None, "what they cost is not known"
    assert "$0.0000" not in (Path(data["artifact"]) / "report.md").read_text()


@pytest.mark.slow
def test_calls_of_a_pinned_model_count_against_the_cap(server: tuple[str, list[str]], tmp_path: Path) -> None:
    report = compiled(tmp_path, PINNED, server[0], max_calls=100)
    data = report.to_dict()
    assert report.unrecorded == 0
    assert 20 < len(server[1]) <= 100
    assert data["calls"] >= len(server[1])
    assert data["cost_usd"] is None, "its price is not known"


def test_the_cost_of_unrecorded_calls_is_unknown(server: tuple[str, list[str]], tmp_path: Path) -> None:
    write(tmp_path, OWN_CLIENT, server[0])
    lm = scripted_lm(lambda _: "{}")
    report = assay.evaluate(
        "mine.py:Mine", rubric="r.yaml", data="data.jsonl", lm=lm, sizes={"val": 4}, preflight=False
    )
    data = report.to_dict()
    assert (data["unrecorded"], data["cost_usd"], data["result"]["cost_usd"]) == (report.unrecorded, None, None)
    assert "unknown: LM calls that were not recorded have no price" in assay_command("traces", "stats").stdout
    assert assay_command("traces", "stats", "--json").report["cost_usd"] is None


def test_a_run_without_unrecorded_calls_keeps_its_cost() -> None:
    counts = (Unrecorded(), Unrecorded(2), Unrecorded(0, "a subprocess"))
    assert [unrecorded.cost(0.5) for unrecorded in counts] == [0.5, None, None]
    assert Unrecorded().cost(None) is None


@pytest.mark.slow
def test_the_search_of_a_program_without_model_calls_ends(tmp_path: Path) -> None:
    report = compiled(tmp_path, NO_CALLS, "", max_search_calls=60)
    assert report.outcome.winner == "baseline"
