"""A search ends, and a cap holds between runs, also where the program's calls cannot be recorded."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import assay
from assay.cli.main import group
from assay.models.unrecorded import Unrecorded
from assay.testing import scripted_lm

HEAD = "import json, urllib.request\nimport dspy\n\n\n"
OWN_CLIENT = """class Mine(dspy.Module):
    def __init__(self):
        super().__init__()
        self.say = dspy.Predict("question -> answer")

    def forward(self, question):
        for _ in range(2):
            body = json.dumps({"model": "m", "messages": [{"role": "user", "content": question}]}).encode()
            headers = {"Content-Type": "application/json"}
            urllib.request.urlopen(urllib.request.Request("URL/chat/completions", body, headers)).read()
        return dspy.Prediction(answer="1")
"""
PINNED = """class Mine(dspy.Module):
    def __init__(self):
        super().__init__()
        self.say = dspy.Predict("question -> answer")
        self.say.lm = dspy.LM("openai/m", api_base="URL", api_key="k", cache=False, temperature=1.0)

    def forward(self, question):
        return self.say(question=question)
"""
NO_CALLS = """class Mine(dspy.Module):
    def __init__(self):
        super().__init__()
        self.say = dspy.Predict("question -> answer")

    def forward(self, question):
        return dspy.Prediction(answer=str(len(question)))
"""


class Answers(BaseHTTPRequestHandler):
    count = 0

    def do_POST(self) -> None:
        type(self).count += 1
        self.rfile.read(int(self.headers["Content-Length"]))
        message = {"role": "assistant", "content": "[[ ## answer ## ]]\n1\n\n[[ ## completed ## ]]"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        body = json.dumps(
            {
                "id": "1",
                "object": "chat.completion",
                "created": 1,
                "model": "m",
                "usage": usage,
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            }
        ).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def server() -> Iterator[tuple[str, type[Answers]]]:
    handler = type("Counted", (Answers,), {"count": 0})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_port}/v1", handler
        serving.shutdown()


def write(place: Path, program: str, url: str) -> None:
    (place / "mine.py").write_text(HEAD + program.replace("URL", url))
    (place / "r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: exact}\n")
    rows = [json.dumps({"question": f"What of {n}?", "answer": str(n % 3)}) for n in range(120)]
    (place / "data.jsonl").write_text("\n".join(rows))


def compiled(url: str, program: str, place: Path) -> Any:
    write(place, program, url)
    return assay.compile(
        "mine.py:Mine",
        rubric="r.yaml",
        data="data.jsonl",
        lm=scripted_lm(lambda _: "{}"),
        max_calls=100,
        threads=2,
        seed=1,
    )


@pytest.mark.slow
def test_unrecorded_calls_count_against_the_cap(server: tuple[str, type[Answers]], tmp_path: Path) -> None:
    report = compiled(server[0], OWN_CLIENT, tmp_path)
    made = server[1].count
    assert report.unrecorded == made
    assert 20 < made <= 100 + 2 * 2  # runs in flight end
    data = report.to_dict()
    assert data["cost_usd"] is None, "what they cost is not known"
    assert "$0.0000" not in (Path(data["artifact"]) / "report.md").read_text()


@pytest.mark.slow
def test_calls_of_a_pinned_model_count_against_the_cap(server: tuple[str, type[Answers]], tmp_path: Path) -> None:
    report = compiled(server[0], PINNED, tmp_path)
    data = report.to_dict()
    assert report.unrecorded == 0
    assert 20 < server[1].count <= 100
    assert data["calls"] >= server[1].count
    assert data["cost_usd"] is None, "its price is not known"


def test_the_cost_of_unrecorded_calls_is_unknown(server: tuple[str, type[Answers]], tmp_path: Path) -> None:
    write(tmp_path, OWN_CLIENT, server[0])
    lm = scripted_lm(lambda _: "{}")
    report = assay.evaluate(
        "mine.py:Mine", rubric="r.yaml", data="data.jsonl", lm=lm, sizes={"val": 4}, preflight=False
    )
    data = report.to_dict()
    assert (data["unrecorded"], data["cost_usd"], data["result"]["cost_usd"]) == (report.unrecorded, None, None)
    output = CliRunner().invoke(group, ["traces", "stats"]).output
    assert "unknown: LM calls that were not recorded have no price" in output
    assert json.loads(CliRunner().invoke(group, ["traces", "stats", "--json"]).output)["cost_usd"] is None


def test_a_run_without_unrecorded_calls_keeps_its_cost() -> None:
    assert [unrecorded.cost(0.5) for unrecorded in (Unrecorded(), Unrecorded(2), Unrecorded(0, "a subprocess"))] == [
        0.5,
        None,
        None,
    ]
    assert Unrecorded().cost(None) is None


@pytest.mark.slow
def test_the_search_of_a_program_without_model_calls_ends(tmp_path: Path) -> None:
    write(tmp_path, NO_CALLS, "")
    report = assay.compile(
        "mine.py:Mine",
        rubric="r.yaml",
        data="data.jsonl",
        lm=scripted_lm(lambda _: "{}"),
        max_search_calls=60,
        threads=2,
    )
    assert report.outcome.winner == "baseline"
