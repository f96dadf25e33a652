"""The Python functions of `serve` and `models`, and keywords of a provider."""

import threading
from pathlib import Path
from typing import Any

import pytest

import assay
from assay.commands.models import list_models, pull_model
from assay.commands.serve import ServeReport, Serving, serve
from assay.errors import AssayError, ModelError
from assay.traces import Store
from rigs.projects import Said
from rigs.serving import post, refusing, served
from rigs.upstream import ScriptedUpstream

CALL = {"messages": [{"role": "user", "content": "six times seven?"}]}
KEY = "k" * 8


def while_serving(client: Any, **options: Any) -> tuple[Any, Serving, ServeReport]:
    """What a client gets that runs in a thread and then stops the gateway."""
    results: list[Any] = []
    started: list[Serving] = []

    def on_start(serving: Serving) -> None:
        started.append(serving)
        threading.Thread(target=call).start()

    def call() -> None:
        try:
            results.append(client(started[0].url))
        finally:
            started[0].stop()

    report = serve(model="m", port=0, store="s.db", on_start=on_start, **options)
    return results[0], started[0], report


def test_serve_records_calls_until_it_is_stopped_from_another_thread(own_folder: Path) -> None:
    def client(url: str) -> int:
        return post(f"{url}/v1/chat/completions", CALL, Authorization=f"Bearer {KEY}")[0]

    with served(ScriptedUpstream().app()) as behind:
        status, gateway, report = while_serving(client, upstream=behind, key=KEY)
    gateway.stop()  # it has ended: nothing happens
    assert (status, report.calls, report.stored, report.unrecorded) == (200, 1, 1, 0)
    with Store("s.db") as store:
        assert store.stats(run_id=gateway.run)["transitions"] == 1


def test_serve_says_that_its_upstream_does_not_answer(own_folder: Path) -> None:
    said = Said()
    with refusing() as dead:
        (status, reply), _, _ = while_serving(
            lambda url: post(f"{url}/v1/chat/completions", CALL), upstream=f"{dead}/v1", progress=said
        )
    message = f"the upstream at {dead} does not answer: no server listens there"
    assert (status, reply["error"]["message"]) == (502, message)
    assert said.lines[0] == f"warning: no server answers at {dead}; calls fail until one does"
    assert said.lines[1].startswith("warning: 1 call failed")


def test_serve_names_the_address_that_is_taken(own_folder: Path) -> None:
    with served(ScriptedUpstream().app()) as behind:
        port = int(behind.rpartition(":")[2])
        with pytest.raises(AssayError, match=f"cannot listen on 127.0.0.1:{port}: .* Choose another port"):
            serve(model="m", upstream=behind, port=port, store="s.db")


def test_models_are_listed_with_the_name_that_selects_them() -> None:
    report = list_models()
    assert [entry.name for entry in report.models if not entry.name.startswith("embedded/")] == []
    assert report.to_dict()["models"][0].keys() == {"name", "size", "licence", "path"}
    with pytest.raises(ModelError, match="no embedded model is called 'nonsense'"):
        pull_model("nonsense")


def test_keywords_of_a_provider_reach_it() -> None:
    """vLLM's `min_tokens` is not a misspelt `max_tokens`."""
    assert assay.get_lm("openai/m", min_tokens=3, api_base="http://127.0.0.1:9/v1", api_key="k").model == "openai/m"
