"""A gateway with a locked store: calls are still served, nothing is lost, and open rollouts take little memory."""

import json
import signal
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from click.testing import CliRunner

from assay.cli import group
from assay.errors import StoreError
from assay.traces import Rollout, Store, Transition
from rigs.command_line import while_serving
from rigs.gateway import PATHS, TOOL, AnsweringServer, Stage, body_of, locked, opened_stage, stage as stage, user
from rigs.serving import get, post, served
from rigs.upstream import ScriptedUpstream

MINE = {"x-assay-rollout": "mine"}
COMMAND = ("--model", "m", "--upstream", "http://127.0.0.1:9", "--port", "0", "--json")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s.db"


@pytest.mark.timeout(120)
def test_other_requests_are_served_while_the_store_is_locked(stage: Stage, path: Path) -> None:
    old = Rollout(source="gateway")  # not of this gateway: it is in the store alone
    stage.store.put_rollout(old)
    stage.store.flush()
    with locked(path):
        waiting = [
            threading.Thread(target=stage.manage, args=("/feedback", {"rollout": old.id, "rating": 1}))
            for _ in range(10)
        ]
        for thread in waiting:
            thread.start()
        time.sleep(0.3)
        assert [stage.ask(f"call {number}") for number in range(10)] == [200] * 10
        assert stage.ask("of a name", headers=MINE) == 200
        assert stage.manage("/assay/rollouts/mine/reward", {"reward": 0.1, "t": 0, "name": "tidy"})[0] == 200
        assert stage.manage("/assay/rollouts/mine/close", {"reward": 0.5})[0] == 200
        late = stage.manage("/assay/rollouts/mine/reward", {"reward": 0.75})
        assert late[0] == 200  # ended, and not in the database yet
        assert stage.manage("/assay/rollouts", {"id": "mine"})[0] == 422
        assert get(f"{stage.url}/health")["status"] == "ok"
        assert get(f"{stage.url}/assay/stats", **stage.owner)["rows_waiting"] > 0
    for thread in waiting:
        thread.join(60)
    mine = next(rollout for rollout in stage.rollouts() if rollout.metadata.get("client_id") == "mine")
    assert (mine.status, mine.score, [t.step_rewards for t in mine.transitions]) == ("done", 0.75, [{"tidy": 0.1}])
    stats = get(f"{stage.url}/assay/stats", **stage.owner)
    assert (stats["calls"], stats["stored"], stats["unrecorded"], stats["rows_waiting"]) == (11, 11, 0, 0)
    assert stage.store.stats()["transitions"] == 11
    assert stage.store.rollout(old.id).human_rating == 1.0


def test_a_rollout_of_an_earlier_gateway_continues_after_its_last_turn(stage: Stage, path: Path) -> None:
    """Of several calls at once a kill may lose one in the middle: the turns that are there must not be overwritten."""
    store = stage.store
    store.put_rollout(Rollout(id="0" * 32, source="gateway"))
    for t in (0, 1, 3):
        store.put_transition("0" * 32, Transition(t=t, model="m", request={}))
    store.flush()
    assert stage.manage(f"/assay/rollouts/{'0' * 32}/reward", {"reward": 0.5, "t": 3})[0] == 200
    assert stage.ask("goes on", headers={"x-assay-rollout": "0" * 32}) == 200
    assert [t.t for t in stage.rollout().transitions] == [0, 1, 3, 4]


def test_a_named_rollout_waits_for_the_rows_of_an_earlier_gateway(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Store, "behind", True)
    # the rollout may be there: begun anew, its calls would be overwritten
    assert (stage.ask("of a name", headers=MINE), stage.ask("of none")) == (503, 200)
    monkeypatch.setattr(Store, "behind", False)
    assert stage.ask("of a name", headers=MINE) == 200


@pytest.mark.parametrize("flushed", [True, False])
def test_a_step_reward_and_a_late_tool_result_do_not_overwrite_each_other(stage: Stage, flushed: bool) -> None:
    call = stage.chat(user("use the tool"), headers=MINE, tools=[TOOL])
    if flushed:
        stage.store.flush()
    assert stage.manage("/assay/rollouts/mine/reward", {"reward": 0.25, "t": 0, "name": "tidy"})[0] == 200
    result = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "42"}
    stage.chat(user("use the tool"), call, result, headers=MINE, tools=[TOOL])
    assert stage.manage("/assay/rollouts/mine/reward", {"reward": 0.5, "t": 0, "name": "kind"})[0] == 200
    assert stage.manage("/assay/rollouts/mine/reward", {"reward": 0.5, "t": 2})[0] == 422
    rollout = stage.rollout()
    assert rollout.transitions[0].step_rewards == {"tidy": 0.25, "kind": 0.5}
    assert [tool.result for tool in rollout.tools] == ["42"]


@pytest.mark.slow
def test_open_rollouts_with_pending_tool_calls_use_little_memory(tmp_path: Path) -> None:
    async def answer(_: web.Request) -> web.Response:
        function = {"name": "write", "arguments": json.dumps({"text": "y" * 500_000})}
        calls = [{"id": "call_1", "type": "function", "function": function}]
        return web.json_response({"choices": [{"message": {"content": "z" * 500_000, "tool_calls": calls}}]})

    with opened_stage(tmp_path, AnsweringServer(answer)) as stage:
        for number in range(5):
            stage.chat(user(f"{number}" + "x" * 1_000_000))
        lives = list(stage.gateway.rollouts.open.values())
        assert [len(repr(vars(live))) < 60_000 for live in lives] == [True] * 5
        stage.gateway.rollouts.sweep(all_of_them=True)
        for rollout in stage.rollouts():
            assert (rollout.status, len(rollout.inputs["prompt"])) == ("done", 1_000_001)
            assert len(rollout.tools[0].arguments["text"]) == 500_000
            assert len((rollout.prediction or {"answer": ""})["answer"]) == 500_000


@pytest.mark.slow
def test_serve_counts_at_its_end_the_rows_written_after_a_lock(path: Path) -> None:
    def client(started: dict[str, Any]) -> None:
        lock = ExitStack()
        lock.enter_context(locked(path))
        for number in range(20):
            post(started["url"] + PATHS["chat"], body_of("chat", f"call {number}"))
        threading.Timer(3, lock.close).start()  # after the command was stopped

    with served(ScriptedUpstream().app()) as behind:
        command = ("serve", "--model", "m", "--upstream", behind, "--port", "0", "--json", "--store", str(path))
        _, done = while_serving(*command, client=client)
    audit = json.loads(done.stdout.splitlines()[-1])
    with Store(path) as store:
        stats = store.stats()
    assert (audit["calls"], audit["stored"], audit["unrecorded"], audit["rows_waiting"]) == (20, 20, 0, 0)
    assert (stats["transitions"], stats["unrecorded"]) == (20, 0)


def test_serve_prints_its_counts_if_it_is_stopped_right_after_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command_line = sys.modules["assay.cli"]  # `assay.cli` is its function
    printed = command_line.print_json

    def print_and_stop(data: Any, **options: Any) -> None:
        printed(data, **options)
        if "url" in data:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(command_line, "print_json", print_and_stop)
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        result = CliRunner().invoke(group, ["serve", *COMMAND, "--store", str(tmp_path / "s.db")])
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[-1])["calls"] == 0


@pytest.mark.slow
def test_serve_prints_its_counts_while_the_store_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("assay.commands.serve.FLUSH_TIMEOUT_S", 1.0)
    store = tmp_path / "s.db"
    Store(store).close()
    with locked(store):
        threading.Timer(2, signal.raise_signal, (signal.SIGTERM,)).start()
        result = CliRunner().invoke(group, ["serve", *COMMAND, "--store", str(store)])
    assert isinstance(result.exception, StoreError), result.output  # its rows are in a file
    assert json.loads(result.stdout.splitlines()[-1])["rows_waiting"] > 0
    assert "are written when the store is opened again" in result.stderr
