"""Access control of the gateway: its key, rollout tokens, callers without either, DNS rebinding."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from assay.datasets.tasks import task_key
from assay.traces import Rollout, Store
from assay.traces.gateway.server import Gateway
from rigs.command_line import while_serving
from rigs.gateway import CHAT, KEY, OWNER, PATHS, AnsweringServer, Stage, opened_stage, user
from rigs.serving import post, send, served

KEYED = {"key": KEY, "upstream_key": "upstream-secret"}
OPEN = {"upstream_key": "upstream-secret"}
unlocked = pytest.mark.parametrize("stage", [OPEN], indirect=True, ids=["open"])
either = pytest.mark.parametrize("stage", [KEYED, OPEN], indirect=True, ids=["with a key", "open"])
MANAGED = [  # method, path with a rollout's name or token, body
    ("POST", "/assay/rollouts", {}),
    ("GET", "/assay/rollouts/{}", None),
    ("POST", "/assay/rollouts/{}/reward", {"reward": 1}),
    ("POST", "/assay/rollouts/{}/close", {"reward": 1}),
    ("POST", "/r/{}/reward", {"reward": 1}),
    ("POST", "/r/{}/close", {"reward": 1}),
    ("POST", "/feedback", {"rollout": "{}", "rating": 1}),
    ("GET", "/assay/stats", None),
    ("POST", "/assay/model", {"model": "mistral/other"}),
]


@pytest.fixture
def stage(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Stage]:
    with opened_stage(tmp_path, **getattr(request, "param", KEYED)) as opened:
        yield opened


def managed(stage: Stage, rollout: str, **headers: str) -> dict[str, int]:
    statuses = {}
    for method, path, body in MANAGED:
        sent = json.loads(json.dumps(body).replace("{}", rollout)) if body else body
        statuses[f"{method} {path}"] = send(method, stage.url + path.format(rollout), sent, **headers)[0]
    return statuses


def opened(stage: Stage, **fields: Any) -> dict[str, Any]:
    """A rollout's id, and the token and the address for its agent."""
    return stage.manage("/assay/rollouts", fields)[1]


def token_path(rollout: dict[str, Any]) -> str:
    return f"/r/{rollout['api_key']}{PATHS['chat']}"


def closed(stage: Stage, rollout: dict[str, Any], end: dict[str, Any]) -> None:
    assert stage.manage(f"/assay/rollouts/{rollout['id']}/close", end)[0] == 200


def stored(stage: Stage) -> dict[str, Rollout]:
    return {rollout.id: rollout for rollout in stage.rollouts()}


# -- keys


def test_with_a_key_other_callers_are_refused_and_no_key_is_stored(stage: Stage) -> None:
    for headers, status in (
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        (OWNER, 200),
        ({"x-api-key": KEY}, 200),
        ({"Authorization": f"Bearer {opened(stage)['api_key']}"}, 200),
    ):
        assert stage.post("chat", CHAT, **headers)[0] == status
    assert stage.post("/assay/rollouts", {})[0] == 401
    assert all(KEY not in json.dumps(headers) for headers in stage.upstream.headers)
    assert stage.upstream.headers[0]["Authorization"] == "Bearer upstream-secret"
    stage.store.flush()
    path = Path(stage.store.url.removeprefix("sqlite:///"))
    raw = path.read_bytes() + path.with_name(f"{path.name}-wal").read_bytes()
    assert (KEY.encode() in raw, b"upstream-secret" in raw) == (False, False)


@unlocked
def test_without_a_key_calls_are_open_and_other_requests_need_the_generated_key(stage: Stage) -> None:
    assert stage.post("chat", CHAT)[0] == 200
    status, reply = stage.post("chat", CHAT, Authorization=f"Bearer rollout-{'0' * 32}-{'1' * 32}")
    assert (status, "not of this gateway's key" in reply["error"]["message"]) == (401, True)
    assert send("GET", f"{stage.url}/v1/models", None)[0] == 200
    assert stage.post(f"/r/my-run{PATHS['chat']}", CHAT)[0] == 200
    rollout = opened(stage, id="x")["id"]
    assert set(managed(stage, rollout).values()) == {401}
    assert stage.gateway.upstream.name == "echo"
    statuses = managed(stage, rollout, **stage.owner)
    ended = {"POST /r/{}/close": 404}  # it was closed two lines before
    assert statuses == dict.fromkeys(statuses, 200) | ended


def test_serve_prints_its_generated_key(tmp_path: Path) -> None:
    def client(started: dict[str, Any]) -> tuple[str, list[int]]:
        key, stats = started["key"], f"{started['url']}/assay/stats"
        return key, [send("GET", stats)[0], send("GET", stats, Authorization=f"Bearer {key}")[0]]

    command = ("serve", "--model", "m", "--upstream", "http://127.0.0.1:9", "--port", "0", "--json", "--store", "s.db")
    (key, statuses), done = while_serving(*command, client=client)
    assert (statuses, f"ASSAY_KEY={key}" in done.stderr) == ([401, 200], True)


# -- tokens of rollouts


@pytest.mark.parametrize("how", ["path", "bearer", "x-api-key", "api-key"])
def test_a_rollouts_token_makes_calls_of_that_rollout(stage: Stage, how: str) -> None:
    mine = opened(stage, task_id="t")
    assert KEY not in json.dumps(mine)
    token = mine["api_key"]
    headers = {"path": {}, "bearer": {"Authorization": f"Bearer {token}"}}.get(how, {how: token})
    assert mine["base_url"] == f"{stage.url}/r/{token}/v1"
    assert stage.post(token_path(mine) if how == "path" else "chat", CHAT, **headers)[0] == 200
    rollout = stage.rollout()
    assert (rollout.id, rollout.task_id, len(rollout.transitions)) == (mine["id"], "t", 1)
    sent = json.dumps(stage.upstream.headers)
    assert ("upstream-secret" in sent, token in sent) == (True, False)


@either
def test_a_rollouts_token_permits_only_calls(stage: Stage) -> None:
    mine = opened(stage)
    token = mine["api_key"]
    for headers in ({"Authorization": f"Bearer {token}"}, {"x-api-key": token}):
        assert set(managed(stage, mine["id"], **headers).values()) == {403}
    assert set(managed(stage, token).values()) <= {401, 403}
    rollout = stage.rollout()
    assert (rollout.status, rollout.score, rollout.human_rating) == ("running", None, None)
    assert stage.gateway.upstream.name == "echo"


def test_a_token_is_valid_only_for_its_rollout_and_cannot_be_forged(stage: Stage) -> None:
    mine, other = opened(stage), opened(stage)
    bearer, named = {"Authorization": f"Bearer {mine['api_key']}"}, f"/r/{other['id']}{PATHS['chat']}"
    forged = f"rollout-{other['id']}-{mine['api_key'][-32:]}"
    for path, headers, status in (
        ("chat", {**bearer, "x-assay-rollout": other["id"]}, 403),
        (named, bearer, 403),
        (token_path(other), bearer, 403),
        ("chat", {"Authorization": f"Bearer {forged}"}, 401),
        (f"/r/{forged}{PATHS['chat']}", {}, 401),
        (named, {}, 401),
        ("chat", {"Authorization": f"Bearer rollout-{other['id']}"}, 401),
        ("chat", {"x-assay-rollout": other["id"]}, 401),
        ("chat", {"Authorization": f"Bearer {KEY}.{other['id']}x"}, 401),
    ):
        assert stage.post(path, CHAT, **headers)[0] == status, (path, headers)
    assert stage.calls() == []
    assert stage.post("chat", CHAT, **bearer, **{"x-assay-rollout": mine["id"]})[0] == 200


def test_a_token_is_valid_as_long_as_the_key(stage: Stage, tmp_path: Path) -> None:
    path = token_path(opened(stage))
    with Store(tmp_path / "s.db") as store, served(Gateway(store, stage.gateway.upstream, key=KEY).app()) as again:
        assert post(again + path, CHAT)[0] == 200


@pytest.mark.parametrize("flushed", [True, False], ids=["in the store", "at hand"])
def test_a_token_cannot_add_calls_to_a_closed_rollout(stage: Stage, flushed: bool) -> None:
    ends = ({"reward": 1.0}, {"prediction": "mine"}, {}, {"status": "failed"}, {"status": "error", "error": "broke"})
    for end in ends:
        mine = opened(stage)
        assert stage.post(token_path(mine), CHAT)[0] == 200
        closed(stage, mine, end)
        before = stored(stage)
        if flushed:
            stage.gateway.rollouts.ended.clear()
        for headers in ({}, {"x-assay-end": "1"}):
            status, reply = stage.post(token_path(mine), {"messages": [user("POISON")]}, **headers)
            assert (status, "has ended" in reply["error"]["message"]) == (403, True)
        assert stored(stage) == before
    assert stage.upstream.calls == len(ends)


def test_a_token_continues_an_idle_rollout_until_it_is_ended_or_scored(stage: Stage) -> None:
    ending = token_path(opened(stage))
    assert [stage.post(ending, CHAT, **{"x-assay-end": "1"})[0] for _ in range(2)] == [200, 403]
    mine = opened(stage)
    for _ in range(2):
        assert stage.post(token_path(mine), CHAT)[0] == 200
        stage.gateway.rollouts.sweep(all_of_them=True)
    assert stage.manage(f"/assay/rollouts/{mine['id']}/reward", {"reward": 1})[0] == 200
    assert stage.post(token_path(mine), CHAT)[0] == 403
    by_name = {**OWNER, "x-assay-rollout": mine["id"]}
    assert stage.post("chat", CHAT, **by_name)[0] == 200  # the owner opens it again
    assert stage.post(token_path(mine), CHAT)[0] == 403
    assert len(stored(stage)[mine["id"]].transitions) == 3


@pytest.mark.parametrize("end", [{"reward": 1.0}, {"prediction": "mine"}], ids=str)
def test_an_answer_after_the_close_changes_neither_score_nor_prediction(tmp_path: Path, end: dict[str, Any]) -> None:
    begun, released = threading.Event(), threading.Event()

    async def answer(request: web.Request) -> web.Response:
        prompt = (await request.json())["messages"][0]["content"]
        if prompt == "POISON":
            begun.set()
            await asyncio.to_thread(released.wait, 30)
        message = {"role": "assistant", "content": prompt}
        return web.json_response({"choices": [{"message": message, "finish_reason": "stop"}]})

    with opened_stage(tmp_path, AnsweringServer(answer), key=KEY) as stage:
        mine = opened(stage)
        assert stage.post(token_path(mine), CHAT)[0] == 200
        late = threading.Thread(target=stage.post, args=(token_path(mine), {"messages": [user("POISON")]}))
        late.start()
        assert begun.wait(120)
        closed(stage, mine, end)
        released.set()
        late.join(120)
        rollout = stage.rollout()
    assert (rollout.status, [t.output for t in rollout.transitions]) == ("done", ["hello", "POISON"])
    assert (rollout.score, rollout.prediction) == (end.get("reward"), {"answer": end.get("prediction", "hello")})


def test_an_agent_cannot_choose_its_comparison_group(stage: Stage) -> None:
    mine, headers = opened(stage), {"x-assay-group": "an easy one", "x-assay-task": "an easy one"}
    assert stage.post(token_path(mine), CHAT, **headers)[0] == 200
    assert stage.post(f"/r/named{PATHS['chat']}", CHAT, **OWNER, **headers)[0] == 200
    agents, owners = sorted(stage.rollouts(), key=lambda rollout: rollout.id != mine["id"])
    assert agents.task_id == agents.group_id == task_key(agents.inputs)
    assert (owners.task_id, owners.group_id) == ("an easy one", "an easy one")


@pytest.mark.parametrize("stage", [{"key": KEY}], indirect=True)
def test_with_a_token_a_callers_own_key_goes_to_the_upstream(stage: Stage) -> None:
    mine, own = opened(stage), {"Authorization": "Bearer sk-mine"}
    assert stage.post(token_path(mine), CHAT, **own)[0] == 200
    assert stage.post("chat", CHAT, **own, **{"x-api-key": mine["api_key"]})[0] == 200
    assert stage.post("chat", CHAT, **OWNER)[0] == 200
    sent = [headers.get("Authorization") for headers in stage.upstream.headers]
    assert sent == ["Bearer sk-mine", "Bearer sk-mine", None]
    assert KEY not in json.dumps(stage.upstream.headers)
    assert mine["api_key"] not in json.dumps(stage.upstream.headers)


# -- rollouts of others


def test_rollouts_that_no_gateway_recorded_are_never_changed(stage: Stage) -> None:
    fields: dict[str, Any] = {"source": "program", "run_id": "compile-1", "phase": "test", "split": "test"}
    sealed = Rollout(**fields, status="done", score=0.25, prediction={"answer": "a"})
    running = Rollout(**fields, status="running")
    for rollout in (sealed, running):
        stage.store.put_rollout(rollout)
    before = stored(stage)
    for name in (sealed.id, running.id):
        for path, headers in (
            (f"/r/{name}{PATHS['chat']}", {}),
            ("chat", {"x-assay-rollout": name}),
            (f"/r/{stage.gateway.access.token(name)}{PATHS['chat']}", {}),
        ):
            status, reply = stage.post(path, CHAT, **OWNER, **headers)
            assert (status, "not recorded by a gateway" in reply["error"]["message"]) == (404, True)
        for path, body in (
            (f"/assay/rollouts/{name}/reward", {"reward": 1}),
            (f"/assay/rollouts/{name}/reward", {"reward": 1, "t": 0}),
            (f"/assay/rollouts/{name}/close", {"reward": 1, "prediction": "b"}),
            (f"/assay/rollouts/{name}/close", {"prediction": "b"}),
            ("/feedback", {"rollout": name, "rating": 1}),
            ("/assay/rollouts", {"id": name}),
        ):
            assert stage.manage(path, body)[0] in (404, 422), path
    assert stored(stage) == before
    assert stage.upstream.calls == 0


# -- hosts and paths


@either
def test_requests_by_dns_rebinding_are_refused_on_every_path(stage: Stage) -> None:
    rollout = opened(stage)["id"]
    for host in (
        "evil.example",
        "evil.example:8321",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "",
        "x@[::1]",
    ):
        headers = {**stage.owner, "Host": host}
        assert set(managed(stage, rollout, **headers).values()) == {403}
        assert send("POST", stage.url + PATHS["chat"], CHAT, **headers)[0] == 403
        for path in ("/v1/models", "/health", "/", "/nothing"):
            assert send("GET", stage.url + path, None, **headers)[0] == 403, path
    assert stage.upstream.calls == 0


@pytest.mark.parametrize("stage", [{"key": KEY, "names": ["Gateway.internal"]}], indirect=True)
def test_addresses_local_names_and_allowed_names_are_accepted(stage: Stage) -> None:
    addresses = ("127.0.0.1:8321", "10.1.2.3", "[::1]:8321")
    for host in (*addresses, "localhost", "LOCALHOST:99", "app.localhost", "gateway.internal.:80"):
        assert stage.post("chat", CHAT, Host=host, **OWNER)[0] == 200


@unlocked
def test_unsupported_paths_are_counted_without_tokens_and_ids(stage: Stage) -> None:
    token = opened(stage)["api_key"]
    for method, path in (
        ("POST", f"/r/{token}/v1/embeddings"),
        ("POST", f"/r/{token}/feedback"),
        ("GET", "/v1/files/file-0123456789abcdef"),
        ("GET", "/v1/files/file-9876543210fedcba"),
        ("GET", "/webhook/Plant0123456789%20x"),
        ("GET", "/health/1"),
    ):
        assert send(method, stage.url + path, {} if method == "POST" else None)[0] in (403, 404)
    counts = {"/v1/embeddings": 1, "/feedback": 1, "/v1/files/*": 2, "/webhook/*": 1, "/health/*": 1}
    assert stage.gateway.stats()["refused_paths"] == counts
