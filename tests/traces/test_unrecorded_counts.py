"""LM calls that are recorded elsewhere, by hand or at the gateway, and how the count is stored and printed."""

import subprocess
import sys
from typing import Any

import pytest
from unrecorded_clients import server as server

from assay.models.unrecorded import is_lm_request
from assay.traces import Recorder, Rollout


def test_a_client_in_c_makes_the_count_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycurl", sys)
    recorder = Recorder()
    with recorder.rollout(Rollout()):
        pass
    assert recorder.unrecorded.count is None


@pytest.mark.slow
def test_calls_of_a_client_imported_inside_a_rollout_are_counted(server: str) -> None:
    code = (
        "import sys\nfrom assay.traces import Recorder, Rollout\nassert 'httpx' not in sys.modules\n"
        "recorder = Recorder()\n"
        "with recorder.rollout(Rollout()):\n    import httpx\n"
        f"    httpx.post('{server}/v1/chat/completions', json={{'messages': []}})\nprint(recorder.unrecorded)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "1"


@pytest.mark.parametrize(
    ("method", "path", "body", "asks"),
    [
        ("POST", "/v1/chat/completions", None, True),
        ("POST", "/openai/deployments/d/chat/completions?api-version=1", {"messages": []}, True),
        ("POST", "/v1beta/models/gemini-2.0-flash:generateContent", b'{"contents": []}', True),
        ("POST", "/model/anthropic.claude/converse-stream", '{"messages": []}', True),
        ("POST", "/api/generate", {"prompt": "x"}, True),
        ("POST", "/ask", {"model": "m", "messages": []}, True),
        ("POST", "/v1/predictions", {"input": {"prompt": "x"}}, True),
        ("POST", "/models/org/name", {"inputs": "x"}, True),
        ("POST", "/v1/complete", {"prompt": "x"}, True),
        ("POST", "/generate", {"text": "x", "sampling_params": {}}, True),
        ("POST", "/infill", {"input_prefix": "x"}, True),
        ("POST", "/v1/responses/compact", {"input": "x"}, True),
        ("POST", "/v1/threads/runs", {"assistant_id": "a"}, True),
        ("POST", "/v1/threads/t1/runs", {"assistant_id": "a"}, True),
        ("POST", "/endpoints/e/invocations", {"messages": []}, True),
        ("POST", "/v22.0/1/messages", {"messaging_product": "whatsapp", "text": {"body": "x"}}, False),
        ("POST", "/v1/threads/t1/messages", {"role": "user", "content": "x"}, False),
        ("POST", "/ask", {"messages": []}, False),
        ("POST", "/tokenize", {"model": "m", "messages": []}, False),
        ("GET", "/v1/chat/completions", None, False),
        ("POST", "/v1/embeddings", {"input": "x"}, False),
        ("POST", "/v1/messages/count_tokens", {"messages": []}, False),
        ("POST", "/v1/messages", b"to=somebody", False),
        ("POST", "/v1/responses", {"form": 1}, False),
        ("POST", "/r/abc/v1/chat/completions", {"messages": []}, False),
    ],
)
def test_an_lm_request_is_recognised_by_its_form(method: str, path: str, body: Any, asks: bool) -> None:
    assert is_lm_request(method, path, body) is asks
