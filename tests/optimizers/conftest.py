"""A model server whose answers depend on the prompt alone, for tests of runs in several processes."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

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


class Server(BaseHTTPRequestHandler):
    """An OpenAI-compatible server whose answers depend on the prompt alone."""

    calls = 0

    def do_POST(self) -> None:
        Server.calls += 1
        payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = "\n".join(message["content"] for message in payload["messages"])
        number = int((re.findall(r"What is (\d+)", prompt) or ["0"])[-1]) // 4 * 4 + 1  # right for every fourth
        text = "yes" if "polite" in prompt else f"[[ ## answer ## ]]\n{number}\n\n[[ ## completed ## ]]"
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        if (
            payload.get("logprobs") and text == "yes"
        ):  # without them judges are called again; how often depends on the order of threads
            likely = [
                {"token": word, "logprob": value, "bytes": None} for word, value in (("yes", -0.01), ("no", -4.7))
            ]
            choice["logprobs"] = {"content": [{**likely[0], "top_logprobs": likely}]}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": 1, "total_tokens": len(prompt) + 1}
        body = json.dumps(
            {"id": "1", "object": "chat.completion", "model": "m", "created": 1, "choices": [choice], "usage": usage}
        ).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    http = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", "none")
        Server.calls = 0
        yield {"model": "openai/m", "api_base": f"http://127.0.0.1:{http.server_port}/v1"}
    http.shutdown()


@pytest.fixture
def mine(tmp_path: Path) -> str:
    """A program of the user's own, by its name."""
    (tmp_path / "mine.py").write_text(PROGRAM)
    return f"{tmp_path / 'mine.py'}:Mine"
