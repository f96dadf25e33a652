"""A gateway whose store is locked: calls are served meanwhile, nothing is lost, and open rollouts take little memory."""

import json
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from assay.testing.serving import get, post, served
from assay.testing.upstream import ScriptedUpstream
from assay.traces import Rollout, Store
from assay.traces.gateway import Gateway
from assay.traces.live import Live
from assay.traces.upstreams import upstream_of

KEY = "gateway-key-1"
OWNER = {"Authorization": f"Bearer {KEY}"}


@contextmanager
def locked(path: Path) -> Iterator[None]:
    other = sqlite3.connect(path, isolation_level=None, timeout=30)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.execute("ROLLBACK")
        other.close()


class Stage:
    def __init__(self, gateway: Gateway, url: str, path: Path) -> None:
        self.gateway, self.url, self.path = gateway, url, path

    def chat(self, text: str, **headers: str) -> int:
        return post(f"{self.url}/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}, **OWNER, **headers)[0]

    def manage(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        return post(self.url + path, body, **OWNER)

    def rollouts(self) -> list[Rollout]:
        self.gateway.store.flush()
        return [self.gateway.store.rollout(rollout.id) for rollout in self.gateway.store.rollouts()]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with Store(tmp_path / "s.db") as store, served(ScriptedUpstream().app()) as behind:
        gateway = Gateway(store, upstream_of("m", base=behind), key=KEY)
        with served(gateway.app()) as url:
            yield Stage(gateway, url, tmp_path / "s.db")


def test_other_requests_are_served_while_the_store_is_locked(stage: Stage) -> None:
    old = Rollout(source="gateway")  # not of this gateway: it is in the store alone
    stage.gateway.store.put_rollout(old)
    stage.gateway.store.flush()
    with locked(stage.path):
        waiting = [threading.Thread(target=stage.manage, args=("/feedback", {"rollout": old.id, "rating": 1})) for _ in range(10)]
        for thread in waiting:
            thread.start()
        time.sleep(0.3)
        clock = time.perf_counter()
        assert [stage.chat(f"call {number}") for number in range(10)] == [200] * 10
        assert stage.chat("of a name", **{"x-assay-rollout": "mine"}) == 200
        assert stage.manage("/assay/rollouts/mine/reward", {"reward": 0.1, "t": 0, "name": "tidy"})[0] == 200
        assert stage.manage("/assay/rollouts/mine/close", {"reward": 0.5})[0] == 200
        assert stage.manage("/assay/rollouts/mine/reward", {"reward": 0.75})[0] == 200  # ended, and not in the database yet
        assert stage.manage("/assay/rollouts", {"id": "mine"})[0] == 422
        assert get(f"{stage.url}/health")["status"] == "ok"
        assert time.perf_counter() - clock < 5
        assert stage.gateway.stats()["rows_waiting"] > 0
    for thread in waiting:
        thread.join(60)
    mine = next(rollout for rollout in stage.rollouts() if rollout.metadata.get("client_id") == "mine")
    assert (mine.status, mine.score, [t.step_rewards for t in mine.transitions]) == ("done", 0.75, [{"tidy": 0.1}])
    stats = get(f"{stage.url}/assay/stats", **OWNER)
    assert (stats["calls"], stats["stored"], stats["unrecorded"], stats["rows_waiting"]) == (11, 11, 0, 0)
    assert stage.gateway.store.stats()["transitions"] == 11
    assert stage.gateway.store.rollout(old.id).human_rating == 1.0


def test_a_rollout_goes_on_by_its_name_while_the_store_is_locked(stage: Stage) -> None:
    with locked(stage.path):
        for _ in range(2):
            assert stage.chat("again", **{"x-assay-rollout": "mine", "x-assay-end": "1"}) == 200
    (rollout,) = stage.rollouts()
    assert [t.t for t in rollout.transitions] == [0, 1]


@pytest.mark.parametrize("flushed", [True, False])
def test_a_step_reward_and_a_late_tool_result_keep_each_other(stage: Stage, flushed: bool) -> None:
    tool = {
        "type": "function",
        "function": {"name": "calculator", "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}}},
    }
    messages: list[dict[str, Any]] = [{"role": "user", "content": "use the tool"}]
    headers = {"x-assay-rollout": "mine"}
    _, told = post(f"{stage.url}/v1/chat/completions", {"messages": messages, "tools": [tool]}, **OWNER, **headers)
    if flushed:
        stage.gateway.store.flush()
    assert stage.manage("/assay/rollouts/mine/reward", {"reward": 0.25, "t": 0, "name": "tidy"})[0] == 200
    call = told["choices"][0]["message"]
    messages += [call, {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "42"}]
    post(f"{stage.url}/v1/chat/completions", {"messages": messages, "tools": [tool]}, **OWNER, **headers)
    assert stage.manage("/assay/rollouts/mine/reward", {"reward": 0.5, "t": 0, "name": "kind"})[0] == 200
    assert stage.manage("/assay/rollouts/mine/reward", {"reward": 0.5, "t": 2})[0] == 422
    (rollout,) = stage.rollouts()
    assert rollout.transitions[0].step_rewards == {"tidy": 0.25, "kind": 0.5}
    assert [tool.result for tool in rollout.tools] == ["42"]


def held(value: Any, seen: set[int]) -> int:
    """Characters and bytes that an object holds."""
    if id(value) in seen or isinstance(value, type):
        return 0
    seen.add(id(value))
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(held(part, seen) for pair in value.items() for part in pair)
    if isinstance(value, list | tuple | set | frozenset):
        return sum(held(part, seen) for part in value)
    return held(vars(value), seen) if hasattr(value, "__dict__") else 0


def test_open_rollouts_whose_tool_calls_are_unanswered_take_little_memory(tmp_path: Path) -> None:
    async def answer(_: web.Request) -> web.Response:
        call = {"id": "call_1", "type": "function", "function": {"name": "write", "arguments": json.dumps({"text": "y" * 500_000})}}
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": "z" * 500_000, "tool_calls": [call]}}]})

    app = web.Application(client_max_size=10 << 20)
    app.router.add_post("/v1/chat/completions", answer)
    with Store(tmp_path / "s.db") as store, served(app) as behind:
        gateway = Gateway(store, upstream_of("m", base=behind))
        with served(gateway.app()) as url:
            for number in range(10):
                messages = [{"role": "user", "content": f"{number}" + "x" * 1_000_000}]
                assert post(f"{url}/v1/chat/completions", {"messages": messages})[0] == 200
            assert len(gateway.rollouts.open) == 10
            sizes = [
                held([getattr(live, name) for name in Live.__dataclass_fields__ if name != "upstream"], set())
                for live in gateway.rollouts.open.values()
            ]
            assert max(sizes) < 60_000
        store.flush()
        found = [store.rollout(rollout.id) for rollout in store.rollouts()]
    assert [len(rollout.inputs["prompt"]) for rollout in found] == [1_000_001] * 10
    assert [len(rollout.tools[0].arguments["text"]) for rollout in found] == [500_000] * 10
    assert {len((rollout.prediction or {"answer": ""})["answer"]) for rollout in found} == {500_000}
    assert {rollout.status for rollout in found} == {"done"}


def test_serve_counts_at_its_end_what_is_written_after_a_lock(tmp_path: Path) -> None:
    with served(ScriptedUpstream().app()) as behind:
        command = [sys.executable, "-m", "assay", "serve", "--model", "m", "--upstream", behind, "--port", "0", "--json"]
        process = subprocess.Popen([*command, "--store", str(tmp_path / "s.db")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        with locked(tmp_path / "s.db"):
            for number in range(20):
                post(f"{url}/v1/chat/completions", {"messages": [{"role": "user", "content": f"call {number}"}]})
            process.send_signal(signal.SIGTERM)
            time.sleep(6)
        told, _ = process.communicate(timeout=60)
    audit = json.loads(told.splitlines()[-1])
    with Store(tmp_path / "s.db") as store:
        stats = store.stats()
    assert (audit["calls"], audit["stored"], audit["unrecorded"], audit["rows_waiting"]) == (20, 20, 0, 0)
    assert (stats["transitions"], stats["unrecorded"]) == (20, 0)
