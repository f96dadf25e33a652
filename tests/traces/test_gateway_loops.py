"""Loops in answers that pass through a gateway: marked, and ended only if asked."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from assay.errors import ConfigError, FailureKind
from assay.traces import Store, Transition
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.upstreams import upstream_of
from rigs.serving import get, served
from rigs.upstream import ScriptedUpstream

LOOP = "and so we check the sum once more " * 60
PATHS = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "gemini": "/v1beta/models/m:streamGenerateContent?alt=sse",
}


class Place:
    def __init__(self, gateway: Gateway, url: str) -> None:
        self.gateway, self.url = gateway, url

    def stream(self, dialect: str, text: str) -> str:
        body: dict[str, Any] = {"model": "m", "stream": True, "max_tokens": 900}
        message = {"role": "user", "content": text}
        if dialect == "responses":
            body = {"model": "m", "stream": True, "input": text}
        elif dialect == "gemini":
            limit = {"maxOutputTokens": 900}
            body = {"contents": [{"role": "user", "parts": [{"text": text}]}], "generationConfig": limit}
        else:
            body["messages"] = [message]
        request = urllib.request.Request(
            self.url + PATHS[dialect], data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return str(answer.read().decode())

    def transition(self) -> Transition:
        self.gateway.store.flush()
        (rollout,) = self.gateway.store.rollouts()
        return self.gateway.store.rollout(rollout.id).transitions[0]


@pytest.fixture
def place(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Place]:
    # what arrives together is passed on together: a stream that is to be stopped is slow enough for a busy machine
    upstream = ScriptedUpstream(chunks=60, delay_s=0.025 if request.param == "stop" else 0.004)
    with Store(tmp_path / "s.db") as store, served(upstream.app()) as behind:
        gateway = Gateway(store, upstream_of("echo", base=behind), run_id="run", loops=request.param)
        with served(gateway.app()) as url:
            yield Place(gateway, url)


@pytest.mark.parametrize("place", ["stop"], indirect=True)
@pytest.mark.parametrize("dialect", list(PATHS))
def test_a_stop_ends_the_stream_where_the_loop_is_found(place: Place, dialect: str) -> None:
    place.stream(dialect, LOOP)
    transition = place.transition()
    assert transition.failure is FailureKind.LOOP
    assert "repeated itself" in str(transition.error)
    assert 4 <= transition.output.count("check") < 40
    assert place.gateway.stats()["loops"]["stopped"] == 1
    counts = get(f"{place.url}/assay/stats", Authorization=f"Bearer {place.gateway.access.key}")
    assert counts["loops"]["stopped"] == 1
    # the limit of the request is 900 tokens; the loop is found at a check, every 16 words
    assert counts["loops"]["tokens_saved"] == (0 if dialect == "responses" else 900 - 80)


@pytest.mark.parametrize("place", ["stop"], indirect=True)
def test_a_client_reads_a_stopped_stream_as_cut_by_its_limit(place: Place) -> None:
    client = openai.OpenAI(base_url=f"{place.url}/v1", api_key="none", max_retries=0)
    chunks = list(client.chat.completions.create(model="m", messages=[{"role": "user", "content": LOOP}], stream=True))
    assert chunks[-1].choices[0].finish_reason == "length"
    first, last = chunks[0], chunks[-1]
    assert (last.id, last.created, last.model) == (first.id, first.created, first.model)  # strict clients need them
    assert last.id


@pytest.mark.parametrize("place", ["alarm", "stop"], indirect=True)
@pytest.mark.parametrize("dialect", list(PATHS))
def test_ordinary_answers_are_not_marked(place: Place, dialect: str) -> None:
    text = " ".join(f"word{number}" for number in range(300))
    assert "word299" in place.stream(dialect, text)
    assert place.transition().failure is None
    assert place.gateway.stats()["loops"] == {"alarms": 0, "stopped": 0, "repeated_words": 0, "tokens_saved": 0}


@pytest.mark.parametrize("place", ["off"], indirect=True)
def test_loop_detection_off_marks_no_answer(place: Place) -> None:
    place.stream("chat", LOOP)
    assert place.transition().failure is None


@pytest.mark.parametrize("place", ["stop"], indirect=True)
def test_an_answer_in_one_piece_is_marked_and_passed_on(place: Place) -> None:
    client = openai.OpenAI(base_url=f"{place.url}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": LOOP}])
    assert str(answer.choices[0].message.content).count("check") == 60
    assert (place.transition().failure, place.transition().error) == (FailureKind.LOOP, None)


def test_an_unknown_action_is_refused(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store, pytest.raises(ConfigError, match="loops='never'"):
        Gateway(store, upstream_of("echo", base="http://127.0.0.1:9"), loops="never")
