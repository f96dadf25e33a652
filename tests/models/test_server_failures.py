"""Servers that answer 429 and 500, hang, or break off; recordings and files that they are sent."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import dspy
import pytest
from dspy.utils.exceptions import LMError, LMRateLimitError, LMServerError
from prompt_server import serving

from assay.errors import FailureKind
from assay.models import Call, Meter, get_lm, with_recording
from assay.models.hosted import HostedBackend

GOOD = {
    "id": "1", "object": "chat.completion", "model": "m", "created": 1,
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hello"}}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
}  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    plan: list[object] = []
    requests: list[dict[str, object]] = []
    release = threading.Event()

    def do_POST(self) -> None:
        payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        step = self.plan.pop(0) if self.plan else 200
        if step == "hang":
            self.release.wait(120)
            return
        self.requests.append(payload)
        if step == "no schema" and "response_format" not in payload:
            step = 200
        reply = (
            GOOD
            if step in (200, "die")
            else step
            if isinstance(step, dict)
            else {"error": {"message": f"planned {step}"}}
        )
        body = json.dumps(reply).encode()
        self.send_response(step if isinstance(step, int) else 400 if step == "no schema" else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:20] if step == "die" else body)
        if step == "die":
            self.wfile.flush()
            self.connection.close()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    Handler.release.clear()
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{http.server_port}/v1"
    Handler.release.set()
    http.shutdown()


def lm_for(server: str, calls: list[Call], meter: Meter, **options: object):
    return get_lm("openai/m", api_base=server, api_key="none", observers=[calls.append], meter=meter, **options)


@pytest.mark.parametrize(("status", "kind"), [(500, LMServerError), (429, LMRateLimitError)])
def test_a_permanent_server_error_is_raised_by_its_class(server: str, status: int, kind: type[Exception]) -> None:
    Handler.plan = [status]
    with pytest.raises(kind, match=f"planned {status}"):
        lm_for(server, [], Meter(), num_retries=0)("hi")


def test_the_client_is_loaded_before_the_call_begins(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begins, calls, meter = list[float](), list[Call](), Meter()
    monkeypatch.setattr(HostedBackend, "load", lambda self: begins.append(time.time()))
    lm_for(server, calls, meter)("hi")
    assert len(begins) == 1
    assert calls[0].started_at >= begins[0]


def test_a_server_that_hangs_ends_after_the_timeout(server: str) -> None:
    Handler.plan = ["hang"]
    meter = Meter()
    with pytest.raises(LMError):
        lm_for(server, [], meter, num_retries=0, timeout=1.0)("hi")
    assert meter.usage.errors == 1


def test_a_server_that_breaks_off_is_an_error_and_not_an_answer(server: str) -> None:
    Handler.plan = ["die"]
    with pytest.raises(LMError):
        lm_for(server, [], Meter(), num_retries=0)("hi")


@pytest.mark.parametrize("n", [1, 2])
def test_a_text_model_gets_the_same_requests_as_without_recording(server: str, n: int) -> None:
    text = {"id": "1", "object": "text_completion", "created": 1, "model": "m"}
    Handler.plan = [{**text, "choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]}] * 4
    Handler.requests = []
    plain = dspy.LM("openai/m", api_base=server, api_key="k", cache=False, num_retries=0, model_type="text", top_p=0.5)
    recorded = with_recording(plain, observers=[lambda call: None])
    plain("hello")
    assert recorded("hello", n=n) == ["a"] * n
    first, *others = ({key: body[key] for key in ("model", "prompt", "top_p")} for body in Handler.requests)
    assert others == [first] * n


HALF = {"index": 0, "message": {"role": "assistant", "content": "half"}, "finish_reason": "stop"}
NO_ANSWERS = [
    *({}, {"foo": 1}, {"choices": []}, {"choices": [None]}, {"choices": [{}]}, {"choices": None}),
    *({"error": "overloaded"}, {"error": {"message": "overloaded"}}),
    {"error": {"message": "overloaded"}, "choices": []},
    {"choices": [{**HALF, "finish_reason": "error"}]},
    {"choices": [{**HALF, "error": {"message": "died"}}]},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reply", "engine"),
    [*((reply, "auto") for reply in NO_ANSWERS), *((NO_ANSWERS[at], "litellm") for at in (2, 7, 9))],
)
def test_a_reply_without_an_answer_is_the_servers_failure_not_an_empty_answer(
    server: str, reply: dict[str, object], engine: str
) -> None:
    Handler.plan, calls, meter = [reply], [], Meter()
    plain = dspy.LM("openai/m", api_base=server, api_key="none", engine=engine, num_retries=0)
    with pytest.raises(LMError):
        with_recording(plain, observers=[calls.append], meter=meter)("hi")
    assert [(call.failure, call.output, bool(call.error)) for call in calls] == [(FailureKind.MODEL, "", True)]
    assert meter.usage.errors == 1


def test_a_reply_in_text_completion_format_is_read(server: str) -> None:
    Handler.plan, calls = [{"choices": [{"text": "hello  there"}]}], list[Call]()
    assert lm_for(server, calls, Meter(), num_retries=0)("hi") == ["hello  there"]
    assert [call.output for call in calls] == ["hello  there"]


def test_a_self_hosted_server_that_refuses_schemas_gets_none_from_then_on(server: str) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {}}}}
    Handler.plan, Handler.requests = ["no schema", "no schema"], []
    calls, meter = list[Call](), Meter()
    lm = lm_for(server, calls, meter, num_retries=0)
    assert lm.supports_response_schema
    assert lm("hi", response_format=schema) == ["hello"]
    assert not lm.supports_response_schema
    assert ["response_format" in body for body in Handler.requests] == [True, False]
    assert (meter.usage.calls, meter.usage.errors) == (2, 1)
    assert [call.error is None for call in calls] == [False, True]


class Ask(dspy.Signature):
    """Answer."""

    recording: dspy.Audio = dspy.InputField()
    paper: dspy.File = dspy.InputField()
    image: dspy.Image = dspy.InputField()
    question: str = dspy.InputField()
    answer: str = dspy.OutputField()


@pytest.mark.parametrize("form", [dspy.ChatAdapter, dspy.XMLAdapter, dspy.JSONAdapter])
@pytest.mark.parametrize(
    ("paper", "sent"),
    [
        (
            {"file_data": "data:application/pdf;base64,JVBERi0xLjQ=", "filename": "a.pdf"},
            {"filename": "file.pdf", "file_data": "data:application/pdf;base64,JVBERi0xLjQ="},
        ),
        ({"file_id": "file-1"}, {"file_id": "file-1"}),
    ],
)
def test_media_are_sent_as_the_chat_api_takes_them(
    form: Any, paper: dict[str, str], sent: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    pixel = "data:image/png;base64,AAAA"
    with serving() as server:
        with dspy.context(lm=get_lm("openai/main", api_base=server.url), adapter=form()):
            found = dspy.Predict(Ask)(
                recording=dspy.Audio(data="UklGRg==", audio_format="mp3"), paper=dspy.File(**paper),
                image=dspy.Image(pixel), question="What is 3 + 1?",
            )  # fmt: skip
        blocks = server.last["messages"][-1]["content"]
    assert found.answer in ("4", "5")
    assert [block for block in blocks if block["type"] != "text"] == [
        {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "mp3"}},
        {"type": "file", "file": sent},
        {"type": "image_url", "image_url": {"url": pixel}},
    ]
