"""Hooks of events: what they get, and that none of them delays or changes a decision."""

import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from production import two_versions

import assay
from assay.commands.deploy import advance_deployment, rollback_deployment
from assay.deployment.plan import Hook, Metric, Notifier, Plan, Step, load_plan
from assay.errors import ConfigError
from assay.traces import Store
from assay.traces.gateway.routes import metrics_text

STEPS = (Step(weight=10), Step(weight=50, decides=True))


@pytest.fixture
def server() -> Iterator[Any]:
    """A real webhook: `/ok` accepts, `/no` refuses, `/never` never answers, `/drips` sends a byte from time to time."""
    ended, bodies = threading.Event(), list[dict[str, Any]]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path.startswith("/ok"):
                bodies.append(body)
            if self.path == "/never":
                ended.wait(120)
            if self.path == "/drips":
                self.wfile.write(b"HTTP/1.1 200 OK\r\n")
                for _ in range(300):
                    if ended.wait(0.1):
                        return
                    self.wfile.write(b"X: y\r\n")
            self.send_response(500 if self.path == "/no" else 200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield SimpleNamespace(url=f"http://127.0.0.1:{http.server_port}", bodies=bodies)
    ended.set()
    http.shutdown()
    http.server_close()


HOOKS = ("never", "drips", "ok", "no")


@pytest.mark.timeout(120)
def test_a_hook_that_never_answers_delays_no_other(server: Any) -> None:
    notifier = Notifier([Hook(url=f"{server.url}/{name}", timeout_s=300) for name in HOOKS])
    for at in range(2):
        notifier.notify("promoted", agent="support", number=at)
    while len(server.bodies) < 2:
        time.sleep(0.01)
    assert [body["number"] for body in server.bodies] == [0, 1]


def test_a_command_gets_json_and_is_killed_with_its_children(own_folder: Path, server: Any) -> None:
    writes = [sys.executable, "-c", "import sys; open('got.json', 'w').write(sys.stdin.read())"]
    hangs = ["sh", "-c", "sleep 60 & echo $! > child; wait"]
    hooks = [
        Hook(command=writes, events=["paused"]), Hook(command=hangs, timeout_s=1.0), Hook(command=["false"]),
        Hook(command=["no-such-command"]),
    ]  # fmt: skip
    notifier = Notifier(hooks)
    notifier.notify("promoted")
    notifier.notify("paused", reason="ä")
    notifier.close(20)
    assert json.loads((own_folder / "got.json").read_text())["reason"] == "ä"
    assert notifier.to_dict() == {"sent": 1, "failed": 6}
    child = Path("/proc") / (own_folder / "child").read_text().strip() / "stat"
    until = time.monotonic() + 120
    while _is_running(child) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _is_running(child)


def _is_running(stat: Path) -> bool:
    """Whether a process is there and not only waits for its parent."""
    try:
        return stat.read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_decisions_are_sent_after_they_are_written(own_folder: Path, server: Any) -> None:
    plan = Plan(steps=STEPS, metrics=(Metric(success_gain=0.1),), events=[{"url": f"{server.url}/ok"}])
    with Store() as store:
        deployments = two_versions(store, own_folder)
        deployment = deployments.start("support@2", plan)
        assert [hook.url for hook in deployments.get(deployment.id).plan.events] == [f"{server.url}/ok"]
    assert advance_deployment("support").decision == "next"
    rollback_deployment("support", reason="complaints")
    assert [(body["event"], body["deployment"], body["step"]) for body in server.bodies] == [
        ("next", deployment.id, 1), ("rolled_back", deployment.id, 2),
    ]  # fmt: skip
    assert server.bodies[1]["reason"] == "complaints"


def test_a_fallback_is_sent_once_a_minute(own_folder: Path, server: Any) -> None:
    plan = Plan(steps=(Step(weight=90, decides=True),), events=[{"url": f"{server.url}/ok"}])
    with Store() as store:
        two_versions(store, own_folder).start("support@2", plan)
    (own_folder / "two" / "program.json").write_text("{}")  # changed: it cannot be loaded
    agent = assay.deployed("support")
    for at in range(20):
        assert agent(question="?", unit=str(at)).answer == "yes"
    until = time.monotonic() + 120
    while not server.bodies and time.monotonic() < until:
        time.sleep(0.05)
    assert [(body["event"], body["version"]) for body in server.bodies] == [("fallback", "support@2")]
    assert agent.fallbacks["support@2"] > 5
    text = metrics_text(dict.fromkeys(("calls", "stored", "unrecorded", "in_flight", "rows_waiting", "open"), 0), {
        "support": agent,
    })  # fmt: skip
    assert f'assay_agent_fallbacks_total{{agent="support",version="support@2"}} {agent.fallbacks["support@2"]}' in text
    assert 'version="support@1",arm="",status="done"' in text


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        ({}, "needs one of url, url_env and command"),
        ({"url": "file:///etc/passwd"}, "must be an http or https address"),
        ({"url": "http://h", "events": ["promotd"]}, "Did you mean 'promoted'"),
        ({"command": ["ls"]}, "cannot be a hook of a plan, because plans are stored in the database"),
        ({"adress": "http://h"}, r"events\.0\.adress: is not a setting"),
        ("http://h", "must be a mapping of its settings"),
    ],
)
def test_invalid_event_settings_are_named(own_folder: Path, hook: Any, message: str) -> None:
    (own_folder / "plan.yaml").write_text(json.dumps({"steps": [{"weight": 50, "decides": True}], "events": [hook]}))
    with pytest.raises(ConfigError, match=message):
        load_plan("plan.yaml")
