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
from assay.errors import ConfigError
from assay.traces import Rollout, Store
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.upstreams import upstream_of
from rigs.serving import gateway_process, post, send, served
from rigs.upstream import ScriptedUpstream

KEY = "gateway-key-1"
OWNER = {"Authorization": f"Bearer {KEY}"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
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


class Stage:
    def __init__(self, gateway: Gateway, upstream: ScriptedUpstream, url: str) -> None:
        self.gateway, self.upstream, self.url, self.store = gateway, upstream, url, gateway.store

    def stored(self) -> dict[str, Rollout]:
        self.store.flush()
        return {r.id: self.store.rollout(r.id) for r in self.store.rollouts()}

    def opened(self, **fields: Any) -> dict[str, str]:
        return post(f"{self.url}/assay/rollouts", fields, Authorization=f"Bearer {self.gateway.access.key}")[1]


@pytest.fixture
def stage(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Stage]:
    upstream = ScriptedUpstream()
    options = dict(getattr(request, "param", {"key": KEY}))
    with Store(tmp_path / "s.db") as store, served(upstream.app()) as behind:
        gateway = Gateway(
            store, upstream_of("m", base=behind, **options.pop("upstream", {"key": "upstream-secret"})), **options
        )
        with served(gateway.app()) as url:
            yield Stage(gateway, upstream, url)


def managed(stage: Stage, rollout: str, **headers: str) -> dict[str, int]:
    statuses = {}
    for method, path, body in MANAGED:
        sent = json.loads(json.dumps(body).replace("{}", rollout)) if body else body
        statuses[f"{method} {path}"] = send(method, stage.url + path.format(rollout), sent, **headers)[0]
    return statuses


@pytest.mark.parametrize("how", ["path", "bearer", "x-api-key", "api-key"])
def test_a_rollouts_token_makes_calls_of_that_rollout(stage: Stage, how: str) -> None:
    opened = stage.opened(task_id="t")
    assert KEY not in json.dumps(opened)
    token = opened["api_key"]
    address = f"{opened['base_url']}/chat/completions" if how == "path" else f"{stage.url}/v1/chat/completions"
    headers = {} if how == "path" else {"Authorization": f"Bearer {token}"} if how == "bearer" else {how: token}
    assert post(address, CHAT, **headers)[0] == 200
    (rollout,) = stage.stored().values()
    assert (rollout.id, rollout.task_id, len(rollout.transitions)) == (opened["id"], "t", 1)
    sent = json.dumps(stage.upstream.headers)
    assert "upstream-secret" in sent
    assert token not in sent


@pytest.mark.parametrize("stage", [{"key": KEY}, {}], indirect=True, ids=["with a key", "open"])
def test_a_rollouts_token_permits_only_calls(stage: Stage) -> None:
    opened = stage.opened()
    token = opened["api_key"]
    for headers in ({"Authorization": f"Bearer {token}"}, {"x-api-key": token}):
        assert set(managed(stage, opened["id"], **headers).values()) == {403}
    assert set(managed(stage, token).values()) <= {401, 403}
    rollout = stage.stored()[opened["id"]]
    assert (rollout.status, rollout.score, rollout.human_rating) == ("running", None, None)
    assert (stage.gateway.upstream.name, len(stage.stored())) == ("m", 1)


@pytest.mark.parametrize("stage", [{}], indirect=True)
def test_without_a_key_calls_are_open_and_other_requests_need_the_generated_key(stage: Stage) -> None:
    assert post(f"{stage.url}/v1/chat/completions", CHAT)[0] == 200
    assert send("GET", f"{stage.url}/v1/models", None)[0] == 200
    assert post(f"{stage.url}/r/my-run/v1/chat/completions", CHAT)[0] == 200
    opened = stage.opened(id="x")
    assert set(managed(stage, opened["id"]).values()) == {401}
    assert stage.gateway.upstream.name == "m"
    statuses = managed(stage, opened["id"], Authorization=f"Bearer {stage.gateway.access.key}")
    closed = {"POST /r/{}/close": 404}  # it was closed two lines before
    assert statuses == dict.fromkeys(statuses, 200) | closed
    assert len(stage.gateway.access.key) >= 32


def test_generated_keys_differ(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        keys = {Gateway(store, upstream_of("m", base="http://127.0.0.1:9")).access.key for _ in range(3)}
    assert len(keys) == 3


def test_a_token_is_valid_only_for_its_rollout_and_cannot_be_forged(stage: Stage) -> None:
    mine, other = stage.opened(), stage.opened()
    chat = f"{stage.url}/v1/chat/completions"
    bearer = {"Authorization": f"Bearer {mine['api_key']}"}
    assert post(chat, CHAT, **bearer, **{"x-assay-rollout": other["id"]})[0] == 403
    assert post(f"{stage.url}/r/{other['id']}/v1/chat/completions", CHAT, **bearer)[0] == 403
    assert post(f"{other['base_url']}/chat/completions", CHAT, **bearer)[0] == 403
    forged = f"rollout-{other['id']}-{mine['api_key'][-32:]}"
    for address, headers in (
        (chat, {"Authorization": f"Bearer {forged}"}),
        (f"{stage.url}/r/{forged}/v1/chat/completions", {}),
        (f"{stage.url}/r/{other['id']}/v1/chat/completions", {}),
        (chat, {"Authorization": f"Bearer rollout-{other['id']}"}),
        (chat, {"x-assay-rollout": other["id"]}),
        (chat, {"Authorization": f"Bearer {KEY}.{other['id']}x"}),
    ):
        assert post(address, CHAT, **headers)[0] == 401, (address, headers)
    assert all(not rollout.transitions for rollout in stage.stored().values())
    assert post(chat, CHAT, **bearer, **{"x-assay-rollout": mine["id"]})[0] == 200


@pytest.mark.parametrize("stage", [{}], indirect=True)
def test_a_token_of_another_gateway_is_refused_also_if_calls_are_open(stage: Stage) -> None:
    status, reply = post(
        f"{stage.url}/v1/chat/completions", CHAT, Authorization=f"Bearer rollout-{'0' * 32}-{'1' * 32}"
    )
    assert (status, "not of this gateway's key" in reply["error"]["message"]) == (401, True)
    assert stage.stored() == {}


def test_a_token_is_valid_as_long_as_the_key(stage: Stage, tmp_path: Path) -> None:
    token = stage.opened()["api_key"]
    with Store(tmp_path / "s.db") as store, served(Gateway(store, stage.gateway.upstream, key=KEY).app()) as again:
        assert post(f"{again}/r/{token}/v1/chat/completions", CHAT)[0] == 200


@pytest.mark.parametrize("flushed", [True, False], ids=["in the store", "at hand"])
@pytest.mark.parametrize(
    "end",
    [{"reward": 1.0}, {"prediction": "mine"}, {}, {"status": "failed"}, {"status": "error", "error": "broke"}],
    ids=str,
)
def test_a_token_cannot_add_calls_to_a_closed_rollout(stage: Stage, end: dict[str, Any], flushed: bool) -> None:
    opened = stage.opened()
    chat = f"{opened['base_url']}/chat/completions"
    assert post(chat, CHAT)[0] == 200
    assert post(f"{stage.url}/assay/rollouts/{opened['id']}/close", end, **OWNER)[0] == 200
    before = stage.stored()[opened["id"]]
    if flushed:
        stage.gateway.rollouts.ended.clear()
    for headers in ({}, {"x-assay-end": "1"}):
        status, reply = post(chat, {"messages": [{"role": "user", "content": "POISON"}]}, **headers)
        assert (status, "has ended" in reply["error"]["message"]) == (403, True)
    assert stage.stored() == {opened["id"]: before}
    assert stage.upstream.calls == 1


def test_a_token_cannot_add_calls_to_a_rollout_that_it_ended(stage: Stage) -> None:
    chat = f"{stage.opened()['base_url']}/chat/completions"
    assert [post(chat, CHAT, **{"x-assay-end": "1"})[0] for _ in range(2)] == [200, 403]


def test_an_idle_rollout_continues_with_its_token_until_it_is_scored(stage: Stage) -> None:
    opened = stage.opened()
    chat = f"{opened['base_url']}/chat/completions"
    for _ in range(2):
        assert post(chat, CHAT)[0] == 200
        stage.gateway.rollouts.sweep(all_of_them=True)
    assert post(f"{stage.url}/assay/rollouts/{opened['id']}/reward", {"reward": 1}, **OWNER)[0] == 200
    assert post(chat, CHAT)[0] == 403
    assert (
        post(f"{stage.url}/v1/chat/completions", CHAT, **OWNER, **{"x-assay-rollout": opened["id"]})[0] == 200
    )  # the owner opens it again
    assert post(chat, CHAT)[0] == 403
    assert len(stage.stored()[opened["id"]].transitions) == 3


def test_a_scored_answer_is_kept_if_the_owner_calls_again(stage: Stage) -> None:
    opened = stage.opened()
    name = {"x-assay-rollout": opened["id"]}
    assert post(f"{stage.url}/v1/chat/completions", CHAT, **OWNER, **name)[0] == 200
    assert post(f"{stage.url}/assay/rollouts/{opened['id']}/close", {"reward": 1}, **OWNER)[0] == 200
    other = {"messages": [{"role": "user", "content": "another"}]}
    assert post(f"{stage.url}/v1/chat/completions", other, **OWNER, **name, **{"x-assay-end": "1"})[0] == 200
    rollout = stage.stored()[opened["id"]]
    assert (rollout.status, rollout.score, rollout.prediction, len(rollout.transitions)) == (
        "done",
        1.0,
        {"answer": "echo: hello"},
        2,
    )


@pytest.mark.parametrize("end", [{"reward": 1.0}, {"prediction": "mine"}], ids=str)
def test_an_answer_after_the_close_changes_neither_score_nor_prediction(tmp_path: Path, end: dict[str, Any]) -> None:
    begun, released = threading.Event(), threading.Event()

    async def answer(request: web.Request) -> web.Response:
        prompt = (await request.json())["messages"][0]["content"]
        if prompt == "POISON":
            begun.set()
            await asyncio.to_thread(released.wait, 30)
        return web.json_response(
            {"choices": [{"message": {"role": "assistant", "content": prompt}, "finish_reason": "stop"}]}
        )

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    with Store(tmp_path / "s.db") as store, served(app) as behind:
        gateway = Gateway(store, upstream_of("m", base=behind), key=KEY)
        with served(gateway.app()) as url:
            stage = Stage(gateway, ScriptedUpstream(), url)
            opened = stage.opened()
            chat = f"{opened['base_url']}/chat/completions"
            assert post(chat, CHAT)[0] == 200
            late = threading.Thread(target=post, args=(chat, {"messages": [{"role": "user", "content": "POISON"}]}))
            late.start()
            assert begun.wait(120)
            assert post(f"{url}/assay/rollouts/{opened['id']}/close", end, **OWNER)[0] == 200
            released.set()
            late.join(120)
            rollout = stage.stored()[opened["id"]]
            assert (rollout.status, [t.output for t in rollout.transitions]) == ("done", ["hello", "POISON"])
            assert (rollout.score, rollout.prediction) == (
                end.get("reward"),
                {"answer": end.get("prediction", "hello")},
            )


def test_an_agent_cannot_choose_its_comparison_group(stage: Stage) -> None:
    opened = stage.opened()
    headers = {"x-assay-group": "an easy one", "x-assay-task": "an easy one"}
    assert post(f"{opened['base_url']}/chat/completions", CHAT, **headers)[0] == 200
    assert post(f"{stage.url}/r/named/v1/chat/completions", CHAT, **OWNER, **headers)[0] == 200
    stored = stage.stored()
    agents = stored.pop(opened["id"])
    assert agents.task_id == agents.group_id == task_key(agents.inputs)
    assert [(owners.task_id, owners.group_id) for owners in stored.values()] == [("an easy one", "an easy one")]


@pytest.mark.parametrize("stage", [{"key": KEY, "upstream": {}}], indirect=True)
def test_with_a_token_in_the_address_a_callers_own_key_goes_to_the_upstream(stage: Stage) -> None:
    opened = stage.opened()
    assert post(f"{opened['base_url']}/chat/completions", CHAT, Authorization="Bearer sk-mine")[0] == 200
    assert (
        post(
            f"{stage.url}/v1/chat/completions",
            CHAT,
            **{"x-api-key": opened["api_key"], "Authorization": "Bearer sk-mine"},
        )[0]
        == 200
    )
    assert post(f"{stage.url}/v1/chat/completions", CHAT, **OWNER)[0] == 200
    assert [headers.get("Authorization") for headers in stage.upstream.headers] == [
        "Bearer sk-mine",
        "Bearer sk-mine",
        None,
    ]
    assert KEY not in json.dumps(stage.upstream.headers)
    assert opened["api_key"] not in json.dumps(stage.upstream.headers)


def test_rollouts_that_no_gateway_recorded_are_never_changed(stage: Stage) -> None:
    sealed = Rollout(
        source="program",
        run_id="compile-1",
        phase="test",
        split="test",
        status="done",
        score=0.25,
        prediction={"answer": "a"},
    )
    running = Rollout(source="program", run_id="compile-1", phase="test", split="test", status="running")
    for rollout in (sealed, running):
        stage.store.put_rollout(rollout)
    before = stage.stored()
    for rollout in (sealed, running):
        for address, headers in (
            (f"/r/{rollout.id}/v1/chat/completions", {}),
            ("/v1/chat/completions", {"x-assay-rollout": rollout.id}),
            (f"/r/{stage.gateway.access.token(rollout.id)}/v1/chat/completions", {}),
        ):
            status, reply = post(stage.url + address, CHAT, **OWNER, **headers)
            assert (status, "not recorded by a gateway" in reply["error"]["message"]) == (404, True)
        for path, body in (
            (f"/assay/rollouts/{rollout.id}/reward", {"reward": 1}),
            (f"/assay/rollouts/{rollout.id}/reward", {"reward": 1, "t": 0}),
            (f"/assay/rollouts/{rollout.id}/close", {"reward": 1, "prediction": "b"}),
            (f"/assay/rollouts/{rollout.id}/close", {"prediction": "b"}),
            ("/feedback", {"rollout": rollout.id, "rating": 1}),
            ("/assay/rollouts", {"id": rollout.id}),
        ):
            assert post(stage.url + path, body, **OWNER)[0] in (404, 422), path
    assert stage.stored() == before
    assert stage.upstream.calls == 0


def test_no_rollout_is_opened_while_the_store_cannot_be_read(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    from assay.errors import StoreError

    def unreadable(*_: object) -> Rollout:
        raise StoreError("the store is away")

    monkeypatch.setattr(stage.store, "rollout", unreadable)
    assert post(f"{stage.url}/r/my-run/v1/chat/completions", CHAT, **OWNER)[0] == 503
    assert list(stage.store.rollouts()) == []


@pytest.mark.parametrize("stage", [{"key": KEY}, {}], indirect=True, ids=["with a key", "open"])
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8321", "localhost.evil.example", "127.0.0.1.evil.example", "", "x@127.0.0.1"]
)
def test_requests_by_dns_rebinding_are_refused_on_every_path(stage: Stage, host: str) -> None:
    opened = stage.opened()
    owner = {"Authorization": f"Bearer {stage.gateway.access.key}", "Host": host}
    assert set(managed(stage, opened["id"], **owner).values()) == {403}
    for method, path in (
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("GET", "/health"),
        ("GET", "/"),
        ("GET", "/nothing"),
    ):
        assert send(method, stage.url + path, CHAT if method == "POST" else None, **owner)[0] == 403, path
    assert stage.upstream.calls == 0


@pytest.mark.parametrize("stage", [{"key": KEY, "names": ["Gateway.internal"]}], indirect=True)
@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:99", "127.0.0.1:8321", "10.1.2.3", "[::1]:8321", "app.localhost", "gateway.internal.:80"],
)
def test_addresses_local_names_and_allowed_names_are_accepted(stage: Stage, host: str) -> None:
    assert send("POST", f"{stage.url}/v1/chat/completions", CHAT, Host=host, **OWNER)[0] == 200


@pytest.mark.parametrize("stage", [{}], indirect=True)
def test_unsupported_paths_are_counted_without_their_token(stage: Stage) -> None:
    token = stage.opened()["api_key"]
    assert post(f"{stage.url}/r/{token}/v1/embeddings", {})[0] == 403
    assert post(f"{stage.url}/r/{token}/feedback", {})[0] == 404
    assert stage.gateway.stats()["refused_paths"] == {"/v1/embeddings": 1, "/feedback": 1}


@pytest.mark.parametrize("stage", [{}], indirect=True)
def test_unsupported_paths_are_counted_without_ids(stage: Stage) -> None:
    for path in (
        "/v1/files/file-0123456789abcdef",
        "/v1/files/file-9876543210fedcba",
        "/webhook/Plant0123456789%20x",
        "/health/1",
    ):
        send("GET", f"{stage.url}{path}", None)
    assert stage.gateway.stats()["refused_paths"] == {"/v1/files/*": 2, "/webhook/*": 1, "/health/*": 1}


def test_serve_prints_its_generated_key(tmp_path: Path) -> None:
    process, announced = gateway_process(tmp_path / "s.db", "http://127.0.0.1:9")
    try:
        assert send("GET", f"{announced['url']}/assay/stats", None)[0] == 401
        assert (
            send("GET", f"{announced['url']}/assay/stats", None, Authorization=f"Bearer {announced['key']}")[0] == 200
        )
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=120)
    assert f"ASSAY_KEY={announced['key']}" in errors


def test_a_key_that_is_short_or_missing_beyond_loopback_is_refused(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        with pytest.raises(ConfigError, match="set the key that callers send"):
            Gateway(store, upstream_of("m", base="http://127.0.0.1:9"), host="0.0.0.0")
        with pytest.raises(ConfigError, match="at least 8"):
            Gateway(store, upstream_of("m", base="http://127.0.0.1:9"), key="short")
