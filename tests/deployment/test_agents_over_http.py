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
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        process.communicate(timeout=30)


def post(address: str, agent: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{address}/agents/{agent}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"{}")


@pytest.mark.slow
def test_a_unit_keeps_its_version_and_mistakes_are_named(address: str) -> None:
    answers = {}
    for at in range(30):
        status, answer = post(address, "support", {"inputs": {"question": "?"}, "unit": f"u{at}", "task_type": "t"})
        assert status == 200
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
