"""LM calls that are recorded elsewhere, by hand or at the gateway, and how the count is stored and printed."""

import subprocess
import sys

import pytest
from unrecorded_clients import server as server

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
