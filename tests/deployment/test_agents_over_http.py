"""`assay serve --registered`: deployed agents over HTTP, as a client calls them."""

import json
from pathlib import Path
from typing import Any

import pytest
from production import two_versions

from assay.deployment.plan import Metric, Plan, Step
from assay.traces import Store
from rigs.command_line import while_serving
from rigs.serving import post, send

PLAN = Plan(steps=(Step(weight=50, decides=True),), metrics=(Metric(success_gain=0.1),))


@pytest.mark.slow
def test_a_unit_keeps_its_version_and_mistakes_are_named(own_folder: Path) -> None:
    with Store() as store:
        two_versions(store, own_folder).start("support@2", PLAN)
    flags = ("--registered", "support", "--port", "0", "--json", "--upstream", "http://127.0.0.1:9/v1")
    (started, answers, rollout), done = while_serving("serve", *flags, client=asks)
    assert f"agent support, now support@1: POST {started['url']}/agents/support\n" in done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])["agents"]
    assert f"rollouts of agents: support@1 {sum(counts['support@1'].values())}" in done.stderr
    with Store() as store:
        stored = store.rollout(rollout)
    assert (stored.phase, stored.version) == ("deployed", answers["u1"][0])


def asks(started: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], str]:
    """30 rollouts by unit, 30 by header and one more; invalid requests do not run."""
    url, answers = f"{started['url']}/agents/support", {}
    for at in range(30):
        status, answer = post(url, {"inputs": {"question": "?"}, "unit": f"u{at}", "task_type": "t"})
        assert status == 200, answer
        answers[f"u{at}"] = (answer["version"], answer["outputs"]["answer"])
    assert set(answers.values()) == {("support@1", "yes"), ("support@2", "better")}
    for unit, (version, _) in answers.items():
        assert post(url, {"inputs": {"question": "?"}}, **{"x-assay-unit": unit})[1]["version"] == version
    for body in (
        {"inputs": {"text": "?"}},
        {"question": "?"},
        {"inputs": {"question": "?"}, "unit": 7},
        {"inputs": {"question": "?"}, "user": "u"},
        b"not json",
    ):
        status, answer = post(url, body)
        assert (status, "error" in answer) == (422, True), answer
    assert post(url.replace("support", "suport"), {"inputs": {}})[0] == 404
    rollout = post(url, {"inputs": {"question": "x"}, "unit": "u1"})[1]["rollout"]
    assert send("GET", f"{started['url']}/metrics")[0] == 401
    status, text = send("GET", f"{started['url']}/metrics", Authorization=f"Bearer {started['key']}")
    lines = text.splitlines()
    counts = dict(line.rsplit(" ", 1) for line in lines if line.startswith("assay_agent_rollouts_total{"))
    assert sum(map(int, counts.values())) == 61
    assert set(counts) == {
        f'assay_agent_rollouts_total{{agent="support",version="support@{number}",arm="{arm}",status="done"}}'
        for number, arm in ((1, "champion"), (2, "candidate"))
    }
    assert "assay_gateway_calls_total 0" in lines
    return started, answers, rollout
