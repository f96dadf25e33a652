"""Several gateways, and other processes, that record in one store: no call is lost, and a rollout has all its turns."""

import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from importing_rows import chat, lines, request as otlp_request, span

import assay
from assay.jobs.recording import opened_store
from assay.traces import Recorder, Rollout, Store, Transition
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.upstreams import upstream_of
from assay.traces.importers import import_traces
from assay.traces.records import new_id
from assay.traces.store.leases import present
from assay.traces.store.rows import transition_row
from assay.traces.store.writer import Spill, spill_path
from rigs.gateway import KEY, TOOL, Stage, body_of, until, user
from rigs.serving import served
from rigs.upstream import ScriptedUpstream


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def where(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A store for the tests of this file, which use names of their own."""
    if request.param == "sqlite":
        yield str(tmp_path_factory.mktemp("gateways") / "s.db")
        return
    import psycopg

    server, name = request.getfixturevalue("postgres_url"), f"gateways_{uuid.uuid4().hex}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
        yield server.replace("/postgres?", f"/{name}?")
        connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


@pytest.fixture(scope="module")
def pair(where: str) -> Iterator[tuple[Stage, Stage]]:
    """Two gateways on one store, in front of one server."""
    with ExitStack() as stack:
        server = ScriptedUpstream()
        behind = stack.enter_context(served(server.app()))
        stages = []
        for _ in range(2):
            gateway = Gateway(stack.enter_context(Store(where)), upstream_of("echo", base=behind), key=KEY)
            stages.append(Stage(gateway, server, stack.enter_context(served(gateway.app())), behind))
        until(lambda: all(stage.gateway.rollouts.shared for stage in stages))
        yield stages[0], stages[1]


def stored(pair: tuple[Stage, ...], name: str) -> Rollout:
    """The rollout of that name, or the only one whose prompt begins with it."""
    for stage in pair:
        stage.store.flush()
    (rollout,) = [
        row for row in pair[0].store.rollouts()
        if row.metadata.get("client_id") == name or str(row.inputs.get("prompt", "")).startswith(f"{name} ")
    ]  # fmt: skip
    return pair[0].store.rollout(rollout.id)


def turns(rollout: Rollout) -> list[tuple[int, str]]:
    return [(call.t, call.output) for call in rollout.transitions]


def test_calls_of_a_named_rollout_at_two_gateways_are_all_turns_in_order(pair: tuple[Stage, Stage]) -> None:
    headers, before = {"x-assay-rollout": "alternating", **pair[0].owner}, sum(one.gateway.stored for one in pair)
    for turn in range(6):
        body = body_of("chat", f"alternating {turn}")
        if turn % 3 == 2:
            pair[turn % 2].stream("chat", body, **headers)
        else:
            assert pair[turn % 2].post("chat", body, **headers)[0] == 200
    until(lambda: sum(stage.gateway.stored for stage in pair) == before + 6)  # a stream is recorded after its end
    rollout = stored(pair, "alternating")
    assert turns(rollout) == [(turn, f"echo: alternating {turn}") for turn in range(6)]
    assert (rollout.inputs, rollout.prediction) == ({"prompt": "alternating 0"}, {"answer": "echo: alternating 5"})
    with ThreadPoolExecutor(8) as threads:
        asked = [
            threads.submit(pair[number % 2].ask, f"at once {number}", headers=headers) for number in range(16)
        ]  # fmt: skip
        assert {one.result() for one in asked} == {200}
    rollout = stored(pair, "alternating")
    assert [call.t for call in rollout.transitions] == list(range(22))
    assert {call.output for call in rollout.transitions[6:]} == {f"echo: at once {number}" for number in range(16)}
    starts = [call.started_at for call in rollout.transitions]
    assert starts == sorted(starts)


def test_a_rollout_is_opened_called_rewarded_and_closed_at_different_gateways(pair: tuple[Stage, Stage]) -> None:
    one, two = pair
    _, opened = one.manage("/assay/rollouts", {"id": "opened", "inputs": {"question": "?"}, "task_type": "sums"})
    assert two.manage("/assay/rollouts", {"id": "opened"})[0] == 422
    token = {"Authorization": f"Bearer {opened['api_key']}"}
    question = user("use the tool")
    called = two.chat(question, headers=token, tools=[TOOL])
    result = {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": "42"}
    one.chat(question, called, result, headers=token, tools=[TOOL])
    assert one.manage("/assay/rollouts/opened/reward", {"reward": 0.25, "t": 0, "name": "tidy"})[0] == 200
    assert two.manage("/assay/rollouts/opened/reward", {"reward": 0.5, "t": 1, "name": "tidy"})[0] == 200
    assert two.manage("/assay/rollouts/opened/reward", {"reward": 0.5, "t": 2})[0] == 422
    assert two.manage("/assay/rollouts/opened/close", {"reward": 0.75})[0] == 200
    again = {"reward": 0.1, "status": "failed"}
    assert [stage.manage("/assay/rollouts/opened/close", again)[0] for stage in pair] == [404, 404]
    assert [stage.ask("late", headers=token) for stage in pair] == [403, 403]
    rollout = stored(pair, "opened")
    assert (rollout.status, rollout.score, rollout.prediction) == ("done", 0.75, {"answer": "echo: 42"})
    assert (rollout.inputs, rollout.task_type) == ({"question": "?"}, "sums")
    assert [call.step_rewards for call in rollout.transitions] == [{"tidy": 0.25}, {"tidy": 0.5}]
    assert [tool.result for tool in rollout.tools] == ["42"]


def test_a_rollout_that_a_call_ended_has_ended_at_the_other_gateway_too(pair: tuple[Stage, Stage]) -> None:
    one, two = pair
    for number in range(4):
        token = {"Authorization": f"Bearer {one.manage('/assay/rollouts', {})[1]['api_key']}"}
        assert one.ask(f"ended {number}", headers=token) == 200
        assert two.ask("the last one", headers={**token, "x-assay-end": "1"}) == 200
        assert one.ask("late", headers=token) == 403


@pytest.mark.parametrize("dialect", ["chat", "messages", "responses", "gemini"])
def test_a_conversation_without_a_name_is_one_rollout(pair: tuple[Stage, Stage], dialect: str) -> None:
    name, previous = f"unnamed-{dialect}", ""
    history: list[Any] = []
    for turn in range(4):
        body = body_of(dialect, f"{name} {turn}")
        if dialect == "responses":
            body |= {"previous_response_id": previous} if previous else {}
        else:
            field = "contents" if dialect == "gemini" else "messages"
            history += body[field]
            body[field] = list(history)
        status, reply = pair[turn % 2].post(dialect, body, **pair[0].owner)
        assert status == 200, reply
        previous = reply.get("id", "")
        history.append(
            {"role": "model", "parts": [{"text": f"echo: {name} {turn}"}]} if dialect == "gemini"
            else {"role": "assistant", "content": f"echo: {name} {turn}"}
        )  # fmt: skip
    assert turns(stored(pair, name)) == [(turn, f"echo: {name} {turn}") for turn in range(4)]


def test_calls_of_a_trace_and_of_tools_are_found_at_another_gateway(pair: tuple[Stage, Stage]) -> None:
    trace = {"traceparent": f"00-{uuid.uuid4().hex}-{'1' * 16}-01", **pair[0].owner}
    for turn in range(3):
        assert pair[turn % 2].ask(f"traced {turn}", headers=trace) == 200
    assert turns(stored(pair, "traced")) == [(turn, f"echo: traced {turn}") for turn in range(3)]
    messages = [user("tools use the tool #steps3")]
    for turn in range(4):
        answer = pair[turn % 2].chat(*messages, headers=pair[0].owner, tools=[TOOL])
        calls = answer.get("tool_calls") or ()
        results = [{"role": "tool", "tool_call_id": call["id"], "content": str(turn)} for call in calls]
        messages += [answer, *results]
    rollout = stored(pair, "tools")
    assert ([tool.result for tool in rollout.tools], len(rollout.transitions)) == (["0", "1", "2"], 4)
    assert rollout.prediction == {"answer": "echo: 2"}


def test_a_conversation_goes_on_where_its_gateway_was_killed(pair: tuple[Stage, Stage]) -> None:
    one, two = pair
    named, question = {"x-assay-rollout": "killed-named"}, user("killed 0")
    answer = one.chat(question, headers=one.owner)
    one.ask("killed-named 0", headers={**named, **one.owner})
    one.store.flush()
    one.gateway.rollouts.open.clear()  # what a kill leaves: the store alone
    two.chat(question, answer, user("killed 1"), headers=two.owner)
    two.ask("killed-named 1", headers={**named, **two.owner})
    for name in ("killed", "killed-named"):
        assert turns(stored(pair, name)) == [(turn, f"echo: {name} {turn}") for turn in range(2)]


def test_a_gateway_does_not_end_what_goes_on_at_another_one(pair: tuple[Stage, Stage]) -> None:
    one, two = pair
    named = {"x-assay-rollout": "goes-on", **one.owner}
    assert [stage.ask("goes-on", headers=named) for stage in pair] == [200, 200]
    two.store.flush()
    one.gateway.rollouts.sweep(all_of_them=True)
    assert stored(pair, "goes-on").status == "running"
    two.gateway.rollouts.sweep(all_of_them=True)
    rollout = stored(pair, "goes-on")
    assert (rollout.status, rollout.error) == ("error", "the rollout was never closed")


# -- the store


def call_of(t: int, started_at: float, text: str) -> Transition:
    return Transition(t=t, id=new_id(), model="m", request={}, output=text, started_at=started_at)


def test_rows_that_waited_are_turns_in_the_order_of_their_requests(where: str) -> None:
    waiting = [call_of(t, started_at, f"waited {t}") for t, started_at in enumerate((1.0, 3.0))]
    with Store(where) as store:
        store.begin_rollout(Rollout(id="spilled", source="gateway", started_at=2.0, inputs={"prompt": "second"}))
        first = call_of(0, 2.0, "here")
        for call in (first, call_of(1, 4.0, "here too")):
            store.put_transition("spilled", call)
        store.put_transition("spilled", first)  # written again by its own process
        store.flush()
        spill = Spill(spill_path(store.address.file, store.id), 1 << 20)
    rows = {("spilled", call.id): transition_row(vars(call)) | {"rollout_id": "spilled"} for call in waiting}
    assert spill.put({"transitions": rows})
    spill.leave()
    with Store(where) as store:
        until(lambda: not store.behind)
        rollout = store.rollout("spilled")
    assert turns(rollout) == [(0, "waited 0"), (1, "here"), (2, "waited 1"), (3, "here too")]
    assert rollout.inputs == {"prompt": "second"}


def test_times_are_those_of_the_server(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    with Store(where) as store:
        monkeypatch.setattr(time, "time", lambda: real() + 7200.0)
        with Recorder(store).rollout(Rollout(started_at=time.time())) as rollout:
            rollout.transitions.append(call := call_of(0, time.time(), "?"))
            Recorder(store).identify(rollout, call)
        times = [store.clock.now(), rollout.started_at, rollout.ended_at or 0.0, call.started_at]
        assert max(abs(at - present(store.engine)) for at in times) < 5.0


def test_processes_that_write_one_rollout_at_once_lose_nothing(where: str) -> None:
    with ExitStack() as stack:
        stores = [stack.enter_context(Store(where)) for _ in range(3)]

        def write(number: int) -> None:
            for at in range(40):
                rollout = f"shared-{at % 2}"
                stores[number].begin_rollout(Rollout(id=rollout, source="gateway", started_at=float(number)))
                stores[number].put_transition(rollout, call_of(at, at + number / 10, f"{at} {number}"))
                if at % 7 == number:
                    stores[number].flush()
            stores[number].flush()

        threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        for name in range(2):
            rollout = stores[0].rollout(f"shared-{name}")
            expected = [f"{at} {number}" for at in range(name, 40, 2) for number in range(3)]
            assert turns(rollout) == list(enumerate(expected))
            assert rollout.started_at == 0.0


def test_a_rollout_that_is_recorded_twice_by_its_id_has_all_calls(where: str) -> None:
    for number in range(2):  # as two processes would: both number their calls from 0
        with assay.record("?", id="recorded", store=where) as run:
            for at in range(2):
                run.call([user("?")], f"{number} {at}", model="m", reward=0.5 if at else None)
    opened_store(where)[0].close()  # else it is closed when this process ends, and its server is gone by then
    with Store(where) as store:
        rollout = store.rollout("recorded")
    assert turns(rollout) == [(0, "0 0"), (1, "0 1"), (2, "1 0"), (3, "1 1")]
    assert [len(call.step_rewards) for call in rollout.transitions] == [0, 1, 0, 1]


def test_two_imports_of_parts_of_a_trace_at_once_lose_no_call(where: str, tmp_path: Path) -> None:
    parts = [lines(tmp_path / f"{n}.jsonl", otlp_request(span(n, chat(f"part {n}")))) for n in (1, 2)]
    with Store(where) as one, Store(where) as two, ThreadPoolExecutor(2) as threads:
        done = [
            threads.submit(import_traces, store, "otlp", part) for store, part in zip((one, two), parts, strict=True)
        ]
        reports = [one_done.result() for one_done in done]
        (imported,) = [row for row in one.rollouts() if row.run_id in {report.run_id for report in reports}]
        assert len(one.rollout(imported.id).transitions) == 2
