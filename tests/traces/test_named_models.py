"""Which model a row of the gateway names, where the upstream's address is all that was given."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from assay.errors import ConfigError
from assay.traces import Rollout, Store
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.upstreams import upstream_of
from rigs.serving import served
from rigs.upstream import ScriptedUpstream

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
GEMINI = "/v1beta/models/small:generateContent"


class Stage:
    def __init__(self, gateway: Gateway, url: str) -> None:
        self.gateway, self.url = gateway, url

    def post(self, path: str, body: Any, **headers: str) -> dict[str, Any]:
        sent_headers = {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {self.gateway.access.key}",
            **headers,
        }
        request = urllib.request.Request(self.url + path, data=json.dumps(body).encode(), headers=sent_headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                raw = answer.read()
        except urllib.error.HTTPError as error:
            raw = error.read()
        reply: dict[str, Any] = json.loads(raw) if raw.startswith(b"{") else {}
        return reply

    def rollouts(self) -> list[Rollout]:
        self.gateway.store.flush()
        return [self.gateway.store.rollout(rollout.id) for rollout in self.gateway.store.rollouts()]


@pytest.fixture
def stage(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Stage]:
    upstream = ScriptedUpstream(name="small-2025-01")
    with Store(tmp_path / "s.db") as store, served(upstream.app()) as behind:
        gateway = Gateway(store, upstream_of(getattr(request, "param", None), base=behind))
        with served(gateway.app()) as url:
            yield Stage(gateway, url)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", list(PATHS))
def test_a_row_names_the_model_that_the_answer_names(stage: Stage, dialect: str, stream: bool) -> None:
    prompt = {"responses": {"input": "a"}, "completions": {"prompt": "a"}}.get(
        dialect, {"messages": [{"role": "user", "content": "a"}]}
    )
    stage.post(PATHS[dialect], {"model": "small", "stream": stream, "max_tokens": 9, **prompt})
    (rollout,) = stage.rollouts()
    assert (rollout.model, [call.model for call in rollout.transitions]) == ("small-2025-01", ["small-2025-01"])


def test_geminis_model_is_read_from_the_path_and_the_answers_version(stage: Stage) -> None:
    stage.post(GEMINI, {"contents": [{"role": "user", "parts": [{"text": "a"}]}]})
    stage.post(GEMINI, {"contents": [{"role": "user", "parts": [{"text": "#500"}]}]})
    assert sorted(rollout.transitions[0].model for rollout in stage.rollouts()) == ["small", "small-2025-01"]


@pytest.mark.parametrize("stage", ["openai/tuned"], indirect=True)
def test_rows_have_the_model_passed_to_serve(stage: Stage) -> None:
    stage.post(PATHS["chat"], {"model": "small", "messages": [{"role": "user", "content": "a"}]})
    (rollout,) = stage.rollouts()
    assert (rollout.model, rollout.transitions[0].model) == ("openai/tuned", "openai/tuned")


@pytest.mark.parametrize(("consent", "stored"), [(True, "yes"), (False, "no"), ("given", "given"), (None, None)])
def test_consent_may_be_a_boolean(stage: Stage, consent: Any, stored: str | None) -> None:
    assert "id" in stage.post("/assay/rollouts", {"task_id": "t", "consent": consent})
    assert [rollout.consent for rollout in stage.rollouts()] == [stored]


@pytest.mark.parametrize("model", ["stockbot-1", "nobody/stockbot-1"])
def test_a_model_of_no_known_provider_is_refused_before_any_call(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=f"model='{model}' names no provider.*PROVIDER/NAME.*upstream"):
        upstream_of(model)
    assert capfd.readouterr().out == ""  # litellm's own advice is not for standard output
    assert upstream_of("gpt-4o").name == "gpt-4o"


def test_the_error_for_an_unknown_field_of_a_rollout_lists_the_fields(stage: Stage) -> None:
    message = stage.post("/assay/rollouts", {"task": "x", "id": "mine", "group": "g"})["error"]["message"]
    assert message.startswith("a rollout has no field 'task'; its fields are id, group, task_id, ")
