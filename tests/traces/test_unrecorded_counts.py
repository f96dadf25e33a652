"""LM calls that are recorded elsewhere, by hand or at the gateway, and how the count is stored and printed."""

import subprocess
import sys
from pathlib import Path

import openai
import pytest
from unrecorded_clients import BODY
from unrecorded_clients import server as server

import assay
from assay.traces import Recorder, Rollout


def test_a_client_in_c_makes_the_count_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycurl", sys)
    recorder = Recorder()
    with recorder.rollout(Rollout()):
        pass
    assert recorder.unrecorded.count is None


def test_a_call_that_was_recorded_by_hand_is_not_counted(server: str, tmp_path: Path) -> None:
    with assay.record("hello", store=tmp_path / "s.db") as run:
        before = run.recorder.unrecorded.calls
        for _ in range(2):
            answer = openai.OpenAI(base_url=f"{server}/v1", api_key="k").chat.completions.create(**BODY)
        run.call(BODY["messages"], answer.choices[0].message.content, model="m")
        run.call(BODY["messages"], "of another machine", model="m")
        run.call(BODY["messages"], "of another machine", model="m")
    assert run.recorder.unrecorded.calls - before == 0


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
