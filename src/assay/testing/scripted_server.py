"""An OpenAI-compatible server whose responses depend only on prompt and temperature, for tests that kill its clients.

    python -m assay.testing.scripted_server [--port 0] [--log FILE] [--delay-ms 2]

It answers "What is A + 1?". A hash of the prompt decides whether the answer is correct: at temperature 0.7, 35 % of the
answers are correct without demonstrations and 95 % with eight; a lower temperature makes more of them correct.

The first line of its output is the port. It writes one byte per request to the log before it responds.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def answer_to(prompt: str, temperature: float = 0.7) -> str:
    """Text of the response, in the format that the prompt requires."""
    numbers = re.findall(r"What is (\d+) \+ 1", prompt)
    summand = int(numbers[-1]) if numbers else 0
    draw = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:4], "big") / 2**32
    correct = draw < min(0.95, 0.35 + 0.075 * max(0, len(numbers) - 1)) - 0.2 * (temperature - 0.7)
    answer = summand + 1 if correct else summand + 2
    if "JSON" in prompt:
        return json.dumps({"answer": answer})
    return f"[[ ## answer ## ]]\n{answer}\n\n[[ ## completed ## ]]"


def _tokens(text: str, alternatives: int) -> list[dict[str, Any]]:
    """Each word as a token, with alternatives of decreasing probability."""
    others = [{"token": f"w{rank}", "logprob": -0.1 - 0.5 * rank, "bytes": None} for rank in range(alternatives)]
    return [
        {"token": word, "logprob": -0.1, "bytes": None, "top_logprobs": others}
        for word in re.findall(r"\s*\S+\s*", text)
    ]


def _handler(log: Path | None, delay_s: float) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # head and body of an answer are two writes

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompt = "\n".join(str(message.get("content")) for message in request["messages"])
            time.sleep(delay_s)
            if log is not None:
                with open(log, "ab", buffering=0) as file:
                    file.write(b".")
            text = answer_to(prompt, float(request.get("temperature") or 0.7))
            usage = {
                "prompt_tokens": len(prompt),
                "completion_tokens": len(text),
                "total_tokens": len(prompt) + len(text),
            }
            choice: dict[str, Any] = {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": text},
            }
            if request.get("logprobs"):
                choice["logprobs"] = {"content": _tokens(text, int(request.get("top_logprobs") or 0))}
            body = json.dumps(
                {
                    "id": "1",
                    "object": "chat.completion",
                    "model": "m",
                    "created": 1,
                    "choices": [choice],
                    "usage": usage,
                }
            ).encode()
            try:
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            except OSError:  # the client was killed
                self.close_connection = True

        def log_message(self, *args: object) -> None:
            pass

    return Handler


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Prints nothing: killed clients are expected."""


@contextmanager
def running(log: Path | None = None, *, delay_ms: float = 2) -> Iterator[str]:
    """Runs the server in a process of its own; yields the base URL of its API."""
    command = [
        sys.executable,
        "-m",
        "assay.testing.scripted_server",
        "--delay-ms",
        str(delay_ms),
        *(["--log", str(log)] if log else []),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--delay-ms", type=float, default=2)
    arguments = parser.parse_args()
    server = _Server(("127.0.0.1", arguments.port), _handler(arguments.log, arguments.delay_ms / 1000))
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
