"""`assay serve --agent`: deployed agents over HTTP, as a client in another process calls them."""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from production import two_versions

from assay.deployment.plan import Metric, Plan, Step
from assay.traces import Store

KEYS: dict[str, str] = {}  # address -> the gateway's key
PLAN = Plan(steps=(Step(weight=50, decides=True),), metrics=(Metric(success_gain=0.1),))


@pytest.fixture
def address(own_folder: Path) -> Iterator[str]:
    with Store(own_folder / ".assay" / "assay.db") as store:
        two_versions(store, own_folder).start("support@2", PLAN)
    command = [sys.executable, "-m", "assay", "serve", "--agent", "support", "--port", "0", "--json"]
    command += ["--upstream", "http://127.0.0.1:9/v1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        started = json.loads(process.stdout.readline())
        KEYS[started["url"]] = started["key"]
        yield started["url"]
    finally:
        process.terminate()
        printed, errors = process.communicate(timeout=120)
    assert f"agent support, now support@1: POST {started['url']}/agents/support\n" in errors
    counts = json.loads(printed.splitlines()[-1])["agents"]
    assert f"rollouts of agents: support@1 {sum(counts['support@1'].values())}" in errors


def post(address: str, agent: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{address}/agents/{agent}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"{}")


@pytest.mark.slow
def test_a_unit_keeps_its_version_and_mistakes_are_named(address: str) -> None:
    answers = {}
    for at in range(30):
        status, answer = post(address, "support", {"inputs": {"question": "?"}, "unit": f"u{at}", "task_type": "t"})
        assert status == 200, answer
        answers[f"u{at}"] = (answer["version"], answer["outputs"]["answer"])
    assert set(answers.values()) == {("support@1", "yes"), ("support@2", "better")}
    for unit, (version, _) in answers.items():
        header = post(address, "support", {"inputs": {"question": "?"}}, **{"x-assay-unit": unit})[1]
        assert header["version"] == version
    for body in (
        {"inputs": {"text": "?"}},
        {"question": "?"},
        {"inputs": {"question": "?"}, "unit": 7},
        {"inputs": {"question": "?"}, "user": "u"},
        b"not json",
    ):
        status, answer = post(address, "support", body)
        assert (status, "error" in answer) == (422, True), answer
    assert post(address, "suport", {"inputs": {}})[0] == 404
    rollout = post(address, "support", {"inputs": {"question": "x"}, "unit": "u1"})[1]["rollout"]
    time.sleep(1)  # rows are written at least every 0.25 s
    with Store() as store:
        stored = store.rollout(rollout)
    assert (stored.phase, stored.version) == ("deployed", answers["u1"][0])
    assert_metrics(address)


def assert_metrics(address: str) -> None:
    """30 rollouts by unit, 30 by header and one more; invalid requests did not run."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{address}/metrics", timeout=120)
    assert refused.value.code == 401
    request = urllib.request.Request(f"{address}/metrics", headers={"Authorization": f"Bearer {KEYS[address]}"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        lines = answer.read().decode().splitlines()
    counts = dict(line.rsplit(" ", 1) for line in lines if line.startswith("assay_agent_rollouts_total{"))
    assert sum(map(int, counts.values())) == 61
    assert set(counts) == {
        f'assay_agent_rollouts_total{{agent="support",version="support@{number}",arm="{arm}",status="done"}}'
        for number, arm in ((1, "champion"), (2, "candidate"))
    }
    assert "assay_gateway_calls_total 0" in lines
