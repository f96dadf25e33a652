"""An OpenAI-compatible server that reads the prompt for the wanted fields and their format, and counts requests.

It answers "What is A + 1?", and as a judge with the field `verdict` whether `output.answer` is right. A hash of the
request decides whether the answer is correct: more demonstrations and the word "carefully" make more of the answers
correct, so that an optimizer can improve a program or a judge.
"""

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_ADVICE = "Work carefully, one step at a time."


class PromptServer(ThreadingHTTPServer):
    """Requests that were answered, by model."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self._lock = threading.Lock()
        self.requests: Counter[str] = Counter()
        self.last: dict[str, Any] = {}  # request

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    @property
    def total(self) -> int:
        return sum(self.requests.values())

    def count(self, request: dict[str, Any]) -> None:
        with self._lock:
            self.requests[request["model"]] += 1
            self.last = request


@contextmanager
def serving() -> Iterator[PromptServer]:
    server = PromptServer()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)


def _values(prompt: str, answered: bool, seed: object) -> dict[str, Any]:
    """Value of each field that a program or an optimizer of DSPy may ask for."""
    numbers = re.findall(r"What is (\d+) \+ 1", prompt)
    number = int(numbers[-1]) if numbers else 0
    draw = int.from_bytes(hashlib.sha256(f"{seed} {prompt}".encode()).digest()[:4], "big") / 2**32
    share = 0.35 + 0.1 * min(4, len(numbers) - 1) + 0.25 * ("carefully" in prompt)
    answer = number + 1 if draw < share else number + 2
    looked = answered or "observation_0" in prompt or "=== Step 1 ===" in prompt
    judged = re.findall(r'output\.answer ## \]\]\n"?(\d+)', prompt)
    calls = [{"name": "submit", "args": {"answer": str(answer)}}, {"name": "successor", "args": {"number": number}}]
    return {
        "answer": str(answer),
        "sum": {
            "terms": [{"value": number, "sign": "plus"}, {"value": 1, "sign": "plus"}],
            "total": answer,
        },
        "code": f"SUBMIT(answer='{answer}')" if looked else f"print(llm_query('What is {number} + 1?'))",
        "verdict": "yes" if (judged[-1:] == [str(number + 1)]) == (draw < share) else "no",
        "query": f"counting up from {number}",
        "action": "answer",
        "need": 0.0,
        "next_thought": "The tool knows." if not looked else "This is enough.",
        "next_tool_name": "finish" if looked else "successor",
        "next_tool_args": {} if looked else {"number": number},
        "tool_calls": {"tool_calls": calls[:1] if looked else calls[1:]},
        "advice": {"predict": _ADVICE},
        "module_advice": dict.fromkeys(re.findall(r'"module_name": "([\w.\[\]]+)"', prompt), _ADVICE),
    }


def _elements(name: str, value: Any) -> str:
    """A value in XML, in the nesting of DSPy's adapter."""
    if isinstance(value, dict):
        value = "".join(_elements(key, part) for key, part in value.items())
    elif isinstance(value, list):
        value = "".join(_elements("item", part) for part in value)
    return f"<{name}>{value}</{name}>"


def _written(prompt: str, last: str, values: dict[str, Any]) -> str:
    """The fields that the end of the prompt asks for, in the format that it asks for."""
    if wanted := re.search(r"JSON object in the following order of fields: (.*)", last):
        return json.dumps({name: values.get(name, _ADVICE) for name in re.findall(r"`(\w+)`", wanted[1])})
    plain = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    if wanted := re.search(r"output fields wrapped in XML tags (.*)", last):
        names = re.findall(r"`<(\w+)>`", wanted[1])
        return "\n".join(
            _elements(name, values.get(name, _ADVICE) if f"<{name}><" in last else plain.get(name, _ADVICE))
            for name in names
        )
    if wanted := re.search(r"output fields, starting with the field (.*)", last):
        names = [name for name in re.findall(r"\[\[ ## (\w+) ## \]\]", wanted[1]) if name != "completed"]
        sections = [f"[[ ## {name} ## ]]\n{plain.get(name, _ADVICE)}" for name in names]
        return "\n\n".join([*sections, "[[ ## completed ## ]]"])
    if wanted := re.search(r"Reply with: (.*)", prompt):
        return "\n".join(f"{name}: {plain.get(name, _ADVICE)}" for name in re.findall(r"(\w+): …", wanted[1]))
    return f"```\n{_ADVICE}\n```"  # GEPA's request for an instruction


def _message(request: dict[str, Any], sample: int) -> dict[str, Any]:
    messages = request["messages"]
    prompt = "\n".join(map(_text, messages))
    last_user = max(at for at, message in enumerate(messages) if message["role"] == "user")
    asked = max((at for at, message in enumerate(messages) if "What is" in _text(message)), default=0)
    answered = any(message["role"] in ("assistant", "tool") for message in messages[asked + 1 :])
    values = _values(prompt, answered, (request.get("seed"), sample))
    if request.get("tools"):
        call = values["tool_calls"]["tool_calls"][0]
        function = {"name": call["name"], "arguments": json.dumps(call["args"])}
        native = [{"id": f"call_{len(messages)}", "type": "function", "function": function}]
        return {"role": "assistant", "content": None, "tool_calls": native}
    return {"role": "assistant", "content": _written(prompt, _text(messages[last_user]), values)}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body of an answer are two writes
    server: PromptServer

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.count(request)
        texts = [_message(request, sample) for sample in range(request.get("n") or 1)]
        size = sum(len(_text(message)) for message in request["messages"])
        usage = {"prompt_tokens": size, "completion_tokens": 9, "total_tokens": size + 9}
        shared = {"id": "1", "created": 1, "model": request["model"]}
        if request.get("stream"):
            words = re.findall(r"\s*\S+\s*", texts[0]["content"] or "")
            deltas = [{"role": "assistant", "content": word} for word in words]
            chunks = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
            chunks.append({"index": 0, "delta": {}, "finish_reason": "stop"})
            events = [{**shared, "object": "chat.completion.chunk", "choices": [chunk]} for chunk in chunks]
            events.append({**shared, "object": "chat.completion.chunk", "choices": [], "usage": usage})
            body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
            self._send("text/event-stream", body)
            return
        choices = [
            {"index": at, "message": text, "finish_reason": "tool_calls" if text.get("tool_calls") else "stop"}
            for at, text in enumerate(texts)
        ]
        self._send(
            "application/json", json.dumps({**shared, "object": "chat.completion", "choices": choices, "usage": usage})
        )

    def _send(self, kind: str, body: str) -> None:
        data = body.encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        """Prints nothing."""
